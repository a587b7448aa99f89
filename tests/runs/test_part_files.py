"""Parquet files are read without handing Arrow's threads a Python object, which would abort the process at its end."""

import errno
import io
import os
import random
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_ray.runs.job_errors import OutputDamaged
from eagle_ray.runs.part_files import open_part, read_columns
from eagle_ray.storage.checked_parquet import SingleThreadedParquetFile, open_parquet, parquet_bytes
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
    monkeypatch.setattr(
        StoragePath, "open", lambda self: pytest.fail("Arrow was given a Python file")
    )
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


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_no_damage_is_read_as_if_it_were_whole(tmp_path, codec):
    """Wherever a byte changes, the rows are the same, because nothing reads it, or the file is named in one line."""
    whole = pa.table({"id": [f"q{i}" for i in range(40)], "ids": [[i, 7] for i in range(40)]})
    data = parquet_bytes(whole, codec)
    file, found = StoragePath.of(tmp_path / "part-001-000000.parquet"), []
    for place in random.Random(0).sample(range(len(data)), 300):
        file.write_atomic(data[:place] + bytes([data[place] ^ 255]) + data[place + 1 :])
        try:
            with open_part(file) as parquet:
                assert read_columns(parquet, ["id", "ids"]).equals(whole)
        except OutputDamaged as error:
            found.append(str(error))
    assert len(found) > 200
    assert all(
        text.startswith(f"{file} is damaged (") and "delete it" in text and "\n" not in text
        for text in found
    )


def test_files_with_and_without_checksums_are_readable(path, tmp_path):
    table = pa.table(COLUMNS)
    (tmp_path / "ours.parquet").write_bytes(parquet_bytes(table, "zstd"))
    assert pq.read_table(tmp_path / "ours.parquet").equals(table)
    with open_part(StoragePath.of(path)) as parquet:
        assert read_columns(parquet).equals(table)


def test_an_error_of_the_storage_is_no_damage(path):
    with pytest.raises(FileNotFoundError), open_part(StoragePath.of(path + "x")):
        pass
    with pytest.raises(OSError, match="Input/output"), open_part(StoragePath.of(path)):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("times", [2, 3])
def test_a_file_that_stands_several_times_in_one_is_damaged(tmp_path, times):
    file = StoragePath.of(tmp_path / "part-001-000000.parquet")
    data = parquet_bytes(pa.table(COLUMNS), "zstd")
    file.write_atomic(data * times)
    with (
        pytest.raises(
            OutputDamaged, match=r"part-001-000000\.parquet is damaged .*before its footer"
        ),
        open_part(file),
    ):
        pass


@pytest.mark.parametrize("compression", ["zstd", "none"])
@pytest.mark.parametrize("num_rows", [0, 1, 400])
def test_a_whole_file_has_the_length_that_its_footer_says(tmp_path, compression, num_rows):
    file = StoragePath.of(tmp_path / "part-001-000000.parquet")
    table = pa.table(
        {**COLUMNS, "nulls": pa.nulls(400), "lists": [[i] * (i % 3) for i in range(400)]}
    ).slice(0, num_rows)
    file.write_atomic(parquet_bytes(table, compression))
    with open_part(file) as parquet:
        assert read_columns(parquet).num_rows == num_rows
