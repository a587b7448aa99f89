"""Timeline of a run: tokens per second and busy slots of each worker, from the timestamps of its rows.

A row occupies its slot from started_at + queue_s to finished_at. The timeline spreads its tokens
evenly from the first token to finished_at. It omits the time between attempts: the spans of the
attempts follow each other directly.

    timeline(read)["workers"]["host:71"]["tokens_per_s"]      # [0.0, 151.2, 148.9, 60.3]
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eagle_ray.report.summary import ReadColumns

MOMENTS = ["attempt", "started_at", "finished_at"]
TIMELINE_COLUMNS = [*MOMENTS, "worker_id", "queue_s", "ttft_s", "completion_tokens"]
MAX_BINS = 120
WIDTHS_S = (
    0.1,
    0.2,
    0.5,
    1,
    2,
    5,
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    900,
    1800,
    3600,
    7200,
    14400,
    28800,
    86400,
)
MAX_SHOWN_WORKERS = 32  # workers with their own entry; the rest are summed up under OTHER_WORKERS
OTHER_WORKERS = "others"
SHORTEST_S = 1e-6  # minimum duration of a row, which avoids divisions by 0
TIMELINE_ROWS_AT_ONCE = 4096  # bounds the memory of an array of rows x bins


@dataclass(frozen=True, slots=True)
class Span:
    """Time span of an attempt.

    Attributes:
        started: Unix time of its first row's start, in seconds.
        finished: Unix time of its last row's end, in seconds.
        offset: its start on the time axis, in seconds.
    """

    started: float
    finished: float
    offset: float = 0.0

    @property
    def seconds(self) -> float:
        return self.finished - self.started


@dataclass(slots=True)
class Work:
    """Work of one worker per time bin.

    Attributes:
        tokens: tokens generated in each bin.
        slot_seconds: occupied seconds of all slots in each bin.
        rows: number of rows.
        first: start of its first row on the time axis, in seconds.
        last: end of its last row on the time axis, in seconds.
    """

    tokens: np.ndarray
    slot_seconds: np.ndarray
    rows: int = 0
    first: float = np.inf
    last: float = -np.inf

    @classmethod
    def none(cls, num_bins: int) -> Work:
        return cls(np.zeros(num_bins), np.zeros(num_bins))

    def add(self, other: Work) -> None:
        self.tokens += other.tokens
        self.slot_seconds += other.slot_seconds
        self.rows += other.rows
        self.first = min(self.first, other.first)
        self.last = max(self.last, other.last)


@dataclass(frozen=True, slots=True)
class Bins:
    """`num` equal time bins of `width` seconds, from 0."""

    width: float
    num: int

    @classmethod
    def over(cls, seconds: float) -> Bins:
        fitting = (width for width in WIDTHS_S if seconds <= width * MAX_BINS)
        width = next(fitting, seconds / MAX_BINS)
        num = int(np.ceil(seconds / width))
        return cls(width, max(1, num))

    def spread(self, begin: np.ndarray, end: np.ndarray, amounts: np.ndarray) -> np.ndarray:
        """Distribute each amount evenly over its interval [begin, end] and return the sum per bin.

        An amount with an interval of length 0 falls into one bin.
        """
        length = np.maximum(end - begin, SHORTEST_S)
        start = end - length
        edges = np.arange(self.num + 1) * self.width

        # Share of each amount that lies before each edge of a bin.
        passed = (edges - start[:, None]) / length[:, None]
        shares = np.clip(passed, 0, 1)
        return np.diff(amounts @ shares)


def timeline(read: ReadColumns) -> dict[str, Any] | None:
    """Return the timeline in the form of ``_summary.json``, or None if no row has timestamps.

    Its lists have one entry per bin of bin_s seconds.
    """
    spans = _spans(read)
    if not spans:
        return None
    seconds = max(span.offset + span.seconds for span in spans.values())
    bins = Bins.over(seconds)
    workers = _busiest(_work(read, spans, bins), bins)
    return {
        "bin_s": bins.width,
        "num_bins": bins.num,
        "attempts": [_attempt(number, span) for number, span in spans.items()],
        "workers": {name: _rates(work, bins) for name, work in workers.items()},
    }


def _attempt(number: int, span: Span) -> dict[str, Any]:
    started = datetime.fromtimestamp(span.started, timezone.utc)
    return {
        "attempt": number,
        "started_at": started.isoformat(timespec="milliseconds"),
        "offset_s": round(span.offset, 3),
    }


def _rates(work: Work, bins: Bins) -> dict[str, Any]:
    """Return the rates of a worker. Its means are over the time from its first row's start to its last row's end."""
    seconds = max(work.last - work.first, SHORTEST_S)
    num_tokens = float(work.tokens.sum())
    slot_seconds = float(work.slot_seconds.sum())
    return {
        "rows": work.rows,
        "output_tokens": round(num_tokens),
        "mean_tokens_per_s": round(num_tokens / seconds, 2),
        "mean_busy_slots": round(slot_seconds / seconds, 3),
        "tokens_per_s": _rounded(work.tokens / bins.width, 2),
        "busy_slots": _rounded(work.slot_seconds / bins.width, 3),
    }


def _rounded(values: np.ndarray, digits: int) -> list[float]:
    return [round(float(value), digits) for value in values]


def _busiest(workers: dict[str, Work], bins: Bins) -> dict[str, Work]:
    """Return the workers with the most tokens, sorted by name, and the sum of the rest as OTHER_WORKERS."""
    ranked = sorted(workers, key=lambda name: -workers[name].tokens.sum())
    shown = ranked[:MAX_SHOWN_WORKERS]
    busiest = {name: workers[name] for name in sorted(shown)}
    if len(ranked) == len(shown):
        return busiest

    others = Work.none(bins.num)
    for name in ranked[MAX_SHOWN_WORKERS:]:
        others.add(workers[name])
    busiest[OTHER_WORKERS] = others
    return busiest


def _spans(read: ReadColumns) -> dict[int, Span]:
    """Return the span of each attempt. Each offset is the total duration of the attempts before it."""
    by_attempt: dict[int, Span] = {}
    for table in map(_answered, read(MOMENTS)):
        ends = table.group_by("attempt").aggregate([("started_at", "min"), ("finished_at", "max")])
        for row in ends.to_pylist():
            attempt = row["attempt"]
            started = row["started_at_min"].timestamp()
            finished = row["finished_at_max"].timestamp()
            if attempt in by_attempt:
                started = min(by_attempt[attempt].started, started)
                finished = max(by_attempt[attempt].finished, finished)
            by_attempt[attempt] = Span(started, finished)

    # Attempts follow each other on the time axis.
    spans: dict[int, Span] = {}
    offset = 0.0
    for attempt, span in sorted(by_attempt.items()):
        spans[attempt] = Span(span.started, span.finished, offset)
        offset += span.seconds
    return spans


def _answered(table: pa.Table) -> pa.Table:
    """Drop rows that no engine ran, such as most error rows: they have no timestamps."""
    has_start = pc.is_valid(table["started_at"])
    has_end = pc.is_valid(table["finished_at"])
    return table.filter(pc.and_(has_start, has_end))


def _work(read: ReadColumns, spans: dict[int, Span], bins: Bins) -> dict[str, Work]:
    workers: dict[str, Work] = {}
    # A running job may have started another attempt since the spans were read.
    known = pa.array(list(spans), pa.int32())
    for table in map(_answered, read(TIMELINE_COLUMNS)):
        of_known = table.filter(pc.is_in(table["attempt"], known))
        for start in range(0, len(of_known), TIMELINE_ROWS_AT_ONCE):
            _add_rows(workers, of_known.slice(start, TIMELINE_ROWS_AT_ONCE), spans, bins)
    return workers


def _add_rows(
    workers: dict[str, Work], table: pa.Table, spans: dict[int, Span], bins: Bins
) -> None:
    """Add rows of a table to the work of their workers."""
    for name in pc.unique(table["worker_id"]).to_pylist():
        rows = table.filter(pc.equal(table["worker_id"], name))

        # From Unix time to the time axis.
        shifts = []
        for attempt in rows["attempt"].to_pylist():
            span = spans[attempt]
            shifts.append(span.offset - span.started)
        shift = np.array(shifts)
        arrived = _seconds(rows["started_at"]) + shift
        finished = _seconds(rows["finished_at"]) + shift
        admitted = arrived + _numbers(rows["queue_s"])
        first_token = arrived + _numbers(rows["ttft_s"])

        slot_seconds = np.maximum(finished - admitted, 0)
        work = Work(
            tokens=bins.spread(first_token, finished, _numbers(rows["completion_tokens"])),
            slot_seconds=bins.spread(admitted, finished, slot_seconds),
            rows=len(rows),
            first=float(admitted.min()),
            last=float(finished.max()),
        )
        workers.setdefault(name, Work.none(bins.num)).add(work)


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    """Return the values as floats, with 0 for null: an error row that ran for a while has no tokens."""
    return pc.fill_null(column.cast(pa.float64()), 0.0).to_numpy()


def _seconds(column: pa.ChunkedArray) -> np.ndarray:
    """Return timestamps as Unix time in seconds."""
    moments = column.cast(pa.timestamp("us", "UTC")).to_numpy()
    microseconds = moments.astype("datetime64[us]").astype(np.int64)
    return microseconds / 1e6
