"""Small jobs over the goldens' pair: their configuration, how they are run, and what is read from their output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from eagle_ray.config import JobConfig, load_config

TESTS = Path(__file__).parent.parent
PAIR = TESTS / "goldens" / "pair_fit"  # vocabulary 512, no tokenizer
MakeJob = Callable[..., JobConfig]


def small_job(
    directory: Path, rows: list[dict[str, Any]] | None = None, **settings: Any
) -> JobConfig:
    """A job over the goldens' pair, from directory/in.jsonl to directory/out. rows: written to it, where given."""
    if rows is not None:
        (directory / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    defaults = {
        "input.path": str(directory / "in.jsonl"),
        "output.path": str(directory / "out"),
        "model.target": str(PAIR / "target"),
        "model.draft": str(PAIR / "draft"),
        "speculative.max_nodes": 8,
        "speculative.max_depth": 3,
        "speculative.top_k": 4,
        "sampling.max_tokens": 12,
        "execution.slots": 4,
        "logging.progress_every_s": 1.0,
    }
    return load_config(None, env={}, overrides=defaults | settings)


def exit_code(config: JobConfig, retry_errors: bool = False) -> int:
    """Run a job as the command does and return the exit code."""
    from eagle_ray.batch.driver.job_run import run_to_end

    return run_to_end(config, retry_errors).outcome.code


def token_rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Requests of token ids; every third is longer."""
    return [
        {
            "id": f"q{i}",
            "prompt_token_ids": [1 + (i * 37 + k * k) % 500 for k in range(3 + 9 * (i % 3 == 0))],
        }
        for i in range(start, start + count)
    ]


SPARE = "EAGLE_RAY_TEST_SPARE"  # the address of the session's SpareEngine, which has imported torch
RUN_JOB = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit a SIGINT that is ignored
if address := os.environ.get("EAGLE_RAY_TEST_SPARE"):
    from eagle_ray.batch.worker.spare_engine import SpareEngine
    SpareEngine.address = address
    SpareEngine.start = SpareEngine.check_models = lambda *args: None
from eagle_ray.config import JobConfig
from eagle_ray.batch.driver.job_run import run_to_end
code = run_to_end(JobConfig.model_validate_json(sys.argv[1])).outcome.code
print(code, sorted({"torch", "ray", "transformers"} & sys.modules.keys()))
"""


def with_changes(config: JobConfig, **sections: dict) -> JobConfig:
    changed = {
        name: getattr(config, name).model_copy(update=update) for name, update in sections.items()
    }
    return config.model_copy(update=changed)


def rows_of(config: JobConfig) -> list[dict]:
    files = sorted((Path(config.output.path) / "data").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file, partitioning=None).to_pylist()]


def ids_of(config: JobConfig) -> list[str]:
    return sorted(row["request_id"] for row in rows_of(config))


def start_driver(config: JobConfig, ray_address: str = "local") -> subprocess.Popen:
    """The job in a process of its own. ray_address: of the session's Ray, which saves the start of another.

    Its engines are forked from the session's spare one, if there is one, and not from one of its
    own.
    """
    config = with_changes(config, execution={"ray_address": ray_address})
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "RAY_worker_niceness": "0"}
    command = [sys.executable, "-c", RUN_JOB, config.model_dump_json()]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_another_file(config: JobConfig) -> None:
    data, deadline = Path(config.output.path) / "data", time.monotonic() + 300
    before = len(list(data.glob("*.parquet")))
    while len(list(data.glob("*.parquet"))) <= before:
        assert time.monotonic() < deadline, "the driver wrote nothing in five minutes"
        time.sleep(0.02)


FACTS = {
    "elapsed_s": 12.3,
    "workers_ready": 2,
    "rows_to_do": 96,
    "rows_done": 40,
    "rows_in_files": 32,
    "errors": 1,
    "tokens_per_s": 812.4,
    "mean_acceptance_length": 4.314,
    "busy_slots": 0.934,
    "seconds_left": 17.2,
}
