"""Shards with an index each: second starts, growth, damage, finishing. A toy engine stands where the pipeline is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_ray.batch.driver.finish import finish_shards
from eagle_ray.batch.driver.job_run import complete_job
from eagle_ray.batch.driver.repair import repair_output
from eagle_ray.config import JobConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.runs.job_errors import Incomplete, OutputMismatch
from eagle_ray.runs.layout import JobShard, output_of
from eagle_ray.runs.row_index import INDEX_DIRECTORY
from eagle_ray.storage.path import StoragePath
from tests.support.jobs import MakeJob
from tests.support.starts import (
    DriverKilled,
    answered_prompts,
    append,
    delete_index_files,
    delete_segments,
    flip_segment_bits,
    leave_index_half_written,
    rows,
    shard_of,
    truncate_index_files,
    write_other_json,
)

NAMES = [f"id{i}" for i in range(30)]


@pytest.fixture
def shards(make_job: MakeJob, engine) -> list[JobConfig]:
    make_job(rows(*NAMES))
    return [make_job(**{"execution.shard": f"{i}/3"}) for i in (1, 2, 3)]


def ids_of_shard(config: JobConfig, names: list[str]) -> list[str]:
    shard = JobShard.of(config.execution.shard)
    return [name for name in names if shard_of(name, shard.count) == shard.index]


def index_of(config: JobConfig) -> Path:
    return Path((output_of(config) / INDEX_DIRECTORY).text)


def finish(config: JobConfig) -> dict:
    return finish_shards(StoragePath.of(config.output.path))


def test_each_shard_has_an_index_and_restarts_without_reading(
    shards, engine, scans, reads, tmp_path
):
    for config in shards:
        complete_job(config)
    assert sorted(engine.made) == sorted(NAMES) and len(scans) == 3
    made, read = len(engine.made), len(reads)
    places = {index_of(config) for config in shards}
    assert len(places) == 3 and not (tmp_path / "out" / INDEX_DIRECTORY).exists()
    before = {file: file.read_bytes() for place in places for file in place.iterdir()}
    for config in shards:
        assert complete_job(config)["attempt"] == 2
    assert (made, read, len(scans)) == (len(engine.made), len(reads), 3)
    assert before == {file: file.read_bytes() for place in places for file in place.iterdir()}
    assert finish(shards[0])["total"]["rows"] == 30 and answered_prompts(tmp_path).keys() == set(
        NAMES
    )


def test_shards_grow_with_the_input_and_finish_only_together(shards, engine, scans, tmp_path):
    engine.max_files = 1
    with pytest.raises(DriverKilled):
        complete_job(shards[1])
    engine.max_files = None
    complete_job(shards[0])
    added = [f"new{i}" for i in range(12)]
    append(tmp_path / "in.jsonl", rows(*added))
    for config in shards[1:]:
        complete_job(config)
    with pytest.raises(
        OutputMismatch, match=r"since shard 1/3 read it: .*in\.jsonl.*Run --shard 1/3 again"
    ):
        finish(shards[0])
    complete_job(shards[0])
    assert sorted(engine.made) == sorted(NAMES + added)  # nothing twice
    summary = finish(shards[0])
    assert [shard["ids"] for shard in summary["shards"]] == [
        len(ids_of_shard(config, NAMES + added)) for config in shards
    ]
    assert answered_prompts(tmp_path).keys() == {*NAMES, *added}


@pytest.mark.parametrize(
    "damage",
    [
        delete_index_files,
        truncate_index_files,
        delete_segments,
        flip_segment_bits,
        write_other_json,
        leave_index_half_written,
    ],
)
def test_a_damaged_index_of_a_shard_costs_only_time(shards, engine, tmp_path, damage: Callable):
    for config in shards:
        complete_job(config)
    damage(index_of(shards[1]))
    lost_file = next((tmp_path / "out" / "data" / "shard-0002-of-0003").glob("*.parquet"))
    lost_file.unlink()
    with pytest.raises(Incomplete, match="shard 2/3: 3 of"):
        finish(shards[0])
    complete_job(shards[1])
    assert len(engine.made) == 33 and answered_prompts(tmp_path).keys() == set(NAMES)
    assert finish(shards[0])["total"]["rows"] == 30


def test_a_changed_row_is_refused_by_every_shard(shards, engine, make_job, tmp_path):
    for config in shards:
        complete_job(config)
    name = ids_of_shard(shards[2], NAMES)[0]
    place = NAMES.index(name)
    make_job([*rows(*NAMES[:place]), *rows(name, text="Ho"), *rows(*NAMES[place + 1 :])])
    for config in shards:
        with pytest.raises(
            OutputMismatch, match=rf"1 rows of .*in\.jsonl are other rows now: {name}\."
        ):
            complete_job(config)
    with pytest.raises(OutputMismatch, match="since shard 1/3 read it"):
        finish(shards[0])
    assert len(engine.made) == 30


def test_an_error_row_of_a_shard_is_tried_again(shards, engine, tmp_path):
    bad = ids_of_shard(shards[1], NAMES)[1]
    engine.bad = {bad}
    for config in shards:
        complete_job(config)
    assert num_errors(shards[0]) == 1
    engine.bad = set()
    for config in shards:
        complete_job(config, retry_errors=True)
    assert num_errors(shards[0]) == 0 and engine.made[30:] == [bad]
    assert answered_prompts(tmp_path).keys() == set(NAMES)


def num_errors(config: JobConfig) -> int:
    return sum(shard["errors"] for shard in finish(config)["shards"])


def test_an_id_twice_is_refused_by_every_shard(shards, engine, tmp_path):
    append(tmp_path / "in.jsonl", rows(NAMES[0]))
    for config in shards:
        with pytest.raises(ConfigError, match="occurs twice"):
            complete_job(config)


def test_a_limit_that_grows_adds_the_rows_of_each_shard(shards, engine, tmp_path):
    for limit in (11, None):
        some = [
            config.model_copy(update={"input": config.input.model_copy(update={"limit": limit})})
            for config in shards
        ]
        for config in some:
            complete_job(config)
        assert sorted(engine.made) == sorted(NAMES[:limit])
        assert finish(some[0])["total"]["rows"] == len(NAMES[:limit])


def test_a_repaired_shard_is_counted_before_it_is_finished(shards, engine, reads, tmp_path):
    for config in shards:
        complete_job(config)
    (Path(output_of(shards[0]).text) / "_run.json").unlink()
    with pytest.raises(Incomplete, match="shard 1/3 has not started"):
        finish(shards[0])
    count = len(ids_of_shard(shards[0], NAMES))
    said = repair_output(shards[0], trust_config=True)  # the toy's rows have no hash
    assert f"the input has {count} ids: {count} done, 0 to be made, and 0 in the files" in said
    assert not (index_of(shards[0]) / "finished.json").exists()
    complete_job(shards[0])
    assert (index_of(shards[0]) / "finished.json").exists() and len(engine.made) == 30
    assert finish(shards[0])["total"]["rows"] == 30
