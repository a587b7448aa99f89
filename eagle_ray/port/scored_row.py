"""ScoredRow: the requests that score a row at an endpoint, and the row's columns once they are answered.

The prompt is tokenized here, by the rules of our own engine, and each request is a prompt of token
ids. Continuations form a trie: one request per leaf gives the scores of all nodes.

    row = ScoredRow.of(request, config, target, tokenizer)
    for part in row.parts:
        columns = ... row.request_of(part) ...
        row.record(part, columns)
    row.columns()
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from eagle_ray.assembly.hub import download_metadata
from eagle_ray.config import JobConfig
from eagle_ray.core.continuations import ContinuationScores
from eagle_ray.core.errors import ConfigError, EngineError
from eagle_ray.core.sequence import Sequence
from eagle_ray.port.http_request import HttpRequest
from eagle_ray.port.http_target import Target
from eagle_ray.port.prompt_scores import PROMPT_SCORES, read_scores
from eagle_ray.requests.request import Request
from eagle_ray.requests.request_rows import OutputRow, sampling_columns
from eagle_ray.requests.score_columns import continuations_column
from eagle_ray.requests.scored_documents import prompt_and_scores
from eagle_ray.requests.sequences import sequences_of
from eagle_ray.text.tokenizer import Tokenizer

# Positions of a model's length that a window over a document leaves: its last token is scored and not read by
# our own engine, but is sent here, and an endpoint may need room for an output token behind it.
SENT_BESIDES = 2


@dataclass(frozen=True, slots=True)
class ScoredPart:
    """One request of a row.

    Attributes:
        prompt_ids: ids of the prompt before the scored tokens.
        leaf: leaf of the trie at which the request's prompt ends.
    """

    prompt_ids: list[int]
    scores: ContinuationScores
    leaf: int


@dataclass(slots=True, eq=False)
class ScoredRow:
    """A row that an endpoint scores.

    Attributes:
        sequences: its prompt with its continuations, or the windows over its document.
        answers: columns of the answers so far.
    """

    request: Request
    config: JobConfig
    dialect: str
    tokenizer: Tokenizer
    sequences: list[Sequence]
    answers: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(
        cls, request: Request, config: JobConfig, target: Target, tokenizer: Tokenizer
    ) -> ScoredRow:
        """Build the requests of a row. Raises RequestError for a row that cannot be scored."""
        length = target.max_model_len
        window = None if length is None else max(1, length - SENT_BESIDES)
        sequences = sequences_of(request, config, tokenizer, 1, window)
        return cls(request, config, target.dialect, tokenizer, sequences)

    @property
    def parts(self) -> list[ScoredPart]:
        """Return the parts to request; empty if all continuations are empty."""
        return [
            ScoredPart(sequence.prompt_ids, sequence.scoring, leaf)
            for sequence in self.sequences
            if sequence.scoring is not None
            for leaf in sequence.scoring.trie.leaves
        ]

    def request_of(self, part: ScoredPart) -> HttpRequest:
        """Return the request for the scores of a part."""
        trie = part.scores.trie
        scored = [trie.tokens[node] for node in trie.path(part.leaf)]
        ids = part.prompt_ids + scored
        form = PROMPT_SCORES[self.dialect]
        body = {"model": self.config.engine.model} | form.body(ids, len(scored))
        body |= self.config.engine.extra_body
        read = partial(read_scores, form, ids, len(scored))
        return HttpRequest.of(self.request, 0, form.path, body, read, form.is_native)

    def record(self, part: ScoredPart, columns: dict[str, Any]) -> None:
        """Record the answer to a part's request."""
        part.scores.record_path(part.leaf, columns["log_probs"], columns["likeliest"])
        self.answers.append(columns)

    def columns(self) -> OutputRow:
        """Return the columns of the complete row: its scores, an empty output, and the totals of its requests."""
        first = self.sequences[0]
        sampling = self.request.sampling_params(self.config)
        is_stored = self.config.output.store_prompt
        prompt_ids, scores = prompt_and_scores(self.sequences, self.tokenizer)
        return (
            self._taken()
            | sampling_columns(first.sampling)
            | {"prompt": first.prompt_text if is_stored else None}
            | {"max_tokens": first.max_tokens, "seed": first.sampling.seed}
            | {"prompt_tokens": len(prompt_ids), "completion_tokens": 0, "output_token_ids": []}
            | {"text": None, "content": None, "finish_reason": "length"}
            | continuations_column(sampling, is_stored)
            | scores
            | {"num_verified": None}  # what the endpoint has computed again is not known
        )

    def _taken(self) -> OutputRow:
        """Return the columns of all requests together; the names of a server are the first answer's."""
        if not self.answers:
            return {}
        own = {"log_probs", "likeliest"}
        first = {name: value for name, value in self.answers[0].items() if name not in own}
        began = min(self._each("started_at"))
        ended = max(self._each("finished_at"))
        queue_s = min(self._each("queue_s"))
        return first | {
            "http_attempts": sum(self._each("http_attempts")),
            "throttled_s": max(self._each("throttled_s")),
            "cached_prompt_tokens": _sum(self._each("cached_prompt_tokens")),
            "cost_dollars": _sum(self._each("cost_dollars")),
            "queue_s": queue_s,
            "started_at": began,
            "finished_at": ended,
            "e2e_s": queue_s + ended - began,
        }

    def _each(self, name: str) -> list[Any]:
        return [columns.get(name) for columns in self.answers]


def tokenizer_of(config: JobConfig, target: Target) -> Tokenizer:
    """Return the tokenizer of an endpoint's model. Raises ConfigError."""
    engine = config.engine
    name = engine.model if engine.tokenizer is None else engine.tokenizer
    if name is None or not engine.has_tokenizer:
        raise ConfigError(
            "engine.tokenizer: required by rows that are scored. Give a directory or a repository that has the "
            "tokenizer of engine.model"
        )
    return _loaded(name, target.max_model_len)


@cache
def _loaded(name: str, max_model_len: int | None) -> Tokenizer:
    try:
        directory = download_metadata(name, "target")
        tokenizer = Tokenizer.load(directory, max_model_len=max_model_len)
    except (ConfigError, EngineError) as error:
        words = str(error).removeprefix("model.target: ")
        raise ConfigError(f"engine.tokenizer: {words}") from error
    if tokenizer is None:
        raise ConfigError(
            f"engine.tokenizer: {name} has none. Give a directory or a repository that has the model's"
        )
    return tokenizer


def _sum(values: Iterable[float | None]) -> float | None:
    """Return the sum; None if a value is not known."""
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)
