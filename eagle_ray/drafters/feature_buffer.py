"""FeatureBuffer: the (token, feature) pairs that a draft head has not read yet, a ring for each slot.

While speculation is off the target goes on making pairs; the last `window` of each slot wait here, so that drafting
can begin again with a context.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class FeatureBuffer:
    """window: pairs of each slot that are kept; the pair of column j stands where the pair of j - window stood.

    num_slots: one slot more is there, for the sequences that fill up a batch.
    """

    def __init__(self, num_slots: int, window: int, hidden_size: int, dtype: torch.dtype, device: torch.device | str):
        self.window, self.device = window, device
        self._nowhere = (num_slots + 1) * window  # a last row takes what is not to be kept
        self._tokens = torch.zeros(self._nowhere + 1, dtype=torch.int64, device=device)
        self._features = torch.zeros(self._nowhere + 1, hidden_size, dtype=dtype, device=device)

    def put(
        self,
        slots: Int[Tensor, " R"],
        columns: Int[Tensor, " R"],
        tokens: Int[Tensor, " R"],
        features: Float[Tensor, "R H"],
        valid: Bool[Tensor, " R"],
    ) -> None:
        """Keep the valid pairs; no two of them may be `window` columns of one slot apart."""
        places = torch.where(valid, self._places(slots, columns), self._nowhere)
        self._tokens.index_copy_(0, places, tokens)
        self._features.index_copy_(0, places, features)

    def take(
        self, slots: Int[Tensor, " R"], columns: Int[Tensor, " R"]
    ) -> tuple[Int[Tensor, " R"], Float[Tensor, "R H"]]:
        """The pairs of these columns, which must be among each slot's last `window`."""
        places = self._places(slots, columns)
        return self._tokens[places], self._features[places]

    def _places(self, slots: Int[Tensor, " R"], columns: Int[Tensor, " R"]) -> Int[Tensor, " R"]:
        return slots * self.window + columns % self.window
