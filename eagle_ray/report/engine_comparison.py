"""Compare the runs of several engines over the same rows: agreement with the first one, speed, acceptance and price.

    print(engines_table([engine_line("own", own, None), engine_line("vllm", other, own)]))
    # engine  model  rows  errors  tokens  tokens/s   tau      same  alike  $ per million
    # own     tiny     40       0   2,560       310  2.41         -      -              -
    # vllm    tiny     40       0   2,560       190     -  38 of 40    97%           0.60

Outputs are compared by token ids where both runs have them, else by text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from eagle_ray.report.comparison import id_of_turn
from eagle_ray.report.summary import ReadColumns
from eagle_ray.report.text import NO_VALUE, number, render

COMPARED_COLUMNS = [
    "request_id",
    "turn_index",
    "sample_index",
    "status",
    "output_token_ids",
    "text",
]
LEGEND = """\
tokens/s: of all workers together, without their start; tau: tokens per pass of the target, where the engine tells
same: outputs that are the first engine's; alike: the part of its outputs before the first difference, by tokens or by
characters; $ per million: of output tokens, prompts and repeated attempts included"""


@dataclass(frozen=True, slots=True)
class EngineRun:
    """The finished run of one engine.

    Attributes:
        summary: content of the run's ``_summary.json``.
        read: reads columns of its rows.
        model: name of the model that was requested of the engine.
    """

    name: str
    kind: str
    model: str
    summary: Mapping[str, Any]
    read: ReadColumns


@dataclass(frozen=True, slots=True)
class Agreement:
    """How much the outputs of two runs agree.

    Attributes:
        num_rows: answered rows that both runs have.
        num_same: number of these rows with equal outputs.
        share_alike: mean share of a first run's output that precedes the first difference; None
            without rows.
    """

    num_rows: int
    num_same: int
    share_alike: float | None

    @classmethod
    def of(cls, run: EngineRun, first: EngineRun) -> Agreement:
        """Compare the rows of a run with those of the first one."""
        own = _answers(run)
        wanted = _answers(first)
        shares = []
        num_same = 0
        for key in own.keys() & wanted.keys():
            a, b = _comparable(own[key], wanted[key])
            num_same += a == b
            shares.append(_share_alike(a, b))
        mean = sum(shares) / len(shares) if shares else None
        return cls(len(shares), num_same, mean)


def engine_numbers(run: EngineRun, first: EngineRun | None) -> dict[str, Any]:
    """Return the numbers of one engine's line.

    Args:
        first: the run that its outputs are compared with; None for the first one itself.
    """
    total = run.summary["total"]
    work = run.summary["last_work"] or {}
    numbers = {
        "engine": run.name,
        "kind": run.kind,
        "model": run.model,
        "rows": total["rows"],
        "errors": total["errors"],
        "output_tokens": total["output_tokens"],
        "tokens_per_s": work.get("tokens_per_s"),
        "mean_acceptance_length": total["mean_acceptance_length"],
        "dollars_per_million_tokens": _dollars_per_million(run.summary),
    }
    if first is None:
        return numbers | {"compared": None, "same": None, "share_alike": None}
    agreement = Agreement.of(run, first)
    return numbers | {
        "compared": agreement.num_rows,
        "same": agreement.num_same,
        "share_alike": agreement.share_alike,
    }


def engines_table(engines: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each engine's numbers, and what the columns mean."""
    header = ["engine", "model", "rows", "errors", "tokens", "tokens/s", "tau", "same", "alike"]
    header.append("$ per million")
    return f"{render(header, [_line(engine) for engine in engines])}\n{LEGEND}"


def _line(engine: Mapping[str, Any]) -> list[str]:
    same = NO_VALUE
    if engine["compared"] is not None:
        same = f"{engine['same']} of {engine['compared']}"
    share = engine["share_alike"]
    return [
        engine["engine"],
        engine["model"],
        f"{engine['rows']:,}",
        f"{engine['errors']:,}",
        f"{engine['output_tokens']:,}",
        number(engine["tokens_per_s"]),
        number(engine["mean_acceptance_length"], 2),
        same,
        NO_VALUE if share is None else f"{share:.0%}",
        number(engine["dollars_per_million_tokens"], 2),
    ]


def _dollars_per_million(summary: Mapping[str, Any]) -> float | None:
    """Return the dollars that an endpoint was paid, or that the workers' hours cost; None without a price."""
    spend = summary.get("spend")
    cost = summary.get("cost")
    tokens = summary["total"]["output_tokens"]
    if spend is not None and spend["dollars"] is not None and tokens:
        return 1e6 * spend["dollars"] / tokens
    return None if cost is None else cost["dollars_per_million_tokens"]


def _answers(run: EngineRun) -> dict[tuple[str, int], tuple[list[int] | None, str]]:
    """Return token ids and text of each answered row."""
    answers = {}
    for table in run.read(COMPARED_COLUMNS):
        for row in table.to_pylist():
            if row["status"] == "ok":
                key = id_of_turn(row["request_id"], row["turn_index"]), row["sample_index"]
                answers[key] = row["output_token_ids"], row["text"] or ""
    return answers


def _comparable(
    a: tuple[list[int] | None, str], b: tuple[list[int] | None, str]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return both outputs as token ids, or as texts if one has none."""
    if a[0] is None or b[0] is None:
        return a[1], b[1]
    return a[0], b[0]


def _share_alike(a: Sequence[Any], b: Sequence[Any]) -> float:
    """Return which part of the longer one stands before the first difference; 1 for two empty ones."""
    longest = max(len(a), len(b))
    if not longest:
        return 1.0
    same = takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return sum(1 for _ in same) / longest
