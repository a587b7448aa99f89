"""Row index: a run's cache of its rows' ids on disk, sorted, so that a start need not read the rows again.

The index is in ``OUT/_index``. If it is lost, damaged or out of date, it is built again. A segment
is an Arrow file of at most SEGMENT_ROWS rows, sorted by id, with 16 bytes of digest a row and a few
numbers. It is mapped into memory, so that a driver holds no copy. Several segments are read
together by ranges of the digest, which bounds memory whatever the number of rows.

An id is known by its digest: a million ids take sixteen megabytes instead of two hundred. A chance
collision is expected only after some 10^19 ids.

    >>> index = StoragePath.of("runs/a/_index")
    >>> table = sorted_by_id({"id": digests(["b", "a"]), "file": np.zeros(2, np.uint32)})
    >>> segment = write_segment(index, "output", table)
    >>> read_segment(index, segment)["id"] == table["id"]
    array([ True,  True])
"""

from __future__ import annotations

import hashlib
import logging
import math
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa

from eagle_ray.core.json_text import dump_json
from eagle_ray.runs.job_errors import OutputDamaged
from eagle_ray.storage.path import StoragePath, read_json_object

log = logging.getLogger("eagle_ray")
INDEX_DIRECTORY = "_index"  # a directory next to data/
SEGMENT_ROWS = 1 << 21
RANGE_ROWS = 1 << 20  # rows in memory at a time
MAX_SMALL_SEGMENTS = 64  # above those that the rows fill
PREFIXES = 1 << 16  # ranges are cut at two-byte prefixes of the digest
SIZE = 16  # bytes of a digest
DIGEST = np.dtype(f"S{SIZE}")
Digests = np.ndarray  # one-dimensional, of DIGEST
NO_DIGESTS = np.empty(0, DIGEST)
AT_ONCE = 1 << 16  # ids per look-up, so that its memory does not grow with the job
Table = dict[str, np.ndarray]
"""Columns of equal length; "id" holds digests."""


class IndexDamaged(OutputDamaged):
    """A segment is missing or was changed after it was written."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of the index.

    Attributes:
        checksum: CRC-32 of its bytes.
    """

    name: str
    num_rows: int
    checksum: int

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "num_rows": self.num_rows, "checksum": self.checksum}


def digest(request_id: str) -> bytes:
    """Return the digest of an id. The id may contain half of a surrogate pair."""
    data = request_id.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=SIZE).digest()


def digests(ids: Iterable[str]) -> Digests:
    """Return the digests in the order of the ids."""
    return np.frombuffer(b"".join(map(digest, ids)), DIGEST)


def index_of(ids: Digests, known: Digests) -> np.ndarray:
    """Return for each id its index in the sorted array `known`, or -1."""
    index = np.full(len(ids), -1)
    if not len(known):
        return index
    for start in range(0, len(ids), AT_ONCE):
        some = slice(start, start + AT_ONCE)
        wanted = ids[some]
        nearest = np.searchsorted(known, wanted)
        nearest = np.minimum(nearest, len(known) - 1)
        is_known = known[nearest] == wanted
        index[some] = np.where(is_known, nearest, -1)
    return index


def isin(ids: Digests, known: Digests) -> np.ndarray:
    """Return for each id whether it is in the sorted array `known`."""
    return index_of(ids, known) >= 0


def duplicates(ids: Digests) -> Digests:
    """Return the ids that occur more than once in a sorted array."""
    later = ids[1:]
    is_repeated = later == ids[:-1]
    return np.unique(later[is_repeated])


def sorted_by_id(table: Table) -> Table:
    order = np.argsort(table["id"], kind="stable")
    return take(table, order)


def take(table: Table, chosen: np.ndarray) -> Table:
    """Return some rows of a table, given by indices or by a mask."""
    return {name: column[chosen] for name, column in table.items()}


def cut(table: Table, start: int, stop: int) -> Table:
    return {name: column[start:stop] for name, column in table.items()}


def join(tables: Sequence[Table], empty: Table) -> Table:
    """Concatenate tables.

    Args:
        empty: table with these columns and no rows.
    """
    joined = {}
    for name, column in empty.items():
        columns = [table[name] for table in tables]
        joined[name] = np.concatenate([column, *columns])
    return joined


def write_segment(directory: StoragePath, kind: str, table: Table) -> Segment:
    """Write a sorted table as a new file of the index."""
    columns = {name: _as_arrow(column) for name, column in table.items()}
    arrow = pa.table(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, arrow.schema) as writer:
        writer.write_table(arrow)
    data = sink.getvalue().to_pybytes()
    name = f"{kind}-{uuid4().hex[:12]}.arrow"
    (directory / name).write_atomic(data)
    return Segment(name, len(table["id"]), zlib.crc32(data))


def read_segment(directory: StoragePath, segment: Segment) -> Table:
    """Return a segment, mapped into memory if it is local. Raises IndexDamaged."""
    file = directory / segment.name
    try:
        source = _mapped(file)
        if zlib.crc32(source.read_buffer()) != segment.checksum:
            raise IndexDamaged(
                f"{file} is not what was written. Delete {directory}: it is built again."
            )
        source.seek(0)
        arrow = pa.ipc.open_file(source).read_all()
        return {name: _as_numpy(arrow[name]) for name in arrow.column_names}
    except (OSError, pa.ArrowException) as error:
        raise IndexDamaged(
            f"{file} cannot be read ({error}). Delete {directory}: it is built again."
        ) from error


