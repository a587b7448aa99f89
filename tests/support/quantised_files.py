"""Small quantised weights in the layouts of other projects, packed and read value by value.

Nothing here is shared with eagle_ray, so that a mistake there is not made here too.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf.quants import IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS
from safetensors.torch import save_file
from torch import Tensor

from eagle_ray.gguf.gguf_file import GGUFFile
from eagle_ray.models.quantized_checkpoint import GGUFCheckpoint
from eagle_ray.models.quantized_linear import QuantizedWeight

BLOCK_BYTES = {
    "Q4_0": 18,
    "Q4_1": 20,
    "Q5_0": 22,
    "Q5_1": 24,
    "Q8_0": 34,
    "Q2_K": 84,
    "Q3_K": 110,
    "IQ4_NL": 18,
    "IQ4_XS": 136,
    "MXFP4": 17,
    "IQ3_XXS": 98,
    "IQ3_S": 110,
    "IQ2_XXS": 66,
    "IQ2_XS": 74,
    "IQ2_S": 82,
    "Q4_K": 144,
    "Q5_K": 176,
    "Q6_K": 210,
}
FP16_AT = {  # bytes at which a block has fp16 numbers
    **{"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0]},
    **{"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "Q2_K": [80, 82], "Q3_K": [108]},
    **{"IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [], "IQ3_XXS": [0], "IQ3_S": [0]},
    **{"IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0]},
}
EXPONENT_AT = {"MXFP4": 0}  # byte that has the exponent of a scale, of base 2, plus 127


def random_blocks(kind: str, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Return random bytes [rows, blocks * bytes of a block] whose fp16 numbers are about 0.1."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, blocks, BLOCK_BYTES[kind]), np.uint8)
    for at in FP16_AT[kind]:
        scales = rng.normal(0, 0.1, (rows, blocks, 1)).astype(np.float16)
        data[:, :, at : at + 2] = scales.view(np.uint8)
    if kind in EXPONENT_AT:
        data[:, :, EXPONENT_AT[kind]] = rng.integers(118, 124, (rows, blocks))
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
    return [
        _half(block, 0) * _fp32(_nibble(block[6:], i, 16) + _fifth(block[2:6], i) - 16)
        for i in range(32)
    ]


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
        values.append(
            _half(block, 208) * _fp32(scale) * _fp32(_nibble(block, i, 64) + 16 * high - 32)
        )
    return values


def _q2_k(block: bytes) -> list[np.float32]:
    values = []
    for i in range(256):
        half, rest = divmod(i, 128)
        code = block[16 + 32 * half + rest % 32] >> 2 * (rest // 32) & 3
        packed = block[i // 16]
        scale, minimum = (
            _half(block, 80) * _fp32(packed % 16),
            _half(block, 82) * _fp32(packed // 16),
        )
        values.append(scale * _fp32(code) - minimum)
    return values


def _q3_k(block: bytes) -> list[np.float32]:
    values = []
    for i in range(256):
        half, rest = divmod(i, 128)
        code = block[32 + 32 * half + rest % 32] >> 2 * (rest // 32) & 3
        third = block[i % 32] >> (i // 32) & 1
        group = i // 16
        low = block[96 + group % 8] >> 4 * (group // 8) & 15
        high = block[104 + group % 4] >> 2 * (group // 4) & 3
        scale = _half(block, 108) * _fp32(low + 16 * high - 32)
        values.append(scale * _fp32(code if third else code - 4))
    return values


IQ4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def _iq4_nl(block: bytes) -> list[np.float32]:
    return [_half(block, 0) * _fp32(IQ4[_nibble(block[2:], i, 16)]) for i in range(32)]


def _iq4_xs(block: bytes) -> list[np.float32]:
    values = []
    for i in range(256):
        group = i // 32
        low = block[4 + group // 2] >> 4 * (group % 2) & 15
        high = int.from_bytes(block[2:4], "little") >> 2 * group & 3
        scale = _half(block, 0) * _fp32(low + 16 * high - 32)
        values.append(scale * _fp32(IQ4[_nibble(block[8:], i, 16)]))
    return values


def _mxfp4(block: bytes) -> list[np.float32]:
    values = []
    for i in range(32):
        code = _nibble(block[1:], i, 16)
        magnitude = E2M1[code % 8] * 2.0 ** (block[0] - 127)
        values.append(_fp32(-magnitude if code >= 8 else magnitude))
    return values


def _grid_entry(kind: type, number: int) -> list[int]:
    """Return the values of one entry of a type's table, which is data of the package gguf.

    Entries are of a few bits for each value, two hexadecimal digits for two, four or one of them.
    """
    per_entry = kind.grid_shape[1]
    bits = {8: 2, 4: 3}[per_entry]  # of a place in grid_map
    size = {2: 2, 3: 4}[bits]  # bits that a place takes in the text
    text = bytes.fromhex(kind.grid_hex.decode())
    places = []
    for i in range(per_entry):
        at = (number * per_entry + i) * size
        places.append(text[at // 8] >> at % 8 & (2**size - 1))
    return [kind.grid_map[place] for place in places]


def _seven_signs(seven: int, i: int) -> int:
    """Return the sign of value i of 8: the last is that of the parity of the others."""
    return -1 if (seven | (bin(seven).count("1") % 2) << 7) >> i & 1 else 1


def _bit_sign(packed: bytes, i: int) -> int:
    return -1 if packed[i // 8] >> i % 8 & 1 else 1


def _iq3_xxs(block: bytes) -> list[np.float32]:
    values = []
    for i in range(256):
        word = int.from_bytes(block[66 + 4 * (i // 32) :][:4], "little")
        scale = _half(block, 0) * _fp32((word >> 28) + 0.5) * _fp32(0.5)
        sign = _seven_signs(word >> 7 * (i % 32 // 8) & 127, i % 8)
        values.append(scale * _fp32(sign * _grid_entry(IQ3_XXS, block[2 + i // 4])[i % 4]))
    return values


def _iq3_s(block: bytes) -> list[np.float32]:
    values = []
    for i in range(256):
        ninth = block[66 + i // 32] >> (i // 4 % 8) & 1
        number = block[2 + i // 4] + 256 * ninth
        scale = block[106 + i // 64] >> 4 * (i // 32 % 2) & 15
        sign = _bit_sign(block[74:106], i)
        value = sign * _grid_entry(IQ3_S, number)[i % 4]
        values.append(_half(block, 0) * _fp32(1 + 2 * scale) * _fp32(value))
    return values


def _iq2_xxs(block: bytes) -> list[np.float32]:
    values = []
    for i in range(256):
        group = block[2 + 8 * (i // 32) :][:8]
        word = int.from_bytes(group[4:], "little")
        scale = _half(block, 0) * _fp32((word >> 28) + 0.5) * _fp32(0.25)
        sign = _seven_signs(word >> 7 * (i % 32 // 8) & 127, i % 8)
        values.append(scale * _fp32(sign * _grid_entry(IQ2_XXS, group[i % 32 // 8])[i % 8]))
    return values


def _iq2_xs(block: bytes) -> list[np.float32]:
    values = []
    for i in range(256):
        pair = int.from_bytes(block[2 + 2 * (i // 8) :][:2], "little")
        value = _seven_signs(pair >> 9, i % 8) * _grid_entry(IQ2_XS, pair % 512)[i % 8]
        values.append(_quarter_scale(block, 66, i) * _fp32(value))
    return values


def _iq2_s(block: bytes) -> list[np.float32]:
    values = []
    for i in range(256):
        high = block[66 + i // 32] >> 2 * (i // 8 % 4) & 3
        number = block[2 + i // 8] + 256 * high
        value = _bit_sign(block[34:66], i) * _grid_entry(IQ2_S, number)[i % 8]
        values.append(_quarter_scale(block, 74, i) * _fp32(value))
    return values


def _quarter_scale(block: bytes, at: int, i: int) -> np.float32:
    scale = block[at + i // 32] >> 4 * (i // 16 % 2) & 15
    return _half(block, 0) * _fp32(scale + 0.5) * _fp32(0.25)


# What reads the values of one block.
SLOW_BLOCKS: dict[str, Callable[[bytes], list[np.float32]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


class PackedLayer(NamedTuple):
    """The tensors of a linear layer by their names below its own, and its weight [O, I] in fp32."""

    tensors: dict[str, Tensor]
    weight: Tensor


def awq_layer(
    num_outputs: int, num_inputs: int, group_size: int, zero_point: bool = True
) -> PackedLayer:
    """AutoAWQ's gemm: words along the outputs, whose nibbles hold outputs 0, 2, 4, 6, 1, 3, 5, 7."""
    codes, zeros, scale = _random_codes(num_outputs, num_inputs, num_inputs // group_size, 4)
    if not zero_point:
        zeros = [[8] * len(row) for row in zeros]
    groups = [i // group_size for i in range(num_inputs)]
    tensors = {
        "qweight": _awq_words(codes),
        "qzeros": _awq_words(zeros),
        "scales": scale.T.contiguous(),
    }
    if not zero_point:
        del tensors["qzeros"]
    return PackedLayer(tensors, _dequantised(codes, zeros, scale, groups))


def _awq_words(codes: list[list[int]]) -> Tensor:
    """Return words [I, O / 8] of codes [O][I]."""
    words = [[0] * (len(codes) // 8) for _ in codes[0]]
    for output, row in enumerate(codes):
        nibble = [0, 2, 4, 6, 1, 3, 5, 7].index(output % 8)
        for i, code in enumerate(row):
            words[i][output // 8] += code << 4 * nibble
    return _int32(words)


def gptq_layer(bits: int, num_outputs: int, groups: Sequence[int], zero_shift: int) -> PackedLayer:
    """GPTQ: weights in words along the inputs, zero points less zero_shift in words along the outputs."""
    codes, zeros, scale = _random_codes(
        num_outputs, len(groups), max(groups) + 1, bits, first_zero=zero_shift
    )
    stored = [[zero - zero_shift for zero in row] for row in zeros]
    tensors = {
        "qweight": _int32(_transposed(_words(codes, bits))),
        "qzeros": _int32(_words(_transposed(stored), bits)),
        "scales": scale.T.contiguous(),
        "g_idx": torch.tensor(groups, dtype=torch.int32),
    }
    return PackedLayer(tensors, _dequantised(codes, zeros, scale, groups))


def packed_layer(
    bits: int,
    num_outputs: int,
    groups: Sequence[int],
    symmetric: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> PackedLayer:
    """compressed-tensors' pack-quantized: words along the inputs, zero points in words along the outputs."""
    codes, zeros, scale = _random_codes(num_outputs, len(groups), max(groups) + 1, bits)
    scale = scale.to(dtype)
    if symmetric:
        zeros = [[2 ** (bits - 1)] * len(row) for row in zeros]
    tensors = {
        "weight_packed": _int32(_words(codes, bits)),
        "weight_scale": scale,
        "weight_shape": torch.tensor([num_outputs, len(groups)]),
        "weight_g_idx": torch.tensor(groups, dtype=torch.int32),
    }
    if not symmetric:
        tensors["weight_zero_point"] = _int32(_transposed(_words(_transposed(zeros), bits)))
    return PackedLayer(tensors, _dequantised(codes, zeros, scale, groups))


def integer_layer(num_outputs: int, num_inputs: int, symmetric: bool) -> PackedLayer:
    """compressed-tensors' int-quantized: a signed byte for each weight and a scale for each output."""
    codes, zeros, scale = _random_codes(num_outputs, num_inputs, 1, 8)
    values = torch.tensor([[code - 128 for code in row] for row in codes], dtype=torch.int8)
    tensors = {"weight": values, "weight_scale": scale.float()}
    if symmetric:
        zeros = [[128] for _ in zeros]
    else:
        tensors["weight_zero_point"] = torch.tensor(
            [[row[0] - 128] for row in zeros], dtype=torch.int8
        )
    return PackedLayer(tensors, _dequantised(codes, zeros, scale, [0] * num_inputs))


def fp8_layer(
    num_outputs: int, num_inputs: int, scale: Tensor, block: tuple[int, int], suffix: str
) -> PackedLayer:
    """8-bit floats with a scale for each block of the weight."""
    torch.manual_seed(0)
    values = torch.randn(num_outputs, num_inputs).to(torch.float8_e4m3fn)
    weight = values.float()
    scales = scale.float().reshape(-1, scale.shape[-1] if scale.ndim else 1)
    for output in range(num_outputs):
        for i in range(num_inputs):
            weight[output, i] *= scales[output // block[0], i // block[1]]
    return PackedLayer({"weight": values, suffix: scale}, weight)


def write_layers(directory: Path, layers: dict[str, dict[str, Tensor]], num_files: int = 1) -> None:
    """Write the tensors of layers by their names, into several files with an index if num_files is not 1."""
    tensors = {
        f"{name}.{suffix}": tensor for name, own in layers.items() for suffix, tensor in own.items()
    }
    if num_files == 1:
        save_file(tensors, directory / "model.safetensors")
        return
    names = sorted(tensors)
    files = {name: f"model-{i % num_files}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": files})
    )


def _random_codes(
    num_outputs: int, num_inputs: int, num_groups: int, bits: int, first_zero: int = 0
) -> tuple[list[list[int]], list[list[int]], Tensor]:
    """Return codes [O][I], zero points [O][G] from first_zero on, and fp16 scales [O, G]."""
    rng = np.random.default_rng(bits + num_outputs)
    codes = rng.integers(0, 2**bits, (num_outputs, num_inputs)).tolist()
    zeros = rng.integers(first_zero, 2**bits, (num_outputs, num_groups)).tolist()
    return (
        codes,
        zeros,
        torch.from_numpy(rng.uniform(0.001, 0.1, (num_outputs, num_groups)).astype(np.float16)),
    )


def _words(rows: list[list[int]], bits: int) -> list[list[int]]:
    """Return the words of each row, with the first code in the lowest bits; the last word may not be full."""
    per_word = 32 // bits
    words = [[0] * -(-len(row) // per_word) for row in rows]
    for word_row, row in zip(words, rows, strict=True):
        for i, code in enumerate(row):
            word_row[i // per_word] += code << bits * (i % per_word)
    return words


def _transposed(rows: list[list[int]]) -> list[list[int]]:
    return [list(row) for row in zip(*rows, strict=True)]


def _int32(words: list[list[int]]) -> Tensor:
    return torch.tensor(
        [[word - 2**32 if word >= 2**31 else word for word in row] for row in words],
        dtype=torch.int32,
    )


def _dequantised(
    codes: list[list[int]], zeros: list[list[int]], scale: Tensor, groups: Sequence[int]
) -> Tensor:
    """Return scale * (code - zero) in fp32, one weight at a time."""
    scales = scale.double().tolist()
    return torch.tensor(
        [
            [scales[o][groups[i]] * (code - zeros[o][groups[i]]) for i, code in enumerate(row)]
            for o, row in enumerate(codes)
        ],
        dtype=torch.float32,
    )


def quantized_tensors(
    file: GGUFFile, config: dict[str, Any]
) -> dict[str, QuantizedWeight | Tensor]:
    """All tensors of a GGUF file by transformers' names, as the engine reads them."""
    checkpoint = GGUFCheckpoint(file, config)
    layers = set(checkpoint.names())
    tensors: dict[str, QuantizedWeight | Tensor] = {}
    for name in sorted(checkpoint.tensor_names()):
        layer = name.removesuffix(".weight")
        tensors[name] = checkpoint.projection(layer) if layer in layers else checkpoint.tensor(name)
    return tensors


def _mixed_groups(num_inputs: int) -> list[int]:
    order = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(1))
    return (order // 32).tolist()


def _group_settings(layout: str, **weights: Any) -> dict[str, Any]:
    """Return compressed-tensors' quantization_config of all linear layers but the lm_head."""
    weights = {"type": "int", "symmetric": True, "strategy": "channel", "num_bits": 8} | weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    method = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
    return method | {"format": layout, "ignore": ["lm_head"], "config_groups": {"group_0": group}}


BLOCK = [32, 32]  # of FP8 weights that have a scale for each block
# What makes a layer of a shape, and its checkpoint's quantization_config.
STORED_LAYERS: dict[str, tuple[Callable[[tuple[int, int]], PackedLayer], dict[str, Any]]] = {
    "awq": (
        lambda shape: awq_layer(*shape, 32),
        {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32, "zero_point": True},
    ),
    "gptq": (
        lambda shape: gptq_layer(4, shape[0], _mixed_groups(shape[1]), 1),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
    ),
    "compressed-tensors": (
        lambda shape: packed_layer(4, shape[0], [i // 32 for i in range(shape[1])], True),
        _group_settings("pack-quantized", num_bits=4, strategy="group", group_size=32),
    ),
    "W8A8": (lambda shape: integer_layer(*shape, True), _group_settings("int-quantized")),
    "fp8": (
        lambda shape: fp8_layer(*shape, torch.rand(shape[0], 1), (1, shape[1]), "weight_scale"),
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
    ),
    "fp8 in blocks": (
        lambda shape: fp8_layer(
            *shape,
            torch.rand(-(-shape[0] // 32), -(-shape[1] // 32)),
            (32, 32),
            "weight_scale_inv",
        ),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": BLOCK},
    ),
}


def store_layers(tensors: dict[str, Tensor], kind: str, names: Sequence[str]) -> dict[str, Tensor]:
    """Put random layers of a kind of STORED_LAYERS in place of weights; return what each stands for.

    Args:
        tensors: of a checkpoint; the weights are replaced.
        names: names of the weights.
    """
    make, _ = STORED_LAYERS[kind]
    made: dict[tuple[int, int], PackedLayer] = {}
    weights = {}
    for name in names:
        num_outputs, num_inputs = tensors.pop(name).shape
        shape = (num_outputs, num_inputs)
        if shape not in made:
            made[shape] = make(shape)
        layer = made[shape]
        weights[name] = layer.weight.clone()
        for suffix, tensor in layer.tensors.items():
            tensors[f"{name.removesuffix('weight')}{suffix}"] = tensor.clone()
    return weights
