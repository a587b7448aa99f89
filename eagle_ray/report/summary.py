"""Summary of a run: rows, tokens, times and draft statistics, counted over its Parquet files.

Counts are additive over files, groups and runs. Every ratio is derived from them.

    summary = summarise(read, by="category")
    summary["code"].mean_acceptance_length        # 4.9
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

COUNTS = {
    "prompt_tokens": "prompt_tokens",
    "output_tokens": "completion_tokens",
    "steps": "num_spec_steps",
    "plain_steps": "num_plain_steps",
    "draft_tokens": "num_draft_tokens",
    "accepted_draft_tokens": "num_accepted_draft_tokens",
    "discarded_tokens": "num_discarded_tokens",
    "target_forwards": "target_forwards",
    "draft_forwards": "draft_forwards",
    "prefill_s": "prefill_s",
    "decode_s": "decode_s",
}
LISTS = (
    "acceptance_histogram",
    "proposed_by_depth",
    "accepted_by_depth",
    "confidence_nodes",
    "confidence_accepted",
    "confidence_expected",
    "calibrated_nodes",
    "calibrated_accepted",
    "calibrated_expected",
)
ReadColumns = Callable[[list[str]], Iterable[pa.Table]]  # yields the named columns of a run, one table per file
BUDGET_COLUMNS = ["per_step_budget", "per_step_accepted"]
COLUMNS = ["status", "error_code", "finish_reason", *COUNTS.values(), *LISTS]


@dataclass(frozen=True, slots=True)
class RunStats:
    """Additive counts over rows. Tokens, steps and seconds are sums over the ok rows; lists are added elementwise."""

    rows: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    plain_steps: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    discarded_tokens: int = 0
    target_forwards: int = 0
    draft_forwards: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    error_codes: Counter[str] = field(default_factory=Counter)
    acceptance_histogram: list[int] = field(default_factory=list)
    proposed_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    confidence_nodes: list[int] = field(default_factory=list)
    confidence_accepted: list[int] = field(default_factory=list)
    confidence_expected: list[float] = field(default_factory=list)
    calibrated_nodes: list[int] = field(default_factory=list)
    calibrated_accepted: list[int] = field(default_factory=list)
    calibrated_expected: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, table: pa.Table) -> RunStats:
        """Count the rows of a table with the columns COLUMNS."""
        ok = table.filter(pc.equal(table["status"], "ok"))
        counts: dict[str, Any] = {name: pc.sum(ok[column], min_count=0).as_py() for name, column in COUNTS.items()}
        lists: dict[str, Any] = {name: _sum_lists(ok[name]) for name in LISTS}
        return cls(
            rows=len(table),
            errors=len(table) - len(ok),
            finish_reasons=_tally(ok["finish_reason"]),
            error_codes=_tally(table["error_code"]),
            **counts,
            **lists,
        )

    def __add__(self, other: RunStats) -> RunStats:
        return RunStats(
            **{name: _plus(getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__}
        )

    @property
    def mean_acceptance_length(self) -> float | None:
        """Return tau: tokens per target pass over all steps, including the bonus token."""
        return 1 + self.accepted_draft_tokens / self.steps if self.steps else None

    @property
    def nodes_per_step(self) -> float | None:
        """Return the verified draft nodes per target pass, without the roots."""
        return self.draft_tokens / self.steps if self.steps else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        return self.accepted_draft_tokens / self.draft_tokens if self.draft_tokens else None

    @property
    def ece_drafted(self) -> float | None:
        """Return the expected calibration error of the drafter's own probabilities."""
        return _calibration_error(self.confidence_nodes, self.confidence_accepted, self.confidence_expected)

    @property
    def ece_calibrated(self) -> float | None:
        return _calibration_error(self.calibrated_nodes, self.calibrated_accepted, self.calibrated_expected)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Return the decode speed of one sequence: tokens after the first per second of its decode time."""
        return (self.output_tokens - (self.rows - self.errors)) / self.decode_s if self.decode_s else None

    def as_json(self) -> dict[str, Any]:
        """Return all counts and ratios by name."""
        ratios = (
            "mean_acceptance_length",
            "draft_acceptance_rate",
            "nodes_per_step",
            "ece_drafted",
            "ece_calibrated",
            "decode_tokens_per_s",
        )
        return {name: getattr(self, name) for name in (*self.__dataclass_fields__, *ratios)}


def summarise(read: ReadColumns, by: str | None = None) -> dict[str, RunStats]:
    """Return the counts of a run for each value of the column `by`, with "" for null.

    If `by` is None, all rows are in one group "".
    """
    groups: dict[str, RunStats] = {}
    for table in read(COLUMNS + ([by] if by else [])):
        for name, group in _groups_of(table, by):
            groups[name] = groups.get(name, RunStats()) + group
    return dict(sorted(groups.items()))


def summary_json(groups: dict[str, RunStats], by: str | None) -> dict[str, Any]:
    """Return the groups and their total in the form of ``_summary.json``."""
    named = {name: group.as_json() for name, group in groups.items()} if by else {}
    return {"by": by, "total": sum_groups(groups).as_json(), "groups": named}


def sum_groups(groups: dict[str, RunStats]) -> RunStats:
    return sum(groups.values(), RunStats())


def _groups_of(table: pa.Table, by: str | None) -> list[tuple[str, RunStats]]:
    if by is None:
        return [("", RunStats.of(table))]
    keys = as_text(table[by])
    return [(key, RunStats.of(table.filter(pc.equal(keys, key)))) for key in pc.unique(keys).to_pylist()]


def as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert a column of any type to text that can name groups, with "" for null."""
    try:
        return pc.fill_null(column.cast(pa.string()), "")
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):  # bytes that are not UTF-8, nested values
        return pa.chunked_array([[_text(value) for value in column.to_pylist()]], pa.string())


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return "" if value is None else str(value)


