"""Locations in a bucket, through a real HTTP server: whole or not at all, read in parts, listed as files are."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_ray.batch.driver.input_plan import plan_input, request_rows
from eagle_ray.batch.reader.file_slices import chunks_in
from eagle_ray.batch.reader.files import check_disjoint, check_not_run_output, find_files
from eagle_ray.batch.reader.input_columns import request_columns
from eagle_ray.batch.reader.scan import FilePart, FileScan, rows_in_part
from eagle_ray.batch.worker.start_cache import StartCache
from eagle_ray.config import ColumnsConfig, load_config
from eagle_ray.core.errors import ConfigError
from eagle_ray.kernels.triton_cache import entries
from eagle_ray.runs.job_errors import InputChanged
from eagle_ray.runs.layout import CACHE, RUN
from eagle_ray.runs.run import Run
from eagle_ray.storage import s3
from eagle_ray.storage.checked_parquet import parquet_bytes
from eagle_ray.storage.path import StoragePath, write_json
from eagle_ray.storage.store import NotFound, StorageError
from tests.support.kernels import make_entry
from tests.support.s3 import check_creates_and_replaces

NAMES = (
    "a.jsonl",
    "b.jsonl",
    "sub/c.parquet",
    "sub/d.txt",
    "sub/deep/e.parquet",
    "_part/f.jsonl",
    ".g.jsonl",
    "x[1].jsonl",
)


def fill(directory: StoragePath) -> StoragePath:
    for name in NAMES:
        (directory / name).write_atomic(b"{}")
    return directory


def test_create_never_replaces_and_replace_needs_seen_version(bucket):
    file = check_creates_and_replaces(bucket)
    assert file.write_atomic(b"third").size == 5 and file.read_bytes() == b"third"


def test_what_the_last_look_raises_leaves_everything_as_it_was(bucket):
    def refuse() -> None:
        raise RuntimeError("overtaken")

    with pytest.raises(RuntimeError, match="overtaken"):
        (bucket / "a").write_atomic(b"new", refuse)
    assert not (bucket / "a").exists()


def test_what_is_not_there_is_said_with_its_place(bucket, s3_server):
    with pytest.raises(NotFound, match=f"{bucket}/a at {s3_server}: there is no such object"):
        (bucket / "a").read_bytes()
    with pytest.raises(FileNotFoundError, match="there is no such bucket"):
        StoragePath.of("s3://not-a-bucket/a").write_atomic(b"")
    assert not (bucket / "a").exists() and not (bucket / "a").is_directory() and not bucket.exists()


@pytest.mark.parametrize(
    "pattern",
    [
        "*.jsonl",
        "**/*.parquet",
        "*/*.parquet",
        "sub/*",
        "**",
        "s?b/[cd].*",
        ".*",
        "_part/*",
        "x[[]1].jsonl",
        "sub?c.parquet",
        "**/e*",
    ],
)
def test_a_bucket_is_globbed_as_a_directory_is(bucket, tmp_path, pattern):
    local, remote = fill(StoragePath.of(tmp_path)), fill(bucket / "in")
    found = [file.text.removeprefix(local.text) for file in local.glob(pattern)]
    assert [file.text.removeprefix(remote.text) for file in remote.glob(pattern)] == found


def test_a_listing_goes_on_over_its_pages(bucket, monkeypatch):
    fill(bucket / "in")
    (bucket / "inner.jsonl").write_atomic(b"{}")
    monkeypatch.setattr(s3, "PAGE_SIZE", 3)
    assert [str(file) for file in (bucket / "in").list_versions()] == sorted(
        f"{bucket}/in/{name}" for name in NAMES
    )
    assert (bucket / "in").list_names() == [
        ".g.jsonl",
        "_part",
        "a.jsonl",
        "b.jsonl",
        "sub",
        "x[1].jsonl",
    ]


def test_input_is_found_as_locally(bucket, tmp_path):
    local, remote = fill(StoragePath.of(tmp_path / "in")), fill(bucket / "in")
    for pattern in ("", "/*.jsonl", "/x[1].jsonl", "/**/*.parquet"):
        here, there = (find_files(f"{root}{pattern}", "auto") for root in (local, remote))
        assert [(file.name, file.format) for file in there] == [
            (file.name, file.format) for file in here
        ]
    with pytest.raises(
        ConfigError, match=rf"no file matches .* in {remote}; did you mean a.jsonl\?"
    ):
        find_files(f"{remote}/a.json", "auto")
    with pytest.raises(ConfigError, match=f"there is no directory {remote}/nowhere"):
        find_files(f"{remote}/nowhere/*.jsonl", "auto")
    with pytest.raises(
        ConfigError, match=r"input\.path: s3://no-such-bucket/in at .*: there is no such bucket"
    ):
        find_files("s3://no-such-bucket/in", "auto")


def test_the_same_input_makes_the_same_requests_from_a_bucket(bucket, tmp_path):
    rows = [{"id": f"q{i}", "prompt": f"x{i}", "lang": "ü" if i % 2 else None} for i in range(700)]
    for root in (StoragePath.of(tmp_path / "in"), bucket / "in"):
        (root / "a.jsonl").write_atomic(
            "".join(json.dumps(row) + "\n" for row in rows[:600]).encode()
        )
        (root / "b.csv").write_atomic(
            b"id,prompt,lang\n" + b"".join(b"c%d,hi,\n" % i for i in range(20))
        )
        (root / "c.parquet").write_atomic(parquet_bytes(pa.Table.from_pylist(rows[600:]), "zstd"))
    made = []
    for root in (tmp_path / "in", bucket / "in"):
        plan = plan_input(load_config(None, env={}, sets=[f"input.path={root}", "output.path=out"]))
        made.append(
            [
                {**row, "source_file": row["source_file"].removeprefix(str(root))}
                for row in request_rows(plan)
            ]
        )
    assert made[0] == made[1] and len(made[1]) == 720 and made[1][1]["lang"] == "ü"


def test_a_bucket_that_holds_the_output_is_no_input(bucket):
    fill(bucket)
    with pytest.raises(ConfigError, match=r"input\.path: .* holds output\.path"):
        check_disjoint(str(bucket), bucket / "out")
    check_disjoint(str(bucket / "sub"), bucket / "out")
    with pytest.raises(ConfigError, match=r"part-1.parquet is a file of output\.path"):
        (bucket / "out/data/part-1.parquet").write_atomic(b"")
        check_not_run_output(find_files(f"{bucket}/out/**/*.parquet", "auto"), bucket / "out")


def test_an_input_that_changed_is_known_by_its_etag(bucket):
    (bucket / "a.jsonl").write_atomic(b'{"a": 1}')
    [file] = find_files(f"{bucket}/a.jsonl", "auto")
    file.check_unchanged()
    (bucket / "a.jsonl").write_atomic(b'{"a": 2}')
    with pytest.raises(InputChanged, match="changed while the job read it"):
        file.check_unchanged()


def test_large_jsonl_is_read_by_ranges_from_the_start_of_a_shard(bucket, proxy):
    lines = [json.dumps({"id": i, "prompt": "x" * 2000}).encode() for i in range(4000)]
    (bucket / "a.jsonl").write_atomic(b"\n".join(lines))
    [file] = find_files(f"{bucket}/a.jsonl", "auto")
    found = FileScan()
    seen = [
        row["id"]
        for _, row in rows_in_part(FilePart(file), request_columns(ColumnsConfig()), found)
    ]
    assert seen == list(range(4000)) and len(found.slices) == 8
    gets = [
        request for request in proxy.seen if request.method == "GET" and "a.jsonl" in request.path
    ]
    assert len(gets) > 3 and all("Range" in request.headers for request in gets)
    before = len(proxy.seen)
    [chunk] = chunks_in(found.slices[-1].truncate(3), ["id"], {})
    assert [row["id"] for _, row in chunk.rows] == [3584, 3585, 3586]
    assert sum(request.sent for request in proxy.seen[before:]) < 300_000  # of eight million


def test_parquet_is_read_by_ranges(bucket, proxy):
    table = pa.table({"id": list(range(40_000)), "text": [f"{i:0100d}" for i in range(40_000)]})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="none", use_dictionary=False, row_group_size=10_000)
    size = (bucket / "a.parquet").write_atomic(sink.getvalue().to_pybytes()).size
    with (bucket / "a.parquet").open() as opened, pq.ParquetFile(opened) as parquet:
        assert parquet.read_row_group(2, columns=["id"])["id"].to_pylist() == list(
            range(20_000, 30_000)
        )
    assert sum(request.sent for request in proxy.seen) < size / 8


def test_an_object_that_is_replaced_while_it_is_read_is_an_error(bucket):
    (bucket / "a").write_atomic(b"x" * (3 << 20))
    with (bucket / "a").open() as opened:
        assert opened.read(10) == b"x" * 10
        (bucket / "a").write_atomic(b"y" * (3 << 20))
        with pytest.raises(StorageError, match="changed while it was read"):
            opened.seek(2 << 20)
            opened.read(10)


def test_any_read_gives_the_bytes_that_stand_there(bucket):
    data = bytes(i % 251 for i in range(3_000_000))
    (bucket / "a").write_atomic(data)
    with (bucket / "a").open() as opened:
        for start, count in (
            (0, 1),
            (70_000, 200_000),
            (10, 5),
            (2_999_990, 100),
            (65_530, 20),
            (1, 2_999_999),
        ):
            opened.seek(start)
            assert opened.read(count) == data[start : start + count]
        opened.seek(-7, 2)
        assert opened.read() == data[-7:] and opened.read(1) == b""


def test_looking_whether_a_bucket_can_be_written_leaves_nothing(bucket):
    (bucket / "out").check_writable()
    assert bucket.list_versions() == {}
    with pytest.raises(NotFound, match="there is no such bucket"):
        StoragePath.of("s3://not-a-bucket/out").check_writable()


def test_a_csv_is_read_in_parts_from_where_a_shard_starts(bucket, proxy):
    rows = "".join(f'{i},"{"x" * 1000}\n""{i}"""\r\n' for i in range(2000))
    (bucket / "a.csv").write_atomic(f"\ufeffid,prompt\r\n{rows}".encode())
    [file] = find_files(f"{bucket}/a.csv", "auto")
    found = FileScan()
    seen = [
        row["id"]
        for _, row in rows_in_part(FilePart(file), request_columns(ColumnsConfig()), found)
    ]
    assert seen == [str(i) for i in range(2000)] and len(found.slices) == 4
    before = len(proxy.seen)
    [chunk] = chunks_in(found.slices[-1].truncate(2), ["id"], {})
    assert chunk.rows[1][1] == {"id": "1537", "prompt": "x" * 1000 + '\n"1537"'}
    assert sum(request.sent for request in proxy.seen[before:]) < 300_000  # of two million