def _mapped(file: StoragePath) -> pa.MemoryMappedFile:
    """Map a file into memory; one that is elsewhere is copied to a temporary file that lives as long as the map."""
    if file.is_local:
        return pa.memory_map(file.text)
    with tempfile.NamedTemporaryFile(prefix="eagle-ray-index-") as copy, file.open() as stream:
        shutil.copyfileobj(stream, copy)
        copy.flush()
        return pa.memory_map(copy.name)


def segments_in(facts: list[dict[str, Any]]) -> list[Segment]:
    """Return segments from their JSON form. Raises TypeError for another form."""
    return [Segment(**fact) for fact in facts]


def read_index_file(file: StoragePath) -> dict[str, Any] | None:
    """Return the JSON object of an index file, or None if it is missing, unreadable or was changed."""
    try:
        facts = read_json_object(file)
    except OSError:
        return None
    if facts is None:
        return None

    # Files of earlier releases have no checksum.
    checksum = facts.pop("checksum", None)
    is_intact = checksum in (None, _checksum_of(facts))
    return facts if is_intact else None


def _checksum_of(facts: dict[str, Any]) -> int:
    """Return the CRC-32 of an index file's content without its checksum."""
    others = {name: value for name, value in facts.items() if name != "checksum"}
    text = dump_json(others, separators=(",", ":"))
    return zlib.crc32(text.encode())


def free_index_name(output: StoragePath) -> None:
    """Delete a file that occupies the name of the index's directory. The caller must hold the lock."""
    place = output / INDEX_DIRECTORY
    if place.is_local and place.exists():
        log.warning("%s is a file, not a directory: deleted, and the index is built again", place)
        place.remove()


def write_rows(directory: StoragePath, kind: str, tables: Iterable[Table]) -> list[Segment]:
    """Write tables in any order as segments of at most SEGMENT_ROWS rows, each sorted."""
    segments: list[Segment] = []
    waiting: list[Table] = []
    num_waiting = 0
    for table in tables:
        for start in range(0, len(table["id"]), SEGMENT_ROWS):
            part = cut(table, start, start + SEGMENT_ROWS)
            waiting.append(part)
            num_waiting += len(part["id"])
            if num_waiting >= SEGMENT_ROWS:
                segments.append(_write_joined(directory, kind, waiting))
                waiting = []
                num_waiting = 0
    if waiting:
        segments.append(_write_joined(directory, kind, waiting))
    return segments


def _write_joined(directory: StoragePath, kind: str, tables: list[Table]) -> Segment:
    empty = cut(tables[0], 0, 0)
    rows = join(tables, empty)
    return write_segment(directory, kind, sorted_by_id(rows))


def remove_unused(directory: StoragePath, kind: str, used: Iterable[Segment]) -> None:
    """Delete segments that the index does not name, for example those of a killed writer."""
    names = {segment.name for segment in used}
    with suppress(OSError):
        for file in directory.glob(f"{kind}-*.arrow"):
            if file.name not in names:
                file.remove()


def has_many_segments(num_segments: int, num_rows: int) -> bool:
    """Return whether segments should be merged, because each start may have added a small one."""
    return num_segments > MAX_SMALL_SEGMENTS + 2 * num_rows // SEGMENT_ROWS


def write_facts(file: StoragePath, facts: dict[str, Any]) -> None:
    """Write a JSON file of the index with its checksum, compactly, since it may list many files and shards."""
    checked = facts | {"checksum": _checksum_of(facts)}
    text = dump_json(checked, separators=(",", ":"))
    file.write_atomic(text.encode())


def num_ranges(num_rows: int) -> int:
    """Return into how many ranges of digests this many rows are split."""
    needed = math.ceil(num_rows / RANGE_ROWS)
    return min(PREFIXES, max(1, needed))


def ranges(tables: Sequence[Table], parts: int) -> Iterator[list[Table]]:
    """Yield the rows of sorted tables by ascending range of digests, as a list of parts of the tables."""
    # Where each table is cut: at the first id that is not below a bound.
    inner_bounds = b"".join(_bound(i, parts) for i in range(1, parts))
    bounds = np.frombuffer(inner_bounds, DIGEST)
    cuts = []
    for table in tables:
        inner = np.searchsorted(table["id"], bounds).tolist()
        cuts.append([0, *inner, len(table["id"])])

    for i in range(parts):
        pairs = zip(tables, cuts, strict=True)
        yield [cut(table, at[i], at[i + 1]) for table, at in pairs]


def joined_ranges(tables: Sequence[Table], empty: Table) -> Iterator[Table]:
    """Yield all rows of sorted tables, one range of digests at a time, concatenated.

    Args:
        empty: table with these columns and no rows.
    """
    num_rows = sum(len(table["id"]) for table in tables)
    for parts in ranges(tables, num_ranges(num_rows)):
        yield join(parts, empty)


def _bound(part: int, parts: int) -> bytes:
    """Return the first digest of a part."""
    prefix = part * PREFIXES // parts
    return prefix.to_bytes(2, "big") + bytes(SIZE - 2)


def _as_arrow(column: np.ndarray) -> pa.Array:
    if column.dtype != DIGEST:
        return pa.array(column)
    data = pa.py_buffer(np.ascontiguousarray(column).tobytes())
    return pa.Array.from_buffers(pa.binary(SIZE), len(column), [None, data])


def _as_numpy(column: pa.ChunkedArray) -> np.ndarray:
    if column.num_chunks == 0:
        is_digest = column.type == pa.binary(SIZE)
        return np.empty(0, DIGEST if is_digest else column.type.to_pandas_dtype())
    [array] = column.chunks
    if array.type != pa.binary(SIZE):
        return array.to_numpy()
    return np.frombuffer(array.buffers()[1], DIGEST, len(array))
