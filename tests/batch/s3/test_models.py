"""Models in a bucket: downloaded once a machine, whole or not at all, and used as local ones are."""

import errno
import os
import shutil
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eagle_ray.assembly.hub import check_models, download, download_metadata
from eagle_ray.batch.worker.crash_isolation import classify_error
from eagle_ray.cli.validate import validate
from eagle_ray.core.errors import ConfigError
from eagle_ray.doctor.pair_check import pair_here
from eagle_ray.runs.job_errors import CONFIGURATION, TRANSIENT, outcome_of
from eagle_ray.storage import model_download
from eagle_ray.storage.cache_directory import cache_home
from eagle_ray.storage.path import StoragePath
from eagle_ray.storage.store import ObjectChanged, StorageError
from tests.support.gguf import toy_metadata, toy_tensors, write_gguf
from tests.support.jobs import PAIR, token_rows
from tests.support.workers import answers, outputs

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("EAGLE_RAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_download, "DOWNLOAD_PIECE_BYTES", 100_000)


@pytest.fixture
def url(bucket) -> str:
    """A pair in the bucket, below its part's name."""
    for part in ("target", "draft"):
        for file in (PAIR / part).iterdir():
            (bucket / f"pair/{part}/{file.name}").write_atomic(file.read_bytes())
    (bucket / "pair/target/original/weights.pth").write_atomic(b"the same weights")
    return f"{bucket}/pair"


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """Names of the files that are read from storage."""
    names, open_file = [], StoragePath.open

    def counting(path: StoragePath):
        names.append(path.name)
        return open_file(path)

    monkeypatch.setattr(StoragePath, "open", counting)
    return names


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def left_over() -> list[str]:
    return [
        path.name for path in (cache_home() / "models").glob("*") if not path.name.endswith(".lock")
    ]


def test_a_model_is_downloaded_once_and_again_when_it_changes(url, opened, caplog):
    caplog.set_level("INFO")
    first = download(f"{url}/target", "target")
    assert contents(first) == contents(PAIR / "target")
    assert f"downloading {url}/target: " in caplog.text
    del opened[:]
    assert (
        download(f"{url}/target", "target") == download(f"{url}/target/", "target") == first
        and not opened
    )
    (StoragePath.of(url) / "target/config.json").write_atomic(
        (PAIR / "target" / "config.json").read_bytes() + b"\n"
    )
    changed = download(f"{url}/target", "target")
    assert changed != first and contents(changed)["config.json"].endswith(b"\n")


def test_processes_that_start_together_download_once(url, opened):
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: download(f"{url}/target", "target"), range(4)))
    assert len(set(found)) == 1 and opened.count("config.json") == 1


def test_metadata_come_without_weights_unless_these_are_here(url, opened):
    metadata = download_metadata(f"{url}/target", "target")
    assert "config.json" in opened and "model.safetensors" not in contents(metadata)
    assert "model.safetensors" in contents(download(f"{url}/target", "target"))
    assert "model.safetensors" in contents(download_metadata(f"{url}/target", "target"))


def test_a_job_takes_models_from_a_bucket(url, make_job):
    local = make_job(token_rows(4))
    config = make_job(**{"model.target": f"{url}/target", "model.draft": f"{url}/draft"})
    assert config.model.target == f"{url}/target"
    check_models(config.model, config.speculative)
    assert "no text" not in validate(config)
    finding, here = pair_here(config)
    assert finding.problem is None and here is not None
    assert outputs(answers(config)) == outputs(answers(local))


