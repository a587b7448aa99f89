"""The rule of tests: helpers come from tests/support, and no private name of another object is used."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("*.py"))
IMPORT = re.compile(r"^\s*(?:from|import) (tests(?!\.support\b)\b.*)", re.MULTILINE)  # in programs within strings, too


def name_of(path: Path) -> str:
    return path.relative_to(TESTS).as_posix()


def test_helpers_are_imported_from_support_only():
    found = {name_of(path): IMPORT.findall(path.read_text()) for path in FILES}
    assert not {name: lines for name, lines in found.items() if set(lines) - {"tests import support"}}
