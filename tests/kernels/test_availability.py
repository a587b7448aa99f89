"""Where kernels run, where they do not and why, and that what cannot have them goes on without."""

import sys
from types import SimpleNamespace

import pytest
import torch

from eagle_ray.attention.cpu_attention import CpuMetadata
from eagle_ray.attention.metadata import TreeMetadata
from eagle_ray.attention.triton_attention import uses_triton
from eagle_ray.engine.verify import fallbacks
from eagle_ray.kernels import availability, cpu_ops
from eagle_ray.kernels.availability import is_triton_error, turn_off, use_triton, why_not
from eagle_ray.kernels.tree_metadata import unsupported_heads
from eagle_ray.kv.block_manager import BlockManager
from eagle_ray.kv.kv_cache import KVCache
from eagle_ray.models.graphs import CudaGraphRunner
from eagle_ray.requests.parameters import SamplingParams
from tests.support.kernels import compile_fails
from tests.support.toy_models import llama_engine, run

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def cleared_caches(monkeypatch):
    """Answers are kept; each test asks for the first time."""
    for asked in (availability.chosen, availability.why_not_cuda):
        asked.cache_clear()
    monkeypatch.setattr(availability, "failures", [])
    monkeypatch.delenv("EAGLE_RAY_KERNELS", raising=False)


@pytest.fixture
def gpu(monkeypatch):
    """A Tesla T4, as torch tells of it."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))


def test_a_cpu_runs_kernels_only_by_wish_and_by_the_interpreter(monkeypatch):
    assert "no CUDA device" in why_not(CPU)
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert why_not(CPU) is None and use_triton(CPU)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "no CUDA device" in why_not(CPU) and not use_triton(CPU)


def test_an_old_gpu_and_a_missing_triton_are_said_once(gpu, monkeypatch, messages, caplog):
    caplog.set_level("INFO", "eagle_ray")
    assert not use_triton(GPU) and not use_triton(GPU)
    assert [
        m for m in messages if "compute capability 7.5 is under 8.0" in m and "portable" in m
    ] == messages
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    monkeypatch.setattr(availability, "find_spec", lambda name: None)
    assert why_not(GPU) == "triton is not installed"


@pytest.mark.parametrize(
    "graphs, no_graphs", [(None, "EAGLE_RAY_GRAPHS=off"), (CudaGraphRunner("cpu", 4, 64), None)]
)
def test_an_engine_names_what_does_not_run_on_a_gpu(gpu, monkeypatch, graphs, no_graphs):
    """Nothing on a CPU, where neither kernels nor graphs are expected."""
    monkeypatch.setenv("EAGLE_RAY_GRAPHS", "off")
    keys = SimpleNamespace(device=GPU, dtype=torch.bfloat16, shape=(1, 64))
    target = SimpleNamespace(device=GPU, cache=SimpleNamespace(keys=keys, values=keys))
    kernels = {"kernels": "compute capability 7.5 is under 8.0"}
    assert fallbacks(target, None, graphs) == kernels | ({"graphs": no_graphs} if no_graphs else {})
    assert fallbacks(SimpleNamespace(device=CPU), None, None) == {}


@pytest.mark.parametrize("choice, says", [("portable", "=portable"), ("cuda", "is none of")])
def test_the_environment_has_its_say(choice, says, monkeypatch):
    monkeypatch.setenv("EAGLE_RAY_KERNELS", choice)
    assert says in why_not(GPU)


def test_model_unsupported_by_kernels_takes_the_portable_path(monkeypatch, messages, caplog):
    caplog.set_level("INFO", "eagle_ray")
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # on a machine with a GPU it is not set
    assert unsupported_heads(torch.float64, 64, 64) and unsupported_heads(torch.bfloat16, 320, 64)
    wide, narrow = (
        KVCache(BlockManager(1, 32), 1, 1, dim, torch.float32, "cpu") for dim in (320, 64)
    )
    assert uses_triton(narrow) and not uses_triton(wide) and not uses_triton(wide)
    assert len([m for m in messages if "heads of 320 numbers are larger than 256" in m]) == 1


def test_a_kernel_that_fails_turns_them_off_once(monkeypatch, messages):
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert use_triton(CPU)
    with pytest.raises(Exception, match="boom") as raised:
        compile_fails()
    assert is_triton_error(raised.value) and not is_triton_error(RuntimeError("CUDA error"))
    assert turn_off(raised.value) and not turn_off(raised.value)
    assert not use_triton(CPU) and not use_triton(GPU)
    assert [m for m in messages if "boom" in m and "portable path from now on" in m] == messages


@pytest.mark.parametrize(
    "layout, method", [(TreeMetadata, "attend"), (CpuMetadata, "attend_projected")]
)
def test_a_cpu_needs_nothing_of_triton(layout, method, monkeypatch, messages):
    for name in ("triton", "eagle_ray.kernels.flash_decoding"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    if layout is CpuMetadata and not cpu_ops.available(CPU, torch.float32):
        pytest.skip("cpu_ops is not compiled")
    monkeypatch.setattr(cpu_ops, "available", lambda *args: layout is CpuMetadata)
    attended = []
    attend = getattr(layout, method)
    monkeypatch.setattr(layout, method, lambda *args: attended.append(1) or attend(*args))
    run(llama_engine(1, 4, 2, 2), [[5, 6, 7]], [SamplingParams(max_tokens=4, ignore_eos=True)])
    assert attended and not [m for m in messages if "Triton" in m]
