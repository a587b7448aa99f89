"""The demo: real questions answered live by EAGLE-2 and by plain decoding in turns, then the same questions as a job.

    run_demo(StoragePath.of("runs/demo"))      # 0

The pair is SmolLM2-135M-Instruct with its head where the model's wheel is installed, otherwise the
tiny pair.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import Any

from eagle_ray.batch.driver.job_run import complete_job, ending_of, log
from eagle_ray.batch.driver.status import write_report
from eagle_ray.cli.live_demo import LiveResult, answer_live
from eagle_ray.cli.report_run import load_summary
from eagle_ray.config import JobConfig, load_config
from eagle_ray.core.json_text import dump_json
from eagle_ray.report.run_table import run_table
from eagle_ray.runs.layout import REPORT, SUMMARY
from eagle_ray.storage.model_files import INSTALL_SMOLLM2, gguf_file
from eagle_ray.storage.path import StoragePath

SETTINGS: dict[str, Any] = {
    "name": "demo",
    "model.device": "cpu",
    "execution.ray_address": "local",
    "execution.actors": 1,
    "execution.slots": 8,
    "speculative.max_nodes": 12,
    "speculative.max_depth": 4,
    "speculative.top_k": 4,
    "output.if_exists": "overwrite",
    "logging.progress_every_s": 5.0,
}
# The same answers as configs/demo.yaml's, which a newcomer edits; the package works without the
# checkout.
TINY_SETTINGS = {
    "input.path": "embedded:prompts",
    "model.target": "embedded:tiny",
    "model.draft": "embedded:tiny",
    "model.dtype": "float32",  # the outputs are plain decoding's to the last token; bf16 may round a near-tie otherwise
    "sampling.max_tokens": 128,
}
SMOLLM2_SETTINGS = {
    "input.path": "embedded:questions",
    "model.target": "embedded:smollm2",
    "model.draft": "embedded:smollm2",
    "sampling.max_tokens": 64,
}
LIVE_PER_CATEGORY = 2  # questions that are answered live
DEMO_LEGEND = (
    "tau: tokens per pass of the target; speed-up: both methods answered each question, one after the other, in one "
    "process"
)
PICTURE = "One draft tree: each node's probability by the planner; * is what the target took in that one pass"
SLOWER = (
    "no faster than plain decoding here: a pass over several tokens costs about as much as these tokens one by one. "
    "`eagle-ray bench cost` shows what a pass costs on this machine"
)


@dataclass(frozen=True, slots=True)
class DemoPair:
    """Target and draft of the demo.

    Attributes:
        settings: configuration keys for the pair and its questions.
    """

    settings: dict[str, Any]
    description: str


def run_demo(output: StoragePath) -> int:
    """Run the demo, the job into OUTPUT, and return the exit code."""
    return ending_of(lambda: _demo(output), "info").outcome.code


def demo_pair() -> DemoPair:
    """Return the real model if it is installed, otherwise the tiny pair."""
    if gguf_file() is not None:
        return DemoPair(
            SMOLLM2_SETTINGS, "SmolLM2-135M-Instruct, a real if small model, and its EAGLE-3 head"
        )
    return DemoPair(
        TINY_SETTINGS,
        f"the tiny pair, which knows an invented world only ({INSTALL_SMOLLM2} gets a real model)",
    )


def demo_config(output: StoragePath, pair: DemoPair) -> JobConfig:
    """Return the demo's configuration, which ignores environment variables."""
    return load_config(
        None, env={}, overrides=SETTINGS | pair.settings | {"output.path": str(output)}
    )


def _demo(output: StoragePath) -> str:
    started = time.monotonic()
    pair = demo_pair()
    config = demo_config(output, pair)
    log.info("loading %s", pair.description)
    live = answer_live(config, _write, LIVE_PER_CATEGORY)
    _write(f"\n{_live_text(live)}\n\n")
    log.info("all questions as a job, into %s", output.display_path)
    summary = complete_job(config)
    _report_live(output, live)
    return "\n\n".join(
        [run_table(summary), _where(output), f"{time.monotonic() - started:.0f} s in all"]
    )


def _report_live(output: StoragePath, live: LiveResult) -> None:
    """Put what was measured live at the head of the job's report."""
    summary = load_summary(output) | {"live": live.as_json()}
    (output / SUMMARY).write_atomic(dump_json(summary, indent=2).encode())
    write_report(output, summary)


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _live_text(live: LiveResult) -> str:
    slower = [SLOWER] if live.speed_up.mean < 1 else []
    picture = [f"{PICTURE}\n{live.picture}"] if live.picture else []
    return "\n\n".join([f"{live.table}\n{DEMO_LEGEND}", *slower, _identity(live), *picture])


def _identity(live: LiveResult) -> str:
    same = live.identity
    line = f"{same.num_equal} of {same.num_compared} outputs are token for token plain decoding's"
    return line + (
        f" ({same.num_near_ties} differ where rounding decides)" if same.num_near_ties else ""
    )


def _where(output: StoragePath) -> str:
    here = output.display_path
    files = f"{here}/data/*.parquet"
    return (
        f"rows: {files}, numbers: {here}/{SUMMARY}\n"
        f"report: {here}/{REPORT}\n"
        f"try:  {os.path.relpath(sys.executable)} -c \"import duckdb; print(duckdb.read_parquet('{files}')"
        ".aggregate('category, avg(mean_acceptance_length) tau'))\""
    )
