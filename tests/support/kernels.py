"""Where tests run the kernels: a GPU where there is one, else a CPU, in Triton's interpreter, mended as they need it.

TRITON_INTERPRET=1 asks for the interpreter where there is a GPU too. In Triton 3.6, numpy 2.4 no longer makes a number
of an array of one, which loops need of their bounds. And at each call of each function the interpreter looks through
all of triton.language for what it has to replace: most of the time that it took.
"""

import inspect
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from triton.runtime import interpreter

from eagle_ray.kernels.availability import is_interpreting

DEVICE = "cuda" if torch.cuda.is_available() and not is_interpreting() else "cpu"


def compile_fails() -> None:
    """Raise, from Triton's own code, what is none of Triton's exceptions."""
    from triton.runtime import build

    build._load_module_from_path("boom", "/nowhere/boom.so")


def mend() -> None:
    """Once, before a kernel runs."""
    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
    interpreter._patch_builtin = _patch_builtin


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _builtins(package):
        member = getattr(package, name)
        if interpreter.tl.core.is_builtin(member):  # not replaced by the caller already
            interpreter._patch_attr(package, name, member, builder, scope)


@cache
def _builtins(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if interpreter.tl.core.is_builtin(member)]


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
