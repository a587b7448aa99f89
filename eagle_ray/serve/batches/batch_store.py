"""BatchStore: everything that the endpoint keeps under `serving.batches.path`.

    salt                        of the API keys' digests, which name the owners' directories
    open/OWNER.batch_ID         an empty file per batch that is not over: what a runner has to do
    OWNER/files, OWNER/contents see file_store
    OWNER/batches/batch_ID.json the record
    OWNER/work/batch_ID/        while it runs: lease, cancel, and the parts of its answers

On a local disk all of it is for the user that runs the endpoint alone: uploads and answers are in it.

Only the process that holds a batch's lease changes its record. A client's cancellation is a file of its own.

    store = BatchStore.open("/data/batches")
    store.find("all", "batch_...").status         # 'in_progress'
"""

from __future__ import annotations

import json
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, replace

from eagle_ray.core.errors import ConfigError
from eagle_ray.serve.batches.batch_record import BatchRecord
from eagle_ray.serve.batches.file_store import BATCH, FILE, FileStore, is_id, names_in, new_id
from eagle_ray.serve.http_errors import ApiError
from eagle_ray.storage.path import StoragePath, json_bytes, read_json_object, write_json

KEY = "serving.batches.path"
SALT_BYTES = 16
LIST_TRIES = 5


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What a client asks for. Durations are in seconds."""

    endpoint: str
    input_file_id: str
    completion_window: str
    window_s: int
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None


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
                f"{KEY}: cannot write {path} ({error}). Name a directory, or a bucket as s3://BUCKET/PREFIX."
            ) from None
        return cls(root)

    def salt(self) -> bytes:
        """Return the salt of this store, which is made at the first call and then stays."""
        file = self.root / "salt"
        file.create(secrets.token_hex(SALT_BYTES).encode())
        return bytes.fromhex(file.read_bytes().decode())

    def files(self, owner: str) -> FileStore:
        return FileStore(self.root, owner)

    def work(self, record: BatchRecord) -> StoragePath:
        """Return the directory of what a running batch needs."""
        return self.root / record.owner / "work" / record.id

    def create(self, owner: str, request: BatchRequest, max_open: int) -> BatchRecord:
        """Write a new batch and return it. Raises ApiError if its owner has max_open batches that are not over."""
        now = int(time.time())
        record = BatchRecord(
            id=new_id(BATCH),
            owner=owner,
            endpoint=request.endpoint,
            input_file_id=request.input_file_id,
            completion_window=request.completion_window,
            created_at=now,
            expires_at=now + request.window_s,
            output_id=new_id(FILE),
            error_id=new_id(FILE),
            metadata=request.metadata,
            output_expires_after_s=request.output_expires_after_s,
        )
        self._marker(owner, record.id).create(b"")
        if len(self.open_ids(owner)) > max_open:
            self.forget(owner, record.id)
            message = f"this API key has {max_open} batches that are not over. Wait for one of them, or cancel one."
            raise ApiError(429, message, code="too_many_batches", retry_after_s=60)
        write_json(self._record(owner, record.id), record.stored())
        return record

    def forget(self, owner: str, id: str) -> None:
        """Take a batch out of those that are not over."""
        self._marker(owner, id).remove()

    def get(self, owner: str, id: str) -> BatchRecord:
        """Return a batch. Raises ApiError with 404 if there is none."""
        record = self.find(owner, id)
        if record is None:
            raise ApiError(404, f"there is no batch {id!r} of this API key", "batch_id", "batch_not_found")
        return record

    def find(self, owner: str, id: str) -> BatchRecord | None:
        found = read_json_object(self._record(owner, id)) if is_id(id, BATCH) else None
        return BatchRecord.of(found) if found else None

    def save(self, record: BatchRecord) -> None:
        """Write the record. Only the holder of the batch's lease does."""
        write_json(self._record(record.owner, record.id), record.stored())

    def close(self, record: BatchRecord) -> None:
        """Write the record of a batch that is over, and delete what only a running batch needs."""
        self.save(record)
        self.work(record).remove_tree()
        self.forget(record.owner, record.id)  # last: a process that is killed before this leaves the rest to another

    def ids(self, owner: str) -> list[str]:
        """Return the ids of all batches of an owner, oldest first."""
        return [path.name.removesuffix(".json") for path in (self.root / owner / "batches").glob(f"{BATCH}*.json")]

    def left_over(self, owner: str) -> list[BatchRecord]:
        """Return the batches that are over and still have what only a running batch needs."""
        records = [self.find(owner, id) for id in names_in(self.root / owner / "work")]
        return [record for record in records if record is not None and record.is_over]

    def open_ids(self, owner: str | None = None) -> list[tuple[str, str]]:
        """Return owner and id of every batch that is not over, oldest first. owner: of this one alone."""
        names = self._open_names(f"{owner or '*'}.{BATCH}*")
        pairs = [(name.partition(".")[0], name.partition(".")[2]) for name in names]
        return sorted(pairs, key=lambda pair: pair[1])

    def cancel(self, record: BatchRecord) -> int:
        """Ask the process that runs the batch to cancel it; return when it was first asked."""
        now = int(time.time())
        (self.work(record) / "cancel").create(json_bytes(now))
        current = self.find(record.owner, record.id)
        if current is not None and current.is_over:  # it ended meanwhile
            self.work(record).remove_tree()
        return self.cancelling_at(record) or now

    def cancelling_at(self, record: BatchRecord) -> int | None:
        """Return when the batch's client cancelled it, or None."""
        if "cancelling" in record.times:
            return record.times["cancelling"]
        try:
            return json.loads((self.work(record) / "cancel").read_bytes()) if not record.is_over else None
        except FileNotFoundError:
            return None

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
    """Close a store that an earlier version has made, or a directory that is empty, to other users."""
    names = root.list_names() if root.is_local else []
    if names and "salt" not in names:
        return
    own = [name for name in names if name in ("salt", "open", "all") or name.startswith("key-")]
    for name in own:
        (root / name).restrict()
    if own == names:
        root.restrict()
