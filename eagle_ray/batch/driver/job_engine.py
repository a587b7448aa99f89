"""JobEngine: the engine of a job's actors (ours or an endpoint), its number of workers, and why it ended early.

engine = JobEngine.start(claimed, num_rows=480)
engine.actor_arguments(progress)
engine.check_ended()       # raises EndpointRefused, EndpointGone or BoundReached
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from ray.actor import ActorHandle

from eagle_ray.assembly.worker_plan import WorkerPlan, usual_slots
from eagle_ray.batch.driver.claim import Claim
from eagle_ray.batch.driver.cluster import plan_workers
from eagle_ray.batch.driver.stopped import command_of
from eagle_ray.batch.worker.job_endpoint import JobEndpoint, throttle_settings
from eagle_ray.batch.worker.throttle_actor import start_throttle, stop_of
from eagle_ray.config.job import ActorRange, JobConfig
from eagle_ray.port.endpoint_answers import CAP, GONE, STOPS
from eagle_ray.port.spend import spend_summary
from eagle_ray.runs.job_errors import BoundReached, EndpointGone, EndpointRefused
from eagle_ray.runs.layout import STOPPED_FILE
from eagle_ray.runs.run import now_text
from eagle_ray.storage.path import json_bytes

AUTO_REQUESTS = 64  # rows that a worker asks for at a time if engine.concurrency is auto
ERRORS = {
    CAP: BoundReached,
    GONE: EndpointGone,
}  # by the kind of a stop; others are EndpointRefused


@dataclass(frozen=True, slots=True)
class JobEngine:
    """What answers a job's rows: our own engine in planned workers, or an endpoint.

    Attributes:
        endpoint: the endpoint; None for our own engine.
    """

    claimed: Claim
    workers: WorkerPlan
    slots: int
    endpoint: JobEndpoint | None = None

    @classmethod
    def start(cls, claimed: Claim, num_rows: int) -> JobEngine:
        """Plan the workers, and start the throttle that they share, if an endpoint needs one. Ray must be connected.

        Args:
            num_rows: rows that are missing.
        """
        config = claimed.plan.config
        engine = config.engine
        if engine.is_own:
            workers = plan_workers(config, num_rows)
            return cls(claimed, workers, usual_slots(config.execution.slots, workers.num_gpus > 0))
        slots = AUTO_REQUESTS if engine.concurrency == "auto" else engine.concurrency
        if engine.is_child:
            return cls(claimed, _server_workers(config, num_rows), slots, JobEndpoint())
        plan = claimed.plan
        target = plan.endpoint_check.target(config, plan.input.row_settings)
        summary = spend_summary(claimed.run)
        spent = (summary["dollars"] or 0.0) + summary["perhaps_dollars"]
        throttle = start_throttle(throttle_settings(config, spent))
        return cls(claimed, _plain_workers(config), slots, JobEndpoint(target, throttle))

    def actor_arguments(self, progress: ActorHandle) -> tuple[Any, ...]:
        """Return the arguments of an EngineActor."""
        plan = self.claimed.plan
        # The spare process has not the environment of one of the GPUs.
        spare = None if self.workers.num_gpus else plan.spare.address
        fields = plan.input.carried_fields
        return (plan.config, self.claimed.run, fields, self.workers, progress, spare, self.endpoint)

    @property
    def description(self) -> str:
        """Return a line for the log: the model that is loaded and its devices, or the endpoint."""
        if self.endpoint is not None and self.endpoint.target is not None:
            urls = ", ".join(self.endpoint.target.urls)
            return f"asking {self.claimed.plan.config.engine.model} at {urls}"
        return f"loading {self.claimed.plan.config.model.target} in {self.workers.describe()}"

    def check_ended(self) -> None:
        """Raise the reason if the endpoint stopped the job before its last row: refused, gone, or at a bound."""
        if self.endpoint is None or self.endpoint.throttle is None:
            return
        stop = stop_of(self.endpoint.throttle)
        if stop is None:
            return
        rows_left = self.claimed.count().num_missing
        if not rows_left:
            return
        run = self.claimed.run
        command = command_of(sys.argv)
        record = {
            "run_id": run.run_id,
            "attempt": run.attempt,
            "stopped_at": now_text(),
            "reason": stop.kind,
            "rows_left": rows_left,
            "spent": spend_summary(run)["dollars"],
            "command": command,
        }
        run.publish(STOPPED_FILE, json_bytes(record))
        again = f"run `{command}` again" if command else "run the same command again"
        words = f"engine: {stop.kind}: {stop.words}; {rows_left} rows are left. "
        raise ERRORS.get(stop.kind, EndpointRefused)(
            f"{words}{STOPS[stop.kind]}, then {again}: it goes on from there"
        )


def _plain_workers(config: JobConfig) -> WorkerPlan:
    """Return workers that only wait for answers: one, if their number is not configured."""
    actors = config.execution.actors
    if isinstance(actors, ActorRange):
        return WorkerPlan(actors.min, actors.max)
    number = 1 if actors == "auto" else actors
    return WorkerPlan(number, number)


def _server_workers(config: JobConfig, num_rows: int) -> WorkerPlan:
    """Return workers that start a server each: as our own engine's on GPUs, and one on CPUs."""
    workers = plan_workers(config, num_rows)
    return workers if workers.num_gpus else _plain_workers(config)
