"""What a kernel takes of a GPU, compiled for it without one: registers, spills, shared memory.

Not in a process in which Triton interprets. The launches may be those that a call would make:

    resources(lambda: sample_rows(...), 90)        # {"draw": Resources(registers=40, spilled=0, ...), ...}
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
NEWER_PTXAS = PTXAS.with_name("ptxas-blackwell")  # of capabilities from 100 on
COPIES = re.compile(r"cp\.async\.cg\.shared\.global.*0x10")


@dataclass(frozen=True)
class Resources:
    """registers: of a thread. spilled: bytes of a thread. shared: bytes of a program.

    copies: of 16 bytes each that go on beside the arithmetic. warp_groups: products of four warps
    at once (Hopper).
    """

    registers: int
    spilled: int
    shared: int
    copies: int
    warp_groups: int


def compiled(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    capability: int,
    aligned: set[str],
    **options: int,
) -> Resources:
    """types: of each argument that is no constant, as Triton writes them. aligned: those divisible by 16."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned - constants.keys()}
    source = ASTSource(
        kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attrs
    )
    return compiled_source(source, capability, options)


def compiled_source(source: ASTSource, capability: int, options: dict[str, int]) -> Resources:
    triton.knobs.runtime.add_stages_inspection_hook = _assemble_once
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx, said = made.asm["ptx"], made.asm["cubin"].decode()
    counts = len(COPIES.findall(ptx)), ptx.count("wgmma.mma_async")
    used, spilled = (
        re.search(r"Used (\d+) registers", said)[1],
        re.search(r"(\d+) bytes spill stores", said)[1],
    )
    return Resources(int(used), int(spilled), made.metadata.shared, *counts)


def _assemble_once(backend: Any = None, stages: Any = None, *_: Any) -> tuple[str, str]:
    """Make what ptxas says the last thing that Triton makes, and keeps under a key of its own, instead of a binary."""
    if stages is not None:
        stages["cubin"] = lambda ptx, metadata: _assembled(ptx, backend.target.arch)
    return ("what ptxas says",) * 2


def _assembled(ptx: str, capability: int) -> bytes:
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        arch = f"sm_{capability}{'a' if capability >= 90 else ''}"
        command = [
            NEWER_PTXAS if capability >= 100 else PTXAS,
            "-v",
            f"--gpu-name={arch}",
            file.name,
            "-o",
            "/dev/null",
        ]
        return subprocess.run(command, capture_output=True, check=True).stderr


TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
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
