"""EndpointWorker: a worker whose engine is an endpoint, or another engine's server that it starts.

It runs in the actor's own process: it only waits for answers, and an endpoint's faults cannot end it.

    worker = EndpointWorker(config, run, carried, JobEndpoint(target, throttle), on_log)
    table = await worker.answer(requests)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from eagle_ray.batch.worker.engine_process import LogLine
from eagle_ray.batch.worker.job_endpoint import JobEndpoint, throttle_settings
from eagle_ray.batch.worker.row_worker import RowWorker
from eagle_ray.batch.worker.throttle_actor import RemoteThrottle
from eagle_ray.config import JobConfig
from eagle_ray.port.http import HttpClient
from eagle_ray.port.http_rows import HttpRows
from eagle_ray.port.server_child import ServerChild
from eagle_ray.port.spend import SpendLog
from eagle_ray.port.throttle import Throttle, ThrottleClient
from eagle_ray.requests.row_schema import ENGINE_FIELDS, output_schema
from eagle_ray.runs.process_identity import process_name
from eagle_ray.runs.run import Run


class EndpointWorker(RowWorker):
    """A worker that sends its rows to an endpoint. Raises as ServerChild.wait_until_ready does.

    carried: fields of the output's further columns.
    """

    def __init__(
        self,
        config: JobConfig,
        run: Run,
        carried: list[pa.Field],
        endpoint: JobEndpoint,
        on_log: Callable[[LogLine], None],
    ):
        self.worker_id = process_name(os.getpid())
        self._server: ServerChild | None = None
        target = endpoint.target
        if target is None:
            self._server = ServerChild(
                config.engine, lambda line: on_log(LogLine(logging.INFO, line))
            )
            target = self._server.wait_until_ready()
        throttle: ThrottleClient
        if endpoint.throttle is not None:
            throttle = RemoteThrottle(endpoint.throttle)
        else:
            throttle = Throttle(throttle_settings(config))
        rows = HttpRows(config, _constants(config, run) | {"worker_id": self.worker_id})
        client = HttpClient(
            config,
            target,
            throttle,
            rows,
            SpendLog(run, self.worker_id),
            None if self._server is None else self._server.check,
        )
        made = {field.name for field in ENGINE_FIELDS}
        columns = [field.name for field in carried if field.name not in made]
        super().__init__(config, client, rows, output_schema(ENGINE_FIELDS), columns)

    def close(self) -> None:
        """End the server if this worker has started it."""
        super().close()
        if self._server is not None:
            self._server.close()


def _constants(config: JobConfig, run: Run) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "attempt": run.attempt,
        "config_hash": run.config_hash,
        "target_model": config.engine.model,
        "draft_model": None,
        "method": config.method_name,
    }
