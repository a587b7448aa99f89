"""Hive partitions: directories named after values, files that others read back as Hive, and what cannot partition."""

import datetime
from pathlib import Path

import duckdb
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from eagle_ray.batch.id_digests import Digests, digests
from eagle_ray.batch.input.plan import plan_input, requests_of
from eagle_ray.batch.output.output_index import OutputIndex, excess_in, without_ids
from eagle_ray.batch.output.part_files import has_column, part_files, read_tables
from eagle_ray.batch.output.partitions import HIVE_NULL, Partitions
from eagle_ray.batch.output.schema import SCHEMA_VERSION, VERSION_KEY, output_schema, table_of
from eagle_ray.config import ConfigError
from eagle_ray.storage.path import StoragePath, parquet_bytes
from tests.conftest import small_job

CARRIED = {"lang": pa.string(), "shard": pa.int64(), "day": pa.date32(), "score": pa.float64(), "tags": pa.json_()}
SCHEMA = output_schema([pa.field("lang", pa.string()), pa.field("shard", pa.int64()), pa.field("day", pa.date32())])
COMMON = {"sample_index": 0, "row_index": 0, "source_file": "a", "run_id": "r", "attempt": 1, "status": "ok"}
DAY = datetime.date(2026, 11, 21)
LANGS = ["de", "a/b=c %", "ü", None, "", HIVE_NULL, "007"]
ROWS = [COMMON | {"request_id": f"q{i}", "lang": lang, "shard": i % 2, "day": DAY} for i, lang in enumerate(LANGS)]


def one(ids: Digests) -> np.ndarray:
    return np.ones(len(ids), np.int64)


@pytest.fixture
def data(tmp_path) -> StoragePath:
    place = StoragePath.of(tmp_path)
    for directory, rows in Partitions(("lang", "shard")).split(table_of(ROWS, SCHEMA)):
        (place / directory / "part-001-000000.parquet").write_atomic(parquet_bytes(rows, "zstd"))
    return place


def test_every_row_stands_in_the_directory_of_its_values(data):
    assert set(data.list_names()) == {
        "lang=de",
        "lang=a%2Fb%3Dc%20%25",
        "lang=%C3%BC",
        "lang=__HIVE_DEFAULT_PARTITION__",
        "lang=",
        "lang=%5F%5FHIVE%5FDEFAULT%5FPARTITION%5F%5F",
        "lang=007",
    }
    schema = pq.read_schema(str(part_files(data)[0]))
    assert schema.names == [name for name in SCHEMA.names if name not in ("lang", "shard")]
    assert schema.metadata[VERSION_KEY] == SCHEMA_VERSION


def test_our_own_reader_gives_back_values_and_types(data):
    whole = pa.concat_tables(read_tables(data, ["request_id", "shard", "lang", "day"]))
    found = sorted(whole.to_pylist(), key=lambda row: row["request_id"])
    assert found == [{name: row[name] for name in whole.column_names} for row in ROWS]
    assert whole.schema.field("shard").type == pa.int64()
    assert has_column(data, "lang") and has_column(data, "day") and not has_column(data, "nothing")


def test_duckdb_reads_the_partitions_back(data):
    query = f"from read_parquet('{data}/**/*.parquet', hive_partitioning=true, hive_types_autocast=false)"
    found = duckdb.sql(f"select request_id, lang, shard {query} order by 1").fetchall()
    assert found == [(row["request_id"], row["lang"], str(row["shard"])) for row in ROWS]


def test_pandas_reads_the_partitions_back(data):
    hive = pyarrow.dataset.partitioning(flavor="hive")  # its own guess cannot join dictionaries that hold a null
    frame = pandas.read_parquet(str(data), partitioning=hive).sort_values("request_id")
    found = [None if pandas.isna(lang) else str(lang) for lang in frame["lang"]]
    assert found == [
        None if lang == HIVE_NULL else lang for lang in LANGS
    ]  # Hive's word is null to pandas, encoded or not
    assert [int(shard) for shard in frame["shard"]] == [row["shard"] for row in ROWS]


def test_the_ledger_and_rewriting_see_partitioned_files(data):
    [entries] = OutputIndex.read(data).by_range(1)
    assert set(entries["id"]) == set(digests(row["request_id"] for row in ROWS)) and set(entries["rows"]) == {1}
    [file] = (file for file in part_files(data) if "lang=de" in str(file))
    again = file.parent / "part-002-000000.parquet"
    again.write_atomic(file.read_bytes())
    index = OutputIndex.read(data)
    [entries] = index.by_range(1)
    extra = excess_in(entries, entries["rows"] == 1)
    assert [index.files[rank] for rank in extra["file"]] == [file]  # the newest stays
    assert extra["id"].tolist() == digests(["q0"]).tolist() and without_ids(file, extra["id"]).num_rows == 0


def test_files_are_in_the_order_of_their_attempts(tmp_path):
    place = StoragePath.of(tmp_path)
    for name in ("b=1/part-002-000000.parquet", "b=2/part-001-000007.parquet", "part-1000-000000.parquet", "x.parquet"):
        (place / name).write_atomic(b"")
    assert [file.name for file in part_files(place)] == [
        "x.parquet",
        "part-001-000007.parquet",
        "part-002-000000.parquet",
        "part-1000-000000.parquet",
    ]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (["langs"], r"the output has no column 'langs'; did you mean lang\?"),
        (["score"], "'score' is of type double"),
        (["tags"], "'tags' holds lists, objects or mixed values"),
        (["sample_index"], "'sample_index' differs between samples"),
        (["text"], "'text' differs between samples"),
        (["request_id"], "'request_id' differs between samples or names too many files"),
        (["lang", "lang"], "'lang' is named twice"),
    ],
)
def test_columns_that_cannot_partition_are_refused_by_name(columns, says):
    with pytest.raises(ConfigError, match=rf"output\.partition_by: {says}"):
        Partitions.of(columns, CARRIED)


def test_columns_that_can():
    assert Partitions.of(["status", "lang", "day"], CARRIED).columns == ("status", "lang", "day")


def test_a_value_too_long_for_a_name_is_refused_with_its_column():
    table = pa.table({"id": ["a"], "lang": ["x" * 300]})
    with pytest.raises(ConfigError, match="a value of column 'lang' is too long"):
        list(Partitions(("lang",)).split(table))


def test_a_value_too_long_for_a_name_is_found_before_the_start_with_its_row():
    good = {"request_id": "a", "source_file": "/d/a.jsonl", "source_line": 1, "row_index": 0, "lang": "x" * 250}
    Partitions(("lang", "status")).check_values([good, good | {"lang": None}])
    for lang in ("x" * 251, "ü" * 42):  # ü is six characters of a name
        with pytest.raises(ConfigError, match=r"^/d/a\.jsonl, line 2: output\.partition_by: .* 'lang' is too long"):
            Partitions(("lang",)).check_values([good, good | {"source_line": 2, "lang": lang}])
    with pytest.raises(ConfigError, match="'source_file' is too long"):
        Partitions(("source_file",)).check_values([good | {"source_file": "/" * 90}])


def test_a_plain_reader_of_our_files_gets_their_partitions_in_their_types(data):
    settings = {"input.columns.id": "request_id", "input.on_unknown": "carry"}
    found = plan_input(small_job(Path(data.text), **{"input.path": data.text, "input.template": "{day}"} | settings))
    rows = {row["request_id"]: row for row in requests_of(found)}
    assert [(rows[f"q{i}"]["lang"], rows[f"q{i}"]["shard"]) for i in range(len(ROWS))] == [
        (row["lang"], row["shard"]) for row in ROWS
    ]
