"""RowScanner: reads parts of input files once, and yields what the index keeps of their rows.

scanner = RowScanner(config, request_columns(config.input.columns))
[[(found, table)]] = scanner([(file, WHOLE)])
len(table["id"])                                                         # 240
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from eagle_ray.batch.reader.files import InputFile
from eagle_ray.batch.reader.shards import FilePart, FileScan, scan
from eagle_ray.config import JobConfig
from eagle_ray.requests.columns import RequestColumns, RowPosition
from eagle_ray.requests.rows import InputRow, id_of, parse_row
from eagle_ray.runs.row_index import DIGEST, Table, digest

NUM_THREADS = 16  # each waits for one object
SMALL_BYTES = 4 << 20  # of an object that takes longer to ask for than to read

Part = tuple[InputFile, FilePart]
Found = tuple[FileScan, Table]


@dataclass(frozen=True, slots=True)
class RowScanner:
    """Scans parts of files: yields the types and shards of each, and a row of the index for each of its rows."""

    config: JobConfig
    columns: RequestColumns

    def __call__(self, parts: Iterable[Part]) -> Iterator[list[Found]]:
        """Scan small objects several at once, since each request takes its time, and all else one after the other."""
        for is_small_object, group in groupby(parts, key=_is_small_object):
            if is_small_object:
                yield from self._at_once(group)
            else:
                yield from map(self._scan, group)

    def _at_once(self, parts: Iterable[Part]) -> Iterator[list[Found]]:
        """Yield the scans in their order. At most NUM_THREADS are ahead, since their rows are held in memory."""
        ahead: deque[Future[list[Found]]] = deque()
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            for part in parts:
                ahead.append(threads.submit(self._scan, part))
                if len(ahead) == NUM_THREADS:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def _scan(self, file_part: Part) -> list[Found]:
        file, part = file_part
        needed = frozenset(self.columns.needed)
        has_turns = "turns" in self.columns.prompts
        ids, requests, rows = bytearray(), array("Q"), array("I")
        n = self.config.sampling.n

        def on_row(position: RowPosition, row: InputRow) -> None:
            nonlocal ids
            ids += digest(id_of(row, self.columns, file.location_of(position)))
            requests.append(request_digest(row, needed))
            own = isinstance(row, dict) and (has_turns or row.get("n") is not None)
            request = parse_row(row, self.columns, file.location_of(position)) if own else None
            rows.append(n if request is None else request.num_rows(self.config))

        found = scan(file, self.columns.needed, on_row, part)
        table = {
            "id": np.frombuffer(bytes(ids), DIGEST),
            "request": np.frombuffer(requests, np.uint64),
            "rows": np.frombuffer(rows, np.uint32),
        }
        return [(found, table)]


def _is_small_object(part: Part) -> bool:
    file = part[0]
    return not file.storage_path.is_local and file.version.size <= SMALL_BYTES


def request_digest(row: InputRow, needed: frozenset[str]) -> int:
    """Return a digest of the values that a row's request is made of; of a bad row, of what is wrong with it.

    A column that is null is like one that is absent.
    """
    values: Any = repr(row)
    if isinstance(row, dict):
        values = [(name, row[name]) for name in sorted(needed.intersection(row)) if row[name] is not None]
    return int.from_bytes(hashlib.blake2b(repr(values).encode("utf-8", "surrogatepass"), digest_size=8).digest())
