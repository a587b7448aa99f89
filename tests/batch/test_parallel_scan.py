"""A scan in pieces finds what a scan of whole files finds, whatever the size of the pieces."""

from __future__ import annotations

import json
import pickle
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_ray.batch.driver.input_plan import plan_input, request_rows
from eagle_ray.batch.reader import parallel_scan as module
from eagle_ray.batch.reader.files import InputFile, find_files
from eagle_ray.batch.reader.input_columns import request_columns
from eagle_ray.batch.reader.parallel_scan import ParallelScan
from eagle_ray.batch.reader.scan import NUM_THREADS, FilePart, RowScanner
from eagle_ray.batch.reader.unread_parameters import UnreadValue
from eagle_ray.config import ColumnsConfig, JobConfig, load_config
from eagle_ray.core.errors import ConfigError
from eagle_ray.requests.columns import FIRST, RowPosition
from eagle_ray.storage.path import StoragePath
from eagle_ray.storage.store import FileVersion

OVERRIDES = {"output.path": "unused", "input.on_unknown": "carry"}


@pytest.fixture
def config(tmp_path: Path) -> JobConfig:
    """A JSONL file with blank and malformed lines, rows without ids and an unread parameter, a
    Parquet file of row groups, a CSV file.
    """
    rows = [{"prompt": "x" * (i % 40), "score": i if i < 50 else i / 2} for i in range(90)]
    rows[61] |= {"top_a": 3}
    rows[75] |= {"top_a": 4}
    lines = [json.dumps(row) for row in rows]
    lines[7], lines[8], lines[40] = "", "  ", '{"prompt": '
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    columns = {"id": [f"q{i}" for i in range(60)], "prompt": ["x"] * 60}
    pq.write_table(pa.table(columns), tmp_path / "b.parquet", row_group_size=7)
    (tmp_path / "c.csv").write_text("id,prompt\nc1,x\nc2,y\n")
    return load_config(None, env={}, overrides=OVERRIDES | {"input.path": str(tmp_path)})


def run_pickled(function, arguments):
    """What Ray's tasks return, without Ray."""
    for each in arguments:
        yield pickle.loads(pickle.dumps(function(*pickle.loads(pickle.dumps(each)))))


def scan_result(config: JobConfig, piece_bytes: int | None = None) -> tuple:
    """The plan and the rows that a scan leads to: in pieces of this size, or of whole files."""
    scan_with = None
    if piece_bytes is not None:

        def scan_with(scanner):
            return ParallelScan(scanner, lambda: None, min_bytes=0, piece_bytes=piece_bytes)

    plan = plan_input(config, scan_with=scan_with)
    [rows] = plan.rows.by_range(1)
    unread = [plan.index.files[file.path].unread for file in plan.files]
    return (
        list(request_rows(plan)),
        plan.carried_types,
        rows["id"].tolist(),
        rows["place"].tolist(),
        unread,
    )


@pytest.mark.parametrize("piece_bytes", [1, 64, 300, 2000, 1 << 20])
def test_pieces_of_any_size_are_the_whole(config, monkeypatch, piece_bytes):
    monkeypatch.setattr(module, "in_tasks", run_pickled)
    whole = scan_result(config)
    assert len(whole[0]) == 88 + 60 + 2 and whole[0][7]["request_id"] == "a.jsonl:9"
    assert whole[-1] == [{"top_a": UnreadValue(number=59, row=61, line=62, text="3")}, {}, {}]
    assert scan_result(config, piece_bytes) == whole


def test_the_rows_behind_a_known_place_are_scanned_in_pieces(config, monkeypatch):
    monkeypatch.setattr(module, "in_tasks", run_pickled)
    file = find_files(config.input.path, "auto")[0]
    scanner = RowScanner(config, request_columns(ColumnsConfig()))
    start = file.storage_path.read_bytes().index(b'{"prompt": "' + b"x" * 20 + b'", "score": 20}')
    part = FilePart(file, start, RowPosition(20, 21))
    [[wanted]] = scanner([part])
    scan = ParallelScan(scanner, lambda: None, min_bytes=0, piece_bytes=100)
    [tables] = [[found.rows for found in pieces] for pieces in scan([part])]
    assert len(tables) > 5
    assert np.concatenate([table["id"] for table in tables]).tolist() == wanted.rows["id"].tolist()


