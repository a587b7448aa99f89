"""A draft in a few C++ calls a level is the draft that torch makes, node by node."""

import pytest
import torch

from eagle_ray.core.sequence import Sequence
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.engine.engine import Engine
from eagle_ray.kernels import cpu_ops
from eagle_ray.methods.drafter import Draft
from eagle_ray.methods.eagle.quantized_draft import QuantizedDraft
from eagle_ray.models.quantized_linear import quantize_linears
from eagle_ray.planner.planner import Allocation, UniformPlanner
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.expand import PLAIN, DraftPlan, TreeBuilder
from tests.support.toy_models import head3, llama_engine

pytestmark = pytest.mark.skipif(cpu_ops.best_library() is None, reason="no compiled library for this processor")
GREEDY, SAMPLED = SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=0.8, seed=3)
PLANS = [
    DraftPlan(4, 3),
    DraftPlan(4, 2, num_children=3),
    PLAIN,
    DraftPlan(3, 3, members=(0, 2)),
    DraftPlan(4, 3, should_stop=lambda growing: growing.depth == 3 and growing.frontier().log_values.sum() < 0),
    DraftPlan(1, 1, num_children=3),
] * 3
SWITCHES = {"norm_before_residual": True, "norm_output": True}


class TorchBuilder(TreeBuilder):
    """Grows trees as TreeBuilder does; a drafter with another builder than that drafts by torch."""


class RecordedPlanner(UniformPlanner):
    """Plans by a list, and keeps the drafts, of which it verifies eight nodes each."""

    def __init__(self, plans: list[DraftPlan]):
        super().__init__(TreeBounds(12, 4, 3))
        self.plans, self.drafts = list(plans), []

    def plan(self, batch: object) -> DraftPlan:
        return self.plans.pop(0) if self.plans else PLAIN

    def allocate(self, draft: Draft, plan: DraftPlan, batch: object) -> Allocation:
        tensors = [tensor.clone() for tensor in (*draft.tree.tensors, *draft.levels)]
        self.drafts.append((tensors, draft.num_passes, draft.num_catch_up))
        return Allocation.uniform(draft, 8)


def engine_of(switches: dict[str, bool]) -> Engine:
    head = head3(intermediate_size=64, **switches)
    for parameter in head.parameters():
        if parameter.ndim > 1:
            parameter.mul_(4)  # sharp enough that rounding changes no order
    quantize_linears(head)
    return llama_engine(3, 12, 4, 3, weights=head, packed=True, num_hidden_layers=8)


def run(engine: Engine, params: list[SamplingParams]) -> list:
    engine.planner = RecordedPlanner(PLANS)
    prompts = [[5, 9, 23, 40, 11], [7, 31, 3], [1, 8, 15, 22, 29, 36, 43]]
    for i, (ids, each) in enumerate(zip(prompts, params, strict=True)):
        engine.add(Sequence(str(i), ids, each))
    for _ in PLANS:
        engine.step()
    return engine.planner.drafts


@pytest.mark.parametrize("params", [[GREEDY] * 3, [GREEDY, SAMPLED, SAMPLED]], ids=["greedy", "mixed"])
@pytest.mark.parametrize("switches", [{}, SWITCHES], ids=["plain", "3.1"])
def test_the_nodes_and_what_is_learned_are_those_of_torch(params, switches):
    by_calls, by_torch = engine_of(switches), engine_of(switches)
    drafter = by_calls.drafter
    assert QuantizedDraft.of(drafter.head, drafter.embed_tokens, drafter.cache, drafter.queue, 4) is not None
    by_torch.drafter.builder = TorchBuilder
    by_torch.drafter.extend = by_torch.drafter.extend_portably
    found, wanted = run(by_calls, params), run(by_torch, params)
    for (ours, *our_counts), (theirs, *their_counts) in zip(found, wanted, strict=True):
        assert our_counts == their_counts
        for mine, other in zip(ours, theirs, strict=True):
            if mine.is_floating_point():
                torch.testing.assert_close(mine, other, atol=2e-2, rtol=0)  # 8-bit inputs may differ by a step
            else:
                assert torch.equal(mine, other)
    fits = [
        (e.drafter.ranking.calibration.fit.parameters, e.drafter.ranking.coupling.fit.parameters)
        for e in (by_calls, by_torch)
    ]
    for mine, other in zip(*fits, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-2, rtol=0)


def test_a_head_that_is_not_quantised_is_run_by_torch():
    drafter = llama_engine(1, 12, 4, 3, weights=head3(), num_hidden_layers=8).drafter
    assert QuantizedDraft.of(drafter.head, drafter.embed_tokens, drafter.cache, drafter.queue, 4) is None
