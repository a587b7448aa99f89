"""Read the blocks of a GGUF tensor as codes and the scale and offset of each group of codes.

    value = scale * code + offset           # tensor.data has one row of blocks for each output

Codes are unsigned. A code of 5 or 6 bits takes a whole byte, as one of 8 bits does.

    type      values of a block   group   bits   scale    offset      scale and offset are stored as
    Q4_0             32             32      4    d        -8 d        fp16
    Q4_1             32             32      4    d        m           fp16
    Q5_0             32             32      8    d        -16 d       fp16
    Q5_1             32             32      8    d        m           fp16
    Q8_0             32             32      8    d        -128 d      fp16
    Q2_K            256             16      4    d sc     -dmin m     fp32
    Q3_K            256             16      4    d sc     -4 d sc     fp32
    Q4_K            256             32      4    d sc     -dmin m     fp32
    Q5_K            256             32      8    d sc     -dmin m     fp32
    Q6_K            256             16      8    d sc     -32 d sc    fp32
    IQ4_NL           32             32      8    d        -128 d      fp16
    IQ4_XS          256             32      8    d sc     -128 d sc   fp32
    MXFP4            32             32      8    2^e      -128 2^e    fp32
    IQ3_XXS         256             32      8    d sc     -128 d sc   fp32
    IQ3_S           256             32      8    d sc     -128 d sc   fp32
    IQ2_XXS         256             32      8    d sc     -128 d sc   fp32
    IQ2_XS, IQ2_S   256             16      8    d sc     -128 d sc   fp32

Here d, m and dmin are fp16 numbers of a block. In types of K, sc and m are small integers of each
group, of at most 8 bits; in those of IQ, sc is an integer, or half of one. Values of the last seven
types are numbers of a table, which have 7 bits and a sign: their codes are these numbers plus 128.
In IQ2 and IQ3 types an entry of the table, called a grid, is a tuple of 4 or 8 magnitudes, and a
block stores its index; the signs are stored apart.
Every product has at most 24 significant bits, which fp32 holds exactly. Hence scale * code + offset
in fp32 has the same bits as gguf's own dequantize.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, ReaderTensor
from gguf.quants import IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS

from eagle_ray.core.errors import EngineError

DENSE = ("F32", "F16", "BF16")  # types whose values are stored as they are
ZERO_CODE = 128  # code of the value 0 where values are those of a table
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice those of E2M1
LOW_HALVES = np.uint64(0x0F0F0F0F0F0F0F0F)  # mask of the low 4 bits of 8 bytes
PAIR_SHIFTS = np.arange(0, 8, 2, dtype=np.uint8)  # shifts to the four pairs of bits of a byte
PLANE_SHIFTS = np.arange(8, dtype=np.uint8)[:, None]  # shifts to the bits of a byte
Array = np.ndarray
Groups = tuple[Array, Array, Array]  # codes, and the scale and offset of each group of them


class GGUFError(EngineError):
    """Raised for a file that is not GGUF, is cut off, or holds an unsupported target."""


@dataclass(frozen=True, slots=True)
class BlockValues:
    """The values of a tensor of O outputs and I inputs: scale * codes + offset.

    Attributes:
        codes: [O, I] uint8, below 2 ** bits.
        scale, offset: [O, G], one for each group of I / G inputs; both fp16 or both fp32.
        bits: 4 or 8.
    """

    codes: Array
    scale: Array
    offset: Array
    bits: int


@dataclass(frozen=True, slots=True)
class BlockType:
    """How a GGUF block type is read.

    Attributes:
        bits: bits of a code in memory, 4 or 8.
        group: number of inputs that share a scale.
        read: function from blocks, [blocks, bytes], to their codes, scales and offsets.
        has_half_scales: whether scales and offsets are fp16 numbers.
    """

    bits: int
    group: int
    read: Callable[[Array], Groups]
    has_half_scales: bool = False

    @property
    def bytes_per_weight(self) -> float:
        """Return the bytes that a weight takes in memory, with its share of its group's scale and offset."""
        bytes_per_group = 4 if self.has_half_scales else 8
        own_bytes = self.bits / 8
        return own_bytes + bytes_per_group / self.group


