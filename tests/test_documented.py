"""Every way that a page or --help documents has a test that goes in by it, or says why not (tests/documented.yaml)."""

from __future__ import annotations

import pytest

from tests.support import documented
from tests.support.documented import (
    PAGES,
    Entry,
    help_pages,
    units_of_help,
    units_of_markdown,
    units_of_page,
)

LISTED = documented.entries()


def test_every_page_and_every_command_is_listed():
    assert list(LISTED) == [*PAGES, *help_pages()]


@pytest.mark.parametrize("page", LISTED)
def test_a_page_says_what_is_listed(page):
    how = "tests/documented.yaml quotes it otherwise; look at its test again, and quote it anew"
    assert not documented.reworded(units_of_page(page), LISTED[page]), how


def test_every_named_test_is_there():
    named = {
        test
        for entries in LISTED.values()
        for entry in entries
        for test in (*entry.tests, *entry.below)
    }
    assert not sorted(test for test in named if not documented.exists(test))


def test_every_test_goes_in_by_a_way_of_a_user():
    """What calls the function behind a way is listed under `below`: it does not see what stands before it."""
    named = {test for entries in LISTED.values() for entry in entries for test in entry.tests}
    assert not sorted(test for test in named if not documented.ways_of(test))


def test_what_has_no_test_has_a_reason():
    assert all(
        bool(entry.tests) != bool(entry.untested)
        for entries in LISTED.values()
        for entry in entries
    )


PAGE = """# Files
Files may be `.gz`. So may
others.

| name | is |
|---|---|
| a | b |

```console
$ eagle-ray run  # runs
```
"""
HELP = """usage: eagle-ray run [-h]

options:
  -h, --help            show this help message and exit
  -c, --config FILE     a YAML file
  --fail-on-row-errors
                        exit 3
"""


def test_a_page_is_cut_into_sentences_rows_and_lines():
    units = units_of_markdown(PAGE)
    assert units == [
        "Files may be `.gz`.", "So may others.", "| name | is |", "| a | b |", "$ eagle-ray run # runs",
    ]  # fmt: skip
    assert documented.unlisted(units, [Entry(says=("Files may be `.gz`.", *units[2:]))]) == [
        "So may others."
    ]
    assert documented.reworded(units, [Entry(says=("Files may be",))]) == ["Files may be"]


def test_an_argument_is_known_by_its_long_name():
    assert units_of_help(HELP) == ["--config a YAML file", "--fail-on-row-errors exit 3"]


def test_a_test_below_the_way_is_told_apart():
    assert documented.ways_of("api/test_llm.py::test_a_bad_prompt_does_not_lose_the_others") == {
        "LLM"
    }
    assert "command" in documented.ways_of(
        "cli/test_main.py::test_validate_shows_rows_and_the_first_prompt"
    )
    assert not documented.ways_of("gguf/test_blocks.py::test_a_type_that_is_not_read_is_named")
    assert not documented.exists("gguf/test_blocks.py::test_of_nothing")
