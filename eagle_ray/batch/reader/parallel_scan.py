"""Scan large inputs on all cores of the cluster, in Ray tasks.

Files are cut into pieces: JSONL between lines, Parquet between row groups; any other file is one
piece. The row numbers of a piece depend on the lines before it, so lines are counted first.

    scan = ParallelScan(RowScanner(config, columns), lambda: join_cluster(config))
    for found in scan([FilePart(file)]):
        print([len(scan.rows["id"]) for scan in found])                                 # [140233, 140120]
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

from eagle_ray.batch.reader.file_slices import COLUMNAR, open_columnar
from eagle_ray.batch.reader.files import InputFile
from eagle_ray.batch.reader.scan import FilePart, FileScan, RowScanner
from eagle_ray.core.errors import ConfigError
from eagle_ray.requests.columns import RowPosition
from eagle_ray.runs.job_errors import JobError
from eagle_ray.storage.retries import extended_retries

log = logging.getLogger("eagle_ray")
# A smaller input is scanned in the driver, in less time than Ray takes to start.
MIN_BYTES = 256 << 20
SCAN_PIECE_BYTES = 32 << 20
SCAN_READ_BYTES = 1 << 20
MAX_WAITING = 256  # tasks that are ahead of what is read: more than most clusters have cores
PASSED_ON = (ConfigError, JobError, OSError)


@dataclass(frozen=True, slots=True)
class ParallelScan:
    """Scans files in Ray tasks if they are large, otherwise here.

    Attributes:
        connect: function that connects to Ray.
    """

    scanner: RowScanner
    connect: Callable[[], None]
    min_bytes: int = MIN_BYTES
    piece_bytes: int = SCAN_PIECE_BYTES

    def __call__(self, parts: list[FilePart]) -> Iterator[Iterable[FileScan]]:
        """Yield the scan of each part in order. A part is scanned as consecutive pieces."""
        if sum(map(_num_bytes, parts)) < self.min_bytes:
            yield from self.scanner(parts)
            return
        self.connect()

        # Pieces, each with the number of its part.
        pieces = [(i, piece) for i, part in enumerate(parts) for piece in self._cut(part)]
        log.info("scanning %d files in %d pieces", len(parts), len(pieces))
        placed = self._placed(pieces)
        groups = [(group,) for group in self._grouped(piece for _, piece in placed)]
        scanned = chain.from_iterable(in_tasks(GroupScan(self.scanner), groups))

        numbered = ((number, scans) for (number, _), scans in zip(placed, scanned, strict=True))
        for _, of_part in groupby(numbered, key=itemgetter(0)):
            yield chain.from_iterable(scans for _, scans in of_part)

    def _grouped(self, pieces: Iterable[FilePart]) -> Iterator[list[FilePart]]:
        """Yield consecutive pieces together that have about piece_bytes, so that small files share a task."""
        group: list[FilePart] = []
        num_bytes = 0
        for piece in pieces:
            group.append(piece)
            num_bytes += min(_num_bytes(piece), self.piece_bytes)
            if num_bytes >= self.piece_bytes:
                yield group
                group = []
                num_bytes = 0
        if group:
            yield group

    def _cut(self, part: FilePart) -> list[FilePart]:
        """Return the pieces of a part. Pieces of lines have the place of the part's first row for now."""
        file = part.file
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
        stops = [*starts[1:], None]
        return [
            replace(part, start=start, stop=stop) for start, stop in zip(starts, stops, strict=True)
        ]

    def _line_starts(self, file: InputFile, start: int) -> list[int]:
        """Return offsets of lines, about piece_bytes from each other."""
        starts: list[int] = []
        with file.open() as stream:
            for offset in range(start + self.piece_bytes, file.version.size, self.piece_bytes):
                stream.seek(offset - 1)
                stream.readline()
                place = stream.tell()
                if place < file.version.size and place > (starts or [start])[-1]:
                    starts.append(place)
        return starts

    def _placed(self, pieces: list[tuple[int, FilePart]]) -> list[tuple[int, FilePart]]:
        """Return the pieces, each with the number of its part, with the places of their first rows."""
        counts = iter(
            in_tasks(_count_lines, [(piece,) for _, piece in pieces if _is_counted(piece)])
        )
        placed = []
        lines = 0
        before = None
        for index, piece in pieces:
            if index != before:
                before = index
                lines = 0
            row, line = piece.first
            placed.append(
                (index, replace(piece, first=RowPosition(row + lines, line and line + lines)))
            )
            if _is_counted(piece):
                lines += next(counts)
        return placed


def _is_counted(piece: FilePart) -> bool:
    """Return whether lines of this piece must be counted to know the line numbers of the next piece."""
    return piece.file.format not in COLUMNAR and piece.stop is not None


def _num_bytes(part: FilePart) -> int:
    return part.file.version.size - (0 if part.file.format in COLUMNAR else part.start)


def in_tasks(function: Callable[..., Any], arguments: Iterable[tuple]) -> Iterator[Any]:
    """Run a function in Ray tasks and yield the results in the order of the arguments. Raises a task's own error."""
    import ray  # seconds to import: only for large inputs

    task = ray.remote(_call)
    waiting: deque[Any] = deque()  # early results stay in the object store
    shared = ray.put(function)
    for each in arguments:
        if len(waiting) == MAX_WAITING:
            yield _value_of(ray.get(waiting.popleft()))
        waiting.append(task.remote(shared, each))
    while waiting:
        yield _value_of(ray.get(waiting.popleft()))


def _call(function: Callable[..., Any], arguments: tuple) -> tuple[Exception | None, Any]:
    """Call a function in a Ray task. An error of the input is returned, so that it can be raised as it is."""
    try:
        with extended_retries():
            return None, function(*arguments)
    except PASSED_ON as error:
        return error, None


def _value_of(result: tuple[Exception | None, Any]) -> Any:
    error, value = result
    if error is not None:
        raise error
    return value


@dataclass(frozen=True, slots=True)
class GroupScan:
    """A Ray task's function that scans a group of consecutive pieces. The scanner is sent once for all groups."""

    scanner: RowScanner

    def __call__(self, pieces: list[FilePart]) -> list[list[FileScan]]:
        return [list(scans) for scans in self.scanner(pieces)]


def _count_lines(part: FilePart) -> int:
    """Return the number of line ends in a part."""
    count = 0
    left = (part.file.version.size if part.stop is None else part.stop) - part.start
    with part.file.open() as stream:
        stream.seek(part.start)
        while left > 0 and (data := stream.read(min(SCAN_READ_BYTES, left))):
            count += data.count(b"\n")
            left -= len(data)
    return count
