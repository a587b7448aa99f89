"""A draft in one C++ call is the draft by calls level by level, bit by bit, and that by torch, node by node."""

from dataclasses import replace
from typing import Any

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
from eagle_ray.tree.expand import PLAIN_PLAN, DraftPlan, PriceRule, TreeBuilder
from tests.support.toy_models import head, head3, llama_engine

pytestmark = pytest.mark.skipif(
    cpu_ops.best_library() is None, reason="no compiled library for this processor"
)
HEAD_DIM = 8
GREEDY, SAMPLED = (
    SamplingParams(max_tokens=40),
    SamplingParams(max_tokens=40, temperature=0.8, seed=3),
)
PLANS = [
    DraftPlan(4, 3),
    DraftPlan(4, 2, num_children=3),
    PLAIN_PLAN,
    DraftPlan(3, 3, members=(0, 2)),
    DraftPlan(
        4,
        3,
        should_stop=lambda growing: growing.depth == 3 and growing.frontier().log_values.sum() < 0,
    ),
    DraftPlan(1, 1, num_children=3),
] * 3
SWITCHES = {"norm_before_residual": True, "norm_output": True}
NORMS = {"has_qk_norms": True}  # of queries and keys
WINDOW = {"layer_windows": [3]}  # shorter than a draft is deep


class TorchBuilder(TreeBuilder):
    """Grows trees as TreeBuilder does; a drafter with another builder than that drafts by torch."""


class RecordedPlanner(UniformPlanner):
    """Plans by a list, and keeps the drafts, of which it verifies eight nodes each."""

    def __init__(self, plans: list[DraftPlan]):
        super().__init__(TreeBounds(12, 4, 3))
        self.plans, self.drafts = list(plans), []

    def plan(self, batch: object) -> DraftPlan:
        return self.plans.pop(0) if self.plans else PLAIN_PLAN

    def allocate(self, draft: Draft, plan: DraftPlan, batch: object) -> Allocation:
        tensors = [tensor.clone() for tensor in (*draft.tree.tensors, *draft.levels)]
        self.drafts.append((tensors, draft.num_passes, draft.num_catch_up))
        return Allocation.uniform(draft, 8)


def engine_of(
    switches: dict[str, Any] | None, num_slots: int = 3, top_k: int = 3, num_drafted: int = 60
) -> Engine:
    """Return an engine with a head of EAGLE-3, or of EAGLE-2 if switches are None: it reads the target's lm_head."""
    if switches is None:
        weights = head(intermediate_size=64)
    else:
        weights = head3(num_drafted=num_drafted, intermediate_size=64, **switches)
    for parameter in weights.parameters():
        if parameter.ndim > 1:
            parameter.mul_(4)  # sharp enough that rounding changes no order
        if len(parameter) == HEAD_DIM:
            parameter.add_(torch.linspace(-0.3, 0.3, HEAD_DIM))  # a norm of heads
    quantize_linears(weights)
    return llama_engine(
        num_slots,
        12,
        4,
        top_k,
        weights=weights,
        packed=True,
        quantised=switches is None,
        num_hidden_layers=8,
    )


def engine_of_own_lm_head(quantised: bool = True) -> Engine:
    """Return an engine with a head of EAGLE-2 with another lm_head than its quantised target's."""
    weights = head(intermediate_size=64)
    weights.lm_head = torch.nn.Linear(32, 97, bias=False).requires_grad_(False)
    for parameter in weights.parameters():
        if parameter.ndim > 1:
            parameter.mul_(4)
    own = weights.lm_head
    quantize_linears(weights)
    if not quantised:
        weights.lm_head = own
    return llama_engine(
        3, 12, 4, 3, weights=weights, packed=True, quantised=True, num_hidden_layers=8
    )


def run(engine: Engine, params: list[SamplingParams], plans: list[DraftPlan] = PLANS) -> list:
    engine.planner = RecordedPlanner(plans)
    prompts = [[5, 9, 23, 40, 11], [7, 31, 3], [1, 8, 15, 22, 29, 36, 43]] * 3
    for i, (ids, each) in enumerate(zip(prompts, params, strict=False)):
        engine.add(Sequence(str(i), [*ids, i], each))
    for _ in plans:
        engine.step()
    return engine.planner.drafts


def quantized_draft(engine: Engine) -> QuantizedDraft | None:
    drafter, target = engine.drafter, engine.target
    offered = target.logits_over(drafter.ranking.token_ids)
    return QuantizedDraft.of(
        drafter.head, drafter.embed_tokens, offered, drafter.cache, drafter.queue, 4
    )


def price_rule(level_price: float, num_more: int) -> PriceRule:
    """Return a rule of two depths, the second of which has fewer ranks."""
    return PriceRule([[0.6, 0.3, 0.05], [0.5, 0.2]], 0.9, level_price, 0.02, num_more)


