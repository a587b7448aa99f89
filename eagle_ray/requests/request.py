"""Request: what one row of the input, one line of a batch file or one prompt of Python asks.

>>> request = Request(id="q1", source_file="a.jsonl", row_index=0, prompt="Hi", sampling={"n": 2})
>>> Request.of_row(dict.fromkeys(REQUEST.names) | request.to_row()) == request
True
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from eagle_ray.config import JobConfig
from eagle_ray.core.errors import RequestError
from eagle_ray.requests.columns import location_of
from eagle_ray.requests.parameters import CHAT, SAMPLING
from eagle_ray.requests.row_schema import REQUEST, table_of

_OWN_COLUMNS = frozenset(REQUEST.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One of prompt, messages, prompt_token_ids and user_turns is set, or there is an error.

    Attributes:
        id: None of a prompt of Python that has none, until it is numbered.
        row_index, source_file, source_line: its place in the input; source_line is of files of lines.
        messages: JSON of a list of messages.
        user_turns: the user's messages of a conversation whose other messages are the answers.
        sampling: its own values of the parameters SAMPLING, by name. A seed is in the range of Arrow's int64.
        chat: its own values of the parameters CHAT, by name; lists, objects and texts as JSON.
        error: why it cannot be answered. Its message begins with the place.
        answers: of the earlier turns of a conversation, None for one that failed.
        carried: columns of the input that its output rows have, too.
    """

    id: str | None
    source_file: str
    row_index: int
    source_line: int | None = None
    prompt: str | None = None
    messages: str | None = None
    prompt_token_ids: list[int] | None = None
    user_turns: list[str] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    chat: Mapping[str, Any] = field(default_factory=dict)
    error: RequestError | None = None
    answers: tuple[str | None, ...] = ()
    carried: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Request:
        """Return the request of a row of a table that has the columns REQUEST; its other columns are carried."""
        sampling = {name: row[name] for name in SAMPLING if row[name] is not None}
        if "logit_bias" in sampling:
            sampling["logit_bias"] = dict(sampling["logit_bias"])
        code = row["error_code"]
        return cls(
            id=row["request_id"],
            source_file=row["source_file"],
            row_index=row["row_index"],
            source_line=row["source_line"],
            prompt=row["prompt"],
            messages=row["messages"],
            prompt_token_ids=row["prompt_token_ids"],
            user_turns=row["user_turns"],
            sampling=sampling,
            chat={name: row[name] for name in CHAT if row[name] is not None},
            error=None if code is None else RequestError(code, row["error_message"]),
            carried={name: value for name, value in row.items() if name not in _OWN_COLUMNS},
        )

    def to_row(self) -> dict[str, Any]:
        """Return the request's columns and the carried ones; those of parameters that it does not set are left out."""
        row = {
            "request_id": self.id,
            "row_index": self.row_index,
            "source_file": self.source_file,
            "source_line": self.source_line,
            "prompt": self.prompt,
            "messages": self.messages,
            "prompt_token_ids": self.prompt_token_ids,
            "user_turns": self.user_turns,
            **self.sampling,
            **self.chat,
            **self.carried,
        }
        if "logit_bias" in self.sampling:
            row["logit_bias"] = list(self.sampling["logit_bias"].items())  # as Arrow takes a map
        if self.error is not None:
            row |= {"error_code": self.error.code, "error_message": str(self.error)}
        return row

    @property
    def location(self) -> str:
        """Return its place in the input as text."""
        return location_of(self.source_file, self.row_index, self.source_line)

    def num_samples(self, config: JobConfig) -> int:
        """Return how many samples are asked for, also of a bad request."""
        return self.sampling.get("n") or config.sampling.n

    @property
    def num_turns(self) -> int:
        """Return how many turns each sample has: 1 unless it is a conversation."""
        return len(self.user_turns or [None])

    def num_rows(self, config: JobConfig) -> int:
        """Return how many output rows it has, good or bad."""
        return self.num_samples(config) * self.num_turns


def table_of_requests(requests: Iterable[Request]) -> pa.Table:
    """Return requests as one table, without carried columns."""
    return table_of([request.to_row() for request in requests], REQUEST)
