"""Worker: one engine of this process that turns tables of requests into tables of output rows.

`row_worker` has the handling of rows, which is equal for every engine.

    worker = Worker(config, run, [], WorkerPlan(threads=2))
    table = await worker.answer(requests)
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from eagle_ray.assembly.assemble import EngineBundle, build_in_thread
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.batch.worker.learned_state import LearnedState
from eagle_ray.batch.worker.row_worker import RowWorker
from eagle_ray.batch.worker.start_cache import start_cache
from eagle_ray.config import JobConfig
from eagle_ray.core.errors import EngineError
from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.async_engine import AsyncEngine
from eagle_ray.port.in_process import InProcessClient
from eagle_ray.requests.output_rows import OutputRows
from eagle_ray.requests.request import Request
from eagle_ray.requests.row_schema import output_schema
from eagle_ray.requests.sequences import CATEGORY, samples_of
from eagle_ray.runs.process_identity import process_name
from eagle_ray.runs.run import Run

log = logging.getLogger("eagle_ray")


class Worker(RowWorker):
    """One engine of a job and its rows. Raises ConfigError if a model is missing, EngineError if models do not fit.

    Args:
        carried: fields of the carried columns.
        plan: GPUs and CPU threads of the worker.
    """

    carried_of_requests = (CATEGORY,)
    client: InProcessClient

    def __init__(self, config: JobConfig, run: Run, carried: list[pa.Field], plan: WorkerPlan):
        with start_cache(run):
            bundle = self._build(config, plan)
        self.worker_id = process_name(os.getpid())
        self.tokenizer = bundle.tokenizer
        self._max_model_len = bundle.engine.max_model_len
        self._config = config
        self._learned = LearnedState(
            run, _models(config, bundle), is_private=not config.output.store_prompt
        )
        self._learned.load(bundle.engine)
        constants = _constants(config, run, bundle) | {"worker_id": self.worker_id}
        rows = self._rows_of(config, constants, time.time() - time.monotonic())
        timeout_s = config.execution.row_timeout_s
        client = InProcessClient(bundle.engine, self._sequences, rows, timeout_s)
        super().__init__(config, client, rows, self._schema_of(config), self._own_carried(carried))

    @property
    def engine(self) -> AsyncEngine:
        """Return the thread in which the engine runs."""
        return self.client.engine

    # A worker of another task replaces these methods.

    def _build(self, config: JobConfig, plan: WorkerPlan) -> EngineBundle:
        return build_engine_bundle(config, plan, owns_process=True)

    def _rows_of(
        self, config: JobConfig, constants: dict[str, Any], clock_offset: float
    ) -> OutputRows:
        return OutputRows(config, constants, self.tokenizer, clock_offset)

    def _sequences(self, request: Request, samples: Iterable[int]) -> list[Sequence]:
        return samples_of(request, self._config, self.tokenizer, samples, self._max_model_len)

    def _schema_of(self, config: JobConfig) -> pa.Schema:
        """Return the schema of the worker's own columns."""
        return output_schema([])

    def _own_carried(self, carried: list[pa.Field]) -> list[str]:
        """Return the names of the output's further columns that are columns of requests."""
        return [field.name for field in carried]

    async def _after_table(self) -> None:
        """Write what the drafter has learned, if that is due. No error stops the job."""
        if not self._learned.start_write(self._num_in_flight):
            return
        try:
            state = await self.engine.call(lambda engine: engine.learned_state())
            await asyncio.to_thread(self._learned.store, state)
        except EngineError:
            pass  # reported where rows are answered
        except Exception:
            log.exception("what the drafter has learned cannot be written; the job goes on")
        finally:
            self._learned.end_write()


def build_engine_bundle(
    config: JobConfig, plan: WorkerPlan, owns_process: bool = False
) -> EngineBundle:
    """Build the worker's engine, with rows ordered as execution.order says. Raises as build_in_thread does.

    Args:
        owns_process: whether the engine may change settings of its process, as in EngineArgs.
    """
    execution = config.execution
    args = EngineArgs.of_worker(execution, plan.num_gpus, owns_process)
    bundle = build_in_thread(
        config.model, config.speculative, args, plan.threads, execution.require_kernels
    )
    if execution.order == "auto":
        bundle.engine.order_for_throughput()
    return bundle


def _constants(config: JobConfig, run: Run, bundle: EngineBundle) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "attempt": run.attempt,
        "config_hash": run.config_hash,
        "target_model": bundle.target_name,
        "draft_model": bundle.draft_name,
        "method": config.method_name,
    }


def _models(config: JobConfig, bundle: EngineBundle) -> dict[str, Any]:
    """Return the names and settings that a drafter's learned state depends on."""
    speculative = config.speculative
    names = {
        "target": bundle.target_name,
        "draft": bundle.draft_name,
        "vocab": bundle.engine.target.vocab_size,
    }
    names |= {"draft_versions": bundle.draft_versions}
    return names | {"methods": speculative.merged_methods, "max_depth": speculative.max_depth}
