"""Finishing a sharded output: what is counted, and every reason to refuse. Rows are written here, not generated."""

import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_ray.batch.driver.claim import hold_output
from eagle_ray.batch.driver.finish import finish_shards, finish_text
from eagle_ray.batch.driver.input_plan import plan_input
from eagle_ray.batch.driver.job_manifest import open_run
from eagle_ray.batch.driver.status import sharded_status_text, summarize_run
from eagle_ray.cli import main as cli
from eagle_ray.cli.validate import validate
from eagle_ray.config import JobConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.requests.row_schema import output_schema
from eagle_ray.runs.job_errors import Incomplete, OutputLocked, OutputMismatch, TooManyErrors
from eagle_ray.runs.layout import SHARD_PLAN, SUCCESS, JobShard, claim_output, output_of
from eagle_ray.runs.part_files import part_name
from eagle_ray.runs.row_index import digests
from eagle_ray.runs.run import Run
from eagle_ray.storage.checked_parquet import parquet_bytes
from eagle_ray.storage.path import StoragePath, read_json, write_json
from tests.support.jobs import token_rows

SCHEMA = output_schema([])


def write_part(
    config: JobConfig, ids: list[str], attempt: int = 1, task: int = 0, status: str = "ok"
) -> Path:
    """Write a part file with a row for each id, as a shard's driver of this attempt would."""
    output = output_of(config)
    with hold_output(output):
        claim_output(config)
        run = open_run(config, plan_input(config).fingerprints)
        with run.recorded_outcome():
            common = {
                "row_index": 0,
                "source_file": "a",
                "run_id": run.run_id,
                "attempt": attempt,
                "status": status,
            }
            rows = [common | {"request_id": id, "sample_index": 0} for id in ids]
            file = run.data / part_name(attempt, task)
            file.create(parquet_bytes(pa.Table.from_pylist(rows, SCHEMA), "zstd"))
    return Path(file.text)


def complete(config: JobConfig) -> None:
    output = output_of(config)
    manifest = Run.inspect(output).manifest
    summary = summarize_run(
        Run(output, manifest["run_id"], manifest["attempt"], manifest["config_hash"])
    )
    write_json(output / "_summary.json", summary)
    (output / SUCCESS).write_atomic(b"")


def ids_in_shard(config: JobConfig) -> list[str]:
    names = [json.loads(line)["id"] for line in Path(config.input.path).read_text().splitlines()]
    held = JobShard.of(config.execution.shard).holds(digests(names))
    return [name for name, own in zip(names, held, strict=True) if own]


@pytest.fixture
def shards(make_job) -> list[JobConfig]:
    """Three shards that are complete."""
    make_job(token_rows(30))
    configs = [make_job(**{"execution.shard": f"{i}/3"}) for i in (3, 1, 2)]  # in another order
    for config in configs:
        write_part(config, ids_in_shard(config))
        complete(config)
    return sorted(configs, key=lambda config: config.execution.shard)


def root(config: JobConfig) -> StoragePath:
    return StoragePath.of(config.output.path)


def test_finish_counts_each_id_by_shard_and_completes_the_output(shards):
    summary = finish_shards(root(shards[0]))
    assert [shard["ids"] for shard in summary["shards"]] == [
        len(ids_in_shard(config)) for config in shards
    ]
    assert summary["total"]["rows"] == 30 and (root(shards[0]) / SUCCESS).exists()
    assert finish_text(summary).splitlines()[0].split() == [
        "shard",
        "ids",
        "rows",
        "errors",
        "attempts",
        "finished",
    ]
    assert "3 of 3 shards complete, finished" in sharded_status_text(root(shards[0]))
    assert finish_shards(root(shards[0]))["attempt"] == 2  # again, with the same result


def test_a_shard_that_starts_again_takes_the_success_away(shards):
    finish_shards(root(shards[0]))
    write_part(shards[1], [], task=1)
    assert not (root(shards[0]) / SUCCESS).exists()
    with pytest.raises(Incomplete, match=r"^shard 2/3 is not complete: attempt 2 ended with done"):
        finish_shards(root(shards[0]))


