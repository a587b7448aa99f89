"""Children look for modules where this process does, and a user's file in the working directory is not one of them."""

import sys
from pathlib import Path

import pytest

from eagle_ray.cli import main as cli
from eagle_ray.core.child_process import start_child

NAMES = ("copy", "csv", "inspect", "random", "statistics", "string", "tempfile", "uuid")
SEND_FILES = f"""
import importlib, sys
from multiprocessing.connection import Connection
Connection(int(sys.argv[-1])).send([importlib.import_module(name).__file__ for name in {NAMES}])
"""


@pytest.fixture
def directory_of_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose files have names of the standard library's modules."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise SystemError('a file of the user')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_child_imports_nothing_from_its_working_directory(directory_of_modules):
    pipe, process = start_child(SEND_FILES, "a child", "argument")
    assert [Path(file).stem for file in pipe.recv()] == list(NAMES)
    assert process.wait() == 0


def test_an_attempt_imports_nothing_from_its_working_directory(directory_of_modules, capfd):
    assert cli.main(["run", "--keep-going", "-i", "/nowhere/*.jsonl", "-o", "out"]) == 2
    said = capfd.readouterr().err
    assert "/nowhere/*.jsonl" in said and "Traceback" not in said


def test_a_child_looks_where_this_process_does(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("PLACE = 'here'")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    code = "import only_here, sys; from multiprocessing.connection import Connection; "
    pipe, process = start_child(
        f"{code}Connection(int(sys.argv[-1])).send(sys.path)", "a child", "argument"
    )
    directories = pipe.recv()
    assert str(tmp_path) in directories and str(tmp_path / "elsewhere") not in directories
    assert process.wait() == 0
