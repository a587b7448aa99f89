"""The service of an endpoint that computes embeddings, and `start_service` for endpoints of either task.

    service = start_service(config, WorkerPlan(threads=2))
    body = await service.embeddings(EmbeddingsRequest.read({"input": "Paris"}), num_bytes=18)

Inputs go to the engine as slots become free. A request may have more inputs than the engine has
slots. It then counts as a full engine, not more.
"""

from __future__ import annotations

from typing import Any

from eagle_ray.assembly.embedders import EmbedderBundle, build_embedder
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.config import ServeConfig
from eagle_ray.requests.embedding_bodies import EmbeddingsRequest
from eagle_ray.requests.embeddings import EmbeddingMaker
from eagle_ray.serve.access import ApiKeys
from eagle_ray.serve.admission import Reservation
from eagle_ray.serve.generation_request import GenerationRequest
from eagle_ray.serve.http.http_answers import ApiError, json_body
from eagle_ray.serve.service import Service

EMBEDS_ONLY = (
    "this server embeds texts (task: embed) and generates none. Send requests to /v1/embeddings."
)


class EmbeddingService(Service):
    """A Service whose engine computes embeddings."""

    def __init__(self, config: ServeConfig, bundle: EmbedderBundle, keys: ApiKeys | None = None):
        super().__init__(config, bundle.engine, bundle.tokenizer, keys)
        self._maker = EmbeddingMaker(config.embedding, bundle.files, bundle.text)

    async def read(self, *_: Any, **__: Any) -> GenerationRequest:
        """Raise ApiError, since this endpoint generates no text."""
        raise ApiError(400, EMBEDS_ONLY, code="no_generation")

    async def embeddings(
        self, request: EmbeddingsRequest, num_bytes: int, client: int = 0
    ) -> bytes:
        self.check_model(request.model)
        sequences = await self.readers.run(num_bytes, client, request.sequences, self._maker)
        await self.compute(sequences, client)
        size = sum(sequence.pooling.dimensions for sequence in sequences if sequence.pooling)
        name = self.config.model_name
        return await self._writers.run(
            size, client, lambda: json_body(request.body(sequences, name))
        )

    async def _answer_body(self, client: int, endpoint: str, body: bytes) -> bytes:
        if endpoint != EmbeddingsRequest.api.value:
            raise ApiError(400, EMBEDS_ONLY, code="no_generation")
        request = await self.parse(EmbeddingsRequest, body, client)
        await self._idle_slots.wait(Reservation(1, 1))
        return await self.embeddings(request, len(body), client)


def start_service(
    config: ServeConfig, plan: WorkerPlan, keys: ApiKeys | None = None, owns_process: bool = False
) -> Service:
    """Load the models and return the service of the endpoint's task. Raises ConfigError and EngineError.

    Args:
        config: configuration of the endpoint.
        plan: devices and threads of a worker.
        keys: digests of the API keys; None without keys.
        owns_process: whether no other engine runs in this process (``EngineArgs``).
    """
    if config.task != "embed":
        return Service.start(config, plan, keys, owns_process)
    serving = config.serving
    args = EngineArgs.of_worker(serving, plan.num_gpus, owns_process)
    bundle = build_embedder(config.model, args, plan.threads, serving.require_kernels)
    return EmbeddingService(config, bundle, keys)
