"""Check that input and output are disjoint: a run must never read its own files as input.

check_disjoint("runs", StoragePath.of("/work/runs/a"))  # from /work
# ConfigError: input.path: the directory /work/runs holds output.path /work/runs/a, whose files would ...
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable

from eagle_ray.batch.reader.files import InputFile, resolve_pattern, split_at_wildcard
from eagle_ray.core.errors import ConfigError
from eagle_ray.runs.layout import DATA, PROGRESS, REPORT, RUN, SUCCESS, SUMMARY
from eagle_ray.runs.lease import LOCK
from eagle_ray.runs.part_files import part_name
from eagle_ray.runs.recorded_inputs import INPUTS
from eagle_ray.storage.path import StoragePath
from eagle_ray.storage.store import glob_matches

INPUT_LIST, PART = INPUTS.format("0" * 12), f"{DATA}/{part_name(1, 0)}"  # as they may be named
RUN_FILES = (LOCK, RUN, INPUT_LIST, PROGRESS, SUMMARY, SUCCESS, REPORT, PART)  # what a run writes
REMEDY = "choose an output.path outside of the input, or name the input files (input.path: DIR/*.jsonl)"


def check_disjoint(input_path: str | list[str], output: StoragePath) -> None:
    """Raise ConfigError if the input, a directory or a glob, includes files that the run will write.

    Checked before there are any, since a run with its own output as input could not be resumed.
    """
    for pattern in [input_path] if isinstance(input_path, str) else input_path:
        directory = resolve_pattern(pattern)
        relative = output.relative_to(directory)
        if relative is not None and not _is_hidden(relative) and directory.is_directory():
            raise ConfigError(
                f"input.path: the directory {directory} holds output.path {output}, whose files would become input: "
                f"{REMEDY}"
            )
        if run_file := _matching_run_file(directory, output):
            raise ConfigError(
                f"input.path: {pattern!r} would find what the run writes into output.path, such as"
                f" {output / run_file}: {REMEDY}"
            )


def check_not_run_output(files: Iterable[InputFile], output: StoragePath) -> None:
    """Raise ConfigError naming an input file that is one of the output's own files.

    Links are followed once for each directory, since following them costs a system call for each part of a path.
    """
    data = output / DATA
    is_inside = functools.cache(lambda path: path.relative_to(data) is not None)
    for file in files:
        path = file.storage_path
        is_link = path.is_local and os.path.islink(path.text)
        if is_inside(path if is_link else path.parent):
            raise ConfigError(f"input.path: {file.path} is a file of output.path {output}: {REMEDY}")


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


def _is_hidden(path: str) -> bool:
    """Return whether the path is hidden, so it is not read as input."""
    return any(part.startswith((".", "_")) for part in path.split("/"))
