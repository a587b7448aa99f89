"""Jobs of scored rows and of embeddings that are killed in the middle: each row once, in an undisturbed run's bits."""

from __future__ import annotations

import json
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_ray.config import JobConfig
from eagle_ray.kernels import cpu_ops
from tests.support.embedders import embedding_job, write_embedder
from tests.support.jobs import (
    exit_code,
    rows_of,
    small_job,
    start_driver,
    wait_for_another_file,
)
from tests.support.workers import pid_of

pytestmark = [
    pytest.mark.usefixtures("ray_session"),
    pytest.mark.skipif(
        not cpu_ops.available(torch.device("cpu"), torch.float32),
        reason="without the compiled operations sums depend on the number of rows",
    ),
]
NUM_ROWS = 24
SETTINGS: dict[str, Any] = {
    "model.target": "embedded:tiny",
    "model.draft": "embedded:tiny",
    "execution.slots": 1,
    "execution.rows_per_file": 2,
}
# What a row's answer is; seconds, attempts and workers differ between runs.
SCORED_COLUMNS = (
    "status",
    "text",
    "prompt_token_ids",
    "scores",
    "score_tokens",
    "score_bytes",
    "is_greedy",
    "best",
    "best_by_byte",
    "label_mass",
    "loglikelihood",
    "tokens",
    "bytes",
    "bits_per_byte",
    "embedding",
)


def scored_rows() -> list[dict[str, Any]]:
    """Prompts with continuations, which share their beginnings, documents of several windows, and generated rows."""
    rng = random.Random(0)

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(5, 1500) for _ in range(rng.randint(low, high))]

    shared = ids(30, 30)
    rows: list[dict[str, Any]] = []
    for i in range(NUM_ROWS):
        row: dict[str, Any] = {"id": f"q{i:02}", "prompt_token_ids": shared + ids(1, 20)}
        if i % 4 == 3:
            row |= {"prompt_token_ids": ids(300, 500), "score_text": True}
        elif i % 4 == 1:  # long enough for the job to be killed before its end
            row |= {"max_tokens": 60, "ignore_eos": True}
        else:
            row |= {"continuations": [ids(0, 12) for _ in range(rng.randint(1, 12))]}
        rows.append(row)
    return rows


def scored_job(directory: Path) -> JobConfig:
    directory.mkdir()
    return small_job(directory, scored_rows(), **SETTINGS | {"model.max_model_len": 128})


def embeddings(directory: Path, target: Path) -> JobConfig:
    directory.mkdir()
    rng = random.Random(1)
    rows = [
        {"id": f"q{i:02}", "prompt_token_ids": [rng.randrange(2, 330) for _ in range(1500 + i)]}
        for i in range(NUM_ROWS)
    ]
    settings = {"execution.slots": 1, "execution.rows_per_file": 1}
    return embedding_job(directory, target, rows, **settings)


def answers(config: JobConfig) -> dict[str, dict[str, Any]]:
    """Return each row's answer by its id, which is in the output once. Equal floats of JSON have equal bits."""
    rows = rows_of(config)
    found = {
        row["request_id"]: {name: row[name] for name in SCORED_COLUMNS if name in row}
        for row in rows
    }
    assert len(found) == len(rows)
    return found


def kill_driver(config: JobConfig) -> None:
    """Start the job in a process of its own, and kill that after its first files."""
    import ray

    driver = start_driver(config, ray.get_runtime_context().gcs_address)
    try:
        wait_for_another_file(config)
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.communicate()
    assert 0 < len(rows_of(config)) < NUM_ROWS, "the job ended before it was killed"


def kill_worker(config: JobConfig) -> None:
    """Kill the engine's process that wrote the next file."""
    before = len(rows_of(config))
    wait_for_another_file(config)
    worker = next(row["worker_id"] for row in rows_of(config)[before:])
    os.kill(pid_of(worker), signal.SIGKILL)


def check_killed(undisturbed: JobConfig, killed: JobConfig) -> None:
    """Kill a job's driver and, in the next attempt, its worker, and compare its answers with an undisturbed run's."""
    assert exit_code(undisturbed) == 0
    kill_driver(killed)
    with ThreadPoolExecutor(1) as threads:
        killing = threads.submit(kill_worker, killed)
        assert exit_code(killed) == 0
        killing.result()
    found = answers(killed)
    assert len(found) == NUM_ROWS
    assert json.dumps(found, sort_keys=True) == json.dumps(answers(undisturbed), sort_keys=True)
    assert {row["attempt"] for row in rows_of(killed)} == {1, 2}


def test_scored_rows_of_a_killed_job_are_an_undisturbed_ones(tmp_path: Path) -> None:
    check_killed(scored_job(tmp_path / "undisturbed"), scored_job(tmp_path / "killed"))


@pytest.mark.slow
def test_embeddings_of_a_killed_job_are_an_undisturbed_ones(tmp_path: Path) -> None:
    # Large enough for the job to be killed before its end.
    shape = {"num_hidden_layers": 8, "max_position_embeddings": 4096}
    target = write_embedder(tmp_path / "target", **shape)
    check_killed(
        embeddings(tmp_path / "undisturbed", target), embeddings(tmp_path / "killed", target)
    )