def _tally(column: pa.ChunkedArray) -> Counter[str]:
    return Counter({entry["values"]: entry["counts"] for entry in pc.value_counts(column.drop_null()).to_pylist()})


def _sum_lists(column: pa.ChunkedArray) -> list[int]:
    """Sum lists elementwise. Their lengths can differ, because runs with other settings have other draft depths."""
    longest = pc.max(pc.list_value_length(column)).as_py() or 0
    if longest == 0:
        return []
    padded = pc.list_slice(column, 0, longest, return_fixed_size_list=True)
    return [pc.sum(pc.list_element(padded, i), min_count=0).as_py() for i in range(longest)]


def _calibration_error(nodes: list[int], accepted: list[int], expected: list[float]) -> float | None:
    """Return the mean over the bins of |mean probability - accepted fraction|, weighted by the nodes of each bin."""
    gaps = (abs(e - a) for e, a in zip(expected, accepted, strict=True))
    return sum(gaps) / sum(nodes) if sum(nodes) else None


def _plus(a: Any, b: Any) -> Any:
    if not isinstance(a, list):
        return a + b
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    return [x + y for x, y in zip(longer, shorter + [0] * (len(longer) - len(shorter)), strict=True)]


def budgets(read: ReadColumns) -> dict[str, list[int]] | None:
    """Return lists with one entry per budget in ascending order, or None if no row has per-step statistics.

    Only runs with ``speculative.stats: detailed`` have them.

    budget: verify rows of one sequence in one step, including its root.
    steps: number of steps with this budget.
    accepted: accepted draft tokens, including those that a stop condition discards.
    """
    steps: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for table in read(BUDGET_COLUMNS):
        taken = pa.Table.from_arrays([pc.list_flatten(table[name]) for name in BUDGET_COLUMNS], BUDGET_COLUMNS)
        sums = taken.group_by("per_step_budget").aggregate([("per_step_accepted", "sum"), ([], "count_all")])
        for row in sums.to_pylist():
            steps[row["per_step_budget"]] += row["count_all"]
            accepted[row["per_step_budget"]] += row["per_step_accepted_sum"]
    if not steps:
        return None
    given = sorted(steps)
    return {"budget": given, "steps": [steps[n] for n in given], "accepted": [accepted[n] for n in given]}
