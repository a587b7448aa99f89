"""Draft vocabulary of a data set: the most frequent tokens of its answers.

    token_ids = answer_vocabulary(documents, size=8192, vocab_size=49152)

Answers of the target itself are the best measure of what it will write: other texts hold other tokens, and none of
those that end an answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from eagle_ray.training.packing import Document


def count_answers(documents: Iterable[Document]) -> Counter[int]:
    """Return how often each token occurs in the answers."""
    counts: Counter[int] = Counter()
    for document in documents:
        counts.update(token for token, counted in zip(document.ids, document.is_answer, strict=True) if counted)
    return counts


def answer_vocabulary(counts: Counter[int], size: int, vocab_size: int) -> list[int]:
    """Return `size` tokens, the most frequent first; ties and absent tokens by id."""
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    absent = (token for token in range(vocab_size) if token not in counts)
    return (ranked + list(absent) if len(ranked) < size else ranked)[: min(size, vocab_size)]


def coverage(counts: Counter[int], token_ids: Iterable[int]) -> float:
    """Return the share of the answers' tokens that the vocabulary holds."""
    return sum(counts[token] for token in token_ids) / max(1, counts.total())
