"""Read the blocks of a GGUF tensor as codes and the scale and offset of each group of codes.

    value = scale * code + offset           # of tensor.data, one row of blocks for each output

Codes are unsigned. A code of 5 or 6 bits takes a whole byte, as one of 8 bits does.

    type    values of a block   group   bits   scale    offset      scale and offset are stored as
    Q4_0           32             32      4    d        -8 d        fp16
    Q4_1           32             32      4    d        m           fp16
    Q5_0           32             32      8    d        -16 d       fp16
    Q5_1           32             32      8    d        m           fp16
    Q8_0           32             32      8    d        -128 d      fp16
    Q4_K          256             32      4    d sc     -dmin m     fp32
    Q5_K          256             32      8    d sc     -dmin m     fp32
    Q6_K          256             16      8    d sc     -32 d sc    fp32

Here d, m and dmin are fp16 numbers of a block. In Q4_K and Q5_K, sc and m are integers of 6 bits for each group; in
Q6_K, sc is one of 8 bits. Every product has at most 24 significant bits, which fp32 holds exactly. Hence
scale * code + offset in fp32 has the same bits as gguf's own dequantize.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, ReaderTensor

from eagle_ray.core.errors import EngineError

DENSE = ("F32", "F16", "BF16")
LOW_HALVES = np.uint64(0x0F0F0F0F0F0F0F0F)  # of 8 bytes
Array = np.ndarray


class GGUFError(EngineError):
    """A file that is not GGUF, is cut off, or holds a target that is not read."""


@dataclass(frozen=True, slots=True)
class BlockValues:
    """The values of a tensor: scale * codes + offset.

    Attributes:
        codes: [O, I] uint8, below 2 ** bits.
        scale, offset: [O, G] of each group of I / G inputs, both fp16 or both fp32.
        bits: 4 or 8.
    """

    codes: Array
    scale: Array
    offset: Array
    bits: int


def read_blocks(tensor: ReaderTensor) -> BlockValues:
    """Return a quantised matrix. Raises GGUFError if its type is not read or its blocks are broken."""
    kind = tensor.tensor_type
    if kind.name not in READERS:
        raise GGUFError(
            f"tensor {tensor.name}: type {kind.name} is not read. "
            f"Requantise the file to {', '.join(READERS)}, or store it as {', '.join(DENSE)}"
        )
    if tensor.data.ndim != 2:
        raise GGUFError(f"tensor {tensor.name}: has {tensor.data.ndim} axes, wanted 2 of a matrix. Download it again")
    bits, read = READERS[kind.name]
    num_rows = tensor.data.shape[0]
    blocks = tensor.data.reshape(-1, GGML_QUANT_SIZES[kind][1])
    codes, scale, offset = (part.reshape(num_rows, -1) for part in read(blocks))
    if not (np.isfinite(scale).all() and np.isfinite(offset).all()):
        raise GGUFError(f"tensor {tensor.name}: a block's scale is not a finite number. Download the file again")
    return BlockValues(codes, *_as_fp16(kind, scale, offset), bits)


def _as_fp16(kind: GGMLQuantizationType, scale: Array, offset: Array) -> tuple[Array, Array]:
    """Return both in fp16 if that is exact: for blocks whose scales are fp16 numbers, unless an offset is too large."""
    if kind.name.endswith("_K"):
        return scale, offset
    with np.errstate(over="ignore"):
        halves = scale.astype(np.float16), offset.astype(np.float16)
    return halves if np.isfinite(halves[1]).all() else (scale, offset)


def _q4_0(blocks: Array) -> tuple[Array, Array, Array]:
    scale = _fp16(blocks[:, :2])
    return _halves(blocks[:, 2:]), scale, -8 * scale


def _q4_1(blocks: Array) -> tuple[Array, Array, Array]:
    return _halves(blocks[:, 4:]), _fp16(blocks[:, :2]), _fp16(blocks[:, 2:4])


def _q5_0(blocks: Array) -> tuple[Array, Array, Array]:
    scale = _fp16(blocks[:, :2])
    codes = _halves(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return codes, scale, -16 * scale


def _q5_1(blocks: Array) -> tuple[Array, Array, Array]:
    codes = _halves(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return codes, _fp16(blocks[:, :2]), _fp16(blocks[:, 2:4])


def _q8_0(blocks: Array) -> tuple[Array, Array, Array]:
    scale = _fp16(blocks[:, :2])
    return blocks[:, 2:] ^ np.uint8(128), scale, -128 * scale  # a signed byte + 128 is its sign bit, turned


def _q4_k(blocks: Array) -> tuple[Array, Array, Array]:
    scale, offset = _scales_of_k(blocks)
    return _halves(blocks[:, 16:], run=32), scale, offset


def _q5_k(blocks: Array) -> tuple[Array, Array, Array]:
    scale, offset = _scales_of_k(blocks)
    bits = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # bit g of byte i: input i of group g
    return _halves(blocks[:, 48:], run=32) | bits.reshape(len(blocks), -1) << 4, scale, offset


def _q6_k(blocks: Array) -> tuple[Array, Array, Array]:
    """Of each 128 values, the low 4 bits lie in runs of 64 bytes and the high 2 bits in runs of 32 bytes."""
    low = _halves(blocks[:, :128], run=64)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    scale = _fp16(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8)
    return low | pairs.reshape(len(blocks), -1) << 4, scale, -32 * scale


def _fp16(pairs: Array) -> Array:
    """Return the fp16 number in two bytes of each block, in fp32."""
    return np.ascontiguousarray(pairs).view("<f2").astype(np.float32)


def _halves(packed: Array, run: int = 16) -> Array:
    """Return the low halves of a run of bytes, then their high halves, run after run."""
    runs = np.ascontiguousarray(packed).view("<u8").reshape(len(packed), -1, run // 8)  # 8 bytes at once
    halves = np.stack([runs & LOW_HALVES, runs >> np.uint64(4) & LOW_HALVES], 2)
    return halves.view(np.uint8).reshape(len(packed), -1)


def _fifth_bits(packed: Array) -> Array:
    """Return bit i of each block's 4 bytes as bit 4 of code i."""
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def _scales_of_k(blocks: Array) -> tuple[Array, Array]:
    """Return the scale and offset of the 8 groups of Q4_K and Q5_K blocks.

    Bytes 4 to 15 hold 8 scales and 8 minima of 6 bits. The first 4 of each lie in the low 6 bits of bytes 4 to 11. The
    last 4 have their low 4 bits in bytes 12 to 15, and their high 2 bits on top of the first.
    """
    first_scales, first_minima, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first_scales & 63, low & 15 | first_scales >> 6 << 4], 1)
    minima = np.concatenate([first_minima & 63, low >> 4 | first_minima >> 6 << 4], 1)
    return _fp16(blocks[:, :2]) * scales, -_fp16(blocks[:, 2:4]) * minima


READERS: dict[str, tuple[int, Callable[[Array], tuple[Array, Array, Array]]]] = {  # bits, and what reads blocks
    "Q4_0": (4, _q4_0),
    "Q4_1": (4, _q4_1),
    "Q5_0": (8, _q5_0),
    "Q5_1": (8, _q5_1),
    "Q8_0": (8, _q8_0),
    "Q4_K": (4, _q4_k),
    "Q5_K": (8, _q5_k),
    "Q6_K": (8, _q6_k),
}
