"""Conversations of the corpus as documents of the tiny tokenizer, packed into training rows."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer

from jobs.tiny_pair.corpus import Conversation
from jobs.tiny_pair.tiny_tokenizer import BOS, PAD, encode_turn
from jobs.tiny_pair.training_rows import ANSWER_WEIGHT, USER_WEIGHT, TrainingRows, WeightedDocument, packed_rows


def encode_document(tokenizer: Tokenizer, conversation: Conversation) -> WeightedDocument:
    """Return the conversation's ids with the weight of each token's prediction in the loss."""
    ids, weights = [BOS], [0.0]
    for turn in conversation:
        tokens = encode_turn(tokenizer, turn)
        weight, role_weight = (USER_WEIGHT, USER_WEIGHT) if turn.role == "user" else (ANSWER_WEIGHT, 0.0)
        ids += tokens
        weights += [role_weight] + [weight] * (len(tokens) - 1)
    return WeightedDocument(ids, weights)


def make_rows(
    tokenizer: Tokenizer, conversations: Iterable[Conversation], num_rows: int, row_length: int
) -> TrainingRows:
    """Return the first `num_rows` rows of a stream of conversations. Raises ValueError if the stream ends too early."""
    documents = (encode_document(tokenizer, conversation) for conversation in conversations)
    return packed_rows(documents, num_rows, row_length, PAD)
