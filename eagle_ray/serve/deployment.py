"""The Ray Serve application: one replica per engine behind one proxy, and an actor that merges their metrics.

``eagle-ray serve`` runs it on this machine. On a cluster, a YAML file names ``application``
(infra/serve/deploy.yaml). Serve scales the replicas by the requests in flight.

    handle = serve.run(application_of(config, keys, plan), name=config.name)
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import suppress
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve import Application
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from eagle_ray.assembly.worker_plan import WorkerPlan, usual_slots
from eagle_ray.batch.driver.cluster import nodes
from eagle_ray.config import ServeConfig, load_serve_config
from eagle_ray.serve.access import ApiKeys, AtNodeAddress, read_keys
from eagle_ray.serve.app import build_app
from eagle_ray.serve.batches.batch_runner import BatchRunner
from eagle_ray.serve.batches.batch_store import BatchStore
from eagle_ray.serve.batches.replica_client import ReplicaLost
from eagle_ray.serve.embedding_service import start_service
from eagle_ray.serve.endpoint_metrics import MetricsAggregator, Snapshot, merged_snapshot

log = logging.getLogger("eagle_ray")
ALL_INTERFACES = "0.0.0.0"
ENGINE_DEPLOYMENT = "engine"  # the deployment of the engines' replicas
PUBLISH_EVERY_S = 2.0
# Serve's own limit on a replica's requests: ours answers 429, Serve's would let them wait.
MAX_ONGOING_REQUESTS = 10_000


class Replica(AtNodeAddress):
    """A Service in its own process. If check_health raises, Serve restarts the replica."""

    def __init__(
        self,
        config: ServeConfig,
        keys: ApiKeys,
        plan: WorkerPlan,
        aggregator: DeploymentHandle,
        store: BatchStore | None = None,
        runner: DeploymentHandle | None = None,
    ):
        """Start the engine of one replica.

        Args:
            config: configuration of the endpoint.
            keys: digests of the API keys.
            plan: devices and threads of a worker.
            aggregator: handle of MetricsReplica.
            store: store of files and batches; None without one.
            runner: handle of BatchesReplica. It is an argument so that Serve starts that
                deployment.
        """
        super().__init__()
        _log_to_stderr(config.logging.level)
        self._service = start_service(config, plan, keys, owns_process=True)
        self._store = store
        self._name = serve.get_replica_context().replica_id.unique_id
        self._aggregator = aggregator
        self._known: dict[str, Snapshot] = {}  # everybody's, as the aggregator last reported them
        self._publishing = asyncio.ensure_future(self._publish_again())

    def __serve_build_asgi_app__(self) -> Starlette:
        return build_app(self._service, self._publish, self._store)

    async def answer_line(self, client: int, endpoint: str, body: bytes) -> tuple[int, bytes]:
        """Answer one line of a batch as Service.answer_line does. Returns status and body."""
        return await self._service.answer_line(client, endpoint, body)

    def check_health(self) -> None:
        super().check_health()
        if not self._service.is_alive:
            raise RuntimeError(str(self._service.engine.step_loop.error))

    async def _publish(self, snapshot: Snapshot) -> Snapshot:
        self._known = await self._aggregator.put.remote(self._name, snapshot, self._known)
        return merged_snapshot(self._known.values())

    async def _publish_again(self) -> None:
        """Publish this replica's metrics at a fixed interval."""
        while True:
            with suppress(RayError, RayServeException):  # the aggregator may be starting again
                await self._publish(self._service.snapshot())
            await asyncio.sleep(PUBLISH_EVERY_S)


def _log_to_stderr(level: str) -> None:
    """Write the log of the start to stderr, which Ray keeps in the replica's log file."""
    log.setLevel(level.upper())
    if not log.handlers:
        log.addHandler(logging.StreamHandler(sys.stderr))


class MetricsReplica(AtNodeAddress, MetricsAggregator):
    """The deployment of a MetricsAggregator."""

    def __init__(self):
        AtNodeAddress.__init__(self)
        MetricsAggregator.__init__(self)


