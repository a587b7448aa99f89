"""Input files that are known again: by content, at a cost that is bounded."""

import os

import pytest

from eagle_ray.batch.reader import fingerprints as module
from eagle_ray.batch.reader.files import find_files
from eagle_ray.batch.reader.fingerprints import begins_with, fingerprints
from eagle_ray.runs.recorded_inputs import what_changed
from eagle_ray.storage.path import StoragePath


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "Hi"}\n')
    return file


def fingerprint_of(path, known):
    return fingerprints(find_files(str(path), "auto"), known)[str(path)]


def test_a_file_with_the_noted_state_is_not_read(path, monkeypatch):
    monkeypatch.setattr(
        module, "SETTLED_NS", -module.SETTLED_NS
    )  # as if it had been written long ago
    noted = fingerprint_of(path, {})
    monkeypatch.setattr(StoragePath, "open", None)
    assert fingerprint_of(path, {str(path): noted}) == noted


def test_file_changed_within_one_clock_tick_is_read_again(path):
    noted = fingerprint_of(path, {})
    before = path.stat()
    path.write_text('{"prompt": "Ho"}\n')
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (
        "state" not in noted
        and what_changed(noted, fingerprint_of(path, {str(path): noted})) == "its content"
    )


def test_a_file_whose_time_was_set_back_is_read_again(path, monkeypatch):
    monkeypatch.setattr(module, "SETTLED_NS", -module.SETTLED_NS)
    noted, before = fingerprint_of(path, {}), path.stat()
    path.write_text('{"prompt": "Ho"}\n')
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (
        "state" in noted
        and what_changed(noted, fingerprint_of(path, {str(path): noted})) == "its content"
    )


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("a\n", "a\nb\n", True),
        ("a", "a\nb", True),
        ("a", "a\r\nb", True),
        ("a", "ab\n", True),  # no JSON, so no row: its line was not whole
        ('{"a": 1}', '{"a": 1}b\n', False),  # the last line is another one now
        ('{"a": 1}\n{"a"', '{"a": 1}\n{"a": 2}\n', True),
        ("a\n", "b\nb\n", False),
        ("a\nb\n", "a\n", False),
        ("", "a\n", False),
    ],
)
def test_a_file_has_grown_if_its_lines_are_still_there(path, old, new, wanted):
    path.write_bytes(old.encode())
    was = fingerprint_of(path, {})
    path.write_bytes(new.encode())
    assert begins_with(StoragePath.of(path), was, fingerprint_of(path, {})) == wanted


def test_a_large_input_is_not_read_and_known_by_its_time(path, monkeypatch):
    monkeypatch.setattr(module, "MAX_HASHED_BYTES", path.stat().st_size - 1)
    noted = fingerprint_of(path, {})
    assert "digest" not in noted and what_changed(noted, fingerprint_of(path, {})) is None
    os.utime(path, ns=(1, 1))
    assert what_changed(noted, fingerprint_of(path, {})) == "its time; its content is not noted"


def test_a_record_without_digests_is_given_them(path):
    noted = fingerprint_of(path, {})
    assert (
        fingerprint_of(path, {str(path): {key: noted[key] for key in ("size", "mtime_ns")}})
        == noted
    )


def test_an_object_is_known_by_its_etag():
    was = {"size": 2, "etag": "a"}
    assert what_changed(was, dict(was)) is None
    assert what_changed(was, was | {"etag": "b"}) == "its content"
