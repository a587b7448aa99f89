"""Small quantised weights in the layouts of other projects, packed and read value by value.

Nothing here is shared with eagle_ray, so that a mistake there is not made here too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
FP16_AT = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2]}


def random_blocks(kind: str, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Return random bytes [rows, blocks * bytes of a block] whose fp16 numbers are about 0.1."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, blocks, BLOCK_BYTES[kind]), np.uint8)
    for at in FP16_AT.get(kind, [208]):
        scales = rng.normal(0, 0.1, (rows, blocks, 1)).astype(np.float16)
        data[:, :, at : at + 2] = scales.view(np.uint8)
    return data.reshape(rows, -1)


def _fp32(value: float) -> np.float32:
    return np.float32(value)


def _half(block: bytes, at: int) -> np.float32:
    return _fp32(struct.unpack_from("<e", block, at)[0])


def _nibble(packed: bytes, i: int, run: int) -> int:
    """Return code i where a run of bytes holds run codes in its low halves and then as many in its high halves."""
    byte = packed[i // (2 * run) * run + i % run]
    return byte % 16 if i % (2 * run) < run else byte // 16


def _q4_0(block: bytes) -> list[np.float32]:
    return [_half(block, 0) * _fp32(_nibble(block[2:], i, 16) - 8) for i in range(32)]


def _q4_1(block: bytes) -> list[np.float32]:
    return [_half(block, 0) * _fp32(_nibble(block[4:], i, 16)) + _half(block, 2) for i in range(32)]


def _fifth(four_bytes: bytes, i: int) -> int:
    return 16 * (int.from_bytes(four_bytes, "little") >> i & 1)


def _q5_0(block: bytes) -> list[np.float32]:
    return [_half(block, 0) * _fp32(_nibble(block[6:], i, 16) + _fifth(block[2:6], i) - 16) for i in range(32)]


def _q5_1(block: bytes) -> list[np.float32]:
    codes = [_nibble(block[8:], i, 16) + _fifth(block[4:8], i) for i in range(32)]
    return [_half(block, 0) * _fp32(code) + _half(block, 2) for code in codes]


def _q8_0(block: bytes) -> list[np.float32]:
    return [_half(block, 0) * _fp32(number) for number in struct.unpack("<32b", block[2:])]


def _k_scale(block: bytes, group: int) -> tuple[np.float32, np.float32]:
    """Return the scale and the minimum of one of the 8 groups."""
    packed = block[4:16]
    if group < 4:
        numbers = packed[group] % 64, packed[group + 4] % 64
    else:
        low = packed[group + 4]
        numbers = low % 16 + 16 * (packed[group - 4] // 64), low // 16 + 16 * (packed[group] // 64)
    return _half(block, 0) * _fp32(numbers[0]), _half(block, 2) * _fp32(numbers[1])


def _k_value(block: bytes, i: int, code: int) -> np.float32:
    scale, minimum = _k_scale(block, i // 32)
    return scale * _fp32(code) - minimum


def _q4_k(block: bytes) -> list[np.float32]:
    return [_k_value(block, i, _nibble(block[16:], i, 32)) for i in range(256)]


def _q5_k(block: bytes) -> list[np.float32]:
    high = [block[16 + i % 32] >> (i // 32) & 1 for i in range(256)]
    return [_k_value(block, i, _nibble(block[48:], i, 32) + 16 * high[i]) for i in range(256)]


def _q6_k(block: bytes) -> list[np.float32]:
    values = []
    for i in range(256):
        half, rest = divmod(i, 128)
        high = block[128 + 32 * half + rest % 32] >> (2 * (rest // 32)) & 3
        (scale,) = struct.unpack_from("<b", block, 192 + i // 16)
        values.append(_half(block, 208) * _fp32(scale) * _fp32(_nibble(block, i, 64) + 16 * high - 32))
    return values


SLOW_BLOCKS: dict[str, Callable[[bytes], list[np.float32]]] = {  # what reads the values of one block
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
