"""Publish a run to a dataset of the hub and to a Delta table: each id once, whatever is killed or comes first."""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_ray.batch.driver.job_manifest import open_run
from eagle_ray.batch.driver.job_run import complete_job
from eagle_ray.cli import main as cli
from eagle_ray.core.errors import ConfigError
from eagle_ray.publishing.destinations import destination_of
from eagle_ray.publishing.publication import PUBLICATION_RECORD
from eagle_ray.publishing.publisher import Publisher
from eagle_ray.requests.row_schema import output_schema, table_of
from eagle_ray.runs.job_errors import PublishError
from eagle_ray.runs.run import Run
from eagle_ray.storage.checked_parquet import parquet_bytes
from tests.support.commit_kills import KillsInCommits
from tests.support.hub_writes import writable_hub
from tests.support.jobs import small_job, token_rows
from tests.support.reports import row

SCHEMA = output_schema([pa.field("category", pa.string())])
REPO = "org/answers"


@pytest.fixture
def run(tmp_path) -> Run:
    """A run that is at work, without a file."""
    return open_run(small_job(tmp_path, []), {})


@pytest.fixture
def hub(tmp_path):
    with writable_hub(tmp_path / "cache") as state:
        yield state


@pytest.fixture(params=["hub", "delta", "iceberg"])
def place(request, tmp_path) -> str:
    """A destination by its name."""
    if request.param == "hub":
        request.getfixturevalue("hub")
        return f"hf://datasets/{REPO}"
    if request.param == "iceberg":
        request.getfixturevalue("iceberg_catalog")
        return f"iceberg:lab/{tmp_path.name}.answers"
    pytest.importorskip("deltalake")
    return f"delta:{tmp_path}/table"


def write(run: Run, number: int, *ids: str, attempt: int = 1) -> None:
    rows = [row(name, "code", 10, 9) | {"run_id": run.run_id} for name in ids]
    data = parquet_bytes(table_of(rows, SCHEMA), "zstd")
    (run.data / f"part-{attempt:03d}-{number:06d}.parquet").write_atomic(data)


def publish(run: Run, place: str):
    """Publish in a new process, as it were: nothing is remembered."""
    return Publisher(run.output, destination_of(place)).publish()


def ids_at(place: str, request) -> list[str]:
    """The ids that a reader of the destination finds."""
    if place.startswith("delta:"):
        from deltalake import DeltaTable

        table = DeltaTable(place.removeprefix("delta:")).to_pyarrow_table(columns=["request_id"])
        return sorted(table["request_id"].to_pylist())
    if place.startswith("iceberg:"):
        from pyiceberg.catalog import load_catalog

        table = load_catalog("lab").load_table(place.partition("/")[2]).scan().to_arrow()
        return sorted(table["request_id"].to_pylist())
    _, files = request.getfixturevalue("hub").head(REPO)
    found = []
    for path, data in files.items():
        if path.endswith(".parquet"):
            found += pq.read_table(io.BytesIO(data))["request_id"].to_pylist()
    return sorted(found)


def test_files_are_published_as_they_come(run, place, request):
    write(run, 0, "a", "b")
    assert publish(run, place).num_rows == 2
    assert ids_at(place, request) == ["a", "b"]
    assert publish(run, place).number == 1  # nothing is new
    write(run, 1, "c")
    there = publish(run, place)
    assert (there.number, there.num_rows, there.is_complete) == (2, 3, False)
    assert ids_at(place, request) == ["a", "b", "c"]


def test_a_run_that_is_done_is_said_to_be(run, place, request):
    write(run, 0, "a")
    publish(run, place)
    with run.recorded_outcome():
        run.commit({})
    there = publish(run, place)
    assert (there.number, there.is_complete) == (2, True)
    assert ids_at(place, request) == ["a"]


def test_ids_that_two_files_have_wait_until_one_is_removed(run, place, request):
    write(run, 0, "a", "b")
    write(run, 1, "c")
    write(run, 2, "b", "d")
    assert publish(run, place).num_rows == 1
    assert ids_at(place, request) == ["c"]
    write(run, 2, "d")  # as settle does
    publish(run, place)
    assert ids_at(place, request) == ["a", "b", "c", "d"]


def test_a_file_that_changes_replaces_what_was_published_of_it(run, place, request):
    write(run, 0, "a", "b")
    write(run, 1, "c")
    publish(run, place)
    write(run, 0, "a")  # as --retry-errors does
    write(run, 3, "b")
    publish(run, place)
    assert ids_at(place, request) == ["a", "b", "c"]


