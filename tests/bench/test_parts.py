"""Files that travel in parts: cut, received in any order, assembled, and refused if a byte is not what was sent."""

import shutil
from pathlib import Path

import pytest

from jobs.bench.gpu.parts import MANIFEST, Manifest, PartsError, assemble, receive, split

PART_BYTES = 1000


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "model.gguf", tmp_path / "empty", tmp_path / "site.tar"]
    for path, size in zip(paths, (1700, 0, 2500), strict=True):
        path.write_bytes(bytes((7 * i) % 251 for i in range(size)))
    return paths


def carry(parts: Path, transfer: Path, *names: str) -> Path:
    """A directory with the manifest and these parts alone, as one transfer leaves it."""
    shutil.rmtree(transfer, ignore_errors=True)
    transfer.mkdir()
    for name in (MANIFEST, *names):
        shutil.copy(parts / name, transfer)
    return transfer


def test_parts_in_any_order_give_the_files_back(tmp_path: Path, files: list[Path]):
    parts, kept, transfer = tmp_path / "parts", tmp_path / "kept", tmp_path / "transfer"
    manifest = split(files, parts, PART_BYTES)
    assert [part.size for part in manifest.parts] == [1000, 1000, 1000, 1000, 200]
    remaining = [part.name for part in manifest.parts]
    for name in ("part-003", "part-000", "part-004", "part-002", "part-001"):
        remaining.remove(name)
        assert receive(carry(parts, transfer, name), kept) == remaining
    found = assemble(kept, tmp_path / "out")
    assert [path.name for path in found] == [path.name for path in files]
    assert [path.read_bytes() for path in found] == [path.read_bytes() for path in files]


def test_a_file_is_assembled_before_the_parts_of_others_arrive(tmp_path: Path, files: list[Path]):
    parts, kept = tmp_path / "parts", tmp_path / "kept"
    split(files, parts, PART_BYTES)
    receive(carry(parts, tmp_path / "transfer", "part-000", "part-001"), kept)
    assert assemble(kept, tmp_path / "out", ["model.gguf"])[0].read_bytes() == files[0].read_bytes()
    with pytest.raises(PartsError, match=r"site.tar: part-002, part-003, part-004 missing"):
        assemble(kept, tmp_path / "out", ["site.tar"])
    with pytest.raises(PartsError, match=r"another: not among model.gguf"):
        assemble(kept, tmp_path / "out", ["another"])


def test_truncated_part_is_missing_and_changed_part_is_refused(tmp_path: Path, files: list[Path]):
    parts, kept = tmp_path / "parts", tmp_path / "kept"
    split(files, parts, PART_BYTES)
    assert receive(parts, kept) == []
    (kept / "part-000").write_bytes(bytes(PART_BYTES))
    with pytest.raises(PartsError, match="SHA-256"):
        assemble(kept, tmp_path / "out", ["model.gguf"])
    (parts / "part-000").write_bytes(b"")
    assert receive(parts, kept) == ["part-000"]


def test_a_second_split_leaves_no_part_of_the_first(tmp_path: Path, files: list[Path]):
    split(files, tmp_path / "parts", PART_BYTES)
    split(files[:1], tmp_path / "parts", PART_BYTES)
    names = [part.name for part in Manifest.read(tmp_path / "parts").parts]
    assert (
        sorted(path.name for path in (tmp_path / "parts").glob("part-*"))
        == names
        == ["part-000", "part-001"]
    )
