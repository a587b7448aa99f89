"""NativeIndex: the suffix index and the n-grams of each sequence in C++ (kernels/lookup_index.cpp), called by ctypes.

    index = native_index("suffix") or SuffixIndex()
    readers = [index.reader(), index.reader()]
    index.read(readers, [[5, 9, 7, 5], [9]])           # further tokens of each sequence
    index.grow(readers, [5, 9], request)               # trees after them; the whole batch in one call

It grows the trees that SuffixIndex and NgramIndex grow in Python, which run where the library was
not built.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import torch

from eagle_ray.kernels import cpu_ops
from eagle_ray.methods.lookup.best_first import GrownTrees, GrowthRequest, Texts
from eagle_ray.tree.draft_tree import DraftTree

NATIVE_CAPACITY = 1_000_000  # tokens of a suffix index


class _Growth(Structure):
    """Growth in lookup_index.cpp."""

    _fields_ = [
        ("rows", c_int64),
        ("max_nodes", c_int64),
        ("max_depth", c_int64),
        ("top_k", c_int64),
        ("num_ends", c_int64),
        ("levels", c_int64),
        ("num_kinds", c_int64),
        ("readers", c_void_p),
        ("ends", c_void_p),
        ("kinds", c_void_p),
        ("parameters", c_void_p),
        ("num_nodes", c_int64),  # this and the following two: results of lookup_grow
        ("depth", c_int64),
        ("width", c_int64),
    ]


INDEX_SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "lookup_open": ([c_int32, c_int64], c_void_p),
    "lookup_close": ([c_void_p], None),
    "lookup_reset": ([c_void_p], None),
    "lookup_bytes": ([c_void_p], c_int64),
    "lookup_add_reader": ([c_void_p], c_int64),
    "lookup_remove_reader": ([c_void_p, c_int64], None),
    "lookup_read": ([c_void_p, c_int64, c_void_p, c_void_p, c_void_p], None),
    "lookup_grow": ([c_void_p, POINTER(_Growth)], None),
    "lookup_write": (
        [c_void_p, POINTER(_Growth), c_int64, c_void_p, c_void_p, c_void_p, c_void_p],
        None,
    ),
    "lookup_hits": ([c_void_p, POINTER(c_int64), POINTER(c_int64)], None),
    "lookup_num_texts": ([c_void_p, POINTER(c_int64), POINTER(c_int64)], None),
    "lookup_texts": ([c_void_p, c_void_p, c_void_p], None),
}


class NativeReader:
    """A sequence's reader in a NativeIndex. Its number is reused once the object is collected."""

    def __init__(self, index: NativeIndex, number: int):
        self._index = index
        self.number = number

    def __del__(self) -> None:
        self._index.discard(self.number)


