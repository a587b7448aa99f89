"""WaitingQueue: the order in which sequences get slots. Outputs do not depend on it.

FirstComeQueue is first come, first served: the order of an endpoint. ThroughputQueue is for work
whose latency does not matter. It works on the window of sequences that were added and have no slot
yet, and has two phases:

    filling    the oldest sequence goes first, and with it all that share at least half of their prompt with it, so that
               the blocks of the shared prefix are computed once and used while they are cached
    draining   a quarter of the largest window is left: the input is at its end, or comes too slowly. The group
               with the longest expected output goes first, so that the last slots finish at about the same time

Longest first while the window is filled would gain nothing and would hold back the shortest row of
every batch of the job, so that no batch is finished and none can follow (`jobs/results/order.md`).
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from eagle_ray.core.sequence import Sequence
from eagle_ray.kv.prefix_cache import split_blocks

# Share of the largest window at which draining begins. Four workers took 1.5 % longer with 0.5 and
# 2.2 % less with this one.
DRAINING_SHARE = 0.25
PRIOR_SEQUENCES = 2  # finished sequences of a category that count as much as the mean of all
# Sequences that are ordered at once while draining: ordering costs time for each that waits.
ORDERED_AT_ONCE = 32
HASH_BYTES = 8
HASH_OFFSET = 2**63  # added to hashes, which are signed, so that bytes compare as they do
MAX_PASSED_WINDOWS = 2  # sequences that may pass the oldest one, in largest windows


class WaitingQueue(Protocol):
    """Protocol of the queue of sequences without a slot, which decides their order."""

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence."""

    def put_back(self, sequence: Sequence) -> None:
        """Add a preempted sequence at the head."""

    def first(self) -> Sequence:
        """Return the sequence that gets the next slot. The queue must not be empty."""

    def pop(self) -> Sequence:
        """Remove and return the first sequence."""

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, which must be in the queue."""

    def observe(self, finished: Sequence) -> None:
        """Update the order's estimates from a finished sequence."""

    def __len__(self) -> int: ...

    def __contains__(self, sequence: object) -> bool: ...

    def __iter__(self) -> Iterator[Sequence]: ...


class FirstComeQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._waiting: deque[Sequence] = deque()

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        self._waiting.appendleft(sequence)

    def first(self) -> Sequence:
        return self._waiting[0]

    def pop(self) -> Sequence:
        return self._waiting.popleft()

    def remove(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)

    def observe(self, finished: Sequence) -> None:
        pass

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._waiting

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)


class LengthEstimate:
    """Expected output tokens: the mean over finished sequences of the category, or over all if the category has few."""

    def __init__(self) -> None:
        self._all = _Mean()
        self._by_category: dict[str, _Mean] = {}

    def observe(self, finished: Sequence) -> None:
        for mean in (self._all, self._by_category.setdefault(finished.category, _Mean())):
            mean.total += len(finished.output_ids)
            mean.count += 1

    def expected(self, sequence: Sequence) -> float:
        """Return the expected output tokens of a sequence, at most its max_tokens.

        They equal max_tokens if nothing else can end the output, or if no sequence has finished.
        """
        ends_at_limit = sequence.sampling.ignore_eos and sequence.stop_check is None
        if ends_at_limit or not self._all.count:
            return sequence.max_tokens

        # The mean of all counts as PRIOR_SEQUENCES sequences of the category.
        usual = self._all.total / self._all.count
        own = self._by_category.get(sequence.category, _Mean())
        expected = (own.total + PRIOR_SEQUENCES * usual) / (own.count + PRIOR_SEQUENCES)
        return min(sequence.max_tokens, expected)


@dataclass(slots=True)
class _Mean:
    total: int = 0
    count: int = 0


@dataclass(slots=True, eq=False)
class _Entry:
    """A waiting sequence.

    Attributes:
        blocks: hashes of the prompt's full blocks, HASH_BYTES each, which compare as the hashes do.
        number: number of sequences that were added before this one.
        num_before: number of sequences that had left the queue when this one was added.
    """

    sequence: Sequence
    blocks: bytes
    number: int
    num_before: int

    @property
    def key(self) -> tuple[bytes, int]:
        return self.blocks, self.number


