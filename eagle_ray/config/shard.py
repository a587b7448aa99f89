"""The shard of a job that one process runs, as text: ``2/3`` is the second of three.

>>> parse_shard("2/3")
(2, 3)
"""

from __future__ import annotations

import re
from collections.abc import Mapping

SLURM = "slurm"
MAX_SHARDS = 9999
_PATTERN = re.compile(r"([1-9]\d*)/([1-9]\d*)")


def parse_shard(text: str) -> tuple[int, int]:
    """Return index (from 1) and count. Raises ValueError if the text is not i/n with i at most n."""
    match = _PATTERN.fullmatch(text)
    index, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= index <= count <= MAX_SHARDS:
        raise ValueError(f"{text!r} is not i/n with i from 1 to n, and n at most {MAX_SHARDS}")
    return index, count


def check_shard(text: str) -> str:
    """Return the text if it names a shard, or SLURM. Raises ValueError."""
    if text != SLURM:
        parse_shard(text)
    return text


def slurm_shard(env: Mapping[str, str]) -> str:
    """Return the shard of this task of a SLURM array, for example ``2/3`` for task 1 of ``--array=0-2``.

    Raises ValueError if there is no array, or if its task ids have gaps: a task could not know its place then.
    """
    names = [f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "MAX", "COUNT")]
    if missing := [name for name in names if not env.get(name, "").isdecimal()]:
        raise ValueError(f"{', '.join(missing)} is not set to a number. Start it in a SLURM array, or give i/n.")
    task, first, last, count = (int(env[name]) for name in names)
    if last - first + 1 != count:
        raise ValueError(
            f"the array has {count} tasks from {first} to {last}, with gaps. Use --array=0-N without a step, or give "
            "i/n."
        )
    return f"{task - first + 1}/{count}"
