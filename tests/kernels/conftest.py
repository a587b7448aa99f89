"""Kernels run in Triton's interpreter, which looks at its variable when they are defined: before any test imports one."""

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def interpreted(monkeypatch):
    """From here on the kernels run wherever they can, on the CPU."""
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "triton")
