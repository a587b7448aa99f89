"""Trees over a Target's slots equal a plain forward of each path, however they are packed."""

import pytest
import torch

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.models.target import PromptBatch
from eagle_ray.tree.draft_tree import DraftTree, VerifyResult
from tests.support.families import PROMPTS, assert_trees_equal, path_to, plain_copy, target_of
from tests.support.toy_models import llama, random_tree


@pytest.mark.parametrize("budgets, padding", [((9, 9, 9), 0), ((9, 2, 6), 0), ((9, 2, 6), 7)])
@torch.inference_mode()
def test_tree_logits_equal_plain_forwards(budgets, padding):
    model = llama()
    assert_trees_equal(plain_copy(model), target_of(model), budgets=budgets, padding=padding)


@torch.inference_mode()
def test_prompts_beside_trees_give_what_either_gives_alone():
    """A chunk from the middle of a prompt and a whole prompt, in other slots than the trees."""
    model, ids = llama(), [[5, 9, 33, 7], [8, 40, 2], [61, 3, 3, 9, 12]]
    targets = [target_of(model), target_of(model)]
    for target in targets:
        target.prefill(PromptBatch.of([3, 0], [ids[0], ids[2][:2]]))
    trees = random_tree(torch.Generator().manual_seed(3), 6, vocab=97)
    batch, chunks = (
        DecodeSlots.of([3], [4]),
        PromptBatch.of([0, 4], [ids[2][2:], ids[1]], starts=[2, 0]),
    )
    rows = trees.pack(batch.lengths, 7)  # one of padding
    alone = [targets[0].verify(trees, rows, batch, max_depth=5), targets[0].prefill(chunks)]
    together = targets[1].forward_mixed(trees, rows, batch, 5, chunks)
    for one, other in zip(alone, together, strict=True):
        for name in ("logits", "hidden", "features"):
            torch.testing.assert_close(getattr(one, name), getattr(other, name), atol=1e-5, rtol=0)
    roots, after = DraftTree.of_roots(torch.tensor([6, 7, 8])), DecodeSlots.of([3, 0, 4], [4, 5, 3])
    seen = [
        t.verify(roots, roots.pack(after.lengths, 3), after, max_depth=0).logits for t in targets
    ]
    torch.testing.assert_close(*seen, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_what_is_committed_is_the_path_and_nothing_else():
    """After each commit the next tree must read exactly the accepted tokens, for five rounds of random acceptance."""
    model = llama()
    plain, target = plain_copy(model), target_of(model)
    generator = torch.Generator().manual_seed(5)
    sequences = [list(ids) for ids in PROMPTS]
    target.prefill(PromptBatch.of([3, 0, 4], sequences))
    for _ in range(5):
        trees = [random_tree(generator, 9, vocab=97) for _ in sequences]
        tree = DraftTree(*(torch.cat([getattr(t, f) for t in trees]) for f in DraftTree.__slots__))
        batch = DecodeSlots.of([3, 0, 4], [len(ids) for ids in sequences])
        target.verify(tree, tree.pack(batch.lengths, 27), batch, max_depth=8)
        ends = torch.randint(0, 9, (3,), generator=generator).tolist()
        paths = [path_to(tree, b, end) for b, end in enumerate(ends)]
        nodes = torch.tensor([path + [-1] * (9 - len(path)) for path in paths])
        counts = torch.tensor([len(path) - 1 for path in paths])
        target.commit(batch, VerifyResult(nodes, counts, torch.zeros_like(nodes)))
        for b, path in enumerate(paths):
            sequences[b] += tree.tokens[b, path].tolist()
    roots = DraftTree.of_roots(torch.tensor([6, 7, 8]))
    batch = DecodeSlots.of([3, 0, 4], [len(ids) for ids in sequences])
    logits = target.verify(roots, roots.pack(batch.lengths, 3), batch, max_depth=0).logits
    for b, ids in enumerate(sequences):
        wanted = plain(torch.tensor([[*ids, 6 + b]])).logits[0, -1]
        torch.testing.assert_close(logits[b], wanted, atol=1e-4, rtol=0)