class NativeIndex:
    """An index of continuations in C++.

    Args:
        kind: "suffix" for one index of all sequences, "ngram" for one of each.
        capacity: maximum number of tokens of a suffix index. When half of them are read, the older
            half is discarded.
    """

    def __init__(self, library: ctypes.CDLL, kind: str, capacity: int = NATIVE_CAPACITY):
        self._library = library
        self.kind = kind
        self._handle = library.lookup_open(kind == "suffix", capacity)
        self._growth = _Growth()
        self._discarded: list[int] = []  # numbers of readers that were collected

    def __del__(self) -> None:
        self._library.lookup_close(self._handle)

    @property
    def cost_key(self) -> dict[str, Any]:
        return {"kind": self.kind}

    @property
    def num_bytes(self) -> int:
        """Return the bytes of memory that the index takes."""
        return self._library.lookup_bytes(self._handle)

    def reader(self) -> NativeReader:
        return NativeReader(self, self._library.lookup_add_reader(self._handle))

    def discard(self, number: int) -> None:
        """Mark a reader for removal before the next read, with its n-grams if it has any. Any thread may call it."""
        self._discarded.append(number)

    def read(self, readers: Sequence[NativeReader], news: Sequence[list[int]]) -> None:
        while self._discarded:
            self._library.lookup_remove_reader(self._handle, self._discarded.pop())
        numbers = array("q")
        counts = array("q")
        tokens = array("q")
        for reader, token_ids in zip(readers, news, strict=True):
            if token_ids:
                numbers.append(reader.number)
                counts.append(len(token_ids))
                tokens.extend(token_ids)
        if numbers:
            addresses = [_address(part) for part in (numbers, counts, tokens)]
            self._library.lookup_read(self._handle, len(numbers), *addresses)

    def grow(
        self, readers: Sequence[NativeReader], roots: Sequence[int], request: GrowthRequest
    ) -> GrownTrees:
        growth = self._growth
        bounds = request.bounds
        num_rows = len(readers)
        numbers = array("q", [reader.number for reader in readers])
        kinds = array("q", request.kinds)
        growth.rows = num_rows
        growth.readers = _address(numbers)
        growth.max_nodes = bounds.max_nodes
        growth.max_depth = bounds.max_depth
        growth.top_k = bounds.top_k

        growth.ends = None
        ends = request.ends
        if ends is not None:
            ends = ends.contiguous()
            growth.ends = ends.data_ptr()
            growth.num_ends = ends.shape[1]
        growth.parameters = None
        parameters = request.parameters
        if parameters is not None:
            assert parameters.is_contiguous()
            growth.parameters = parameters.data_ptr()
            growth.levels, growth.num_kinds = parameters.shape[:2]
            growth.kinds = _address(kinds)
        self._library.lookup_grow(self._handle, growth)

        # It has said how large the trees are: write them into tensors of that size.
        num_nodes = bounds.num_nodes if request.is_padded else growth.num_nodes
        integers = torch.empty(3, num_rows, num_nodes, dtype=torch.int64)
        floats = torch.empty(2, num_rows, num_nodes)
        valid = torch.empty(num_rows, num_nodes, dtype=torch.bool)
        levels = torch.empty(growth.depth, num_rows, 1, growth.width)
        addresses = [tensor.data_ptr() for tensor in (integers, floats, valid, levels)]
        self._library.lookup_write(self._handle, growth, num_nodes, *addresses)

        tokens, parents, depths = integers.unbind(0)
        log_values, log_probs = floats.unbind(0)
        tree = DraftTree(tokens, parents, depths, log_values, log_probs, valid)
        return GrownTrees(tree, list(levels.unbind(0)) if growth.depth else [])

    def reset(self) -> None:
        self._library.lookup_reset(self._handle)

    def lookup_hits(self) -> tuple[int, int] | None:
        if self.kind != "suffix":
            return None
        num_read = c_int64()
        num_hits = c_int64()
        self._library.lookup_hits(self._handle, byref(num_read), byref(num_hits))
        return num_read.value, num_hits.value

    def texts(self) -> Texts | None:
        """Return the texts of a suffix index, the oldest first; None for n-grams, which are not shared."""
        if self.kind != "suffix":
            return None
        num_texts = c_int64()
        num_tokens = c_int64()
        self._library.lookup_num_texts(self._handle, byref(num_texts), byref(num_tokens))
        lengths = torch.empty(num_texts.value, dtype=torch.int64)
        tokens = torch.empty(num_tokens.value, dtype=torch.int32)
        self._library.lookup_texts(self._handle, lengths.data_ptr(), tokens.data_ptr())
        return lengths, tokens


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]


def native_index(kind: str, capacity: int = NATIVE_CAPACITY) -> NativeIndex | None:
    """Return an index in C++, or None if its library was not built."""
    library = _library()
    return None if library is None else NativeIndex(library, kind, capacity)


@cache
def _library() -> ctypes.CDLL | None:
    if cpu_ops.is_switched_off():
        return None
    library = cpu_ops.load_library("_lookup")
    if library is not None:
        for name, (arguments, result) in INDEX_SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = result
    return library
