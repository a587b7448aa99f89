"""SeenIds: finds ids that may occur twice, in eight bytes an id.

Does not keep the ids: a suspect is confirmed by looking at the rows again.

    >>> seen = SeenIds()
    >>> for request_id in ("a", "b", "a"):
    ...     seen.add(request_id)
    >>> seen.suspects() == {hash("a")}
    True
"""

from __future__ import annotations

from array import array

import numpy as np


class SeenIds:
    """Hashes of all ids, compared once at the end."""

    def __init__(self) -> None:
        self._hashes = array("q")

    def add(self, request_id: str) -> None:
        self._hashes.append(hash(request_id))

    def suspects(self) -> set[int]:
        """Hashes that more than one id has."""
        hashes = np.sort(np.frombuffer(self._hashes, dtype=np.int64)) if self._hashes else np.empty(0, np.int64)
        return set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
