"""Kernels compiled without a GPU, from the launches that a call would make. Run where TRITON_INTERPRET is not set.

resources(lambda: pick(...), 90)        # {"draw": Resources(registers=40, spilled=0, ...), ...}
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tests.support.kernel_compiler import Resources, compiled_source

TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
}
OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Launch:
    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, int]

    @classmethod
    def of(cls, kernel: JITFunction, args: tuple, kwargs: dict[str, Any]) -> Launch:
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        return cls(kernel, dict(zip(kernel.arg_names, args, strict=False)) | kwargs, options)

    def compile(self, capability: int) -> Resources:
        fixed = {p.name for p in self.kernel.params if p.is_constexpr}
        constants, signature, hints = {}, {}, {}
        for place, (name, value) in enumerate(self.arguments.items()):
            if name in fixed or value is None:
                constants[(place,)], signature[name] = value, "constexpr"
            elif isinstance(value, torch.Tensor):
                signature[name], hints[(place,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
        source = ASTSource(self.kernel, signature, constants, hints)
        return compiled_source(source, capability, self.options)


def resources(call: Callable[[], object], capability: int) -> dict[str, Resources]:
    """Of every kernel that the call launches, for each set of its constants."""
    return {name: launch.compile(capability) for name, launch in launches(call).items()}


def launches(call: Callable[[], object]) -> dict[str, Launch]:
    """What would be launched, one for each set of constants; nothing is."""
    seen: dict[str, Launch] = {}

    def note(kernel: JITFunction, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        launch = Launch.of(kernel, args, kwargs)
        fixed = [p.name for p in kernel.params if p.is_constexpr]
        absent = [name for name, value in launch.arguments.items() if value is None]
        seen[f"{kernel.__name__} {[launch.arguments[name] for name in fixed]} {absent}"] = launch

    run, JITFunction.run = JITFunction.run, note
    try:
        call()
    finally:
        JITFunction.run = run
    return seen
