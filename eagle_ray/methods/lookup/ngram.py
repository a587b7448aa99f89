"""NgramIndex: continuations of the last few tokens earlier in the same sequence (prompt lookup, Saxena 2023).

Outputs often repeat their prompts, or themselves: names, code, quotations. Every n-gram of a sequence is counted
with the token after it; if several tokens have followed, all are proposed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from eagle_ray.config import SpeculativeConfig
from eagle_ray.methods.calibration import Calibration
from eagle_ray.methods.lookup.drafter import Children, LookupDrafter, interpolate
from eagle_ray.models.target import TargetModel

LONGEST = 4  # tokens of a context
Counts = dict[tuple[int, ...], dict[int, int]]  # of each n-gram: the tokens that followed it, and how often


class NgramIndex:
    """Sequences share nothing."""

    cost_key: ClassVar[dict[str, Any]] = {"longest": LONGEST}

    def reader(self) -> NgramReader:
        return NgramReader()

    def reset(self) -> None:
        pass


class NgramReader:
    """The n-grams of one sequence."""

    def __init__(self) -> None:
        self._counts: Counts = {}
        self._tail: tuple[int, ...] = ()

    def read(self, token_ids: list[int]) -> None:
        self._tail = count(self._counts, self._tail, token_ids)

    def cursor(self) -> NgramCursor:
        return NgramCursor(self._counts, self._tail)


def count(counts: Counts, tail: tuple[int, ...], token_ids: Iterable[int]) -> tuple[int, ...]:
    """Count the token after each n-gram that ends at the tail."""
    for token in token_ids:
        for start in range(len(tail)):
            follows = counts.setdefault(tail[start:], {})
            follows[token] = follows.get(token, 0) + 1
        tail = (*tail, token)[-LONGEST:]
    return tail


@dataclass(frozen=True, slots=True)
class NgramCursor:
    """counts: of the sequence. tail: its last tokens, drafted ones included."""

    counts: Counts
    tail: tuple[int, ...]

    def children(self, width: int) -> Children:
        contexts = (self.tail[start:] for start in range(len(self.tail)))
        return interpolate(((len(c), self.counts[c]) for c in contexts if c in self.counts), width)

    def after(self, token: int) -> NgramCursor:
        return NgramCursor(self.counts, (*self.tail, token)[-LONGEST:])


def make_drafter(speculative: SpeculativeConfig, target: TargetModel, weights: None) -> LookupDrafter:
    return LookupDrafter(NgramIndex(), Calibration(speculative.max_depth))
