"""DeltaTable: publish to a Delta table, by one transaction per publication that also records the published part files.

A publication that only adds files appends their rows. If published files have changed, all rows are
written again in the same transaction. The transaction carries (run id, number) as the table's
application id and version, and the record of files as metadata of the commit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from eagle_ray.core.errors import ConfigError, one_line
from eagle_ray.core.json_text import dump_json
from eagle_ray.publishing.publication import Commit, LostRace
from eagle_ray.runs.job_errors import PublishError
from eagle_ray.runs.part_files import read_part, schema_of
from eagle_ray.storage.path import StoragePath

COMMIT_KEY = "eagle_ray"  # key of a commit's metadata with the record of the files
# Operations of other writers that change no row.
KEEPING_ROWS = ("OPTIMIZE", "VACUUM START", "VACUUM END", "SET TBLPROPERTIES", "FSCK")
INSTALL_DELTA = "pip install 'eagle-ray[delta]'"


class DeltaTable:
    """A Delta table that a run is published to.

    Args:
        name: name as the user gave it.
        place: directory or URL of the table.
    """

    def __init__(self, name: str, place: str):
        self._name = name
        self._place = place
        try:
            import deltalake
        except ImportError as error:
            raise ConfigError(
                f"{name}: the package deltalake is missing. {INSTALL_DELTA}"
            ) from error
        self._delta = deltalake
        self._version: int | None = None  # version of the table when the record was read

    @property
    def name(self) -> str:
        return self._name

    def check(self) -> None:
        """Raise ConfigError if its directory holds something else."""
        self.record()

    def record(self) -> dict[str, Any] | None:
        """Return the record of the last publication. Raises ConfigError if the table was not made by a run."""
        table = self._table()
        self._version = None if table is None else table.version()
        if table is None:
            self._check_free()
            return None
        others = None  # the last operation of another writer, if it may have changed rows
        for commit in table.history():
            if COMMIT_KEY in commit:
                if others is not None:
                    raise ConfigError(f"{self._name}: {foreign_words(others)}")
                return json.loads(commit[COMMIT_KEY])
            if others is None and commit.get("operation") not in KEEPING_ROWS:
                others = f"{commit.get('operation')} of version {commit.get('version')}"
        raise ConfigError(
            f"{self._name}: this table was not published by a run. Choose another place"
        )

    def commit(self, commit: Commit, card: str) -> None:
        after = commit.after
        assert after.run_id is not None, "a commit has files of a run"
        properties = self._delta.CommitProperties(
            custom_metadata={COMMIT_KEY: dump_json(after.as_json())},
            app_transactions=[self._delta.Transaction(after.run_id, after.number)],
            max_commit_retries=0,
        )
        table = self._table()
        if (None if table is None else table.version()) != self._version:
            raise LostRace("another transaction came first")
        names = list(commit.written) if commit.only_adds else list(commit.files)
        try:
            self._delta.write_deltalake(
                self._place if table is None else table,
                _rows_of(commit.files, names),
                mode="append" if commit.only_adds else "overwrite",
                schema_mode="merge" if commit.only_adds else "overwrite",
                name=after.run_id,
                description=card,
                commit_properties=properties,
            )
        except self._delta.exceptions.CommitFailedError as error:
            raise LostRace("another transaction came first") from error
        except self._delta.exceptions.SchemaMismatchError as error:
            raise ConfigError(
                f"{self._name}: the table has other columns ({one_line(error)}). Choose another place"
            ) from error
        except (self._delta.exceptions.DeltaError, OSError) as error:
            raise PublishError(f"{self._name}: {one_line(error)}") from error

    def _table(self) -> Any:
        """Return the table as it is now, or None if there is none."""
        try:
            return self._delta.DeltaTable(self._place)
        except self._delta.exceptions.TableNotFoundError:
            return None
        except (self._delta.exceptions.DeltaError, OSError) as error:
            raise PublishError(f"{self._name}: {one_line(error)}") from error

    def _check_free(self) -> None:
        """Raise ConfigError if a local directory has something else in it."""
        place = Path(self._place)
        if "://" not in self._place and place.exists() and any(place.iterdir()):
            raise ConfigError(f"{self._name}: {place} is not empty and is no Delta table")


def foreign_words(operation: str) -> str:
    """Return the reason for not publishing to a table in which another writer has changed rows.

    Args:
        operation: name of the other writer's operation.
    """
    return (
        f"another writer has changed this table since the last publication ({operation}), so that it may lack rows or "
        "have them twice. Choose another place, or take the change back"
    )


def _rows_of(files: Mapping[str, StoragePath], names: Iterable[str]) -> pa.RecordBatchReader:
    """Return the rows of the named files, one file in memory at a time, by the columns of a run's files."""
    schema = table_of_part(next(iter(files.values()))).schema

    def batches() -> Iterator[pa.RecordBatch]:
        for name in names:
            yield from table_of_part(files[name]).select(schema.names).cast(schema).to_batches()

    return pa.RecordBatchReader.from_batches(schema, batches())


def table_of_part(file: StoragePath) -> pa.Table:
    """Return the rows of a part file, without the metadata of a run's files."""
    return read_part(file, schema_of([file]).names).replace_schema_metadata(None)
