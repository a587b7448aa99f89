"""Validate and read the input file of a batch: lines ``{"custom_id", "method", "url", "body"}``.

If a line is wrong, no line of the file is answered, so the whole file is validated first. A wrong
parameter inside a body concerns its own line only, and is answered there.

    check_lines(files.lines(file), "/v1/completions", max_lines=50_000).total      # 120
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle_ray.batch.reader.jsonl_files import parse_line
from eagle_ray.core.errors import RequestError
from eagle_ray.requests.batch_lines import LINE_KEYS
from eagle_ray.requests.request import InputRow, unreadable

MAX_ERRORS = 100  # errors of one batch that are stored and shown
MAX_ID_CHARS = 512


@dataclass(slots=True)
class CheckedLines:
    """The result of validating an input file.

    Attributes:
        total: number of lines.
        model: model that the first line names; None if it names none.
        errors: {code, message, param, line} of each error, at most MAX_ERRORS.
    """

    total: int = 0
    model: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self, code: str, message: str, param: str | None = None, line: int | None = None
    ) -> None:
        if len(self.errors) < MAX_ERRORS:
            self.errors.append({"code": code, "message": message, "param": param, "line": line})


def check_lines(lines: Iterable[bytes], endpoint: str, max_lines: int) -> CheckedLines:
    """Validate every line of an input file.

    Args:
        lines: lines of the file.
        endpoint: url that each line must have.
        max_lines: maximum number of lines.
    """
    checked, ids = CheckedLines(), set()
    for number, line in _rows(lines):
        checked.total += 1
        if checked.total > max_lines:
            checked.add(
                "too_many_lines",
                f"the file has more than {max_lines} lines. Split it.",
                line=number,
            )
            break
        if isinstance(line, RequestError):
            checked.add("invalid_json_line", str(line), line=number)
            continue
        problem = _problem_of(line, endpoint)
        if problem is None and line["custom_id"] in ids:
            problem = (
                "duplicate_custom_id",
                f"{line['custom_id']!r} stands in an earlier line too. Give each line an id of its own.",
                "custom_id",
            )
        if problem is not None:
            checked.add(*problem, line=number)
            continue
        ids.add(line["custom_id"])
        if checked.model is None and isinstance(line["body"].get("model"), str):
            checked.model = line["body"]["model"]
    if checked.total == 0:
        checked.add("empty_file", "the file has no lines. Write one request a line.")
    return checked


def read_lines(lines: Iterable[bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield custom_id and body of each line of a validated file."""
    for _, line in _rows(lines):
        if isinstance(line, RequestError):
            raise line  # the file is not the one that was checked
        yield line["custom_id"], line["body"]


def _rows(lines: Iterable[bytes]) -> Iterator[tuple[int, InputRow]]:
    """Yield number and value of each line that is not blank. The value of an unreadable line is its error."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            row = parse_line(line)
            yield number, unreadable(row) or row


def _problem_of(line: Mapping[str, Any], endpoint: str) -> tuple[str, str, str] | None:
    """Return code, message and parameter of what is wrong outside a line's body; None if nothing is."""
    if unknown := line.keys() - LINE_KEYS:
        name = min(unknown)
        return (
            "unknown_parameter",
            f"{name}: a line has custom_id, method, url and body. Leave it out.",
            name,
        )
    for name in sorted(LINE_KEYS):
        if line.get(name) is None:
            return (
                "missing_required_parameter",
                f"{name}: absent or null. Each line needs it.",
                name,
            )
    custom_id = line["custom_id"]
    if not isinstance(custom_id, str) or not custom_id.strip() or len(custom_id) > MAX_ID_CHARS:
        return (
            "invalid_custom_id",
            f"custom_id must be a text of 1 to {MAX_ID_CHARS} characters",
            "custom_id",
        )
    if line["method"] != "POST":
        return "invalid_method", "method must be POST", "method"
    if line["url"] != endpoint:
        return "mismatched_url", f"url must be the batch's endpoint {endpoint}", "url"
    if not isinstance(line["body"], Mapping):
        return "invalid_body", "body must be an object", "body"
    return None
