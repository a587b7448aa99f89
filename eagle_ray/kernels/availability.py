"""Check whether Triton's kernels run on a device, and launch them.

EAGLE_RAY_KERNELS=portable turns them off. On a CPU they run only with EAGLE_RAY_KERNELS=triton and
TRITON_INTERPRET=1, in Triton's interpreter, as in tests. A kernel that cannot be compiled later
turns them off for the rest of the process (`turn_off`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from traceback import walk_tb
from typing import Any, Protocol, TypeVar, runtime_checkable
from weakref import WeakSet

import torch
from torch import Tensor

CHOICE = "EAGLE_RAY_KERNELS"
CAPABILITY = (8, 0)  # older GPUs have neither bf16 nor asynchronous copies
Result = TypeVar("Result")
log = logging.getLogger("eagle_ray")
failures: list[str] = []  # why they were turned off, if they were


@runtime_checkable
class Ranks(Protocol):
    """Protocol of an engine's ranks, which must all run kernels or none."""

    @property
    def is_lost(self) -> bool: ...

    def turn_off_kernels(self) -> None: ...


together: WeakSet[Ranks] = WeakSet()  # ranks of the engines of this process


def turn_off(error: BaseException) -> bool:
    """Switch to the portable path for good, because compiling or launching a kernel raised `error`. It is logged once.

    Return whether the kernels were on until now. Raises UnfitDevice if another rank of the engine
    keeps them on.
    """
    if failures:
        return False
    for ranks in list(together):
        if not ranks.is_lost:  # one that is ends with the next sum
            ranks.turn_off_kernels()
    text = str(error).strip() or type(error).__name__
    failures.append(f"a kernel failed ({text.splitlines()[-1]})")
    log.warning("portable path from now on, no Triton kernels: %s", failures[0])
    return True


def use_triton(device: torch.device | str) -> bool:
    """Return whether Triton's kernels run; log the decision once per device."""
    device = torch.device(device)
    # Asked a dozen times a step, and the environment has the costliest part of the answer.
    if failures or (device.type == "cpu" and CHOICE not in os.environ):
        return False
    return chosen(device, os.environ.get(CHOICE), os.environ.get("TRITON_INTERPRET"))


@cache
def chosen(device: torch.device, choice: str | None, interpret: str | None) -> bool:
    """Return whether kernels run on a device, and log it. Cached by all inputs of the decision."""
    reason = why_not(device)
    if reason is None:
        log.info("Triton kernels on %s", device)
    elif device.type != "cpu" or choice == "triton":  # on a CPU they are not expected
        log.warning("portable path on %s, no Triton kernels: %s", device, reason)
    return reason is None


def why_not(device: torch.device) -> str | None:
    """Return why Triton's kernels do not run on this device, or None if they do."""
    if failures:
        return failures[0]
    choice = os.environ.get(CHOICE, "auto")
    if choice not in ("auto", "portable", "triton"):
        return f"{CHOICE}={choice} is none of auto, portable, triton"
    if choice == "portable":
        return f"{CHOICE}=portable"
    if find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu" and choice == "triton" and is_interpreting():
        return None
    if device.type != "cuda" or torch.version.cuda is None:
        return f"{device} is no CUDA device"
    return why_not_cuda(device)


def retry_portable(function: Callable[[], Result]) -> Result:
    """Return the function's result; if a kernel cannot be compiled or launched, call it again without kernels.

    The function must be safe to call again after it failed in the middle.
    """
    try:
        return function()
    except Exception as error:
        if is_triton_error(error) and turn_off(error):
            return function()
        raise


def is_triton_error(error: BaseException) -> bool:
    """Return whether the error was raised in Triton: compiling, loading or launching a kernel.

    These are not only Triton's own exceptions: compilers, files and drivers raise RuntimeError,
    OSError and others.
    """
    frames = walk_tb(error.__traceback__)
    return any(
        frame.f_globals.get("__name__", "").partition(".")[0] == "triton" for frame, _ in frames
    )


def is_interpreting() -> bool:
    """Return whether kernels run in Triton's interpreter, which is decided when a kernel is defined."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def why_not_cuda(device: torch.device) -> str | None:
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is under {CAPABILITY[0]}.{CAPABILITY[1]}"
    return _smoke_test(device)


def _smoke_test(device: torch.device) -> str | None:
    """Compile and run the smallest kernel; return the error, or None. It fails, for example, without a C compiler."""
    import triton

    from eagle_ray.kernels.jit_functions import double

    numbers = torch.ones(16, device=device)
    try:
        launch(double, (1,))(numbers, SIZE=16)
    except Exception as error:  # any error of Triton, its compilers or the driver
        text = str(error).strip() or type(error).__name__
        return f"Triton {triton.__version__} fails here: {text.splitlines()[-1]}"
    if numbers.sum().item() != 32:
        return f"Triton {triton.__version__} computes wrong numbers here"
    return None


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """Launch a kernel on the device of its first tensor argument. In Triton's interpreter on a CPU,
    the device does not matter.

        launch(kernel, (rows, parts))(logits, out, BLOCK=2048)      # kernel[(rows, parts)](logits, out, BLOCK=2048)

    Triton launches on CUDA's current device, whatever device the arguments are on. So on a GPU
    other than the first, or with a target on several GPUs, a kernel could run on one device with
    another's memory.
    """

    def launched(*args: Any, **constants: Any) -> None:
        device = next(arg.get_device() for arg in args if isinstance(arg, Tensor))
        if device < 0 or device == torch.cuda.current_device():
            kernel[grid](*args, **constants)
            return
        with torch.cuda.device(device):
            kernel[grid](*args, **constants)

    return launched
