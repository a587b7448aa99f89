"""Carried columns from input to output Parquet: types, values and names, over two files and two samples."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.jobs import exit_code, small_job, token_rows

pytestmark = pytest.mark.usefixtures("ray_session")
NUM_ROWS = 6
STRUCT = pa.struct([("a", pa.int64()), ("b", pa.list_(pa.struct([("c", pa.binary())])))])
COLUMNS = {
    "nested": pa.array(
        [{"a": 1, "b": [{"c": b"\xff"}, None]}, None, {"a": None, "b": []}] * 2, STRUCT
    ),
    "map": pa.array([[("k", 1)], [], None] * 2, pa.map_(pa.string(), pa.int64())),
    "blob": pa.array([b"\x00\xff", b"", None] * 2),
    "digest": pa.array([b"ab", None, b"cd"] * 2, pa.binary(2)),
    "price": pa.array([1, None, 10**20] * 2, pa.decimal128(38, 4)),
    "when": pa.array([1, None, 2**62] * 2, pa.timestamp("ns", "Europe/Berlin")),
    "at": pa.array([1, None, 7] * 2, pa.time64("ns")),
    "took": pa.array([1, None, 3] * 2, pa.duration("us")),
    "category": pa.array(["b", "a", None] * 2).dictionary_encode(),
    "tags": pa.array([["u", None], [], None] * 2, pa.list_(pa.dictionary(pa.int32(), pa.string()))),
    "pair": pa.array([[1, 2], None, [3, 4]] * 2, pa.list_(pa.int8(), 2)),
    "text": pa.array(["the reference answer"] * 6),
}


@pytest.fixture(scope="module")
def finished_tables(ray_session, tmp_path_factory) -> tuple[pa.Table, pa.Table]:
    """The input and the output of a job, both sorted by id, the output's second samples left out."""
    directory = tmp_path_factory.mktemp("types")
    rows = [{**row, "id": f"q{i}"} for i, row in enumerate(token_rows(NUM_ROWS))]
    table = pa.Table.from_pylist(rows)
    for name, values in COLUMNS.items():
        table = table.append_column(name, values)
    for i in range(2):
        pq.write_table(table.slice(i * 3, 3), directory / f"{i}.parquet")
    settings = {
        "input.path": str(directory / "*.parquet"),
        "output.partition_by": ["category"],
        "sampling.n": 2,
    }
    assert exit_code(small_job(directory, None, **settings)) == 0
    return table, read_output(directory / "out" / "data").sort_by("request_id")


def read_output(data: Path) -> pa.Table:
    from eagle_ray.runs.part_files import read_tables, stored_schema
    from eagle_ray.storage.path import StoragePath

    location = StoragePath.of(data)
    output = pa.concat_tables(list(read_tables(location, stored_schema(location).names)))
    assert output.num_rows == 2 * NUM_ROWS
    return output.filter(pa.compute.equal(output["sample_index"], 0))


@pytest.mark.parametrize("name", COLUMNS)
def test_type_and_values_are_kept(finished_tables, name, tmp_path):
    before, after = finished_tables
    pq.write_table(before.select([name]), tmp_path / "a.parquet")
    stored = pq.read_schema(tmp_path / "a.parquet").field(name)
    column = after[f"input_{name}" if name == "text" else name]
    assert str(column.type).replace(f"'input_{name}'", f"'{name}'") == str(stored.type)
    decoded = column.combine_chunks() if name != "category" else column.cast(pa.string())
    assert decoded.to_pylist() == before[name].to_pylist()


def test_the_jobs_own_column_keeps_its_name(finished_tables):
    assert finished_tables[1]["text"].null_count == NUM_ROWS  # the pair has no tokenizer
    assert finished_tables[1]["status"].to_pylist() == ["ok"] * NUM_ROWS
