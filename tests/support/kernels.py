"""Where tests run the kernels: a GPU where there is one, else a CPU, in Triton's interpreter, mended as they need it.

TRITON_INTERPRET=1 asks for the interpreter where there is a GPU too. In Triton 3.6, numpy 2.4 no
longer makes a number of an array of one, which loops need of their bounds. And at each call of each
function the interpreter looks through all of triton.language for what it has to replace: most of
the time that it took. It rounds to FP8 upwards, without a carry into the exponent, and to bf16 towards zero;
a GPU rounds to the nearest number as torch does.
"""

import inspect
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

from eagle_ray.kernels.availability import is_interpreting
from tests.support.fast_interpreter import speed_up

DEVICE = "cuda" if torch.cuda.is_available() and not is_interpreting() else "cpu"


def compile_fails() -> None:
    """Raise, from Triton's own code, what is none of Triton's exceptions."""
    from triton.runtime import build

    build._load_module_from_path("boom", "/nowhere/boom.so")


def mend() -> None:
    """Once, before a kernel runs."""
    speed_up()
    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
    interpreter._patch_builtin = _patch_builtin
    convert = interpreter._convert_float

    def converted(numbers: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        is_fp8 = [kind == interpreter.tl.float8e4nv for kind in (source, target)]
        if any(is_fp8):
            return _converted_fp8(numbers, *is_fp8)
        if (source, target) == (interpreter.tl.float32, interpreter.tl.bfloat16):
            return _rounded_to_bf16(numbers)
        return convert(numbers, source, target, rounding)

    interpreter._convert_float = converted


def _converted_fp8(numbers: np.ndarray, from_fp8: bool, to_fp8: bool) -> np.ndarray:
    """Convert between FP8, which the interpreter keeps as bytes, and fp32."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers))
    if from_fp8:
        return tensor if to_fp8 else tensor.view(torch.float8_e4m3fn).float().numpy()
    assert tensor.dtype == torch.float32, "kernels convert by way of fp32"
    return tensor.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def _rounded_to_bf16(numbers: np.ndarray) -> np.ndarray:
    """Convert fp32 to bf16, which the interpreter keeps as integers of 16 bits."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32))
    return tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _builtins(package):
        member = getattr(package, name)
        if interpreter.tl.core.is_builtin(member):  # not replaced by the caller already
            interpreter._patch_attr(package, name, member, builder, scope)


@cache
def _builtins(package: Any) -> list[str]:
    return [
        name
        for name, member in inspect.getmembers(package)
        if interpreter.tl.core.is_builtin(member)
    ]


def make_entry(directory: Path, name: str, code: bytes = b"code") -> None:
    """Write what Triton writes for one kernel, and what it leaves beside."""
    entry = directory / name
    (entry / "tmp.pid_1").mkdir(parents=True)
    (entry / "tmp.pid_1" / "k.cubin").write_bytes(b"half")
    (entry / "k.cubin").write_bytes(code)
    (entry / "k.llir").write_text("intermediate")
    (entry / "k.so").write_bytes(b"of the host")
    paths = {name: str(entry / name) for name in ("k.cubin", "k.llir")}
    (entry / "__grp__k.json").write_text(json.dumps({"child_paths": paths}))