def plans_of(width: int, children: int) -> list[DraftPlan]:
    """Return plans of each depth, some of which end by the price of a level."""
    plans = [DraftPlan(depth, width, num_children=children) for depth in (1, 2, 3, 4)]
    rules = [price_rule(price, more) for price in (1e-4, 0.02, 0.1, 0.5) for more in (0, 1)]
    plans += [
        DraftPlan(4, width, num_children=children, should_stop=rule.should_stop(), price_rule=rule)
        for rule in rules
    ]
    return plans


def by_level(plan: DraftPlan) -> DraftPlan:
    """Return a plan for the same draft, which Python stops level by level."""
    rule = plan.price_rule
    should_stop = (lambda draft: False) if rule is None else rule.should_stop()
    return replace(plan, should_stop=should_stop, price_rule=None)


@pytest.mark.parametrize(
    "params", [[GREEDY] * 3, [GREEDY, SAMPLED, SAMPLED]], ids=["greedy", "mixed"]
)
@pytest.mark.parametrize(
    "switches",
    [None, {}, SWITCHES, NORMS, WINDOW, NORMS | WINDOW],
    ids=["eagle2", "eagle3", "3.1", "norms", "window", "norms and window"],
)
def test_the_nodes_and_what_is_learned_are_those_of_torch(params, switches):
    by_calls, by_torch = engine_of(switches), engine_of(switches)
    assert quantized_draft(by_calls) is not None
    by_torch.drafter.builder = TorchBuilder
    by_torch.drafter.extend = by_torch.drafter.extend_portably
    found, wanted = run(by_calls, params), run(by_torch, params)
    for (ours, *our_counts), (theirs, *their_counts) in zip(found, wanted, strict=True):
        assert our_counts == their_counts
        for mine, other in zip(ours, theirs, strict=True):
            if mine.is_floating_point():
                torch.testing.assert_close(
                    mine, other, atol=2e-2, rtol=0
                )  # 8-bit inputs may differ by a step
            else:
                assert torch.equal(mine, other)
    fits = [
        (e.drafter.ranking.calibration.fit.parameters, e.drafter.ranking.coupling.fit.parameters)
        for e in (by_calls, by_torch)
    ]
    for mine, other in zip(*fits, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-2, rtol=0)


@pytest.mark.parametrize("batch_size", range(1, 9))
@pytest.mark.parametrize("width, children, num_drafted", [(1, 3, 60), (3, 3, 40), (2, 5, 96)])
def test_one_call_drafts_what_calls_level_by_level_do(batch_size, width, children, num_drafted):
    switches = [None, {}, SWITCHES, NORMS | WINDOW][batch_size % 4]
    drafts = []
    for change in (lambda plan: plan, by_level):
        plans = [change(plan) for plan in plans_of(width, children)]
        engine = engine_of(switches, batch_size, children, num_drafted)
        drafts.append(run(engine, [GREEDY] * batch_size, plans))
    assert len(drafts[0]) == len(plans)
    for (ours, *our_counts), (theirs, *their_counts) in zip(*drafts, strict=True):
        assert our_counts == their_counts
        assert all(map(torch.equal, ours, theirs))
    depths = {num_passes for _, num_passes, _ in drafts[0][4:]}
    assert len(depths) > 1, "some rules end a draft, and some do not"


def test_a_head_with_an_lm_head_of_its_own_drafts_with_it():
    by_calls, by_torch = engine_of_own_lm_head(), engine_of_own_lm_head()
    assert quantized_draft(by_calls) is not None
    by_torch.drafter.builder = TorchBuilder
    by_torch.drafter.extend = by_torch.drafter.extend_portably
    drafts = [run(engine, [GREEDY] * 3, plans_of(2, 3)) for engine in (by_calls, by_torch)]
    for (ours, *_), (theirs, *_) in zip(*drafts, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, atol=2e-2, rtol=0)


def test_an_lm_head_that_is_not_quantised_is_run_by_torch():
    assert quantized_draft(engine_of_own_lm_head(quantised=False)) is None


def test_all_levels_are_one_call_for_greedy_rows(monkeypatch):
    called = []
    find = cpu_ops.function_for
    monkeypatch.setattr(
        cpu_ops, "function_for", lambda name, *rest: called.append(name) or find(name, *rest)
    )
    run(engine_of({}), [GREEDY] * 3, plans_of(2, 3))
    assert called.count("draft_levels") == len(plans_of(2, 3))
    assert "draft_head_pass" not in called
    run(engine_of({}), [SAMPLED] * 3, plans_of(2, 3))
    assert "draft_head_pass" in called, "coupled children depend on noise, which Python adds"


def test_a_head_that_is_not_quantised_is_run_by_torch():
    assert quantized_draft(llama_engine(1, 12, 4, 3, weights=head3(), num_hidden_layers=8)) is None
    assert quantized_draft(llama_engine(1, 12, 4, 3)) is None
