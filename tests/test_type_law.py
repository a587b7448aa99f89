"""mypy reads the whole package."""

import re
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")

ROOT = Path(__file__).parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]


def test_mypy_reads_the_whole_package():
    """No module is left out, and none is read without its errors."""
    assert SETTINGS["files"] == ["eagle_ray"]
    assert not {"exclude", "overrides"} & SETTINGS.keys()


def test_an_ignored_error_names_its_kind():
    bare = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / "eagle_ray").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"# type: ignore(?!\[[a-z-]+\])", line)
    ]
    assert not bare
