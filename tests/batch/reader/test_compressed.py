"""Compressed JSONL and CSV files: the rows of the plain file, from several members, and errors of damaged ones."""

import gzip
from functools import partial
from pathlib import Path

import pytest

from eagle_ray.batch.driver.input_plan import request_rows
from eagle_ray.batch.reader import scan
from eagle_ray.core.errors import ConfigError
from eagle_ray.storage.decompressed import open_decompressed
from tests.support.inputs import JSONL, ids, plan, zstd

CSV = b'id,prompt\n1,"Hi,\nyou"\n2,"an open quote\n3,x\n4,"y"\n'


COMPRESS = {".gz": gzip.compress, ".zst": zstd}


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize(("name", "content"), [("a.jsonl", JSONL), ("a.csv", CSV)])
def test_the_rows_are_those_of_the_plain_file(tmp_path, monkeypatch, suffix, name, content):
    monkeypatch.setattr(scan, "SCANNED_SLICE_ROWS", 4)
    (tmp_path / name).write_bytes(content)
    (tmp_path / f"{name}{suffix}").write_bytes(COMPRESS[suffix](content))
    plain, packed = plan(tmp_path / name), plan(tmp_path / f"{name}{suffix}")
    assert len(packed.slices) == 1
    own = {"source_file", "request_id", "error_message"}
    rows = [
        [{k: v for k, v in row.items() if k not in own} for row in request_rows(found)]
        for found in (plain, packed)
    ]
    assert rows[0] == rows[1] and len(rows[0]) > 2


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_file_of_several_members_and_a_limit(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    half = len(JSONL) // 2
    path.write_bytes(COMPRESS[suffix](JSONL[:half]) + COMPRESS[suffix](JSONL[half:]))
    assert ids(plan(path)) == [str(i) for i in range(40)]
    assert ids(plan(path, "input.limit=3")) == ["0", "1", "2"]


@pytest.mark.parametrize("num_zeros", [1, 511, 300_000])
def test_zeros_behind_gzip_are_padding(tmp_path, num_zeros):
    packed = gzip.compress(JSONL)
    padding = bytes(num_zeros)
    (tmp_path / "a.jsonl.gz").write_bytes(packed + padding)
    (tmp_path / "b.jsonl.gz").write_bytes(packed[:-9] + padding + packed)
    assert ids(plan(tmp_path / "a.jsonl.gz")) == [str(i) for i in range(40)]
    with pytest.raises(ConfigError, match=r"cannot read .*b\.jsonl\.gz as jsonl"):
        plan(tmp_path / "b.jsonl.gz")


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("damage", [lambda content: content[:-20], lambda content: b"\0" + content])
def test_a_damaged_file_is_named(tmp_path, suffix, damage):
    path: Path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(damage(COMPRESS[suffix](JSONL)))
    with pytest.raises(
        ConfigError, match=rf"cannot read .*a\.jsonl{suffix} as jsonl .*write it again"
    ):
        plan(path)


def test_seeking_reads_again(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes(range(256)) * 100))
    with open_decompressed(partial((tmp_path / "a.gz").open, "rb"), "gzip") as file:
        assert (
            file.read(2) == b"\x00\x01" and file.seek(25_599) == 25_599 and file.read() == b"\xff"
        )
        assert file.seek(3) == 3 and file.read(1) == b"\x03" and file.seek(10**6) == 25_600
