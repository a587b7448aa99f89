"""SpendLog: record what a run pays an endpoint, with a line for each attempt at a request as soon as it ends.

    OUT/spend/5f0c2a91d3b7-0001-host-4711.jsonl
    {"key": "8d0f...", "request_id": "q1", "kind": "answered", "prompt_tokens": 40, ..., "columns": {"text": ...}}

A run's spending is the sum of these lines, not of its rows: failed attempts count, and so do
answers whose rows a kill has lost. The line of an answer has its columns, so a resumed run does not
request it again: after a kill, only requests that were in flight are paid twice. Once the run is
done, the columns are removed. On object storage a file cannot grow, so lines are written together
every FLUSH_S.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from eagle_ray.core.json_text import dump_json
from eagle_ray.port.endpoint_answers import Json
from eagle_ray.requests.answers import TokenUsage
from eagle_ray.runs.run import Run
from eagle_ray.storage.path import StoragePath

SPEND = "spend"
ANSWERED = "answered"
TOKENS = ("prompt_tokens", "completion_tokens", "cached_prompt_tokens", "reasoning_tokens")
FLUSH_S = 1.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a request.

    Attributes:
        key: digest of the row, the sample and the body.
        kind: ANSWERED, or the kind of its failure.
        usage: token counts; None if the endpoint reported none.
        dollars: cost of the attempt; None if the price is unknown.
        columns: the answer's columns; None for a failure.
        perhaps_dollars: possible cost of a request without a response.
    """

    key: str
    request_id: str
    kind: str
    usage: TokenUsage | None = None
    dollars: float | None = None
    columns: Mapping[str, Any] | None = None
    perhaps_dollars: float = 0.0

    def as_json(self) -> Json:
        usage = self.usage or TokenUsage()
        return {
            "key": self.key,
            "request_id": self.request_id,
            "at": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "kind": self.kind,
            "has_usage": self.usage is not None,
            **dict(zip(TOKENS, usage, strict=True)),
            "dollars": self.dollars,
            "perhaps_dollars": self.perhaps_dollars,
            "columns": None if self.columns is None else dict(self.columns),
        }


class SpendLog:
    """The log file of one worker."""

    def __init__(self, run: Run, worker_id: str):
        self.run = run
        self._directory = run.output / SPEND
        self._directory.make_directory()
        name = "".join(each if each.isalnum() else "-" for each in worker_id)
        self._stem = f"{run.run_id}-{run.attempt:04d}-{name}"
        self._file: int | None = None
        self._lines: list[str] = []
        self._num_objects = 0
        self._flushed_at = time.monotonic()

    def append(self, attempt: Attempt) -> None:
        """Write an attempt; on object storage, together with the others of the last FLUSH_S."""
        self._lines.append(dump_json(attempt.as_json(), ensure_ascii=False) + "\n")
        if self._directory.is_local or time.monotonic() - self._flushed_at >= FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write the lines that are not written yet."""
        if not self._lines:
            return
        data = "".join(self._lines).encode()
        self._lines = []
        self._flushed_at = time.monotonic()
        if self._directory.is_local:
            while data:  # a full disk takes a part, and then refuses the rest
                data = data[os.write(self._descriptor(), data) :]
            return
        self._num_objects += 1
        path = self._directory / f"{self._stem}-{self._num_objects:06d}.jsonl"
        path.write_atomic(data)

    def close(self) -> None:
        """Write the remaining lines, and close the file."""
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


@dataclass(frozen=True, slots=True)
class Entry:
    """A parsed line of a log file.

    Attributes:
        position: file of the line, its first byte and its number of bytes.
        facts: result of Attempt.as_json.
    """

    position: tuple[StoragePath, int, int]
    facts: Json

    @property
    def usage(self) -> TokenUsage:
        """Return the attempt's token counts; zero if the endpoint reported none."""
        return TokenUsage(*(self.facts[name] for name in TOKENS))


