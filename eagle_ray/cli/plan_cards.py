"""plan: predict for several clusters when a job would end there and what it would cost.

    print(plan_text(config, parse_gpus("h100:8,l40s:16"), parse_prices("h100=2.5,l40s=0.8")))

Step costs on a card are measured ones, if this machine or the run's directory has some of a start
on such a card. Otherwise they are estimated from the card's data sheet. The end and the price for
each number of workers are computed as for `validate --estimate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from eagle_ray.batch.driver.input_plan import plan_input
from eagle_ray.batch.driver.run_bounds import DEADLINE, RunBounds
from eagle_ray.batch.worker.start_cache import adopt_costs_of
from eagle_ray.cli.job_work import JobWork
from eagle_ray.cli.worker_counts import (
    LIKELY,
    MOMENT,
    SURE,
    WorkerCount,
    WorkerCounts,
    bounds_text,
)
from eagle_ray.config import JobConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.doctor.card_fit import CardFit, card_costs, card_fit
from eagle_ray.doctor.pair_check import PairHere, pair_here
from eagle_ray.planner.cards import Card, find_card
from eagle_ray.planner.steady_step import SteadyStep, steady_step
from eagle_ray.report.cost import money
from eagle_ray.report.text import NO_VALUE, number, render
from eagle_ray.runs.layout import output_of

START_S = 60.0  # of a worker on a GPU: 50 s for an 8B on an H100, 2026-11-27 (jobs/results/gpu.md), and Ray's
# Relative standard deviations of a speed: of one that a start has measured, and of a planned one. Passes of one
# model on two cards are planned to within 9 %; a whole step has parts besides, and other cards were not measured.
MEASURED_SPREAD = 0.15
PLANNED_SPREAD = 0.25
PLANNED = "~"  # before a number that is planned in any part


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster to plan for: `num_cards` GPUs of one kind, whose `name` is as the user gave it."""

    name: str
    card: Card
    num_cards: int


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Predictions for a job on one cluster.

    Attributes:
        slots: number of sequences that a worker runs at once.
        step: predicted step of a worker whose slots are full.
        is_measured: whether the step costs were measured.
        counts: end and price by the number of workers.
    """

    cluster: Cluster
    fit: CardFit
    slots: int
    step: SteadyStep
    is_measured: bool
    counts: WorkerCounts

    @property
    def tokens_per_s(self) -> float:
        """Return the output tokens per second of one worker."""
        return self.slots * self.step.tau / self.step.seconds

    def shown(self, bounds: RunBounds) -> WorkerCount:
        """Return the number of workers to show: the fewest that meet the bounds, or all if none do."""
        return self.counts.cheapest(bounds) or self.counts.with_workers(self.counts.largest)

    @property
    def source(self) -> str:
        """Return a text on whether the step costs were measured or estimated."""
        card = self.cluster.card
        if self.is_measured:
            return f"steps    measured: {card.name}, by an earlier start on such a card"
        return (
            f"steps    planned: {card.name}, by its published {card.bandwidth_gb_s:,g} GB/s and {card.tflops:,g} "
            "TFLOPS (bf16)"
        )


def parse_gpus(text: str) -> list[Cluster]:
    """Parse clusters from NAME:NUMBER,... Raises ConfigError."""
    clusters = []
    for part in text.split(","):
        name, _, count = part.strip().partition(":")
        card = find_card(name)
        if not count.isdecimal() or not int(count):
            raise ConfigError(f"--gpus: {part.strip()!r} has no cards. Give NAME:NUMBER, 1 or more")
        clusters.append(Cluster(f"{card.name}:{int(count)}", card, int(count)))
    return clusters


def parse_prices(texts: Sequence[str], clusters: Sequence[Cluster]) -> dict[str, float]:
    """Parse dollars per GPU hour, by card name, from texts such as h100=2.5,l40s=0.8. Raises ConfigError."""
    prices = {}
    for part in ",".join(texts).split(",") if texts else []:
        name, _, dollars = part.strip().partition("=")
        card = find_card(name, "--price")
        if card.name not in {cluster.card.name for cluster in clusters}:
            raise ConfigError(
                f"--price: {part.strip()!r} is of a card that --gpus lacks. Leave it out"
            )
        try:
            price = float(dollars)
        except ValueError:
            price = math.nan
        if not 0 < price < math.inf:
            raise ConfigError(f"--price: {part.strip()!r} is no price. Give NAME=DOLLARS, above 0")
        prices[card.name] = price
    return prices


def plan_text(config: JobConfig, clusters: Sequence[Cluster], prices: Mapping[str, float]) -> str:
    """Return the table of clusters, and lines on the assumptions behind it. Raises ConfigError.

    Args:
        prices: dollars per GPU hour, by the card's name.
    """
    now = datetime.now(timezone.utc)
    bounds = RunBounds.of(config.execution, now)
    _check_bounds(config, bounds, clusters, prices, now)
    here = _pair(config)
    work = JobWork.of(config, plan_input(config))
    adopt_costs_of(output_of(config))

    plans = []
    unfit = []
    for cluster in clusters:
        fit = card_fit(here, cluster.card, cluster.num_cards)
        if fit.fits:
            plans.append(_planned(here, cluster, fit, work, prices.get(cluster.card.name), now))
        else:
            unfit.append(f"{cluster.name}: {fit.why_not(cluster.card)}")
    return "\n".join([_table(plans, work, bounds), *unfit, *_sources(plans, work)])


def _check_bounds(
    config: JobConfig,
    bounds: RunBounds,
    clusters: Sequence[Cluster],
    prices: Mapping[str, float],
    now: datetime,
) -> None:
    """Raise ConfigError if there is no deadline, it is past, or a price is missing."""
    if not config.engine.is_own:
        raise ConfigError(
            f"engine.kind: {config.engine.kind}, and a plan is for our own engine. Leave it out"
        )
    if config.task != "generate":
        raise ConfigError(f"task: {config.task}, and a plan is for rows that generate")
    if bounds.finish_by is None:
        raise ConfigError(f"execution.{DEADLINE}: a plan needs one. Give --finish-by 06:00")
    bounds.check_start(None, now)
    lacking = [cluster.card.name for cluster in clusters if cluster.card.name not in prices]
    if bounds.max_dollars is not None and lacking:
        raise ConfigError(
            f"execution.max_dollars: no price for {lacking[0]}. Give --price {lacking[0]}=DOLLARS"
        )


def _pair(config: JobConfig) -> PairHere:
    """Return the job's pair on this machine. Raises ConfigError."""
    finding, here = pair_here(config)
    if here is None:
        raise ConfigError(finding.problem or f"{finding.says}. {finding.advice}")
    return here


