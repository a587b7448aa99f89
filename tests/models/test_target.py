"""Trees over a Target's slots equal a plain forward of each path, however they are packed; see test_families.py."""

import pytest
import torch

from eagle_ray.models.kv_cache import BatchSlots
from eagle_ray.models.target import Prompts
from eagle_ray.speculative.tree import DraftTree
from eagle_ray.speculative.verify import VerifyResult
from tests.models.families import PROMPTS, assert_trees_equal, path_to, plain_copy, target_of
from tests.toy import llama, random_tree


@pytest.mark.parametrize("budgets, padding", [((9, 9, 9), 0), ((9, 2, 6), 0), ((9, 2, 6), 7)])
@torch.inference_mode()
def test_tree_logits_equal_plain_forwards(budgets, padding):
    model = llama()
    assert_trees_equal(plain_copy(model), target_of(model), budgets=budgets, padding=padding)


@torch.inference_mode()
def test_what_is_committed_is_the_path_and_nothing_else():
    """After each commit the next tree must read exactly the accepted tokens, for five rounds of random acceptance."""
    model = llama()
    plain, target = plain_copy(model), target_of(model)
    generator = torch.Generator().manual_seed(5)
    sequences = [list(ids) for ids in PROMPTS]
    target.prefill(Prompts.of([3, 0, 4], sequences))
    for _ in range(5):
        trees = [random_tree(generator, 9, vocab=97) for _ in sequences]
        tree = DraftTree(*(torch.cat([getattr(t, f) for t in trees]) for f in DraftTree.__slots__))
        batch = BatchSlots.of([3, 0, 4], [len(ids) for ids in sequences])
        target.verify(tree, tree.pack(batch.lengths, 27), batch, max_depth=8)
        ends = torch.randint(0, 9, (3,), generator=generator).tolist()
        paths = [path_to(tree, b, end) for b, end in enumerate(ends)]
        nodes = torch.tensor([path + [-1] * (9 - len(path)) for path in paths])
        counts = torch.tensor([len(path) - 1 for path in paths])
        target.commit(batch, VerifyResult(nodes, counts, torch.zeros_like(nodes)))
        for b, path in enumerate(paths):
            sequences[b] += tree.tokens[b, path].tolist()
    roots = DraftTree.of_roots(torch.tensor([6, 7, 8]))
    batch = BatchSlots.of([3, 0, 4], [len(ids) for ids in sequences])
    logits, _ = target.verify(roots, roots.pack(batch.lengths, 3), batch, max_depth=0)
    for b, ids in enumerate(sequences):
        wanted = plain(torch.tensor([[*ids, 6 + b]])).logits[0, -1]
        torch.testing.assert_close(logits[b], wanted, atol=1e-4, rtol=0)
