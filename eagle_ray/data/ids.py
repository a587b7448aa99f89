"""Ids as digests: sixteen bytes stand for an id, so that a million of them take sixteen megabytes and not two hundred.

Two ids share a digest by chance once some 10^19 have been seen. Does not know rows, files or when an id is done.

    >>> noted = NotedIds()
    >>> for request_id in ("b", "a", "b"):
    ...     noted.add(request_id)
    >>> noted.twice() == digests(["b"])
    array([ True])
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

SIZE = 16  # bytes
DIGEST = np.dtype(f"S{SIZE}")
Digests = np.ndarray  # one-dimensional, of DIGEST
NONE = np.empty(0, DIGEST)


def digest(request_id: str) -> bytes:
    return hashlib.blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=SIZE).digest()


def digests(ids: Iterable[str]) -> Digests:
    """In the order of the ids."""
    return np.frombuffer(b"".join(map(digest, ids)), DIGEST)


def among(ids: Digests, known: Digests) -> np.ndarray:
    """For each id whether it is known; `known` is sorted."""
    if not len(known):
        return np.zeros(len(ids), bool)
    places = np.searchsorted(known, ids)
    return known[np.minimum(places, len(known) - 1)] == ids


class NotedIds:
    """Ids one after the other."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, request_id: str) -> None:
        self._bytes += digest(request_id)

    def all(self) -> Digests:
        """In the order in which they came."""
        return np.frombuffer(bytes(self._bytes), DIGEST)

    def twice(self) -> Digests:
        """Those that came more than once, sorted."""
        ids, counts = np.unique(self.all(), return_counts=True)
        return ids[counts > 1]
