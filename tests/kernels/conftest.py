"""Kernels run in Triton's interpreter, for which its variable must be set before any test imports one."""

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"

from tests.kernels.interpreter import mend

mend()


@pytest.fixture
def interpreted(monkeypatch):
    """From here on the kernels run wherever they can, on the CPU."""
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "triton")
