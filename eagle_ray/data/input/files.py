"""Input files: from a glob, a directory or a list of them to files in a fixed order, each with its format.

Does not know what the files hold.

    >>> [file.format for file in find_files("data/*.parquet", "auto")]  # doctest: +SKIP
    ['parquet', 'parquet']
"""

from __future__ import annotations

import difflib
import glob
import os
from dataclasses import dataclass
from pathlib import Path

from eagle_ray.config import ConfigError

FORMATS = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv"}
EMBEDDED = {"embedded:prompts": Path(__file__).parents[2] / "assets" / "prompts.jsonl"}


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file. name: its path below the glob's root, part of the ids made for rows without one.

    format: parquet, jsonl, csv or openai_batch. size in bytes; mtime_ns: time of the last change.
    """

    path: str
    name: str
    format: str
    size: int
    mtime_ns: int

    def check_unchanged(self) -> None:
        """Raises OSError where the file is no longer the one that was planned.

        By its size: another node's copy may have another time.
        """
        if os.stat(self.path).st_size != self.size:
            raise OSError(f"{self.path} changed after the job had started: run it again on files that stay as they are")


def find_files(patterns: str | list[str], format_: str) -> tuple[InputFile, ...]:
    """Every file the patterns name: patterns in order, each one's files sorted, none twice. Raises ConfigError."""
    found: dict[str, InputFile] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        root, paths = _expand(pattern)
        if not paths:
            raise ConfigError(f"input.path: no file matches {pattern!r}{_hint(pattern)}")
        for path in paths:
            found.setdefault(str(path.absolute()), _input_file(path.absolute(), root.absolute(), format_))
    return tuple(found.values())


def _expand(pattern: str) -> tuple[Path, list[Path]]:
    """The glob's root (the directory before the first wildcard) and the sorted files below it."""
    if pattern.startswith("embedded:") and pattern not in EMBEDDED:
        raise ConfigError(f"input.path: there is no {pattern!r}; the bundled input is {', '.join(EMBEDDED)}")
    path = EMBEDDED.get(pattern, Path(pattern).expanduser())
    if path.is_file():
        return path.parent, [path]
    if path.is_dir():
        return path, sorted(p for p in path.rglob("*") if _is_input(p, path))
    root = Path(*_until_wildcard(path.parts))
    return root, sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())


def _is_input(path: Path, directory: Path) -> bool:
    """Files of a known format, but for what a directory hides: names that begin with a dot or an underscore."""
    hidden = any(part.startswith((".", "_")) for part in path.relative_to(directory).parts)
    return path.suffix in FORMATS and path.is_file() and not hidden


def _until_wildcard(parts: tuple[str, ...]) -> list[str]:
    wild = [i for i, part in enumerate(parts) if glob.has_magic(part)]
    return list(parts[: wild[0]] if wild else parts[:-1]) or ["."]


def _input_file(path: Path, root: Path, format_: str) -> InputFile:
    chosen = FORMATS.get(path.suffix) if format_ == "auto" else format_
    if chosen is None:
        raise ConfigError(
            f"input.path: the format of {path} is not known by its extension ({', '.join(FORMATS)}): "
            "set input.format to parquet, jsonl, csv or openai_batch"
        )
    stat = path.stat()
    return InputFile(str(path), path.relative_to(root).as_posix(), chosen, stat.st_size, stat.st_mtime_ns)


def _hint(pattern: str) -> str:
    """Where was looked, and the nearest name there."""
    path = Path(pattern).expanduser()
    root = Path(*_until_wildcard(path.parts)).absolute()
    if not root.is_dir():
        return f": there is no directory {root}"
    near = difflib.get_close_matches(path.name, sorted(os.listdir(root)), 1)
    return f" in {root}" + (f"; did you mean {near[0]}?" if near else "")