def _planned(
    here: PairHere,
    cluster: Cluster,
    fit: CardFit,
    work: JobWork,
    price: float | None,
    now: datetime,
) -> ClusterPlan:
    """Return the job on a cluster in whose cards the pair fits."""
    costs, is_measured = card_costs(here, cluster.card, fit)
    slots = fit.slots_of(work.mean_positions)
    bounds = here.config.speculative.tree_bounds

    def step_of(busy: int) -> SteadyStep:
        return steady_step(costs, bounds, work.full_batch(busy), work.acceptance)

    def rows_with(workers: int) -> list:
        busy = min(slots, work.outputs(workers))
        return work.rows_at(step_of(busy), busy)

    counts = WorkerCounts(
        rows_with=rows_with,
        num_rows=work.num_rows,
        slots=slots,
        start_s=START_S,
        per_worker_hour=None if price is None else price * fit.num_gpus,
        now=now,
        deviation=MEASURED_SPREAD if is_measured else PLANNED_SPREAD,
        max_workers=cluster.num_cards // fit.num_gpus,
    )
    return ClusterPlan(cluster, fit, slots, step_of(slots), is_measured, counts)


def _table(plans: Sequence[ClusterPlan], work: JobWork, bounds: RunBounds) -> str:
    """Return a line for each cluster, and which is the cheapest that holds."""
    if not plans:
        return f"no cluster holds{bounds_text(bounds)}"
    shown = [(plan, plan.shown(bounds)) for plan in plans]
    holding = [(plan, count) for plan, count in shown if count.holds(bounds)]
    best = None
    if holding and all(count.dollars is not None for _, count in holding):
        best = min(holding, key=lambda each: each[1].dollars or 0.0)
    header = ["cards", "GPUs a worker", "slots", "tokens/s", "workers", "ends", f"{LIKELY:.0%}"]
    header += [f"{SURE:.0%}", f"dollars, {SURE:.0%}", "in time"]
    lines = [_line(plan, count, work, bounds, (plan, count) == best) for plan, count in shown]
    return f"{render(header, lines)}\n{_verdict(holding, best, bounds)}"


def _line(
    plan: ClusterPlan, count: WorkerCount, work: JobWork, bounds: RunBounds, is_best: bool
) -> list[str]:
    is_measured = plan.is_measured and work.is_measured
    moments = (count.ends_at, count.likely_at, count.surely_at)
    return [
        f"{'* ' if is_best else ''}{plan.cluster.name}",
        str(plan.fit.num_gpus),
        f"{PLANNED}{plan.slots}",
        f"{'' if is_measured else PLANNED}{number(plan.tokens_per_s)}",
        f"{PLANNED}{count.workers}",
        *(PLANNED + moment.astimezone().strftime(MOMENT) for moment in moments),
        NO_VALUE if count.dollars is None else PLANNED + money(count.dollars),
        "yes" if count.is_in_time(bounds) else "no",
    ]


def _verdict(
    holding: Sequence[tuple[ClusterPlan, WorkerCount]],
    best: tuple[ClusterPlan, WorkerCount] | None,
    bounds: RunBounds,
) -> str:
    until = bounds_text(bounds)
    if not holding:
        return f"none holds{until}"
    if best is None:
        names = ", ".join(f"{plan.cluster.name} with {count.workers}" for plan, count in holding)
        return f"workers that hold{until}: {names}; --price NAME=DOLLARS says which is the cheapest"
    plan, count = best
    return f"* the cheapest that holds{until}: {count.workers} of {plan.cluster.name}"


def _sources(plans: Sequence[ClusterPlan], work: JobWork) -> list[str]:
    """Return where each number comes from."""
    steps = list(dict.fromkeys(plan.source for plan in plans))
    return [
        f"{PLANNED} is planned in some part: slots by the memory of an empty card, ends by a start of {START_S:.0f} s",
        *steps,
        *work.lines(),
    ]