class BatchesReplica(AtNodeAddress):
    """The deployment of a BatchRunner, which sends the lines of batches to the replicas."""

    def __init__(self, config: ServeConfig, keys: ApiKeys, store: BatchStore, window: int):
        super().__init__()
        _log_to_stderr(config.logging.level)
        self._keys, self._app = keys, serve.get_replica_context().app_name
        runner = BatchRunner(store, config.serving.batches, self._respond, window, self._knows)
        self._running = asyncio.ensure_future(runner.run())

    def check_health(self) -> None:
        super().check_health()
        if self._running.done():
            raise RuntimeError("the runner of batches has ended")

    def _knows(self, owner: str) -> bool:
        return self._keys.client_of(owner) is not None

    async def _respond(self, owner: str, endpoint: str, body: bytes) -> tuple[int, bytes]:
        client = self._keys.client_of(owner)
        assert client is not None, "the runner leaves batches of unknown keys alone"
        engines = serve.get_deployment_handle(ENGINE_DEPLOYMENT, self._app)
        try:
            status, answer = await engines.answer_line.remote(client, endpoint, body)
        except RayActorError as error:
            raise ReplicaLost(" ".join(str(error).split())) from None
        except (RayError, RayServeException) as error:  # no replica now: they start, or end
            log.debug("no replica for a batch's line: %s", error)
            return 503, b"{}"
        if status == 503:
            raise ReplicaLost("its engine has ended")
        return status, answer


def application(args: dict[str, Any]) -> Application:
    """Return the application for ``serve deploy``. Raises ConfigError with one line per wrong key.

    Args:
        args: keys of a ServeConfig, or `config: FILE` with keys that override the file's.
    """
    rest = dict(args)
    path = rest.pop("config", None)
    config = load_serve_config(path, env=os.environ, overrides=rest)
    # The http_options of Serve may name another host.
    serving = config.serving.model_copy(update={"host": ALL_INTERFACES})
    config = config.model_copy(update={"serving": serving})
    store = store_of(config)
    keys = read_keys(config.serving.api_keys_file, salt=None if store is None else store.salt())
    plan = WorkerPlan.of_endpoint(config.serving, config.model.device, nodes())
    return application_of(config, keys, plan, store)


def store_of(config: ServeConfig) -> BatchStore | None:
    """Return the store of files and batches; None if the configuration names none. Raises ConfigError."""
    path = config.serving.batches.path
    return None if path is None else BatchStore.open(path)


def application_of(
    config: ServeConfig, keys: ApiKeys, plan: WorkerPlan, store: BatchStore | None = None
) -> Application:
    serving = config.serving
    slots = usual_slots(serving.slots, plan.num_gpus > 0)
    options: dict[str, Any] = {
        "name": ENGINE_DEPLOYMENT,
        "ray_actor_options": {"num_cpus": 0 if plan.num_gpus else 1, "num_gpus": plan.num_gpus},
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "graceful_shutdown_timeout_s": serving.drain_s,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 30.0,
    }
    if plan.min_workers == plan.max_workers:
        options["num_replicas"] = plan.max_workers
    else:
        options["autoscaling_config"] = {
            "min_replicas": plan.min_workers,
            "max_replicas": plan.max_workers,
            "target_ongoing_requests": slots,
            "upscale_delay_s": serving.scale_up_after_s,
            "downscale_delay_s": serving.scale_down_after_s,
        }
    aggregator = serve.deployment(name="metrics", ray_actor_options={"num_cpus": 0})(
        MetricsReplica
    ).bind()
    runner = None
    if store is not None:
        # The window is enough for every slot; lines that find none free wait in the replicas.
        window = slots * plan.max_workers
        only_one = serve.deployment(name="batches", ray_actor_options={"num_cpus": 0})(
            BatchesReplica
        )
        runner = only_one.bind(config, keys, store, window)
    engines = serve.deployment(**options)(serve.ingress()(Replica))
    return engines.bind(config, keys, plan, aggregator, store, runner)
