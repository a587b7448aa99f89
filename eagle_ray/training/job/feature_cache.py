"""Feature cache: the target's features of every document in files, for data that are read in several epochs.

    cache = FeatureCache.open(directory, source, documents, identity)
    cache.read(PackedBatch.of(documents, indices))         # equals source.read(...), without the target

A directory of shards, in the order of the documents:

    features-00000.bin   [rows, F] in the target's dtype; hidden-00000.bin [rows, H] if the features are others
    greedy-00000.bin     [rows] int32
    shard-00000.json     first document, row counts; written last, so a killed run resumes with the next shard

Its size is logged before anything is written.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_ray.core.errors import EngineError
from eagle_ray.core.json_text import dump_json
from eagle_ray.storage.path import StoragePath, read_json_object, write_json
from eagle_ray.training.frozen_target import ComputedFeatures, FeatureBatch
from eagle_ray.training.packing import Document, PackedBatch

log = logging.getLogger("eagle_ray")
SHARD_BYTES = 256 << 20
PASS_DOCUMENTS = 16  # documents computed between two writes
FREE_SHARE = 0.9  # share of the file system's free bytes that the cache may take
IDENTITY = "cache.json"


@dataclass(frozen=True, slots=True)
class _Layout:
    """Widths and dtype of a row.

    Attributes:
        hidden_size: None if the features are the hidden states.
    """

    feature_size: int
    hidden_size: int | None
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return (self.feature_size + (self.hidden_size or 0)) * self.dtype.itemsize + 4


class FeatureCache:
    """A FeatureSource that reads the files which `open` has written."""

    def __init__(
        self, directory: Path, layout: _Layout, lengths: Sequence[int], device: torch.device | str
    ):
        self._layout = layout
        self._lengths = lengths
        self._device = device
        self._shards = [
            _Shard.open(directory, number, layout) for number in range(_num_shards(directory))
        ]
        self._place: dict[int, tuple[int, int]] = {}  # shard and first row of each document
        for number, shard in enumerate(self._shards):
            starts = accumulate(lengths[shard.first : shard.end], initial=0)
            self._place |= {
                shard.first + i: (number, start)
                for i, start in zip(range(shard.size), starts, strict=False)
            }

    @classmethod
    def open(
        cls,
        directory: Path,
        source: ComputedFeatures,
        documents: Sequence[Document],
        identity: dict[str, Any],
    ) -> FeatureCache:
        """Open the cache, and first compute the shards that are missing.

        Raises EngineError if the directory holds features of something else, or if the file system
        lacks the space.

        Args:
            identity: facts that the features depend on, as JSON.
        """
        layout = _layout_of(source)
        lengths = [len(document) for document in documents]
        directory.mkdir(parents=True, exist_ok=True)
        _check_identity(directory, identity)
        _write_missing(directory, layout, source, documents)
        return cls(directory, layout, lengths, source.device)

    def read(self, packed: PackedBatch) -> FeatureBatch:
        features = []
        hidden = []
        greedy_ids = []
        for index, length in zip(packed.indices, packed.lengths, strict=True):
            number, start = self._place[index]
            rows = self._shards[number].rows(start, start + length)
            features.append(rows[0])
            hidden.append(rows[1])
            greedy_ids.append(rows[2])
        return FeatureBatch(
            packed=packed,
            features=torch.cat(features).to(self._device),
            hidden=torch.cat(hidden).to(self._device),
            greedy_ids=torch.cat(greedy_ids).to(self._device),
        )


@dataclass(frozen=True, slots=True)
class _Shard:
    """Memory-mapped files of consecutive documents, from `first` on."""

    first: int
    size: int
    features: Tensor
    hidden: Tensor
    greedy_ids: Tensor

    @classmethod
    def open(cls, directory: Path, number: int, layout: _Layout) -> _Shard:
        facts = json.loads((directory / f"shard-{number:05d}.json").read_text())

        def mapped(name: str, width: int, dtype: torch.dtype) -> Tensor:
            path = directory / f"{name}-{number:05d}.bin"
            size = facts["rows"] * width
            return torch.from_file(str(path), shared=False, size=size, dtype=dtype).view(-1, width)

        features = mapped("features", layout.feature_size, layout.dtype)
        hidden = features
        if layout.hidden_size is not None:
            hidden = mapped("hidden", layout.hidden_size, layout.dtype)
        greedy_ids = mapped("greedy", 1, torch.int32)[:, 0]
        return cls(facts["first"], facts["documents"], features, hidden, greedy_ids)

    @property
    def end(self) -> int:
        return self.first + self.size

    def rows(self, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.features[begin:end], self.hidden[begin:end], self.greedy_ids[begin:end].long()


def _layout_of(source: ComputedFeatures) -> _Layout:
    hidden_size = None if source.shares_hidden else source.hidden_size
    return _Layout(source.feature_size, hidden_size, source.dtype)


def _num_shards(directory: Path) -> int:
    return len(list(directory.glob("shard-*.json")))


def _check_identity(directory: Path, identity: dict[str, Any]) -> None:
    file = StoragePath.of(directory) / IDENTITY
    there = read_json_object(file)
    if there is not None and there != json.loads(dump_json(identity)):
        raise EngineError(
            f"{directory}: holds features of another target or other data. Delete it or name another"
        )
    write_json(file, identity)


def _write_missing(
    directory: Path, layout: _Layout, source: ComputedFeatures, documents: Sequence[Document]
) -> None:
    done = sum(json.loads(file.read_text())["documents"] for file in directory.glob("shard-*.json"))
    num_rows = sum(len(document) for document in documents[done:])
    if not num_rows:
        return
    size = num_rows * layout.row_bytes
    free = shutil.disk_usage(directory).free
    log.info(
        "feature cache: %s tokens x %s bytes = %.2f GB into %s",
        f"{num_rows:,}",
        layout.row_bytes,
        size / 1e9,
        directory,
    )
    if size > FREE_SHARE * free:
        raise EngineError(
            f"{directory}: the feature cache takes {size / 1e9:.1f} GB and {free / 1e9:.1f} GB are free. "
            "Name a directory on another disk, or set data.feature_cache to off"
        )
    while done < len(documents):
        end = _shard_end(documents, done, layout)
        _write_shard(directory, _num_shards(directory), layout, source, documents, done, end)
        done = end
        log.info("feature cache: %d of %d documents", done, len(documents))


def _shard_end(documents: Sequence[Document], begin: int, layout: _Layout) -> int:
    num_bytes = 0
    end = begin
    while end < len(documents) and (end == begin or num_bytes < SHARD_BYTES):
        num_bytes += len(documents[end]) * layout.row_bytes
        end += 1
    return end


def _write_shard(
    directory: Path,
    number: int,
    layout: _Layout,
    source: ComputedFeatures,
    documents: Sequence[Document],
    begin: int,
    end: int,
) -> None:
    """Write the documents begin .. end - 1."""
    names = (
        ("features", "greedy") if layout.hidden_size is None else ("features", "greedy", "hidden")
    )
    files = {name: (directory / f"{name}-{number:05d}.bin").open("wb") for name in names}
    try:
        for first in range(begin, end, PASS_DOCUMENTS):
            indices = range(first, min(end, first + PASS_DOCUMENTS))
            batch = source.read(PackedBatch.of(documents, indices))
            tensors = {
                "features": batch.features,
                "greedy": batch.greedy_ids.int(),
                "hidden": batch.hidden,
            }
            for name, file in files.items():
                numbers = tensors[name].cpu().contiguous()
                file.write(numbers.view(torch.uint8).numpy().tobytes())
    finally:
        for file in files.values():
            file.close()
    rows = sum(len(document) for document in documents[begin:end])
    write_json(
        StoragePath.of(directory) / f"shard-{number:05d}.json",
        {"first": begin, "documents": end - begin, "rows": rows},
    )
