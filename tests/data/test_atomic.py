"""Files appear whole or not at all."""

import os
import signal
import subprocess
import sys

import pytest

from eagle_ray.data.atomic import read_json, remove_temp_files, write_json, write_whole

KILLED = """
import os, signal, sys
from pathlib import Path
from eagle_ray.data.atomic import write_whole
write_whole(Path(sys.argv[1]), b"new" * 1000, lambda: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_a_file_is_replaced_in_one_step(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"rows": 1})
    write_json(path, {"rows": 2, "text": "ü"})
    assert read_json(path) == {"rows": 2, "text": "ü"}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_what_the_last_look_raises_leaves_everything_as_it_was(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"old")

    def refuse() -> None:
        assert [p.read_bytes() for p in tmp_path.glob(".*")] == [b"new"]
        raise RuntimeError("overtaken")

    with pytest.raises(RuntimeError, match="overtaken"):
        write_whole(path, b"new", refuse)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"a.json": b"old"}


def test_a_killed_writer_leaves_no_file_but_a_hidden_one_that_the_next_start_removes(tmp_path):
    path = tmp_path / "part.parquet"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=os.environ | {"PYTHONPATH": os.getcwd()})
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".*.tmp"))) == 1 and not list(tmp_path.glob("*.parquet"))
    remove_temp_files(tmp_path)
    assert not list(tmp_path.iterdir())
