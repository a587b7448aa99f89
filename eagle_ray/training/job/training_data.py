"""Training data of a configuration: its documents, shuffled, and the held-out ones.

data = load_data(config, tokenizer)
data.documents, data.held_out, data.digest
"""

from __future__ import annotations

import hashlib
import logging
from array import array
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
MAX_HELD_OUT_SHARE = 0.2  # of the documents


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Documents to train on, and those that are kept for the evaluation. digest: of all token ids."""

    documents: DocumentStore
    held_out: DocumentStore
    digest: str


def load_data(config: TrainConfig, tokenizer: Tokenizer | None, paths: Sequence[str]) -> TrainingData:
    """Read and encode the files. Raises ConfigError if they hold nothing to train on."""
    source = TextSource(paths, config.data.format)
    found = islice(source.documents(tokenizer), config.data.limit)
    documents = DocumentStore.write(document.truncate(config.data.max_length) for document in found)
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
    digest = digest_of(documents.select(usable))
    return TrainingData(documents.select(usable[count:]), documents.select(usable[:count]), digest)


def digest_of(documents: Iterable[Document]) -> str:
    """Return 16 hex digits that hash the ids and the counted tokens of all documents, in order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(array("q", [len(document), *document.ids, *document.is_answer]).tobytes())
    return digest.hexdigest()[:16]