def read_blocks(tensor: ReaderTensor) -> BlockValues:
    """Read a quantised matrix as codes, scales and offsets. Raises GGUFError if its type is
    unsupported or its blocks are broken."""
    data = tensor.data
    kind = tensor.tensor_type
    if kind.name not in READERS:
        raise GGUFError(
            f"tensor {tensor.name}: type {kind.name} is not read. Take a file of another quantisation, such as Q4_K_M: "
            f"{', '.join(READERS)} and {', '.join(DENSE)} are read"
        )
    if data.ndim != 2:
        raise GGUFError(
            f"tensor {tensor.name}: has {data.ndim} axes, wanted 2 of a matrix. Download it again"
        )
    block_type = READERS[kind.name]
    num_rows = data.shape[0]
    _, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = data.reshape(-1, block_bytes)
    codes, scale, offset = block_type.read(blocks)
    codes = codes.reshape(num_rows, -1)
    scale = scale.reshape(num_rows, -1)
    offset = offset.reshape(num_rows, -1)

    has_finite_scales = np.isfinite(scale).all()
    has_finite_offsets = np.isfinite(offset).all()
    if not (has_finite_scales and has_finite_offsets):
        raise GGUFError(
            f"tensor {tensor.name}: a block's scale is not a finite number. Download the file again"
        )
    scale, offset = _as_fp16(kind, scale, offset)
    return BlockValues(codes, scale, offset, block_type.bits)


def _as_fp16(kind: GGMLQuantizationType, scale: Array, offset: Array) -> tuple[Array, Array]:
    """Return both in fp16 if that is exact: if the type has such scales, unless an offset is too large."""
    if not READERS[kind.name].has_half_scales:
        return scale, offset
    with np.errstate(over="ignore"):
        half_scale = scale.astype(np.float16)
        half_offset = offset.astype(np.float16)
    is_finite = np.isfinite(half_offset)
    if not is_finite.all():
        return scale, offset
    return half_scale, half_offset


def _q4_0(blocks: Array) -> Groups:
    scale = _fp16(blocks, 0)
    codes = _halves(blocks[:, 2:])
    return codes, scale, -8 * scale


def _q4_1(blocks: Array) -> Groups:
    scale = _fp16(blocks, 0)
    offset = _fp16(blocks, 2)
    codes = _halves(blocks[:, 4:])
    return codes, scale, offset


def _q5_0(blocks: Array) -> Groups:
    scale = _fp16(blocks, 0)
    low = _halves(blocks[:, 6:])
    high = _fifth_bits(blocks[:, 2:6])
    codes = low | high
    return codes, scale, -16 * scale


def _q5_1(blocks: Array) -> Groups:
    scale = _fp16(blocks, 0)
    offset = _fp16(blocks, 2)
    low = _halves(blocks[:, 8:])
    high = _fifth_bits(blocks[:, 4:8])
    codes = low | high
    return codes, scale, offset


def _q8_0(blocks: Array) -> Groups:
    scale = _fp16(blocks, 0)
    # Adding 128 to a signed byte turns its sign bit.
    signed = blocks[:, 2:]
    codes = signed ^ np.uint8(128)
    return codes, scale, -128 * scale


def _q4_k(blocks: Array) -> Groups:
    scale, offset = _scales_of_k(blocks)
    codes = _halves(blocks[:, 16:], run=32)
    return codes, scale, offset


def _q5_k(blocks: Array) -> Groups:
    scale, offset = _scales_of_k(blocks)
    low = _halves(blocks[:, 48:], run=32)
    # Bit g of byte i belongs to input i of group g.
    fifth = blocks[:, 16:48]
    high = _bit_planes(fifth)
    codes = low | high << 4
    return codes, scale, offset


def _q2_k(blocks: Array) -> Groups:
    """Read Q2_K: byte g has the scale of group g in its low half and its minimum in its high half."""
    codes = _quarters(blocks[:, 16:80])
    packed = blocks[:, :16]
    factors = packed & 15
    minima = packed >> 4
    d = _fp16(blocks, 80)
    dmin = _fp16(blocks, 82)
    scale = d * factors
    offset = -dmin * minima
    return codes, scale, offset


