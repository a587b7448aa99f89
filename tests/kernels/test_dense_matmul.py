"""Products with dense weights sum in one order: for any number of rows, of threads, and by any level's instructions."""

import pytest
import torch

from eagle_ray.kernels import cpu_ops
from eagle_ray.kernels.cpu_ops import TiledWeight

pytestmark = pytest.mark.skipif(
    not cpu_ops.has_function("dense_matmul_float32"),
    reason="no compiled library: install with a C++ compiler",
)
PORTABLE, VECTORS = 0, 1
MOST_ROWS = 130
SHAPES = [(65, 33), (16, 600), (203, 96)]  # outputs and inputs
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True, params=["avx512", "avx2", "base"])
def level(request, monkeypatch):
    """Run the library of one level of vector instructions, which another processor would choose."""
    library = cpu_ops.library_of(request.param) if request.param in cpu_ops.levels() else None
    if library is None:
        pytest.skip("not on this processor, or not built")
    monkeypatch.setattr(cpu_ops, "best_library", lambda: library)
    cpu_ops.function_for.cache_clear()
    cpu_ops.dense_path.cache_clear()
    yield request.param
    cpu_ops.function_for.cache_clear()
    cpu_ops.dense_path.cache_clear()


def case(shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Weight, bias and rows, some of whose sums cancel."""
    random = torch.Generator().manual_seed(sum(shape))
    sizes = (shape, shape[:1], (MOST_ROWS, shape[1]))
    weight, bias, rows = (torch.randn(size, generator=random) for size in sizes)
    return weight.to(dtype), bias.to(dtype), (rows * torch.logspace(-2, 2, shape[1])).to(dtype)


def by_path(path: int, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None):
    tiled = TiledWeight.of(weight)
    tiled.descriptor.path = path
    return cpu_ops.dense_matmul(rows, tiled, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_number_of_rows_has_the_bits_of_ordered_sums(shape, dtype, level):
    if level == "base":
        pytest.skip("without fused products and sums only the portable path runs")
    weight, bias, rows = case(shape, dtype)
    wanted = by_path(PORTABLE, rows, weight, bias)
    before = torch.get_num_threads()
    try:
        for count in range(1, MOST_ROWS + 1):
            torch.set_num_threads(1 + count % 4)
            assert torch.equal(by_path(VECTORS, rows[:count], weight, bias), wanted[:count]), count
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_level_computes_the_same_bits(dtype, monkeypatch, level):
    weight, bias, rows = case((65, 96), dtype)
    found = by_path(cpu_ops.dense_path(), rows, weight, bias)
    base = cpu_ops.library_of("base")
    if base is None:
        pytest.skip("not built")
    monkeypatch.setattr(cpu_ops, "best_library", lambda: base)
    cpu_ops.function_for.cache_clear()
    assert torch.equal(by_path(PORTABLE, rows, weight, bias), found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_computes_what_torch_does(shape, dtype):
    weight, bias, rows = case(shape, dtype)
    exact = torch.nn.functional.linear(rows.double(), weight.double(), bias.double())
    found = cpu_ops.dense_matmul(rows, TiledWeight.of(weight), bias)
    size = (rows.double().abs() @ weight.double().abs().T).max()
    rounding = torch.finfo(dtype).eps if dtype is torch.bfloat16 else 4 * torch.finfo(dtype).eps
    assert (found.double() - exact).abs().max() < rounding * size
    assert found.dtype is dtype


def test_a_number_that_is_not_finite_stays_in_its_row():
    weight, _, rows = case((65, 33), torch.float32)
    rows[3, 7] = torch.inf
    found = cpu_ops.dense_matmul(rows, TiledWeight.of(weight), None)
    assert not found[3].isfinite().any()
    assert found[4:].isfinite().all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_weight_is_kept_as_it_was(shape):
    weight, _, _ = case(shape, torch.bfloat16)
    assert torch.equal(TiledWeight.of(weight).dense(), weight)
