"""What a failing worker says of itself, and whether another might do better."""

import pytest
import torch

from eagle_ray.batch.worker.crash_isolation import LOOK, SMALLER, Fault, classify_error
from eagle_ray.core.errors import EngineError, RankError, UnfitDevice


def engine_error(cause: Exception) -> EngineError:
    """As AsyncEngine raises it."""
    error = EngineError(f"the engine failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "says", "is_own"),
    [
        (MemoryError(), SMALLER, True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), SMALLER, True),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nmore"),
            SMALLER,
            True,
        ),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            SMALLER,
            True,
        ),
        (RuntimeError("CUDA error: an illegal memory access was encountered\nmore"), LOOK, True),
        (RuntimeError("CUDA error: device-side assert triggered"), LOOK, True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), LOOK, True),
        (UnfitDevice("require_kernels: true"), "require_kernels: true", True),
        (IndexError("list index out of range"), "IndexError: list index out of range", False),
        (UnfitDevice("the GPU has 24 GB"), "the GPU has 24 GB", True),
        (EngineError("target and head are not a pair"), "target and head are not a pair", False),
    ],
)
@pytest.mark.parametrize("wrapped", [lambda error: error, engine_error])
def test_faults_are_told_apart(error, says, is_own, wrapped):
    fault = classify_error(wrapped(error))
    assert says in fault.line and fault.is_local == is_own and "\n" not in fault.line


@pytest.mark.parametrize(
    ("reason", "line", "is_local", "is_transient"),
    [
        ("rank 1 failed (UnfitDevice: the GPU has 24 GB)", "the GPU has 24 GB", True, False),
        ("rank 1 failed (EngineError: tensor x: odd\nmore)", "tensor x: odd", False, False),
        (
            "rank 0 of 2: rank 1 was ended by signal 9",
            "rank 0 of 2: rank 1 was ended by signal 9",
            True,
            True,
        ),
        ("rank 1 failed (RankError: its step)", "rank 1 failed (RankError: its step)", True, True),
    ],
)
def test_what_ended_a_rank_is_what_ends_its_engine(reason, line, is_local, is_transient):
    is_end = "signal" in reason
    for error in (RankError(reason), engine_error(RankError(reason))):
        assert classify_error(error) == Fault(line, is_local, is_transient, is_end)
