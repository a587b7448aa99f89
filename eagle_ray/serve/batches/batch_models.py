"""Response models of files and batches for the OpenAPI document: OpenAI's, and the operations that return them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from typing_extensions import TypedDict  # pydantic reads no others before Python 3.12

from eagle_ray.serve.batches.batch_body import LIST_LIMITS, ORDERS, BatchBody
from eagle_ray.serve.batches.batch_record import OVER
from eagle_ray.serve.batches.file_store import BATCH, FILE
from eagle_ray.serve.response_models import CachedTokens, ReasoningTokens


class FileObject(TypedDict):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    expires_at: int | None


class FileList(TypedDict):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(TypedDict):
    id: str
    object: Literal["file"]
    deleted: bool


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


class BatchUsage(TypedDict):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class BatchObject(TypedDict):
    """Times are seconds since 1970; each is null until it comes."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: LineErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchList(TypedDict):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


@dataclass(frozen=True, slots=True)
class BatchOperation:
    """An operation of the OpenAPI document.

    Attributes:
        answer: None for bytes.
        body: a request model, or a schema of a multipart form.
        statuses: of its refusals, besides 401, 404, 500 and 503.
        query: the schemas of its query's parameters, by name; none is required.
    """

    path: str
    method: str
    summary: str
    answer: type | None
    body: type | dict[str, Any] | None = None
    statuses: tuple[str, ...] = ()
    query: dict[str, dict[str, Any]] = field(default_factory=dict)


def page_query(prefix: str) -> dict[str, dict[str, Any]]:
    """Return the parameters of a list of ids with this prefix (``batch_body.page_of`` reads them)."""
    most, default = LIST_LIMITS[prefix]
    return {
        "limit": {"type": "integer", "minimum": 1, "maximum": most, "default": default},
        "after": {"type": "string", "pattern": f"^{prefix}[0-9a-f]{{27}}$"},
        "order": {"enum": [*ORDERS], "default": "desc"},
    }


UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer"},
    },
    "additionalProperties": False,
}
ONE_FILE, ONE_BATCH = "/v1/files/{id}", "/v1/batches/{id}"
OPERATIONS = (
    BatchOperation(
        "/v1/files", "post", "store a file for a batch", FileObject, UPLOAD, ("400", "403", "408", "413", "415")
    ),
    BatchOperation(
        "/v1/files",
        "get",
        "the files, newest first",
        FileList,
        None,
        ("400",),
        page_query(FILE) | {"purpose": {"type": "string"}},
    ),
    BatchOperation(ONE_FILE, "get", "a file's description", FileObject),
    BatchOperation(ONE_FILE, "delete", "delete a file", FileDeleted, None, ("409",)),
    BatchOperation(f"{ONE_FILE}/content", "get", "a file's bytes", None),
    BatchOperation(
        "/v1/batches",
        "post",
        "answer every line of a file",
        BatchObject,
        BatchBody,
        ("400", "408", "413", "415", "429"),
    ),
    BatchOperation("/v1/batches", "get", "the batches, newest first", BatchList, None, ("400",), page_query(BATCH)),
    BatchOperation(ONE_BATCH, "get", "a batch", BatchObject),
    BatchOperation(
        f"{ONE_BATCH}/cancel", "post", f"end a batch that is not {', '.join(OVER)}", BatchObject, None, ("403", "409")
    ),
)
