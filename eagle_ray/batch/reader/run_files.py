"""Files of another run as input: ``input.path: run:runs/first`` names the run's output directory.

root, files = find_run_files("run:runs/first", allow_unfinished=False)
[file.name for file in files]                                               # ['part-001-000000.parquet']
"""

from __future__ import annotations

from eagle_ray.core.errors import ConfigError
from eagle_ray.runs.layout import RUN, SUCCESS, data_of
from eagle_ray.runs.part_files import part_files
from eagle_ray.storage.path import FileVersion, StoragePath

RUN_PREFIX = "run:"
RUN_FORMAT = "run"


def is_run(pattern: str) -> bool:
    return pattern.startswith(RUN_PREFIX)


def run_directory(pattern: str) -> StoragePath:
    """Return the output directory that run:DIR names. Raises ConfigError."""
    try:
        return StoragePath.of(pattern.removeprefix(RUN_PREFIX))
    except ValueError as error:
        raise ConfigError(f"input.path: {pattern}: {error}") from None


def find_run_files(pattern: str, allow_unfinished: bool) -> tuple[StoragePath, dict[StoragePath, FileVersion]]:
    """Return the run's data directory and its part files. Raises ConfigError unless the run is finished."""
    output = run_directory(pattern)
    if not (output / RUN).exists() and not allow_unfinished:
        raise ConfigError(f"input.path: {pattern!r}: {output} holds no run (no {RUN}). Give a run's output.path.")
    if not (output / SUCCESS).exists() and not allow_unfinished:
        raise ConfigError(
            f"input.path: {pattern!r}: the run in {output} is not finished (no {SUCCESS}). Finish it with its own "
            "command first, or read the rows that are there with input.allow_unfinished: true."
        )
    files = part_files(data_of(output))
    if not files:
        raise ConfigError(f"input.path: {pattern!r}: there are no rows in {data_of(output)}")
    return data_of(output), {file: file.stat() for file in files}
