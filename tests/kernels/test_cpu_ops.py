"""The C++ operations of every level compute what torch does, and a row's bits do not depend on the other rows."""

import pytest
import torch
import torch.nn.functional as F

from eagle_ray.kernels import cpu_ops, layer_ops
from eagle_ray.kernels.cpu_ops import ScoreRule, SeenPositions

pytestmark = pytest.mark.skipif(
    not cpu_ops.available(torch.device("cpu"), torch.float32),
    reason="no compiled library: install with a C++ compiler",
)
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}  # and how far results of size 1 may be apart
SLOTS, BLOCK_SIZE = 4, 32


@pytest.fixture(autouse=True, params=["avx512", "avx2", "base"])
def level(request, monkeypatch):
    """Run the library of one level of vector instructions, which another processor would choose."""
    if request.param not in cpu_ops.levels():
        pytest.skip("not on this processor")
    library = cpu_ops.library_of(request.param)
    if library is None:
        pytest.skip("the compiler does not build it")
    monkeypatch.setattr(cpu_ops, "best_library", lambda: library)
    cpu_ops.function_for.cache_clear()
    yield
    cpu_ops.function_for.cache_clear()


def test_a_level_can_be_asked_for_and_a_missing_one_is_named(monkeypatch, caplog):
    monkeypatch.undo()  # of `level`
    monkeypatch.setattr(cpu_ops, "levels", lambda: ["avx2", "base"])
    monkeypatch.setattr(cpu_ops, "library_of", lambda level: level)
    library = cpu_ops.best_library.__wrapped__
    assert library() == "avx2"
    monkeypatch.setenv(cpu_ops.SWITCH, "base")
    assert library() == "base"
    assert not caplog.records

    monkeypatch.setenv(cpu_ops.SWITCH, "avx512")
    assert library() == "avx2"
    [said] = [record.getMessage() for record in caplog.records]
    assert said == (
        "EAGLE_RAY_CPU_OPS: 'avx512' is not built or not for this processor; avx2 runs instead. "
        "Set it to one of auto, off, avx2, base."
    )
    monkeypatch.setenv(cpu_ops.SWITCH, "off")
    assert library() is None


def test_a_library_that_was_not_built_is_said_in_one_line(monkeypatch, caplog):
    monkeypatch.undo()
    monkeypatch.setattr(cpu_ops, "library_of", lambda level: None)
    with caplog.at_level("INFO", "eagle_ray"):
        assert cpu_ops.best_library.__wrapped__() is None
    [said] = [record.getMessage() for record in caplog.records]
    assert "torch's operations run instead" in said and "a C++ compiler" in said


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1024), (5, 40), (33, 1000)])
def test_norms_and_activation_are_torchs(dtype, rows, size):
    torch.manual_seed(0)
    hidden, delta, weight = (
        torch.randn(*shape).to(dtype) for shape in ((rows, size), (rows, size), (size,))
    )
    ours, theirs = hidden.clone(), hidden.clone()
    normed = cpu_ops.add_rms_norm(ours, delta, weight, 1e-5)
    torch.testing.assert_close(
        normed, layer_ops.add_rms_norm(theirs, delta, weight, 1e-5), atol=DTYPES[dtype], rtol=1e-2
    )
    assert torch.equal(ours, theirs)
    gate_up = 4 * torch.randn(rows, 2 * size).to(dtype)
    torch.testing.assert_close(
        cpu_ops.silu_mul(gate_up), layer_ops.silu_mul(gate_up), atol=DTYPES[dtype], rtol=1e-2
    )


