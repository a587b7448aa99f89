"""Conversations through the whole job: every turn of every id once, also after a kill in the middle, and checks."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import ray

from eagle_ray.cli.export_run import export
from eagle_ray.config import JobConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.storage.path import StoragePath, read_json
from tests.support.jobs import (
    exit_code,
    rows_of,
    small_job,
    start_driver,
    wait_for_another_file,
    with_changes,
)

pytestmark = pytest.mark.usefixtures("ray_session")
NUM_ROWS = 24
SETTINGS = {
    "model.target": "embedded:tiny",
    "model.draft": "embedded:tiny",
    "input.columns.turns": "turns",
    "input.columns.id": "question_id",
    "sampling.n": 2,
    "sampling.temperature": 0.8,
    "sampling.max_tokens": 24,
    "execution.rows_per_file": 12,
    "report.verify_rows": 40,
}


def job(directory: Path) -> JobConfig:
    """Questions as Spec-Bench's, of one to three turns, and a bad one."""
    turns = ["What is the capital of France?", "And of Italy?", "Write a list of animals."]
    rows = [
        {"question_id": i, "category": "writing", "turns": turns[: i % 3 + 1]}
        for i in range(NUM_ROWS)
    ]
    return small_job(
        directory, [*rows, {"question_id": "bad", "category": "math", "turns": []}], **SETTINGS
    )


def keys(config: JobConfig) -> Counter:
    return Counter(
        (row["request_id"], row["sample_index"], row["turn_index"]) for row in rows_of(config)
    )


EXPECTED = Counter(
    {
        (str(i), sample, turn): 1
        for i in range(NUM_ROWS)
        for sample in range(2)
        for turn in range(i % 3 + 1)
    }
    | {("bad", sample, 0): 1 for sample in range(2)}
)


@pytest.fixture(scope="module")
def finished_job(ray_session, tmp_path_factory) -> JobConfig:
    config = job(tmp_path_factory.mktemp("turns"))
    assert exit_code(config) == 0
    return config


def test_every_turn_is_there_once_and_an_id_is_in_one_file(finished_job):
    assert keys(finished_job) == EXPECTED
    files = sorted((Path(finished_job.output.path) / "data").glob("*.parquet"))
    ids = [
        set(pq.read_table(file, columns=["request_id"])["request_id"].to_pylist()) for file in files
    ]
    assert len(files) > 1 and sum(map(len, ids)) == NUM_ROWS + 1


def test_statistics_and_checks_know_turns(finished_job):
    summary = read_json(StoragePath.of(finished_job.output.path) / "_summary.json")
    assert {turn: stats["rows"] for turn, stats in summary["turns"].items()} == {
        "0": 50,
        "1": 32,
        "2": 16,
    }
    assert summary["total"]["rows"] == 98 and summary["turns"]["1"]["mean_acceptance_length"] >= 1
    assert summary["verify_rows"]["identical"] == summary["verify_rows"]["rows"] == 40
    with pytest.raises(ConfigError, match=r"has several turns.*--to csv"):
        export(StoragePath.of(finished_job.output.path), "openai-batch", None, False, False)


@pytest.mark.slow
def test_a_killed_job_goes_on_and_gives_the_same_turns(finished_job, tmp_path):
    config = job(tmp_path)
    config = with_changes(config, execution={"rows_per_file": 4}, report={"verify_rows": 0})
    driver = start_driver(config, ray.get_runtime_context().gcs_address)
    try:
        wait_for_another_file(config)
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.communicate()
    assert 0 < sum(keys(config).values()) < 98
    assert exit_code(config) == 0
    assert keys(config) == EXPECTED
    texts = [
        {(r["request_id"], r["sample_index"], r["turn_index"]): r["text"] for r in rows_of(c)}
        for c in (finished_job, config)
    ]
    assert texts[0] == texts[1]
    assert json.loads(rows_of(config)[0]["messages"] or "[{}]")
