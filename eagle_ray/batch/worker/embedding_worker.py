"""EmbeddingWorker: a worker whose rows are embeddings. make_worker returns the worker of a job's task.

The rows have the columns of any job and the column `embedding`. Columns of generated text are null.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from eagle_ray.assembly.embedders import EmbedderBundle, build_embedder
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.batch.worker.worker import Worker
from eagle_ray.config import JobConfig
from eagle_ray.core.errors import RequestError
from eagle_ray.core.sequence import Sequence
from eagle_ray.port.engine_client import Call
from eagle_ray.requests.embeddings import (
    EMBEDDING_COLUMN,
    PROMPT_NAME,
    EmbeddingMaker,
    embedding_columns,
    embedding_field,
)
from eagle_ray.requests.output_rows import OutputRows
from eagle_ray.requests.request import Request
from eagle_ray.requests.request_rows import OutputRow
from eagle_ray.requests.row_schema import output_schema
from eagle_ray.runs.run import Run


@dataclass(frozen=True, slots=True)
class EmbeddingRows(OutputRows):
    """Makes output rows from finished embeddings, like OutputRows from generated text."""

    config: JobConfig

    def of(self, request: Request, sequences: list[Sequence]) -> list[OutputRow]:
        """Return the row of a request's one sequence."""
        [sequence] = sequences
        prompt = sequence.prompt_text if self.config.output.store_prompt else None
        return [
            self.shared(request)
            | {"status": "ok", "prompt": prompt, "sample_index": 0}
            | {"prompt_tokens": len(sequence.prompt_ids), "completion_tokens": 0}
            | {"target_forwards": sequence.target_forwards}
            | self._times(sequence)
            | embedding_columns(sequence, self.config.embedding.dtype)
        ]


class EmbeddingWorker(Worker):
    """A worker whose engine computes embeddings. Arguments and errors are Worker's."""

    carried_of_requests = (PROMPT_NAME,)

    def _build(self, config: JobConfig, plan: WorkerPlan) -> EmbedderBundle:
        args = EngineArgs.of_worker(config.execution, plan.num_gpus)
        bundle = build_embedder(config.model, args, plan.threads, config.execution.require_kernels)
        if config.execution.order == "auto":
            bundle.engine.order_for_throughput()
        self._maker = EmbeddingMaker(config.embedding, bundle.files, bundle.text)
        return bundle

    def _rows_of(
        self, config: JobConfig, constants: dict[str, Any], clock_offset: float
    ) -> OutputRows:
        return EmbeddingRows(config, constants, self.tokenizer, clock_offset)

    def _schema_of(self, config: JobConfig) -> pa.Schema:
        return output_schema([embedding_field(config.embedding, self._maker.files)])

    def _own_carried(self, carried: list[pa.Field]) -> list[str]:
        return [field.name for field in carried if field.name != EMBEDDING_COLUMN]

    def _sequences(self, request: Request, samples: Iterable[int]) -> list[Sequence]:
        return [self._maker.sequence(request)]

    async def _answer_row(self, request: Request, call: Call) -> list[OutputRow]:
        try:
            return await self.client.answer(request, [0], call)
        except RequestError as error:
            return self._error_rows.of_error(request, error)


def make_worker(config: JobConfig, run: Run, carried: list[pa.Field], plan: WorkerPlan) -> Worker:
    """Return the worker of the job's task. Arguments and errors are Worker's."""
    kind = EmbeddingWorker if config.task == "embed" else Worker
    return kind(config, run, carried, plan)
