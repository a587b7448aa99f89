"""Masks of ancestors as bits of int64 words: node j is bit j % 64 of word j // 64.

    pack_ancestors(torch.tensor([[True, True, False, True]]))      # [[0b1011]]

Triton's attention reads them, and pointer doubling is fast on them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

NODES_PER_WORD = 64  # node j is bit j % 64 of word j // 64 of a mask of ancestors


def num_ancestor_words(num_nodes: int) -> int:
    """Return the number of 64-bit words in a node's ancestor mask."""
    return -(-num_nodes // NODES_PER_WORD)


def diagonal_words(num_nodes: int, device: torch.device | str) -> Int[Tensor, "N words"]:
    """Return the mask in which each of N nodes sees its own position."""
    node = torch.arange(num_nodes, device=device)
    word = node // NODES_PER_WORD
    bit = 1 << (node % NODES_PER_WORD)
    num_words = num_ancestor_words(num_nodes)
    words = torch.zeros(num_nodes, num_words, dtype=torch.int64, device=device)
    return words.scatter_(1, word[:, None], bit[:, None])


def pack_ancestors(seen: Bool[Tensor, "*rows M"]) -> Int[Tensor, "*rows words"]:
    """Pack boolean ancestor masks into words, which a GPU's attention reads: nodes 0, 1 and 3 become 0b1011."""
    num_nodes = seen.shape[-1]
    num_bits = num_ancestor_words(num_nodes) * NODES_PER_WORD
    padding = num_bits - num_nodes
    padded = F.pad(seen.to(torch.int64), (0, padding))
    bits = padded.unflatten(-1, (-1, NODES_PER_WORD))
    shifts = torch.arange(NODES_PER_WORD, device=seen.device)
    shifted = bits << shifts
    return shifted.sum(-1)


def unpack_ancestors(words: Int[Tensor, "*rows words"], num_nodes: int) -> Bool[Tensor, "*rows M"]:
    """Unpack ancestor masks from words into booleans."""
    num_bits = min(num_nodes, NODES_PER_WORD)
    shifts = torch.arange(num_bits, device=words.device)
    bits = (words[..., None] >> shifts) & 1
    seen = bits.flatten(-2)
    return seen[..., :num_nodes].bool()
