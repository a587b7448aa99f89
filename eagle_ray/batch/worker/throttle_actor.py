"""ThrottleActor: the throttle of all workers of a job, as a small Ray actor.

handle = start_throttle(ThrottleSettings(concurrency=8))
permit = await RemoteThrottle(handle).acquire(Demand(tokens=300))
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import cast

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from eagle_ray.port.engine_client import AdmissionStopped
from eagle_ray.port.throttle import AttemptOutcome, Demand, Permit, Stop, Throttle, ThrottleSettings

MAX_CALLS = (
    10_000  # that the actor has at a time: one of each worker waits, and the others are short
)


class ThrottleActor:
    """A throttle that other processes call."""

    def __init__(self, settings: ThrottleSettings):
        self._throttle = Throttle(settings)

    async def acquire(self, demand: Demand) -> Permit | None:
        """Wait until a request may be sent, and return its permit; None if no further request may be sent."""
        try:
            return await self._throttle.acquire(demand)
        except AdmissionStopped:
            return None

    async def release(self, permit: Permit, outcome: AttemptOutcome) -> None:
        """Report how a request ended."""
        await self._throttle.release(permit, outcome)

    async def stop(self, stop: Stop) -> None:
        """Allow no further request."""
        await self._throttle.stop(stop)

    async def stopped(self) -> Stop | None:
        """Return why no further request is sent; None while requests are sent."""
        return self._throttle.stopped


@dataclass(slots=True)
class RemoteThrottle:
    """One worker's client of the ThrottleActor. Of its requests, one at a time waits at the actor."""

    handle: ActorHandle
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _is_stopped: bool = False

    async def acquire(self, demand: Demand) -> Permit:
        """Wait until a request may be sent. Raises AdmissionStopped."""
        async with self._turn:
            permit = None
            if not self._is_stopped:
                permit = cast("Permit | None", await self.handle.acquire.remote(demand))
            if permit is None:
                self._is_stopped = True
                raise AdmissionStopped
            return permit

    async def release(self, permit: Permit, outcome: AttemptOutcome) -> None:
        """Report how a request ended, without waiting for it."""
        self.handle.release.remote(permit, outcome)

    async def stop(self, stop: Stop) -> None:
        """Allow no further request."""
        await self.handle.stop.remote(stop)


def start_throttle(settings: ThrottleSettings) -> ActorHandle:
    """Start the actor on the driver's own node: if that node dies, so does the job."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = ray.remote(ThrottleActor).options(
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=MAX_CALLS,
        scheduling_strategy=here,
    )
    return cast(ActorHandle, options.remote(settings))


def stop_of(handle: ActorHandle) -> Stop | None:
    """Return why a job's throttle sends no further request; None if it still sends them."""
    return cast("Stop | None", ray.get(handle.stopped.remote()))
