"""OpenAI's file and batch objects, as clients see them and as the store keeps them.

    validating -> in_progress -> finalizing -> completed | expired | cancelled
    validating -> failed

An id begins with its time of creation, so ids in alphabetical order are in order of creation.

    record.moved("in_progress").as_json()["request_counts"]     # {'total': 120, 'completed': 0, 'failed': 0}

BatchBody is the body of POST /v1/batches.

    >>> seconds_of("24h")
    86400
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator
from typing_extensions import Self, TypedDict  # pydantic reads no others before Python 3.12

from eagle_ray.core.errors import RequestError
from eagle_ray.requests.answer_models import BatchUsage, described
from eagle_ray.requests.answers import NO_TOKENS, TokenUsage
from eagle_ray.requests.batch_lines import URLS
from eagle_ray.requests.openai_bodies import Body
from eagle_ray.requests.parameters import METADATA, Api, Parameter
from eagle_ray.requests.values import Integer, Json, Kind, Object, OneOf, Text

FILE, BATCH = "file-", "batch_"
ID = re.compile(rf"({FILE}|{BATCH})[0-9a-f]{{27}}")
EXPIRES_S = 30 * 86_400  # seconds until an input file expires, as OpenAI's
MIN_LIFE_S, MAX_LIFE_S = 3600, EXPIRES_S
TIME_DIGITS = 11  # hexadecimal, of milliseconds: until the year 2527
Ending = Literal["completed", "expired", "cancelled"]
OVER = ("failed", "completed", "expired", "cancelled")


def new_id(prefix: str) -> str:
    """Return a new id: the time in milliseconds, then 64 random bits.

    Args:
        prefix: FILE or BATCH.
    """
    return f"{prefix}{time.time_ns() // 1_000_000:0{TIME_DIGITS}x}{secrets.token_hex(8)}"


def is_id(text: str, prefix: str) -> bool:
    return text.startswith(prefix) and ID.fullmatch(text) is not None


def made_at(id: str) -> float:
    """Return the time in an id, in seconds since 1970."""
    return int(id[len(FILE) :][-27:][:TIME_DIGITS], 16) / 1000


class OpenAiObject(BaseModel):
    """A JSON object of an answer."""

    model_config = ConfigDict(frozen=True, json_schema_serialization_defaults_required=True)


class FileObject(OpenAiObject):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"
    expires_at: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the object as clients see it."""
        return self.model_dump(include=set(FileObject.model_fields))


class StoredFile(FileObject):
    """A file as it is stored. If expires_at is None, it stays until it is deleted.

    Attributes:
        num_chunks: number of chunks that hold its bytes.
    """

    num_chunks: int


class FileDeleted(OpenAiObject):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class LineError(TypedDict):
    code: str
    message: str
    param: str | None
    line: int | None


class LineErrors(TypedDict):
    object: Literal["list"]
    data: list[LineError]


class RequestCounts(TypedDict):
    total: int
    completed: int
    failed: int


@described("Times are seconds since 1970; each is null until it comes.")
class BatchObject(OpenAiObject):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None = None
    errors: LineErrors | None = None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating",
        "failed",
        "in_progress",
        "finalizing",
        "completed",
        "expired",
        "cancelling",
        "cancelled",
    ] = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts(total=0, completed=0, failed=0)
    usage: BatchUsage = NO_TOKENS.batch_form()
    metadata: dict[str, str] | None = None


