"""Fleet: the engines of a run whose number changes, as Ray actors that this process starts and ends.

    with Fleet(workers, engine_args, spot_nodes="ray.io/market-type=spot", calls=16) as fleet:
        fleet.resize(FleetSize(spot=4, on_demand=0))
        fleet.poll()          # each second: which are ready, lost, or done with what they had

Ray places an engine on a node with room, and a cluster's autoscaler adds nodes for engines that wait.
A spot engine asks for a node with a label; an engine on demand for one without it. An engine that is
let go ends the rows that it has begun. One whose node is gone is dropped at once.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.batch.worker.dispatcher import Dispatcher, PooledEngine, PoolState
from eagle_ray.scaling.policy import FleetSize

log = logging.getLogger("eagle_ray")
SPOT = "spot"
ON_DEMAND = "on_demand"
POLL_WITHIN_S = 10.0  # seconds in which the dispatcher answers


@dataclass(slots=True, eq=False)
class FleetEngine:
    """An engine of the fleet, starting, ready or leaving.

    Attributes:
        market: SPOT or ON_DEMAND.
        requested_at: time of its request to Ray, on the monotonic clock.
        leaving: the call that returns once it has no row left; None while it is to stay.
    """

    name: str
    market: str
    actor: ActorHandle
    requested_at: float
    leaving: ray.ObjectRef | None = None


class Fleet:
    """The engines of a run as Ray actors, started and ended as `resize` asks. One thread calls its methods.

    Args:
        workers: resources of each engine.
        arguments: arguments of EngineActor.
        spot_nodes: KEY=VALUE, the label of spot nodes; None if there is one market.
        calls: maximum batches at an engine.
    """

    def __init__(self, workers: WorkerPlan, arguments: tuple, spot_nodes: str | None, calls: int):
        self._workers = workers
        self._arguments = arguments
        self._label = tuple(spot_nodes.split("=", 1)) if spot_nodes else None
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor: Any = ray.remote(Dispatcher)
        self.dispatcher: ActorHandle = actor.options(
            num_cpus=0, max_concurrency=10_000, scheduling_strategy=here
        ).remote(calls)
        self._engines: list[FleetEngine] = []
        self._state = PoolState()
        self._num_started = 0
        self.num_lost = 0

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *error: object) -> None:
        for engine in self._engines:
            ray.kill(engine.actor)
        ray.kill(self.dispatcher)
        self._engines.clear()

    @property
    def running(self) -> FleetSize:
        """Return the engines that take batches."""
        return self._sizes(lambda engine: engine.name in self._state.ready)

    @property
    def starting(self) -> FleetSize:
        """Return the engines that were asked for and take no batches yet."""
        return self._sizes(lambda engine: engine.name not in self._state.ready)

    @property
    def paid(self) -> FleetSize:
        """Return the engines that have a node and so cost money, including those that are leaving."""
        placed = [e.market for e in self._engines if e.name in self._state.nodes]
        return FleetSize(placed.count(SPOT), placed.count(ON_DEMAND))

    def _sizes(self, is_counted: Any) -> FleetSize:
        markets = [e.market for e in self._engines if e.leaving is None and is_counted(e)]
        return FleetSize(markets.count(SPOT), markets.count(ON_DEMAND))

    def poll(self) -> None:
        """Read the dispatcher's state, and drop the engines that are lost or have left."""
        try:
            self._state = cast(
                PoolState, ray.get(self.dispatcher.state.remote(), timeout=POLL_WITHIN_S)
            )
        except ray.exceptions.GetTimeoutError:
            return
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        for engine in list(self._engines):
            node = self._state.nodes.get(engine.name)
            if node is not None and node not in alive:
                self.num_lost += 1
                log.warning(
                    "the node of engine %s is gone: its rows are answered by others", engine.name
                )
                self._drop(engine)
            elif engine.leaving is not None and ray.wait([engine.leaving], timeout=0)[0]:
                self._drop(engine)

    def resize(self, wanted: FleetSize) -> None:
        """Start missing engines, and let surplus ones leave."""
        for market, number in ((SPOT, wanted.spot), (ON_DEMAND, wanted.on_demand)):
            there = [e for e in self._engines if e.market == market and e.leaving is None]
            there.sort(key=lambda engine: (engine.name in self._state.ready, engine.requested_at))
            for _ in range(number - len(there)):
                self._start(market)
            for engine in there[: max(0, len(there) - number)]:
                self._let_go(engine)

    def release_idle(self) -> None:
        """Once no row waits, let the engines leave that have no row, and end those that are still starting."""
        waits = self._state.num_waiting > 0
        for engine in list(self._engines):
            if engine.leaving is None and not waits and not self._state.ready.get(engine.name, 0):
                self._let_go(engine)

    def stop_admission(self) -> None:
        """Send no further batch to an engine: waiting batches return unanswered."""
        self.dispatcher.stop.remote()

    def _start(self, market: str) -> None:
        self._num_started += 1
        name = f"{market}-{self._num_started}"
        actor: Any = ray.remote(PooledEngine)
        options = self._workers.ray_options | self._placement(market)
        handle = actor.options(
            max_restarts=-1, max_task_retries=0, max_concurrency=1000, **options
        ).remote(name, self.dispatcher, *self._arguments)
        self._engines.append(FleetEngine(name, market, handle, time.monotonic()))

    def _placement(self, market: str) -> dict[str, Any]:
        """Return Ray's options for a node of the market."""
        if self._label is None:
            return {}
        key, value = self._label
        return {"label_selector": {key: value if market == SPOT else f"!{value}"}}

    def _let_go(self, engine: FleetEngine) -> None:
        if engine.name not in self._state.ready:  # it has begun no row
            self._drop(engine)
            return
        self.dispatcher.remove.remote(engine.name)
        engine.leaving = engine.actor.leave.remote()

    def _drop(self, engine: FleetEngine) -> None:
        self._engines.remove(engine)
        ray.kill(engine.actor)
        self.dispatcher.unregister.remote(engine.name)