def test_a_running_shard_is_refused_with_its_process(shards):
    with (
        hold_output(output_of(shards[1])),
        pytest.raises(OutputLocked, match=r"shard 2/3 is running: .* process \d+"),
    ):
        finish_shards(root(shards[0]))
    assert not (root(shards[0]) / SUCCESS).exists()


def test_shards_that_never_started_are_all_named(make_job):
    config = make_job(token_rows(5), **{"execution.shard": "2/3"})
    write_part(config, ids_in_shard(config))
    complete(config)
    with pytest.raises(
        Incomplete, match=r"shard 1/3 has not started; shard 3/3 has not started\. Run each"
    ):
        finish_shards(root(config))
    assert "1 of 3 shards complete, run the others with their --shard" in sharded_status_text(
        root(config)
    )


def test_a_refused_finish_changes_no_byte_of_the_output(shards):
    """Before the first finish, and of a finished output that a later one refuses."""
    output = Path(shards[0].output.path)
    foreign = output / "data" / "theirs.parquet"

    def snapshot() -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in output.rglob("*") if file.is_file()}

    for _ in range(2):
        before = snapshot()
        foreign.write_bytes(b"theirs")
        with pytest.raises(OutputMismatch, match="theirs"):
            finish_shards(root(shards[0]))
        foreign.unlink()
        assert snapshot() == before
        finish_shards(root(shards[0]))


def test_no_shard_can_start_while_it_counts(shards, monkeypatch):
    from eagle_ray.batch.driver import finish

    summarize = finish.summarize_rows

    def start_shard(*args):
        for config in shards:
            with pytest.raises(OutputLocked), hold_output(output_of(config)):
                pass
        return summarize(*args)

    monkeypatch.setattr(finish, "summarize_rows", start_shard)
    assert finish_shards(root(shards[0]))["total"]["rows"] == 30


def test_missing_ids_are_named_with_their_shard(shards):
    [file] = Path(shards[2].output.path, "data", "shard-0003-of-0003").glob("*.parquet")
    lost = pq.read_table(file)["request_id"][0].as_py()
    pq.write_table(pq.ParquetFile(file).read().slice(1), file)
    count = len(ids_in_shard(shards[2]))
    with pytest.raises(
        Incomplete,
        match=rf"shard 3/3: 1 of {count} ids are missing: {lost}\. Run --shard 3/3 again",
    ):
        finish_shards(root(shards[0]))


def test_duplicate_id_and_row_of_another_shard_are_refused(shards):
    data = Path(shards[0].output.path, "data")
    [file] = (data / "shard-0001-of-0003").glob("*.parquet")
    second = file.with_name(part_name(1, 9))
    second.write_bytes(file.read_bytes())
    with pytest.raises(
        Incomplete, match=r"shard 1/3: \d+ ids are there twice, such as in .*part-001-"
    ):
        finish_shards(root(shards[0]))
    second.rename(data / "shard-0002-of-0003" / second.name)
    with pytest.raises(
        OutputMismatch,
        match=r"shard-0002-of-0003/part-001-000009.parquet has rows of another shard",
    ):
        finish_shards(root(shards[0]))


def test_a_file_outside_of_the_shards_is_refused(shards):
    stray = Path(shards[0].output.path, "data", "part-001-000000.parquet")
    pq.write_table(SCHEMA.empty_table(), stray)
    with pytest.raises(
        OutputMismatch, match=r"data/part-001-000000.parquet was not made by a shard"
    ):
        finish_shards(root(shards[0]))


def test_input_grown_after_shards_is_refused_and_limit_applies(shards):
    path = Path(shards[0].input.path)
    grown = path.with_name("grown.jsonl")
    grown.write_text(path.read_text() + json.dumps(token_rows(1, start=70)[0]) + "\n")
    with pytest.raises(Incomplete, match=r"shard \d/3: 1 of \d+ ids are missing: q70"):
        finish_shards(root(shards[0]), str(grown))
    summary = finish_shards(root(shards[0]), limit=10)
    assert Counter(shard["others"] > 0 for shard in summary["shards"])[True] >= 1
    assert sum(shard["ids"] for shard in summary["shards"]) == 10


