"""Ids as digests: sixteen bytes stand for an id, so that a million of them take sixteen megabytes and not two hundred.

Two ids share a digest by chance once some 10^19 have been seen.

    >>> noted = DigestBuffer()
    >>> for request_id in ("b", "a", "b"):
    ...     noted.add(request_id)
    >>> repeated(noted.sorted(3)) == digests(["b"])
    array([ True])
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

SIZE = 16  # bytes
DIGEST = np.dtype(f"S{SIZE}")
Digests = np.ndarray  # one-dimensional, of DIGEST
EMPTY = np.empty(0, DIGEST)
AT_ONCE = 1 << 16  # ids per look-up, so that its memory does not grow with the job


def digest(request_id: str) -> bytes:
    return hashlib.blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=SIZE).digest()


def digests(ids: Iterable[str]) -> Digests:
    """In the order of the ids."""
    return np.frombuffer(b"".join(map(digest, ids)), DIGEST)


def index_of(ids: Digests, known: Digests) -> np.ndarray:
    """For each id its place in `known`, which is sorted; -1 for one that is not there."""
    found = np.full(len(ids), -1)
    for start in range(0, len(ids) if len(known) else 0, AT_ONCE):
        some = ids[start : start + AT_ONCE]
        nearest = np.minimum(np.searchsorted(known, some), len(known) - 1)
        found[start : start + AT_ONCE] = np.where(known[nearest] == some, nearest, -1)
    return found


def isin(ids: Digests, known: Digests) -> np.ndarray:
    """For each id whether it is known; `known` is sorted."""
    return index_of(ids, known) >= 0


def duplicates(ids: Digests) -> Digests:
    """Those of the sorted ids that occur more than once."""
    return np.unique(ids[1:][ids[1:] == ids[:-1]])


class DigestBuffer:
    """Ids one after the other, and then no more: they are sorted where they lie, so that there is no second of them."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, request_id: str) -> None:
        self._bytes += digest(request_id)

    def sorted(self, num_first: int) -> Digests:
        """The first that came."""
        del self._bytes[num_first * SIZE :]
        ids = np.frombuffer(self._bytes, DIGEST)
        ids.sort()
        return ids
