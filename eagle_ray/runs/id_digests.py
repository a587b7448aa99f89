"""Ids as digests: sixteen bytes per id, so a million ids take sixteen megabytes instead of two hundred.

A chance collision is expected only after some 10^19 ids.

    >>> duplicates(np.sort(digests(["b", "a", "b"]))) == digests(["b"])
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
    """Return the digests in the order of the ids."""
    return np.frombuffer(b"".join(map(digest, ids)), DIGEST)


def index_of(ids: Digests, known: Digests) -> np.ndarray:
    """Return for each id its index in `known`, which is sorted, or -1."""
    found = np.full(len(ids), -1)
    for start in range(0, len(ids) if len(known) else 0, AT_ONCE):
        some = ids[start : start + AT_ONCE]
        nearest = np.minimum(np.searchsorted(known, some), len(known) - 1)
        found[start : start + AT_ONCE] = np.where(known[nearest] == some, nearest, -1)
    return found


def isin(ids: Digests, known: Digests) -> np.ndarray:
    """Return for each id whether it is in `known`, which is sorted."""
    return index_of(ids, known) >= 0


def duplicates(ids: Digests) -> Digests:
    """Return those of the sorted ids that occur more than once."""
    return np.unique(ids[1:][ids[1:] == ids[:-1]])
