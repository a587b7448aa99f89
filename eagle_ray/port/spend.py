"""What a run has paid for: a line for each attempt at a request, written as soon as it ends.

    OUT/spend/5f0c2a91d3b7-0001-host-4711.jsonl
    {"key": "8d0f...", "request_id": "q1", "kind": "answered", "prompt_tokens": 40, ..., "columns": {"text": ...}}

What a run has spent is the sum of these lines, not of its rows: failed attempts count, and so do answers of
rows that a kill has lost. A line of an answer has its columns, so a run that goes on does not ask for it
again: after a kill, only requests that were in flight are paid twice. Once the run is done, the columns are
taken out. On object storage a file cannot grow, so lines are written together every FLUSH_S.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from eagle_ray.core.json_text import dump_json
from eagle_ray.port.endpoint_answers import Json
from eagle_ray.requests.answers import TokenUsage
from eagle_ray.runs.run import Run
from eagle_ray.storage.path import StoragePath

SPEND = "spend"
ANSWERED = "answered"
FLUSH_S = 1.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a request.

    Attributes:
        key: digest of the row, the sample and the body.
        kind: ANSWERED, or the kind of its failure.
        usage: None if the endpoint told none.
        dollars: None if the price is not known.
        columns: the answer's columns; None for a failure.
    """

    key: str
    request_id: str
    kind: str
    usage: TokenUsage | None = None
    dollars: float | None = None
    columns: Mapping[str, Any] | None = None

    def as_json(self) -> Json:
        usage = self.usage or TokenUsage()
        return {
            "key": self.key,
            "request_id": self.request_id,
            "at": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "kind": self.kind,
            "has_usage": self.usage is not None,
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.output,
            "cached_prompt_tokens": usage.cached,
            "reasoning_tokens": usage.reasoning,
            "dollars": self.dollars,
            "columns": None if self.columns is None else dict(self.columns),
        }


class SpendLog:
    """The file of one worker, and the answers of all files that were there when it was opened."""

    def __init__(self, run: Run, worker_id: str):
        self._directory = run.output / SPEND
        self._directory.make_directory()
        self._answers = StoredAnswers(run)
        name = "".join(each if each.isalnum() else "-" for each in worker_id)
        self._stem = f"{run.run_id}-{run.attempt:04d}-{name}"
        self._file: int | None = None
        self._lines: list[str] = []
        self._num_objects = 0
        self._flushed_at = time.monotonic()

    def answer_to(self, key: str) -> Json | None:
        """Return the columns of an answer that an earlier process has paid for; None if there is none."""
        return self._answers.columns(key)

    def append(self, attempt: Attempt) -> None:
        """Write an attempt; on object storage with the others of the last FLUSH_S."""
        self._lines.append(dump_json(attempt.as_json(), ensure_ascii=False) + "\n")
        if self._directory.is_local or time.monotonic() - self._flushed_at >= FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write the lines that wait."""
        if not self._lines:
            return
        data = "".join(self._lines).encode()
        self._lines = []
        self._flushed_at = time.monotonic()
        if self._directory.is_local:
            os.write(self._descriptor(), data)
            return
        self._num_objects += 1
        path = self._directory / f"{self._stem}-{self._num_objects:06d}.jsonl"
        path.write_atomic(data)

    def close(self) -> None:
        """Write the lines that wait, and close the file."""
        self.flush()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _descriptor(self) -> int:
        if self._file is None:
            path = self._directory / f"{self._stem}.jsonl"
            mode = 0o600 if path.is_private else 0o666
            self._file = os.open(str(path), os.O_CREAT | os.O_WRONLY | os.O_APPEND, mode)
        return self._file


@dataclass(slots=True)
class StoredAnswers:
    """The answers in the files of a run, by key. Those of local files are read when they are needed."""

    run: Run
    _lines_at: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    _columns: dict[str, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in spend_files(self.run):
            start = 0
            for line in path.read_bytes().splitlines(keepends=True):
                entry = _entry(line)
                if entry is not None and entry.get("columns") is not None:
                    self._note(path, entry, start, len(line))
                start += len(line)

    def columns(self, key: str) -> Json | None:
        """Return the columns of an answer; None if there is none."""
        if key in self._columns:
            return self._columns[key]
        if key not in self._lines_at:
            return None
        path, start, size = self._lines_at[key]
        try:
            with open(path, "rb") as file:
                file.seek(start)
                entry = _entry(file.read(size))
        except OSError:
            return None
        return entry["columns"] if entry is not None and entry.get("key") == key else None

    def _note(self, path: StoragePath, entry: Json, start: int, size: int) -> None:
        if path.is_local:
            self._lines_at[entry["key"]] = (str(path), start, size)
        else:
            self._columns[entry["key"]] = entry["columns"]


def spend_files(run: Run) -> list[StoragePath]:
    """Return the files of attempts, in order. Those of a run that was overwritten are not among them."""
    directory = run.output / SPEND
    return sorted(directory.glob(f"{run.run_id}-*.jsonl")) if directory.is_directory() else []


def entries_of(run: Run) -> Iterator[Json]:
    """Yield the attempts of a run; the last line of a killed worker may be cut, and is left out."""
    for path in spend_files(run):
        for line in path.read_bytes().splitlines():
            entry = _entry(line)
            if entry is not None:
                yield entry


def spend_summary(run: Run) -> Json:
    """Return the sums over all attempts of a run.

    The entry dollars is None if the price of one is not known.
    """
    names = ("prompt_tokens", "completion_tokens", "cached_prompt_tokens", "reasoning_tokens")
    total: Json = dict.fromkeys(("requests", "answered", "limited", "without_usage", *names), 0)
    dollars = 0.0
    is_priced = True
    for entry in entries_of(run):
        total["requests"] += 1
        total["answered"] += entry["kind"] == ANSWERED
        total["limited"] += entry["kind"] == "limited"
        is_paid = entry["kind"] == ANSWERED or entry["has_usage"]
        total["without_usage"] += not entry["has_usage"] and is_paid
        for name in names:
            total[name] += entry[name]
        if entry["dollars"] is not None:
            dollars += entry["dollars"]
        elif is_paid:
            is_priced = False
    return total | {"dollars": dollars if is_priced else None}


def drop_answers(run: Run) -> None:
    """Take the columns out of the lines of a run whose rows are all in its part files."""
    for path in spend_files(run):
        entries = [_entry(line) for line in path.read_bytes().splitlines()]
        if not any(entry is not None and entry.get("columns") for entry in entries):
            continue
        lines = [
            dump_json(entry | {"columns": None}, ensure_ascii=False) + "\n"
            for entry in entries
            if entry is not None
        ]
        path.write_atomic("".join(lines).encode())


def _entry(line: bytes) -> Json | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and "key" in entry else None
