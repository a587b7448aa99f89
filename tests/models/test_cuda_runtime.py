"""A target on a GPU pins how torch computes; one on a CPU changes nothing."""

import pytest
import torch

from eagle_ray.models.runtime import pin_cuda_numerics


@pytest.fixture
def backends(monkeypatch):
    """Torch's switches, as they are before a target is made, and restored afterwards."""
    matmul, was = torch.backends.cuda.matmul, torch.backends.cuda.cudnn_sdp_enabled()
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {name: getattr(matmul, name) for name in names}
    torch.backends.cuda.enable_cudnn_sdp(True)
    for name in names:
        setattr(matmul, name, True)
    yield lambda: (
        torch.backends.cuda.cudnn_sdp_enabled(),
        *(getattr(matmul, name) for name in names),
    )
    torch.backends.cuda.enable_cudnn_sdp(was)
    for name, value in before.items():
        setattr(matmul, name, value)


def test_a_gpu_gets_no_plan_per_length_and_no_reduced_sums(backends):
    pin_cuda_numerics(torch.device("cpu"))
    assert backends() == (True, True, True)
    pin_cuda_numerics(torch.device("cuda"))
    assert backends() == (False, False, False)