def test_a_run_in_a_bucket_keeps_what_its_starts_made(bucket, tmp_path, monkeypatch):
    run = Run(bucket / "out", "run", 1, "hash")
    write_json(run.output / RUN, {"run_id": "run", "attempt": 1})
    found = []
    for machine in ("a", "b"):
        kernels = tmp_path / machine
        monkeypatch.setenv("TRITON_CACHE_DIR", str(kernels))
        cache = StartCache(run, "kernels-0123.tar.gz")
        cache.load()
        found.append(entries(kernels))
        make_entry(kernels, "K1")
        cache.store()
    assert found == [set(), {"K1"}]
    assert "kernels-0123.tar.gz" in (run.output / CACHE).list_names()


def test_names_of_objects_are_not_read_as_web_addresses(bucket):
    names = [
        "why?.jsonl",
        "a#1.jsonl",
        "Brand%2321.jsonl",
        "t+00:00.JSONL",
        "ä ö [x].jsonl",
        "plain.jsonl",
    ]
    for i, name in enumerate(names):
        (bucket / "in" / name).write_atomic(
            json.dumps({"id": str(i), "prompt": "Hi"}).encode() + b"\n"
        )
    for path in (f"{bucket}/in", f"{bucket}/in/*.[jJ]*"):
        config = load_config(None, env={}, overrides={"input.path": path, "output.path": "unused"})
        assert sorted(row["request_id"] for row in request_rows(plan_input(config))) == list(
            "012345"
        )
    for name in names:
        [file] = find_files(f"{bucket}/in/{name}", "auto")
        assert (file.name, file.format) == (name, "jsonl")
