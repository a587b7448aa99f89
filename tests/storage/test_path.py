"""Locations of this machine: names, and files that appear whole or not at all."""

import os
import pickle
import signal
import subprocess
import sys

import pytest

from eagle_ray.storage.path import StoragePath, read_json, write_json
from tests.support.s3 import check_creates_and_replaces

KILLED = """
import os, signal, sys
from eagle_ray.storage.path import StoragePath
StoragePath.of(sys.argv[1]).write_atomic(b"new" * 1000, lambda: os.kill(os.getpid(), signal.SIGKILL))
"""


@pytest.fixture
def directory(tmp_path) -> StoragePath:
    return StoragePath.of(tmp_path)


@pytest.mark.parametrize(
    ("text", "name", "parent"),
    [
        ("s3://bucket/runs/a/", "a", "s3://bucket/runs"),
        ("s3://bucket", "bucket", "s3://bucket"),
        ("/work/runs/a", "a", "/work/runs"),
        ("https://host/data/a.jsonl", "a.jsonl", "https://host/data"),
        ("https://host", "host", "https://host"),
        ("/", "", "/"),
    ],
)
def test_a_location_is_its_text(text, name, parent):
    location = StoragePath.of(text)
    assert (location.name, str(location.parent)) == (name, parent)
    assert (location / "x").parent == location
    assert pickle.loads(pickle.dumps(location)) == location


def test_local_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert (
        str(StoragePath.of("runs/../a")) == f"{tmp_path}/a"
        and str(StoragePath.of("~/a")) == "/home/me/a"
    )


@pytest.mark.parametrize("text", ["ftp://host/a", "s3://", "s3:///a", "https://"])
def test_other_urls_are_refused(text):
    with pytest.raises(ValueError, match="neither a local path nor a URL of s3://, gs://"):
        StoragePath.of(text)


def test_display_path_is_relative_below_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert StoragePath.of("runs/a").display_path == "runs/a"
    assert (
        StoragePath.of(tmp_path.parent).display_path == str(tmp_path.parent)
        and StoragePath.of("s3://b/a").display_path == "s3://b/a"
    )


def test_below_follows_local_links_and_takes_buckets_by_name(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert (
        StoragePath.of(tmp_path / "link" / "a").relative_to(StoragePath.of(tmp_path / "real"))
        == "a"
    )
    assert StoragePath.of("s3://b/in/a").relative_to(StoragePath.of("s3://b/in")) == "a"
    assert StoragePath.of("s3://b/in").relative_to(StoragePath.of("s3://b/in")) == ""
    assert StoragePath.of("s3://b/inner").relative_to(StoragePath.of("s3://b/in")) is None


def test_a_file_is_replaced_in_one_step(directory):
    write_json(directory / "a.json", {"rows": 1})
    write_json(directory / "a.json", {"rows": 2, "text": "ü"})
    assert read_json(directory / "a.json") == {"rows": 2, "text": "ü"}
    assert directory.list_names() == ["a.json"] and read_json(directory / "b.json") is None


def test_what_the_last_look_raises_leaves_everything_as_it_was(directory):
    (directory / "a.json").write_atomic(b"old")

    def refuse() -> None:
        assert [file.read_bytes() for file in directory.glob(".*")] == [b"new"]
        raise RuntimeError("overtaken")

    for write in (StoragePath.write_atomic, StoragePath.create):
        with pytest.raises(RuntimeError, match="overtaken"):
            write(directory / "b.json", b"new", refuse)
    with pytest.raises(RuntimeError, match="overtaken"):
        (directory / "a.json").write_atomic(b"new", refuse)
    assert directory.list_names() == ["a.json"] and (directory / "a.json").read_bytes() == b"old"


def test_create_never_replaces_and_replace_needs_seen_version(directory):
    assert check_creates_and_replaces(directory).parent.list_names() == ["a"]


def test_globs_and_listings_are_sorted_and_hold_files_only(directory):
    for name in ("b.parquet", "a.parquet", "x=1/c.parquet", "x=1/d.txt", ".hidden.parquet"):
        (directory / name).write_atomic(b"")
    assert [file.name for file in directory.glob("*.parquet")] == ["a.parquet", "b.parquet"]
    assert [file.name for file in directory.glob("**/*.parquet")] == [
        "a.parquet",
        "b.parquet",
        "c.parquet",
    ]
    assert len(directory.list_versions()) == 5 and directory.glob("*/*.txt") == [
        directory / "x=1/d.txt"
    ]
    assert (
        (directory / "nowhere").glob("*") == []
        and (directory / "x=1").is_directory()
        and not (directory / "x=1").exists()
    )


def test_killed_writer_leaves_only_a_hidden_file_that_is_removed(directory):
    path = directory / "x=1" / "part.parquet"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(path)], env=os.environ | {"PYTHONPATH": os.getcwd()}
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(path.parent.list_names()) == 1 and not directory.glob("**/*.parquet")
    for theirs in (".notes.tmp", "part.parquet.0123abcd.tmp"):
        (path.parent / theirs).write_atomic(b"")
    directory.remove_temporary()
    assert path.parent.list_names() == [".notes.tmp", "part.parquet.0123abcd.tmp"]


def test_check_for_a_writable_directory_leaves_nothing(directory):
    (directory / "not" / "yet").check_writable()
    assert directory.list_names() == []
    (directory / "file").write_atomic(b"")
    with pytest.raises(OSError, match="Not a directory"):
        (directory / "file" / "out").check_writable()
