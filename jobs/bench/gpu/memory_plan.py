"""KVRoom: how many sequences and KV positions fit in addition to a shape's weights and passes.

    KVRoom.of(LLAMA_8B, itemsize=2, batches=[1, 256], contexts=[1024, 16384], free=60 * GIB)

Of the memory that is free once the weights are there: the largest pass twice, run by itself and recorded in a graph,
and RESERVE. What is left holds the caches.
"""

from __future__ import annotations

from dataclasses import dataclass

from jobs.bench.embedding_map import ModelShape
from jobs.bench.gpu.device import GIB
from jobs.bench.gpu.harness import LARGEST

OWN = 448  # tokens of a sequence without its context: prompt and output
TREE = 128  # columns of a slot that its trees may write
RESERVE = 2 * GIB  # CUDA's and Triton's own, workspaces of matrix products, and what fragments


@dataclass(frozen=True, slots=True)
class KVRoom:
    """slots: sequences at once. columns: of the pool. kept: bytes left free for passes, None if not counted."""

    slots: int
    columns: int
    kept: int | None = None

    @property
    def aside(self) -> int:
        """Columns that contexts may have."""
        return self.columns - own_columns(self.slots)

    @classmethod
    def of(cls, shape: ModelShape, itemsize: int, batches: list[int], contexts: list[int], free: int | None) -> KVRoom:
        """The largest batch that fits behind the first context, with twice the room for contexts if it is there.

        free: bytes without the weights; None is enough. Raises MemoryError where not even the smallest batch fits.
        """
        for slots in sorted(batches, reverse=True):
            own, wanted = own_columns(slots), max(contexts[0] * slots, 2 * contexts[-1])
            if free is None:
                return cls(slots, own + wanted)
            kept = 2 * pass_bytes(shape, itemsize, slots * LARGEST.num_nodes) + RESERVE
            room = int((free - kept) / column_bytes(shape, itemsize))
            if room >= own + contexts[0] * slots:
                return cls(slots, min(own + 2 * wanted, room), kept)
        raise MemoryError(
            f"{free / GIB:.1f} GiB are free, {slots} sequences need {kept / GIB:.1f} GiB in addition to their keys"
        )


def own_columns(slots: int) -> int:
    return slots * (OWN + TREE)


def column_bytes(shape: ModelShape, itemsize: int) -> float:
    """One token's keys and values, the target's and the head's."""
    return shape.kv_numbers * itemsize * (1 + 1 / shape.num_layers)


def weight_bytes(shape: ModelShape, itemsize: int) -> int:
    """Of target and head, the token embedding included."""
    return itemsize * (shape.pass_weights + shape.draft_weights + shape.hidden_size * shape.vocab_size)


def pass_bytes(shape: ModelShape, itemsize: int, rows: int) -> int:
    """The tensors of a pass at its widest: logits, in fp32 too, with what one layer makes of the rows."""
    logits = shape.vocab_size * (itemsize + 4)
    layer = itemsize * (3 * shape.intermediate_size + 8 * shape.hidden_size)
    return rows * (logits + layer)
