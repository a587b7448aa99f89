"""Batches by way of a dispatcher: engines come and go while one stream of Ray Data runs.

    stream -> BatchFeeder -> Dispatcher names an engine -> PooledEngine -> answers

Ray Data feeds one BatchFeeder, an actor without resources. For each batch it asks the Dispatcher for
an engine with room. The driver (`batch/driver/fleet.py`) starts and ends engines as a policy wants.
Rows that an engine has not begun when it is let go, and rows of an engine that is lost, go to
another one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from eagle_ray.batch.worker.actor import EngineActor
from eagle_ray.batch.worker.sink import nest

ID_COLUMN = "request_id"
ENGINE_WAIT_S = 30.0  # seconds of one call that waits for an engine; then it is made again


@dataclass(slots=True)
class PoolState:
    """Snapshot of the engines that the Dispatcher knows.

    Attributes:
        nodes: node of each engine whose process has begun, by the engine's name.
        ready: number of batches at each engine that takes batches, by the engine's name.
        num_waiting: batches that wait for an engine.
    """

    nodes: dict[str, str] = field(default_factory=dict)
    ready: dict[str, int] = field(default_factory=dict)
    num_waiting: int = 0


class Dispatcher:
    """Assigns batches to engines: to the one with the fewest batches, at most max_batches each.

    It is an actor on the driver's node.
    """

    def __init__(self, max_batches: int) -> None:
        self._max_batches = max_batches
        self._engines: dict[str, ActorHandle] = {}
        self._batches: dict[str, int] = {}
        self._nodes: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._num_waiting = 0
        self._is_stopped = False

    async def place(self, name: str, node: str) -> None:
        """Record that an engine's process has begun on a node. Batches of its former process are lost."""
        self._nodes[name] = node
        self._batches.pop(name, None)

    async def register(self, name: str, engine: ActorHandle) -> None:
        """Let an engine take batches."""
        self._engines[name] = engine
        self._batches[name] = 0
        self._wake()

    async def remove(self, name: str) -> None:
        """Assign no further batch to an engine."""
        self._batches.pop(name, None)

    async def unregister(self, name: str) -> None:
        """Forget an engine that is gone."""
        for of_engine in (self._batches, self._engines, self._nodes):
            of_engine.pop(name, None)

    async def stop(self) -> None:
        """Return None to all batches that wait for an engine: the run starts no further row."""
        self._is_stopped = True
        self._wake()

    async def acquire(self) -> tuple[str, ActorHandle] | None:
        """Wait for an engine with room, and return its name and its handle.

        None if the run has stopped (`is_stopped`), or if there was no engine for ENGINE_WAIT_S.
        """
        self._num_waiting += 1
        deadline = time.monotonic() + ENGINE_WAIT_S
        try:
            while not self._is_stopped:
                free = [name for name, num in self._batches.items() if num < self._max_batches]
                if free:
                    name = min(free, key=self._batches.__getitem__)
                    self._batches[name] += 1
                    return name, self._engines[name]
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.clear()
                try:
                    await asyncio.wait_for(self._changed.wait(), left)
                except asyncio.TimeoutError:
                    return None
            return None
        finally:
            self._num_waiting -= 1

    async def release(self, name: str, is_lost: bool) -> None:
        """Record that an engine has answered a batch, or has been lost."""
        if is_lost:
            self._batches.pop(name, None)
        elif name in self._batches:
            self._batches[name] = max(0, self._batches[name] - 1)
        self._wake()

    async def is_stopped(self) -> bool:
        return self._is_stopped

    async def state(self) -> PoolState:
        return PoolState(dict(self._nodes), dict(self._batches), self._num_waiting)

    def _wake(self) -> None:
        self._changed.set()


class PooledEngine(EngineActor):
    """An EngineActor that the driver has started, and that takes batches from BatchFeeders."""

    def __init__(self, name: str, dispatcher: ActorHandle, *arguments: Any):
        self._name = name
        self._dispatcher = dispatcher
        context = ray.get_runtime_context()
        ray.get(dispatcher.place.remote(name, context.get_node_id()))
        super().__init__(*arguments)
        ray.get(dispatcher.register.remote(name, context.current_actor))

    async def answer_batch(self, batch: pa.Table) -> pa.Table:
        """Return the output rows of the batch. Rows that this engine had not begun when it was let go are missing."""
        return await self.run_batch(batch)

    async def leave(self) -> None:
        """Start no further row, and return once the rows that have begun are answered."""
        self._is_admitting = False
        self._engine.stop_admission()
        while self._num_batches:
            await asyncio.sleep(0.1)


class BatchFeeder:
    """The actor that Ray Data sends batches to. It forwards each to an engine and uses no device."""

    def __init__(self, dispatcher: ActorHandle):
        self._dispatcher = dispatcher

    async def __call__(self, batch: pa.Table) -> AsyncIterator[pa.Table]:
        """Yield the nested output rows of the batch as engines answer them."""
        left = batch
        while len(left):
            engine = await self._dispatcher.acquire.remote()
            if engine is None:
                if await self._dispatcher.is_stopped.remote():
                    return
                continue
            answers = await self._answer(*engine, left)
            if answers is None or not len(answers):
                continue
            yield nest(answers)
            left = without(left, answers)

    async def _answer(self, name: str, engine: ActorHandle, batch: pa.Table) -> pa.Table | None:
        """Return the rows of an engine, or None if it is lost."""
        is_lost = False
        try:
            return await engine.answer_batch.remote(batch)
        except RayActorError:
            is_lost = True
            return None
        finally:
            await self._dispatcher.release.remote(name, is_lost)


def without(batch: pa.Table, answers: pa.Table) -> pa.Table:
    """Return the requests that have no row in the answers."""
    has_row = pc.is_in(batch[ID_COLUMN], value_set=answers[ID_COLUMN].combine_chunks())
    return batch.filter(pc.invert(has_row))
