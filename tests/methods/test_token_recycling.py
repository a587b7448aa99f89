"""Token Recycling: what a tree is grown from are the target's own best tokens, of every row that was verified."""

import torch

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.methods.calibration import Calibration
from eagle_ray.methods.drafter import VerifyOutput
from eagle_ray.methods.lookup.token_recycling import RecyclingDrafter
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.draft_tree import DraftTree, VerifyResult
from eagle_ray.tree.expand import DraftPlan
from tests.support.trees import check_tree, paths

VOCAB = 12
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


def verify_tokens(drafter: RecyclingDrafter, tokens: list[int], padding: int = 0) -> None:
    """As if these tokens had been roots, by a target whose logits are the table's; padding rows say nonsense."""
    tree = DraftTree.of_roots(torch.tensor(tokens))
    rows = tree.pack(torch.zeros(len(tokens), dtype=torch.int64), len(tokens) + padding)
    logits = torch.where(rows.seq[:, None] >= 0, TABLE[rows.tokens], torch.arange(VOCAB).float())
    picks = TABLE[tokens].argmax(-1)
    result = VerifyResult(
        torch.zeros(len(tokens), 1).long(), torch.zeros(len(tokens)).long(), picks[:, None]
    )
    drafter.extend(
        DecodeSlots.of([0], [3], "cpu"), VerifyOutput(tree, rows, logits, logits[:, :1], result)
    )


def draft_of(drafter: RecyclingDrafter, roots: list[int], plan: DraftPlan):
    batch = DecodeSlots.of(list(range(len(roots))), [3] * len(roots), "cpu")
    sampling = SamplingBatch.of([SamplingParams()] * len(roots))
    return drafter.draft(batch, torch.tensor(roots), plan, sampling, ())


def test_children_are_best_tokens_verified_after_their_parent():
    drafter = RecyclingDrafter(VOCAB, max_children=3)
    assert draft_of(drafter, [4], DraftPlan(3, 3)).depth == 0
    verify_tokens(drafter, [t for t in range(VOCAB) if t != 7], padding=3)
    draft = draft_of(drafter, [4, 7], DraftPlan(max_depth=2, width=3))
    check_tree(draft.tree)
    best = TABLE.log_softmax(-1).topk(3, -1)
    wanted = {}
    for token, value in zip(best.indices[4].tolist(), best.values[4].tolist(), strict=True):
        wanted[(token,)] = value
        if token != 7:  # nothing was ever verified after it
            for child, more in zip(
                best.indices[token].tolist(), best.values[token].tolist(), strict=True
            ):
                wanted[(token, child)] = value + more
    found = paths(draft, 0)
    assert found.keys() == wanted.keys() and paths(draft, 1) == {}
    for path, value in wanted.items():
        torch.testing.assert_close(
            torch.tensor(found[path]).log(), torch.tensor(value), atol=1e-4, rtol=1e-4
        )


def test_it_learns_how_far_to_trust_them_and_can_forget():
    calibration = Calibration(1)
    drafter = RecyclingDrafter(VOCAB, 2, calibration=calibration)
    verify_tokens(drafter, list(range(VOCAB)))
    for _ in range(50):
        draft = draft_of(drafter, [1, 2, 3], DraftPlan(1, 2))
        verify_tokens(drafter, [1, 2, 3])
    first, sure = (
        TABLE.softmax(-1).amax(-1)[1:4],
        torch.tensor([max(paths(draft, b).values()) for b in range(3)]),
    )
    assert (sure > first + 0.3 * (1 - first)).all()  # the best of them was picked every time
    drafter.reset_learning()
    assert draft_of(drafter, [1, 2, 3], DraftPlan(1, 2)).depth == 0
    assert calibration.fit.parameters[0, 0].tolist() == [1.0, 0.0, 0.0]


def test_last_row_of_a_token_counts_in_any_write_order(monkeypatch):
    """A GPU writes them in any order, and ranks must keep the same."""
    index_copy = torch.Tensor.index_copy_

    def backwards(self, dim, index, source):
        return index_copy(self, dim, index.flip(0), source.flip(0))

    tree = DraftTree.of_roots(torch.tensor([5, 3, 5, 5]))
    rows = tree.pack(torch.zeros(4, dtype=torch.int64), 6)
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1))
    result = VerifyResult(torch.zeros(4, 1).long(), torch.zeros(4).long(), torch.zeros(4, 1).long())
    kept = []
    for write in (index_copy, backwards):
        monkeypatch.setattr(torch.Tensor, "index_copy_", write)
        drafter = RecyclingDrafter(VOCAB, max_children=3)
        drafter.extend(
            DecodeSlots.of([0], [3], "cpu"), VerifyOutput(tree, rows, logits, logits[:, :1], result)
        )
        kept.append(draft_of(drafter, [5, 3], DraftPlan(1, 3)).tree)
    for tree in kept:
        wanted = torch.stack([logits[3].topk(3).indices, logits[1].topk(3).indices])
        assert torch.equal(tree.tokens[:, 1:], wanted)
