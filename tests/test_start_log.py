"""What a start tells of itself: a long part while it lasts, and all parts once the engine is ready."""

import logging
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from eagle_ray.core import start_log
from eagle_ray.core.start_log import StartLog, Stderr, has_reader

PATIENCE_S = 60
NEVER_S = 3600.0


@pytest.fixture(autouse=True)
def info():
    logging.getLogger("eagle_ray").setLevel(logging.INFO)


def test_a_long_part_is_told_of_while_it_lasts(messages):
    with StartLog(long_s=0.0).part("read", "reading the weights"):
        deadline = time.monotonic() + PATIENCE_S
        while messages != ["reading the weights"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_short_start_is_silent(messages):
    start = StartLog(NEVER_S)
    with start.part("read", "reading the weights"):
        pass
    start.ready()
    assert messages == []


def test_last_line_has_the_seconds_of_all_parts_that_took_time(messages, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(start_log, "time", SimpleNamespace(monotonic=lambda: now[0]))
    start = StartLog()
    for name, seconds in (("read", 1.2), ("packed", 0.01), ("measured", 5.0), ("read", 0.3)):
        with start.part(name, "..."):
            now[0] += seconds
    start.ready()
    assert messages == ["ready after 6.5 s: read 1.5, measured 5.0"]


def test_a_part_that_fails_is_timed_and_raises(messages):
    start = StartLog(long_s=0.0)
    with pytest.raises(ValueError), start.part("read", "reading the weights"):
        raise ValueError
    start.ready()
    assert messages[-1].startswith("ready after 0.0 s")


@pytest.fixture
def pipe_without_reader() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def test_a_log_without_a_reader_is_lost_and_nothing_else(pipe_without_reader):
    with Stderr.of(pipe_without_reader) as stream:
        print("lost", file=stream)
        print("lost, too", file=stream, flush=True)
        assert os.path.samestat(os.fstat(pipe_without_reader), os.stat(os.devnull))


def test_a_reader_that_has_gone_is_seen_before_a_write(pipe_without_reader, tmp_path):
    assert not has_reader(pipe_without_reader)
    reader, writer = os.pipe()
    assert has_reader(writer)
    with (tmp_path / "log").open("w") as file:
        assert has_reader(file.fileno())
    for number in (pipe_without_reader, reader, writer):
        os.close(number)


def test_streams_that_are_closed_do_not_become_other_files():
    code = (
        "import os; os.closerange(0, 3)\n"
        "from eagle_ray.core.start_log import open_streams; open_streams()\n"
        "assert os.open(os.devnull, os.O_RDONLY) > 2\n"
        "os.write(2, b'nowhere')\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
