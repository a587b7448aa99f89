"""Bad bounds and places, by the command: one line before the first row, or tries that end."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from eagle_ray.cli import main as cli
from eagle_ray.publishing import publisher as publisher_module
from tests.support.hub_writes import FIRST, writable_hub
from tests.support.jobs import FACTS, PAIR, token_rows

REPO = "org/answers"
PLACE = f"hf://datasets/{REPO}"
PUBLISH = "output.publish.to="


@pytest.fixture
def hub(tmp_path):
    with writable_hub(tmp_path / "cache") as state:
        yield state


@pytest.fixture
def job(tmp_path, engine) -> list[str]:
    """The flags of a job of six rows, whose engine is a toy."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in token_rows(6)))
    flags = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out")]
    return [*flags, "--set", f"model.target={PAIR / 'target'}", "--set", "model.draft=null"]


def refused(capsys, engine, *arguments: str) -> str:
    """Run a command that ends with exit code 2 before any row, and return the line that it says so with."""
    made = list(engine.made)
    capsys.readouterr()
    assert cli.main([*arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert engine.made == made
    [line] = [line for line in lines if line.startswith("eagle-ray: ")]
    return line


@pytest.mark.parametrize("command", ["run", "validate"])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--finish-by", "2020-01-01T00:00Z"],
            "execution.finish_by: 2020-01-01T00:00+00:00 is past",
        ),
        (
            ["--finish-by", "06:00 Mars/Olympus"],
            "execution.finish_by: 'Mars/Olympus' is no time zone",
        ),
        (
            ["--finish-by", "2026-12-24T18:00"],
            "execution.finish_by: '2026-12-24T18:00' has no zone",
        ),
        (["--max-dollars", "5"], "execution.max_dollars: execution.price_per_hour is not set"),
        (["--set", "execution.price_per_hour={on_demand: 3}"], "execution.price_per_hour"),
        (["--set", "execution.on_late=scale"], "execution.on_late: execution.finish_by is not set"),
    ],
)
def test_bounds_that_say_nothing_are_refused(job, engine, capsys, command, flags, words):
    assert words in refused(capsys, engine, command, *job, *flags)


@pytest.mark.parametrize("command", ["run", "validate"])
def test_dollars_below_what_was_spent_are_refused(job, engine, capsys, tmp_path, command):
    priced = [*job, "--set", "execution.price_per_hour=3600"]
    engine.max_files = 1
    assert cli.main(["run", *priced]) != 0  # it is killed
    engine.max_files = None
    record = json.loads((tmp_path / "out" / "_run.json").read_text())
    usage = {"usage": {"elapsed_s": 9.0, "worker_s": 12.0, "gpus_per_worker": 0.0}}
    own = {"run_id": record["run_id"], "attempt": 1, "written_at": "2026-11-30T05:00:00+00:00"}
    progress = tmp_path / "out" / "_progress.json"
    progress.write_text(json.dumps(FACTS | usage | own))
    line = refused(capsys, engine, command, *priced, "--max-dollars", "11.5")
    assert "execution.max_dollars: $11.50 is not more than the $12.00 that earlier attempts" in line
    written = progress.read_text()
    progress.write_text(written[:40])
    line = refused(capsys, engine, command, *priced, "--max-dollars", "100")
    assert "what earlier attempts have spent is not known (_progress.json is damaged" in line
    progress.write_text(written)
    assert cli.main([command, *priced, "--max-dollars", "100"]) == 0


@pytest.mark.parametrize("command", ["run", "validate"])
def test_a_delta_table_with_another_schema_is_refused(job, engine, capsys, tmp_path, command):
    deltalake = pytest.importorskip("deltalake")
    deltalake.write_deltalake(f"{tmp_path}/table", pa.table({"x": [1]}))
    line = refused(capsys, engine, command, *job, "--set", f"{PUBLISH}delta:{tmp_path}/table")
    assert "output.publish.to: delta:" in line and "was not published by a run. Choose" in line


def test_a_delta_table_that_others_have_changed_is_refused(job, engine, capsys, tmp_path):
    deltalake = pytest.importorskip("deltalake")
    place = f"{PUBLISH}delta:{tmp_path}/table"
    assert cli.main(["run", *job, "--set", place]) == 0
    table = deltalake.DeltaTable(f"{tmp_path}/table")
    table.optimize.compact()
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in token_rows(8)))
    assert cli.main(["run", *job, "--set", place]) == 0  # the rows are those that it had
    assert deltalake.DeltaTable(f"{tmp_path}/table").to_pyarrow_table().num_rows == 8
    deltalake.DeltaTable(f"{tmp_path}/table").delete("request_id = 'q1'")
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in token_rows(9)))
    line = refused(capsys, engine, "run", *job, "--set", place)
    assert "another writer has changed this table since the last publication (DELETE of" in line


