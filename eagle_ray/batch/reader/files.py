"""Input files: expand a glob, a directory or a list of them into files in a fixed order, each with its format.

A run must never read its own files as input.

    [file.format for file in find_files("data/*.parquet", "auto")]      # ['parquet', 'parquet']
    check_disjoint("runs", StoragePath.of("/work/runs/a"))              # from /work
    # ConfigError: input.path: the directory /work/runs holds output.path /work/runs/a, whose files would ...
"""

from __future__ import annotations

import difflib
import functools
import glob
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from eagle_ray.core.errors import ConfigError
from eagle_ray.requests.columns import RowLocation, RowPosition
from eagle_ray.runs.job_errors import InputChanged
from eagle_ray.runs.layout import DATA, PROGRESS, REPORT, RUN, SUCCESS, SUMMARY, data_of
from eagle_ray.runs.lease import LOCK
from eagle_ray.runs.part_files import part_files, part_name
from eagle_ray.runs.partitions import partition_values
from eagle_ray.runs.recorded_inputs import INPUTS
from eagle_ray.storage.decompressed import CODECS, open_decompressed
from eagle_ray.storage.file_kinds import (
    START_BYTES,
    UNPACKED,
    advice,
    advice_on_packed,
    foreign_kind,
)
from eagle_ray.storage.hub_revisions import HUB_SCHEME, fixed_revisions
from eagle_ray.storage.path import StoragePath, named_path
from eagle_ray.storage.store import (
    FileVersion,
    NotAllowed,
    NotFound,
    ObjectChanged,
    glob_matches,
)

log = logging.getLogger("eagle_ray")
RUN_PREFIX = "run:"  # prefix of the output directory of another run, as in run:runs/first
RUN_FORMAT = "run"
WEB = ("http://", "https://")  # schemes whose paths may have a query
FORMATS = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv"}
_DIRECTORY_HINT = f"of a directory {', '.join(FORMATS)} are read: name other files with a glob"
CHANGED_REMEDY = (
    "Run the same command again once the file is as it should be: new rows are answered, and it is refused only if an "
    "answered row changed. --overwrite deletes the rows that are there and answers the file as it is now."
)
_ASSETS = StoragePath.of(__file__).parent.parent.parent / "assets"
EMBEDDED_PROMPTS = {
    f"embedded:{name}": _ASSETS / f"{name}.jsonl" for name in ("prompts", "questions")
}
# Examples of names that a run's files may have.
INPUT_LIST = INPUTS.format("0" * 12)
PART_EXAMPLE = f"{DATA}/{part_name(1, 0)}"
# Files that a run writes.
RUN_FILES = (
    LOCK,
    RUN,
    INPUT_LIST,
    PROGRESS,
    SUMMARY,
    SUCCESS,
    REPORT,
    PART_EXAMPLE,
)
OUTPUT_OUTSIDE_INPUT = (
    "choose an output.path outside of the input, or name the input files (input.path: DIR/*.jsonl)"
)