class PrefixGroups:
    """Waiting entries grouped by a shared prompt prefix.

    Entries are sorted by their blocks, so that those that share most are neighbours, and a group is
    a run of entries. Removing an entry does not split its group: the entries before and after it
    stay together until the first `update` after an addition.
    """

    def __init__(self) -> None:
        self._sorted: list[_Entry] = []
        self._joined: set[_Entry] = set()  # entries in the group of the entry before them
        self._unchecked: set[_Entry] = set()  # entries whose predecessor has left
        self._has_new = False  # an entry was added since the last update

    def add(self, entry: _Entry) -> None:
        self._has_new = True
        place = self._place(entry)
        self._sorted.insert(place, entry)
        self._check(place)
        if place + 1 < len(self._sorted):
            self._check(place + 1)

    def remove(self, entry: _Entry) -> None:
        place = self._place(entry)
        del self._sorted[place]
        if place < len(self._sorted):
            after = self._sorted[place]
            self._unchecked.add(after)
            if entry not in self._joined:
                self._joined.discard(after)
        self._joined.discard(entry)
        self._unchecked.discard(entry)

    def update(self) -> None:
        """Group all entries if some were added since the last time."""
        if self._has_new:
            for entry in self._unchecked:
                self._check(self._place(entry))
            self._unchecked.clear()
            self._has_new = False

    def group_of(self, entry: _Entry) -> list[_Entry]:
        """Return the entries of a group, oldest first."""
        first = last = self._place(entry)
        while self._sorted[first] in self._joined:
            first -= 1
        while last + 1 < len(self._sorted) and self._sorted[last + 1] in self._joined:
            last += 1
        return sorted(self._sorted[first : last + 1], key=lambda member: member.number)

    def _check(self, place: int) -> None:
        """Note whether an entry belongs to the group of the one before it."""
        entry = self._sorted[place]
        if place and _share_half(self._sorted[place - 1].blocks, entry.blocks):
            self._joined.add(entry)
        else:
            self._joined.discard(entry)

    def _place(self, entry: _Entry) -> int:
        return bisect_left(self._sorted, entry.key, key=lambda other: other.key)


class ThroughputQueue:
    """A queue for throughput: groups with a shared prefix first, and the longest expected outputs first at the end.

    The module's docstring says more.

    Args:
        block_size: tokens of a block of the prefix cache.
    """

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._lengths = LengthEstimate()
        self._preempted: deque[Sequence] = deque()
        self._entries: dict[Sequence, _Entry] = {}  # oldest first
        self._turn: deque[Sequence] = deque()  # the sequences that go next
        self._groups = PrefixGroups()
        self._largest = 0
        self._num_added = 0
        self._num_popped = 0

    def add(self, sequence: Sequence) -> None:
        entry = _Entry(
            sequence, self._hashes(sequence.prompt_ids), self._num_added, self._num_popped
        )
        self._num_added += 1
        self._entries[sequence] = entry
        self._groups.add(entry)
        self._largest = max(self._largest, len(self._entries))

    def put_back(self, sequence: Sequence) -> None:
        self._preempted.appendleft(sequence)

    def first(self) -> Sequence:
        if self._preempted:
            return self._preempted[0]
        if not self._turn:
            self._turn.extend(self._next_turn())
        return self._turn[0]

    def pop(self) -> Sequence:
        sequence = self.first()
        self.remove(sequence)
        self._num_popped += 1
        return sequence

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._preempted:
            self._preempted.remove(sequence)
            return
        self._groups.remove(self._entries.pop(sequence))
        if sequence in self._turn:
            self._turn.remove(sequence)

    def observe(self, finished: Sequence) -> None:
        self._lengths.observe(finished)

    def __len__(self) -> int:
        return len(self._preempted) + len(self._entries)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._entries or sequence in self._preempted

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._preempted
        yield from self._entries

    def _next_turn(self) -> list[Sequence]:
        """Return the waiting sequences to admit next, at least one. Later arrivals wait for a later turn."""
        self._groups.update()
        oldest, entry = next(iter(self._entries.items()))
        is_overdue = self._num_popped - entry.num_before > MAX_PASSED_WINDOWS * self._largest
        is_filling = len(self._entries) > DRAINING_SHARE * self._largest
        if is_overdue or is_filling:
            return self._waiting_of(oldest)

        turn: list[Sequence] = []
        taken: set[Sequence] = set()
        for sequence in self._longest_first(self._entries):
            if len(turn) >= ORDERED_AT_ONCE:
                break
            if sequence not in taken:
                turn += self._longest_first(self._waiting_of(sequence))
                taken.update(turn)
        return turn

    def _waiting_of(self, sequence: Sequence) -> list[Sequence]:
        """Return the sequences of a group that still wait, oldest first."""
        return [entry.sequence for entry in self._groups.group_of(self._entries[sequence])]

    def _longest_first(self, sequences: list[Sequence] | dict[Sequence, _Entry]) -> list[Sequence]:
        return sorted(sequences, key=self._lengths.expected, reverse=True)

    def _hashes(self, prompt_ids: list[int]) -> bytes:
        hashes = [hash(block) + HASH_OFFSET for block in split_blocks(prompt_ids, self._block_size)]
        return struct.pack(f">{len(hashes)}Q", *hashes)


def _share_half(a: bytes, b: bytes) -> bool:
    """Return whether two prompts share at least half of the longer one's blocks."""
    num_blocks = max(len(a), len(b)) // HASH_BYTES
    half = (num_blocks + 1) // 2 * HASH_BYTES
    return half > 0 and a[:half] == b[:half]