def test_an_iceberg_table_of_somebody_else_is_refused(
    job, engine, capsys, tmp_path, iceberg_catalog
):
    from pyiceberg.catalog import load_catalog

    name = f"{tmp_path.name}.answers"
    place = f"{PUBLISH}iceberg:lab/{name}"
    load_catalog("lab").create_namespace(tmp_path.name)
    load_catalog("lab").create_table(name, pa.schema([("x", pa.int64())]))
    line = refused(capsys, engine, "run", *job, "--set", place)
    assert "output.publish.to: iceberg:lab/" in line and "was not published by a run" in line


def test_an_iceberg_table_that_others_have_changed_is_refused(
    job, engine, capsys, tmp_path, iceberg_catalog
):
    from pyiceberg.catalog import load_catalog

    name = f"{tmp_path.name}.answers"
    place = f"{PUBLISH}iceberg:lab/{name}"
    assert cli.main(["run", *job, "--set", place]) == 0
    load_catalog("lab").load_table(name).delete("request_id = 'q1'")
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in token_rows(7)))
    line = refused(capsys, engine, "run", *job, "--set", place)
    assert "another writer has changed this table since the last publication" in line


def test_a_catalog_that_is_not_configured_is_refused(job, engine, capsys, iceberg_catalog):
    line = refused(capsys, engine, "run", *job, "--set", f"{PUBLISH}iceberg:elsewhere/a.b")
    assert (
        "output.publish.to: iceberg:elsewhere/a.b: the catalog 'elsewhere' cannot be opened" in line
    )


@pytest.mark.parametrize("command", ["run", "validate"])
def test_a_token_that_may_not_write_is_refused(job, engine, capsys, hub, command):
    flags = [command, *job, "--set", f"{PUBLISH}{PLACE}"]
    hub.commits[REPO] = [(FIRST, {})]
    hub.token_role = "read"
    line = refused(capsys, engine, *flags)
    assert f"output.publish.to: {PLACE}: the token may only read. Log in with a token" in line
    hub.token_role = "write"
    hub.refuses = 403
    line = refused(capsys, engine, *flags)
    assert f"output.publish.to: {PLACE}: the hub refuses this user. Log in with a token" in line


@pytest.mark.parametrize("owner", ["strangers", "readers"])
def test_a_dataset_that_this_user_may_not_create_is_refused(job, engine, capsys, hub, owner):
    line = refused(capsys, engine, "run", *job, "--set", f"{PUBLISH}hf://datasets/{owner}/answers")
    assert f"there is no such dataset, and me may create none of {owner}" in line


def test_a_branch_that_others_write_to_is_tried_until_free(job, engine, capsys, hub, monkeypatch):
    monkeypatch.setattr(publisher_module, "RACE_WAIT_S", 0.001)
    others = iter(range(3))

    def push_first() -> None:
        if next(others, None) is not None:
            hub.push(REPO, {"notes.txt": b"by somebody else"})

    hub.before_commit = push_first
    assert cli.main(["run", *job, "--set", f"{PUBLISH}{PLACE}"]) == 0
    assert hub.head(REPO)[1]["notes.txt"] == b"by somebody else"
    assert any(name.endswith(".parquet") for name in hub.head(REPO)[1])


def test_a_branch_that_is_never_free_ends_with_the_rows_safe(
    job, engine, capsys, hub, monkeypatch, tmp_path
):
    monkeypatch.setattr(publisher_module, "RACE_WAIT_S", 0.001)
    hub.before_commit = lambda: hub.push(REPO, {"notes.txt": b"again"})
    assert cli.main(["run", *job, "--set", f"{PUBLISH}{PLACE}"]) == 5
    last = capsys.readouterr().err.splitlines()[-1]
    assert "other writers were first 8 times. Publish it later: eagle-ray publish " in last
    assert len(engine.made) == 6 and (Path(tmp_path) / "out" / "_SUCCESS").exists()
    hub.before_commit = lambda: None
    assert cli.main(["publish", str(tmp_path / "out"), "--to", PLACE]) == 0
