"""SimulatedPlanner: a planner in a world whose seconds are made up, and so exact.

    engine.planner = Priced(BudgetPlanner(TreeBounds(60, 6, 10), cpu()), cpu())
    ...
    engine.planner.tokens_per_second

What a machine cannot tell apart in a minute of real seconds, made-up ones can: acceptance is the
pair's own, and every step takes what a table of costs says.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.device import StepTimes
from eagle_ray.methods.drafter import Draft
from eagle_ray.models.graphs import PassSizes
from eagle_ray.planner.cost_cache import CURVES, NUMBERS
from eagle_ray.planner.cost_model import BUCKETS, CostCurve, StepCosts
from eagle_ray.planner.planner import Allocation, Planner, StepOutcome
from eagle_ray.tree.expand import DraftPlan


def cpu() -> StepCosts:
    """A 230M pair on two cores, as it was measured: every row more costs something."""
    return world(
        [1, 4, 8, 16, 24, 64],
        [0.033, 0.044, 0.056, 0.076, 0.097, 0.215],
        0.107,
        (0.001, 0.0025),
        2e-6,
    )


def busy() -> StepCosts:
    """The same while others use the machine's memory: small passes, which wait for weights, are slowed down most."""
    return world(
        [1, 4, 8, 16, 24, 64],
        [0.043, 0.056, 0.067, 0.083, 0.100, 0.215],
        0.107,
        (0.001, 0.0025),
        2e-6,
    )


def flat(free_rows: int = 8, head_share: float = 0.1) -> StepCosts:
    """A pass costs the same up to free_rows rows, 40 ms, and rises by the row from there."""
    seconds = [0.040 * max(1.0, 0.55 + 0.45 * n / free_rows) for n in BUCKETS]
    return world(BUCKETS, seconds, head_share, (0.001, 0.002), 1e-7)


def avx512() -> StepCosts:
    """That pair on two cores of a Xeon of 2023, in fp32: a pass of few rows waits for the weights."""
    return StepCosts(
        verify=_curve(
            {1: 57.5, 6: 60, 8: 65.5, 16: 80, 24: 91.5, 32: 107, 48: 130, 64: 152, 128: 240}
        ),
        attention_per_token=2.4e-6,
        catch_up=_curve({1: 7.2, 8: 8.5, 16: 9.7, 32: 11.7, 64: 18}),
        expand=_curve({1: 5.8, 8: 6.9, 16: 8.1, 32: 11.4, 64: 18}),
        plain_overhead=_curve({1: 0.6, 16: 0.9}),
        draft_overhead=_curve({1: 1.8, 16: 3.1}),
        attention_per_row=3.8e-7,
    )


def amx() -> StepCosts:
    """The same in bf16, whose tiles hold 16 rows: dozens of rows more are nearly free."""
    return StepCosts(
        verify=_curve({1: 40, 8: 42, 16: 44.5, 32: 51.5, 48: 56, 64: 61, 96: 72, 144: 91}),
        attention_per_token=2.3e-6,
        catch_up=_curve({1: 5.3, 16: 5.5, 32: 6.7, 48: 8.2, 64: 9.5}),
        expand=_curve({1: 3.3, 4: 4.5, 16: 5, 32: 6, 64: 7.2}),
        plain_overhead=_curve({1: 0.6, 16: 1}),
        draft_overhead=_curve({1: 1.7, 16: 3.3}),
    )


def h200() -> StepCosts:
    """A Llama 8B in bf16 on an H200, graphs replayed, as `jobs.bench.gpu` measured it on 2026-11-26."""
    return StepCosts(
        verify=_curve(
            {
                1: 4.85,
                8: 5,
                32: 5.25,
                64: 5.65,
                96: 6.1,
                128: 6.3,
                192: 7.35,
                256: 8.15,
                512: 13,
                1024: 22,
            }
        ),
        attention_per_token=4e-8,
        catch_up=_curve({1: 0.95, 64: 1.05, 448: 1.15}),
        expand=_curve({1: 0.55, 40: 0.6, 160: 0.65, 256: 1.02, 640: 2.25}),
        plain_overhead=_curve({1: 0.08, 16: 0.1, 64: 0.2}),
        draft_overhead=_curve({1: 0.2, 16: 0.22, 64: 0.45}),
    )


def h100() -> StepCosts:
    """A Llama 8B in bf16 on an H100, graphs replayed.

    Products and attention of a layer as an H100 ran them on 2026-11-27 (jobs/results/gpu.md), 32
    times. What such a step takes beyond them is not measured there: the lm_head by its bytes, the
    rest as on the H200.
    """
    return StepCosts(
        verify=_curve({1: 6.7, 16: 6.8, 64: 7.1, 128: 7.6, 256: 8.5, 512: 13.5, 1024: 21.5}),
        attention_per_token=6.6e-8,
        catch_up=_curve({1: 1.2, 64: 1.3, 448: 1.6, 1792: 3.8}),
        expand=_curve({1: 0.75, 40: 0.8, 160: 0.9, 256: 1.2, 640: 2.4, 2560: 9}),
        plain_overhead=_curve({1: 0.08, 16: 0.1, 64: 0.2}),
        draft_overhead=_curve({1: 0.2, 16: 0.22, 64: 0.45}),
        attention_per_row=1e-9,
    )


