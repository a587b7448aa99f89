"""What stands in the files: done ids, ids that stand twice, files of another version."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_ray.requests.row_schema import VERSION_KEY, output_schema
from eagle_ray.runs.job_errors import OutputMismatch
from eagle_ray.runs.output_index import OutputIndex, excess_in, without_ids
from eagle_ray.runs.row_index import Digests, digests
from eagle_ray.storage.path import StoragePath

SCHEMA = output_schema([])
COMMON = {"row_index": 0, "source_file": "a", "run_id": "r", "attempt": 1, "status": "ok"}


def write(path: Path, ids: list[str]) -> Path:
    seen: dict[str, int] = {}
    rows = []
    for id in ids:
        rows.append(COMMON | {"request_id": id, "sample_index": seen.get(id, 0)})
        seen[id] = seen.get(id, 0) + 1
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path)
    return path


def done_ids(index: OutputIndex) -> list[bytes]:
    """Ids with two samples in one file."""
    [entries] = index.by_range(1)
    return entries["id"][entries["rows"] == 2].tolist()


def excess(index: OutputIndex) -> dict[StoragePath, Digests]:
    """Entries to remove where every id is to have two samples."""
    [entries] = index.by_range(1)
    extra = excess_in(entries, entries["rows"] == 2)
    return {
        index.files[rank]: extra["id"][extra["file"] == rank] for rank in np.unique(extra["file"])
    }


def digests_of(*names: str) -> list[bytes]:
    return np.sort(digests(names)).tolist()


def test_done_is_an_id_whose_samples_all_stand_in_one_file(tmp_path):
    write(tmp_path / "part-001-000000.parquet", ["a", "a", "b", "c"])
    write(tmp_path / "part-001-000001.parquet", ["b", "d", "d", "d"])
    assert done_ids(OutputIndex.read(StoragePath.of(tmp_path))) == digests_of("a")


def test_an_id_found_twice_stays_where_it_is_complete_and_newest(tmp_path):
    old = write(tmp_path / "part-001-000000.parquet", ["a", "a", "b", "c", "c"])
    new = write(tmp_path / "part-002-000000.parquet", ["a", "a", "b", "b", "c"])
    extra = excess(OutputIndex.read(StoragePath.of(tmp_path)))
    found = {file: ids.tolist() for file, ids in extra.items()}
    assert found == {
        StoragePath.of(old): digests_of("a", "b"),
        StoragePath.of(new): digests_of("c"),
    }
    for file, ids in extra.items():
        pq.write_table(without_ids(file, ids), file.text)
    ledger = OutputIndex.read(StoragePath.of(tmp_path))
    assert done_ids(ledger) == digests_of("a", "b", "c") and excess(ledger) == {}


def test_rewriting_keeps_the_schema_and_its_version(tmp_path):
    file = write(tmp_path / "part-001-000000.parquet", ["a", "b"])
    schema = without_ids(StoragePath.of(file), digests(["a"])).schema
    assert schema.equals(SCHEMA) and schema.metadata[VERSION_KEY] == SCHEMA.metadata[VERSION_KEY]


def test_another_schema_version_is_refused(tmp_path):
    table = SCHEMA.with_metadata({VERSION_KEY: b"2"}).empty_table()
    pq.write_table(table, tmp_path / "part-001-000000.parquet")
    with pytest.raises(OutputMismatch, match="schema version b'2'"):
        OutputIndex.read(StoragePath.of(tmp_path))
