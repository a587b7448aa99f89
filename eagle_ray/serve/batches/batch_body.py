"""The body of POST /v1/batches.

>>> seconds_of("24h")
86400
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle_ray.core.errors import RequestError
from eagle_ray.requests.openai_batch import URLS
from eagle_ray.requests.openai_bodies import Body
from eagle_ray.requests.parameters import METADATA, Door, Parameter
from eagle_ray.requests.values import Integer, Kind, Object, OneOf, Text
from eagle_ray.serve.batches.batch_models import BatchRecord
from eagle_ray.serve.batches.file_upload import MAX_LIFE_S, MIN_LIFE_S

WINDOW = r"^[1-9][0-9]{0,6}[smhd]$"
MAX_WINDOW_S = 30 * 86_400
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True)
class Duration(Kind):
    """A number and a unit."""

    form: str = ""

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
_AT_BATCHES = frozenset({Door.BATCHES})
_ROWS = (
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
    """POST /v1/batches: answer every line of an uploaded file"""

    door = Door.BATCHES

    @classmethod
    def rows(cls) -> Mapping[str, Parameter]:
        return {row.name: row for row in _ROWS}

    def check(self) -> None:
        super().check()
        if seconds_of(self.completion_window) > MAX_WINDOW_S:
            message = f"completion_window: must be at most 30 days, got {self.completion_window!r}"
            raise RequestError("bad_value", message, "completion_window")

    def record(self, owner: str) -> BatchRecord:
        """Return the batch that the body asks for."""
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
