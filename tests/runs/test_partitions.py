"""Hive partitions: directories named after values, files that others read back as Hive, and what cannot partition."""

import datetime
from decimal import Decimal
from pathlib import Path

import duckdb
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from eagle_ray.batch.driver.input_plan import plan_input, request_rows
from eagle_ray.core.errors import ConfigError
from eagle_ray.requests.row_schema import SCHEMA_VERSION, VERSION_KEY, output_schema, table_of
from eagle_ray.runs.job_errors import OutputMismatch
from eagle_ray.runs.output_index import OutputIndex, excess_in, without_ids
from eagle_ray.runs.part_files import has_column, part_files, read_tables
from eagle_ray.runs.partitions import HIVE_NULL, Partitions
from eagle_ray.runs.row_index import Digests, digests
from eagle_ray.storage.checked_parquet import parquet_bytes
from eagle_ray.storage.path import StoragePath
from tests.support.jobs import small_job

CARRIED = {
    "lang": pa.string(),
    "shard": pa.int64(),
    "day": pa.date32(),
    "score": pa.float64(),
    "tags": pa.json_(),
}
CARRIED |= {
    "uuid": pa.binary(16),
    "blob": pa.large_binary(),
    "noon": pa.time32("s"),
    "tick": pa.time64("ns"),
}
CARRIED |= {"wait": pa.duration("ms"), "key": pa.dictionary(pa.int32(), pa.binary())}
SCHEMA = output_schema(
    [pa.field("lang", pa.string()), pa.field("shard", pa.int64()), pa.field("day", pa.date32())]
)
COMMON = {
    "sample_index": 0,
    "row_index": 0,
    "source_file": "a",
    "run_id": "r",
    "attempt": 1,
    "status": "ok",
}
DAY = datetime.date(2026, 11, 21)
LANGS = ["de", "a/b=c %", "ü", None, "", HIVE_NULL, "007"]
ROWS = [
    COMMON | {"request_id": f"q{i}", "lang": lang, "shard": i % 2, "day": DAY}
    for i, lang in enumerate(LANGS)
]


def one_sample_each(ids: Digests) -> np.ndarray:
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
    hive = pyarrow.dataset.partitioning(
        flavor="hive"
    )  # its own guess cannot join dictionaries that hold a null
    frame = pandas.read_parquet(str(data), partitioning=hive).sort_values("request_id")
    found = [None if pandas.isna(lang) else str(lang) for lang in frame["lang"]]
    assert found == [
        None if lang == HIVE_NULL else lang for lang in LANGS
    ]  # Hive's word is null to pandas, encoded or not
    assert [int(shard) for shard in frame["shard"]] == [row["shard"] for row in ROWS]


def test_the_ledger_and_rewriting_see_partitioned_files(data):
    [entries] = OutputIndex.read(data).by_range(1)
    assert set(entries["id"]) == set(digests(row["request_id"] for row in ROWS)) and set(
        entries["rows"]
    ) == {1}
    [file] = (file for file in part_files(data) if "lang=de" in str(file))
    again = file.parent / "part-002-000000.parquet"
    again.write_atomic(file.read_bytes())
    index = OutputIndex.read(data)
    [entries] = index.by_range(1)
    extra = excess_in(entries, entries["rows"] == 1)
    assert [index.files[rank] for rank in extra["file"]] == [file]  # the newest stays
    assert (
        extra["id"].tolist() == digests(["q0"]).tolist()
        and without_ids(file, extra["id"]).num_rows == 0
    )


def test_files_are_in_the_order_of_their_attempts(tmp_path):
    place = StoragePath.of(tmp_path)
    for name in (
        "b=1/part-002-000000.parquet",
        "b=2/part-001-000007.parquet",
        "part-1000-000000.parquet",
        "x.parquet",
    ):
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
        (["uuid"], r"'uuid' is of type fixed_size_binary\[16\]"),
        (["blob"], "'blob' is of type large_binary"),
        (["noon"], r"'noon' is of type time32\[s\]"),
        (["tick"], r"'tick' is of type time64\[ns\]"),
        (["wait"], r"'wait' is of type duration\[ms\]"),
        (["key"], "'key' is of type dictionary"),
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


