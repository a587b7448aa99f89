"""Read the body of POST /v1/embeddings and build its answer, in OpenAI's protocol.

    >>> body = EmbeddingsRequest.read({"input": ["Paris", "Rome"], "encoding_format": "base64"})
    >>> body.inputs, body.is_base64, body.dimensions
    (['Paris', 'Rome'], True, None)

prompt_name is this system's own parameter. It names the target's prompt that precedes each text.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from eagle_ray.core.errors import RequestError
from eagle_ray.core.sequence import Sequence
from eagle_ray.requests.answer_models import Embedding, Embeddings
from eagle_ray.requests.embeddings import EmbeddingMaker, vector_of
from eagle_ray.requests.openai_bodies import OpenBody, errors_of_item
from eagle_ray.requests.parameters import Api, Parameter, rows_at
from eagle_ray.requests.score_bodies import prompt_usage
from eagle_ray.requests.values import Integer, OneOf, Text

MAX_INPUTS = 2048  # inputs of a request, as in OpenAI's API
_REQUIRED = frozenset({Api.EMBEDDINGS})
_AT_TEXT = rows_at(Api.COMPLETIONS)
_EMBEDDING_PARAMETERS = (
    Parameter(
        "input",
        _AT_TEXT["prompt"].kind_at(Api.COMPLETIONS),
        required=_REQUIRED,
    ),
    Parameter("model", _AT_TEXT["model"].kind_at(Api.COMPLETIONS)),
    Parameter("encoding_format", OneOf(("float", "base64"), form="float or base64")),
    Parameter("dimensions", Integer(1, form="an integer, 1 or more")),
    Parameter("prompt_name", Text(form="the name of one of the target's prompts")),
)


class EmbeddingsRequest(OpenBody):
    """A request for the embeddings of one or several texts, or lists of token ids."""

    api = Api.EMBEDDINGS
    summary = "POST /v1/embeddings: embed one text, several, or token ids"

    input: str | list[str] | list[int] | list[list[int]]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    prompt_name: str | None = None

    @classmethod
    def rows(cls) -> Mapping[str, Parameter]:
        return {row.name: row for row in _EMBEDDING_PARAMETERS}

    @property
    def inputs(self) -> list[Any]:
        """Return the texts or the lists of token ids of the request."""
        given = self.input
        is_one = isinstance(given, str) or isinstance(given[0], int)
        return [given] if is_one else [*given]

    @property
    def is_base64(self) -> bool:
        return self.encoding_format == "base64"

    def check(self) -> None:
        super().check()
        if len(self.inputs) > MAX_INPUTS:
            raise RequestError(
                "too_many_inputs",
                f"input: must be at most {MAX_INPUTS} texts, got {len(self.inputs)}. Send several requests",
                "input",
            )
        if "" in self.inputs:
            raise RequestError("prompt_empty", "input: holds an empty text: write one", "input")

    def sequences(self, maker: EmbeddingMaker) -> list[Sequence]:
        """Return the sequence of each input. Raises RequestError naming the input at fault."""
        sequences = []
        for i, given in enumerate(self.inputs):
            with errors_of_item("input", i, len(self.inputs)):
                sequences.append(self._sequence(maker, str(i), given))
        return sequences

    def _sequence(self, maker: EmbeddingMaker, name: str, given: str | list[int]) -> Sequence:
        if isinstance(given, str):
            ids = maker.text_ids(given, self.prompt_name or maker.config.prompt_name)
        else:
            ids = maker.given_ids(given)
        return maker.sequence_of(name, ids, self.dimensions)

    def body(self, sequences: list[Sequence], model: str) -> Embeddings:
        """Return the answer: each input's embedding, in order."""
        data: list[Embedding] = [
            {"object": "embedding", "index": i, "embedding": self._shown(vector_of(sequence))}
            for i, sequence in enumerate(sequences)
        ]
        usage = prompt_usage(sequences)
        return {"object": "list", "data": data, "model": model, "usage": usage}

    def _shown(self, vector: np.ndarray) -> str | list[float]:
        if self.is_base64:
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return [float(str(number)) for number in vector]  # the shortest text of each float32
