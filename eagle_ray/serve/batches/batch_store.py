"""BatchStore: the files and batches of the endpoint, under `serving.batches.path`.

    salt                        salt of the API keys' digests, which name the owners' directories
    open/OWNER.batch_ID         an empty file for each batch that is not over
    OWNER/files, OWNER/contents files, see file_store
    OWNER/batches/batch_ID.json the record of a batch
    OWNER/work/batch_ID/        run of a batch that is not over (runs/run.py), with its answers
                                (line_answers) and the client's cancellation

On a local disk, only the user that runs the endpoint can read the store, since it holds uploads and
answers.

Only the process that runs a batch changes its record. So a client's cancellation is a file of its
own.

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
    """A directory or bucket of files and batches. Methods block on storage, and raise OSError if it fails."""

    root: StoragePath

    @classmethod
    def open(cls, path: str) -> BatchStore:
        """Return the store at a path. Raises ConfigError if it cannot be written."""
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
        """Return the salt of this store. The first call creates it."""
        file = self.root / "salt"
        file.create(secrets.token_hex(SALT_BYTES).encode())
        return bytes.fromhex(file.read_bytes().decode())

    def files(self, owner: str) -> FileStore:
        return FileStore(self.root, owner)

    def work(self, owner: str, id: str) -> StoragePath:
        """Return the directory of a batch's run."""
        return self.root / owner / "work" / id

    def create(self, record: BatchRecord, max_open: int) -> None:
        """Store a new batch. Raises ApiError if its owner has `max_open` batches that are not over."""
        self._marker(record.owner, record.id).create(b"")
        if len(self.open_ids(record.owner)) > max_open:
            self.remove_open(record.owner, record.id)
            message = f"this API key has {max_open} batches that are not over. Wait for one of them, or cancel one."
            raise ApiError(429, message, code="too_many_batches", retry_after_s=60)
        self._record(record.owner, record.id).write_atomic(record.model_dump_json().encode())

    def remove_open(self, owner: str, id: str) -> None:
        """Delete the mark of an open batch."""
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
        """Store the record. If the batch is over, end its run. Raises JobError if another run is current."""
        file, data = self._record(record.owner, record.id), record.model_dump_json().encode()
        if record.is_over:
            run.commit({file: data})
        else:
            run.publish(file, data)

    def close(self, owner: str, id: str) -> None:
        """Delete what only an open batch needs. If the process is killed here, `sweep` deletes the rest."""
        self.remove_open(owner, id)
        self.work(owner, id).remove_tree()

    def ids(self, owner: str) -> list[str]:
        """Return the ids of all batches of an owner, oldest first."""
        return [
            path.name.removesuffix(".json")
            for path in (self.root / owner / "batches").glob(f"{BATCH}*.json")
        ]

    def closed_ids(self, owner: str) -> list[str]:
        """Return the ids of batches that are over and still have a run's directory."""
        # The directories are listed first: a batch is open before it has one.
        ids = listed_ids(self.root / owner / "work", BATCH)
        return sorted(set(ids) - {id for _, id in self.open_ids(owner)})

    def open_ids(self, owner: str | None = None) -> list[tuple[str, str]]:
        """Return owner and id of each batch that is not over, oldest first.

        Args:
            owner: owner of the batches; None for all owners.
        """
        names = self._open_names(f"{owner or '*'}.{BATCH}*")
        pairs = [(of, id) for of, _, id in (name.partition(".") for name in names)]
        return sorted(pairs, key=lambda pair: pair[1])

    def cancel(self, record: BatchRecord) -> int:
        """Request the cancellation of a batch. Return the Unix time of the first such request."""
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
        """Return the Unix time at which the client cancelled a batch; None if it did not."""
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
    """Let only this user read an existing store or an empty directory."""
    names = root.list_names() if root.is_local else []
    if names and "salt" not in names:
        return
    own = [name for name in names if name in ("salt", "open", "all") or name.startswith("key-")]
    for name in own:
        (root / name).restrict()
    if own == names:
        root.restrict()
