"""Token ids of earlier outputs: what `speculative.datastore` names, to draft from by retrieval.

a run directory of ours       the outputs in its data files
a Parquet file                its column token_ids, or output_token_ids
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from eagle_ray.config import ConfigError

COLUMNS = ("token_ids", "output_token_ids")
KEY = "speculative.datastore"


def read_datastore(name: str, vocab_size: int) -> list[list[int]]:
    """Return the texts, in the files' order. Raises ConfigError if there are none, or none of this vocabulary."""
    texts = [ids for column in columns_of(name, KEY) for ids in column.to_pylist() if ids]
    if not texts:
        raise ConfigError(f"{KEY}: there are no token ids in {name}; output.store_token_ids keeps them")
    largest = max(map(max, texts))
    if largest >= vocab_size:
        raise ConfigError(
            f"{KEY}: {name} holds token id {largest} and the target's vocabulary has {vocab_size}: it "
            "was made with another target"
        )
    return texts


def check_datastore(name: str) -> None:
    """Check names and columns without reading texts. Raises ConfigError."""
    for file in _files(name, KEY):
        _column_name(file, KEY)


def columns_of(name: str, key: str) -> Iterator[pa.ChunkedArray]:
    """Yield the lists of token ids of every file, in order. key: the configuration key of the name, for errors."""
    for file in _files(name, key):
        yield pq.read_table(file, columns=[_column_name(file, key)], partitioning=None).column(0)


def _files(name: str, key: str) -> list[Path]:
    path = Path(name)
    files = [path] if path.is_file() else sorted((path / "data").rglob("*.parquet"))
    if not files:
        raise ConfigError(f"{key}: {name} is neither a run directory with data in it nor a file")
    return files


def _column_name(file: Path, key: str) -> str:
    try:
        schema = pq.read_schema(file)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{key}: {file} cannot be read as Parquet: {error}") from None
    for name in COLUMNS:
        kind = schema.field(name).type if name in schema.names else pa.null()
        if pa.types.is_list(kind) and pa.types.is_integer(kind.value_type):
            return name
    raise ConfigError(f"{key}: {file} has no column {' or '.join(COLUMNS)} of lists of integers")
