"""Load the training data of a configuration: shuffled documents, held-out ones, and a draft vocabulary.

Equal files, settings and seeds give equal documents and an equal digest:

    data = load_data(config, tokenizer)
    data.documents, data.held_out, data.digest
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from eagle_ray.config.head_training import TrainConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.text.tokenizer import Tokenizer
from eagle_ray.training.job.conversations import TextSource, log_skipped
from eagle_ray.training.job.document_store import DocumentStore
from eagle_ray.training.packing import Document, count_answer_tokens

log = logging.getLogger("eagle_ray")
MAX_HELD_OUT_SHARE = 0.2  # share of the documents


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Documents to train on, and those that are kept for the evaluation.

    Attributes:
        digest: hash of all token ids.
    """

    documents: DocumentStore
    held_out: DocumentStore
    digest: str


def load_data(
    config: TrainConfig, tokenizer: Tokenizer | None, paths: Sequence[str]
) -> TrainingData:
    """Read and encode the files. Raises ConfigError if they hold nothing to train on."""
    source = TextSource(paths, config.data.format)
    encoded = islice(source.documents(tokenizer), config.data.limit)
    documents = DocumentStore.write(
        document.truncate(config.data.max_length) for document in encoded
    )
    log_skipped(source.skipped)
    if not documents:
        reasons = f" ({', '.join(source.skipped)})" if source.skipped else ""
        raise ConfigError(f"data.path: no document with an answer in {', '.join(paths)}{reasons}")
    data = split_data(documents, config.data.held_out, config.training.seed)
    if data is None:
        raise ConfigError(
            f"data.max_length: no document has an answer within its first {config.data.max_length} tokens"
        )
    log.info(
        "data: %s documents, %s tokens, %s of them in answers; %d documents held out",
        f"{len(data.documents):,}",
        f"{sum(data.documents.lengths):,}",
        f"{count_answer_tokens(data.documents):,}",
        len(data.held_out),
    )
    return data


def split_data(documents: DocumentStore, held_out: int, seed: int) -> TrainingData | None:
    """Shuffle the documents that have an answer and keep the first ones for the evaluation. None if none has one."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    order = torch.randperm(len(documents), generator=generator).tolist()
    has_answer = [any(document.is_answer[2:]) for document in documents]
    usable = [index for index in order if has_answer[index]]
    if not usable:
        return None
    count = min(held_out, int(MAX_HELD_OUT_SHARE * len(usable)))
    return TrainingData(
        documents=documents.select(usable[count:]),
        held_out=documents.select(usable[:count]),
        digest=digest_of(documents.select(usable)),
    )


def digest_of(documents: Iterable[Document]) -> str:
    """Return 16 hex digits that hash the ids and the counted tokens of all documents, in order."""
    digest = hashlib.sha256()
    for document in documents:
        numbers = array("q", [len(document), *document.ids, *document.is_answer])
        digest.update(numbers.tobytes())
    return digest.hexdigest()[:16]


def count_answers(documents: Iterable[Document]) -> Counter[int]:
    """Return how often each token occurs in the answers."""
    counts: Counter[int] = Counter()
    for document in documents:
        pairs = zip(document.ids, document.is_answer, strict=True)
        counts.update(token for token, is_counted in pairs if is_counted)
    return counts


def answer_vocabulary(counts: Counter[int], size: int, vocab_size: int) -> list[int]:
    """Return the `size` most frequent tokens of the answers as a draft vocabulary; ties and absent tokens by id.

    The target's own answers are the best measure of what it will write: other texts have other
    tokens, and none of those that end an answer.
    """
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    if len(ranked) < size:
        ranked += [token for token in range(vocab_size) if token not in counts]
    return ranked[: min(size, vocab_size)]


def coverage(counts: Counter[int], token_ids: Iterable[int]) -> float:
    """Return the share of the answers' tokens that are in the vocabulary."""
    return sum(counts[token] for token in token_ids) / max(1, counts.total())
