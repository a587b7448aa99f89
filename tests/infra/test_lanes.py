"""The scheduler of `make test`: a worker that crashes takes one test with it, and the others are run."""

import os
import subprocess
import sys

import pytest

CRASHING = """
import os, signal

def test_first(): pass

def test_crashes(): os.kill(os.getpid(), signal.SIGKILL)

def test_last(): pass
"""
SHORT = """
def test_one(): pass

def test_two(): pass
"""


@pytest.mark.slow
def test_tests_behind_a_crash_are_run_once(tmp_path):
    (tmp_path / "test_a.py").write_text(CRASHING)
    for name in "bcde":
        (tmp_path / f"test_{name}.py").write_text(SHORT)
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.lanes", "-n", "2"]
    command += ["--rootdir", str(tmp_path), "--import-mode=importlib", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert "1 failed, 10 passed" in done.stdout, done.stdout
    assert "test_a.py::test_crashes" in done.stdout
