"""Compiled kernels travel whole, for the device only, and a damaged archive adds nothing."""

import io
import json
import tarfile
from pathlib import Path

import pytest

from eagle_ray.kernels import triton_cache
from eagle_ray.kernels.triton_cache import entries, pack, unpack
from tests.support.kernels import make_entry


@pytest.fixture
def kernel_cache(tmp_path) -> Path:
    make_entry(tmp_path / "here", "A")
    make_entry(tmp_path / "here", "B")
    (tmp_path / "here" / "unfinished").mkdir()
    return tmp_path / "here"


def test_kernels_are_found_again_in_another_directory(kernel_cache, tmp_path):
    there = tmp_path / "there"
    assert entries(kernel_cache) == {"A", "B"} and entries(there) == set()
    assert unpack(pack(kernel_cache, {"A"}), there) == entries(there) == {"A"}
    assert sorted(path.name for path in (there / "A").iterdir()) == ["__grp__k.json", "k.cubin"]
    group = json.loads((there / "A" / "__grp__k.json").read_text())
    assert group["child_paths"]["k.cubin"] == str(there / "A" / "k.cubin")
    assert [path.name for path in there.iterdir()] == ["A"]


def test_what_is_there_is_kept(kernel_cache, tmp_path):
    make_entry(tmp_path / "there", "A", b"own")
    assert unpack(pack(kernel_cache, entries(kernel_cache)), tmp_path / "there") == {"A", "B"}
    assert (tmp_path / "there" / "A" / "k.cubin").read_bytes() == b"own"
    assert (tmp_path / "there" / "B" / "k.cubin").read_bytes() == b"code"


def test_no_kernels_make_no_archive(tmp_path):
    assert pack(tmp_path, entries(tmp_path)) == b""


def archive(name: str, data: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as file:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        file.addfile(member, io.BytesIO(data))
    return packed.getvalue()


@pytest.mark.parametrize(
    "damage", ["empty", "text", "cut", "flipped", "outside", "group", "deep group", "huge"]
)
def test_a_damaged_or_foreign_archive_adds_nothing(damage, kernel_cache, tmp_path, monkeypatch):
    monkeypatch.setattr(triton_cache, "MAX_ARCHIVE_BYTES", 1 << 20)
    data = pack(kernel_cache, entries(kernel_cache))
    damaged = {
        "empty": b"",
        "text": b"{}",
        "cut": data[: len(data) // 2],
        "flipped": data[:-200] + bytes([data[-200] ^ 255]) + data[-199:],
        "outside": archive("../outside/k.cubin", b"code"),
        "group": archive("A/__grp__k.json", b"[]"),
        "deep group": archive("A/__grp__k.json", b"[" * 100_000),
        "huge": archive("A/k.cubin", bytes(2 << 20)),
    }
    with pytest.raises(ValueError, match="it holds no kernels"):
        unpack(damaged[damage], tmp_path / "there")
    assert entries(tmp_path / "there") == set() and not (tmp_path / "outside").exists()


@pytest.mark.parametrize("name", ["A/cuda_utils.so", "A/cuda_utils.so/", "A/cuda_utils.so/."])
def test_host_code_in_an_archive_is_not_unpacked(name, tmp_path):
    assert unpack(archive(name, b"host"), tmp_path / "there") == set()
    assert not list((tmp_path / "there").rglob("*"))
