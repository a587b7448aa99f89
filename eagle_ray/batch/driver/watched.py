"""Watch a run while it answers rows: stop it at its limits and bounds, and resize its fleet.

with fleet_of(claimed, elastic_plan) as fleet:      # None unless workers come and go
    with watched(claimed, missing, workers, progress, max_starts, fleet):
        write_dataset(...)
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial

from ray.actor import ActorHandle

from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.batch.driver.claim import Claim
from eagle_ray.batch.driver.completeness import Completeness
from eagle_ray.batch.driver.fleet import Fleet
from eagle_ray.batch.driver.foresight import Foresight, class_counts, longest_output, prior_speed
from eagle_ray.batch.driver.on_finish import tell_warning
from eagle_ray.batch.driver.progress_monitor import Limits, ProgressMonitor
from eagle_ray.batch.driver.run_bounds import NO_BOUNDS
from eagle_ray.batch.driver.scaler import FleetLimits, Scaler
from eagle_ray.batch.driver.stopped import check_not_stopped
from eagle_ray.batch.worker.dispatcher import BatchFeeder
from eagle_ray.scaling.policy import DeadlinePolicy

__all__ = ["FEEDER", "BatchFeeder", "ElasticPlan", "fleet_of", "watched"]
FEEDER = WorkerPlan(1, 1)  # an actor without resources hands batches to the engines of a fleet


@dataclass(frozen=True, slots=True)
class ElasticPlan:
    """What a run with a changing number of workers needs: its engines' resources and arguments, and
    the batches per engine."""

    workers: WorkerPlan
    arguments: tuple
    calls: int


@contextmanager
def fleet_of(claimed: Claim, plan: ElasticPlan) -> Iterator[Fleet | None]:
    """Open a fleet that has no engines yet, or return None if the number of workers is fixed."""
    execution = claimed.plan.config.execution
    if not execution.is_elastic:
        yield None
        return
    spot_nodes = execution.spot_nodes if execution.on_late == "on_demand" else None
    with Fleet(plan.workers, plan.arguments, spot_nodes, plan.calls) as fleet:
        yield fleet


@contextmanager
def watched(
    claimed: Claim,
    missing: Completeness,
    workers: WorkerPlan,
    progress: ActorHandle,
    max_starts: int,
    fleet: Fleet | None,
) -> Iterator[None]:
    """Watch a run while the context is open. Raises as execute does.

    Args:
        max_starts: worker starts in a row without a successful row between them.
        fleet: engines that come and go, or None.
    """
    config = claimed.plan.config
    bounds = claimed.start.bounds
    num_rows = missing.num_rows - missing.num_done_rows
    foresight = None
    if bounds != NO_BOUNDS:
        foresight = Foresight(num_rows, longest_output(config), prior_speed(claimed.run))
        foresight.count_classes(
            partial(class_counts, claimed.plan.input, missing.done, config.sampling.n)
        )
    with ExitStack() as at_end:
        monitor = at_end.enter_context(
            ProgressMonitor(
                progress,
                claimed.run,
                num_rows,
                config.logging.progress_every_s,
                Limits(config.execution.max_error_rate, max_starts),
                workers,
                bounds,
                foresight,
                None if fleet is None else _scaler_of(claimed, fleet, workers),
                partial(tell_warning, config),
            )
        )
        yield
    if monitor.bound_reached is not None:
        check_not_stopped(claimed, monitor.bound_reached)


def _scaler_of(claimed: Claim, fleet: Fleet, workers: WorkerPlan) -> Scaler:
    """Return the scaler that sizes the fleet until the deadline of the run."""
    execution = claimed.plan.config.execution
    bounds = claimed.start.bounds
    assert execution.workers is not None, "the configuration was checked"
    now = time.monotonic()
    finish_s = math.inf
    if bounds.finish_by is not None:
        left = bounds.finish_by - datetime.now(timezone.utc)
        finish_s = now + left.total_seconds()
    limits = FleetLimits(
        min(execution.workers.min, workers.max_workers),
        workers.max_workers,
        execution.on_late == "on_demand",
    )
    return Scaler(fleet, DeadlinePolicy(), limits, finish_s, now)
