"""Documents and packed batches: token ids of several documents in one row, without padding.

    ids         <bos> <user> question <end> <assistant> answer <end> | <bos> <user> ...
    is_answer     0     0       0       0        0         1      1  |   0      0
    lengths     [------------------------ 7 ------------------------, ...

A document is never split. Positions begin at 0 in each document, and attention stays within it, as
in the engine (`unrolled_attention.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor

MIN_DOCUMENT_LENGTH = 3  # tokens: the first pair of a head predicts the third


@dataclass(frozen=True, slots=True)
class Document:
    """One text as token ids.

    Attributes:
        ids: token ids.
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
        cls,
        documents: Sequence[Document],
        indices: Iterable[int],
        device: torch.device | str = "cpu",
    ) -> PackedBatch:
        """Return the documents with these indices, in this order."""
        indices = list(indices)
        ids: list[int] = []
        is_answer: list[bool] = []
        lengths: list[int] = []
        for index in indices:
            document = documents[index]
            ids += document.ids
            is_answer += document.is_answer
            lengths.append(len(document))
        return cls(
            ids=torch.tensor(ids, dtype=torch.int64).to(device),
            is_answer=torch.tensor(is_answer, dtype=torch.bool).to(device),
            indices=indices,
            lengths=lengths,
        )

    @cached_property
    def pairs(self) -> PackedPairs:
        """Return the pairs that a head reads."""
        return PackedPairs.of(self)


@dataclass(frozen=True)
class PackedPairs:
    """The P (next token, feature) pairs of a batch that a head reads: one per row, except each document's last.

    Attributes:
        rows: row of each pair's feature; the pair's token is in the next row.
        positions: positions of the features, from 0 in each document.
        remaining: number of rows in the pair's document after the feature's row.
        lengths: number of pairs of each document.
    """

    rows: Int[Tensor, " P"]
    positions: Int[Tensor, " P"]
    remaining: Int[Tensor, " P"]
    lengths: list[int]
    is_answer: Bool[Tensor, " R"]

    @classmethod
    def of(cls, batch: PackedBatch) -> PackedPairs:
        """Return the pairs of a batch."""
        device = batch.ids.device
        rows = []
        positions = []
        remaining = []
        start = 0
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
        """Return the row `distance` rows after each feature's, or the document's last row if it ends earlier."""
        return self.rows + self.remaining.clamp(max=distance)

    def predicts_answer(self, distance: int) -> Bool[Tensor, " P"]:
        """Return whether the token `distance` rows after the feature exists and belongs to an answer."""
        return (self.remaining >= distance) & self.is_answer[self.rows_after(distance)]


def count_answer_tokens(documents: Iterable[Document]) -> int:
    return sum(sum(document.is_answer) for document in documents)
