"""TextHistogram: compare the recent tokens of two batches, to detect that the texts have changed."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from eagle_ray.core.decode_batch import DecodeBatch

NUM_ID_BINS = 1024  # bins of token ids
NUM_TOKENS = 256  # the last tokens of the batch, which are counted
# Histograms of SmolLM2's tokens agree by 0.41 to 0.9 for one task of Spec-Bench, by 0.3 to 0.47 for
# two tasks, by 0.2 to 0.35 for prose and code, and by 0.16 for English and Finnish.
MIN_AGREEMENT = 0.35


class TextHistogram:
    """Frequencies of the recent tokens of a batch, to detect that the texts have changed.

    Ids share NUM_ID_BINS bins. Two histograms agree by the Bhattacharyya coefficient: 1 if they are
    equal.
    """

    def __init__(self) -> None:
        self._reference: Float[np.ndarray, " bins"] | None = None  # square roots of frequencies

    def remember(self, batch: DecodeBatch) -> None:
        """Store a batch's histogram, which later batches are compared with."""
        self._reference = _root_frequencies(batch)

    def have_changed(self, batch: DecodeBatch) -> bool:
        """Return whether the batch's texts differ clearly from the stored ones."""
        if self._reference is None:
            return False
        return float(self._reference @ _root_frequencies(batch)) < MIN_AGREEMENT


def _root_frequencies(batch: DecodeBatch) -> Float[np.ndarray, " bins"]:
    """Return the square roots of the frequencies of a batch's last tokens."""
    each = -(-NUM_TOKENS // len(batch))
    ids: list[int] = []
    for sequence in batch.sequences:
        outputs = sequence.output_ids[-each:]
        lacking = each - len(outputs)
        if lacking:
            ids += sequence.prompt_ids[-lacking:]
        ids += outputs
    counts = np.bincount(np.asarray(ids, dtype=np.int64) % NUM_ID_BINS, minlength=NUM_ID_BINS)
    return np.sqrt(counts / max(len(ids), 1))