def test_a_publisher_reads_a_file_again_once_it_has_changed(run, place, request):
    publisher = Publisher(run.output, destination_of(place))
    write(run, 0, "a", "b")
    publisher.publish()
    write(run, 0, "a")
    write(run, 3, "b")
    publisher.publish()
    assert ids_at(place, request) == ["a", "b"]


def test_late_files_of_an_overwritten_run_are_left_out(run, place, request, tmp_path):
    new = open_run(small_job(tmp_path, None, **{"output.if_exists": "overwrite"}), {})
    write(run, 7, "late")  # by a writer that does not know yet
    write(new, 0, "a", attempt=new.attempt)
    publish(new, place)
    assert ids_at(place, request) == ["a"]


def test_a_place_of_another_run_is_refused(run, place, tmp_path):
    write(run, 0, "a")
    publish(run, place)
    (tmp_path / "other").mkdir()
    other = open_run(small_job(tmp_path / "other", []), {})
    write(other, 0, "z")
    with pytest.raises(
        ConfigError, match=f"it holds run {run.run_id}, and this is run {other.run_id}"
    ):
        publish(other, place)


class Killed(BaseException):
    """The process is gone."""


def raise_killed() -> None:
    raise Killed


def test_kills_at_any_moment_publish_nothing_twice(run, hub, monkeypatch):
    """Each request to the hub is the last one once, before or after the hub has taken it."""
    import httpx2

    place = f"hf://datasets/{REPO}"
    send = httpx2.Client.send
    for number, is_after in itertools.product(range(10), (False, True)):
        write(run, number * 2 + is_after, f"id-{number}-{is_after}")
        left = [number]

        def kill(client, request, *args, left=left, is_after=is_after, **named):
            left[0] -= 1
            if left[0] < 0 and not is_after:
                raise Killed
            answer = send(client, request, *args, **named)
            if left[0] < 0:
                raise Killed
            return answer

        with monkeypatch.context() as patch:
            patch.setattr(httpx2.Client, "send", kill)
            with suppress(Killed):
                publish(run, place)
        if REPO in hub.commits:
            _, files = hub.head(REPO)
            if files:
                check_whole(files)
    publish(run, place)
    _, files = hub.head(REPO)
    assert len(check_whole(files)) == 20
    assert len(hub.uploads) == len(set(hub.uploads))


def test_kills_within_a_commit_to_an_iceberg_table_leave_no_half(run, iceberg_catalog, tmp_path):
    """The process is gone at each moment of a commit that makes the table, adds a file or replaces one."""
    place = f"iceberg:lab/{tmp_path.name}.answers"
    parts: dict[int, str] = {}
    for kind, moment in itertools.product(("added", "replaced"), range(12)):
        number = moment if kind == "added" else 0
        parts[number] = f"{kind}-{moment}"
        write(run, number, parts[number])
        before, ids = published_ids(place), sorted(parts.values())
        with pytest.MonkeyPatch.context() as patch:
            KillsInCommits(moment, raise_killed).install(patch)
            with suppress(Killed):
                publish(run, place)
        there = published_ids(place)
        assert there in (before, ids), "a half of a commit is there"
    publish(run, place)
    assert published_ids(place) == sorted(parts.values())


def published_ids(place: str) -> list[str]:
    """Return the ids in an Iceberg table, which may not be there yet, as DuckDB reads its files."""
    import duckdb
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import NoSuchTableError

    try:
        table = load_catalog("lab").load_table(place.partition("/")[2])
    except NoSuchTableError:
        return []
    files = [task.file.file_path.removeprefix("file://") for task in table.scan().plan_files()]
    if not files:
        return []
    rows = duckdb.sql(f"select request_id from read_parquet({files}) order by 1").fetchall()
    return [name for (name,) in rows]


def check_whole(files: dict[str, bytes]) -> list[str]:
    """The ids of a commit, which has exactly the files that its record names."""
    record = json.loads(files[PUBLICATION_RECORD])
    parts = {path.removeprefix("data/") for path in files if path.endswith(".parquet")}
    assert parts == record["files"].keys()
    ids = [
        name
        for path in sorted(parts)
        for name in pq.read_table(io.BytesIO(files[f"data/{path}"]))["request_id"].to_pylist()
    ]
    assert len(ids) == len(set(ids)) == sum(file["rows"] for file in record["files"].values())
    return ids


