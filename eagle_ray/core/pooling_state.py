"""PoolingState: how far the embedding of a sequence has come, while its prompt is computed in chunks."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(slots=True)
class PoolingState:
    """Progress of one sequence's embedding.

    Attributes:
        dimensions: size of the requested vector.
        first: position of the first token that counts; earlier tokens are a prompt that the mean
            leaves out.
        needs_all_rows: whether pooling reads every token's hidden state, so that no prefix may come
            from the cache.
        blocks: sum over all whole blocks of rows so far, in fp32; None before the first.
        rest: rows after the last whole block, not summed yet.
        vector: the embedding, once the prompt has ended: fp32, on the host.
    """

    dimensions: int
    first: int = 0
    needs_all_rows: bool = False
    blocks: Float[Tensor, " H"] | None = None
    rest: Float[Tensor, "r H"] | None = None
    vector: Float[Tensor, " D"] | None = None
