"""DocumentStore: encoded documents in a temporary file, so that memory holds only a few numbers per document."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO, overload

import numpy as np
from jaxtyping import Int, UInt8

from eagle_ray.training.packing import Document


@dataclass(frozen=True, eq=False)
class _TokenFile:
    """Tokens of all documents, one after another.

    Attributes:
        ends: index after each document's last token.
    """

    ids: Int[np.ndarray, " T"]
    is_answer: UInt8[np.ndarray, " T"]
    ends: Int[np.ndarray, " D"]

    def document(self, number: int) -> Document:
        """Return a document, read from the file."""
        begin = self.ends[number - 1] if number else 0
        part = slice(begin, self.ends[number])
        ids = self.ids[part]
        is_answer = self.is_answer[part].astype(bool)
        return Document(ids.tolist(), is_answer.tolist())


@dataclass(frozen=True, eq=False)
class DocumentStore(Sequence[Document]):
    """A sequence of documents that are stored in a temporary file, with five bytes per token.

        store = DocumentStore.write(documents)
        store[17]                                # a Document, read from the file
        store.select([17, 3])                    # these, in this order, over the same file

    The file is memory-mapped, so that the system may drop its pages. It has no name and ends with
    the process.

    Args:
        order: index in the file of each document.
    """

    file: _TokenFile
    order: Int[np.ndarray, " N"]

    @classmethod
    def write(cls, documents: Iterable[Document]) -> DocumentStore:
        """Write the documents to a file, one by one."""
        ends = array("q")
        end = 0
        with tempfile.TemporaryFile() as ids, tempfile.TemporaryFile() as is_answer:
            for document in documents:
                ids.write(array("i", document.ids).tobytes())
                is_answer.write(bytes(document.is_answer))
                end += len(document)
                ends.append(end)
            ids.flush()
            is_answer.flush()
            # An empty file cannot be mapped.
            tokens = np.zeros(0, np.int32)
            flags = np.zeros(0, np.uint8)
            if end:
                tokens = _map(ids, np.int32)
                flags = _map(is_answer, np.uint8)
        file = _TokenFile(tokens, flags, np.array(ends, dtype=np.int64))
        order = np.arange(len(ends))
        return cls(file, order)

    def select(self, indices: Sequence[int]) -> DocumentStore:
        """Return a store with some of the documents, in this order, over the file of this one."""
        # An empty list alone would become an array of floats, which indexes nothing.
        chosen = np.array(indices, dtype=np.int64)
        return DocumentStore(self.file, self.order[chosen])

    @cached_property
    def lengths(self) -> list[int]:
        """Return the tokens of each document."""
        in_file = np.diff(self.file.ends, prepend=0)
        return in_file[self.order].tolist()

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
