"""Training data of a configuration: its documents, shuffled, the held-out ones, and a draft vocabulary of the answers.

data = load_data(config, tokenizer)
data.documents, data.held_out, data.digest
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import BinaryIO, overload

import numpy as np
import torch
from jaxtyping import Int, UInt8

from eagle_ray.config.head_training import TrainConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.text.tokenizer import Tokenizer
from eagle_ray.training.job.conversations import TextSource, log_skipped
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
    encoded = islice(source.documents(tokenizer), config.data.limit)
    documents = DocumentStore.write(document.truncate(config.data.max_length) for document in encoded)
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


@dataclass(frozen=True, eq=False)
class _TokenFile:
    """Tokens of all documents, one after another. ends: index after each document's last token."""

    ids: Int[np.ndarray, " T"]
    is_answer: UInt8[np.ndarray, " T"]
    ends: Int[np.ndarray, " D"]

    def document(self, number: int) -> Document:
        part = slice(self.ends[number - 1] if number else 0, self.ends[number])
        return Document(self.ids[part].tolist(), self.is_answer[part].astype(bool).tolist())


@dataclass(frozen=True, eq=False)
class DocumentStore(Sequence[Document]):
    """Documents in a temporary file, five bytes a token; memory holds a few numbers a document.

        store = DocumentStore.write(documents)
        store[17]                                # a Document, read from the file
        store.select([17, 3])                    # these, in this order, over the same file

    The file is memory-mapped, so that the system may drop its pages. It has no name and ends with the process.

    Args:
        order: number of each document in the file.
    """

    file: _TokenFile
    order: Int[np.ndarray, " N"]

    @classmethod
    def write(cls, documents: Iterable[Document]) -> DocumentStore:
        """Write the documents to a file, one by one."""
        ends, end = array("q"), 0
        with tempfile.TemporaryFile() as ids, tempfile.TemporaryFile() as is_answer:
            for document in documents:
                ids.write(array("i", document.ids).tobytes())
                is_answer.write(bytes(document.is_answer))
                ends.append(end := end + len(document))
            ids.flush()
            is_answer.flush()
            tokens = _map(ids, np.int32) if end else np.zeros(0, np.int32)
            flags = _map(is_answer, np.uint8) if end else np.zeros(0, np.uint8)
        return cls(_TokenFile(tokens, flags, np.array(ends, dtype=np.int64)), np.arange(len(ends)))

    def select(self, indices: Sequence[int]) -> DocumentStore:
        """Return some of the documents, in this order."""
        return DocumentStore(self.file, self.order[np.array(indices, dtype=np.int64)])

    @cached_property
    def lengths(self) -> list[int]:
        """Return the tokens of each document."""
        return np.diff(self.file.ends, prepend=0)[self.order].tolist()

    def __len__(self) -> int:
        return len(self.order)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> DocumentStore: ...
    def __getitem__(self, index: int | slice) -> Document | DocumentStore:
        if isinstance(index, slice):
            return DocumentStore(self.file, self.order[index])
        return self.file.document(int(self.order[index]))

    def __iter__(self) -> Iterator[Document]:
        return (self.file.document(int(number)) for number in self.order)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DocumentStore) and list(self) == list(other)


def _map(file: BinaryIO, dtype: type) -> np.ndarray:
    """Return the content of a file, which stays mapped after it is closed."""
    return np.memmap(file, dtype=dtype, mode="r")


def count_answers(documents: Iterable[Document]) -> Counter[int]:
    """Return how often each token occurs in the answers."""
    counts: Counter[int] = Counter()
    for document in documents:
        counts.update(token for token, counted in zip(document.ids, document.is_answer, strict=True) if counted)
    return counts


def answer_vocabulary(counts: Counter[int], size: int, vocab_size: int) -> list[int]:
    """Return a draft vocabulary of `size` tokens, the most frequent first; ties and absent tokens by id.

    Answers of the target itself are the best measure of what it will write: other texts hold other tokens, and none of
    those that end an answer.
    """
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    absent = (token for token in range(vocab_size) if token not in counts)
    return (ranked + list(absent) if len(ranked) < size else ranked)[: min(size, vocab_size)]


def coverage(counts: Counter[int], token_ids: Iterable[int]) -> float:
    """Return the share of the answers' tokens that the vocabulary holds."""
    return sum(counts[token] for token in token_ids) / max(1, counts.total())
