"""Parquet files are read without handing Arrow's threads a Python object, which would abort the process at its end."""

import io
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_ray.batch.output.parquet_file import SingleThreadedParquetFile, open_parquet
from eagle_ray.storage.path import StoragePath

COLUMNS = {f"column_{i}": list(range(400)) for i in range(12)}


@pytest.fixture
def path(tmp_path) -> str:
    pq.write_table(pa.table(COLUMNS), tmp_path / "rows.parquet", row_group_size=50)
    return str(tmp_path / "rows.parquet")


class RecordingFile:
    """A Python file that remembers which threads read it."""

    def __init__(self, path: str):
        self._file = io.BytesIO(Path(path).read_bytes())
        self.threads: set[int] = set()

    def __getattr__(self, name: str):
        return getattr(self._file, name)

    def read(self, size: int = -1) -> bytes:
        self.threads.add(threading.get_ident())
        return self._file.read(size)


def test_a_local_file_is_opened_by_arrow_itself(path, monkeypatch):
    monkeypatch.setattr(StoragePath, "open", lambda self: pytest.fail("Arrow was given a Python file"))
    with open_parquet(StoragePath.of(path)) as parquet:
        assert parquet.read(columns=["column_3"]).to_pydict() == {"column_3": COLUMNS["column_3"]}


def test_a_file_object_is_read_on_the_calling_thread_alone(path):
    file = RecordingFile(path)
    with SingleThreadedParquetFile(file, pre_buffer=False) as parquet:
        assert parquet.read().to_pydict() == COLUMNS
        batches = parquet.iter_batches(batch_size=64, row_groups=[0, 1, 2], columns=["column_1"])
        assert sum(batch.num_rows for batch in batches) == 150
    assert file.threads == {threading.get_ident()}


def test_arrow_by_itself_reads_a_file_object_on_other_threads(path):
    """If this fails, Arrow has changed and SingleThreadedParquetFile is no longer needed."""
    file = RecordingFile(path)
    with pq.ParquetFile(file) as parquet:
        parquet.read()
    assert file.threads - {threading.get_ident()}