def test_the_activation_holds_at_the_ends_of_its_range():
    gate = torch.tensor([-200.0, -88.0, -0.0, 0.0, 88.0, 200.0, torch.inf, torch.nan])
    found = cpu_ops.silu_mul(torch.cat([gate, torch.ones(8)])[None])[0]
    torch.testing.assert_close(found, F.silu(gate), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dim", [16, 40, 128])
def test_heads_are_rotated_and_written_where_they_belong(dtype, normed, dim):
    torch.manual_seed(0)
    rows, heads, kv_heads = 6, 4, 2
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(dtype)
    keys, values = torch.zeros(2, 50, kv_heads, dim).to(dtype)
    cells, angles = torch.tensor([7, 3, 49, 0, 12, 8]), torch.rand(rows, dim // 2) * 6
    norms = [torch.randn(dim).to(dtype) for _ in range(2)] if normed else [None, None]
    query, key, value = qkv.view(rows, -1, dim).split([heads, kv_heads, kv_heads], 1)
    if normed:
        query, key = (
            F.rms_norm(x, (dim,), w, 1e-6) for x, w in zip((query, key), norms, strict=True)
        )
    wanted = [layer_ops.rotated(x, angles.cos(), angles.sin()) for x in (query, key)]
    value = value.clone()
    cpu_ops.rotate_and_write(qkv, keys, values, cells, angles.cos(), angles.sin(), *norms, 1e-6)
    tolerance = {"atol": 2 * DTYPES[dtype], "rtol": 1e-2}
    torch.testing.assert_close(qkv.view(rows, -1, dim)[:, :heads], wanted[0], **tolerance)
    torch.testing.assert_close(keys[cells], wanted[1], **tolerance)
    assert torch.equal(values[cells], value)
    assert not values[[i for i in range(50) if i not in cells.tolist()]].any()


def ragged_rows(num_columns: int) -> SeenPositions:
    """Rows of a long tree, a short one, a prompt and a single one, in four slots with scattered blocks."""
    table = torch.randperm(SLOTS * 6).view(SLOTS, 6)
    slots = torch.tensor([0] * 19 + [2] * 3 + [1] * 20 + [3])
    trunk = torch.tensor([70, 33, 5, 90])[slots]
    end = trunk.clone()
    end[22:42] = 40 + torch.arange(20)
    begin = torch.randint(0, 4, slots.shape)
    mask = (torch.rand(len(slots), num_columns) < 0.4).to(torch.uint8)
    return SeenPositions(table, BLOCK_SIZE, slots, begin, end, trunk, mask)


def columns_of(seen: SeenPositions, row: int) -> list[int]:
    tree = [int(seen.trunk[row]) + j for j in range(seen.mask.shape[1]) if seen.mask[row, j]]
    return [*range(int(seen.begin[row]), int(seen.end[row])), *tree]


def single_row(seen: SeenPositions, row: int) -> SeenPositions:
    rows = (
        getattr(seen, name)[row : row + 1].contiguous()
        for name in ("slots", "begin", "end", "trunk", "mask")
    )
    return SeenPositions(seen.table, seen.block_size, *rows)


def contiguous_row(seen: SeenPositions, row: int) -> tuple[SeenPositions, list[int]]:
    """The same row where all that it sees stands one after the other, and where that stood before."""
    columns, zero = columns_of(seen, row), torch.zeros(1, dtype=torch.int64)
    table, end = torch.arange(6)[None], torch.tensor([len(columns)])
    return SeenPositions(
        table, BLOCK_SIZE, zero, zero, end, end, torch.zeros(1, 0, dtype=torch.uint8)
    ), columns


SHAPES = [(8, 2, 128, 128, 7), (4, 4, 12, 20, 3), (6, 2, 40, 40, 0), (7, 1, 64, 64, 70)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_each_row_attends_to_what_it_sees(dtype, shape, softcap, has_sinks):
    torch.manual_seed(0)
    heads, kv_heads, key_dim, value_dim, num_columns = shape
    seen = ragged_rows(num_columns)
    keys, values = (
        torch.randn(SLOTS * 6 * BLOCK_SIZE, kv_heads, d).to(dtype) for d in (key_dim, value_dim)
    )
    query = torch.randn(heads, len(seen.slots), key_dim).to(dtype).transpose(0, 1)  # not contiguous
    sinks = torch.randn(heads) if has_sinks else None
    rule = ScoreRule(key_dim**-0.5, softcap, sinks)
    out = cpu_ops.attend(seen, query, keys, values, rule)
    for row in range(len(query)):
        cells = cells_of(seen, row, columns_of(seen, row))
        own_keys, own_values = (
            x[cells].float().repeat_interleave(heads // kv_heads, 1) for x in (keys, values)
        )
        scores = torch.einsum("hd,thd->ht", query[row].float(), own_keys) * rule.scaling
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        beside = scores if sinks is None else torch.cat([scores, sinks[:, None]], 1)
        weights = beside.softmax(-1)[:, : scores.shape[1]]
        wanted = torch.einsum("ht,thd->hd", weights, own_values)
        torch.testing.assert_close(out[row].float(), wanted, atol=DTYPES[dtype], rtol=1e-2)


def cells_of(seen: SeenPositions, row: int, columns: list[int]) -> torch.Tensor:
    table = seen.table[seen.slots[row]]
    return torch.tensor(
        [int(table[c // BLOCK_SIZE]) * BLOCK_SIZE + c % BLOCK_SIZE for c in columns]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_bits_depend_on_nothing_but_what_it_sees(dtype, shape, threads):
    """Alone or in a batch, in a tree or in a sequence: this is what makes drafted output plain output, bit for bit."""
    torch.manual_seed(0)
    heads, kv_heads, key_dim, value_dim, num_columns = shape
    seen, rule = ragged_rows(num_columns), ScoreRule(key_dim**-0.5)
    keys, values = (
        torch.randn(SLOTS * 6 * BLOCK_SIZE, kv_heads, d).to(dtype) for d in (key_dim, value_dim)
    )
    query = torch.randn(len(seen.slots), heads, key_dim).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = cpu_ops.attend(seen, query, keys, values, rule)
        for row in range(len(query)):
            alone = cpu_ops.attend(single_row(seen, row), query[row : row + 1], keys, values, rule)
            assert torch.equal(alone[0], out[row])
            ordered, columns = contiguous_row(seen, row)
            cells = cells_of(seen, row, columns)
            rows = (
                F.pad(x[cells], (0, 0, 0, 0, 0, 6 * BLOCK_SIZE - len(cells)))
                for x in (keys, values)
            )
            assert torch.equal(
                cpu_ops.attend(ordered, query[row : row + 1], *rows, rule)[0], out[row]
            )
    finally:
        torch.set_num_threads(before)


def first_rows(seen: SeenPositions, count: int) -> SeenPositions:
    names = ("slots", "begin", "end", "trunk", "mask")
    return SeenPositions(
        seen.table, seen.block_size, *(getattr(seen, name)[:count].contiguous() for name in names)
    )


def rows_of_one_sequence(kind: str, count: int) -> SeenPositions:
    """A tree behind 37 positions, a chunk of a prompt behind them, or that chunk in a window of 50."""
    zero = torch.zeros(count, dtype=torch.int64)
    end = 37 + (zero if kind == "tree" else torch.arange(1, count + 1))
    begin = (end - 50).clamp(min=0) if kind == "window" else zero
    columns = count if kind == "tree" else 0
    mask = (torch.rand(count, columns) < 0.2).to(torch.uint8)
    return SeenPositions(torch.randperm(6)[None], BLOCK_SIZE, zero, begin, end, end.clone(), mask)


@pytest.mark.parametrize(
    ("kind", "dtypes", "shape"),
    [
        ("tree", "float32 float32", (9, 3, 64)),
        ("tree", "float32 bfloat16", (7, 1, 128)),
        ("prompt", "float32 float32", (4, 4, 40)),
        ("prompt", "float32 bfloat16", (9, 3, 64)),
        ("window", "bfloat16 bfloat16", (7, 1, 64)),
        ("window", "float32 float32", (9, 3, 64)),
    ],
    ids=str,
)
def test_any_number_of_rows_reads_the_same_keys_to_the_same_bits(kind, dtypes, shape):
    torch.manual_seed(0)
    heads, kv_heads, dim = shape
    of_rows, of_cache = (getattr(torch, name) for name in dtypes.split())
    most, rule = 130, ScoreRule(dim**-0.5)
    seen = rows_of_one_sequence(kind, most)
    keys, values = torch.randn(2, 6 * BLOCK_SIZE, kv_heads, dim).to(of_cache)
    query = torch.randn(most, heads, dim).to(of_rows)
    alone = torch.cat(
        [
            cpu_ops.attend(single_row(seen, row), query[row : row + 1], keys, values, rule)
            for row in range(most)
        ]
    )
    before = torch.get_num_threads()
    try:
        for count in range(1, most + 1):
            torch.set_num_threads(1 + count % 4)
            some = cpu_ops.attend(first_rows(seen, count), query[:count], keys, values, rule)
            assert torch.equal(some, alone[:count]), count
    finally:
        torch.set_num_threads(before)


def test_a_row_that_sees_nothing_is_zero():
    zero = torch.zeros(1, dtype=torch.int64)
    seen = SeenPositions(
        torch.zeros(1, 1, dtype=torch.int64),
        32,
        zero,
        zero,
        zero,
        zero,
        zero[:, None][:, :0].byte(),
    )
    out = cpu_ops.attend(
        seen, torch.randn(1, 2, 16), torch.randn(32, 2, 16), torch.randn(32, 2, 16), ScoreRule(1.0)
    )
    assert not out.any()


def test_it_is_for_the_cpu_and_its_dtypes_alone():
    assert not cpu_ops.available(torch.device("cpu"), torch.float16)
    assert not cpu_ops.available(torch.device("meta"), torch.float32)


def test_the_likeliest_tokens_are_those_of_torch():
    logits = torch.randn(5, 1003, generator=torch.Generator().manual_seed(0)) * 4
    logits[1, 700] = logits[1, 3] = 30.0  # a tie goes to the lower index
    logits[2, 5] = torch.nan
    index, log_probs = cpu_ops.top_k(logits, 7)
    values, wanted = logits.log_softmax(-1).topk(7)
    real = torch.tensor([0, 3, 4])
    assert torch.equal(index[real], wanted[real]) and index[1, :2].tolist() == [3, 700]
    torch.testing.assert_close(log_probs[real], values[real])
    assert log_probs[2].isnan().all()
    assert cpu_ops.argmax(logits[real]).tolist() == logits[real].argmax(-1).tolist()
