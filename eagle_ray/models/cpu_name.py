"""What this machine's processor is called, and so whose speed it is that was measured here.

>>> cpu_name()
'AMD EPYC 9R14'
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

INFO = Path("/proc/cpuinfo")


@cache
def cpu_name() -> str:
    """As the system names it; Python's own name is empty on Linux."""
    lines = INFO.read_text().splitlines() if INFO.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())
