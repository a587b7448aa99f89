"""The Ray Serve application: one replica per engine behind one proxy, and an actor that merges their metrics.

``eagle-ray serve`` runs it here; a cluster gets a YAML that names ``application`` (infra/serve/deploy.yaml).
Autoscaling follows the requests in flight.

    handle = serve.run(application_of(config, keys, shape), name=config.name)
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from eagle_ray.config import ServeConfig, load_serve_config
from eagle_ray.config.job import ActorRange
from eagle_ray.serve.app import build_app
from eagle_ray.serve.endpoint_metrics import MetricsAggregator, Snapshot, merge
from eagle_ray.serve.keys import ApiKeys, read_keys
from eagle_ray.serve.node_address import AtNodeAddress
from eagle_ray.serve.service import Service
from eagle_ray.slot_limits import usual_slots

log = logging.getLogger("eagle_ray")
PUBLISH_EVERY_S = 2.0
MAX_ONGOING_REQUESTS = (
    10_000  # Serve's own limit on a replica's requests: ours answers 429, Serve's would let them wait
)


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """The minimum and maximum number of replicas, and GPUs and CPU threads of each."""

    fewest: int
    most: int
    num_gpus: float
    threads: int


class Replica(AtNodeAddress):
    """A Service in a process of its own. Serve calls check_health and restarts the replica if it raises."""

    def __init__(self, config: ServeConfig, keys: ApiKeys, threads: int, aggregator: DeploymentHandle):
        super().__init__()
        _log_to_stderr(config.logging.level)
        self._service = Service.start(config, threads, keys)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._board = aggregator
        self._known: dict[str, Snapshot] = {}  # everybody's, as the board last said
        self._publishing = asyncio.ensure_future(self._publish_again())

    def __serve_build_asgi_app__(self) -> Starlette:
        return build_app(self._service, self._publish)

    def check_health(self) -> None:
        super().check_health()
        if not self._service.is_alive:
            raise RuntimeError("the engine has ended")

    async def _publish(self, snapshot: Snapshot) -> Snapshot:
        self._known = await self._board.put.remote(self._name, snapshot, self._known)
        return merge(self._known.values())

    async def _publish_again(self) -> None:
        """Publish this replica's metrics regularly."""
        while True:
            with suppress(RayError, RayServeException):  # the board may be on its way back
                await self._publish(self._service.snapshot())
            await asyncio.sleep(PUBLISH_EVERY_S)


def _log_to_stderr(level: str) -> None:
    """Show the log of the start in the replica's log file, which Ray keeps."""
    log.setLevel(level.upper())
    if not log.handlers:
        log.addHandler(logging.StreamHandler(sys.stderr))


class MetricsReplica(AtNodeAddress, MetricsAggregator):
    """A MetricsAggregator as a Serve replica."""

    def __init__(self):
        AtNodeAddress.__init__(self)
        MetricsAggregator.__init__(self)


def application(args: dict[str, Any]) -> Application:
    """Return the application for ``serve deploy``. args: a ServeConfig's keys, or `config: FILE` and overriding keys.

    Raises ConfigError with one line per wrong key.
    """
    rest = dict(args)
    path = rest.pop("config", None)
    config = load_serve_config(path, env=os.environ, overrides=rest)
    keys = read_keys(config.serving.api_keys_file)
    resources = ray.cluster_resources()
    return application_of(config, keys, plan_replicas(config, resources.get("GPU", 0), resources.get("CPU", 1)))


def application_of(config: ServeConfig, keys: ApiKeys, shape: ReplicaPlan) -> Application:
    serving = config.serving
    options: dict[str, Any] = {
        "name": "engine",
        "ray_actor_options": {"num_cpus": 0 if shape.num_gpus else 1, "num_gpus": shape.num_gpus},
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "graceful_shutdown_timeout_s": serving.drain_s,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 30.0,
    }
    if shape.fewest == shape.most:
        options["num_replicas"] = shape.most
    else:
        options["autoscaling_config"] = {
            "min_replicas": shape.fewest,
            "max_replicas": shape.most,
            "target_ongoing_requests": usual_slots(serving.slots, shape.num_gpus > 0),
            "upscale_delay_s": serving.scale_up_after_s,
            "downscale_delay_s": serving.scale_down_after_s,
        }
    board = serve.deployment(MetricsReplica, name="board", ray_actor_options={"num_cpus": 0}).bind()
    return serve.deployment(serve.ingress()(Replica), **options).bind(config, keys, shape.threads, board)


def plan_replicas(config: ServeConfig, gpus: float, cpus: float, most_threads: int | None = None) -> ReplicaPlan:
    """Return the replicas. gpus, cpus: of the whole cluster. auto is one replica per GPU, or one on the CPU."""
    serving = config.serving
    num_gpus = float(serving.gpus_per_replica != 0 and gpus > 0 and config.model.device != "cpu")
    if serving.gpus_per_replica != "auto":
        num_gpus = serving.gpus_per_replica
    if isinstance(serving.replicas, ActorRange):
        fewest, most = serving.replicas.min, serving.replicas.max
    elif serving.replicas == "auto":
        fewest = most = max(1, int(gpus // num_gpus)) if num_gpus else 1
    else:
        fewest = most = serving.replicas
    threads = max(1, int(cpus) // most)
    return ReplicaPlan(fewest, most, num_gpus, min(threads, most_threads or threads))
