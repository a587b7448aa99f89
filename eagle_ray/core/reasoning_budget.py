"""ReasoningBudget: limit the tokens of an output's reasoning by forcing the closing marker.

    budget = ReasoningBudget(512, ReasoningIds(openings=((7,),), closings=((8, 9),)))
    place = budget.after(budget.start, output_ids)      # where the output is in its reasoning
    budget.forced(place)                                # the token that must come next, or None

Like every control, it is a function of the preceding tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

Spellings = tuple[tuple[int, ...], ...]  # token ids of each spelling of a marker


@dataclass(frozen=True, slots=True)
class ReasoningIds:
    """Token ids of the markers around an answer's reasoning.

    Attributes:
        openings: token spellings of the opening marker, with which an answer with reasoning begins;
            empty if the prompt has opened the reasoning.
        closings: token spellings of the closing marker; the first one is forced.
    """

    openings: Spellings
    closings: Spellings


class ReasoningPlace(NamedTuple):
    """The state of an output with respect to its reasoning.

    Attributes:
        start: the whole output, as long as it may be the beginning of an opening marker; None
            within the reasoning.
        num_tokens: number of tokens of the reasoning so far.
        tail: last tokens of the reasoning, in which a closing marker may have begun.
    """

    start: tuple[int, ...] | None
    num_tokens: int = 0
    tail: tuple[int, ...] = ()


class ReasoningBudget:
    """Forces the closing marker once an output's reasoning has max_tokens tokens.

    Attributes:
        max_tokens: maximum tokens of the reasoning.
        start: state before the first token of an output.
    """

    def __init__(self, max_tokens: int, ids: ReasoningIds):
        self.max_tokens = max_tokens
        self._ids = ids
        self._tail_length = max(map(len, ids.closings)) - 1
        self.start = ReasoningPlace(() if ids.openings else None)

    def after(self, place: ReasoningPlace | None, tokens: Iterable[int]) -> ReasoningPlace | None:
        """Return the state after further tokens; None once the reasoning has ended, or if there is none."""
        for token in tokens:
            if place is None:
                return None
            place = self._next(place, token)
        return place

    def forced(self, place: ReasoningPlace | None) -> int | None:
        """Return the token of the closing marker that must follow in this state, or None if none is forced."""
        if place is None or place.start is not None or place.num_tokens < self.max_tokens:
            return None
        closing = self._ids.closings[0]
        tail = place.tail
        i = len(closing) - 1
        while tail[len(tail) - i :] != closing[:i]:  # with nothing of it, i is 0
            i -= 1
        return closing[i]

    def _next(self, place: ReasoningPlace, token: int) -> ReasoningPlace | None:
        """Return the place after one more token."""
        if place.start is not None:
            start = (*place.start, token)
            if start in self._ids.openings:
                return ReasoningPlace(None)
            may_open = any(opening[: len(start)] == start for opening in self._ids.openings)
            return ReasoningPlace(start) if may_open else None
        tail = (*place.tail, token)
        if any(tail[-len(closing) :] == closing for closing in self._ids.closings):
            return None
        tail = tail[-self._tail_length :] if self._tail_length else ()
        return ReasoningPlace(None, place.num_tokens + 1, tail)
