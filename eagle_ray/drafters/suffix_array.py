"""SuffixArray: all places of many texts, ordered by the tokens that follow, so that equal runs stand side by side.

    texts   [[5, 9, 7], [5, 9, 8]]
    5 9 occurs at an interval of places; narrowing it by 7 leaves the places of 5 9 7

Built by prefix doubling (Manber and Myers 1990), which ends once runs of `longest` tokens are in order: longer ones are
never looked for.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import chain

import torch
from jaxtyping import Int
from torch import Tensor

END = -1  # after each text
Interval = tuple[int, int]  # places [first, last)


class SuffixArray:
    """longest: tokens of the longest run that is looked for, and one that follows it."""

    def __init__(self, texts: Sequence[Sequence[int]], longest: int):
        tokens = torch.tensor(list(chain.from_iterable((*text, END) for text in texts)), dtype=torch.int64)
        self._tokens = array("q", [*tokens.tolist(), *[END] * (longest + 1)])
        self._places = array("q", _sorted_places(tokens, longest + 1).tolist())

    @property
    def all(self) -> Interval:
        """Of the run of no tokens."""
        return 0, len(self._places)

    def narrowed(self, interval: Interval, length: int, token: int) -> Interval:
        """Those places of a run of `length` tokens at which this token follows it."""
        places, following = range(*interval), lambda i: self._tokens[self._places[i] + length]
        first, last = (bisect(places, token, key=following) for bisect in (bisect_left, bisect_right))
        return interval[0] + first, interval[0] + last

    def follows(self, interval: Interval, length: int, most_places: int) -> dict[int, int]:
        """The tokens that follow a run of `length` tokens, and how often; of many places, an even choice of them."""
        first, last = interval
        counts: dict[int, int] = {}
        for i in range(first, last, max(1, (last - first) // most_places)):
            token = self._tokens[self._places[i] + length]
            if token != END:
                counts[token] = counts.get(token, 0) + 1
        return counts


def _sorted_places(tokens: Int[Tensor, " N"], longest: int) -> Int[Tensor, " N"]:
    """The places of all tokens, ordered by at least the `longest` tokens from there on."""
    ranks, length = tokens.unique(return_inverse=True)[1], 1
    while length < longest:
        later = torch.cat([ranks[length:] + 1, ranks.new_zeros(min(length, len(ranks)))])
        ranks = (ranks * (len(ranks) + 1) + later).unique(return_inverse=True)[1]
        length *= 2
    return ranks.sort(stable=True).indices