def test_a_gguf_file_in_a_bucket_is_a_target(bucket, tmp_path, opened, make_job):
    local = tmp_path / "toy.gguf"
    write_gguf(local, toy_metadata(), toy_tensors(toy_metadata()))
    made = download(str(local), "target")
    (bucket / "one/toy.GGUF").write_atomic(local.read_bytes())
    for name in ("config.json", "tokenizer.json", "toy.gguf"):
        content = local if name.endswith("gguf") else made / name
        (bucket / f"own/{name}").write_atomic(content.read_bytes())
    with pytest.raises(
        ConfigError,
        match=rf"{bucket}/one has no config\.json\. Name .* such as {bucket}/one/toy\.GGUF",
    ):
        download(f"{bucket}/one", "target")
    assert (
        "toy.gguf" not in contents(download_metadata(f"{bucket}/own", "target"))
        and "toy.gguf" not in opened
    )
    for url in (f"{bucket}/one/toy.GGUF", f"{bucket}/own"):
        assert contents(download(url, "target"))
        config = make_job(token_rows(1), **{"model.target": url, "speculative.method": "none"})
        assert [row["status"] for row in answers(config)] == ["ok"]
    (bucket / "own/other.gguf").write_atomic(b"another")
    with pytest.raises(
        ConfigError,
        match=rf"{bucket}/own has 2 GGUF files\. Name one of them, such as {bucket}/own/other",
    ):
        download(f"{bucket}/own", "target")
    (bucket / "own/model.safetensors").write_atomic(b"its weights")
    assert not [
        name for name in contents(download(f"{bucket}/own", "target")) if name.endswith(".gguf")
    ]


def test_what_cannot_be_read_is_named(bucket, make_job, monkeypatch):
    wrong = {
        f"{bucket}/nothing": "there are no files of a model below it",
        f"{bucket}/nothing/m.gguf": "there is no such object",
        "s3://no-such-bucket-here/x": "there is no such bucket",
        "elsewhere://host/x": "elsewhere",
    }
    for name, message in wrong.items():
        config = make_job(token_rows(1), **{"model.target": name})
        with pytest.raises((ConfigError, StorageError), match=rf"model\.target: .*{message}"):
            check_models(config.model, config.speculative)
    with pytest.raises(
        ConfigError, match=r"model\.target: there is no s3:/bucket/x\. It must be .* a URL such as"
    ):
        make_job(**{"model.target": "s3:/bucket/x"})


def test_too_little_room_names_what_is_needed_and_what_is_free(url, monkeypatch):
    size = sum(map(len, contents(PAIR / "target").values()))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, size - 1))
    with pytest.raises(
        StorageError, match=rf"target has {size:,} bytes, and {size - 1:,} are free"
    ) as caught:
        download(f"{url}/target", "target")
    assert caught.value.errno == errno.ENOSPC and outcome_of(caught.value) is TRANSIENT
    fault = classify_error(caught.value)
    assert fault.is_local and fault.is_transient, "other machines may have room"
    assert left_over() == []


def test_files_of_failed_and_killed_downloads_are_removed(url, monkeypatch):
    def fail(self):
        raise ObjectChanged("changed")

    with monkeypatch.context() as patch:
        patch.setattr(model_download.CopiedPiece, "copy", fail)
        with pytest.raises(StorageError, match=r"model\.target: changed"):
            download(f"{url}/target", "target")
    assert left_over() == []
    directory = download(f"{url}/target", "target")
    os.rename(directory, directory.with_name(f".{directory.name}.killed.tmp"))
    assert download(f"{url}/target", "target") == directory and left_over() == [directory.name]


def test_a_model_that_changes_meanwhile_is_not_kept(url, monkeypatch):
    copy = model_download.CopiedPiece.copy

    def change(self) -> int:
        if self.source.name == "config.json":
            self.source.write_atomic(b"{}")
        return copy(self)

    monkeypatch.setattr(model_download.CopiedPiece, "copy", change)
    with pytest.raises(StorageError, match="while it was downloaded"):
        download(f"{url}/target", "target")
    assert left_over() == []


def test_unwritable_model_cache_is_a_configuration_error(url, monkeypatch):
    monkeypatch.setenv("EAGLE_RAY_CACHE", "/proc/cache")
    with pytest.raises((ConfigError, OSError)) as caught:
        download(f"{url}/target", "target")
    assert outcome_of(caught.value) is CONFIGURATION
