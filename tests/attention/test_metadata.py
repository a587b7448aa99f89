"""Attention's special cases, against the plain formula."""

import pytest
import torch

from eagle_ray.attention import metadata
from eagle_ray.attention.backend import tree_metadata
from eagle_ray.attention.cpu_attention import CpuMetadata
from eagle_ray.attention.metadata import AttentionParams, causal_attention, masked_attention
from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.kernels import cpu_ops
from eagle_ray.kv.block_manager import BlockManager
from eagle_ray.kv.kv_cache import KVCache
from eagle_ray.tree.budget import ranks
from tests.support.trees import grown_trees


@pytest.mark.parametrize("num_nodes", [1, 2, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_bf16_attention_is_fp32_attention_within_rounding(num_nodes, masked):
    """One row on its own takes another road."""
    torch.manual_seed(0)
    query, keys, values = (
        torch.randn(3, 4, num_nodes, 16),
        torch.randn(3, 4, 20, 16),
        torch.randn(3, 4, 20, 16),
    )
    mask = torch.zeros(3, 1, num_nodes, 20)
    mask[1, ..., 5:] = torch.finfo(torch.bfloat16).min
    mask = mask if masked else None
    scores = query @ keys.transpose(2, 3) / 4 + (0 if mask is None else mask)
    exact = scores.softmax(-1) @ values
    narrow = [None if x is None else x.bfloat16() for x in (query, keys, values, mask)]
    out = masked_attention(*narrow, AttentionParams(0, scaling=0.25))
    assert out.shape == exact.shape
    assert (out - exact).abs().max() < 2e-2


@pytest.mark.parametrize("window", [None, 7, -6])
@pytest.mark.parametrize("num_rows", [40, 23])
@pytest.mark.parametrize("softcap, sinks", [(None, False), (5.0, False), (None, True)])
def test_scores_of_a_prompt_are_made_for_few_rows_at_a_time(
    num_rows, softcap, sinks, window, monkeypatch
):
    torch.manual_seed(0)
    query, keys, values = (
        torch.randn(1, 4, num_rows, 8),
        torch.randn(1, 2, 40, 8),
        torch.randn(1, 2, 40, 8),
    )
    attention = AttentionParams(0, 0.3, window, softcap, torch.randn(4) if sinks else None)
    whole, sizes, masked = (
        causal_attention(query, keys, values, attention),
        [],
        metadata.masked_attention,
    )
    monkeypatch.setattr(metadata, "MAX_SCORES", 4 * 40 * 6)
    monkeypatch.setattr(
        metadata,
        "masked_attention",
        lambda q, k, *x: sizes.append(2 * q.shape[2] * k.shape[2]) or masked(q, k, *x),
    )
    torch.testing.assert_close(causal_attention(query, keys, values, attention), whole)
    assert max(sizes, default=0) <= 4 * 40 * 6


@pytest.mark.skipif(cpu_ops.best_library() is None, reason="no compiled library for this processor")
@pytest.mark.parametrize("more_rows", [0, 3, None])
def test_the_layout_of_packed_rows_is_that_of_their_trees(more_rows):
    """For valid rows alone, with padding behind them, and with a row for every node; through any window."""
    blocks = BlockManager(num_slots=4, capacity=120)
    cache = KVCache(blocks, 1, 2, 8, torch.float32, "cpu")
    for slot in range(4):
        assert blocks.reserve(slot, 90)
    blocks.sync_table()
    batch = DecodeSlots.of([2, 0, 3], [40, 7, 16])

    tree = grown_trees(5, 3, 3, 3, ties=False)
    sizes = torch.tensor([4, 9, 1])
    tree = tree.rerank(ranks(tree.log_values) < sizes[:, None], 9)
    num_rows = 27 if more_rows is None else int(sizes.sum()) + more_rows
    rows = tree.pack(batch.lengths, num_rows)
    seq = rows.seq.clamp(min=0)
    positions = torch.where(rows.seq >= 0, batch.lengths[seq] + rows.node, blocks.null_position)
    wanted = tree_metadata(
        cache,
        batch,
        slot_mapping=cache.slot_mapping(batch.slots[seq], positions),
        ancestors=tree.ancestors(3),
        depths=tree.depths,
        position_depths=tree.depths,
        unpack=None if rows.is_rectangle else seq * tree.num_nodes + rows.node,
    )

    found = CpuMetadata.of_rows(cache, batch, tree, rows)
    assert torch.equal(found.slot_mapping, wanted.slot_mapping)
    for window in (None, 1, 2, 20, -6, -41):
        ours, theirs = found.seen(window), wanted.seen(window)
        for name in ("slots", "begin", "end", "trunk", "mask"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), (window, name)