def _q3_k(blocks: Array) -> Groups:
    """Read Q3_K: codes of 3 bits, whose low 2 bits are in bytes 32 to 95 and whose third bits are in bytes 0 to 31.

    Bit g of byte i is the third bit of value i of the g-th 32 values. The 16 scales have 6 bits. The low 4
    bits of the first 8 are the low halves of bytes 96 to 103, those of the others the high halves.
    The high 2 bits are in bytes 104 to 107, each of which has those of every fourth scale.
    """
    third = _bit_planes(blocks[:, :32])
    low_pair = _quarters(blocks[:, 32:96])
    codes = low_pair | third << 2

    packed = blocks[:, 96:104]
    first = packed & 15
    last = packed >> 4
    low = np.concatenate([first, last], 1)
    high = _pairs_of_bits(blocks[:, None, 104:108])
    factors = _six_bits(low, high)
    d = _fp16(blocks, 108)
    scale = d * factors
    return codes, scale, -4 * scale


def _q6_k(blocks: Array) -> Groups:
    """Read Q6_K: of 128 values, the low 4 bits lie in runs of 64 bytes and the high 2 bits in runs of 32 bytes."""
    low = _halves(blocks[:, :128], run=64)
    high = _quarters(blocks[:, 128:192])
    codes = low | high << 4

    factors = blocks[:, 192:208].view(np.int8)
    d = _fp16(blocks, 208)
    scale = d * factors
    return codes, scale, -32 * scale


def _iq4_nl(blocks: Array) -> Groups:
    scale = _fp16(blocks, 0)
    numbers = _halves(blocks[:, 2:])
    return _of_table(IQ4_VALUES, numbers, scale)


def _iq4_xs(blocks: Array) -> Groups:
    """Read IQ4_XS: scales of 6 bits have their low halves in bytes 4 to 7, and their high 2 bits in two bytes."""
    low = _nibbles(blocks[:, 4:8])
    shifts = np.arange(0, 16, 2, dtype=np.uint16)
    pairs = _two_bytes(blocks[:, 2:4])
    high = pairs >> shifts & 3
    high = high.astype(np.uint8)
    factors = _six_bits(low, high)
    d = _fp16(blocks, 0)
    scale = d * factors
    numbers = _halves(blocks[:, 8:])
    return _of_table(IQ4_VALUES, numbers, scale)


def _mxfp4(blocks: Array) -> Groups:
    """Read MXFP4: byte 0 is the exponent of a scale, and FP4_VALUES are twice the values."""
    exponent = blocks[:, :1].astype(np.int32)
    scale = np.ldexp(np.float32(1), exponent - 128)
    numbers = _halves(blocks[:, 1:])
    return _of_table(FP4_VALUES, numbers, scale)


def _iq3_xxs(blocks: Array) -> Groups:
    """Read IQ3_XXS: each 32 values have 8 grid indices of a byte, for 4 values each, and a 4-byte word.

    The word has the signs in its low 28 bits and the group's scale in its high 4 bits.
    """
    words = _words(blocks[:, 66:])
    numbers = blocks[:, 2:66]
    factors = _half_steps(words >> 28)
    d = _fp16(blocks, 0)
    scale = d * factors * np.float32(0.5)
    signs = _parity_signs(words)
    return _of_grid(IQ3_XXS, numbers, signs, scale)


def _iq3_s(blocks: Array) -> Groups:
    """Read IQ3_S: grid indices of 9 bits, for 4 values each, with the ninth bits apart, and one sign bit a value."""
    low = blocks[:, 2:66].astype(np.uint16)
    ninth = _bits(blocks[:, 66:74])
    ninth = ninth.astype(np.uint16)
    numbers = low | ninth << 8

    steps = _nibbles(blocks[:, 106:110])
    factors = 1 + 2 * steps
    d = _fp16(blocks, 0)
    scale = d * factors
    signs = _bits(blocks[:, 74:106])
    return _of_grid(IQ3_S, numbers, signs, scale)


def _iq2_xxs(blocks: Array) -> Groups:
    """Read IQ2_XXS: each 32 values have 4 grid indices of a byte, for 8 values each, and a 4-byte word.

    The word has the signs in its low 28 bits and the group's scale in its high 4 bits.
    """
    pairs = blocks[:, 2:].reshape(len(blocks), 8, 8)
    numbers = pairs[:, :, :4]
    words = _words(pairs[:, :, 4:])
    words = words[..., 0]
    factors = _half_steps(words >> 28)
    d = _fp16(blocks, 0)
    scale = d * factors * np.float32(0.25)
    signs = _parity_signs(words)
    return _of_grid(IQ2_XXS, numbers, signs, scale)


