"""Conversations packed into training rows of one length, with a weight for every token to be predicted.

```
ids      <|bos|> <|user|> question <|end|> <|assistant|> answer <|end|> <|bos|> ... <|pad|>
weights     0      .25       .25      .25        0          1      1       0    ...    0
```
A document is never cut. Documents of one row see each other through attention: they start with `<|bos|>`, and the model
learns what that means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from jaxtyping import Float, Int
from torch import Tensor

USER_WEIGHT = 0.25
ANSWER_WEIGHT = 1.0
POOL_SIZE = 200


@dataclass(frozen=True, slots=True)
class WeightedDocument:
    """One conversation as ids, and how much the prediction of each of them counts. Two lists of one length."""

    ids: list[int]
    weights: list[float]


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """R packed rows of T tokens."""

    ids: Int[Tensor, "R T"]
    weights: Float[Tensor, "R T"]

    def __len__(self) -> int:
        return self.ids.shape[0]

    def shards(self, step: int, num_steps: int, num_threads: int) -> list[TrainingRows]:
        """Return the rows of one training step, split by thread. Over all steps every row is used once, in order."""
        size = len(self) // (num_steps * num_threads)
        starts = [(step * num_threads + thread) * size for thread in range(num_threads)]
        return [TrainingRows(self.ids[start : start + size], self.weights[start : start + size]) for start in starts]

    @property
    def answer_mask(self) -> Float[Tensor, "R T"]:
        """1 where the token belongs to an answer, its `<|end|>` included."""
        return (self.weights == ANSWER_WEIGHT).float()


def pack(documents: Iterable[WeightedDocument], row_length: int, pad_id: int) -> Iterator[WeightedDocument]:
    """Rows filled first-fit from a pool of waiting documents and padded to `row_length`. Drops longer documents."""
    fitting = (document for document in documents if len(document.ids) <= row_length)
    pool = list(islice(fitting, POOL_SIZE))
    while pool:
        row = WeightedDocument([], [])
        while (num_free := row_length - len(row.ids)) > 0:
            index = next((i for i, document in enumerate(pool) if len(document.ids) <= num_free), None)
            if index is None:
                break
            document = pool.pop(index)
            row.ids.extend(document.ids)
            row.weights.extend(document.weights)
        yield WeightedDocument(row.ids + [pad_id] * num_free, row.weights + [0.0] * num_free)
        pool.extend(islice(fitting, POOL_SIZE - len(pool)))


def packed_rows(documents: Iterable[WeightedDocument], num_rows: int, row_length: int, pad_id: int) -> TrainingRows:
    """Pack documents into exactly `num_rows` rows. Raises ValueError if the documents fill fewer."""
    packed = list(islice(pack(documents, row_length, pad_id), num_rows))
    if len(packed) < num_rows:
        raise ValueError(f"{num_rows} rows wanted, the conversations fill {len(packed)}")
    return TrainingRows(torch.tensor([row.ids for row in packed]), torch.tensor([row.weights for row in packed]))
