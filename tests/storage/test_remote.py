"""Inputs read through fsspec: files and globs of an HTTP server with and without byte ranges, and missing packages."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_ray.assembly.hub import download
from eagle_ray.config import load_config
from eagle_ray.core.errors import ConfigError
from eagle_ray.runs.job_errors import InputChanged
from eagle_ray.storage import remote
from eagle_ray.storage.model_download import fetch_model
from eagle_ray.storage.path import StoragePath
from eagle_ray.storage.store import NotFound, NotSupported, StorageError
from tests.support.inputs import JSONL, ids, plan, zstd


class RangeHandler(SimpleHTTPRequestHandler):
    """Serves files, their byte ranges as well if the server has them."""

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        span = self.headers.get("Range")
        path = self.translate_path(self.path)
        if span is None or not self.server.has_ranges:
            super().do_GET()
            return
        first, last = span.removeprefix("bytes=").split("-")
        with open(path, "rb") as file:
            content = file.read()
        part = content[int(first) : int(last) + 1]
        self.send_response(206)
        self.send_header(
            "Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        )
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def end_headers(self) -> None:
        if self.server.has_ranges:
            self.send_header("Accept-Ranges", "bytes")
        super().end_headers()


@pytest.fixture(params=[True, False], ids=["ranges", "no_ranges"])
def url(request, tmp_path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(RangeHandler, directory=str(tmp_path)))
    server.has_ranges = request.param
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


class Bucket:
    """A file system that takes URLs and returns names without a scheme, as those of object stores do."""

    def __init__(self, system):
        self._system = system

    def __getattr__(self, name):
        method = getattr(self._system, name)
        return lambda url, *args, **options: method(url.partition(":/")[2], *args, **options)


def test_files_of_a_server_are_read_as_local_ones(url, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(JSONL)
    (tmp_path / "b.jsonl.zst").write_bytes(zstd(JSONL))
    pq.write_table(
        pa.table({"id": range(40), "prompt": ["x"] * 40}), tmp_path / "c.parquet", row_group_size=7
    )
    for name in ("a.jsonl", "b.jsonl.zst", "c.parquet", "a.jsonl?download=1"):
        assert ids(plan(f"{url}/{name}")) == [str(i) for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"prompt": "x"}) for _ in range(2)))
    (tmp_path / "b.jsonl").write_text('{"prompt": "y"}')
    assert ids(plan(f"{url}/*.jsonl")) == ["a.jsonl:0", "a.jsonl:1", "b.jsonl:0"]


def test_a_large_file_is_read_past_the_first_block(url, tmp_path):
    rows = [
        json.dumps({"id": i, "prompt": "x" * 100_000}) for i in range(120)
    ]  # more than fsspec's 5 MiB
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    assert ids(plan(f"{url}/a.jsonl")) == [str(i) for i in range(120)]


def test_a_file_that_changed_or_is_absent(url, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(JSONL)
    the_plan = plan(f"{url}/a.jsonl")
    (tmp_path / "a.jsonl").write_bytes(JSONL * 2)
    with pytest.raises(InputChanged, match="changed while the job read it"):
        ids(the_plan)
    with pytest.raises(ConfigError, match=r"no file matches 'http://.*/b\.jsonl'"):
        plan(f"{url}/b.jsonl")
    with pytest.raises(NotFound, match="there is no such file"):
        StoragePath.of(f"{url}/b.jsonl").read_bytes()
    assert StoragePath.of(f"{url}/a.jsonl").read_bytes() == JSONL * 2


def test_a_server_that_does_not_answer_is_a_storage_error():
    with pytest.raises(StorageError, match=r"http://127\.0\.0\.1:9/a\.jsonl: "):
        StoragePath.of("http://127.0.0.1:9/a.jsonl").stat()
    with pytest.raises(StorageError, match="Cannot connect") as opened:
        StoragePath.of("http://127.0.0.1:9/a.gguf").read_bytes()
    assert not isinstance(opened.value, NotFound), "the file may be there"
    with pytest.raises(StorageError, match="Cannot connect") as caught:
        fetch_model("http://127.0.0.1:9/model", [])
    assert not isinstance(caught.value, NotFound), "the model may be there"


def test_a_storage_that_fsspec_does_not_know_is_final():
    with pytest.raises(
        ConfigError, match=r"model\.target: foo://bucket/x: fsspec has no file system for it"
    ):
        download("foo://bucket/x", "target")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(remote, "find_spec", lambda name: None)
    for address, package in (
        ("gs://b/a.jsonl", "gcsfs"),
        ("hf://datasets/o/n/a.jsonl", "huggingface_hub"),
    ):
        with pytest.raises(
            ConfigError, match=rf"input\.path: '{address}' needs the package {package}.*pip install"
        ):
            plan(address)


def test_other_file_systems_are_those_of_fsspec(monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    system = MemoryFileSystem()
    system.pipe("/bucket/a.jsonl", JSONL)
    monkeypatch.setattr(remote, "find_spec", lambda name: name)
    monkeypatch.setattr(remote, "file_system_of", lambda scheme: Bucket(system))
    assert (
        ids(plan("gs://bucket/*.jsonl")) == ids(plan("gs://bucket")) == [str(i) for i in range(40)]
    )


def test_output_is_refused():
    with pytest.raises(
        ConfigError, match=r"output\.path: unsupported storage 'gs://b/a'.*conditional writes"
    ):
        load_config(None, env={}, overrides={"input.path": "a.jsonl", "output.path": "gs://b/a"})
    with pytest.raises(NotSupported, match="read only"):
        StoragePath("hf://datasets/o/n/a").write_atomic(b"")


def test_a_model_of_a_server_is_downloaded_as_it_is(url, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_RAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    for name, size in (("config.json", 10), ("model.safetensors", 300_000)):
        (tmp_path / "model" / name).write_bytes(bytes(size))
    found = fetch_model(f"{url}/model", [])
    assert {path.name: path.stat().st_size for path in found.iterdir()} == {
        "config.json": 10,
        "model.safetensors": 300_000,
    }
    assert fetch_model(f"{url}/model", []) == found
    (tmp_path / "file").touch()
    monkeypatch.setenv("EAGLE_RAY_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        ConfigError,
        match=r"model\.target: .* cannot be kept in .*: Not a directory\. Set EAGLE_RAY_CACHE",
    ):
        download(f"{url}/model", "target")
