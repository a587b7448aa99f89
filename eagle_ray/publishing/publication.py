"""Publication: the part files of a run that a destination holds, and the changes of the next commit.

One commit contains the files and the record of the files. So a publisher that is killed and started
again publishes no file twice: a completed commit is on record, and an incomplete one has left
nothing.

    there = Publication.of_json(destination.record())
    changes = there.changes_to(files)             # {"part-001-000003.parquet": PublishedFile(...)}, ...
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from eagle_ray.storage.path import StoragePath

PUBLICATION_RECORD = "_published.json"


class LostRace(Exception):
    """Another writer has committed since the destination was read, so it must be read again."""


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A part file as it was published.

    Attributes:
        rows: number of rows of the file.
        sha256: digest of the file's bytes, as hexadecimal text.
    """

    rows: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Publication:
    """The state of a destination that a run is published to.

    Attributes:
        run_id: id of the run; None if nothing was published yet.
        number: number of commits so far.
        files: published files, by their names below ``data/``.
        is_complete: whether the run is done and these are all of its files.
    """

    run_id: str | None = None
    number: int = 0
    files: Mapping[str, PublishedFile] = field(default_factory=dict)
    is_complete: bool = False

    @classmethod
    def of_json(cls, record: Mapping[str, Any] | None) -> Publication:
        """Parse a destination's record; None is that of an empty destination."""
        if record is None:
            return cls()
        files = {name: PublishedFile(**facts) for name, facts in record["files"].items()}
        return cls(record["run_id"], record["number"], files, record["is_complete"])

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"files": {name: asdict(file) for name, file in self.files.items()}}

    @property
    def num_rows(self) -> int:
        return sum(file.rows for file in self.files.values())

    def with_files(
        self, run_id: str, files: Mapping[str, PublishedFile], is_complete: bool
    ) -> Publication:
        """Return the state after a commit of these files."""
        return Publication(run_id, self.number + 1, dict(sorted(files.items())), is_complete)


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit to a destination.

    Attributes:
        before: state of the destination before the commit.
        after: state of the destination after the commit.
        files: all files of the run, by name.
        written: names of files that are new or have changed.
        removed: names of files that the run no longer has.
    """

    before: Publication
    after: Publication
    files: Mapping[str, StoragePath]
    written: tuple[str, ...]
    removed: frozenset[str]

    @property
    def only_adds(self) -> bool:
        """Return whether the commit only adds files and leaves published ones unchanged."""
        return not self.removed and not set(self.written) & self.before.files.keys()

    @property
    def summary(self) -> str:
        """Return a line for logs and terminals: the run, the number of the publication, and its rows so far."""
        after = self.after
        state = "" if after.is_complete else " so far"
        return f"run {after.run_id}, commit {after.number}: {after.num_rows:,} rows{state}"


class Destination(Protocol):
    """Protocol of a destination that part files are published to."""

    @property
    def name(self) -> str:
        """Return the name as the user gave it."""

    def check(self) -> None:
        """Raise ConfigError if it cannot be written by this user."""

    def record(self) -> dict[str, Any] | None:
        """Return the recorded publication, or None for an empty destination. Raises ConfigError if
        it holds other data."""

    def commit(self, commit: Commit, card: str) -> None:
        """Publish files and record atomically. Raises LostRace, PublishError.

        Args:
            card: dataset card in Markdown.
        """


def file_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
