"""SuffixIndex: what has followed the longest run of tokens that occurred before, in this sequence or in any other.

One automaton holds every prompt and output that this drafter was shown, so that a job whose rows resemble one another
drafts from its own earlier outputs (as SuffixDecoding, arXiv 2411.04975, and SAM-Decoding, arXiv 2411.10666). When it
is full it begins anew with what comes next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

from eagle_ray.drafters.ppm import Children, interpolate
from eagle_ray.drafters.suffix_automaton import ROOT, SuffixAutomaton

CAPACITY = 200_000  # tokens, at about 460 bytes each
BELIEVED = 64  # tokens of a context past which a longer one is no surer
TRIED = 4  # contexts of falling length that are asked for children
VAGUE = 256  # different tokens after a context that make it too vague to ask


class SuffixIndex:
    """capacity: tokens that are remembered at most."""

    cost_key: ClassVar[dict[str, Any]] = {"tried": TRIED}

    def __init__(self, capacity: int = CAPACITY):
        self._capacity, self.automaton = capacity, SuffixAutomaton()

    def reader(self) -> SuffixReader:
        return SuffixReader(self)

    def reset(self) -> None:
        self.automaton = SuffixAutomaton()

    def make_room(self) -> None:
        """Forget all when full."""
        if self.automaton.num_tokens >= self._capacity:
            self.reset()


class SuffixReader:
    """One sequence in the automaton that was its source's when it was last read."""

    def __init__(self, source: SuffixIndex):
        self._source, self._automaton, self._state = source, source.automaton, ROOT

    def read(self, token_ids: list[int]) -> None:
        self._source.make_room()
        if self._automaton is not self._source.automaton:
            self._automaton, self._state = self._source.automaton, ROOT
        for token in token_ids:
            self._state = self._automaton.append(self._state, token)

    def cursor(self) -> SuffixCursor:
        return SuffixCursor(self._automaton, self._state, self._automaton.longest[self._state])


@dataclass(frozen=True, slots=True)
class SuffixCursor:
    """length: of the run among the state's that is meant, the last tokens of the text and of the drafted path."""

    automaton: SuffixAutomaton
    state: int
    length: int

    def children(self, width: int) -> Children:
        telling = ((s, n) for s, n in self._contexts() if n and 0 < self.automaton.num_following(s) <= VAGUE)
        asked = ((min(n, BELIEVED), self.automaton.follows(s)) for s, n in islice(telling, TRIED))
        return interpolate(asked, width)

    def after(self, token: int) -> SuffixCursor:
        for state, length in self._contexts():
            there = self.automaton.step(state, token)
            if there is not None:
                return SuffixCursor(self.automaton, there, length + 1)
        return SuffixCursor(self.automaton, ROOT, 0)

    def _contexts(self) -> Iterator[tuple[int, int]]:
        """The states of ever shorter runs that end here, with the lengths of these."""
        state, length = self.state, self.length
        while state >= 0:
            yield state, length
            state = self.automaton.link[state]
            length = self.automaton.longest[state] if state >= 0 else 0
