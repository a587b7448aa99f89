"""Files that are not what their names say: what they are and the command that mends them, which is run here."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import logging
import lzma
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather, orc

from eagle_ray.batch.driver.input_plan import request_rows
from eagle_ray.core.errors import ConfigError
from eagle_ray.storage.file_kinds import advice, foreign_kind
from eagle_ray.storage.path import StoragePath
from tests.support.inputs import errors, ids, plan, zstd

ROWS = [{"id": "a", "prompt": "Hi"}, {"id": "b", "prompt": "Ho; really"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
CSV = b'id,prompt\na,Hi\nb,"Ho; really"\n'


def archive(name: str, content: bytes) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as file:
        file.writestr(name, content)
    return sink.getvalue()


def written(write) -> bytes:
    sink = pa.BufferOutputStream()
    write(pa.Table.from_pylist(ROWS), sink)
    return sink.getvalue().to_pybytes()


MENDED = {  # name: content, what it is, the file after the command
    "a.jsonl": (gzip.compress(LINES), "a gzip file", "a.jsonl.gz"),
    "b.jsonl": (zstd(LINES), "a Zstandard file", "b.jsonl.zst"),
    "c.jsonl": (bz2.compress(LINES), "a bzip2 file", "c.jsonl"),
    "d.csv": (lzma.compress(CSV), "an xz file", "d.csv"),
    "e.jsonl": (archive("e.jsonl", LINES), "a ZIP archive", "e.jsonl"),
    "f.jsonl": (written(pq.write_table), "a Parquet file", "f.parquet"),
    "g.jsonl": (
        LINES.replace(b"\n", b"\r"),
        "text whose lines end in carriage returns alone",
        "g.jsonl",
    ),
    "h.csv": (CSV.replace(b"\n", b"\r"), "text whose lines end in carriage returns alone", "h.csv"),
    "i.csv": (b'id;prompt\na;Hi\nb;"Ho; really"\n', "CSV separated by semicolons", "i.csv"),
    "j.csv": (CSV.replace(b",", b"\t"), "CSV separated by tabs", "j.csv"),
    "k.csv": (LINES, "JSONL", "k.jsonl"),
    "l.jsonl": (CSV, "CSV", "l.csv"),
    "m.jsonl": (json.dumps(ROWS, indent=1).encode(), "one JSON array", "m.jsonl"),
    "n.jsonl": (json.dumps(ROWS[0], indent=1).encode(), "JSON objects of several lines", "n.jsonl"),
    "o.jsonl": (LINES.decode().encode("utf-16"), "UTF-16 text", "o.jsonl"),
    "p.parquet": (LINES, "JSONL", "p.jsonl"),
    "q.jsonl": (written(feather.write_feather), "an Arrow file", "q.parquet"),
    "r.csv": (written(orc.write_table), "an ORC file", "r.parquet"),
    "s.parquet": (gzip.compress(LINES), "a gzip file", "s.parquet.gz"),
    "t.jsonl.gz": (LINES, "not compressed", "t.jsonl"),
    "u.jsonl.zst": (gzip.compress(LINES), "a gzip file", "u.jsonl.gz"),
    "v.csv": (b"sep=;\nid;prompt\na;Hi\n", "CSV with Excel's line 'sep=' first", "v.csv"),
    "w.jsonl.bz2": (bz2.compress(LINES), "a bzip2 file", "w.jsonl"),
    "x.zip": (archive("x.jsonl", LINES), "a ZIP archive", "x.jsonl"),
    "y.json": (json.dumps(ROWS, indent=1).encode(), "one JSON array", "y.jsonl"),
}


@pytest.mark.parametrize("name", MENDED)
def test_a_file_of_another_kind_is_named_with_the_command(tmp_path, name):
    content, about, mended = MENDED[name]
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        plan(file)
    message = str(error.value)
    assert message.count(f"it is {about}") == 1 and str(file) in message
    if name.startswith("s."):  # gzip of which format: its rows are the next question
        return
    command = message.rpartition(": ")[2]
    program = command.rpartition("&& ")[2].split()[0]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed here")
    path = (
        f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # python3 is that of the environment
    )
    subprocess.run(["bash", "-c", command], check=True, timeout=60, env=os.environ | {"PATH": path})
    if name.startswith("v."):  # separated by semicolons, too
        with pytest.raises(ConfigError, match="separated by semicolons"):
            plan(tmp_path / mended)
        return
    found = plan(tmp_path / mended)
    assert ids(found) == (["a"] if name.startswith("n.") else ["a", "b"]) and set(
        errors(found)
    ) == {None}


@pytest.mark.parametrize(
    ("content", "about"),
    [
        (archive("xl/workbook.xml", b""), "an Excel workbook. Save it as CSV: mv"),
        (b"<!DOCTYPE html><html>", "a web page. Download the file itself"),
        (b'<?xml version="1.0"?><Error>', "XML, as storage answers with an error"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer. Run `git lfs pull`"),
        (b"SQLite format 3\0" + bytes(80), "an SQLite database. Export a table as CSV"),
        (b"Obj\x01" + bytes(80), "an Avro file"),
    ],
)
def test_a_file_of_no_rows_is_named_by_what_it_is(tmp_path, content, about):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(
        ConfigError, match=f"^cannot read {tmp_path}/a.jsonl as jsonl: it is {about}"
    ):
        plan(tmp_path / "a.jsonl")


def test_the_command_for_an_object_copies_it_here_and_back():
    file = StoragePath.of("s3://b/in/a b.jsonl")
    assert advice(foreign_kind(b"BZh9"), file).endswith(
        "Unpack it: aws s3 cp 's3://b/in/a b.jsonl' 'a b.jsonl.bz2' && bzip2 -dc 'a b.jsonl.bz2' > 'a b.jsonl'"
        " && aws s3 cp 'a b.jsonl' 's3://b/in/a b.jsonl'"
    )
    assert advice(foreign_kind(b"\x1f\x8b"), file).endswith(
        "aws s3 mv 's3://b/in/a b.jsonl' 's3://b/in/a b.jsonl.gz'"
    )
    assert "save it as a.jsonl.gz" in advice(
        foreign_kind(b"\x1f\x8b"), StoragePath.of("https://h/a.jsonl")
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"id": "a",\r"prompt": "Hi"}'),  # white space of JSON
        ("a.jsonl", b'{"id": "a", "prompt": "x;y"}\r\n'),
        ("a.csv", b"prompt\nx;y\n"),
        ("a.csv", b"id|prompt,prompt\na,x|y\n"),
        ("a.csv", b"prompt|text,prompt\n1,x\n"),
        ("a.jsonl", b'[{"id": 1}]\n{"id": "a", "prompt": "Hi"}\n'),
        ("a.jsonl", b'no JSON\n{"id": "a", "prompt": "Hi"}\n'),
    ],
)
def test_a_right_file_is_not_taken_for_another_kind(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert None in errors(plan(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.jsonl", LINES), ("a.jsonl", LINES.rstrip()), ("a.csv", CSV), ("a.csv", b"prompt\nHi\nHo")],
)
def test_zero_bytes_at_the_end_are_named_and_not_read(tmp_path, caplog, monkeypatch, name, content):
    monkeypatch.setattr(logging.getLogger("eagle_ray"), "propagate", True)
    file = tmp_path / name
    file.write_bytes(content + bytes(4096))
    found = plan(file)
    assert found.num_rows == 2 and set(errors(found)) == {None}
    if content.endswith(b"\n"):
        command = f"truncate -s {len(content)} {file}"
        assert (
            "4,096 zero bytes stand at the end of the file, as a crash leaves them. The line"
            in caplog.text
        )
        assert command in caplog.text
        subprocess.run(["bash", "-c", command], check=True, timeout=10)
        assert file.read_bytes() == content


def test_zero_bytes_and_returns_within_a_line_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        LINES + bytes(8) + b"{}\n" + LINES.replace(b"}\n", b"}\r", 1)
    )
    _, _, zeros, returns = (
        row["error_message"] for row in request_rows(plan(tmp_path / "a.jsonl"))
    )
    assert "it holds 8 zero bytes, as a crash leaves them: remove them with tr -d '\\000'" in zeros
    assert "it holds carriage returns without line feeds" in returns


def test_a_query_is_part_of_a_name_but_for_web_addresses(tmp_path):
    names = ["why?.jsonl", "a#1.jsonl", "Brand%2321.jsonl", "B.JSONL", "C.Jsonl.GZ"]
    for i, name in enumerate(names):
        line = json.dumps({"id": str(i), "prompt": "Hi"}).encode() + b"\n"
        (tmp_path / name).write_bytes(gzip.compress(line) if name.endswith("GZ") else line)
    assert sorted(ids(plan(tmp_path))) == list("01234")
