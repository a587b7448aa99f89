"""HttpRows: makes output rows from an endpoint's answers, with additional columns for jobs of other engines.

output_schema(ENGINE_FIELDS)
rows.of(request, sample_index=0, columns=answered.columns)
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import jsonschema

from eagle_ray.core.errors import RequestError
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.port.dialects import wanted_form
from eagle_ray.port.endpoint_answers import INVALID, Failed
from eagle_ray.requests.request import Request
from eagle_ray.requests.request_rows import OutputRow, RequestRows, controls_json, sampling_columns
from eagle_ray.requests.row_schema import ENGINE_FIELDS

# Engines whose answers to a request are equal each time, but for rounding.
SEEDED = ("vllm", "sglang", "llama_server")


@dataclass(frozen=True, slots=True)
class HttpRows(RequestRows):
    """Makes the output rows of an endpoint's answers."""

    def of(self, request: Request, sample_index: int, columns: dict[str, Any]) -> OutputRow:
        """Return the row of one sample."""
        sampling = request.sampling_params(self.config)
        row = self._answered(request, sampling, sampling_columns(sampling) | columns)
        row["sample_index"] = sample_index
        form = wanted_form(sampling)
        if form is not None:
            is_whole = columns.get("finish_reason") != "length"
            row["structured"] = form[0]
            row["structured_outcome"] = "complete" if is_whole else "truncated"
        return row

    def of_scores(self, request: Request, columns: dict[str, Any]) -> OutputRow:
        """Return the row of a request that only scores and generates nothing."""
        sampling = request.sampling_params(self.config)
        return self._answered(request, sampling, columns) | {"sample_index": 0}

    def _answered(
        self, request: Request, sampling: SamplingSettings, columns: dict[str, Any]
    ) -> OutputRow:
        config = self.config
        row = self.shared(request) | {
            "status": "ok",
            "prompt": request.prompt if config.output.store_prompt else None,
            "stop": sampling.stop,
            "sampling_controls": controls_json(sampling),
        }
        row |= columns
        if not config.output.store_token_ids:
            row["output_token_ids"] = None
        return row

    def of_failure(
        self, request: Request, sample_index: int, failed: Failed, columns: dict[str, Any]
    ) -> OutputRow:
        """Return the error row of one sample, with the endpoint's own facts about it."""
        error = RequestError(failed.kind, str(failed))
        named = {field.name for field in ENGINE_FIELDS}
        engine_columns = {name: value for name, value in columns.items() if name in named}
        return self.of_turn_error(request, sample_index, error) | engine_columns


def determinism_of(dialect: str, columns: dict[str, Any]) -> str:
    """Return whether an equal request gets an equal answer: exact, engine (as far as that engine promises) or none."""
    if dialect == "eagle_ray":
        return "exact"
    is_seeded = dialect in SEEDED or columns.get("system_fingerprint") is not None
    return "engine" if is_seeded else "none"


def check_form(sampling: SamplingSettings, columns: dict[str, Any]) -> None:
    """Raise Failed of kind INVALID if a complete answer does not have the requested structure."""
    form = wanted_form(sampling)
    if form is None or columns.get("finish_reason") == "length" or columns.get("tool_calls"):
        return
    name, wanted = form
    text = columns.get("text") or ""
    reason = _misfit(name, wanted, text)
    if reason is not None:
        raise Failed(INVALID, f"the answer is not of the form of {name}: {reason}")


def _misfit(name: str, wanted: Any, text: str) -> str | None:
    if name == "choice":
        return None if text in wanted else "it is none of the choices"
    if name == "regex":
        return None if re.fullmatch(wanted, text, re.DOTALL) else "it does not match"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return "it is not JSON"
    if name == "json_object":
        return None if isinstance(value, dict) else "it is no JSON object"
    schema = json.loads(wanted) if isinstance(wanted, str) else wanted
    try:
        jsonschema.validate(value, schema)
    except jsonschema.ValidationError as error:
        return f"{error.json_path} does not fit the schema"
    except jsonschema.SchemaError:
        return None  # the endpoint has taken it
    return None
