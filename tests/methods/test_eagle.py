"""The drafter: cached trees of pairs equal one causal pass over each path."""

import pytest
import torch

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.core.sequence import Sequence
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.engine.engine import Engine
from eagle_ray.methods.eagle.drafter import EagleDrafter
from eagle_ray.models.target import PromptBatch, TargetModel
from eagle_ray.planner.planner import Allocation, UniformPlanner
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.expand import PLAIN_PLAN, DraftPlan
from tests.support.toy_models import head, head3, llama, llama_engine
from tests.support.trees import path


@pytest.mark.parametrize("generation", ["EAGLE-2", "EAGLE-3"])
@torch.inference_mode()
def test_drafted_values_equal_uncached_forwards_of_each_path(generation):
    """Every node's conditional log-probability, recomputed by running the head causally over its whole path."""
    eagle, num_layers = (head(), 2) if generation == "EAGLE-2" else (head3(), 8)
    model, layers = llama(num_hidden_layers=num_layers), eagle.feature_layers(num_layers)
    target = TargetModel(model, num_slots=3, capacity=64, feature_layers=layers)
    drafter = EagleDrafter(eagle, target)
    prompts = [[5, 9, 23, 40, 11], [7, 31, 3]]
    for slot in (0, 2):
        target.cache.blocks.reserve(slot, 64)
    packed = PromptBatch.of([2, 0], prompts)
    features = (passed := target.prefill(packed)).features
    first = passed.logits.argmax(-1)
    drafter.prefill(packed, packed.tokens.roll(-1).index_copy(0, packed.last, first), features)
    sampling = SamplingBatch.of([SamplingParams()] * 2)
    tree = drafter.draft(
        DecodeSlots.of([2, 0], [5, 3]), first, DraftPlan(max_depth=4, width=3), sampling, ()
    ).tree
    parts = eagle.project_features(features).split([5, 3])
    for b, ids in enumerate(prompts):
        for node in range(1, tree.num_nodes):
            tokens, values = path(tree, b, node)
            wanted = chained_log_probs(eagle, target, [*ids[1:], int(first[b])], parts[b], tokens)
            torch.testing.assert_close(torch.tensor(values), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("num_plain", [1, 5, 12, 35])
def test_draft_after_plain_steps_equals_draft_without_them(num_plain):
    """The same sequences one token a step: drafting every time, or only at the end from the queue."""
    awake, asleep = llama_engine(3, 12, 4, 3), llama_engine(3, 12, 4, 3)
    trees = []
    for engine, shallow in ((awake, DraftPlan(1, 1)), (asleep, PLAIN_PLAN)):
        engine.planner = PlanListPlanner([shallow] * num_plain + [DraftPlan(4, 3)])
        for i, ids in enumerate([[5, 9, 23, 40, 11], [7, 31, 3]]):
            engine.add(Sequence(str(i), ids, SamplingParams(max_tokens=40, ignore_eos=True)))
        for _ in range(num_plain + 1):
            engine.step()
        trees.append(engine.planner.drafts[-1].tree)
    assert asleep.planner.drafts[-1].num_catch_up == 2 * (num_plain + 1)
    assert torch.equal(trees[0].tokens, trees[1].tokens)
    torch.testing.assert_close(
        trees[0].draft_log_probs, trees[1].draft_log_probs, atol=1e-4, rtol=0
    )


def test_pairs_beyond_the_queue_are_dropped_and_drafts_continue():
    target = llama_engine(2, 12, 4, 3).target
    planner = PlanListPlanner([PLAIN_PLAN] * 10 + [DraftPlan(4, 3)] * 3)
    engine = Engine(
        target, EagleDrafter(head(), target, window=6), planner, 128, TreeBounds(12, 4, 3)
    )
    plain = llama_engine(2)
    outputs = []
    for each in (engine, plain):
        sequence = Sequence("a", [5, 9, 23, 40, 11], SamplingParams(max_tokens=13, ignore_eos=True))
        each.add(sequence)
        while each.has_work:
            each.step()
        outputs.append(sequence.output_ids)
    assert outputs[0] == outputs[1]
    assert [d.num_catch_up for d in engine.planner.drafts][10] == 6


class PlanListPlanner(UniformPlanner):
    """Drafts by a list of plans, verifies the root alone and so goes on by one token a step; keeps the drafts."""

    def __init__(self, plans):
        super().__init__(TreeBounds(12, 4, 3))
        self.plans, self.drafts = plans, []

    def plan(self, batch):
        return self.plans[min(len(self.drafts), len(self.plans) - 1)]

    def allocate(self, draft, plan, batch):
        self.drafts.append(draft)
        return Allocation(draft.tree.depths == 0, 1, len(batch))


def chained_log_probs(eagle, target, tokens, features, path_tokens):
    """The head run over all pairs at once, growing by its own last feature: slow and without any cache."""
    log_probs = []
    for token in path_tokens:
        positions = torch.arange(len(tokens))[None]
        hidden = eagle(target.embed_tokens(torch.tensor([tokens])), features[None], positions)[0]
        drafted = token if eagle.token_ids is None else eagle.token_ids.tolist().index(token)
        log_probs.append(eagle.logits(hidden[-1], target.logits).log_softmax(-1)[drafted])
        tokens, features = [*tokens, token], torch.cat([features, hidden[-1:]])
    return torch.stack(log_probs)
