"""The drafter: cached trees of pairs equal one causal pass over each path."""

import torch

from eagle_ray.drafting.eagle import EagleDrafter
from eagle_ray.models.kv_cache import BatchSlots
from eagle_ray.models.target import Prompts, Target
from eagle_ray.speculative.plan import Plan
from eagle_ray.speculative.sampling import BatchSampling, SamplingParams
from tests.toy import head, llama


@torch.inference_mode()
def test_drafted_values_equal_uncached_forwards_of_each_path():
    """Every node's conditional log-probability, recomputed by running the head causally over its whole path."""
    target = Target(llama(), num_slots=3, capacity=64)
    eagle = head()
    drafter = EagleDrafter(eagle, target, capacity=64)
    prompts = [[5, 9, 23, 40, 11], [7, 31, 3]]
    packed = Prompts.of([2, 0], prompts)
    logits, features = target.prefill(packed)
    first = logits.argmax(-1)
    drafter.prefill(packed, packed.tokens.roll(-1).index_copy(0, packed.last, first), features)
    sampling = BatchSampling.of([SamplingParams()] * 2)
    tree = drafter.draft(BatchSlots.of([2, 0], [5, 3]), first, Plan(max_depth=4, width=3), sampling).tree
    parts = features.split([5, 3])
    for b, ids in enumerate(prompts):
        for node in range(1, tree.num_nodes):
            tokens, values = path(tree, b, node)
            wanted = chained(eagle, target, [*ids[1:], int(first[b])], parts[b], tokens)
            torch.testing.assert_close(torch.tensor(values), wanted, atol=1e-4, rtol=0)


def path(tree, b, node):
    """Tokens from the root's child down to node, and its conditional log-probability at each of them."""
    tokens, values = [], []
    while node > 0:
        parent = int(tree.parents[b, node])
        tokens.insert(0, int(tree.tokens[b, node]))
        values.insert(0, float(tree.log_values[b, node] - tree.log_values[b, parent]))
        node = parent
    return tokens, values


def chained(eagle, target, tokens, features, path_tokens):
    """The head run over all pairs at once, growing by its own last feature: slow and without any cache."""
    log_probs = []
    for token in path_tokens:
        positions = torch.arange(len(tokens))[None]
        hidden = eagle(target.embed_tokens(torch.tensor([tokens])), features[None], positions)[0]
        log_probs.append(target.logits(hidden[-1]).log_softmax(-1)[token])
        tokens, features = [*tokens, token], torch.cat([features, hidden[-1:]])
    return torch.stack(log_probs)
