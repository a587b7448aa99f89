"""A fixture that tests/conftest.py and tests/kernels/conftest.py share: the latter also runs without the former."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """What the package logs, in order."""
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("eagle_ray").addHandler(handler)
    yield said
    logging.getLogger("eagle_ray").removeHandler(handler)