def test_objects_are_scanned_in_parallel_and_local_files_in_turn(config, monkeypatch):
    both = threading.Barrier(2, timeout=60)
    here = threading.get_ident()

    def read(part, columns, found, *more):
        if part.file.storage_path.is_local:
            assert threading.get_ident() == here
        else:
            both.wait()
        found.types = {part.file.name: pa.string()}
        return iter(())

    monkeypatch.setattr("eagle_ray.batch.reader.scan.rows_in_part", read)
    files = find_files(config.input.path, "auto")[:2]
    objects = [
        InputFile(StoragePath(f"s3://b/{i}.jsonl"), f"{i}.jsonl", "jsonl", FileVersion(1, "e"))
        for i in (3, 4)
    ]
    scanner = RowScanner(config, request_columns(ColumnsConfig()))
    found = scanner([FilePart(file) for file in (*files, *objects)])
    assert [name for [of_file] in found for name in of_file.types] == [
        "a.jsonl",
        "b.parquet",
        "3.jsonl",
        "4.jsonl",
    ]


def test_few_objects_are_scanned_ahead_of_what_is_asked_for(config, monkeypatch):
    scanned = []

    def read(part, columns, found, *more):
        scanned.append(part.file.name)
        return iter(())

    monkeypatch.setattr("eagle_ray.batch.reader.scan.rows_in_part", read)
    one = InputFile(StoragePath("s3://b/a.jsonl"), "a.jsonl", "jsonl", FileVersion(1, "e"))
    found = RowScanner(config, request_columns(ColumnsConfig()))([FilePart(one)] * 99)
    for i in range(99):
        next(found)
        assert i < len(scanned) <= i + NUM_THREADS


@pytest.mark.parametrize(("piece_bytes", "num_tasks"), [(1 << 20, 1), (1000, 5), (100, 40)])
def test_small_files_share_a_task(config, monkeypatch, tmp_path, piece_bytes, num_tasks):
    tasks = []

    def counted(function, arguments):
        if isinstance(function, module.GroupScan):
            tasks.extend(arguments)
        return run_pickled(function, arguments)

    monkeypatch.setattr(module, "in_tasks", counted)
    for name in "a.jsonl", "b.parquet", "c.csv":
        (tmp_path / name).unlink()
    for i in range(40):
        (tmp_path / f"{i}.jsonl").write_text(
            json.dumps({"id": f"{i:02d}", "prompt": "x" * 100}) + "\n"
        )  # 127 bytes
    assert len(scan_result(config, piece_bytes)[0]) == 40
    assert len(tasks) == num_tasks


def test_a_small_input_is_scanned_without_ray(config):
    scanner = RowScanner(config, request_columns(ColumnsConfig()))
    file = find_files(config.input.path, "auto")[0]
    [[found]] = ParallelScan(scanner, pytest.fail)([FilePart(file)])
    assert found.slices[0].first == FIRST and len(found.rows["id"]) == 88


def test_an_error_in_a_piece_is_raised_as_it_is(config, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "in_tasks", run_pickled)
    (tmp_path / "b.parquet").write_bytes(b"no Parquet")
    with pytest.raises(ConfigError, match=r"cannot read .*b\.parquet as parquet"):
        scan_result(config, 1 << 20)


def test_ray_task_results_are_in_the_order_of_their_arguments(ray_session):
    def wait(number):
        time.sleep(2.0 if number == 0 else 0.0)
        return number

    assert list(module.in_tasks(wait, [(i,) for i in range(6)])) == list(range(6))


def test_ray_tasks_scan_as_the_driver_does(config, ray_session):
    whole = scan_result(config)
    assert scan_result(config, 500) == whole
