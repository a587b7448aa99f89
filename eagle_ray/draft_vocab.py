"""What `speculative.draft_vocab` names: the tokens that a draft head may offer, the most frequent first (FR-Spec).

    a text file, one token id a line        jobs/count_tokens.py counts them and writes it

A head that reads the target's lm_head then reads these rows of it alone. What is never offered is still produced, by
the target itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from eagle_ray.config import ConfigError

KEY = "speculative.draft_vocab"
FILE_NAME = "draft_vocab.txt"  # in the directory of a head that was trained for these tokens


def read_draft_vocab(name: str, size: int | None, vocab_size: int) -> list[int]:
    """Return the first `size` ids, or all. Raises ConfigError naming the file and the line of an invalid id."""
    try:
        lines = Path(name).read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{KEY}: {name} cannot be read: {error}") from None
    seen: dict[int, int] = {}
    for number, line in enumerate(lines, 1):
        token = _id(line, f"{KEY}: line {number} of {name}", vocab_size)
        if token in seen:
            raise ConfigError(f"{KEY}: line {number} of {name} says {token} again, which line {seen[token]} has")
        seen[token] = number
    if not seen:
        raise ConfigError(f"{KEY}: there is no token id in {name}")
    if size is not None and size > len(seen):
        raise ConfigError(f"{KEY}_size: must be at most the {len(seen)} ids of {name}, got {size}")
    return list(seen)[:size]


def write_draft_vocab(path: Path, token_ids: Iterable[int]) -> None:
    """Write a file for read_draft_vocab. token_ids: the most frequent first."""
    path.write_text("".join(f"{token}\n" for token in token_ids), encoding="utf-8")


def _id(line: str, place: str, vocab_size: int) -> int:
    text = line.strip()
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{place} must be one token id, got {line[:40]!r}")
    if len(text) > 18 or int(text) >= vocab_size:
        raise ConfigError(f"{place} says {text[:24]} and the target's vocabulary has {vocab_size} tokens")
    return int(text)
