"""IcebergTable: publish to an Iceberg table, by one transaction per publication that also records
the published part files.

A publication that only adds files appends their rows, a snapshot for each file. If published files
have changed, all rows are written again in the same transaction. The record is a property of the
table, and each snapshot says (run id, number) in its summary. A transaction names its parent
snapshot, so it is refused if another one came first.

The catalog is one of PyIceberg's configuration (``~/.pyiceberg.yaml`` or
PYICEBERG_CATALOG__NAME__URI).
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from eagle_ray.config.destination import ICEBERG
from eagle_ray.core.errors import ConfigError, one_line
from eagle_ray.core.json_text import dump_json
from eagle_ray.publishing.delta_table import foreign_words, table_of_part
from eagle_ray.publishing.publication import Commit, LostRace
from eagle_ray.runs.job_errors import PublishError

RECORD_KEY = "eagle_ray.record"  # property of the table: the record of the files
# Keys in the summary of a snapshot.
RUN_KEY = "eagle_ray.run_id"
NUMBER_KEY = "eagle_ray.number"
DEFAULT_CATALOG = "default"
REWRITE = "replace"  # operation of a snapshot that changes files and no row
INSTALL = "pip install 'eagle-ray[iceberg]'"


class IcebergTable:
    """An Iceberg table that a run is published to.

    Args:
        name: name as the user gave it: iceberg:[CATALOG/]NAMESPACE.TABLE.
    """

    def __init__(self, name: str):
        self._name = name
        catalog, _, self._identifier = name.removeprefix(ICEBERG).rpartition("/")
        try:
            import pyiceberg.catalog
            import pyiceberg.exceptions
        except ImportError as error:
            raise ConfigError(f"{name}: the package pyiceberg is missing. {INSTALL}") from error
        self._errors: Any = pyiceberg.exceptions
        self._catalog_name = catalog or DEFAULT_CATALOG
        try:
            self._catalog: Any = pyiceberg.catalog.load_catalog(self._catalog_name)
        except Exception as error:  # of many kinds: a missing key, a driver, an address
            raise ConfigError(
                f"{name}: the catalog {self._catalog_name!r} cannot be opened ({one_line(error)}). Name it in "
                "~/.pyiceberg.yaml, or set PYICEBERG_CATALOG__NAME__URI"
            ) from error
        self._snapshot: int | None = None  # of the table when the record was read
        self._is_there = False

    @property
    def name(self) -> str:
        return self._name

    def check(self) -> None:
        """Raise ConfigError if the catalog has something else under its name."""
        self.record()

    def record(self) -> dict[str, Any] | None:
        """Return the record of the last publication. Raises ConfigError if the table was not made by a run."""
        table = self._table()
        self._is_there = table is not None
        self._snapshot = _snapshot_of(table)
        if table is None:
            return None
        if RECORD_KEY not in table.properties:
            raise ConfigError(
                f"{self._name}: this table was not published by a run. Choose another one"
            )
        self._check_own_rows(table)
        return json.loads(table.properties[RECORD_KEY])

    def _check_own_rows(self, table: Any) -> None:
        """Raise ConfigError if another writer has changed rows. Compacted files have the same rows."""
        snapshot = table.current_snapshot()
        while snapshot is not None:
            summary = snapshot.summary
            if summary is not None and summary[RUN_KEY] is not None:
                return
            operation = "" if summary is None else str(summary.operation.value)
            if operation != REWRITE:
                raise ConfigError(f"{self._name}: {foreign_words(f'a snapshot {operation!r}')}")
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else table.snapshot_by_id(parent)

    def commit(self, commit: Commit, card: str) -> None:
        after = commit.after
        assert after.run_id is not None, "a commit has files of a run"
        table = self._table()
        if (table is not None, _snapshot_of(table)) != (self._is_there, self._snapshot):
            raise LostRace("another transaction came first")
        names = list(commit.written) if commit.only_adds else list(commit.files)
        summary = {RUN_KEY: after.run_id, NUMBER_KEY: str(after.number)}
        try:
            first = table_of_part(next(iter(commit.files.values())))
            with self._transaction(table, first.schema) as transaction:
                if table is not None:
                    with transaction.update_schema() as update:
                        update.union_by_name(first.schema)
                if not commit.only_adds:
                    transaction.delete("true", snapshot_properties=summary)
                for name in names:
                    rows = table_of_part(commit.files[name])
                    rows = rows.select(first.schema.names).cast(first.schema)
                    transaction.append(rows, snapshot_properties=summary)
                transaction.set_properties(
                    {RECORD_KEY: dump_json(after.as_json()), "comment": card}
                )
        except self._errors.CommitFailedException as error:
            raise LostRace("another transaction came first") from error
        except self._errors.TableAlreadyExistsError as error:
            raise LostRace("another writer has made the table") from error
        except (ValueError, TypeError, pa.ArrowException) as error:
            raise ConfigError(
                f"{self._name}: the table cannot have these columns ({one_line(error)}). Choose another one"
            ) from error
        except Exception as error:  # of the catalog's own kinds, such as a database that is locked
            raise PublishError(f"{self._name}: {one_line(error)}") from error

    def _table(self) -> Any:
        """Return the table as it is now, or None if there is none."""
        try:
            return self._catalog.load_table(self._identifier)
        except self._errors.NoSuchTableError:
            return None
        except Exception as error:  # of the catalog's own kinds
            raise PublishError(f"{self._name}: {one_line(error)}") from error

    def _transaction(self, table: Any, schema: pa.Schema) -> Any:
        """Return a transaction on the table, or one that makes it."""
        if table is not None:
            return table.transaction()
        namespace = self._identifier.rpartition(".")[0]
        self._catalog.create_namespace_if_not_exists(namespace)
        return self._catalog.create_table_transaction(self._identifier, schema)


def _snapshot_of(table: Any) -> int | None:
    snapshot = None if table is None else table.current_snapshot()
    return None if snapshot is None else snapshot.snapshot_id
