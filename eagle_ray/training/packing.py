"""Documents and packed batches: token ids of several documents in one row, without padding.

    ids         <bos> <user> question <end> <assistant> answer <end> | <bos> <user> ...
    is_answer     0     0       0       0        0         1      1  |   0      0
    lengths     [------------------------ 7 ------------------------, ...

A document is never split. Positions begin at 0 in each document, and attention stays within it, as in the engine:
UnrolledAttention is what the modules of a head in training attend by.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.attention.metadata import AttentionParams

MIN_DOCUMENT_LENGTH = 3  # tokens: the first pair of a head predicts the third


@dataclass(frozen=True, slots=True)
class Document:
    """One text as token ids.

    Attributes:
        ids: its tokens.
        is_answer: whether the loss counts the prediction of each token.
    """

    ids: list[int]
    is_answer: list[bool]

    def __len__(self) -> int:
        return len(self.ids)

    def truncate(self, length: int) -> Document:
        """Return the first `length` tokens."""
        return Document(self.ids[:length], self.is_answer[:length])


@dataclass(frozen=True)
class PackedBatch:
    """Documents one after another in R rows.

    Attributes:
        indices: number of each document in the data set.
        lengths: tokens of each document; they sum to R.
    """

    ids: Int[Tensor, " R"]
    is_answer: Bool[Tensor, " R"]
    indices: list[int]
    lengths: list[int]

    @classmethod
    def of(
        cls, documents: Sequence[Document], indices: Iterable[int], device: torch.device | str = "cpu"
    ) -> PackedBatch:
        """Return the documents with these indices, in this order."""
        indices = list(indices)
        chosen = [documents[i] for i in indices]
        ids = torch.tensor([token for document in chosen for token in document.ids], dtype=torch.int64)
        is_answer = torch.tensor([flag for document in chosen for flag in document.is_answer], dtype=torch.bool)
        return cls(ids.to(device), is_answer.to(device), indices, [len(document) for document in chosen])

    @cached_property
    def pairs(self) -> PackedPairs:
        return PackedPairs.of(self)


@dataclass(frozen=True)
class PackedPairs:
    """The (next token, feature) pairs of a batch that a head reads: P = R minus one for each document.

    Attributes:
        rows: row of each pair's feature; its token is in the row after it.
        positions: positions of the features, from 0 in each document.
        remaining: rows of the pair's document after the feature's row.
        lengths: pairs of each document.
    """

    rows: Int[Tensor, " P"]
    positions: Int[Tensor, " P"]
    remaining: Int[Tensor, " P"]
    lengths: list[int]
    is_answer: Bool[Tensor, " R"]

    @classmethod
    def of(cls, batch: PackedBatch) -> PackedPairs:
        device, start = batch.ids.device, 0
        rows, positions, remaining = [], [], []
        for length in batch.lengths:
            position = torch.arange(length - 1)
            rows.append(start + position)
            positions.append(position)
            remaining.append(length - 1 - position)
            start += length
        return cls(
            rows=torch.cat(rows).to(device),
            positions=torch.cat(positions).to(device),
            remaining=torch.cat(remaining).to(device),
            lengths=[length - 1 for length in batch.lengths],
            is_answer=batch.is_answer,
        )

    def rows_after(self, distance: int) -> Int[Tensor, " P"]:
        """Return the row `distance` after each feature's, or the document's last row if it ends before."""
        return self.rows + self.remaining.clamp(max=distance)

    def predicts_answer(self, distance: int) -> Bool[Tensor, " P"]:
        """Return whether the token `distance` rows after the feature exists and belongs to an answer."""
        return (self.remaining >= distance) & self.is_answer[self.rows_after(distance)]


def count_answer_tokens(documents: Iterable[Document]) -> int:
    return sum(sum(document.is_answer) for document in documents)


@dataclass(frozen=True, slots=True)
class _Device:
    """What attention_function asks of a KV cache: the device of its keys."""

    keys: Tensor


class UnrolledAttention:
    """Attention of the passes of a head, which are made one after another, within each of the packed documents.

    The head's own modules call `attend`, as they do in the engine, so training adds no second forward of a head. In the
    first pass each pair attends to its document's pairs up to itself. In pass s of a training-time test (EAGLE-3,
    section 3.2) pair t attends to the keys of pass 0 up to t, and to its own key of each later pass.

                 k0 k1 k2 k3 | pass 1      of pass 1, row 2: three keys of pass 0, and its own
        row 2     x  x  x    |  x

    Args:
        lengths: pairs of each document.
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
        query, key, value = _same_dtype(query, key, value)
        self._keys.append(key)
        self._values.append(value)
        if len(self._keys) == 1:
            return self._attend_causally(query, key, value, attention)
        groups = query.shape[1] // key.shape[1]
        folded = query[0].unflatten(0, (key.shape[1], groups)) * attention.scaling
        own_keys = torch.stack([each[0] for each in self._keys[1:]])
        own_values = torch.stack([each[0] for each in self._values[1:]])
        ends = torch.tensor([0, *self._lengths]).cumsum(0).tolist()
        out = [
            _attend_unrolled(
                folded[:, :, begin:end],
                self._keys[0][0, :, begin:end],
                self._values[0][0, :, begin:end],
                own_keys[:, :, begin:end],
                own_values[:, :, begin:end],
            )
            for begin, end in pairwise(ends)
        ]
        return torch.cat(out, 2).flatten(0, 1)[None]

    def _attend_causally(
        self,
        query: Float[Tensor, "1 heads P d"],
        key: Float[Tensor, "1 kv_heads P d"],
        value: Float[Tensor, "1 kv_heads P d"],
        attention: AttentionParams,
    ) -> Float[Tensor, "1 heads P d"]:
        """Return the attention of each document's pairs to those up to them."""
        queries, keys, values = (each.split(self._lengths, 2) for each in (query, key, value))
        gqa, scale = query.shape[1] != key.shape[1], attention.scaling
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
    """Return the attention of one document's rows. query: scaled; G query heads share a key/value head."""
    kv_heads, groups, length, dim = query.shape
    scores = torch.bmm(query.reshape(kv_heads, groups * length, dim), key.transpose(1, 2))
    hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = scores.view(kv_heads, groups, length, length).masked_fill(hidden, float("-inf"))
    own_scores = torch.einsum("kgnd,sknd->kgns", query, own_keys)
    weights = torch.cat([scores, own_scores], -1).float().softmax(-1).to(value.dtype)
    weights, own_weights = weights.split([length, len(own_keys)], -1)
    out = torch.bmm(weights.reshape(kv_heads, groups * length, length), value)
    return out.view_as(query) + torch.einsum("kgns,sknd->kgnd", own_weights, own_values)


def _same_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotation in fp32 leaves queries and keys wider than values under autocast."""
    return query.to(value.dtype), key.to(value.dtype), value
