"""Request: what one row of the input, one line of a batch file or one prompt of Python asks.

>>> request = Request(id="q1", source_file="a.jsonl", row_index=0, prompt="Hi", sampling={"n": 2})
>>> Request.of_row(dict.fromkeys(REQUEST.names) | request.to_row()) == request
True
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from eagle_ray.config import JobConfig
from eagle_ray.core.errors import RequestError
from eagle_ray.requests.columns import location_of
from eagle_ray.requests.parameters import CHAT, SAMPLING, SamplingParams, merged_values
from eagle_ray.requests.row_schema import REQUEST, table_of
from eagle_ray.text.chat_options import NO_OPTIONS, ChatOptions

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

    def error_text(self, error: RequestError) -> str:
        """Return an error's message after the location; errors of the reader have the location already."""
        return str(error) if self.error is not None else f"{self.location}: {error}"

    def check(self) -> None:
        """Raise the RequestError of a request that cannot be answered."""
        if self.error is not None:
            raise RequestError(self.error.code, str(self.error))

    @property
    def is_chat(self) -> bool:
        """Return whether the prompt goes through the chat template."""
        return self.messages is not None or self.user_turns is not None

    @property
    def turn_index(self) -> int:
        return len(self.answers)

    def next_turn(self, answers: Iterable[str | None]) -> Request:
        """Return the request of the next turn of a conversation. answers: those of all earlier turns."""
        return replace(self, answers=tuple(answers))

    @property
    def turn_messages(self) -> str | None:
        """Return the messages as JSON: those of a conversation up to the user's turn. None for other prompts."""
        if self.user_turns is None:
            return self.messages
        messages = []
        for turn, answer in zip(self.user_turns, [*self.answers, None], strict=False):
            messages.append({"role": "user", "content": turn})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        return json.dumps(messages, ensure_ascii=False)

    def sampling_params(self, config: JobConfig) -> SamplingParams:
        """Return the parameters in force: its own, then the job's."""
        return SamplingParams.of_checked(merged_values(dict(config.sampling), self.sampling))

    def chat_options(self, config: JobConfig) -> ChatOptions:
        """Return the options in force: its own, then the job's. Raises RequestError."""
        own = {name: json.loads(value) if isinstance(value, str) else value for name, value in self.chat.items()}
        try:
            options = config.chat.options(own)
        except ValueError as error:
            raise RequestError("invalid_chat", str(error)) from None
        if self.is_chat:
            return options
        if options.has_tools:
            raise RequestError("invalid_chat", "tools: only with messages. Leave tools out of rows with other prompts")
        return NO_OPTIONS

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
