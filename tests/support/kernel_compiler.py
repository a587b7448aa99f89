"""What a kernel takes of a GPU, compiled for it without one: registers, spills, shared memory.

Not in a process in which Triton interprets.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
COPIES = re.compile(r"cp\.async\.cg\.shared\.global.*0x10")


@dataclass(frozen=True)
class Resources:
    """registers: of a thread. spilled: bytes of a thread. shared: bytes of a program.

    copies: of 16 bytes each that go on beside the arithmetic. warp_groups: products of four warps at once (Hopper).
    """

    registers: int
    spilled: int
    shared: int
    copies: int
    warp_groups: int


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, aligned: set[str], **options: int
) -> Resources:
    """types: of each argument that is no constant, as Triton writes them. aligned: those divisible by 16."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned - constants.keys()}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attrs)
    return compiled_source(source, capability, options)


def compiled_source(source: ASTSource, capability: int, options: dict[str, int]) -> Resources:
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = made.asm["ptx"]
    counts = len(COPIES.findall(ptx)), ptx.count("wgmma.mma_async")
    return Resources(*_assembled(ptx, capability), made.metadata.shared, *counts)


def _assembled(ptx: str, capability: int) -> tuple[int, int]:
    """Registers and bytes spilled, as ptxas says them."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        arch = f"sm_{capability}{'a' if capability >= 90 else ''}"
        command = [PTXAS, "-v", f"--gpu-name={arch}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.search(r"Used (\d+) registers", said)[1]), int(re.search(r"(\d+) bytes spill stores", said)[1])
