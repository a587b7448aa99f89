"""SuffixIndex: continuations of the longest suffix that occurred before, in this sequence or any other.

One automaton holds every prompt and output that the drafter has read, so a job with similar rows
drafts from its own earlier outputs (as SuffixDecoding, arXiv 2411.04975, and SAM-Decoding, arXiv
2411.10666). When it is full, the older half is discarded. What runs is lookup_index.cpp; the
classes here are its reference, and run where it was not built.

SuffixAutomaton holds every run of tokens in several growing texts, and how often each token has
followed it. A state stands for the runs that end at the same positions; `link` leads to the longest
shorter run that ends at more positions (Blumer et al. 1985). Appending a token takes constant time
on average, also if several texts grow by turns:

    automaton = SuffixAutomaton()
    state = ROOT_NODE
    for token in (5, 9, 7, 5, 9):
        state = automaton.append(state, token)
    automaton.follows(automaton.link[state])       # followers of the longest run seen before, 5 9: {7: 1}
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import torch

from eagle_ray.methods.lookup.best_first import Children, Texts
from eagle_ray.methods.lookup.drafter import CursorIndex, LookupDrafter, interpolate, lookup_drafter
from eagle_ray.methods.lookup.native_index import native_index
from eagle_ray.methods.method import DraftSettings
from eagle_ray.models.target import TargetModel

ROOT_NODE = 0
MAX_COUNTED = 32  # states whose count one token raises: in a text that repeats one token there would be no end


class SuffixAutomaton:
    """A suffix automaton over token ids. States are numbers; the root is the first.

    Attributes:
        longest: length of each state's longest run.
        link: suffix link of each state; -1 for the root.
    """

    def __init__(self) -> None:
        self.longest: list[int] = [0]
        self.link: list[int] = [-1]
        self.num_tokens = 0  # appended so far
        self._next: list[dict[int, int]] = [{}]
        self._counts: list[int] = [0]  # how often a state's runs have been read

    def append(self, state: int, token: int) -> int:
        """Append a token to a text. Return the text's new state from its old one, which is
        ROOT_NODE for the empty text."""
        self.num_tokens += 1
        known = self._next[state].get(token)
        if known is not None:
            grown = self._of_length(state, token, known)
        else:
            grown = self._new(self.longest[state] + 1, {})
            at = state
            while at >= 0 and token not in self._next[at]:
                self._next[at][token] = grown
                at = self.link[at]
            if at < 0:
                self.link[grown] = ROOT_NODE
            else:
                self.link[grown] = self._of_length(at, token, self._next[at][token])
        self._count(grown)
        return grown

    def step(self, state: int, token: int) -> int | None:
        """Return the state reached from this one by a token, or None if no run of the state was followed by it."""
        return self._next[state].get(token)

    def follows(self, state: int) -> dict[int, int]:
        """Return the tokens that have followed the state's longest run, with counts."""
        following = self._next[state].items()
        return {token: max(self._counts[there], 1) for token, there in following}

    def num_following(self, state: int) -> int:
        """Return how many different tokens have followed the state's longest run."""
        return len(self._next[state])

    def _of_length(self, state: int, token: int, there: int) -> int:
        """Return the state of exactly the state's longest run and the token; split it if it stands
        for longer runs too.
        """
        if self.longest[there] == self.longest[state] + 1:
            return there
        split = self._new(self.longest[state] + 1, dict(self._next[there]))
        self.link[split] = self.link[there]
        self._counts[split] = self._counts[there]
        self.link[there] = split
        while state >= 0 and self._next[state].get(token) == there:
            self._next[state][token] = split
            state = self.link[state]
        return split

    def _new(self, longest: int, follows: dict[int, int]) -> int:
        self.longest.append(longest)
        self.link.append(ROOT_NODE)
        self._next.append(follows)
        self._counts.append(0)
        return len(self.longest) - 1

    def _count(self, state: int) -> None:
        """Count one more occurrence of the state's runs and of all shorter runs that end there."""
        for _ in range(MAX_COUNTED):
            if state == ROOT_NODE:
                return
            self._counts[state] += 1
            state = self.link[state]


PYTHON_CAPACITY = 200_000  # tokens of the index in Python, at about 460 bytes each
BELIEVED = 64  # tokens of a context past which a longer one is no surer
SUFFIX_CONTEXTS_TRIED = 4  # contexts of falling length that are asked for children
LONG_RUN = 4  # tokens of a run whose continuation counts as a hit
VAGUE = 256  # different tokens after a context that make it too vague to ask


