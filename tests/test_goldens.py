"""What a user sees is what the files of tests/goldens say. tests/goldens/README.md says what each of them is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.entry_points import EntryPoints, silent_log
from tests.support.goldens import FILES, HOW, compare


@pytest.fixture(scope="module")
def entry_points(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EntryPoints]:
    with EntryPoints(tmp_path_factory.mktemp("doors")) as entry_points:
        yield entry_points


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_what_a_user_sees(entry_points: EntryPoints, name: str) -> None:
    with silent_log():
        difference = compare(name, FILES[name](entry_points))
    if difference:
        pytest.fail(f"{difference}\n{HOW}", pytrace=False)
