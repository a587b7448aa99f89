"""What a user sees is what the files of tests/goldens say. tests/goldens/README.md says what each of them is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.doors import Doors, silent_log
from tests.support.goldens import FILES, HOW, compare


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    with Doors(tmp_path_factory.mktemp("doors")) as doors:
        yield doors


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_what_a_user_sees(doors: Doors, name: str) -> None:
    with silent_log():
        difference = compare(name, FILES[name](doors))
    if difference:
        pytest.fail(f"{difference}\n{HOW}", pytrace=False)
