"""RestIndex: what has followed the same tokens in a datastore of texts (REST, arXiv 2311.08252).

The datastore is made beforehand, of outputs like those that are wanted, and never changes. A cursor holds the places
of every ending of the text, the shorter ones' first:

    intervals   of no token at all, of the last token, of the last two, ... while there are any
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle_ray.drafters.ppm import Children, interpolate
from eagle_ray.drafters.suffix_array import Interval, SuffixArray

LONGEST = 16  # tokens of a context, as in the paper
TRIED = 4  # contexts of falling length that are asked for children
MOST_PLACES = 64  # of a context that are looked at


class RestIndex:
    """texts: token ids of the target's vocabulary."""

    def __init__(self, texts: Sequence[Sequence[int]]):
        self._datastore = SuffixArray(texts, LONGEST)

    @property
    def cost_key(self) -> dict[str, Any]:
        return {"tokens": self._datastore.all[1]}

    def reader(self) -> RestReader:
        return RestReader(RestCursor(self._datastore, (self._datastore.all,)))

    def reset(self) -> None:
        """Nothing: the datastore is not read from sequences."""


class RestReader:
    """Follows a sequence's last tokens."""

    def __init__(self, start: RestCursor):
        self._start = self._cursor = start

    def read(self, token_ids: list[int]) -> None:
        if len(token_ids) >= LONGEST:
            self._cursor = self._start
        for token in token_ids[-LONGEST:]:
            self._cursor = self._cursor.after(token)

    def cursor(self) -> RestCursor:
        return self._cursor


@dataclass(frozen=True, slots=True)
class RestCursor:
    """intervals[m]: where the last m tokens occur."""

    datastore: SuffixArray
    intervals: tuple[Interval, ...]

    def children(self, width: int) -> Children:
        lengths = range(len(self.intervals) - 1, 0, -1)[:TRIED]
        contexts = ((m, self.datastore.follows(self.intervals[m], m, MOST_PLACES)) for m in lengths)
        return interpolate((context for context in contexts if context[1]), width)

    def after(self, token: int) -> RestCursor:
        intervals = [self.datastore.all]
        for length, interval in enumerate(self.intervals[:LONGEST]):
            first, last = self.datastore.narrowed(interval, length, token)
            if first == last:
                break
            intervals.append((first, last))
        return RestCursor(self.datastore, tuple(intervals))
