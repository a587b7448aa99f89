"""PoolingState: how far the embedding of a sequence has come, while its prompt is computed in chunks."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(slots=True)
class PoolingState:
    """The part of one sequence in its embedding.

    Attributes:
        dimensions: numbers of the vector that is wanted.
        first: position of the first token that counts; those before are a prompt that is left out.
        needs_all_rows: the pooling reads the state of every token, so none is taken from the prefix
            cache.
        blocks: sum of the whole blocks of rows so far, in fp32; None before the first.
        rest: rows after the last whole block.
        vector: the embedding, once the prompt has ended: fp32, on the host.
    """

    dimensions: int
    first: int = 0
    needs_all_rows: bool = False
    blocks: Float[Tensor, " H"] | None = None
    rest: Float[Tensor, "r H"] | None = None
    vector: Float[Tensor, " D"] | None = None