@dataclass(frozen=True, slots=True)
class InputFile:
    """An input file with its format and version.

    Attributes:
        name: path below the glob's root; rows without an id column get ids that contain it.
        format: parquet, jsonl, csv, openai_batch or run.
        version: token of the file's current content, which changes when the file does.
    """

    storage_path: StoragePath
    name: str
    format: str
    version: FileVersion

    @property
    def path(self) -> str:
        """Return the path as shown in messages and in the rows' source_file."""
        return self.storage_path.text

    @property
    def can_split(self) -> bool:
        """Return whether it can be read from the middle, which a compressed file cannot."""
        return not self.is_compressed and (self.storage_path.is_local or self.storage_path.is_s3)

    @property
    def is_compressed(self) -> bool:
        return self._codec is not None

    @property
    def partitions(self) -> dict[str, str | None]:
        """Return the partition columns and values in the names of its directories (Hive partitions)."""
        return {} if self.format == RUN_FORMAT else partition_values(self.name)

    def open(self) -> BinaryIO:
        """Open its decompressed content as a stream. Raises FileNotFoundError."""
        open_file = self.storage_path.open
        return open_file() if self._codec is None else open_decompressed(open_file, self._codec)

    @property
    def _codec(self) -> str | None:
        return CODECS.get(_suffixes(self.storage_path)[1])

    def location_of(self, position: RowPosition) -> RowLocation:
        """Return the location of one of its rows, from the row's position."""
        return RowLocation(self.name, self.path, position)

    def check_unchanged(self) -> None:
        """Raise InputChanged if the file is no longer the one that was planned.

        A local file is compared by its size only, since another node's copy may have another time;
        the driver compares the rest (``fingerprints.check_unchanged``).
        """
        with self.detect_changes():
            now = self.storage_path.stat()
        if now.size != self.version.size:
            raise self.changed_error(f"{self.version.size:,} bytes then, {now.size:,} now")
        if not self.storage_path.is_local and now != self.version:
            raise self.changed_error("its content")

    @contextmanager
    def detect_changes(self) -> Iterator[None]:
        """Turn read errors of a file that was replaced or removed into InputChanged."""
        try:
            yield
        except FileNotFoundError:
            raise self.changed_error("it is gone") from None
        except ObjectChanged:
            raise self.changed_error("its content") from None

    def changed_error(self, difference: str) -> InputChanged:
        return InputChanged(
            f"{self.path} changed while the job read it ({difference}). {CHANGED_REMEDY}"
        )


def find_files(
    patterns: str | list[str], format_: str, allow_unfinished: bool = False
) -> tuple[InputFile, ...]:
    """Return all files that the patterns name, in the order of the patterns, each pattern's files
    sorted, no file twice.

    Raises ConfigError.

    Args:
        allow_unfinished: accept the files of an unfinished run, too, for a pattern run:DIR.
    """
    inputs: dict[StoragePath, InputFile] = {}
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if any(map(is_run, patterns)):
        format_ = _run_format(patterns, format_)
    for pattern in patterns:
        try:
            root, files = (
                _find_run_files(pattern, allow_unfinished) if is_run(pattern) else _expand(pattern)
            )
        except NotFound as error:  # the bucket
            raise ConfigError(f"input.path: {error}") from None
        if not files:
            raise ConfigError(f"input.path: no file matches {pattern!r}{_hint(pattern)}")
        for location, version in files.items():
            inputs.setdefault(location, _input_file(location, version, root, format_))
        if "=" in root.name and not is_run(pattern):
            log.warning(
                "input.path: %s is in the path that is given, so it is no column. For one, give the directory above "
                "it, or a glob with a wildcard there.",
                root.name,
            )
    if partitions := dict.fromkeys(name for file in inputs.values() for name in file.partitions):
        log.info("input.path: directories are read as columns: %s", ", ".join(partitions))
    return tuple(inputs.values())


