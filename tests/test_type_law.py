"""mypy reads the whole package but for a list of modules, which only shrinks."""

import re
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")

ROOT = Path(__file__).parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
EXCEPTIONS = [name for section in SETTINGS.get("overrides", []) for name in section["module"]]


def path_of(module: str) -> Path:
    return ROOT / (module.replace(".", "/") + ".py")


def test_mypy_reads_the_whole_package():
    assert SETTINGS["files"] == ["eagle_ray"]
    assert "exclude" not in SETTINGS


def test_the_exceptions_are_modules_one_by_one():
    assert sorted(set(EXCEPTIONS)) == EXCEPTIONS
    assert not [name for name in EXCEPTIONS if not path_of(name).exists()]


@pytest.mark.slow
def test_every_exception_still_has_errors(tmp_path):
    """One without errors leaves the list in pyproject.toml."""
    mypy = pytest.importorskip("mypy.api")
    without = (ROOT / "pyproject.toml").read_text().replace("ignore_errors = true", "ignore_errors = false")
    (tmp_path / "mypy.toml").write_text(without)
    files = [str(path_of(name)) for name in EXCEPTIONS]
    out, _, _ = mypy.run(["--config-file", str(tmp_path / "mypy.toml"), "--cache-dir", str(tmp_path / "cache"), *files])
    wrong = set(re.findall(r"^(eagle_ray/\S+)\.py:\d+: error", out, re.MULTILINE))
    assert not [name for name in EXCEPTIONS if name.replace(".", "/") not in wrong], out


def test_an_ignored_error_names_its_kind():
    bare = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / "eagle_ray").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"# type: ignore(?!\[[a-z-]+\])", line)
    ]
    assert not bare
