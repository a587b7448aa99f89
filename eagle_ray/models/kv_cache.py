"""KVCache: the keys and values of S slots, one sequence a slot, in one dense tensor.

Verbs: write, read, commit. Nobody else indexes a slot. A pass may write rows past a slot's committed tokens freely:
what is not committed is overwritten by the next pass, so a rejected tree leaves no trace.
Does not know which slots are in use, nor what the tokens were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.speculative.verify import VerifyResult


@dataclass(frozen=True, slots=True)
class BatchSlots:
    """The slots of B sequences and how many tokens each of them holds.

    index: the same slots as a slice where they are neighbours (a read is then a view), else the tensor.
    host_slots, host_lengths: the same numbers on the host.
    """

    slots: Int[Tensor, " B"]
    lengths: Int[Tensor, " B"]
    index: slice | Int[Tensor, " B"]
    host_slots: list[int]
    host_lengths: list[int]

    @classmethod
    def of(cls, slots: list[int], lengths: list[int], device: torch.device | str = "cpu") -> BatchSlots:
        tensor = torch.tensor(slots, dtype=torch.int64, device=device)
        first = slots[0]
        neighbours = slots == list(range(first, first + len(slots)))
        index = slice(first, first + len(slots)) if neighbours else tensor
        on_device = torch.tensor(lengths, dtype=torch.int64, device=device)
        return cls(tensor, on_device, index, slots, lengths)

    @property
    def min_length(self) -> int:
        return min(self.host_lengths)

    @property
    def max_length(self) -> int:
        return max(self.host_lengths)

    def select(self, members: Sequence[int]) -> BatchSlots:
        """The same for some of the sequences."""
        slots, lengths = ([values[m] for m in members] for values in (self.host_slots, self.host_lengths))
        return BatchSlots.of(slots, lengths, self.slots.device)

    def advanced(self, columns: int) -> BatchSlots:
        """The same slots with `columns` more tokens in each."""
        return replace(self, lengths=self.lengths + columns, host_lengths=[n + columns for n in self.host_lengths])


class KVCache:
    """Keys and values [layers, slots, capacity + 1, kv_heads, head_dim]; the last column takes padding rows.

    capacity: tokens a slot can hold, tree rows included.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        shape = (num_layers, num_slots, capacity + 1, num_kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.num_slots, self.capacity = num_slots, capacity
        self._flat = self.keys.flatten(1, 2), self.values.flatten(1, 2)  # views: [layers, cells, kv_heads, head_dim]
        self._flat_of = list(zip(*(flat.unbind(0) for flat in self._flat), strict=True))  # the same by layer
        self._slots_of = list(zip(self.keys.unbind(0), self.values.unbind(0), strict=True))

    def cells(self, slots: int | Int[Tensor, "..."], columns: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Where `write` stores rows of (slot, column), broadcast; column `capacity` is never read."""
        return slots * (self.capacity + 1) + columns

    def write(
        self,
        layer: int,
        cells: Int[Tensor, " R"],
        keys: Float[Tensor, "kv_heads R head_dim"],
        values: Float[Tensor, "kv_heads R head_dim"],
    ) -> None:
        """Store one row per cell."""
        flat_keys, flat_values = self._flat_of[layer]
        flat_keys.index_copy_(0, cells, keys.transpose(0, 1))
        flat_values.index_copy_(0, cells, values.transpose(0, 1))

    def read(
        self, layer: int, batch: BatchSlots, num_columns: int
    ) -> tuple[Float[Tensor, "B kv_heads T head_dim"], Float[Tensor, "B kv_heads T head_dim"]]:
        """The first num_columns columns of each sequence's slot; a view where the slots are neighbours."""
        keys, values = self._slots_of[layer]
        keys, values = keys[batch.index, :num_columns], values[batch.index, :num_columns]
        return keys.transpose(1, 2), values.transpose(1, 2)

    def commit(self, batch: BatchSlots, result: VerifyResult) -> None:
        """Move the accepted path of each tree to the columns right after its committed tokens, in every layer.

        Tree node i was written at column length + i; the j-th accepted node belongs at length + j <= length + i.
        """
        longest = result.accepted_nodes.shape[1]
        if longest == 1:
            return  # a root alone already stands where it belongs
        offset = torch.arange(longest, device=batch.slots.device)
        moved = torch.where(result.accepted_nodes >= 0, result.accepted_nodes, offset)
        first = self.cells(batch.slots, batch.lengths)[:, None]
        source, target = (first + moved).flatten(), (first + offset).flatten()
        for flat in self._flat:
            flat.index_copy_(1, target, flat.index_select(1, source))
