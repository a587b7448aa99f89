"""BatchStore: everything that the endpoint keeps under `serving.batches.path`.

    salt                        of the API keys' digests, which name the owners' directories
    open/OWNER.batch_ID         an empty file per batch that is not over: what a runner has to do
    OWNER/files, OWNER/contents see file_store
    OWNER/batches/batch_ID.json the record
    OWNER/work/batch_ID/        until it is over: its run (runs/run.py) with its answers (line_answers), and cancel

On a local disk all of it is for the user that runs the endpoint alone: uploads and answers are in
it.

Only the process that runs a batch changes its record. A client's cancellation is a file of its own.

    store = BatchStore.open("/data/batches")
    store.find("all", "batch_...").status         # 'in_progress'
"""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, replace

from eagle_ray.core.errors import ConfigError
from eagle_ray.runs.run import Run
from eagle_ray.serve.batches.batch_models import BATCH, BatchRecord, is_id
from eagle_ray.serve.batches.file_store import FileStore, listed_ids
from eagle_ray.serve.http.http_answers import ApiError
from eagle_ray.storage.path import StoragePath, json_bytes, read_json, read_json_object

BATCHES_PATH_KEY = "serving.batches.path"
SALT_BYTES = 16
LIST_TRIES = 5


@dataclass(frozen=True, slots=True)
class BatchStore:
    """A directory or bucket of files and batches. Methods block on storage and raise OSError if it fails."""

    root: StoragePath

    @classmethod
    def open(cls, path: str) -> BatchStore:
        """Return the store after a look whether it can be written. Raises ConfigError."""
        try:
            root = StoragePath.of(path)
            if not root.is_local and not root.is_s3:
                raise ValueError("it can only be read there")
            root.parent.make_directory()
            root = replace(root, is_private=True)
            root.make_directory()
            root.check_writable()
            _restrict(root)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{BATCHES_PATH_KEY}: cannot write {path} ({error}). Name a directory, or a bucket as s3://BUCKET/PREFIX."
            ) from None
        return cls(root)

    def salt(self) -> bytes:
        """Return the salt of this store, which is made at the first call and then stays."""
        file = self.root / "salt"
        file.create(secrets.token_hex(SALT_BYTES).encode())
        return bytes.fromhex(file.read_bytes().decode())

    def files(self, owner: str) -> FileStore:
        return FileStore(self.root, owner)

    def work(self, owner: str, id: str) -> StoragePath:
        """Return the directory of a batch's run."""
        return self.root / owner / "work" / id

    def create(self, record: BatchRecord, max_open: int) -> None:
        """Write a new batch. Raises ApiError if its owner has max_open batches that are not over."""
        self._marker(record.owner, record.id).create(b"")
        if len(self.open_ids(record.owner)) > max_open:
            self.remove_open(record.owner, record.id)
            message = f"this API key has {max_open} batches that are not over. Wait for one of them, or cancel one."
            raise ApiError(429, message, code="too_many_batches", retry_after_s=60)
        self._record(record.owner, record.id).write_atomic(record.model_dump_json().encode())

    def remove_open(self, owner: str, id: str) -> None:
        """Mark a batch as not open any more."""
        self._marker(owner, id).remove()

    def get(self, owner: str, id: str) -> BatchRecord:
        """Return a batch. Raises ApiError with 404 if there is none."""
        record = self.find(owner, id)
        if record is None:
            raise ApiError(
                404, f"there is no batch {id!r} of this API key", "batch_id", "batch_not_found"
            )
        return record

    def find(self, owner: str, id: str) -> BatchRecord | None:
        stored = read_json_object(self._record(owner, id)) if is_id(id, BATCH) else None
        return BatchRecord(**stored) if stored else None

    def save(self, record: BatchRecord, run: Run) -> None:
        """Write the record, which ends the run of a batch that is over. Raises JobError if another run is current."""
        file, data = self._record(record.owner, record.id), record.model_dump_json().encode()
        if record.is_over:
            run.commit({file: data})
        else:
            run.publish(file, data)

    def close(self, owner: str, id: str) -> None:
        """Delete what only an open batch needs. If the process is killed here, a sweep deletes the rest."""
        self.remove_open(owner, id)
        self.work(owner, id).remove_tree()

    def ids(self, owner: str) -> list[str]:
        """Return the ids of all batches of an owner, oldest first."""
        return [
            path.name.removesuffix(".json")
            for path in (self.root / owner / "batches").glob(f"{BATCH}*.json")
        ]

    def closed_ids(self, owner: str) -> list[str]:
        """Return the batches that are over and still have a run's directory."""
        # The directories are listed first: a batch is open before it has one.
        ids = listed_ids(self.root / owner / "work", BATCH)
        return sorted(set(ids) - {id for _, id in self.open_ids(owner)})

    def open_ids(self, owner: str | None = None) -> list[tuple[str, str]]:
        """Return owner and id of every batch that is not over, oldest first.

        Args:
            owner: the only owner whose batches are returned; None returns all.
        """
        names = self._open_names(f"{owner or '*'}.{BATCH}*")
        pairs = [(of, id) for of, _, id in (name.partition(".") for name in names)]
        return sorted(pairs, key=lambda pair: pair[1])

    def cancel(self, record: BatchRecord) -> int:
        """Request the cancellation of a batch, and return when it was first requested."""
        now = int(time.time())
        file = self.work(record.owner, record.id) / "cancel"
        while not file.exists():
            # A process that claims the run meanwhile removes temporary files, as those of a create.
            with suppress(FileNotFoundError):
                file.create(json_bytes(now))
        current = self.find(record.owner, record.id)
        if current is not None and current.is_over:  # it ended meanwhile
            self.work(record.owner, record.id).remove_tree()
        return self.cancelling_at(record) or now

    def cancelling_at(self, record: BatchRecord) -> int | None:
        """Return when the batch's client cancelled it, or None."""
        if record.cancelling_at is not None:
            return record.cancelling_at
        stored = (
            None if record.is_over else read_json(self.work(record.owner, record.id) / "cancel")
        )
        return stored if isinstance(stored, int) else None

    def owners(self) -> list[str]:
        return [name for name in self.root.list_names() if name == "all" or name.startswith("key-")]

    def _open_names(self, pattern: str) -> list[str]:
        for _ in range(LIST_TRIES - 1):
            with suppress(FileNotFoundError):  # a batch ended while it was listed
                return [path.name for path in (self.root / "open").glob(pattern)]
        return [path.name for path in (self.root / "open").glob(pattern)]

    def _record(self, owner: str, id: str) -> StoragePath:
        return self.root / owner / "batches" / f"{id}.json"

    def _marker(self, owner: str, id: str) -> StoragePath:
        return self.root / "open" / f"{owner}.{id}"


def _restrict(root: StoragePath) -> None:
    """Restrict an existing store, or an empty directory, to this user."""
    names = root.list_names() if root.is_local else []
    if names and "salt" not in names:
        return
    own = [name for name in names if name in ("salt", "open", "all") or name.startswith("key-")]
    for name in own:
        (root / name).restrict()
    if own == names:
        root.restrict()