TIMES = [-(10**9), -1, 0, 1, 1_790_000_000]
DECIMALS = [Decimal("-1.20"), Decimal("0.00"), Decimal("12345678.99")]
VALUES = {
    pa.bool_(): [True, False],
    pa.int8(): [-128, 127],
    pa.uint64(): [0, 2**64 - 1],
    pa.int64(): [-(2**63), 2**63 - 1],
    pa.decimal128(10, 2): DECIMALS,
    pa.decimal256(50, 3): DECIMALS,
    pa.decimal128(10, -2): [Decimal("1200")],
    pa.large_string(): ["a/b", ""],
    pa.date32(): [datetime.date(1, 1, 1), DAY, datetime.date(9999, 12, 31)],
    pa.date64(): [datetime.date(1, 1, 1), DAY],
    **{
        pa.timestamp(unit, zone): TIMES
        for unit in ("s", "ms", "us", "ns")
        for zone in (None, "UTC", "+05:30")
    },
    pa.timestamp("us", "Europe/Berlin"): [
        -3 * 10**15,
        *TIMES,
    ],  # before 1893 its offset had seconds
    pa.timestamp("s", "Nowhere/Else"): TIMES,
}


@pytest.mark.parametrize("type_", VALUES, ids=str)
def test_values_of_every_type_that_can_partition_come_back(tmp_path, type_):
    Partitions.of(["x"], {"x": type_})
    column = pa.array([*VALUES[type_], None], type_)
    table = pa.table({"id": range(len(column)), "x": column})
    for directory, rows in Partitions(("x",)).split(table):
        (StoragePath.of(tmp_path) / directory / "part-001-000000.parquet").write_atomic(
            parquet_bytes(rows, "zstd")
        )
    found = pa.concat_tables(read_tables(StoragePath.of(tmp_path), ["id", "x"])).sort_by("id")
    assert found["x"].equals(pa.chunked_array([column]))


def test_a_file_that_left_its_directory_is_named(data):
    [file] = (file for file in part_files(data) if "lang=de" in str(file))
    (data / "moved.parquet").write_atomic(file.read_bytes())
    with pytest.raises(
        OutputMismatch, match=r"moved\.parquet: its directories give its column 'lang' no value"
    ):
        list(read_tables(data, ["request_id", "lang"]))


def test_unreadable_partition_date_is_refused_with_its_row():
    row = {"request_id": "a", "source_file": "/d/a.parquet", "source_line": None, "row_index": 1}
    partitions = Partitions.of(["day", "lang"], CARRIED)
    partitions.check_values(
        [row | {"day": DAY, "lang": "10183-08-31"}, row | {"day": "2026-11-21", "lang": None}]
    )
    with pytest.raises(
        ConfigError, match=r"a\.parquet.*the value 10183-08-31 of column 'day' cannot be read back"
    ):
        partitions.check_values([row | {"day": "10183-08-31", "lang": "x"}])


def test_columns_that_can():
    assert Partitions.of(["status", "lang", "day"], CARRIED).columns == ("status", "lang", "day")


def test_a_value_too_long_for_a_name_is_refused_with_its_column():
    table = pa.table({"id": ["a"], "lang": ["x" * 300]})
    with pytest.raises(ConfigError, match="a value of column 'lang' is too long"):
        list(Partitions(("lang",)).split(table))


def test_too_long_partition_value_is_refused_with_its_row():
    good = {
        "request_id": "a",
        "source_file": "/d/a.jsonl",
        "source_line": 1,
        "row_index": 0,
        "lang": "x" * 250,
    }
    Partitions(("lang", "status")).check_values([good, good | {"lang": None}])
    for lang in ("x" * 251, "ü" * 42):  # ü is six characters of a name
        with pytest.raises(
            ConfigError, match=r"^/d/a\.jsonl, line 2: output\.partition_by: .* 'lang' is too long"
        ):
            Partitions(("lang",)).check_values([good, good | {"source_line": 2, "lang": lang}])
    with pytest.raises(ConfigError, match="'source_file' is too long"):
        Partitions(("source_file",)).check_values([good | {"source_file": "/" * 90}])


def test_plain_reader_reads_our_partition_values_in_their_types(data):
    settings = {"input.columns.id": "request_id", "input.on_unknown": "carry"}
    found = plan_input(
        small_job(
            Path(data.text), **{"input.path": data.text, "input.template": "{day}"} | settings
        )
    )
    rows = {row["request_id"]: row for row in request_rows(found)}
    assert [(rows[f"q{i}"]["lang"], rows[f"q{i}"]["shard"]) for i in range(len(ROWS))] == [
        (row["lang"], row["shard"]) for row in ROWS
    ]
