"""Every kernel compiles for GPUs that are not here, keeps to their registers and fits their shared memory."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.kernel_compiler import PTXAS

SHARED = {
    80: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
}  # the first is an RTX 30's or 40's, which the same shapes serve; an A100 has 163

SPILLED = 24  # bytes, outside of loops: ptxas gives registers for one program more on a core


pytestmark = pytest.mark.skipif(not PTXAS.is_file(), reason="this Triton brings no ptxas")
EXTENTS = pytest.mark.parametrize("which", ["quick", pytest.param("all", marks=pytest.mark.slow)])


def compiled(module: str, which: str) -> list[dict[str, Any]]:
    """Compile in a process of its own: in this one Triton interprets."""
    done = subprocess.run(
        [sys.executable, "-m", module, which],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@EXTENTS
def test_products_of_few_rows_spill_nothing_and_fit(which):
    kernels = compiled("tests.kernels.compile_products", which)
    assert {k["capability"] for k in kernels} >= {80, 90}
    for kernel in kernels:
        assert kernel["spilled"] == 0, kernel
        assert kernel["shared"] <= SHARED[kernel["capability"]], kernel


@EXTENTS
def test_attention_compiles_within_a_gpus_registers_and_memory(which):
    kernels = compiled("tests.kernels.compile_attention", which)
    assert {k["capability"] for k in kernels} == {80, 90}
    for kernel in kernels:
        assert kernel["spilled"] <= SPILLED, kernel
        assert kernel["shared"] <= SHARED[kernel["capability"]], kernel
        assert kernel["copies"] > 0 or "bf16" not in kernel["kernel"], kernel
    assert any(k["warp_groups"] for k in kernels if k["capability"] == 90)
