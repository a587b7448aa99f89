"""Summary of a run: rows, tokens, times and draft statistics, counted over its Parquet files.

Counts are additive over files, groups and runs. Every ratio is derived from them.

    summary = summarise(read, by="category")
    summary["code"].mean_acceptance_length        # 4.9
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
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
ReadColumns = Callable[[list[str]], Iterable[pa.Table]]
"""A function that yields the named columns of a run, one table per file."""
BUDGET_COLUMNS = ["per_step_budget", "per_step_accepted"]
SUMMARY_COLUMNS = ["status", "error_code", "finish_reason", *COUNTS.values(), *LISTS]


@dataclass(frozen=True, slots=True)
class RunStats:
    """Additive counts over rows.

    Tokens, steps and seconds are sums over the ok rows. Lists are added elementwise.
    """

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
    scored: int = 0  # rows that were scored and have no output
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
        """Count the rows of a table with the columns SUMMARY_COLUMNS."""
        ok = table.filter(pc.equal(table["status"], "ok"))
        sums: dict[str, Any] = {}
        for name, column in COUNTS.items():
            sums[name] = pc.sum(ok[column], min_count=0).as_py()
        for name in LISTS:
            sums[name] = _sum_lists(ok[name])
        return cls(
            rows=len(table),
            errors=len(table) - len(ok),
            scored=pc.sum(pc.equal(ok["completion_tokens"], 0), min_count=0).as_py(),
            finish_reasons=_tally(ok["finish_reason"]),
            error_codes=_tally(table["error_code"]),
            **sums,
        )

    def __add__(self, other: RunStats) -> RunStats:
        sums = {}
        for name in self.__dataclass_fields__:
            sums[name] = _plus(getattr(self, name), getattr(other, name))
        return RunStats(**sums)

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
        return _calibration_error(
            self.confidence_nodes, self.confidence_accepted, self.confidence_expected
        )

    @property
    def ece_calibrated(self) -> float | None:
        return _calibration_error(
            self.calibrated_nodes, self.calibrated_accepted, self.calibrated_expected
        )

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Return the decode speed of one sequence: tokens after the first per second of its decode time."""
        if not self.decode_s:
            return None
        num_answers = self.rows - self.errors - self.scored
        return (self.output_tokens - num_answers) / self.decode_s

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
        counts = {name: getattr(self, name) for name in (*self.__dataclass_fields__, *ratios)}
        if not self.scored:
            del counts["scored"]  # a summary of earlier versions lacks it
        return counts


def summarise(read: ReadColumns, by: str | None = None) -> dict[str, RunStats]:
    """Return the counts of a run for each value of the column `by`, with "" for null.

    If `by` is None, all rows are in one group "".
    """
    groups: dict[str, RunStats] = {}
    columns = SUMMARY_COLUMNS + ([by] if by else [])
    for table in read(columns):
        for name, group in _groups_of(table, by):
            groups[name] = groups.get(name, RunStats()) + group
    return dict(sorted(groups.items()))


def summary_json(groups: dict[str, RunStats], by: str | None) -> dict[str, Any]:
    """Return the groups and their total in the form of ``_summary.json``."""
    named = {}
    if by:
        named = {name: group.as_json() for name, group in groups.items()}
    total = sum_groups(groups)
    return {"by": by, "total": total.as_json(), "groups": named}


def sum_groups(groups: dict[str, RunStats]) -> RunStats:
    return sum(groups.values(), RunStats())


def _groups_of(table: pa.Table, by: str | None) -> list[tuple[str, RunStats]]:
    if by is None:
        return [("", RunStats.of(table))]
    keys = as_text(table[by])
    groups = []
    for key in pc.unique(keys).to_pylist():
        rows = table.filter(pc.equal(keys, key))
        groups.append((key, RunStats.of(rows)))
    return groups


def as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert a column of any type to text that can name groups, with "" for null."""
    try:
        return pc.fill_null(column.cast(pa.string()), "")
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        # Bytes that are not UTF-8, and nested values.
        texts = [_text(value) for value in column.to_pylist()]
        return pa.chunked_array([texts], pa.string())


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return "" if value is None else str(value)


def _tally(column: pa.ChunkedArray) -> Counter[str]:
    entries = pc.value_counts(column.drop_null()).to_pylist()
    return Counter({entry["values"]: entry["counts"] for entry in entries})


def _sum_lists(column: pa.ChunkedArray) -> list[int]:
    """Sum lists elementwise. Their lengths can differ, because runs with other settings have other draft depths."""
    longest = pc.max(pc.list_value_length(column)).as_py() or 0
    if longest == 0:
        return []
    padded = pc.list_slice(column, 0, longest, return_fixed_size_list=True)
    sums = []
    for i in range(longest):
        elements = pc.list_element(padded, i)
        sums.append(pc.sum(elements, min_count=0).as_py())
    return sums


def _calibration_error(
    nodes: list[int], accepted: list[int], expected: list[float]
) -> float | None:
    """Return the mean over the bins of |mean probability - accepted fraction|, weighted by the nodes of each bin."""
    if not sum(nodes):
        return None
    gaps = [abs(e - a) for e, a in zip(expected, accepted, strict=True)]
    return sum(gaps) / sum(nodes)


def _plus(a: Any, b: Any) -> Any:
    if not isinstance(a, list):
        return a + b
    return [x + y for x, y in zip_longest(a, b, fillvalue=0)]


def budgets(read: ReadColumns) -> dict[str, list[int]] | None:
    """Return the steps and accepted tokens of a run by budget, or None if no row has per-step statistics.

    Only runs with ``speculative.stats: detailed`` have them. The lists have one entry per budget,
    in ascending order:

        budget      verify rows of one sequence in one step, including its root
        steps       number of steps with this budget
        accepted    accepted draft tokens, including those that a stop condition discards
    """
    steps: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for table in read(BUDGET_COLUMNS):
        # One row for each step.
        values = [pc.list_flatten(table[name]) for name in BUDGET_COLUMNS]
        by_step = pa.Table.from_arrays(values, BUDGET_COLUMNS)
        by_budget = by_step.group_by("per_step_budget")
        sums = by_budget.aggregate([("per_step_accepted", "sum"), ([], "count_all")])
        for row in sums.to_pylist():
            budget = row["per_step_budget"]
            steps[budget] += row["count_all"]
            accepted[budget] += row["per_step_accepted_sum"]
    if not steps:
        return None

    ascending = sorted(steps)
    return {
        "budget": ascending,
        "steps": [steps[n] for n in ascending],
        "accepted": [accepted[n] for n in ascending],
    }
