"""Draft vocabulary: the tokens that a draft head may offer, the most frequent first (FR-Spec, arXiv 2502.14856).

    speculative.draft_vocab: FILE     one token id a line; jobs/count_tokens.py counts them and writes it
    speculative.draft_vocab: all      every token
    speculative.draft_vocab: null     the file draft_vocab.txt in the head's directory if there is one; otherwise the
                                      first 32,768 ids of a vocabulary of more than 65,536, or every token

A head that reads the target's lm_head then reads these rows of it alone. What is never offered is
still produced, by the target itself. Tokenizers number their tokens by the frequency of their
training text, so low ids are frequent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from eagle_ray.core.errors import ConfigError
from eagle_ray.methods.eagle.heads import DraftHead, EagleHead
from eagle_ray.methods.method import ALL_TOKENS, DraftSettings
from eagle_ray.models.target import TargetModel

DRAFT_VOCAB_KEY = "speculative.draft_vocab"
HEAD_FILE = "draft_vocab.txt"  # in the directory of a head
LARGE_VOCAB = 65_536
FREQUENT = 32_768  # tokens of a large vocabulary that are offered unless a file says which
log = logging.getLogger("eagle_ray")


def offered_tokens(
    speculative: DraftSettings, target: TargetModel, head: DraftHead
) -> Int[Tensor, " Dv"] | None:
    """Return the tokens that a head may draft through the target's lm_head. None is all tokens, or
    a head's own lm_head."""
    name = speculative.draft_vocab
    if not isinstance(head, EagleHead) or head.lm_head is not None or name == ALL_TOKENS:
        return None
    if name is not None:
        ids = read_draft_vocab(name, speculative.draft_vocab_size, target.vocab_size)
        return torch.tensor(ids, device=target.device)
    known = head.draft_vocab or frequent_ids(target.vocab_size, target.eos_ids)
    return None if known is None else torch.tensor(known, device=target.device)


def head_vocab(head: Path, vocab_size: int) -> list[int] | None:
    """Return the tokens that the head in this directory was published with, or None. Raises as read_draft_vocab."""
    file = head / HEAD_FILE
    return read_draft_vocab(str(file), None, vocab_size) if file.is_file() else None


def frequent_ids(vocab_size: int, ends: Iterable[int]) -> list[int] | None:
    """Return the lowest ids of a large vocabulary with the end-of-sequence ids, or None if every token is drafted."""
    if vocab_size <= LARGE_VOCAB:
        return None
    log.info(
        "drafts choose among the first %s of %s tokens (%s: %s for all of them, which text in other scripts may need)",
        *(f"{FREQUENT:,}", f"{vocab_size:,}", DRAFT_VOCAB_KEY, ALL_TOKENS),
    )
    return [*range(FREQUENT), *sorted(token for token in ends if token >= FREQUENT)]


def read_draft_vocab(name: str, size: int | None, vocab_size: int) -> list[int]:
    """Return the first `size` ids, or all. Raises ConfigError naming the file and the line of an invalid id."""
    try:
        lines = Path(name).read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{DRAFT_VOCAB_KEY}: {name} cannot be read: {error}") from None
    seen: dict[int, int] = {}
    for number, line in enumerate(lines, 1):
        token = _id(line, f"{DRAFT_VOCAB_KEY}: line {number} of {name}", vocab_size)
        if token in seen:
            raise ConfigError(
                f"{DRAFT_VOCAB_KEY}: line {number} of {name} says {token} again, which line {seen[token]} has"
            )
        seen[token] = number
    if not seen:
        raise ConfigError(f"{DRAFT_VOCAB_KEY}: there is no token id in {name}")
    if size is not None and size > len(seen):
        raise ConfigError(
            f"{DRAFT_VOCAB_KEY}_size: must be at most the {len(seen)} ids of {name}, got {size}"
        )
    return list(seen)[:size]


def write_draft_vocab(path: Path, token_ids: Iterable[int]) -> None:
    """Write a file for read_draft_vocab.

    Args:
        token_ids: the most frequent first.
    """
    path.write_text("".join(f"{token}\n" for token in token_ids), encoding="utf-8")


def _id(line: str, place: str, vocab_size: int) -> int:
    text = line.strip()
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{place} must be one token id, got {line[:40]!r}")
    if len(text) > 18 or int(text) >= vocab_size:
        raise ConfigError(
            f"{place} says {text[:24]} and the target's vocabulary has {vocab_size} tokens"
        )
    return int(text)
