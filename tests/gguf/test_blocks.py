"""Blocks as codes, scales and offsets: random bytes of every type, against gguf's own values and by hand."""

import struct
from types import SimpleNamespace

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize, quantize

from eagle_ray.gguf.blocks import READERS, GGUFError, read_blocks
from tests.support.quantised_files import FP16_AT, SLOW_BLOCKS, random_blocks


def tensor(kind: str, data: np.ndarray) -> SimpleNamespace:
    return SimpleNamespace(name="w", tensor_type=GGMLQuantizationType[kind], data=data)


def values_of(blocks) -> np.ndarray:
    size = blocks.codes.shape[1] // blocks.scale.shape[1]
    scale, offset = (
        part.astype(np.float32).repeat(size, 1) for part in (blocks.scale, blocks.offset)
    )
    return scale * blocks.codes.astype(np.float32) + offset


@pytest.mark.parametrize("kind", READERS)
def test_random_blocks_match_gguf_values_and_a_slow_reader(kind):
    data = random_blocks(kind, rows=5, blocks=3)
    found = read_blocks(tensor(kind, data))
    expected = dequantize(data, GGMLQuantizationType[kind])
    assert found.codes.dtype == np.uint8 and found.codes.shape == expected.shape
    assert found.codes.max() < 2**found.bits
    np.testing.assert_array_equal(values_of(found), expected)
    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    slow = [
        SLOW_BLOCKS[kind](data[0, at : at + size].tobytes()) for at in range(0, data.shape[1], size)
    ]
    np.testing.assert_array_equal(values_of(found)[0], np.concatenate(slow))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_gguf_quantises_is_close_and_in_fp16(kind):
    weights = np.random.default_rng(1).normal(0, 1, (4, 64)).astype(np.float32)
    found = read_blocks(tensor(kind, quantize(weights, GGMLQuantizationType[kind])))
    assert found.scale.dtype == found.offset.dtype == np.float16
    assert np.abs(values_of(found) - weights).max() < {4: 0.4, 8: 0.2}[found.bits]


def test_an_offset_beyond_fp16_is_fp32():
    data = np.frombuffer(struct.pack("<e32b", 1000.0, *range(-16, 16)), np.uint8)[None]
    found = read_blocks(tensor("Q8_0", data))
    assert found.offset.dtype == found.scale.dtype == np.float32
    np.testing.assert_array_equal(values_of(found)[0], 1000.0 * np.arange(-16, 16))


@pytest.mark.parametrize("kind", ["IQ1_S", "IQ1_M", "TQ2_0", "NVFP4", "I32"])
def test_a_type_that_is_not_read_is_named(kind):
    with pytest.raises(
        GGUFError,
        match=rf"tensor w: type {kind} is not read\. Take a file .* such as Q4_K_M: Q4_0, ",
    ):
        read_blocks(
            tensor(kind, np.zeros((1, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]), np.uint8))
        )


@pytest.mark.parametrize("kind", [kind for kind in READERS if FP16_AT[kind]])
@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_is_refused(kind, scale):
    data = random_blocks(kind, rows=2, blocks=2).copy()
    at = FP16_AT[kind][0]
    data[1, at : at + 2] = np.frombuffer(struct.pack("<e", scale), np.uint8)
    with (
        np.errstate(invalid="ignore"),
        pytest.raises(GGUFError, match="tensor w: a block's scale is not a finite"),
    ):
        read_blocks(tensor(kind, data))


def test_a_quantised_vector_is_refused():
    with pytest.raises(GGUFError, match="tensor w: has 1 axes"):
        read_blocks(tensor("Q8_0", random_blocks("Q8_0", rows=1, blocks=1)[0]))
