"""Invariants of an output row, mostly equalities between its acceptance counts.

Each check reads one row as a dictionary of the output columns.

    >>> broken_invariants(row)
    ['completion_tokens is 12, not 1 + num_spec_steps + num_accepted_draft_tokens - num_discarded_tokens = 13']
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import isclose
from typing import Any

Row = Mapping[str, Any]

# Columns about the output of a row. They are null in error rows.
STATISTICS = (
    "finish_reason",
    "completion_tokens",
    "num_spec_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "num_spec_tokens",
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "acceptance_histogram",
    "num_plain_steps",
    "num_discarded_tokens",
    "target_forwards",
    "draft_forwards",
    "proposed_by_depth",
    "accepted_by_depth",
    "confidence_nodes",
    "confidence_accepted",
    "confidence_expected",
    "calibrated_nodes",
    "calibrated_accepted",
    "calibrated_expected",
    "per_step_budget",
    "per_step_accepted",
    "output_token_ids",
    "token_logprobs",
    "cumulative_logprob",
    "text",
)


def broken_invariants(row: Row) -> list[str]:
    """Return the violated invariants of a row. Columns that the configuration does not store must be null."""
    checks: tuple[Callable[[Row], Iterator[str]], ...] = (
        _counts,
        _by_depth,
        _ratios,
        _per_step,
        _tokens,
    )
    if row["status"] == "error":
        checks = (_error_row,)
    elif row.get("max_tokens") == 0:
        checks = (_scored_row,)
    return [problem for check in checks for problem in check(row)]


def _error_row(row: Row) -> Iterator[str]:
    if not (row["error_code"] and row["error_message"]):
        yield "an error row without error_code and error_message"
    for name in STATISTICS:
        if row[name] is not None:
            yield f"an error row has {name} {row[name]!r}, not null"


def _scored_row(row: Row) -> Iterator[str]:
    """A row that generates nothing: it has no output and no acceptance, and lists of scores of one length."""
    present = ("finish_reason", "completion_tokens", "target_forwards", "output_token_ids")
    present += ("token_logprobs", "cumulative_logprob")
    for name in STATISTICS:
        if row[name] is not None and name not in present:
            yield f"a row that is scored alone has {name} {row[name]!r}, not null"
    yield from _equal(row, "completion_tokens", 0, "a row that is scored alone has")
    if row["scores"] is not None:
        for name in ("score_tokens", "is_greedy"):
            if len(row[name]) != len(row["scores"]):
                yield f"{name} has not one entry for each of {len(row['scores'])} scores"
        if row["num_verified"] is None:
            yield "num_verified is null in a row with scores"


def _counts(row: Row) -> Iterator[str]:
    histogram, steps, accepted = (
        row["acceptance_histogram"],
        row["num_spec_steps"],
        row["num_accepted_draft_tokens"],
    )
    yield from _equal(
        row,
        "completion_tokens",
        1 + steps + accepted - row["num_discarded_tokens"],
        "1 + num_spec_steps + num_accepted_draft_tokens - num_discarded_tokens",
    )
    yield from _equal(row, "num_spec_steps", sum(histogram), "sum(acceptance_histogram)")
    weighted = sum(j * count for j, count in enumerate(histogram))
    yield from _equal(
        row, "num_accepted_draft_tokens", weighted, "sum(j * acceptance_histogram[j])"
    )
    yield from _equal(row, "num_spec_tokens", len(histogram) - 1, "len(acceptance_histogram) - 1")
    if not 0 <= row["num_plain_steps"] <= steps:
        yield f"num_plain_steps is {row['num_plain_steps']} of {steps} steps"
    if row["method"] == "none":
        yield from _equal(row, "num_spec_tokens", 0, "method none's")
        yield from _equal(row, "num_plain_steps", steps, "num_spec_steps")


def _by_depth(row: Row) -> Iterator[str]:
    histogram = row["acceptance_histogram"]
    reached = [sum(histogram[depth:]) for depth in range(1, len(histogram))]
    yield from _equal(
        row, "accepted_by_depth", reached, "sum of acceptance_histogram[j] over j >= depth"
    )
    yield from _equal(
        row, "num_draft_tokens", sum(row["proposed_by_depth"]), "sum(proposed_by_depth)"
    )
    if any(a > p for a, p in zip(reached, row["proposed_by_depth"], strict=True)):
        yield f"accepted_by_depth {reached} exceeds proposed_by_depth {row['proposed_by_depth']}"
    yield from _confidences(row, "confidence")
    yield from _confidences(row, "calibrated")
    if sum(row["calibrated_nodes"]) != sum(row["confidence_nodes"]):
        yield f"calibrated_nodes {row['calibrated_nodes']} are not as many as confidence_nodes"


def _confidences(row: Row, name: str) -> Iterator[str]:
    nodes, accepted, expected = (
        row[f"{name}_{part}"] for part in ("nodes", "accepted", "expected")
    )
    if any(a > n for a, n in zip(accepted, nodes, strict=True)):
        yield f"{name}_accepted {accepted} exceeds {name}_nodes {nodes}"
    if sum(accepted) != row["num_accepted_draft_tokens"]:
        yield f"{name}_accepted adds up to {sum(accepted)}, not num_accepted_draft_tokens"
    for k, (total, count) in enumerate(zip(expected, nodes, strict=True)):
        low, high = k / len(nodes) - 1e-5, (k + 1) / len(nodes) + 1e-5
        if not low * count <= total <= high * count:
            yield f"{name}_expected is {total} for {count} nodes of bin {k}"


def _ratios(row: Row) -> Iterator[str]:
    steps, drafted, accepted = (
        row["num_spec_steps"],
        row["num_draft_tokens"],
        row["num_accepted_draft_tokens"],
    )
    yield from _close(row, "mean_acceptance_length", 1 + accepted / steps if steps else None)
    yield from _close(row, "draft_acceptance_rate", accepted / drafted if drafted else None)


def _per_step(row: Row) -> Iterator[str]:
    budget, accepted = row["per_step_budget"], row["per_step_accepted"]
    if budget is None and accepted is None:
        return
    if not len(budget) == len(accepted) == row["num_spec_steps"]:
        yield f"{len(budget)} budgets and {len(accepted)} accepted lengths for {row['num_spec_steps']} steps"
    if sum(budget) != row["num_draft_tokens"] + row["num_spec_steps"]:
        yield f"per_step_budget adds up to {sum(budget)}, not num_draft_tokens + num_spec_steps"
    if sum(accepted) != row["num_accepted_draft_tokens"]:
        yield f"per_step_accepted adds up to {sum(accepted)}, not num_accepted_draft_tokens"


def _tokens(row: Row) -> Iterator[str]:
    if row["finish_reason"] not in ("stop", "length") or row["error_code"] is not None:
        yield f"an ok row has finish_reason {row['finish_reason']!r} and error_code {row['error_code']!r}"
    for name in ("output_token_ids", "token_logprobs"):
        if row[name] is not None and len(row[name]) != row["completion_tokens"]:
            yield f"{name} has {len(row[name])} entries, completion_tokens is {row['completion_tokens']}"


def _equal(row: Row, name: str, wanted: object, meaning: str) -> Iterator[str]:
    if row[name] != wanted:
        yield f"{name} is {row[name]!r}, not {meaning} = {wanted!r}"


def _close(row: Row, name: str, wanted: float | None) -> Iterator[str]:
    found = row[name]
    if (found is None) != (wanted is None) or (found is not None and not isclose(found, wanted)):
        yield f"{name} is {found!r}, not {wanted!r}"
