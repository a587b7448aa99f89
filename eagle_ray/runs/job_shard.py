"""JobShard: the part of a job's rows that one process runs. A row's id alone decides its shard.

So an input that grows keeps its assignment, and no two shards have an id in common.

>>> JobShard.of("2/3").name
'0002-of-0003'
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eagle_ray.config.shard import parse_shard
from eagle_ray.runs.row_index import SIZE, Digests

_WORD = 8  # bytes of a digest that are read as a number


@dataclass(frozen=True, slots=True)
class JobShard:
    """index: from 1 to count."""

    index: int
    count: int

    @classmethod
    def of(cls, text: str) -> JobShard:
        """Parse i/n. Raises ValueError."""
        return cls(*parse_shard(text))

    @classmethod
    def all_of(cls, count: int) -> list[JobShard]:
        return [cls(index, count) for index in range(1, count + 1)]

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def name(self) -> str:
        """Return the name of its directory."""
        return f"{self.index:04d}-of-{self.count:04d}"

    def holds(self, ids: Digests) -> np.ndarray:
        """Return for each id whether it is in this shard: the digest's first 8 bytes, as a number, modulo count."""
        words = np.ascontiguousarray(ids).view(np.uint8).reshape(-1, SIZE)[:, :_WORD]
        numbers = np.ascontiguousarray(words).view(">u8").reshape(-1)
        return numbers % np.uint64(self.count) == self.index - 1
