"""BatchStore: everything that the endpoint keeps under `serving.batches.path`; and AnswerLog: a batch's answered lines.

    salt                        of the API keys' digests, which name the owners' directories
    open/OWNER.batch_ID         an empty file per batch that is not over: what a runner has to do
    OWNER/files, OWNER/contents see file_store
    OWNER/batches/batch_ID.json the record
    OWNER/work/batch_ID/        until it is over: its run (runs/run.py) with the parts of its answers, and cancel

On a local disk all of it is for the user that runs the endpoint alone: uploads and answers are in
it.

Only the process that runs a batch changes its record. A client's cancellation is a file of its own.

    store = BatchStore.open("/data/batches")
    store.find("all", "batch_...").status         # 'in_progress'

An AnswerLog is the numbered part files of a batch's run. A part is created only if no part of its
number exists, by a writer that has read every part before it, and holds no line that one of them
answers. So each custom_id stands in the log once, whatever is killed and however many processes
believe that the batch is theirs: of two writers of one part, one succeeds, and the other reads it
and goes on.

    log = AnswerLog(run)
    log.append([error_answer("batch_...", "a", "worker_died", "...")])
    "a" in log.answered     # True
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from eagle_ray.core.errors import ConfigError
from eagle_ray.core.json_text import dump_json
from eagle_ray.requests.answers import NO_TOKENS, TokenUsage, error_line, line_head, line_key
from eagle_ray.runs.run import Run
from eagle_ray.serve.batches.batch_models import BATCH, BatchRecord, is_id
from eagle_ray.serve.batches.file_store import FileStore, listed_ids
from eagle_ray.serve.http_answers import ApiError
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


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """A line of an output file or an error file."""

    custom_id: str
    line: bytes  # without a line break
    is_completed: bool
    usage: TokenUsage

    @classmethod
    def of(cls, line: bytes) -> LineAnswer:
        stored = json.loads(line)
        response = stored["response"] or {}
        is_completed = response.get("status_code") == 200
        usage = TokenUsage.of_body(response["body"]) if is_completed else NO_TOKENS
        return cls(stored["custom_id"], line, is_completed, usage)


def response_answer(batch_id: str, custom_id: str, status: int, body: bytes) -> LineAnswer:
    """Return the answer of a line that the endpoint responded to.

    Args:
        body: the response's JSON.
    """
    key = line_key(batch_id, custom_id)
    head = dump_json(line_head(key, custom_id), ensure_ascii=False)
    response = f'{{"status_code": {status}, "request_id": "{key}", "body": '.encode()
    return LineAnswer.of(
        head[:-1].encode() + b', "response": ' + response + body + b'}, "error": null}'
    )


def error_answer(batch_id: str, custom_id: str, code: str, message: str) -> LineAnswer:
    """Return the answer of a line that got no response."""
    line = error_line(line_key(batch_id, custom_id), custom_id, code, message)
    return LineAnswer.of(dump_json(line, ensure_ascii=False).encode())


def line_seed(batch_id: str, custom_id: str) -> int:
    """Return the seed for a line without one. It is derived, so a second run gives equal tokens."""
    return int(line_key(batch_id, custom_id)[:15], 16)


class AnswerLog:
    """The log of one run. Methods block on storage and raise OSError if it fails, JobError if the run is lost.

    It is not for several threads.
    """

    def __init__(self, run: Run):
        self._run = run
        self._num_parts = 0
        self.answered: set[str] = set()
        self.completed = self.failed = 0
        self.usage = NO_TOKENS

    def load(self) -> None:
        """Read the parts that this process has not read or written."""
        if self._num_parts == 0:
            for part_of_earlier_version in self._run.output.glob("[0-9]*"):
                self._run.append(part_of_earlier_version.name, part_of_earlier_version.read_bytes())
        with suppress(FileNotFoundError):
            while True:
                self._count(map(LineAnswer.of, self._part(self._num_parts)))
                self._num_parts += 1

    def append(self, answers: list[LineAnswer]) -> None:
        """Add the answers of lines that have none yet."""
        while new := [answer for answer in answers if answer.custom_id not in self.answered]:
            data = b"".join(answer.line + b"\n" for answer in new)
            if self._run.append(_name(self._num_parts), data):
                self._num_parts += 1
                self._count(new)
                return
            self.load()

    def lines(self, is_completed: bool) -> Iterator[bytes]:
        """Yield the lines, with line breaks, of one of the two files, in the log's order.

        Raises FileNotFoundError if another process has ended the batch.
        """
        for number in range(self._num_parts):
            for line in self._part(number):
                if LineAnswer.of(line).is_completed == is_completed:
                    yield line + b"\n"

    def _count(self, answers: Iterable[LineAnswer]) -> None:
        for answer in answers:
            self.answered.add(answer.custom_id)
            self.completed += answer.is_completed
            self.failed += not answer.is_completed
            self.usage = self.usage.plus(answer.usage)

    def _part(self, number: int) -> list[bytes]:
        return (self._run.data / _name(number)).read_bytes().split(b"\n")[:-1]


def _name(part: int) -> str:
    return f"{part:06d}"
