"""The demo: the embedded pair on the bundled prompts, with EAGLE-2 and with plain decoding.

Two ordinary jobs in one Ray session, with equal slots and threads; their outputs are then compared row by row.

    >>> run_demo(StoragePath.of("runs/demo"))
    0
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from typing import Any

from eagle_ray.batch.output.manifest import DATA, REPORT, SUMMARY
from eagle_ray.batch.output.part_files import read_tables
from eagle_ray.batch.run import GROUP_BY, log, run_and_report, run_to_completion, write_report
from eagle_ray.config import JobConfig, load_config
from eagle_ray.report.comparison import compare
from eagle_ray.report.text import comparison_table
from eagle_ray.storage.path import StoragePath, read_json, write_json

# The same answers as configs/demo.yaml's, which a newcomer edits; the package works without the checkout.
SETTINGS = {
    "name": "demo",
    "input.path": "embedded:prompts",
    "model.target": "embedded:tiny",
    "model.draft": "embedded:tiny",
    "model.device": "cpu",  # in fp32: small models gain nothing from a GPU, and the outputs are plain decoding's
    "speculative.max_nodes": 12,
    "speculative.max_depth": 4,
    "speculative.top_k": 4,
    "sampling.max_tokens": 128,
    "execution.ray_address": "local",
    "execution.actors": 2,
    "execution.slots": 1,  # one sequence at a time: a row's decoding time is its own
    "output.if_exists": "overwrite",
    "report.html": False,  # the demo writes its own, once both runs are compared
    "logging.progress_every_s": 5.0,
}
BUSY = (
    "slower than plain decoding? The two jobs ran one after the other: on a machine that is busy with other things "
    "that says little; eagle-ray compare -c configs/demo.yaml measures in turns"
)
LEGEND = (
    "tau: tokens per pass of the target; tokens/s: of one sequence after its first token, one at a time per worker\n"
    "95 % interval: of the speed-up, from the spread between the rows"
)
SHOWN = ("chat", "code")  # categories of which a completion is printed
SHOWN_CHARACTERS = 600


def run_demo(output: StoragePath) -> int:
    """Run the demo into OUTPUT and OUTPUT/baseline, print the comparison and return the exit code."""
    return run_and_report(lambda: _demo(output), "info")


def _demo(output: StoragePath) -> str:
    started = time.monotonic()
    baseline = output / "baseline"
    log.info("EAGLE-2 decoding into %s", output.display_path)
    run_to_completion(demo_config(output, "eagle2"))
    log.info("plain decoding into %s", baseline.display_path)
    run_to_completion(demo_config(baseline, "none"))
    comparison = compare(partial(read_tables, output / DATA), partial(read_tables, baseline / DATA), GROUP_BY).as_json()
    summary = {**(read_json(output / SUMMARY) or {}), "baseline": comparison}
    write_json(output / SUMMARY, summary)
    write_report(output, summary)
    table = f"{comparison_table(comparison, GROUP_BY)}\n{LEGEND}"
    slower = [BUSY] if (comparison["total"]["speed_up"] or 1) < 1 else []
    parts = [table, *slower, _identity(comparison), *_completions(output), _where(output)]
    return "\n\n".join([*parts, f"{time.monotonic() - started:.0f} s in all"])


def demo_config(output: StoragePath, method: str) -> JobConfig:
    """Return the demo's settings, without environment variables."""
    return load_config(None, env={}, overrides=SETTINGS | {"output.path": str(output), "speculative.method": method})


def _identity(comparison: dict[str, Any]) -> str:
    line = f"{comparison['identical']} of {comparison['total']['rows']} outputs are token for token plain decoding's"
    return line + "".join(f"\n  differs: {id} sample {j}" for id, j in comparison["differing"])


def _completions(output: StoragePath) -> list[str]:
    """Return one completion of each category in SHOWN."""
    columns = [GROUP_BY, "request_id", "status", "prompt", "text"]
    rows = [row for table in read_tables(output / DATA, columns) for row in table.to_pylist()]
    first = {row[GROUP_BY]: row for row in sorted(rows, key=lambda row: row["request_id"], reverse=True)}
    shown = [first[category] for category in SHOWN if category in first and first[category]["status"] == "ok"]
    return [f"--- {row[GROUP_BY]}: {row['request_id']}\n{_cut(row['prompt'])}{_cut(row['text'])}" for row in shown]


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."


def _where(output: StoragePath) -> str:
    here = output.display_path
    files = f"{here}/data/*.parquet"
    return (
        f"rows: {files} (plain decoding: {here}/baseline/data), numbers: {here}/{SUMMARY}\n"
        f"report: {here}/{REPORT}\n"
        f"try:  {os.path.relpath(sys.executable)} -c \"import duckdb; print(duckdb.read_parquet('{files}')"
        ".aggregate('category, avg(mean_acceptance_length) tau'))\""
    )
