"""BatchRecord: the state of one batch, as it is stored, and OpenAI's batch object.

    validating -> in_progress -> finalizing -> completed | expired | cancelled
    validating -> failed

`ending` is the last status of a batch that stops early. It is decided once, so a process that takes the batch over in
the middle of its end comes to the same end.

    record.moved("in_progress", total=120).as_json()["request_counts"]
    # {'total': 120, 'completed': 0, 'failed': 0}
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from eagle_ray.requests.answers import NO_TOKENS, TokenUsage

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelled"]
Ending = Literal["completed", "expired", "cancelled"]
TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelled")  # each with the suffix _at
OVER = ("failed", "completed", "expired", "cancelled")


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """The state of a batch. Times are seconds since 1970.

    Attributes:
        output_id, error_id: files that its end writes, each only if it has lines.
        output_expires_after_s: life of these files; None: they stay until they are deleted.
        files: those of output_id and error_id that were written.
        errors: what validation found: {code, message, param, line}.
        usage: of the completed lines.
    """

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_id: str
    error_id: str
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None
    status: Status = "validating"
    ending: Ending | None = None
    times: dict[str, int] = field(default_factory=dict)
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: TokenUsage = NO_TOKENS
    model: str | None = None
    files: tuple[str, ...] = ()
    errors: tuple[dict[str, Any], ...] = ()

    @property
    def is_over(self) -> bool:
        return self.status in OVER

    def moved(self, status: Status, **changes: Any) -> BatchRecord:
        """Return the record with another status, which began now, and other changes."""
        return replace(self, status=status, times=self.times | {status: int(time.time())}, **changes)

    def stored(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> BatchRecord:
        tuples = {name: tuple(value) for name, value in stored.items() if isinstance(value, list)}
        usage = TokenUsage(*stored.get("usage", ()))  # of an earlier version: prompt and output alone
        return cls(**{**stored, **tuples, "usage": usage})

    def as_json(self, cancelling_at: int | None = None) -> dict[str, Any]:
        """Return OpenAI's batch object. cancelling_at: when its client cancelled it."""
        is_cancelling = cancelling_at is not None and not self.is_over
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": list(self.errors)} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": "cancelling" if is_cancelling else self.status,
            "output_file_id": self.output_id if self.output_id in self.files else None,
            "error_file_id": self.error_id if self.error_id in self.files else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.times.get(name) for name in TIMES},
            "cancelling_at": cancelling_at,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": self.usage.batch_form(),
            "metadata": self.metadata,
        }
