"""Which tree columns a node sees, as words of 64 bits: column j is bit j % 64 of word j // 64.

    node 3 sees 0, 1 and itself      [True, True, False, True]      0b1011

What a GPU's attention reads, and what pointer doubling is cheap on.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

WORD_BITS = 64


def num_words(columns: int) -> int:
    return -(-columns // WORD_BITS)


def diagonal(num_nodes: int, device: torch.device | str) -> Int[Tensor, "N words"]:
    """Return the mask in which each of N nodes sees its own position."""
    node = torch.arange(num_nodes, device=device)
    words = torch.zeros(num_nodes, num_words(num_nodes), dtype=torch.int64, device=device)
    return words.scatter_(1, (node // WORD_BITS)[:, None], (1 << (node % WORD_BITS))[:, None])


def pack_mask(seen: Bool[Tensor, "*rows M"]) -> Int[Tensor, "*rows words"]:
    padding = num_words(seen.shape[-1]) * WORD_BITS - seen.shape[-1]
    bits = F.pad(seen.to(torch.int64), (0, padding)).unflatten(-1, (-1, WORD_BITS))
    return (bits << torch.arange(WORD_BITS, device=seen.device)).sum(-1)


def unpack_mask(words: Int[Tensor, "*rows words"], columns: int) -> Bool[Tensor, "*rows M"]:
    bits = words[..., None] >> torch.arange(min(columns, WORD_BITS), device=words.device) & 1
    return bits.flatten(-2)[..., :columns].bool()
