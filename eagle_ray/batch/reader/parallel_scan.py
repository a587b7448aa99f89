"""Scan large inputs on all cores of the cluster, through Ray Data.

Files are cut into pieces: JSONL at ends of lines, Parquet between row groups; any other file is one piece. The places
of a piece's rows follow from the lines before it, so lines are counted first.

    scan = ParallelScan(RowScanner(config, columns), lambda: join_cluster(config))
    for found in scan([(file, WHOLE)]):
        print([len(table["id"]) for _, table in found])                                 # [140233, 140120]
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any

import pyarrow as pa

from eagle_ray.batch.reader.file_slices import COLUMNAR, FilePart, open_columnar
from eagle_ray.batch.reader.files import InputFile
from eagle_ray.batch.reader.scan import Found, Part, RowScanner
from eagle_ray.core.errors import ConfigError
from eagle_ray.requests.columns import RowPosition
from eagle_ray.runs.job_errors import JobError
from eagle_ray.storage.retry_budget import extended_retries

log = logging.getLogger("eagle_ray")
MIN_BYTES = 256 << 20  # a smaller input is scanned in the driver, in less time than Ray takes to start
PIECE_BYTES = 32 << 20
READ_BYTES = 1 << 20
MAX_BLOCKS = 4096  # of one Dataset; a block's pieces are scanned one after the other
PASSED_ON = (ConfigError, JobError, OSError)


@dataclass(frozen=True, slots=True)
class ParallelScan:
    """Scans files in Ray tasks if they are large, otherwise here. connect: connects to Ray."""

    scanner: RowScanner
    connect: Callable[[], None]
    min_bytes: int = MIN_BYTES
    piece_bytes: int = PIECE_BYTES

    def __call__(self, parts: list[Part]) -> Iterator[Iterable[Found]]:
        """Yield what each part holds, in their order, as consecutive pieces."""
        if sum(file.version.size - _start(file, part) for file, part in parts) < self.min_bytes:
            yield from self.scanner(parts)
            return
        self.connect()
        pieces = [(i, file, piece) for i, (file, part) in enumerate(parts) for piece in self._cut(file, part)]
        log.info("scanning %d files in %d pieces", len(parts), len(pieces))
        placed = self._placed(pieces)
        groups = [(group,) for group in self._grouped([piece[1:] for piece in placed])]
        scanned = chain.from_iterable(_in_tasks(GroupScan(self.scanner), groups))
        for _, group in groupby(zip(placed, scanned, strict=True), key=lambda each: each[0][0]):
            yield chain.from_iterable(each[1] for each in group)

    def _grouped(self, pieces: Iterable[Part]) -> Iterator[list[Part]]:
        """Yield consecutive pieces together that have about piece_bytes, so that small files share a task."""
        group: list[Part] = []
        num_bytes = 0
        for file, part in pieces:
            group.append((file, part))
            num_bytes += min(file.version.size - _start(file, part), self.piece_bytes)
            if num_bytes >= self.piece_bytes:
                yield group
                group, num_bytes = [], 0
        if group:
            yield group

    def _cut(self, file: InputFile, part: FilePart) -> list[FilePart]:
        """Return the pieces of a part. Those of lines have the place of the part's first row for now."""
        size = file.version.size
        if size <= self.piece_bytes:
            return [part]
        if file.format in COLUMNAR:
            with open_columnar(file) as parquet:
                num_groups = parquet.num_row_groups
            step = max(1, num_groups * self.piece_bytes // size)
            starts = list(range(part.start, num_groups, step)) or [part.start]
        elif file.format in ("jsonl", "openai_batch") and file.can_split:
            starts = [part.start, *self._line_starts(file, part.start)]
        else:
            starts = [part.start]
        return [replace(part, start=start, stop=stop) for start, stop in zip(starts, [*starts[1:], None], strict=True)]

    def _line_starts(self, file: InputFile, start: int) -> list[int]:
        """Return offsets of lines, about piece_bytes from each other."""
        found: list[int] = []
        with file.open() as stream:
            for offset in range(start + self.piece_bytes, file.version.size, self.piece_bytes):
                stream.seek(offset - 1)
                stream.readline()
                place = stream.tell()
                if place < file.version.size and place > (found or [start])[-1]:
                    found.append(place)
        return found

    def _placed(self, pieces: list[tuple[int, InputFile, FilePart]]) -> list[tuple[int, InputFile, FilePart]]:
        """Return the pieces with the places of their first rows."""
        counted = [piece for piece in pieces if piece[1].format not in COLUMNAR and piece[2].stop is not None]
        counts = iter(_in_tasks(_count_lines, [(file, part) for _, file, part in counted]))
        placed, lines = [], 0
        before = None
        for index, file, part in pieces:
            if index != before:
                before, lines = index, 0
            row, line = part.first
            placed.append((index, file, replace(part, first=RowPosition(row + lines, line and line + lines))))
            if file.format not in COLUMNAR and part.stop is not None:
                lines += next(counts)
        return placed


def _start(file: InputFile, part: FilePart) -> int:
    return 0 if file.format in COLUMNAR else part.start


def _in_tasks(function: Callable[..., Any], arguments: list[tuple]) -> Iterator[Any]:
    """Yield the results of Ray tasks in the order of their arguments. Raises what a task raised."""
    import ray.data  # seconds to import: only for large inputs

    if not arguments:
        return
    rows = [{"number": number, "arguments": pickle.dumps(each)} for number, each in enumerate(arguments)]
    dataset = ray.data.from_items(rows, override_num_blocks=min(len(rows), MAX_BLOCKS))
    done = dataset.map_batches(TaskFunction(function), batch_size=1, batch_format="pyarrow")
    done.context.enable_progress_bars = False  # a Dataset has a context of its own since it was made
    done.context.execution_options.preserve_order = True  # what is early waits in the object store, not in the driver
    yield from _in_order(done.iter_batches(batch_size=1, batch_format="pyarrow"))


def _in_order(batches: Iterable[pa.Table]) -> Iterator[Any]:
    """Yield the results by their numbers, which are consecutive, whatever order Ray Data yields them in."""
    early: dict[int, Any] = {}
    number = 0
    for batch in batches:
        error, early[batch["number"][0].as_py()] = pickle.loads(batch["result"][0].as_py())
        if error is not None:
            raise error
        while number in early:
            yield early.pop(number)
            number += 1


@dataclass(frozen=True, slots=True)
class TaskFunction:
    """Calls a function in a Ray task on a row of pickled arguments. Errors of the input are results, too."""

    function: Callable[..., Any]

    def __call__(self, batch: pa.Table) -> pa.Table:
        result: tuple[Exception | None, Any]
        try:
            with extended_retries():
                result = None, self.function(*pickle.loads(batch["arguments"][0].as_py()))
        except PASSED_ON as error:
            result = error, None
        return pa.table({"number": batch["number"], "result": pa.array([pickle.dumps(result)], pa.large_binary())})


@dataclass(frozen=True, slots=True)
class GroupScan:
    """Scans consecutive pieces. There may be many groups, so they are sent without the scanner."""

    scanner: RowScanner

    def __call__(self, pieces: list[Part]) -> list[list[Found]]:
        return [list(found) for found in self.scanner(pieces)]


def _count_lines(file: InputFile, part: FilePart) -> int:
    """Return the number of line ends in a part."""
    count, left = 0, (file.version.size if part.stop is None else part.stop) - part.start
    with file.open() as stream:
        stream.seek(part.start)
        while left > 0 and (data := stream.read(min(READ_BYTES, left))):
            count += data.count(b"\n")
            left -= len(data)
    return count
