"""CrashTracker: which rows each worker is answering, and how many workers died over each of them.

A death has many causes and a row is one of them: a prompt that takes the last of a device's memory, tokens that a
kernel cannot bear. Nothing tells which of the rows in flight it was, so each gets the blame of one death. Rows that
carry blame are answered in ever smaller company (``room_for``), until the one at fault dies alone and the others are
cleared; one that was there MOST_DEATHS times is answered no more.

    >>> deaths = Deaths()
    >>> deaths.take("actor 1", ["a", "b"])
    {}
    >>> deaths.buried("actor 1", "out of memory")
    >>> deaths.take("actor 1", ["b", "c"])
    {'b': Blame(deaths=1, reason='out of memory')}
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

MOST_DEATHS = 4  # two of them alone


@dataclass(frozen=True, slots=True)
class CrashRecord:
    """How many workers died while they answered one row, and what was last said of it."""

    deaths: int
    reason: str

    @property
    def is_final(self) -> bool:
        return self.deaths >= MOST_DEATHS


@dataclass(slots=True)
class CrashTracker:
    """The book of one job. worker: a name that outlives the worker's process, for it is the next one that tells."""

    _answering: dict[str, set[str]] = field(default_factory=dict)
    _blamed: dict[str, CrashRecord] = field(default_factory=dict)

    def take(self, worker: str, ids: Iterable[str]) -> dict[str, CrashRecord]:
        """The worker is about to answer these rows together, but for those with blame, which are returned."""
        ids = list(ids)
        blamed = {id: self._blamed[id] for id in ids if id in self._blamed}
        self.risk(worker, (id for id in ids if id not in blamed))
        return blamed

    def risk(self, worker: str, ids: Iterable[str]) -> None:
        """The worker is about to answer these rows, whatever they carry."""
        self._answering.setdefault(worker, set()).update(ids)

    def answered(self, worker: str, ids: Iterable[str]) -> None:
        """These rows did no harm: their blame is forgotten."""
        for id in ids:
            self._answering.get(worker, set()).discard(id)
            if id in self._blamed and not self._blamed[id].is_final:
                del self._blamed[id]

    def buried(self, worker: str, reason: str) -> None:
        """The worker died: whatever it was answering carries one death more."""
        for id in self._answering.pop(worker, ()):
            before = self._blamed.get(id)
            self._blamed[id] = CrashRecord(1 + (before.deaths if before else 0), reason)


def room_for(deaths: int, slots: int) -> int:
    """How many rows with so many deaths behind them an engine of `slots` takes together: a quarter, then one.

    A quarter first, because most deaths are accidents, and so soon over.
    """
    return max(1, slots // 4) if deaths == 1 else 1