def test_a_lost_race_is_run_again(run, hub, monkeypatch):
    monkeypatch.setattr("eagle_ray.publishing.publisher.RACE_WAIT_S", 0.001)
    write(run, 0, "a")
    others = iter(range(3))

    def push_first() -> None:
        if next(others, None) is not None:
            hub.push(REPO, {"notes.txt": b"by somebody else"})

    hub.before_commit = push_first
    publish(run, f"hf://datasets/{REPO}")
    _, files = hub.head(REPO)
    assert check_whole(files) == ["a"] and files["notes.txt"] == b"by somebody else"
    hub.before_commit = lambda: hub.push(REPO, {"notes.txt": b"again"})
    write(run, 1, "b")
    with pytest.raises(PublishError, match=r"other writers were first 8 times\. Publish it later"):
        publish(run, f"hf://datasets/{REPO}")


@pytest.mark.parametrize(("status", "error"), [(403, ConfigError), (500, PublishError)])
def test_a_hub_that_refuses_is_named(run, hub, status, error, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: None)
    hub.commits[REPO] = [("0" * 40, {})]
    hub.refuses = status
    with pytest.raises(error, match=f"hf://datasets/{REPO}: "):
        destination_of(f"hf://datasets/{REPO}").check()


def test_a_hub_that_does_not_answer_is_no_empty_dataset(run, hub, monkeypatch):
    """Else the record of what is published would be lost, and rows be published again."""
    import httpx2

    place = f"hf://datasets/{REPO}"
    write(run, 0, "a")
    publish(run, place)
    send = httpx2.Client.send

    def fail(client, request, *args, **named):
        if PUBLICATION_RECORD in str(request.url):
            raise httpx2.ConnectError("the network is down")
        return send(client, request, *args, **named)

    write(run, 1, "b")
    with monkeypatch.context() as patch:
        patch.setattr(httpx2.Client, "send", fail)
        patch.setattr(time, "sleep", lambda seconds: None)  # between huggingface_hub's own tries
        with pytest.raises(PublishError, match=place):
            publish(run, place)
    publish(run, place)
    assert check_whole(hub.head(REPO)[1]) == ["a", "b"]


def test_a_place_of_another_run_is_refused_before_the_first_row(run, engine, hub, tmp_path):
    place = f"hf://datasets/{REPO}"
    write(run, 0, "a")
    publish(run, place)
    (tmp_path / "job").mkdir()
    config = small_job(tmp_path / "job", token_rows(3), **{"output.publish.to": place})
    with pytest.raises(ConfigError, match=f"it holds run {run.run_id}, and this run begins"):
        complete_job(config)
    assert engine.made == []


def test_a_published_file_stays_while_another_one_has_its_ids(run, place, request):
    write(run, 0, "a", "b")
    publish(run, place)
    write(run, 1, "b", "c")
    write(run, 2, "d")
    publish(run, place)
    assert ids_at(place, request) == ["a", "b", "d"]


def test_files_that_others_have_deleted_are_published_again(run, hub):
    write(run, 0, "a", "b")
    write(run, 1, "c")
    publish(run, f"hf://datasets/{REPO}")
    part = next(name for name in hub.head(REPO)[1] if name.endswith("000000.parquet"))
    hub.push(REPO, {part: None})
    publish(run, f"hf://datasets/{REPO}")
    assert sorted(check_whole(hub.head(REPO)[1])) == ["a", "b", "c"]


def test_the_card_says_what_made_the_rows(run, hub):
    write(run, 0, "a")
    publish(run, f"hf://datasets/{REPO}/nightly")
    _, files = hub.head(REPO)
    card = files["nightly/README.md"].decode()
    assert card.startswith("---\nconfigs:") and "| rows | 1 (the run goes on) |" in card
    assert f"| run | {run.run_id} |" in card and f"nightly/{PUBLICATION_RECORD}" in files


def test_a_delta_table_has_one_transaction_for_each_publication(run, tmp_path):
    deltalake = pytest.importorskip("deltalake")
    place = f"delta:{tmp_path}/table"
    for number in range(3):
        write(run, number, f"id-{number}")
        publish(run, place)
        publish(run, place)
    table = deltalake.DeltaTable(f"{tmp_path}/table")
    assert table.version() == 2 and table.transaction_version(run.run_id) == 3
    assert table.metadata().name == run.run_id


def test_a_directory_with_something_else_is_no_table(run, tmp_path):
    pytest.importorskip("deltalake")
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty and is no Delta table"):
        destination_of(f"delta:{tmp_path}/table").check()


def test_a_table_of_somebody_else_is_refused(run, tmp_path):
    deltalake = pytest.importorskip("deltalake")
    deltalake.write_deltalake(f"{tmp_path}/table", pa.table({"x": [1]}))
    write(run, 0, "a")
    with pytest.raises(ConfigError, match="was not published by a run"):
        publish(run, f"delta:{tmp_path}/table")


