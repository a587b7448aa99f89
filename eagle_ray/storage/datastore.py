"""Read the token ids of a datastore for retrieval drafts (`speculative.datastore`).

    read_datastore("runs/first", vocab_size=49152)     # one list of token ids for each text

The key names a run directory, whose outputs are read, or a Parquet file with a column token_ids or
output_token_ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from eagle_ray.core.errors import ConfigError, one_line
from eagle_ray.storage.checked_parquet import is_damage, open_parquet
from eagle_ray.storage.path import StoragePath

DATASTORE_COLUMNS = ("token_ids", "output_token_ids")
DATASTORE_KEY = "speculative.datastore"


def read_datastore(name: str, vocab_size: int) -> list[list[int]]:
    """Return the token ids of all texts, in the files' order. Raises ConfigError without texts, or
    if ids exceed the vocabulary."""
    texts = [ids for column in columns_of(name, DATASTORE_KEY) for ids in column.to_pylist() if ids]
    if not texts:
        raise ConfigError(
            f"{DATASTORE_KEY}: there are no token ids in {name}; output.store_token_ids keeps them"
        )
    largest = max(map(max, texts))
    if largest >= vocab_size:
        raise ConfigError(
            f"{DATASTORE_KEY}: {name} holds token id {largest} and the target's vocabulary has {vocab_size}: it "
            "was made with another target"
        )
    return texts


def check_datastore(name: str) -> None:
    """Check names and columns without reading texts. Raises ConfigError."""
    for file in _files(name, DATASTORE_KEY):
        with _parquet(file, DATASTORE_KEY) as parquet:
            _column_name(parquet, file, DATASTORE_KEY)


def columns_of(name: str, key: str) -> Iterator[pa.ChunkedArray]:
    """Yield the column of token id lists of every file, in order.

    Args:
        key: configuration key of the name, for errors.
    """
    for file in _files(name, key):
        with _parquet(file, key) as parquet:
            yield parquet.read(columns=[_column_name(parquet, file, key)]).column(0)


def _files(name: str, key: str) -> list[Path]:
    path = Path(name)
    files = [path] if path.is_file() else sorted((path / "data").rglob("*.parquet"))
    if not files:
        raise ConfigError(f"{key}: {name} is neither a run directory with data in it nor a file")
    return files


@contextmanager
def _parquet(file: Path, key: str) -> Iterator[pq.ParquetFile]:
    """Open a file. Raises ConfigError naming it if it or what the body reads of it is damaged."""
    try:
        with open_parquet(StoragePath.of(file)) as parquet:
            yield parquet
    except Exception as error:
        if not (isinstance(error, OSError) or is_damage(error)):
            raise
        raise ConfigError(f"{key}: {file} cannot be read as Parquet: {one_line(error)}") from None


def _column_name(parquet: pq.ParquetFile, file: Path, key: str) -> str:
    schema = parquet.schema_arrow
    for name in DATASTORE_COLUMNS:
        kind = schema.field(name).type if name in schema.names else pa.null()
        if pa.types.is_list(kind) and pa.types.is_integer(kind.value_type):
            return name
    raise ConfigError(
        f"{key}: {file} has no column {' or '.join(DATASTORE_COLUMNS)} of lists of integers"
    )
