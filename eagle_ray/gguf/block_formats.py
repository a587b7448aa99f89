"""Block formats of GGUF tensors, and their conversion to float32.

A row is split into blocks of 32 values. A block starts with its scale d, in fp16:

    Q8_0:  d, 32 x int8                            value = d * q
    Q4_0:  d, 32 x 4 bits                          value = d * (q - 8)
    Q4_1:  d, minimum m in fp16, 32 x 4 bits       value = d * q + m

Byte i of a block's 4-bit numbers holds q[i] in its low and q[i + 16] in its high half. F32, F16 and BF16 are plain.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

BLOCK = 32  # values of a quantised block
F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30  # type ids
BLOCK_BYTES = {F32: (1, 4), F16: (1, 2), BF16: (1, 2), Q4_0: (BLOCK, 18), Q4_1: (BLOCK, 20), Q8_0: (BLOCK, 34)}
"""Values and bytes of a block, by type id."""


def num_bytes(type_id: int, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor. Raises ValueError if the type is not supported or a row is not whole blocks."""
    if type_id not in BLOCK_BYTES:
        raise ValueError(f"type {type_id} is not supported (F32, F16, BF16, Q4_0, Q4_1 and Q8_0 are)")
    values, size = BLOCK_BYTES[type_id]
    if shape and shape[-1] % values:
        raise ValueError(f"a row of {shape[-1]} values is not a whole number of blocks of {values}")
    return prod(shape) // values * size


def dequantize(data: np.ndarray, type_id: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the tensor in float32.

    Args:
        data: its num_bytes bytes, uint8.
        type_id: a supported type.
        shape: slowest dimension first.
    """
    blocks = data.reshape(-1, BLOCK_BYTES[type_id][1])
    return DEQUANTIZERS[type_id](blocks).reshape(shape)


def _from_f32(blocks: np.ndarray) -> np.ndarray:
    return blocks.view("<f4").astype(np.float32)


def _from_f16(blocks: np.ndarray) -> np.ndarray:
    return blocks.view("<f2").astype(np.float32)


def _from_bf16(blocks: np.ndarray) -> np.ndarray:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _from_q8_0(blocks: np.ndarray) -> np.ndarray:
    return _halves(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _from_q4_0(blocks: np.ndarray) -> np.ndarray:
    return _halves(blocks, 0) * (_nibbles(blocks[:, 2:]) - 8)


def _from_q4_1(blocks: np.ndarray) -> np.ndarray:
    return _halves(blocks, 0) * _nibbles(blocks[:, 4:]) + _halves(blocks, 2)


def _halves(blocks: np.ndarray, offset: int) -> np.ndarray:
    """Return the fp16 number at a byte offset of every block, as a float32 column."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Return the 4-bit numbers of every block, float32, from 0 to 15."""
    return np.concatenate([packed & 15, packed >> 4], 1).astype(np.float32)


DEQUANTIZERS: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    F32: _from_f32,
    F16: _from_f16,
    BF16: _from_bf16,
    Q4_0: _from_q4_0,
    Q4_1: _from_q4_1,
    Q8_0: _from_q8_0,
}