class SuffixIndex(CursorIndex):
    """The suffix index in Python (NativeIndex is the C++ one), of two automata: a young one and an old one.

    New tokens go to the young one; the old one is only read. When the young one has half of the
    capacity, it replaces the old one, which discards the older half of the texts.

    Args:
        capacity: maximum number of tokens.
    """

    cost_key: ClassVar[dict[str, Any]] = {"tried": SUFFIX_CONTEXTS_TRIED}

    def __init__(self, capacity: int = PYTHON_CAPACITY):
        self._half = max(1, capacity // 2)
        self.num_read = 0
        self.num_hits = 0
        self.reset()

    def reader(self) -> SuffixReader:
        return SuffixReader(self)

    def reset(self) -> None:
        self.young = Generation()
        self.old = Generation()

    def rotate(self) -> None:
        """Replace the old automaton by the young one if that is full, and start an empty young one."""
        if self.young.automaton.num_tokens >= self._half:
            self.old = self.young
            self.young = Generation()

    def lookup_hits(self) -> tuple[int, int]:
        return self.num_read, self.num_hits

    def texts(self) -> Texts:
        texts = [*self.old.texts, *self.young.texts]
        tokens = [token for text in texts for token in text]
        return torch.tensor([len(text) for text in texts], dtype=torch.int64), torch.tensor(
            tokens, dtype=torch.int32
        )


class Generation:
    """An automaton and the texts in it."""

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self.texts: list[list[int]] = []


class SuffixReader:
    """A sequence's state in the young automaton, and the match of its end in the old one."""

    def __init__(self, source: SuffixIndex):
        self._source = source
        self._generation = source.young
        # The text in the young generation, once it is read into.
        self._text: list[int] | None = None
        self._state = ROOT_NODE
        self._match = SuffixCursor(source.old.automaton, ROOT_NODE, 0)

    def read(self, token_ids: list[int]) -> None:
        self._source.rotate()
        self._refresh()
        automaton = self._generation.automaton
        if self._text is None:
            self._text = []
            self._generation.texts.append(self._text)
        self._text += token_ids
        self._source.num_read += len(token_ids)
        for token in token_ids:
            self._source.num_hits += self._is_hit(token)
            self._state = automaton.append(self._state, token)
            self._match = self._match.after(token)

    def _is_hit(self, token: int) -> bool:
        """Return whether the token has followed a run of LONG_RUN tokens or more that ends here."""
        young = self._generation.automaton
        old = self._match
        runs = [state for state in (self._state, young.link[self._state]) if state >= 0]
        if any(
            young.longest[state] >= LONG_RUN and young.step(state, token) is not None
            for state in runs
        ):
            return True
        return old.length >= LONG_RUN and old.automaton.step(old.state, token) is not None

    def cursor(self) -> TwoCursors:
        self._refresh()
        return TwoCursors(self._young_cursor(), self._match)

    def _refresh(self) -> None:
        """Go on in the young automaton; where the sequence was is a match in the old one, if that is still there."""
        if self._generation is self._source.young:
            return
        if self._generation is self._source.old:
            self._begin(self._young_cursor())
        else:
            self._begin(SuffixCursor(self._source.old.automaton, ROOT_NODE, 0))

    def _begin(self, match: SuffixCursor) -> None:
        self._generation = self._source.young
        self._state = ROOT_NODE
        self._match = match
        self._text = None

    def _young_cursor(self) -> SuffixCursor:
        automaton = self._generation.automaton
        return SuffixCursor(automaton, self._state, automaton.longest[self._state])


@dataclass(frozen=True, slots=True)
class SuffixCursor:
    """A state of one automaton: where the text and the drafted path end in it.

    Attributes:
        length: tokens at the end of text and path that this state matches.
    """

    automaton: SuffixAutomaton
    state: int
    length: int

    def after(self, token: int) -> SuffixCursor:
        for state, length in self._contexts():
            there = self.automaton.step(state, token)
            if there is not None:
                return SuffixCursor(self.automaton, there, length + 1)
        return SuffixCursor(self.automaton, ROOT_NODE, 0)

    def informative(self) -> list[tuple[int, dict[int, int]]]:
        """Return the longest contexts that were followed by few different tokens: their lengths and follower counts."""
        worth = (
            (s, n)
            for s, n in self._contexts()
            if n and 0 < self.automaton.num_following(s) <= VAGUE
        )
        return [(n, self.automaton.follows(s)) for s, n in islice(worth, SUFFIX_CONTEXTS_TRIED)]

    def _contexts(self) -> Iterator[tuple[int, int]]:
        """Return the states of ever shorter runs that end here, with their lengths."""
        state = self.state
        length = self.length
        while state >= 0:
            yield state, length
            state = self.automaton.link[state]
            length = self.automaton.longest[state] if state >= 0 else 0


@dataclass(frozen=True, slots=True)
class TwoCursors:
    """A cursor in the young and in the old automaton; children come from the contexts of both."""

    young: SuffixCursor
    old: SuffixCursor

    def children(self, width: int) -> Children:
        contexts = [*self.young.informative(), *self.old.informative()]
        longest = sorted(contexts, key=lambda context: -context[0])[:SUFFIX_CONTEXTS_TRIED]
        return interpolate(((min(n, BELIEVED), follows) for n, follows in longest), width)

    def after(self, token: int) -> TwoCursors:
        return TwoCursors(self.young.after(token), self.old.after(token))


def make_drafter(speculative: DraftSettings, target: TargetModel, weights: None) -> LookupDrafter:
    return lookup_drafter(native_index("suffix") or SuffixIndex(), speculative, target)
