"""What is said of devices, attention and threads, for machines other than this one too."""

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig

from eagle_ray.doctor import devices as compute
from eagle_ray.doctor.devices import attention, devices, threads
from eagle_ray.models.runtime import quantized_instructions


def test_attention_says_why_it_is_explicit():
    plain, soft = (
        attention(shape, "cpu", torch.float32) for shape in (LlamaConfig(), Gemma2Config())
    )
    assert plain.facts["path"] == "scaled_dot_product_attention"
    assert soft.facts["path"] != plain.facts["path"] and "its soft-cap" in soft.says


def test_quantised_layers_are_said_to_run_as_they_are_stored():
    finding = attention(LlamaConfig(), "cpu", torch.float32, stored="awq, 4 bits")
    assert "linear layers multiplied as they are stored (awq, 4 bits)" in finding.says
    assert f" by {quantized_instructions()}, dense ones" in finding.says


def test_a_gpu_without_kernels_is_explained(monkeypatch):
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "portable")
    monkeypatch.setattr(compute, "packs_linears", lambda *_: False)
    finding = attention(LlamaConfig(), "cuda", torch.float32)
    assert (
        "no Triton kernels: EAGLE_RAY_KERNELS=portable" in finding.says
        and "unset" in finding.advice
    )
    monkeypatch.setattr(compute, "why_not", lambda device: None)
    assert (
        attention(Gemma2Config(), "cuda", torch.float32).facts["path"] == "tree attention in Triton"
    )
    huge = attention(LlamaConfig(head_dim=512), "cuda", torch.float32)
    assert "larger than 256" in huge.says and huge.advice is None


@pytest.mark.parametrize(
    "reason, fix",
    [
        (
            "Triton 3.7.1 fails here: Failed to find C compiler. Please specify via CC",
            "`apt-get install gcc libc6-dev`",
        ),
        (
            "Triton 3.7.1 fails here: [Errno 30] Read-only file system: '/root/.triton'",
            "TRITON_CACHE_DIR",
        ),
        ("triton is not installed", "install triton"),
    ],
)
def test_missing_kernels_are_advice_and_a_problem_if_required(reason, fix, monkeypatch):
    monkeypatch.setattr(compute, "packs_linears", lambda *_: False)
    monkeypatch.setattr(compute, "why_not", lambda device: reason)
    finding, required = (
        attention(LlamaConfig(), "cuda", torch.float32, must) for must in (False, True)
    )
    assert fix in finding.advice and finding.problem is None
    assert fix in required.problem and "execution.require_kernels" in required.problem


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_a_driver_too_old_for_torch_is_told_by_its_version(monkeypatch):
    def init() -> None:
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 12040). Please update ..."
        )

    monkeypatch.setattr(compute.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    assert "too old (found version 12040): torch's CUDA 13.0 needs a newer" in (
        devices("cuda").problem or ""
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
@pytest.mark.parametrize("wanted, level", [("auto", "advice"), ("cuda", "problem")])
def test_a_driver_that_torch_cannot_use_is_told(wanted, level, monkeypatch):
    monkeypatch.setattr(compute.shutil, "which", lambda name: f"/usr/bin/{name}")
    finding = devices(wanted)
    assert finding.level == level and "NVIDIA driver" in (finding.advice or finding.problem)


def test_idle_cores_are_the_users_own_doing(monkeypatch):
    monkeypatch.setattr(compute, "num_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "leaves 6 cores idle" in threads(2, 1).advice
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads(2, 1).level == threads(2, 4).level == "ok"
