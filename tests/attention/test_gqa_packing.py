"""Folded queries are what gathering by tree and then folding heads gives, and they come back to their rows."""

import pytest
import torch

from eagle_ray.attention.attention_groups import AttentionGroup
from eagle_ray.attention.gqa_packing import GQAPacking, fold_rectangle, unfold_rectangle

HEADS, KV_HEADS, DIM = 6, 2, 4
ROW_OF = torch.tensor([[0, 1, 2], [3, 0, 0], [4, 5, 0]])  # trees of 3, 1 and 2 rows
UNPACK = torch.tensor([0, 1, 2, 3, 6, 7])


def queries(num_rows: int) -> torch.Tensor:
    """[1, heads, R, d], in memory as a projection leaves them: row by row."""
    return torch.randn(
        1, num_rows, HEADS, DIM, generator=torch.Generator().manual_seed(1)
    ).transpose(1, 2)


@pytest.mark.parametrize(
    "groups",
    [
        [AttentionGroup([0, 1, 2], 3)],
        [AttentionGroup([1, 2], 2), AttentionGroup([0], 3)],
        [AttentionGroup([2, 0], 3), AttentionGroup([1], 1)],
        [AttentionGroup([2], 2), AttentionGroup([1], 1), AttentionGroup([0], 3)],
    ],
)
def test_ragged_trees_are_padded_and_folded_and_come_back(groups):
    query, folding = queries(6), GQAPacking.of(ROW_OF, UNPACK, HEADS, KV_HEADS, groups)
    folded = folding.fold(query)
    for group, rows in zip(groups, folded, strict=True):
        by_tree = query[0][:, ROW_OF[group.members, : group.size]].transpose(
            0, 1
        )  # [b, heads, n, d]
        assert torch.equal(rows, by_tree.reshape(len(group.members), KV_HEADS, 3 * group.size, DIM))
    assert torch.equal(folding.unfold(folded, HEADS), query)
    as_torch_leaves_it = [rows.transpose(1, 2).contiguous().transpose(1, 2) for rows in folded]
    assert torch.equal(folding.unfold(as_torch_leaves_it, HEADS), query)


def test_a_rectangle_needs_no_index():
    query, row_of, together = queries(6), torch.arange(6).view(2, 3), [AttentionGroup([0, 1], 3)]
    folded, folding = (
        fold_rectangle(query, 2, KV_HEADS),
        GQAPacking.of(row_of, torch.arange(6), HEADS, KV_HEADS, together),
    )
    assert torch.equal(folded, folding.fold(query)[0])
    assert torch.equal(unfold_rectangle(folded, HEADS), folding.unfold([folded], HEADS))
