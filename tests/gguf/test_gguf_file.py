"""The reader of GGUF files against a second one, on small files of every type that this one knows."""

import struct

import numpy as np
import pytest

from eagle_ray.gguf.blocks import GGUFError
from eagle_ray.gguf.gguf_file import GGUFFile
from tests.support.gguf import BF16, F16, F32, Q4_0, Q4_1, Q8_0, SlowReader, write_gguf

METADATA = {
    "a.text": "Größe",
    "a.number": 7,
    "a.flag": True,
    "a.list": ["x", "y"],
    "a.float": 0.5,
    "a.ints": [1, 2],
}


@pytest.fixture
def values() -> np.ndarray:
    return np.random.default_rng(3).normal(0, 1, (6, 64)).astype(np.float32)


@pytest.mark.parametrize("type_id", [F32, F16, BF16, Q4_0, Q4_1, Q8_0])
def test_tensors_equal_a_second_readers(tmp_path, values, type_id):
    write_gguf(tmp_path / "x.gguf", METADATA, {"first": (F32, values[:1]), "w": (type_id, values)})
    file = GGUFFile.open(tmp_path / "x.gguf")
    found = file.tensor("w")
    assert found.dtype == np.float32 and found.shape == values.shape
    np.testing.assert_array_equal(found, SlowReader(tmp_path / "x.gguf").rows("w"))
    largest_error = {F32: 0, F16: 2e-3, BF16: 0.03, Q4_0: 0.5, Q4_1: 0.3, Q8_0: 0.02}[type_id]
    assert np.abs(found - values).max() <= largest_error


def test_metadata_is_read(tmp_path, values):
    write_gguf(tmp_path / "x.gguf", METADATA, {"w": (F32, values)})
    assert (
        GGUFFile.open(tmp_path / "x.gguf").metadata
        == METADATA
        == SlowReader(tmp_path / "x.gguf").metadata
    )


def test_4_bit_extremes_are_exact(tmp_path):
    """0, 15 and the minimum come back exactly where scale and minimum are fp16 numbers."""
    values = np.array([np.arange(32) % 16 * 0.25 - 2], np.float32)
    write_gguf(tmp_path / "x.gguf", {}, {"w": (Q4_1, values)})
    np.testing.assert_array_equal(GGUFFile.open(tmp_path / "x.gguf").tensor("w"), values)


@pytest.mark.parametrize("cut", [0, 3, 20, 60, 150])
def test_a_header_that_is_cut_off_is_refused(tmp_path, values, cut):
    write_gguf(tmp_path / "whole", METADATA, {"w": (F32, values)})
    (tmp_path / "x.gguf").write_bytes((tmp_path / "whole").read_bytes()[:cut])
    with pytest.raises(GGUFError, match=r"x\.gguf"):
        GGUFFile.open(tmp_path / "x.gguf")


def test_blocks_are_read_as_they_lie_in_the_file(tmp_path, values):
    write_gguf(tmp_path / "x.gguf", METADATA, {"first": (F32, values[:1]), "w": (Q4_1, values)})
    blocks = GGUFFile.open(tmp_path / "x.gguf").tensors["w"].data
    assert blocks.dtype == np.uint8 and blocks.shape == (6, 2 * 20)
    assert (
        blocks.tobytes() == (tmp_path / "x.gguf").read_bytes()[-256:-16]
    )  # 240 bytes, padded to a multiple of 32


def test_data_that_is_cut_off_is_refused(tmp_path, values):
    write_gguf(tmp_path / "whole", METADATA, {"w": (F32, values)})
    (tmp_path / "x.gguf").write_bytes((tmp_path / "whole").read_bytes()[:-64])
    with pytest.raises(GGUFError, match=r"x\.gguf: .* the file ends early"):
        GGUFFile.open(tmp_path / "x.gguf")


def test_another_file_and_another_version_are_refused(tmp_path):
    (tmp_path / "text").write_bytes(b"not a model at all, but long enough")
    with pytest.raises(GGUFError, match=r"text: .* magic invalid"):
        GGUFFile.open(tmp_path / "text")
    (tmp_path / "old").write_bytes(b"GGUF\1\0\0\0" + bytes(16))
    with pytest.raises(GGUFError, match="version 1"):
        GGUFFile.open(tmp_path / "old")


@pytest.mark.parametrize(
    ("type_id", "says"),
    [(99, r"x\.gguf: .*99"), (Q4_1, r"x\.gguf: .* row size \(33\)"), (26, "tensor w .* I32")],
)
def test_unsupported_types_and_broken_rows_are_refused(tmp_path, type_id, says):
    write_gguf(tmp_path / "x.gguf", {}, {"w": (F32, np.zeros((2, 33), np.float32))})
    head, tail = (tmp_path / "x.gguf").read_bytes().split(struct.pack("<QQIQ", 33, 2, F32, 0))
    (tmp_path / "x.gguf").write_bytes(head + struct.pack("<QQIQ", 33, 2, type_id, 0) + tail)
    with pytest.raises(GGUFError, match=says):
        GGUFFile.open(tmp_path / "x.gguf").tensor("w")
