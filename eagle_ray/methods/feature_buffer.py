"""FeatureBuffer: a ring buffer per slot of the (token, feature) pairs that a draft head has not read yet.

While drafts are off, the target keeps producing pairs; the last `window` of each slot are kept here, so drafting can
resume with a context.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class FeatureBuffer:
    """window: pairs kept per slot; position j overwrites j - window. num_slots: plus one slot for padding."""

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
        """Store the valid pairs; no two of them may be `window` positions of one slot apart."""
        places = torch.where(valid, self._places(slots, columns), self._nowhere)
        self._tokens.index_copy_(0, places, tokens)
        self._features.index_copy_(0, places, features)

    def take(
        self, slots: Int[Tensor, " R"], columns: Int[Tensor, " R"]
    ) -> tuple[Int[Tensor, " R"], Float[Tensor, "R H"]]:
        """Return the pairs at these positions, which must be among each slot's last `window`."""
        places = self._places(slots, columns)
        return self._tokens[places], self._features[places]

    def _places(self, slots: Int[Tensor, " R"], columns: Int[Tensor, " R"]) -> Int[Tensor, " R"]:
        return slots * self.window + columns % self.window
