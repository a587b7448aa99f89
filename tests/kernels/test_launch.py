"""Kernels run where their tensors are, whichever device is CUDA's current one."""

import ast
from pathlib import Path

import pytest
import torch

from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.kernels import sample as kernel
from eagle_ray.kernels.availability import launch, why_not
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.sampling.sampler import sample

KERNELS = Path(kernel.__file__).parent


class CurrentDevice:
    """CUDA's current device, as torch tells of it and sets it."""

    def __init__(self, index: int):
        self.index = index

    def device(self, index: int) -> "CurrentDevice":
        self.wanted = index
        return self

    def __enter__(self) -> None:
        self.before, self.index = self.index, self.wanted

    def __exit__(self, *_: object) -> None:
        self.index = self.before


class OtherDeviceTensor(torch.Tensor):
    """On the second GPU, as far as it says."""

    def get_device(self) -> int:
        return 1


@pytest.mark.parametrize("current", [0, 1])
def test_a_launch_is_on_its_tensors_device_and_changes_none(current, monkeypatch):
    now, seen = CurrentDevice(current), []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now.index)
    monkeypatch.setattr(torch.cuda, "device", now.device)
    kernel = {(3,): lambda *args, **constants: seen.append((now.index, len(args), constants))}
    launch(kernel, (3,))(7, torch.zeros(1).as_subclass(OtherDeviceTensor), torch.zeros(1), SIZE=2)
    assert seen == [(1, 3, {"SIZE": 2})] and now.index == current


def test_nothing_is_launched_but_here():
    """`kernel[grid](...)` stands in `launch` alone."""
    for path in KERNELS.glob("*.py"):
        calls = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        ]
        direct = [call for call in calls if isinstance(call.func, ast.Subscript)]
        assert bool(direct) == (path.name == "availability.py"), path


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU at most")
def test_the_second_gpu_picks_as_the_first_does(fused):
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9, seed=1)] * 2
    found = []
    for device in ("cuda:0", "cuda:1"):
        rows = torch.arange(4, device=device)
        found.append(
            sample(logits.to(device), SamplingBatch.of(params, device), rows, rows).tolist()
        )
    assert found[0] == found[1]


def test_tests_choose_the_kernels_themselves():
    """On a GPU `auto` would run them, and a test would compare them with themselves."""
    assert why_not(torch.device("cuda")) == "EAGLE_RAY_KERNELS=portable"