def _iq2_xs(blocks: Array) -> Groups:
    """Read IQ2_XS: each 8 values have two bytes: a grid index in the low 9 bits, and 7 bits of signs."""
    pairs = _two_bytes(blocks[:, 2:66])
    numbers = pairs & 511
    signs = _with_parity(pairs >> 9)
    scale = _quarter_scales(blocks, blocks[:, 66:])
    return _of_grid(IQ2_XS, numbers, signs, scale)


def _iq2_s(blocks: Array) -> Groups:
    """Read IQ2_S: grid indices of 10 bits, for 8 values each, with the high 2 bits apart, and one sign bit a value."""
    low = blocks[:, 2:34].astype(np.uint16)
    packed = blocks[:, 66:74, None]
    high = packed >> PAIR_SHIFTS & 3
    high = high.reshape(len(blocks), -1)
    high = high.astype(np.uint16)
    numbers = low | high << 8
    signs = _bits(blocks[:, 34:66])
    scale = _quarter_scales(blocks, blocks[:, 74:])
    return _of_grid(IQ2_S, numbers, signs, scale)


def _of_table(values: tuple[int, ...], numbers: Array, scale: Array) -> Groups:
    """Return codes, scale and offset of values that blocks store as indices into a table of values.

    Args:
        values: the table.
        numbers: indices into the table, one for each value.
    """
    table = [ZERO_CODE + value for value in values]
    codes = np.array(table, np.uint8)
    return codes[numbers], scale, -ZERO_CODE * scale


def _of_grid(kind: Any, numbers: Array, signs: Array, scale: Array) -> Groups:
    """Return codes, scale and offset of values that blocks store as grid indices and signs.

    Args:
        kind: class of the package gguf that has the grid of magnitudes.
        numbers: grid indices, one for each 4 or 8 values.
        signs: 1 for a negative value, else 0, one for each value.
    """
    kind.init_grid()
    grid: Array = kind.grid.reshape(kind.grid_shape)
    grid = grid.astype(np.uint8)
    values = grid[numbers]
    values = values.reshape(len(numbers), -1)
    is_negative = signs == 1
    codes = np.where(is_negative, ZERO_CODE - values, ZERO_CODE + values)
    codes = codes.astype(np.uint8)
    return codes, scale, -ZERO_CODE * scale


def _with_parity(sevens: Array) -> Array:
    """Return 8 signs for each 7 stored ones. The eighth is not stored: the number of minus signs is even."""
    shifts = np.arange(7, dtype=sevens.dtype)
    bits = sevens[..., None] >> shifts & 1
    num_negative = bits.sum(-1, keepdims=True)
    eighth = num_negative & 1
    signs = np.concatenate([bits, eighth], -1)
    return signs.reshape(len(sevens), -1)


def _parity_signs(words: Array) -> Array:
    """Return the 32 signs of each word, whose low 28 bits have 7 bits for each 8 signs."""
    shifts = np.arange(0, 28, 7, dtype=np.uint32)
    sevens = words[..., None] >> shifts & 127
    sevens = sevens.reshape(len(words), -1)
    return _with_parity(sevens)


def _half_steps(numbers: Array) -> Array:
    """Return integers plus a half, in fp32."""
    return numbers.astype(np.float32) + 0.5


def _quarter_scales(blocks: Array, packed: Array) -> Array:
    """Return scales of 16 values each: quarters of 4-bit integers plus a half, times the block's own scale."""
    steps = _nibbles(packed)
    factors = _half_steps(steps)
    d = _fp16(blocks, 0)
    return d * factors * np.float32(0.25)


def _six_bits(low: Array, high: Array) -> Array:
    """Return signed 6-bit integers from their low 4 and high 2 bits. They are stored with 32 added."""
    stored = low | high << 4
    signed = stored.astype(np.int8)
    return signed - np.int8(32)


def _bits(packed: Array) -> Array:
    """Return the bits of bytes, the lowest first."""
    contiguous = np.ascontiguousarray(packed)
    return np.unpackbits(contiguous, axis=1, bitorder="little")


def _bit_planes(packed: Array) -> Array:
    """Return the lowest bit of each byte of a block, then the next bit of each, up to the highest."""
    planes = packed[:, None] >> PLANE_SHIFTS & 1
    return planes.reshape(len(packed), -1)


def _nibbles(packed: Array) -> Array:
    """Return the low half of each byte and then its high half."""
    low = packed & 15
    high = packed >> 4
    pairs = np.stack([low, high], 2)
    return pairs.reshape(len(packed), -1)


