"""RestIndex: continuations of the current suffix in a datastore of texts (REST, arXiv 2311.08252).

The datastore is built beforehand from outputs like the expected ones and never changes. A cursor
holds the interval of occurrences of every suffix of the text, shortest first.

SuffixArray holds all positions of many texts, sorted by the tokens that follow, so that equal runs
are adjacent:

    texts   [[5, 9, 7], [5, 9, 8]]
    5 9 occurs at an interval of positions; narrowing it by 7 leaves the positions of 5 9 7

It is built by prefix doubling (Manber and Myers 1990), which ends once runs of `longest` tokens are
sorted.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from eagle_ray.methods.lookup.best_first import Children
from eagle_ray.methods.lookup.drafter import CursorIndex, LookupDrafter, interpolate, lookup_drafter
from eagle_ray.methods.method import DraftSettings
from eagle_ray.models.target import TargetModel
from eagle_ray.storage.datastore import read_datastore

TEXT_END = -1  # after each text
Interval = tuple[int, int]  # places [first, last)


class SuffixArray:
    """A suffix array over a datastore.

    Attributes:
        longest: maximum tokens of a run that can be looked up, plus one for the token after it.
    """

    def __init__(self, texts: Sequence[Sequence[int]], longest: int):
        tokens = torch.tensor(
            list(chain.from_iterable((*text, TEXT_END) for text in texts)), dtype=torch.int64
        )
        self._tokens = array("q", [*tokens.tolist(), *[TEXT_END] * (longest + 1)])
        self._positions = array("q", _sorted_positions(tokens, longest + 1).tolist())

    @property
    def all(self) -> Interval:
        """Return the interval of all positions, which are the occurrences of the empty run."""
        return 0, len(self._positions)

    def narrowed(self, interval: Interval, length: int, token: int) -> Interval:
        """Return the interval of a run extended by this token, from the interval of the run of `length` tokens."""

        def following(i: int) -> int:
            return self._tokens[self._positions[i] + length]

        begin, end = interval
        positions = range(begin, end)
        first = bisect_left(positions, token, key=following)
        last = bisect_right(positions, token, key=following)
        return begin + first, begin + last

    def follows(self, interval: Interval, length: int, max_positions: int) -> dict[int, int]:
        """Return the tokens that follow a run of `length` tokens, with counts; many occurrences are sampled evenly."""
        first, last = interval
        counts: dict[int, int] = {}
        for i in range(first, last, max(1, (last - first) // max_positions)):
            token = self._tokens[self._positions[i] + length]
            if token != TEXT_END:
                counts[token] = counts.get(token, 0) + 1
        return counts


def _sorted_positions(tokens: Int[Tensor, " N"], longest: int) -> Int[Tensor, " N"]:
    """Return all positions, sorted by at least the `longest` tokens from there on."""
    ranks = tokens.unique(return_inverse=True)[1]
    length = 1
    while length < longest:
        later = torch.cat([ranks[length:] + 1, ranks.new_zeros(min(length, len(ranks)))])
        ranks = (ranks * (len(ranks) + 1) + later).unique(return_inverse=True)[1]
        length *= 2
    return ranks.sort(stable=True).indices


MAX_CONTEXT_TOKENS = 16  # tokens of a context, as in the paper
REST_CONTEXTS_TRIED = 4  # contexts of falling length that are asked for children
MAX_POSITIONS = 64  # positions of a context that are looked at


class RestIndex(CursorIndex):
    """An index over a fixed datastore of texts; the sequences themselves are not indexed.

    Args:
        texts: token ids of the target's vocabulary.
    """

    def __init__(self, texts: Sequence[Sequence[int]]):
        self._datastore = SuffixArray(texts, MAX_CONTEXT_TOKENS)

    @property
    def cost_key(self) -> dict[str, Any]:
        return {"tokens": self._datastore.all[1]}

    def reader(self) -> RestReader:
        return RestReader(RestCursor(self._datastore, (self._datastore.all,)))

    def reset(self) -> None:
        """Do nothing: the datastore does not depend on sequences."""


class RestReader:
    """Keeps a sequence's last tokens."""

    def __init__(self, start: RestCursor):
        self._start = start
        self._cursor = start

    def read(self, token_ids: list[int]) -> None:
        if len(token_ids) >= MAX_CONTEXT_TOKENS:
            self._cursor = self._start
        for token in token_ids[-MAX_CONTEXT_TOKENS:]:
            self._cursor = self._cursor.after(token)

    def cursor(self) -> RestCursor:
        return self._cursor


@dataclass(frozen=True, slots=True)
class RestCursor:
    """A position after the text and a drafted path: intervals[m] has the occurrences of its last m tokens."""

    datastore: SuffixArray
    intervals: tuple[Interval, ...]

    def children(self, width: int) -> Children:
        lengths = range(len(self.intervals) - 1, 0, -1)[:REST_CONTEXTS_TRIED]
        contexts = (
            (m, self.datastore.follows(self.intervals[m], m, MAX_POSITIONS)) for m in lengths
        )
        return interpolate((context for context in contexts if context[1]), width)

    def after(self, token: int) -> RestCursor:
        intervals = [self.datastore.all]
        for length, interval in enumerate(self.intervals[:MAX_CONTEXT_TOKENS]):
            first, last = self.datastore.narrowed(interval, length, token)
            if first == last:
                break
            intervals.append((first, last))
        return RestCursor(self.datastore, tuple(intervals))


def make_drafter(speculative: DraftSettings, target: TargetModel, weights: None) -> LookupDrafter:
    assert speculative.datastore is not None, "the configuration requires one"
    index = RestIndex(read_datastore(speculative.datastore, target.vocab_size))
    return lookup_drafter(index, speculative, target)
