"""UnrolledAttention: attention of a head in training, within packed documents and over several passes.

    attention = UnrolledAttention(lengths=[4, 3])                # pairs of each packed document
    hidden = head(embeddings, hidden, positions, attention)      # pass 0; likewise each later pass

The head's own modules call it as they call the engine's attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from eagle_ray.attention.metadata import AttentionParams


@dataclass(frozen=True, slots=True)
class _Device:
    """A device's tensor in place of a KV cache, as attention_function reads it."""

    keys: Tensor


class UnrolledAttention:
    """Attention for the consecutive passes of a head, within each of the packed documents.

    The head's own modules call `attend`, as they do in the engine, so training adds no second
    forward of a head. In the first pass each pair attends to its document's pairs up to itself. In
    pass s of a training-time test (EAGLE-3, section 3.2) pair t attends to the keys of pass 0 up to
    t, and to its own key of each later pass.

                 k0 k1 k2 k3 | pass 1      of pass 1, row 2: three keys of pass 0, and its own
        row 2     x  x  x    |  x

    Args:
        lengths: number of pairs of each document.
    """

    def __init__(self, lengths: list[int], device: torch.device | str = "cpu"):
        self._lengths = lengths
        self.cache = _Device(torch.empty(0, device=device))
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(
        self,
        query: Float[Tensor, "1 heads P d"],
        key: Float[Tensor, "1 kv_heads P d"],
        value: Float[Tensor, "1 kv_heads P d"],
        attention: AttentionParams,
    ) -> Float[Tensor, "1 heads P d"]:
        """Return this pass's attention over its own pairs and the pairs of earlier passes."""
        query, key, value = _same_dtype(query, key, value)
        self._keys.append(key)
        self._values.append(value)
        if len(self._keys) == 1:
            return self._attend_causally(query, key, value, attention)

        kv_heads = key.shape[1]
        groups = query.shape[1] // kv_heads
        folded = query[0].unflatten(0, (kv_heads, groups)) * attention.scaling
        first_keys = self._keys[0][0]
        first_values = self._values[0][0]
        own_keys = torch.stack([each[0] for each in self._keys[1:]])
        own_values = torch.stack([each[0] for each in self._values[1:]])

        # Document by document.
        ends = torch.tensor([0, *self._lengths]).cumsum(0).tolist()
        out = []
        for begin, end in pairwise(ends):
            rows = slice(begin, end)
            out.append(
                _attend_unrolled(
                    folded[:, :, rows],
                    first_keys[:, rows],
                    first_values[:, rows],
                    own_keys[:, :, rows],
                    own_values[:, :, rows],
                )
            )
        return torch.cat(out, 2).flatten(0, 1)[None]

    def _attend_causally(
        self,
        query: Float[Tensor, "1 heads P d"],
        key: Float[Tensor, "1 kv_heads P d"],
        value: Float[Tensor, "1 kv_heads P d"],
        attention: AttentionParams,
    ) -> Float[Tensor, "1 heads P d"]:
        """Return the attention of each document's pairs to those up to them."""
        queries = query.split(self._lengths, 2)
        keys = key.split(self._lengths, 2)
        values = value.split(self._lengths, 2)
        gqa = query.shape[1] != key.shape[1]
        scale = attention.scaling
        out = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
            for q, k, v in zip(queries, keys, values, strict=True)
        ]
        return torch.cat(out, 2)


def _attend_unrolled(
    query: Float[Tensor, "kv_heads G n d"],
    key: Float[Tensor, "kv_heads n d"],
    value: Float[Tensor, "kv_heads n d"],
    own_keys: Float[Tensor, "S kv_heads n d"],
    own_values: Float[Tensor, "S kv_heads n d"],
) -> Float[Tensor, "kv_heads G n d"]:
    """Return the attention of one document's rows.

    Args:
        query: scaled; G query heads share a key/value head.
    """
    kv_heads, groups, length, dim = query.shape

    # Scores of the first pass's keys up to each row.
    folded = query.reshape(kv_heads, groups * length, dim)
    scores = torch.bmm(folded, key.transpose(1, 2)).view(kv_heads, groups, length, length)
    is_later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = scores.masked_fill(is_later, float("-inf"))

    # Scores of each row's own keys of the later passes.
    own_scores = torch.einsum("kgnd,sknd->kgns", query, own_keys)

    weights = torch.cat([scores, own_scores], -1).float().softmax(-1).to(value.dtype)
    first_weights, own_weights = weights.split([length, len(own_keys)], -1)
    out = torch.bmm(first_weights.reshape(kv_heads, groups * length, length), value)
    own_out = torch.einsum("kgns,sknd->kgnd", own_weights, own_values)
    return out.view_as(query) + own_out


def _same_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return all three in the values' dtype: under autocast rotation leaves queries and keys in fp32."""
    return query.to(value.dtype), key.to(value.dtype), value
