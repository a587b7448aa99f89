"""How much of a random test is run: less in `make test`, and all of it wherever slow tests run.

    NUM = extent(12, 24)  # sequences

For tests that draw cases, of which any number proves the point as far as it goes.
"""

from __future__ import annotations

import os

VARIABLE = "EAGLE_RAY_WHOLE_TESTS"  # set by conftest.py where slow tests are selected


def extent(fast: int, whole: int) -> int:
    """Return the number of cases."""
    return whole if os.environ.get(VARIABLE) else fast