class StoredAnswers:
    """The answers in a run's log files, the first one for each key. An answer's columns are read on demand.

    Attributes:
        num_by_kind: number of answers of each kind.
        usage: token counts of all answers.
    """

    def __init__(self, run: Run):
        self._run = run
        self._positions: dict[str, tuple[StoragePath, int, int] | None] = {}
        self.num_by_kind: Counter[str] = Counter()
        self.usage = TokenUsage()
        for entry in entries_of(run):
            if entry.facts.get("columns") is None or entry.facts["key"] in self:
                continue
            self._positions[entry.facts["key"]] = entry.position
            self._count(entry.facts["kind"], entry.usage)

    def __contains__(self, key: str) -> bool:
        return key in self._positions

    def __len__(self) -> int:
        return len(self._positions)

    def add(self, answer: Attempt) -> bool:
        """Count an answer that is about to be written. Return False if its key already has one, which stays."""
        if answer.key in self:
            return False
        self._positions[answer.key] = None
        self._count(answer.kind, answer.usage or TokenUsage())
        return True

    def _count(self, kind: str, usage: TokenUsage) -> None:
        self.num_by_kind[kind] += 1
        self.usage = self.usage.plus(usage)

    def columns(self, key: str) -> Json | None:
        """Return the columns of an answer; None if there is none."""
        position = self._positions.get(key)
        if position is None:
            return None
        path, start, size = position
        try:
            with path.open() as file:
                file.seek(start)
                facts = _facts(file.read(size))
        except OSError:
            return None
        return facts["columns"] if facts is not None and facts.get("key") == key else None

    def entries(self) -> Iterator[Entry]:
        """Yield the answers in their order. Raises FileNotFoundError if not all of them are in the files."""
        num_left = len(self)
        for entry in entries_of(self._run):
            if self._positions.get(entry.facts["key"]) == entry.position:
                num_left -= 1
                yield entry
        if num_left:
            raise FileNotFoundError(f"{self._run.output}: {num_left} answers are gone")


def spend_files(run: Run) -> list[StoragePath]:
    """Return the log files of attempts, in order, without those of an overwritten run."""
    directory = run.output / SPEND
    return sorted(directory.glob(f"{run.run_id}-*.jsonl")) if directory.is_directory() else []


def entries_of(run: Run) -> Iterator[Entry]:
    """Yield the attempts in a run's log files. A cut last line of a killed worker is left out."""
    for path in spend_files(run):
        start = 0
        with path.open() as file:
            for line in file:
                facts = _facts(line)
                if facts is not None:
                    yield Entry((path, start, len(line)), facts)
                start += len(line)


def spend_summary(run: Run) -> Json:
    """Return the sums over all attempts of a run.

    `dollars` is None if the price of an attempt is unknown. It does not include perhaps_dollars.
    """
    total: Json = dict.fromkeys(("requests", "answered", "limited", "without_usage", *TOKENS), 0)
    dollars = 0.0
    perhaps_dollars = 0.0
    is_priced = True
    for entry in entries_of(run):
        facts = entry.facts
        total["requests"] += 1
        total["answered"] += facts["kind"] == ANSWERED
        total["limited"] += facts["kind"] == "limited"
        is_paid = facts["kind"] == ANSWERED or facts["has_usage"]
        total["without_usage"] += not facts["has_usage"] and is_paid
        for name in TOKENS:
            total[name] += facts[name]
        perhaps_dollars += facts.get("perhaps_dollars", 0.0)
        if facts["dollars"] is not None:
            dollars += facts["dollars"]
        elif is_paid:
            is_priced = False
    return total | {
        "dollars": dollars if is_priced else None,
        "perhaps_dollars": perhaps_dollars,
    }


def drop_answers(run: Run) -> None:
    """Remove the columns from the log of a run whose rows are all in part files."""
    for path in spend_files(run):
        entries = [_facts(line) for line in path.read_bytes().splitlines()]
        if not any(entry is not None and entry.get("columns") for entry in entries):
            continue
        lines = [
            dump_json(entry | {"columns": None}, ensure_ascii=False) + "\n"
            for entry in entries
            if entry is not None
        ]
        path.write_atomic("".join(lines).encode())


def _facts(line: bytes) -> Json | None:
    try:
        facts = json.loads(line)
    except ValueError:
        return None
    return facts if isinstance(facts, dict) and "key" in facts else None
