"""Inputs and results of `LLM.embed`, for an LLM with task="embed"."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from eagle_ray.assembly.embedders import EmbedderBundle
from eagle_ray.config.job import EmbeddingConfig
from eagle_ray.core.errors import RequestError
from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.async_engine import AsyncEngine
from eagle_ray.requests.embeddings import EmbeddingMaker, vector_of
from eagle_ray.requests.request import Request

log = logging.getLogger("eagle_ray")


@dataclass(frozen=True, slots=True)
class EmbeddingVector:
    """One embedding, in vLLM's form.

    Attributes:
        embedding: numbers of the vector.
    """

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The embedding of one prompt.

    Attributes:
        request_id: id of the prompt, or its number if it has none.
        prompt: the given text, without the prompt that prompt_name adds; None for token ids.
        prompt_token_ids: all tokens that the target read, including the added prompt and special
            tokens.
        outputs: the embedding; None if there is an error.
        error: reason why the prompt cannot be embedded.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingVector | None = None
    error: RequestError | None = None

    @property
    def embedding(self) -> np.ndarray:
        """Return the vector as an array of float32. Raises the output's error."""
        if self.error is not None:
            raise self.error
        assert self.outputs is not None
        return np.array(self.outputs.embedding, np.float32)

    @classmethod
    def of(cls, sequence: Sequence) -> EmbeddingRequestOutput:
        """Return the output of a finished sequence."""
        vector = EmbeddingVector(vector_of(sequence).tolist())
        return cls(sequence.request_id, sequence.prompt_text, sequence.prompt_ids, vector)


@dataclass(frozen=True, slots=True)
class PromptEmbedder:
    """Embeds the prompts of an LLM's calls with its engine."""

    engine: AsyncEngine
    maker: EmbeddingMaker

    @classmethod
    def of(
        cls, engine: AsyncEngine, bundle: EmbedderBundle, config: EmbeddingConfig
    ) -> PromptEmbedder:
        """Return an embedder of prompts that uses the engine of this bundle."""
        return cls(engine, EmbeddingMaker(config, bundle.files, bundle.text))

    async def embed(
        self, request: Request, prompt_name: str | None, dimensions: int | None
    ) -> EmbeddingRequestOutput:
        """Return the output of one request, whose id is set. Raises EngineError once the engine is dead."""
        try:
            sequence = self._sequence(request, prompt_name, dimensions)
            return EmbeddingRequestOutput.of(await self.engine.generate(sequence))
        except RequestError as error:
            named = RequestError(error.code, request.error_text(error), error.param)
            ids = request.prompt_token_ids or []
            return EmbeddingRequestOutput(str(request.id), request.prompt, ids, error=named)

    def _sequence(
        self, request: Request, prompt_name: str | None, dimensions: int | None
    ) -> Sequence:
        try:
            return self.maker.sequence(request, prompt_name, dimensions)
        except RequestError:
            raise
        except Exception as error:  # tokenizers run on arbitrary text
            log.exception("prompt %s: internal error", request.id)
            raise RequestError(
                "internal_error", f"{type(error).__name__}: {error}; please report it"
            ) from error
