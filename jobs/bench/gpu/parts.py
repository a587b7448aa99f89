"""Files in parts: carry files that are larger than one transfer to a machine that keeps what each transfer left.

    python -m jobs.bench.gpu.parts split DIR FILE... --part-mib 24    # here: DIR/part-000, ... and DIR/manifest.json
    python -m jobs.bench.gpu.parts receive DIR --to KEPT              # there, once a transfer: prints what is missing
    python -m jobs.bench.gpu.parts assemble KEPT --to FILES           # there, at the end: KEPT/part-* -> FILES/NAME

The parts cut all files laid end to end, so only the last part is short. A file is assembled as soon
as the parts that hold its bytes are there: put the one that is needed first at the beginning. The
manifest travels with each transfer. Parts and files are compared with their SHA-256. It imports the
standard library alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MIB = 2**20
PART_MIB = 24.0
MANIFEST = "manifest.json"
CHUNK_BYTES = 4 * MIB  # of a read
EXIT_MISSING = 3  # of `assemble`, while parts are missing


class PartsError(Exception):
    """Parts are missing, or bytes are not those that were split."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part or a file.

    Attributes:
        start: offset of its first byte in all files laid end to end.
    """

    name: str
    start: int
    size: int
    sha256: str

    def overlaps(self, other: Piece) -> bool:
        return self.start < other.start + other.size and other.start < self.start + self.size


@dataclass(frozen=True, slots=True)
class Manifest:
    """What was split and into what."""

    files: list[Piece]
    parts: list[Piece]

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        path = directory / MANIFEST
        try:
            found = json.loads(path.read_text())
            return cls(
                [Piece(**file) for file in found["files"]],
                [Piece(**part) for part in found["parts"]],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PartsError(
                f"{path}: not a manifest of parts ({error}). Carry it with each transfer."
            ) from error

    def write(self, directory: Path) -> None:
        (directory / MANIFEST).write_text(json.dumps(asdict(self), indent=1))

    def parts_of(self, name: str) -> list[Piece]:
        """Return the parts that hold bytes of a file."""
        file = next((file for file in self.files if file.name == name), None)
        if file is None:
            raise PartsError(f"{name}: not among {', '.join(file.name for file in self.files)}.")
        return [part for part in self.parts if part.overlaps(file)]


def split(files: list[Path], directory: Path, part_bytes: int) -> Manifest:
    """Write the files into parts of part_bytes, and a manifest. Parts of an earlier split are deleted."""
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("part-*"):
        old.unlink()
    parts: list[Piece] = []
    buffer = bytearray()
    for path in files:
        for chunk in _chunks(path):
            buffer += chunk
            while len(buffer) >= part_bytes:
                parts.append(_write_part(directory, len(parts), part_bytes, buffer[:part_bytes]))
                del buffer[:part_bytes]
    if buffer:
        parts.append(_write_part(directory, len(parts), part_bytes, buffer))
    manifest = Manifest(_file_pieces(files), parts)
    manifest.write(directory)
    return manifest


def _write_part(directory: Path, number: int, part_bytes: int, content: bytearray) -> Piece:
    path = directory / f"part-{number:03d}"
    path.write_bytes(content)
    return Piece(path.name, number * part_bytes, len(content), hashlib.sha256(content).hexdigest())


def _file_pieces(files: list[Path]) -> list[Piece]:
    pieces: list[Piece] = []
    start = 0
    for path in files:
        size = path.stat().st_size
        pieces.append(Piece(path.name, start, size, file_sha256(path)))
        start += size
    return pieces


def receive(directory: Path, kept: Path) -> list[str]:
    """Copy the parts that a transfer left in a directory; return the names of those that are still missing.

    A part that is cut off or changed counts as missing.
    """
    manifest = Manifest.read(directory)
    kept.mkdir(parents=True, exist_ok=True)
    manifest.write(kept)
    for part in manifest.parts:
        source = directory / part.name
        if source.exists() and not _is_whole(kept, part):
            temporary = kept / f".{part.name}"
            shutil.copyfile(source, temporary)
            os.replace(temporary, kept / part.name)
    return [part.name for part in manifest.parts if not _is_whole(kept, part)]


def _is_whole(directory: Path, part: Piece) -> bool:
    path = directory / part.name
    return path.exists() and path.stat().st_size == part.size and file_sha256(path) == part.sha256


def assemble(kept: Path, directory: Path, names: list[str] | None = None) -> list[Path]:
    """Write files from their parts; return their paths. A file that is there already is left alone.

    Args:
        names: of the files; None is all of them.

    Raises PartsError if a part is missing or a file is not what was split.
    """
    manifest = Manifest.read(kept)
    directory.mkdir(parents=True, exist_ok=True)
    wanted = [file.name for file in manifest.files] if names is None else names
    for name in wanted:
        manifest.parts_of(name)
    return [
        _assemble_file(kept, directory, manifest, file)
        for file in manifest.files
        if file.name in wanted
    ]


def _assemble_file(kept: Path, directory: Path, manifest: Manifest, file: Piece) -> Path:
    path = directory / file.name
    if path.exists() and path.stat().st_size == file.size and file_sha256(path) == file.sha256:
        return path
    parts = manifest.parts_of(file.name)
    missing = [part.name for part in parts if not (kept / part.name).exists()]
    if missing:
        raise PartsError(
            f"{file.name}: {', '.join(missing)} missing in {kept}. Carry and receive them first."
        )
    temporary = directory / f".{file.name}"
    with temporary.open("wb") as output:
        for part in parts:
            first = max(file.start - part.start, 0)
            last = min(file.start + file.size - part.start, part.size)
            output.write((kept / part.name).read_bytes()[first:last])
    if file_sha256(temporary) != file.sha256:
        raise PartsError(
            f"{file.name}: its SHA-256 is not the manifest's. Carry {', '.join(p.name for p in parts)} again."
        )
    os.replace(temporary, path)
    return path


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for chunk in _chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def main() -> None:
    args = parse_arguments()
    try:
        sys.exit(args.call(args))
    except PartsError as error:
        print(error, flush=True)
        sys.exit(EXIT_MISSING)


def _split(args: argparse.Namespace) -> None:
    manifest = split(args.files, args.directory, int(args.part_mib * MIB))
    sizes = ", ".join(f"{part.name} {part.size / MIB:.1f} MiB" for part in manifest.parts)
    print(f"{len(manifest.parts)} parts in {args.directory}: {sizes}")


def _receive(args: argparse.Namespace) -> None:
    print(f"missing: {' '.join(receive(args.directory, args.to)) or 'none'}", flush=True)


def _assemble(args: argparse.Namespace) -> None:
    for path in assemble(args.directory, args.to, args.only):
        print(path, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    calls = parser.add_subparsers(required=True)
    splitting = calls.add_parser("split")
    splitting.add_argument("directory", type=Path, help="of the parts")
    splitting.add_argument(
        "files", type=Path, nargs="+", help="the one that is needed first, first"
    )
    splitting.add_argument("--part-mib", type=float, default=PART_MIB)
    splitting.set_defaults(call=_split)
    receiving = calls.add_parser("receive")
    receiving.add_argument("directory", type=Path, help="where the transfer left parts")
    receiving.add_argument(
        "--to", type=Path, required=True, help="directory that is kept between transfers"
    )
    receiving.set_defaults(call=_receive)
    assembling = calls.add_parser("assemble")
    assembling.add_argument("directory", type=Path, help="where received parts are")
    assembling.add_argument("--to", type=Path, required=True, help="directory of the files")
    assembling.add_argument("--only", nargs="+", help="names of files; all by default")
    assembling.set_defaults(call=_assemble)
    return parser.parse_args()


if __name__ == "__main__":
    main()