def test_the_command_publishes_a_run_that_goes_on(run, hub, capsys):
    write(run, 0, "a", "b")
    place = f"hf://datasets/{REPO}"
    assert cli.main(["publish", str(run.output), "--to", place]) == 0
    assert capsys.readouterr().out == f"2 rows in {place} (the run goes on), commit 1\n"
    assert cli.main(["publish", str(run.output), "--to", "s3://bucket/x"]) == 2
    assert "--to: 's3://bucket/x' is not hf://datasets/OWNER/NAME" in capsys.readouterr().err
    assert cli.main(["publish", "nowhere", "--to", place]) == 2
    assert "holds no run (no _run.json)" in capsys.readouterr().err


def test_a_job_publishes_itself(engine, hub, make_job):
    config = make_job(token_rows(7), **{"output.publish.to": f"hf://datasets/{REPO}"})
    complete_job(config)
    _, files = hub.head(REPO)
    assert sorted(check_whole(files)) == [f"q{i}" for i in range(7)]
    assert json.loads(files[PUBLICATION_RECORD])["is_complete"] is True


CHILD = """
import sys
from eagle_ray.publishing.destinations import destination_of
from eagle_ray.publishing.publisher import Publisher
from eagle_ray.storage.path import StoragePath
publisher = Publisher(StoragePath.of(sys.argv[1]), destination_of(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
publisher.publish()
"""


@pytest.mark.slow
def test_a_hundred_kills_over_a_hub_publish_each_row_once(run, hub, monkeypatch):
    """The process is gone at each of ten requests in turn, before or after the hub has taken it."""
    import httpx2

    place, send = f"hf://datasets/{REPO}", httpx2.Client.send
    for kill_at, is_after, number in itertools.product(range(10), (False, True), range(5)):
        write(run, 10 * kill_at + 5 * is_after + number, f"id-{kill_at}-{is_after}-{number}")
        left = [kill_at]

        def kill(client, request, *args, left=left, is_after=is_after, **named):
            left[0] -= 1
            if left[0] < 0 and not is_after:
                raise Killed
            answer = send(client, request, *args, **named)
            if left[0] < 0:
                raise Killed
            return answer

        with monkeypatch.context() as patch:
            patch.setattr(httpx2.Client, "send", kill)
            with suppress(Killed):
                publish(run, place)
    publish(run, place)
    assert len(check_whole(hub.head(REPO)[1])) == 100
    assert len(hub.uploads) == len(set(hub.uploads))


@pytest.mark.slow
def test_a_hundred_kills_over_delta_publish_each_row_once(run, tmp_path):
    """Real processes that get SIGKILL at a random moment; DuckDB counts the rows of the last version."""
    deltalake, duckdb = pytest.importorskip("deltalake"), pytest.importorskip("duckdb")
    draw, place, killed = random.Random(0), f"delta:{tmp_path}/table", 0
    while killed < 100:
        write(run, killed, f"id-{killed}")
        command = [sys.executable, "-c", CHILD, str(run.output), place]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": os.getcwd()}, **pipes
        ) as child:
            assert child.stdout.readline() == "ready\n"
            child.stdin.write("\n")
            child.stdin.flush()
            time.sleep(draw.uniform(0.0, 0.25))
            child.kill()
        killed += 1
        if (tmp_path / "table" / "_delta_log").exists():
            ids = ids_at(place, None)
            assert len(ids) == len(set(ids))
    publish(run, place)
    files = deltalake.DeltaTable(f"{tmp_path}/table").file_uris()
    counted = duckdb.sql(f"select count(*), count(distinct request_id) from read_parquet({files})")
    assert counted.fetchall() == [(100, 100)]


@pytest.mark.slow
def test_a_hundred_kills_within_iceberg_commits_publish_once(run, iceberg_catalog, tmp_path):
    """Real processes that get SIGKILL at each of twelve moments of a commit by turns, or have published before."""
    place, kills = f"iceberg:lab/{tmp_path.name}.answers", 0
    ids: list[str] = []
    for number in itertools.count():
        ids.append(f"id-{number:03d}")
        write(run, number, ids[-1])
        before = published_ids(place)
        command = [sys.executable, "-m", "tests.support.commit_kills"]
        done = subprocess.run(
            [*command, str(run.output), place, str(number % 12)],
            env=os.environ | {"PYTHONPATH": os.getcwd()},
            capture_output=True,
            check=False,
        )
        assert done.returncode in (0, -signal.SIGKILL), done.stderr.decode()
        assert published_ids(place) in (before, ids), "a half of a commit is there"
        kills += done.returncode != 0
        if kills == 100:
            break
    publish(run, place)
    assert published_ids(place) == ids
