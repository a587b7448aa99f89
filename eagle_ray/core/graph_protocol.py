"""GraphRunner: how a pass of fixed shapes is run again and again, and PaddedInput, what it is given.

    size = replay.batch_size(len(slots))
    inputs = [PaddedInput(slots, (size,), nowhere), PaddedInput(lengths, (size,))]
    drafted = replay.run(("draft", size, depth), function, inputs)

The function takes plain tensors of the padded shapes, reads nothing else that changes but tensors in place, and returns
whatever holds its results; those are overwritten by the next run under the same key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

Kind = tuple[bool, bool, bool, bool]
"""Whether any sequence is sampled, and whether any needs top-p, top-k, min-p."""


@dataclass(frozen=True, slots=True)
class PaddedInput:
    """A tensor that stands in the first corner of a larger one. fill: what is in the rest of that.

    is_fixed: the tensor is never changed in place, so that the one that was given last need not be copied again.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    fill: float = 0
    is_fixed: bool = False


@runtime_checkable
class GraphRunner(Protocol):
    def replays(self, kind: Hashable) -> bool:
        """Return whether passes of this kind, the first part of their keys, may be replayed."""

    def batch_size(self, num_sequences: int) -> int:
        """Return the padded number of sequences of a plain pass."""

    def draft_size(self, num_sequences: int) -> int:
        """Return the padded number of sequences of a draft."""

    def draft_width(self, width: int, num_children: int, num_sequences: int) -> int:
        """Return the padded width of a draft's levels, whose nodes have num_children children each."""

    def num_rows(self, num_rows: int) -> int:
        """Return the padded number of rows of a pass over trees."""

    def num_trees(self, num_sequences: int, num_rows: int) -> int:
        """Return the padded number of trees of a pass of num_rows rows over trees, of which each has at least one."""

    def num_nodes(self, num_nodes: int) -> int:
        """Return the padded number of nodes per tree."""

    def context(self, longest: int) -> int:
        """Return the padded context length, in tokens, for a longest sequence of `longest` tokens."""

    def sampling_kind(self, kind: Kind) -> Kind:
        """Return the kind of sampling that a pass is recorded for; it serves sequences of the given kind."""

    def has(self, key: tuple[Hashable, ...]) -> bool:
        """Return whether a pass with this key is recorded."""

    def record(self, key: tuple[Hashable, ...], function: Callable[..., Any], inputs: Sequence[PaddedInput]) -> bool:
        """Make what `run` replays, without running it; return whether it can be replayed."""

    def run(self, key: tuple[Hashable, ...], function: Callable[..., Any], inputs: Sequence[PaddedInput]) -> Any:
        """Return the function's results for these inputs.

        Under one key the function must do the same for inputs of the same padded shapes.
        """
