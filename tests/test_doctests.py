"""Examples in docstrings: every ``>>>`` line runs and gives what stands below it, without Ray and without a network."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
FILES = [path for path in sorted((ROOT / "eagle_ray").rglob("*.py")) if ">>>" in path.read_text()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_examples_give_what_they_say(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    for example in doctest.DocTestFinder().find(import_module(name)):
        runner.run(example, out=report.append)
    assert not report, "".join(report)
    assert runner.summarize(verbose=False).attempted, "no docstring has the examples"


def test_no_example_is_skipped():
    """What needs a cluster, a GPU or a run is an indented sketch without ``>>>``."""
    assert not [path for path in FILES if "doctest: +SKIP" in path.read_text()]