def fixed_patterns(
    patterns: str | list[str], known: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the patterns with each revision on the hub replaced by its commit, and these commits. Raises ConfigError.

    Args:
        known: commits that earlier attempts have read, by repository and revision.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    for pattern in patterns:
        if pattern.startswith(HUB_SCHEME):
            named_path("input.path", pattern)  # its package may be missing
    try:
        return fixed_revisions(patterns, known)
    except (NotFound, NotAllowed) as error:
        raise ConfigError(f"input.path: {error}") from None


def is_run(pattern: str) -> bool:
    return pattern.startswith(RUN_PREFIX)


def run_directory(pattern: str) -> StoragePath:
    """Return the output directory that a pattern run:DIR names. Raises ConfigError."""
    return named_path(f"input.path: {pattern}", pattern.removeprefix(RUN_PREFIX))


def _find_run_files(
    pattern: str, allow_unfinished: bool
) -> tuple[StoragePath, dict[StoragePath, FileVersion]]:
    """Return the run's data directory and its part files. Raises ConfigError unless the run is finished."""
    output = run_directory(pattern)
    if not (output / RUN).exists() and not allow_unfinished:
        raise ConfigError(
            f"input.path: {pattern!r}: {output} holds no run (no {RUN}). Give a run's output.path."
        )
    if not (output / SUCCESS).exists() and not allow_unfinished:
        raise ConfigError(
            f"input.path: {pattern!r}: the run in {output} is not finished (no {SUCCESS}). Finish it with its own "
            "command first, or read the rows that are there with input.allow_unfinished: true."
        )
    files = part_files(data_of(output))
    if not files:
        raise ConfigError(f"input.path: {pattern!r}: there are no rows in {data_of(output)}")
    return data_of(output), {file: file.stat() for file in files}


def _run_format(patterns: list[str], format_: str) -> str:
    """Return the format of runs. Raises ConfigError for a mixture, whose rows would have no common columns."""
    if not all(map(is_run, patterns)):
        raise ConfigError(
            "input.path: runs (run:DIR) and files cannot be read together. Give runs alone."
        )
    if format_ != "auto":
        raise ConfigError(f"input.format: must be auto with input.path run:DIR, got {format_!r}")
    return RUN_FORMAT


def resolve_pattern(pattern: str) -> StoragePath:
    """Return the pattern as an absolute path that still has its wildcards. Raises ConfigError if
    that is not possible."""
    if pattern.startswith("embedded:"):
        if pattern not in EMBEDDED_PROMPTS:
            raise ConfigError(
                f"input.path: there is no {pattern!r}; the bundled input is {', '.join(EMBEDDED_PROMPTS)}"
            )
        return EMBEDDED_PROMPTS[pattern]
    if is_run(pattern):
        return data_of(run_directory(pattern))
    return named_path("input.path", pattern)


def _expand(pattern: str) -> tuple[StoragePath, dict[StoragePath, FileVersion]]:
    """Return the glob's root (the directory before the first wildcard) and the sorted files below it."""
    path = resolve_pattern(pattern)
    if path.exists():
        return path.parent, {path: path.stat()}
    if path.is_directory():
        read = {}
        skipped = []
        for file, version in path.list_versions().items():
            if _is_hidden(_name_below(file, path)):
                continue
            if _suffixes(file)[0] in FORMATS:
                read[file] = version
            else:
                skipped.append(file)
        _log_skipped(path, skipped)
        return path, read
    root, below = split_at_wildcard(path)
    return root, root.list_versions(below)


def _is_hidden(path: str) -> bool:
    """Return whether a name in a file's path begins with a dot or an underscore, but for directories such as _lang=de.

    Such a file is not read as input.
    """
    *directories, name = path.split("/")
    others = [part for part in directories if not part.startswith("_") or "=" not in part]
    return any(part.startswith((".", "_")) for part in (*others, name))


def _log_skipped(directory: StoragePath, files: list[StoragePath]) -> None:
    """Log the files of a directory that are not read."""
    if files:
        names = _printable(", ".join(_name_below(file, directory) for file in files[:3]))
        others = f" and {len(files) - 3} others" if len(files) > 3 else ""
        log.warning(
            "input.path: %s%s in %s: left out, as %s", names, others, directory, _DIRECTORY_HINT
        )


def split_at_wildcard(path: StoragePath) -> tuple[StoragePath, str]:
    """Split a pattern into the directory before the first wildcard, and the rest."""
    root = path.parent
    parts = [path.name]
    while glob.has_magic(root.text) and root != root.parent:
        parts = [root.name, *parts]
        root = root.parent
    return root, "/".join(parts)


def _input_file(
    location: StoragePath, version: FileVersion, root: StoragePath, format_: str
) -> InputFile:
    if (name := _printable(location.text)) != location.text:
        raise ConfigError(
            f"input.path: the name of {name} is not UTF-8 text. Rename the file or its directory."
        )
    suffix, compression = _suffixes(location)
    if suffix in UNPACKED:
        raise ConfigError(
            f"input.path: {location} is compressed as {suffix}: {advice(UNPACKED[suffix], location)}"
        )
    chosen = FORMATS.get(suffix) if format_ == "auto" else format_
    if chosen == "parquet" and compression:
        raise ConfigError(
            f"input.path: {location} is a compressed Parquet file, which cannot be read in parts. Unpack it; Parquet "
            "compresses its columns itself."
        )
    if chosen is None:
        kind = foreign_kind(_start_of(location))
        raise ConfigError(
            f"input.path: the format of {location} is not known by its extension ({', '.join(FORMATS)}): "
            + (
                "set input.format to parquet, jsonl, csv or openai_batch"
                if kind is None
                else advice(kind, location)
            )
        )
    return InputFile(location, _name_below(location, root), chosen, version)


def _suffixes(location: StoragePath) -> tuple[str, str]:
    """Return the extension and that of the compression, or "", in lower case: (".jsonl", ".gz").

    The query of a web address is not part of them. Other storage has no queries: there ? and # are
    parts of a name.
    """
    name = location.name.lower()
    if location.text.startswith(WEB):
        name = re.split("[?#]", name, maxsplit=1)[0]
    stem, suffix = os.path.splitext(name)
    return (os.path.splitext(stem)[1], suffix) if suffix in CODECS else (suffix, "")


def advice_on(file: InputFile) -> str | None:
    """Return what kind of file an unreadable input is, and how to use it; None if its first bytes are not known."""
    start = _start_of(file.storage_path)
    if file.is_compressed:
        return advice_on_packed(start, file.storage_path)
    kind = foreign_kind(start, file.format)
    return None if kind is None else advice(kind, file.storage_path)


def _start_of(location: StoragePath) -> bytes:
    """Return the first stored bytes of a file, or none if it cannot be read."""
    try:
        with location.open() as stream:
            return stream.read(START_BYTES)
    except OSError:
        return b""


def _printable(name: str) -> str:
    """Return a file's name, with the bytes that are not UTF-8 as escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


def _name_below(location: StoragePath, directory: StoragePath) -> str:
    return location.text.removeprefix(directory.text).lstrip("/")


def _hint(pattern: str) -> str:
    """Describe what exists at the path, or where was searched and the nearest name."""
    path = resolve_pattern(pattern)
    if path.is_directory():
        return f": {_DIRECTORY_HINT}, such as {pattern}/*"
    root, _ = split_at_wildcard(path)
    if not root.is_directory():
        return f": there is no directory {root}"
    if path.name in (names := root.list_names()):
        return f" in {root}: it is a pipe or the like, or a link to nowhere"
    near = difflib.get_close_matches(path.name, names, 1)
    return f" in {root}" + (f"; did you mean {_printable(near[0])}?" if near else "")


def check_disjoint(input_path: str | list[str], output: StoragePath) -> None:
    """Raise ConfigError if an input pattern would match files that the run will write.

    It is checked before there are any such files: a run that reads its own output could not be
    resumed.
    """
    for pattern in [input_path] if isinstance(input_path, str) else input_path:
        directory = resolve_pattern(pattern)
        relative = output.relative_to(directory)
        if (
            relative is not None
            and not _is_hidden(f"{relative}/{PART_EXAMPLE}")
            and directory.is_directory()
        ):
            raise ConfigError(
                f"input.path: the directory {directory} holds output.path {output}, whose files would become input: "
                f"{OUTPUT_OUTSIDE_INPUT}"
            )
        if run_file := _matching_run_file(directory, output):
            raise ConfigError(
                f"input.path: {pattern!r} would find what the run writes into output.path, such as"
                f" {output / run_file}: {OUTPUT_OUTSIDE_INPUT}"
            )


def check_not_run_output(files: Iterable[InputFile], output: StoragePath) -> None:
    """Raise ConfigError naming an input file that is one of the output's own files.

    Symbolic links are resolved once per directory, since that costs a system call for each part of
    a path.
    """
    data = output / DATA
    is_inside = functools.cache(lambda path: path.relative_to(data) is not None)
    for file in files:
        path = file.storage_path
        is_link = path.is_local and os.path.islink(path.text)
        if is_inside(path if is_link else path.parent):
            raise ConfigError(
                f"input.path: {file.path} is a file of output.path {output}: {OUTPUT_OUTSIDE_INPUT}"
            )


def _matching_run_file(pattern: StoragePath, output: StoragePath) -> str | None:
    """Return the first of the output's own files that a glob matches."""
    root, relative_pattern = split_at_wildcard(pattern)
    relative_paths = {own: (output / own).relative_to(root) for own in RUN_FILES}
    return next(
        (
            own
            for own, place in relative_paths.items()
            if place and glob_matches(relative_pattern.split("/"), place.split("/"))
        ),
        None,
    )
