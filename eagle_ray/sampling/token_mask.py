"""Token masks: sets of tokens as bits, token t in bit t % 32 of word t // 32."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from jaxtyping import Bool, Int32
from numpy.typing import NDArray
from torch import Tensor

TOKENS_PER_WORD = 32
Words = NDArray[np.int32]


def num_token_words(vocab_size: int) -> int:
    """Return the words of a mask."""
    return -(-vocab_size // TOKENS_PER_WORD)


def pack_tokens(token_ids: Collection[int], vocab_size: int) -> Words:
    """Return the mask [W] of these tokens."""
    bits = np.zeros(num_token_words(vocab_size) * TOKENS_PER_WORD, dtype=bool)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def unpack_tokens(mask: Int32[Tensor, "M W"], vocab_size: int) -> Bool[Tensor, "M V"]:
    """Return the bits of masks."""
    shifts = torch.arange(TOKENS_PER_WORD, dtype=torch.int32, device=mask.device)
    return ((mask[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :vocab_size]