class BatchRecord(BatchObject):
    """A batch with the fields that only the server reads.

    Attributes:
        owner: name of the client's directory.
        output_id, error_id: ids of the files that the end writes. A file without lines is not
            written.
        output_expires_after_s: seconds that these files last; None if they stay until they are
            deleted.
        ending: last status, decided once; None before. A process that takes the batch over while it
            ends keeps it.
    """

    owner: str
    output_id: str
    error_id: str
    output_expires_after_s: int | None = None
    ending: Ending | None = None

    @property
    def is_over(self) -> bool:
        return self.status in OVER

    def changed(self, **changes: Any) -> Self:
        return self.model_copy(update=changes)

    def moved(self, status: str, **changes: Any) -> Self:
        """Return the record with another status that begins now, and with further changes."""
        return self.changed(status=status, **{f"{status}_at": int(time.time())}, **changes)

    def as_json(self, cancelling_at: int | None = None) -> dict[str, Any]:
        """Return the batch object of OpenAI's API.

        Args:
            cancelling_at: Unix time at which the client cancelled the batch; None if it did not.
        """
        shown = self.model_dump(include=set(BatchObject.model_fields))
        if cancelling_at is not None:
            shown["cancelling_at"] = cancelling_at
            shown["status"] = self.status if self.is_over else "cancelling"
        return shown

    @classmethod
    def new(cls, window_s: int, **facts: Any) -> Self:
        """Return a batch that is created now.

        Args:
            window_s: seconds until it expires.
            facts: owner of the batch, and what the client's body says.
        """
        now = int(time.time())
        ids = {"id": new_id(BATCH), "output_id": new_id(FILE), "error_id": new_id(FILE)}
        return cls.model_validate(facts | ids | {"created_at": now, "expires_at": now + window_s})

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_version(cls, stored: dict[str, Any]) -> dict[str, Any]:
        """Convert a record of an earlier version, which stored counts, times and files in other forms."""
        if "times" not in stored:
            return stored
        facts = {name: value for name, value in stored.items() if name in cls.model_fields}
        times = {f"{status}_at": at for status, at in stored["times"].items()}
        files = {f"{kind}_file_id": stored[f"{kind}_id"] for kind in ("output", "error")}
        return (
            facts
            | times
            | {
                "errors": LineErrors(object="list", data=stored["errors"])
                if stored["errors"]
                else None,
                **{name: id for name, id in files.items() if id in stored["files"]},
                "request_counts": {name: stored[name] for name in ("total", "completed", "failed")},
                "usage": TokenUsage(*stored["usage"]).batch_form(),
            }
        )


class FileList(OpenAiObject):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchList(OpenAiObject):
    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


WINDOW = r"^[1-9][0-9]{0,6}[smhd]$"
MAX_COMPLETION_WINDOW_S = 30 * 86_400
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True)
class Duration(Kind):
    """A duration: a number and a unit, such as 24h."""

    def check(self, value: Any) -> str:
        if not isinstance(value, str) or not re.search(WINDOW, value):
            raise self.wrong(value)
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": WINDOW}


EXPIRES_AFTER = Object(
    "ExpiresAfter",
    {"anchor": OneOf(("created_at",)), "seconds": Integer(MIN_LIFE_S, MAX_LIFE_S)},
    required=("anchor", "seconds"),
    form=f'{{anchor: "created_at", seconds: {MIN_LIFE_S} to {MAX_LIFE_S}}}',
)
_AT_BATCHES = frozenset({Api.BATCHES})
_BATCH_PARAMETERS = (
    Parameter(
        "input_file_id",
        Text(form="the id of an uploaded file of purpose batch", can_be_empty=True),
        required=_AT_BATCHES,
    ),
    Parameter("endpoint", OneOf(URLS, form=" or ".join(URLS)), required=_AT_BATCHES),
    Parameter(
        "completion_window",
        Duration(form='"24h" or another duration of at most 30 days, as in "30m"'),
        required=_AT_BATCHES,
    ),
    Parameter("metadata", METADATA),
    Parameter("output_expires_after", EXPIRES_AFTER),
)


class BatchBody(Body):
    """The body of a request to create a batch."""

    api = Api.BATCHES
    summary = "POST /v1/batches: answer every line of an uploaded file"

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: Json | None = None

    @classmethod
    def rows(cls) -> Mapping[str, Parameter]:
        return {row.name: row for row in _BATCH_PARAMETERS}

    def check(self) -> None:
        super().check()
        if seconds_of(self.completion_window) > MAX_COMPLETION_WINDOW_S:
            message = f"completion_window: must be at most 30 days, got {self.completion_window!r}"
            raise RequestError("bad_value", message, "completion_window")

    def record(self, owner: str) -> BatchRecord:
        """Return the batch that the body describes."""
        life = self.output_expires_after
        return BatchRecord.new(
            seconds_of(self.completion_window),
            owner=owner,
            endpoint=self.endpoint,
            input_file_id=self.input_file_id,
            completion_window=self.completion_window,
            metadata=self.metadata,
            output_expires_after_s=None if life is None else life["seconds"],
        )


def seconds_of(duration: str) -> int:
    return int(duration[:-1]) * SECONDS[duration[-1]]