def _curve(milliseconds: dict[int, float]) -> CostCurve:
    """By rows."""
    return CostCurve([*milliseconds], [ms / 1e3 for ms in milliseconds.values()])


def world(
    rows: Sequence[int],
    seconds: Sequence[float],
    head_share: float,
    rest: tuple[float, float],
    attend: float,
) -> StepCosts:
    """seconds: of a pass by its rows. head_share: of that, what a pass of the head takes.

    rest: all else of a plain step and of one that drafts, s. attend: s for each cached token.
    """
    verify = CostCurve([*rows], [*seconds])
    read, level = (CostCurve([*rows], [head_share * s for s in seconds]) for _ in range(2))
    plain_rest, draft_rest = (CostCurve([1], [s]) for s in rest)
    return StepCosts(verify, attend, read, level, plain_rest, draft_rest)


def mistaken(costs: StepCosts, error: float, seed: int) -> StepCosts:
    """The same, measured badly: each number is off by a lognormal factor with this standard deviation."""
    draw = random.Random(seed)
    true = {name: getattr(costs, name) for name in CURVES}
    curves = {
        name: CostCurve(curve.rows, [s * draw.lognormvariate(0, error) for s in curve.seconds])
        for name, curve in true.items()
    }
    numbers = {name: getattr(costs, name) * draw.lognormvariate(0, error) for name in NUMBERS}
    return StepCosts(**curves, **numbers)


def padded(outcome: StepOutcome, sizes: PassSizes, num_pair_rows: int | None = None) -> StepOutcome:
    """The step as it runs in replayed passes. num_pair_rows: see StepOutcome."""
    if not outcome.depth and not outcome.plan.is_drafting:
        return replace(outcome, num_rows=sizes.batch(outcome.num_rows))
    rows = sizes.level_rows(outcome.batch_size, outcome.plan.width)
    num_rows = sizes.rows(outcome.num_rows)
    return replace(outcome, num_rows=num_rows, num_level_rows=rows, num_pair_rows=num_pair_rows)


class SimulatedPlanner:
    """A planner whose steps take the seconds that `costs` says, which it hears as if they had been measured.

    noise: standard deviation of the logarithm of what it hears about each part of a step; what
    counts has none. sizes: of replayed passes, whose padding costs as rows do; None is none.
    num_tokens, seconds, outcomes: of the steps since the last `reset`, prompts and their first
    tokens left out.
    """

    def __init__(
        self,
        planner: Planner,
        costs: StepCosts,
        noise: float = 0.0,
        seed: int = 0,
        sizes: PassSizes | None = None,
    ):
        self.planner, self.costs, self._sizes = planner, costs, sizes
        self._noise, self._draw = noise, random.Random(seed)
        self.reset()

    def reset(self) -> None:
        self.seconds, self.num_tokens = 0.0, 0
        self.outcomes: list[StepOutcome] = []

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    def tokens_per_second_at(self, costs: StepCosts) -> float:
        """Of these steps at other costs, which a fixed plan never hears of."""
        return self.num_tokens / sum(
            costs.predict(o).total - costs.prefill_seconds(o) for o in self.outcomes
        )

    @property
    def will_draft(self) -> bool:
        return self.planner.will_draft

    def plan(self, batch: DecodeBatch) -> DraftPlan:
        return self.planner.plan(batch)

    def allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        return self.planner.allocate(draft, plan, batch)

    def observe(self, outcome: StepOutcome) -> None:
        if self._sizes is not None:
            outcome = padded(outcome, self._sizes, self._pair_rows(outcome, self._sizes))
        seconds = self.costs.predict(outcome)
        self.seconds += seconds.total - self.costs.prefill_seconds(outcome)
        self.num_tokens += outcome.batch_size + outcome.num_accepted
        self.outcomes.append(outcome)
        self.planner.observe(replace(outcome, seconds=self._heard(seconds)))

    def _pair_rows(self, outcome: StepOutcome, sizes: PassSizes) -> int | None:
        """The rows of the pass that reads pairs, launched when the host knows only how many the last step can leave."""
        if sizes.pairs is None:
            return None
        size, before = outcome.batch_size, self.outcomes[-1:]
        bounds = [
            min(last.num_rows, size * (1 + last.depth))
            for last in before
            if last.batch_size == size
        ]
        return sizes.pairs(max([outcome.num_catch_up, *bounds]))

    def _heard(self, seconds: StepTimes) -> StepTimes:
        if not self._noise:
            return seconds
        parts = (seconds.draft, seconds.verify, seconds.overhead)
        return StepTimes(*(part * self._draw.lognormvariate(0, self._noise) for part in parts))
