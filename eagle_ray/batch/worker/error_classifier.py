"""Classify a worker's failure: whether other workers would meet it too, and what to do about it.

A fault of a device or its memory is local, and so is a device that is too small for the model. After such a fault the
actor starts another engine on its device. If that fails, too, the actor ends, and Ray starts it again, perhaps on
another device. A failure that any worker would meet, such as a missing model, ends the job. Errors are recognized by
name and text, so the driver can classify them without torch.

    >>> classify_error(RuntimeError("CUDA error: an illegal memory access was encountered"))
    Fault(line='device fault (RuntimeError: CUDA error: ...): look at the device ...is_local=True...)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from eagle_ray.core.errors import ConfigError, EngineError, UnfitDevice
from eagle_ray.runs.job_errors import ClusterError, ModelUnusable, outcome_of
from eagle_ray.storage.store import DISK_FULL, StorageError

SMALLER = "set execution.kv_tokens, execution.slots, speculative.max_nodes or model.max_model_len to less"
LOOK = "look at the device (nvidia-smi, dmesg); its node can be taken out of the cluster while the job runs"
# torch says either, of a device or of the host, in a RuntimeError of one class or another
OUT_OF_MEMORY = re.compile(r"out of memory|alloc\w* .*memory|OutOfMemoryError|MemoryError|_ALLOC_FAILED", re.IGNORECASE)
DEVICE = re.compile(
    r"AcceleratorError|\b(CUDA|HIP|cuDNN|cuBLAS|NCCL)\b.*(error|fail)|device-side assert", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Fault:
    """The cause of a worker's failure.

    Attributes:
        line: what happened, and what to do if that is known.
        is_local: another worker may start without this error.
        is_transient: the same command may succeed later.
    """

    line: str
    is_local: bool
    is_transient: bool = False


class WorkerError(EngineError):
    """A fault classified in the worker's own process, which saw its cause."""

    def __init__(self, fault: Fault):
        super().__init__(fault.line)
        self.fault = fault

    def __reduce__(self):
        return type(self), (self.fault,)


def classify_error(error: Exception) -> Fault:
    """Classify an error of a worker's start or of its engine, whose cause is the device's error."""
    if isinstance(error, WorkerError):
        return error.fault
    cause = error.__cause__ if isinstance(error, EngineError) and error.__cause__ is not None else error
    if isinstance(cause, UnfitDevice):
        return Fault(str(cause), is_local=True)
    told = _told(cause)
    if OUT_OF_MEMORY.search(told):
        return Fault(f"its memory is too small ({told}): {SMALLER}", is_local=True, is_transient=True)
    if DEVICE.search(told):
        return Fault(f"device fault ({told}): {LOOK}", is_local=True, is_transient=True)
    is_disk_full = isinstance(cause, OSError) and cause.errno in DISK_FULL
    return Fault(_told(error), is_local=is_disk_full, is_transient=_may_pass(cause))


def as_config_error(error: Exception) -> Exception:
    """Return the error as the driver raises it: one line, of a class that does not need torch."""
    if isinstance(error, ConfigError):
        return error
    fault = classify_error(error)
    kind = ClusterError if fault.is_transient else ModelUnusable
    return kind(f"a worker cannot start: {fault.line}")


def _may_pass(error: BaseException) -> bool:
    """Return whether storage or network failed temporarily. A bare OSError, as of a missing model, has no errno."""
    if isinstance(error, (ConnectionError, TimeoutError, StorageError)):
        return outcome_of(error).is_transient
    return isinstance(error, OSError) and error.errno is not None and outcome_of(error).is_transient


def _told(error: BaseException) -> str:
    """Return the first line, with the class name for errors of other libraries."""
    reason = str(error).strip().partition("\n")[0]
    return reason if isinstance(error, EngineError) else f"{type(error).__name__}: {reason}".rstrip(": ")
