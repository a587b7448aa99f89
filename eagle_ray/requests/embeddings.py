"""Turn requests for embeddings into sequences, and finished sequences into output columns.

Jobs, Python and the endpoint share these functions.

    maker = EmbeddingMaker(config.embedding, bundle.files, bundle.text)
    sequence = maker.sequence(request)           # Sequence(prompt_ids=[...], pooling=PoolingState(1024))

A request for an embedding has a text or token ids, and may name one of the target's prompts.
Parameters for generated text, such as temperature or messages, are refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from eagle_ray.core.errors import RequestError
from eagle_ray.core.pooling_state import PoolingState
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.core.sequence import Sequence
from eagle_ray.requests.columns import PROMPT_NAME
from eagle_ray.requests.request import Request
from eagle_ray.requests.row_settings import EmbeddingSettings
from eagle_ray.storage.embedder_files import EmbedderFiles
from eagle_ray.text.embedding_text import EmbeddingText, PromptIds

EMBEDDING_COLUMN = "embedding"
NOTHING_SAMPLED = SamplingSettings()


@dataclass(frozen=True, slots=True)
class EmbeddingMaker:
    """Makes the sequences of requests for one target.

    Attributes:
        config: prompt name and dimensions of requests that set none.
        files: dimensions and pooling that the target's files name.
        text: tokenizer of the target with its prompts; None if it has none.
    """

    config: EmbeddingSettings
    files: EmbedderFiles
    text: EmbeddingText | None

    def sequence(
        self, request: Request, prompt_name: str | None = None, dimensions: int | None = None
    ) -> Sequence:
        """Return the sequence of a request. Raises RequestError if it cannot be answered.

        Args:
            request: request with a text or token ids.
            prompt_name: prompt of a request that names none; None is the configuration's.
            dimensions: length of the vector; None is the configuration's.
        """
        request.check()
        _check_parameters(request)
        name = request.carried.get(PROMPT_NAME)
        if name is not None and not isinstance(name, str):
            raise RequestError(
                "bad_type", f"{PROMPT_NAME} must be a text, got {type(name).__name__}"
            )
        ids = self.ids_of(request, name or prompt_name or self.config.prompt_name)
        return self.sequence_of(str(request.id), ids, dimensions, request.prompt)

    def ids_of(self, request: Request, prompt_name: str | None) -> PromptIds:
        """Return the token ids of a request. Raises RequestError."""
        if request.prompt_token_ids is not None:
            return self.given_ids(request.prompt_token_ids)
        assert request.prompt is not None, "a request without an error has a prompt"
        return self.text_ids(request.prompt, prompt_name)

    def text_ids(self, text: str, prompt_name: str | None) -> PromptIds:
        """Return the token ids of a text, with the named prompt in front of it. Raises RequestError."""
        if self.text is None:
            raise RequestError("no_tokenizer", "the target has no tokenizer: give prompt_token_ids")
        return self.text.encode(text, prompt_name)

    def given_ids(self, ids: list[int]) -> PromptIds:
        """Return token ids unchanged. Raises RequestError if they are too many, since only texts are truncated."""
        if self.text is not None and len(ids) > self.text.max_tokens:
            raise RequestError(
                "prompt_too_long",
                f"the prompt has {len(ids)} tokens: shorten it to at most {self.text.max_tokens}",
            )
        return PromptIds(ids)

    def sequence_of(
        self, id: str, prompt: PromptIds, dimensions: int | None = None, text: str | None = None
    ) -> Sequence:
        """Return the sequence of a prompt. Raises RequestError for more dimensions than the target has.

        Args:
            id: id of the request.
            prompt: token ids.
            dimensions: length of the vector; None is the configuration's.
            text: text of the prompt; None for a prompt of token ids.
        """
        if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
            raise RequestError(
                "bad_dimensions",
                f"dimensions: must be an integer, 1 or more, got {dimensions!r}",
                "dimensions",
            )
        try:
            wanted = self.files.dimensions(
                self.config.dimensions if dimensions is None else dimensions
            )
        except ValueError as error:
            raise RequestError("bad_dimensions", f"dimensions: {error}", "dimensions") from None
        state = PoolingState(wanted, first=prompt.num_left_out)
        return Sequence(id, prompt.ids, NOTHING_SAMPLED, prompt_text=text, pooling=state)


def vector_of(sequence: Sequence) -> np.ndarray:
    """Return the embedding of a finished sequence: float32 [dimensions]."""
    assert sequence.pooling is not None and sequence.pooling.vector is not None, "it is finished"
    return sequence.pooling.vector.numpy()


def embedding_field(config: EmbeddingSettings, files: EmbedderFiles) -> pa.Field:
    """Return the Arrow field of a job's embedding column."""
    number = pa.float16() if config.dtype == "float16" else pa.float32()
    return pa.field(EMBEDDING_COLUMN, pa.list_(number, files.dimensions(config.dimensions)))


def _check_parameters(request: Request) -> None:
    """Raise RequestError for the first parameter that is for generated text."""
    set_names = [*request.sampling, *request.chat]
    if set_names:
        raise RequestError(
            "bad_sampling",
            f"{set_names[0]}: it is for generated text, and task is embed. Leave it out",
        )
    if request.is_chat:
        raise RequestError(
            "bad_type", "messages and turns: an embedding is that of one text. Give it as prompt"
        )


def embedding_columns(sequence: Sequence, dtype: str) -> dict[str, Any]:
    """Return the columns that only embeddings have. Raises RequestError if float16 cannot hold the vector.

    Args:
        sequence: finished sequence.
        dtype: float16 or float32.
    """
    vector = vector_of(sequence)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            vector = vector.astype(np.float16)
        if not np.isfinite(vector).all():
            raise RequestError(
                "not_finite",
                "embedding.dtype: float16 has no number as large as some of this embedding. Set it to float32",
            )
    return {EMBEDDING_COLUMN: vector}