def _quarters(packed: Array) -> Array:
    """Return the lowest 2 bits of a run of 32 bytes, then the next ones, run after run."""
    runs = packed.reshape(len(packed), -1, 1, 32)
    return _pairs_of_bits(runs)


def _pairs_of_bits(runs: Array) -> Array:
    """Return the lowest 2 bits of each byte of the last axis, then the next ones."""
    pairs = runs >> PAIR_SHIFTS[:, None] & 3
    return pairs.reshape(len(runs), -1)


def _two_bytes(packed: Array) -> Array:
    """Return each two bytes as an unsigned integer, little-endian."""
    contiguous = np.ascontiguousarray(packed)
    return contiguous.view("<u2")


def _words(packed: Array) -> Array:
    """Return each four bytes as an unsigned integer, little-endian."""
    contiguous = np.ascontiguousarray(packed)
    return contiguous.view("<u4")


def _fp16(blocks: Array, start: int) -> Array:
    """Return the fp16 number that begins at this byte of each block, in fp32."""
    end = start + 2
    pairs = np.ascontiguousarray(blocks[:, start:end])
    halves = pairs.view("<f2")
    return halves.astype(np.float32)


def _halves(packed: Array, run: int = 16) -> Array:
    """Return the low halves of a run of bytes, then their high halves, run after run."""
    # The halves of 8 bytes at once.
    contiguous = np.ascontiguousarray(packed)
    words = contiguous.view("<u8")
    words_per_run = run // 8
    runs = words.reshape(len(packed), -1, words_per_run)
    low = runs & LOW_HALVES
    high = runs >> np.uint64(4) & LOW_HALVES
    halves = np.stack([low, high], 2)
    halves = halves.view(np.uint8)
    return halves.reshape(len(packed), -1)


def _fifth_bits(packed: Array) -> Array:
    """Return bit i of each block's 4 bytes as bit 4 of code i."""
    return _bits(packed) << 4


def _scales_of_k(blocks: Array) -> tuple[Array, Array]:
    """Return the scale and offset of the 8 groups of Q4_K and Q5_K blocks.

    Bytes 4 to 15 hold 8 scales and 8 minima of 6 bits. The first 4 of each lie in the low 6 bits of
    bytes 4 to 11. The last 4 have their low 4 bits in bytes 12 to 15, and their high 2 bits on top
    of the first.
    """
    first_scales = blocks[:, 4:8]
    first_minima = blocks[:, 8:12]
    low = blocks[:, 12:16]
    high_scales = first_scales >> 6 << 4
    high_minima = first_minima >> 6 << 4
    last_scales = low & 15 | high_scales
    last_minima = low >> 4 | high_minima
    first_scales = first_scales & 63
    first_minima = first_minima & 63
    scales = np.concatenate([first_scales, last_scales], 1)
    minima = np.concatenate([first_minima, last_minima], 1)
    d = _fp16(blocks, 0)
    dmin = _fp16(blocks, 2)
    return d * scales, -dmin * minima


READERS = {  # by the name of a type
    "Q4_0": BlockType(4, 32, _q4_0, has_half_scales=True),
    "Q4_1": BlockType(4, 32, _q4_1, has_half_scales=True),
    "Q5_0": BlockType(8, 32, _q5_0, has_half_scales=True),
    "Q5_1": BlockType(8, 32, _q5_1, has_half_scales=True),
    "Q8_0": BlockType(8, 32, _q8_0, has_half_scales=True),
    "Q2_K": BlockType(4, 16, _q2_k),
    "Q3_K": BlockType(4, 16, _q3_k),
    "Q4_K": BlockType(4, 32, _q4_k),
    "Q5_K": BlockType(8, 32, _q5_k),
    "Q6_K": BlockType(8, 16, _q6_k),
    "IQ4_NL": BlockType(8, 32, _iq4_nl, has_half_scales=True),
    "IQ4_XS": BlockType(8, 32, _iq4_xs),
    "MXFP4": BlockType(8, 32, _mxfp4),
    "IQ3_XXS": BlockType(8, 32, _iq3_xxs),
    "IQ3_S": BlockType(8, 32, _iq3_s),
    "IQ2_XXS": BlockType(8, 32, _iq2_xxs),
    "IQ2_XS": BlockType(8, 16, _iq2_xs),
    "IQ2_S": BlockType(8, 16, _iq2_s),
}
