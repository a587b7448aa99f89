"""The input as a Ray Dataset: the rows that the plan has, in its order, without those already done, in small blocks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ray.data import DataContext, Dataset

from eagle_ray.batch.driver.input_plan import InputPlan, plan_input, request_rows
from eagle_ray.batch.reader.file_slices import read_requests
from eagle_ray.config import load_config
from eagle_ray.requests.row_schema import REQUEST
from eagle_ray.runs.layout import JobShard

pytestmark = pytest.mark.usefixtures("ray_session")
NUM_ROWS = 600  # more than a shard


def plan(path: Path) -> InputPlan:
    return plan_input(
        load_config(None, env={}, overrides={"input.path": str(path), "output.path": "unused"})
    )


def read(the_plan: InputPlan, done: np.ndarray | None = None, **options: int) -> Dataset:
    return read_requests(the_plan.reader, the_plan.slices, done, **options)


@pytest.fixture(autouse=True)
def preserved_order(monkeypatch):
    monkeypatch.setattr(DataContext.get_current().execution_options, "preserve_order", True)


@pytest.fixture(scope="module")
def mixed_plan(tmp_path_factory):
    """A JSONL file with a malformed line, then a Parquet file of two row groups."""
    directory = tmp_path_factory.mktemp("input")
    lines = [
        json.dumps({"id": f"j{i}", "prompt": f"p{i}", "category": "ab"[i % 2]})
        for i in range(NUM_ROWS)
    ]
    lines[5] = '{"prompt": '
    (directory / "a.jsonl").write_text("\n".join(lines))
    columns = {
        "id": [f"q{i}" for i in range(40)],
        "prompt": ["x"] * 40,
        "score": [i / 2 for i in range(40)],
    }
    pq.write_table(pa.table(columns), directory / "b.parquet", row_group_size=20)
    return plan(directory)


def test_ray_reads_what_the_plan_reads_in_the_same_order(mixed_plan):
    dataset = read(mixed_plan).materialize()
    assert dataset.take_all() == list(request_rows(mixed_plan))
    assert dataset.schema().names == [*REQUEST.names, "category", "score"]


def test_rows_already_done_are_left_out(mixed_plan):
    every_id = [row["request_id"] for row in request_rows(mixed_plan)]
    skipped = {*every_id[:300:2], "q7", "a.jsonl:5"}
    flags = np.array([request_id in skipped for request_id in every_id])
    left = [row["request_id"] for row in read(mixed_plan, flags).take_all()]
    assert left == [request_id for request_id in every_id if request_id not in skipped]


def test_blocks_are_small_so_that_every_actor_has_work(mixed_plan):
    dataset = read(mixed_plan, rows_per_block=10).materialize()
    assert dataset.num_blocks() >= (NUM_ROWS + 40) // 20


def test_nothing_to_read_is_an_empty_dataset_with_the_schema(mixed_plan, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    empty = read(plan(tmp_path / "empty.jsonl"))
    assert empty.count() == 0
    assert empty.schema().names == REQUEST.names
    assert read(mixed_plan, np.ones(mixed_plan.num_rows, bool)).take_all() == []


def test_job_shards_read_disjoint_rows_that_cover_the_input(tmp_path):
    names = [f"q{i}" for i in range(50)]
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"id": name, "prompt": "x"}) + "\n" for name in names)
    )
    whole = plan(tmp_path / "in.jsonl")
    plans = [
        replace(whole, reader=replace(whole.reader, job_shard=shard))
        for shard in JobShard.all_of(3)
    ]
    parts = [
        [row["request_id"] for row in read(each, np.zeros(50, bool)).take_all()] for each in plans
    ]
    assert sorted(name for part in parts for name in part) == sorted(names) and all(parts)
