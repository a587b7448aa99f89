"""Products on ARM have the bits of this processor's: of quantised weights by i8mm, by dot products and without them,
and of dense ones.

The library is compiled by a cross compiler and run by qemu: `make arm` runs these tests where both are installed
(Debian: g++-aarch64-linux-gnu and qemu-user).
"""

import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle_ray.kernels import cpu_ops
from eagle_ray.kernels.cpu_ops import TiledWeight
from eagle_ray.models.quantized_linear import QuantizedWeight, pack_weight
from tests.support.quantised_weights import weight_of

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
MISSING = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {' and '.join(MISSING)}"),
    pytest.mark.skipif(
        platform.machine() != "x86_64" or cpu_ops.best_library() is None,
        reason="the other side of the comparison is this machine's library, on x86-64",
    ),
]
KERNELS = Path(cpu_ops.__file__).parent
SOURCES = [
    KERNELS / f"{name}.cpp" for name in ("quantized_matmul", "dense_matmul", "cpu_ops", "team")
]
FLAGS = ["-O3", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
PORTABLE, NEON, NEON_I8MM = 0, 5, 6  # a Path of quantized_matmul.cpp
BEST = -1
NUM_ROWS, FEW_ROWS, NUM_INPUTS, NUM_OUTPUTS = 130, 21, 256, 40


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> dict[str, Path]:
    """The programs of tests/kernels/arm, compiled."""
    folder = tmp_path_factory.mktemp("arm")
    objects = [folder / f"{source.stem}.o" for source in SOURCES]
    for source, compiled in zip(SOURCES, objects, strict=True):
        run([COMPILER, *FLAGS, f"-I{KERNELS}", "-c", source, "-o", compiled])
    for name in ("products", "dense"):
        source = Path(__file__).parent / "arm" / f"{name}.cpp"
        command = [COMPILER, *FLAGS, "-static", f"-I{KERNELS}", source, *objects]
        run([*command, "-o", folder / name])
    return {name: folder / name for name in ("products", "dense")}


def run(command: list[object]) -> str:
    """Return what a command prints."""
    words = list(map(str, command))
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=300)
    return done.stdout


def write_inputs(path: Path, weight: QuantizedWeight, rows: torch.Tensor) -> None:
    packed = pack_weight(weight)
    codes, scales = packed.codes.numpy().tobytes(), packed.scales.numpy().tobytes()
    is_half = packed.scales.dtype is torch.float16
    sizes = [NUM_INPUTS, NUM_OUTPUTS, weight.group_size, weight.bits, is_half, len(rows)]
    header = np.array([*sizes, len(codes), len(scales)], dtype=np.int64).tobytes()
    path.write_bytes(header + codes + scales + rows.numpy().tobytes())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [16, 32, 128])
@pytest.mark.parametrize(
    ("processor", "asked", "path", "num_rows"),
    [
        ("max", BEST, NEON_I8MM, NUM_ROWS),
        ("max", NEON, NEON, NUM_ROWS),
        ("cortex-a57", BEST, PORTABLE, FEW_ROWS),
    ],
)
def test_an_arm_processor_computes_the_same_bits(
    programs, tmp_path, bits, group_size, processor, asked, path, num_rows
):
    random = torch.Generator().manual_seed(bits + group_size)
    weight = weight_of(NUM_OUTPUTS, NUM_INPUTS, group_size, bits, torch.float16)
    rows = torch.randn(num_rows, NUM_INPUTS, generator=random)
    rows = rows * torch.logspace(-3, 3, NUM_INPUTS)
    rows[3, 7], rows[5] = torch.inf, 0.0
    write_inputs(tmp_path / "inputs", weight, rows)

    files = [tmp_path / "inputs", tmp_path / "outputs"]
    printed = run([EMULATOR, "-cpu", processor, programs["products"], *files, asked])
    assert int(printed) == path, "the processor's best path is taken, or the one that is asked for"

    found = np.fromfile(tmp_path / "outputs", dtype=np.float32)
    for count in range(1, num_rows + 1):
        some, found = found[: count * NUM_OUTPUTS], found[count * NUM_OUTPUTS :]
        expected = cpu_ops.quantized_matmul(rows[:count], pack_weight(weight), None)
        some = torch.from_numpy(some.copy()).view(count, NUM_OUTPUTS)
        assert torch.equal(some.isnan(), expected.isnan())
        assert torch.equal(some.nan_to_num(), expected.nan_to_num())
    assert not len(found)


@pytest.mark.skipif(
    cpu_ops.dense_path() == 0, reason="this processor has no fused sums of products"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_weights_have_the_same_bits_on_arm(programs, tmp_path, dtype):
    random = torch.Generator().manual_seed(0)
    weight, rows = (
        torch.randn(size, NUM_INPUTS, generator=random).to(dtype)
        for size in (NUM_OUTPUTS, NUM_ROWS)
    )
    tiled = TiledWeight.of(weight)
    parts = [bytes(x.view(torch.uint8).numpy()) for x in (tiled.numbers, rows)]
    sizes = [NUM_INPUTS, NUM_OUTPUTS, dtype is torch.bfloat16, NUM_ROWS, *map(len, parts)]
    (tmp_path / "inputs").write_bytes(np.array(sizes, dtype=np.int64).tobytes() + b"".join(parts))
    run([EMULATOR, programs["dense"], tmp_path / "inputs", tmp_path / "outputs"])

    found = torch.from_file(
        str(tmp_path / "outputs"), size=NUM_OUTPUTS * sum(range(NUM_ROWS + 1)), dtype=dtype
    )
    expected = [cpu_ops.dense_matmul(rows[:count], tiled, None) for count in range(1, NUM_ROWS + 1)]
    assert torch.equal(found, torch.cat(expected).flatten())
