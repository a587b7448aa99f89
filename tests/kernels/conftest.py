"""Kernels run on a GPU where there is one, else in Triton's interpreter: see tests/support/kernels.py.

tests/conftest.py has set Triton's variable for that, before any test imports a kernel.
"""

import pytest

from eagle_ray.kernels.availability import is_interpreting
from tests.support.messages import messages  # noqa: F401

if is_interpreting():
    from tests.support.kernels import mend

    mend()


@pytest.fixture(autouse=True)
def portable(monkeypatch):
    """Run nothing on kernels that a test does not ask for: on a GPU it would compare them with themselves."""
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "portable")


@pytest.fixture
def fused(monkeypatch, portable):
    """From here on the kernels run wherever they can."""
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "triton")