def test_shards_over_different_inputs_are_refused_by_name(shards, make_job):
    other = Path(shards[0].input.path).with_name("other.jsonl")
    other.write_text(Path(shards[0].input.path).read_text())
    moved = make_job(**{"execution.shard": "2/3", "input.path": str(other)})
    write_part(moved, [], task=1)
    complete(moved)
    with pytest.raises(
        ConfigError, match=r"input\.path: .*in\.jsonl' in shard 1/3, but .*other\.jsonl' in 2/3"
    ):
        finish_shards(root(shards[0]))
    assert finish_shards(root(shards[0]), str(other))["total"]["rows"] == 30


def test_the_command_says_what_is_wrong_with_its_exit_code(shards, make_job, capsys):
    output = shards[0].output.path
    with hold_output(output_of(shards[1])):
        assert cli.main(["finish", output]) == 7
    assert "shard 2/3 is running" in capsys.readouterr().err
    (output_of(shards[1]) / SUCCESS).remove()
    assert cli.main(["finish", output]) == 5
    assert cli.main(["report", output]) == 2
    assert "its shards are not finished: run eagle-ray finish" in capsys.readouterr().err
    complete(shards[1])
    assert cli.main(["finish", output]) == 0
    assert "1/3" in capsys.readouterr().out
    assert cli.main(["finish", output, "--json"]) == 0
    assert [shard["attempts"] for shard in json.loads(capsys.readouterr().out)["shards"]] == [
        1,
        1,
        1,
    ]
    assert (
        cli.main(["status", output]) == 0
        and "3 of 3 shards complete, finished" in capsys.readouterr().out
    )
    assert cli.main(["report", output]) == 0
    with pytest.raises(ConfigError, match="is written in 3 shards"):
        validate(make_job())


WRONG_PLANS = [
    {"count": "3"},
    {"count": 0},
    {"count": None},
    {"config": None},
    {"config": []},
    {"config": {"a": 1}},
]


@pytest.mark.parametrize("wrong", WRONG_PLANS)
def test_a_damaged_plan_of_shards_is_named(shards, capsys, wrong):
    file = root(shards[0]) / SHARD_PLAN
    write_json(file, read_json(file) | wrong)
    assert cli.main(["finish", shards[0].output.path]) == 6
    error = capsys.readouterr().err
    assert f"{file} is damaged (" in error and "delete it" in error and error.count("\n") == 1
    file.remove()
    claim_output(shards[0])
    assert finish_shards(root(shards[0]))["total"]["rows"] == 30


def test_error_rows_of_a_shard_with_damaged_summary_are_counted(make_job):
    make_job(token_rows(6))
    for i in (1, 2):
        config = make_job(**{"execution.shard": f"{i}/2"})
        write_part(config, ids_in_shard(config), status="error" if i == 1 else "ok")
        complete(config)
        write_json(output_of(config) / "_summary.json", {"total": {}})
    counted = [(shard["rows"], shard["errors"]) for shard in finish_shards(root(config))["shards"]]
    assert [errors for _, errors in counted] == [counted[0][0], 0]


def test_an_output_without_shards_is_refused(make_job, tmp_path):
    with pytest.raises(ConfigError, match="is not written in shards"):
        finish_shards(StoragePath.of(tmp_path / "out"))


def test_error_rows_are_judged_over_all_shards(make_job):
    make_job(token_rows(6))
    for i in (1, 2):
        config = make_job(**{"execution.shard": f"{i}/2"})
        write_part(config, ids_in_shard(config), status="error")
        complete(config)
    with pytest.raises(TooManyErrors, match="all 6 rows are errors"):
        finish_shards(root(config))
    assert not (root(config) / SUCCESS).exists()
