"""Tree attention's kernels equal the portable path, on trees and caches of every kind."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_ray.attention.metadata import AttentionParams
from eagle_ray.attention.prefill_metadata import PrefillMetadata
from eagle_ray.kernels import tree_metadata
from eagle_ray.kv.block_manager import BlockManager
from eagle_ray.kv.kv_cache import KVCache
from tests.support.attention_trees import RandomTrees
from tests.support.kernels import DEVICE

ROUNDING = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SETTINGS = settings(max_examples=8, deadline=None)


def check(random_trees: RandomTrees) -> None:
    """Real rows are equal within the dtype's rounding, padding rows are zeros."""
    ours, theirs, real = random_trees.attend()
    torch.testing.assert_close(
        ours[real],
        theirs[real],
        atol=ROUNDING[random_trees.dtype],
        rtol=ROUNDING[random_trees.dtype],
    )
    assert not ours[~real].any()


@SETTINGS
@given(
    data=st.data(),
    seed=st.integers(0, 999),
    rectangle=st.booleans(),
    group=st.sampled_from([1, 3, 4]),
)
def test_trees_of_any_size_over_any_length(data, seed, rectangle, group):
    sizes = data.draw(
        st.lists(st.tuples(st.integers(0, 150), st.integers(1, 12)), min_size=1, max_size=4)
    )
    lengths, counts = (list(each) for each in zip(*sizes, strict=True))
    padding = 0 if rectangle else data.draw(st.integers(0, 5))
    firsts = data.draw(st.none() | st.tuples(*(st.integers(0, length) for length in lengths)))
    window = data.draw(st.none() | st.integers(1, 200) | st.integers(-200, -1))
    check(
        RandomTrees(
            lengths,
            counts,
            1,
            group,
            padding=padding,
            rectangle=rectangle,
            firsts=firsts,
            window=window,
            seed=seed,
        )
    )


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    "group, dims", [(1, (64, 64)), (8, (80, 96)), (2, (256, 64)), (7, (128, 128))]
)
def test_every_dtype_head_size_and_ratio_of_heads(dtype, group, dims):
    check(RandomTrees([0, 70, 300], [1, 9, 3], 2, group, *dims, dtype=dtype, padding=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 70])
def test_a_cache_in_fp8(window, dtype):
    """Equal to attention in fp64 over the numbers that it holds."""
    check(
        RandomTrees(
            [0, 70, 300],
            [1, 9, 3],
            2,
            4,
            64,
            64,
            dtype=dtype,
            window=window,
            stored=torch.float8_e4m3fn,
        )
    )


@pytest.mark.parametrize("counts", [[64, 65], [130, 3]])
def test_more_nodes_than_a_word_has_bits(counts):
    check(RandomTrees([40, 250], counts, 1, 2))


@pytest.mark.parametrize(
    "softcap, sinks, window",
    [(2.0, False, None), (None, True, 70), (5.0, True, 9), (None, False, -70), (2.0, True, -9)],
)
def test_what_models_ask_of_attention(softcap, sinks, window):
    check(RandomTrees([5, 300, 700], [6, 5, 4], 2, 2, softcap=softcap, sinks=sinks, window=window))


@pytest.mark.parametrize(
    "window, firsts, softcap, sinks",
    [
        (None, [0, 0, 0, 0], None, False),
        (40, [0, 0, 0, 0], 2.0, False),
        (40, [0, 1, 30, 2], None, False),
        (-40, [0, 0, 0, 0], None, False),
        (-48, [0, 0, 0, 0], 2.0, False),
        (None, [0, 1, 30, 2], None, True),
    ],
)
def test_prompts_in_chunks_attend_as_chains(window, firsts, softcap, sinks, monkeypatch):
    """Behind a context a short chunk attends as a chain; with soft-caps and sinks all do, in chains of 64 rows."""
    torch.manual_seed(0)
    starts, lengths = [0, 33, 64, 5], [70, 64, 66, 1]
    cache = KVCache(BlockManager(4, 160, device=DEVICE), 1, 2, 16, torch.float32, DEVICE)
    for slot in range(4):
        assert cache.blocks.reserve(slot, 160)
    cache.keys.copy_(torch.randn(cache.keys.shape))
    cache.values.copy_(torch.randn(cache.values.shape))
    query, key, value = (torch.randn(1, n, sum(lengths), 16, device=DEVICE) for n in (4, 2, 2))
    attention = AttentionParams(
        0, 0.25, window, softcap, torch.randn(4, device=DEVICE) if sinks else None
    )
    outs = []
    for kernels in ("portable", "triton"):
        monkeypatch.setenv("EAGLE_RAY_KERNELS", kernels)
        layout = PrefillMetadata(cache, [2, 0, 3, 1], firsts, starts, lengths)
        outs.append(layout.attend(query, key, value, attention))
        gathered = range(4) if kernels == "portable" else (0, 2)
        assert layout.num_gathered == sum(starts[i] + lengths[i] - firsts[i] for i in gathered)
    torch.testing.assert_close(*outs, atol=4e-6, rtol=4e-6)


@pytest.fixture
def short_parts(monkeypatch):
    """A quarter of a part is enough for contexts of a quarter."""
    monkeypatch.setattr(tree_metadata, "PART_POSITIONS", 64)


@pytest.mark.parametrize("lengths", [[500, 3], [64, 63, 65, 128], [31, 32, 33]])
def test_contexts_in_parts_and_at_the_edges_of_blocks_and_tiles(short_parts, lengths):
    check(RandomTrees(lengths, [4] * len(lengths), 1, 4, padding=1))


@pytest.mark.parametrize("rectangle", [False, True])
def test_the_host_knows_no_length(rectangle):
    """As in a captured pass, which serves contexts of any length."""
    check(
        RandomTrees(
            [0, 130, 700],
            [3, 3, 1],
            1,
            2,
            unknown=True,
            rectangle=rectangle,
            padding=0 if rectangle else 2,
        )
    )


@pytest.mark.parametrize("rectangle", [False, True])
@pytest.mark.parametrize(
    "window, firsts, sinks",
    [(None, None, True), (150, None, False), (-160, None, False), (None, [225, 0, 1], False)],
)
def test_one_long_context_among_short_ones(short_parts, window, firsts, sinks, rectangle):
    check(
        RandomTrees(
            [725, 20, 75],
            [5, 5, 2],
            2,
            4,
            window=window,
            firsts=firsts,
            sinks=sinks,
            rectangle=rectangle,
        )
    )


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("stale", [torch.inf, torch.nan])
def test_what_no_sequence_wrote_reaches_no_row(stale, window):
    """Unused positions may hold anything, and 0 times infinity is not 0."""
    check(RandomTrees([0, 70, 300], [1, 9, 3], 2, 2, padding=2, stale=stale, window=window))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("window", [None, 5000])
def test_long_contexts(dtype, window):
    check(
        RandomTrees(
            [32_000, 9_000, 0], [20, 3, 2], 1, 4, dtype=dtype, window=window, firsts=[1, 700, 0]
        )
    )
