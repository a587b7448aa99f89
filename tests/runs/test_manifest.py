"""Whose an output directory is: attempts, fencing, the lock, and what a resume may not change."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from eagle_ray.batch.driver import job_manifest as manifest
from eagle_ray.batch.driver.claim import hold_output
from eagle_ray.batch.driver.input_plan import plan_input
from eagle_ray.batch.driver.job_manifest import check_no_foreign_data, open_run
from eagle_ray.batch.driver.status import status_of
from eagle_ray.cli import main as cli
from eagle_ray.cli.validate import validate
from eagle_ray.config import JobConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.requests.row_schema import output_schema
from eagle_ray.runs.job_errors import (
    FencedError,
    OutputDamaged,
    OutputLocked,
    OutputMismatch,
    StorageUnavailable,
)
from eagle_ray.runs.layout import RUN, output_of
from eagle_ray.runs.recorded_inputs import input_lists, read_inputs
from eagle_ray.runs.run import Run
from eagle_ray.storage.path import StoragePath, read_json, write_json
from tests.support.jobs import token_rows

DEEP = "[" * 100_000  # JSON that Python's reader gives up
HOLD = """
import sys
from eagle_ray.batch.driver.claim import hold_output
from eagle_ray.storage.path import StoragePath
with hold_output(StoragePath.of(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def local_path(location: StoragePath) -> Path:
    return Path(location.text)


def start(config: JobConfig) -> Run:
    with hold_output(output_of(config)):
        return open_run(config, plan_input(config).fingerprints)


def recorded_inputs(run: Run) -> dict:
    return read_inputs(run.output, read_json(run.output / RUN))


def test_each_start_is_an_attempt_of_the_same_run(make_job):
    first, second = start(make_job(token_rows(2))), start(make_job())
    assert (first.attempt, second.attempt) == (1, 2)
    assert first.run_id == second.run_id
    record = read_json(first.output / RUN)
    assert [attempt["attempt"] for attempt in record["attempts"]] == [1, 2]
    assert record["config"]["sampling"]["max_tokens"] == 12 and record["versions"]["pyarrow"]


def test_an_overtaken_writer_is_refused(make_job):
    first = start(make_job(token_rows(2)))
    first.check_current()
    second = start(make_job())
    second.check_current()
    with pytest.raises(FencedError, match=r"attempt 2, not run .* attempt 1"):
        first.check_current()


def test_overwrite_fences_the_old_run_and_deletes_only_its_files(make_job):
    first = start(make_job(token_rows(2)))
    (local_path(first.data) / "part-001-000000.parquet").write_bytes(b"rows")
    (local_path(first.output) / "notes.txt").write_text("mine")
    (local_path(first.data) / "mine.csv").write_text("mine")
    second = start(make_job(**{"output.if_exists": "overwrite", "sampling.max_tokens": 3}))
    assert second.run_id != first.run_id and second.attempt == 2
    with pytest.raises(FencedError):
        first.check_current()
    kept = {path.name for path in local_path(second.output).rglob("*") if path.is_file()}
    inputs = read_json(second.output / RUN)["inputs"]["list"]
    assert kept == {"notes.txt", "mine.csv", "_run.json", "_lock", inputs}


def test_a_resume_names_every_changed_key(make_job):
    start(make_job(token_rows(2)))
    with pytest.raises(OutputMismatch) as error:
        start(make_job(**{"sampling.temperature": 0.7, "seed": 4, "execution.slots": 1}))
    assert "sampling.temperature: was 0.0, now 0.7" in str(error.value)
    assert "seed: was 0, now 4" in str(error.value)
    assert "slots" not in str(error.value)


def test_resume_with_otherwise_quantized_weights_is_refused(make_job):
    run = start(make_job(token_rows(2)))
    record = read_json(run.output / RUN)
    (local_path(run.output) / RUN).write_text(
        json.dumps(record | {"target_quantization": "gguf, model.Q4_1.gguf"})
    )
    with pytest.raises(OutputMismatch, match=r"quantization: was gguf, model.Q4_1.gguf, now None"):
        start(make_job())
    del record["target_quantization"]
    (local_path(run.output) / RUN).write_text(json.dumps(record))
    assert start(make_job()).attempt == 2


def test_record_without_a_newer_key_is_the_same_job(make_job):
    first = start(make_job(token_rows(2)))
    record = read_json(first.output / RUN)
    del record["config"]["input"]["on_unknown"], record["config"]["speculative"]["ranking"]
    (local_path(first.output) / RUN).write_text(json.dumps(record))
    assert f"would resume run {first.run_id}" in validate(make_job())
    assert start(make_job()).attempt == 2


def test_record_of_an_earlier_release_is_read_and_upgraded(make_job):
    run = start(make_job(token_rows(2)))
    record = read_json(run.output / RUN)
    (local_path(run.output) / record["inputs"]["list"]).unlink()
    inputs = {"/gone.jsonl": {"size": 1, "mtime_ns": 1}}
    (local_path(run.output) / RUN).write_text(
        json.dumps(record | {"format_version": 1, "inputs": inputs})
    )
    assert recorded_inputs(run) == inputs
    assert start(make_job()).attempt == 2 and read_json(run.output / RUN)["format_version"] == 2
    assert recorded_inputs(run).keys() == {"/gone.jsonl", make_job().input.path}


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"a": 1}', DEEP])
def test_missing_or_damaged_input_list_is_named_with_a_remedy(make_job, content):
    run = start(make_job(token_rows(2)))
    file = local_path(run.output) / read_json(run.output / RUN)["inputs"]["list"]
    file.unlink() if content is None else file.write_text(content)
    named = rf"{file.name} is damaged .* record them as they are now with eagle-ray repair"
    with pytest.raises(OutputDamaged, match=named):
        start(make_job())
    with pytest.raises(OutputDamaged, match=named):
        validate(make_job())
    assert start(make_job(**{"output.if_exists": "overwrite"})).attempt == 2
    assert recorded_inputs(run).keys() == {make_job().input.path}


@pytest.mark.parametrize(
    "inputs", [{"files": 1}, ["x"], {}, None, {"/in.jsonl": {"size": 1, "mtime_ns": 1}}]
)
def test_a_record_without_a_list_of_inputs_is_damaged(make_job, inputs):
    run = start(make_job(token_rows(2)))
    (local_path(run.output) / RUN).write_text(
        json.dumps(read_json(run.output / RUN) | {"inputs": inputs})
    )
    with pytest.raises(OutputDamaged, match="names no list of its input files"):
        start(make_job())


def test_unchanged_input_list_stays_and_another_gets_a_new_name(make_job):
    first = start(make_job(token_rows(2)))
    names = [file.name for file in input_lists(first.output)]
    start(make_job())
    assert [file.name for file in input_lists(first.output)] == names
    start(make_job(token_rows(3), **{"output.if_exists": "overwrite"}))
    again = start(make_job(token_rows(2), **{"output.if_exists": "overwrite"}))
    assert [file.name for file in input_lists(again.output)] != names and len(names) == 1
    assert recorded_inputs(again).keys() == {make_job().input.path}


def test_late_driver_does_not_delete_input_list_of_a_later_one(make_job, monkeypatch):
    start(make_job(token_rows(2)))
    remove = manifest.remove_unused_lists

    def later_driver_first(lists, used):
        monkeypatch.setattr(manifest, "remove_unused_lists", remove)
        later.append(open_run(again, plan_input(again).fingerprints))
        remove(lists, used)

    again, later = make_job(token_rows(3), **{"output.if_exists": "overwrite"}), []
    monkeypatch.setattr(manifest, "remove_unused_lists", later_driver_first)
    start(again)
    assert recorded_inputs(later[0]).keys() == {again.input.path}


def test_writers_do_not_read_the_list_of_inputs(make_job):
    run = start(make_job(token_rows(2)))
    (local_path(run.output) / read_json(run.output / RUN)["inputs"]["list"]).unlink()
    run.check_current()
    run.publish("_note", b"mine")


def test_a_changed_input_file_is_refused_and_a_new_one_is_added(make_job, tmp_path):
    run = start(make_job(token_rows(2)))
    (tmp_path / "more.jsonl").write_text('{"id": "z", "prompt_token_ids": [5]}\n')
    start(make_job(**{"input.path": str(tmp_path / "*.jsonl")}))
    assert len(recorded_inputs(run)) == read_json(run.output / RUN)["inputs"]["files"] == 2
    assert len(run.output.glob("_inputs-*.json")) == 1
    with pytest.raises(OutputMismatch, match=r"in\.jsonl \(\d+ bytes then, \d+ now\)"):
        start(make_job(token_rows(3)))


def test_touched_input_is_the_same_and_other_content_is_refused(make_job, tmp_path):
    run, file = start(make_job(token_rows(2))), tmp_path / "in.jsonl"
    text = file.read_text()
    os.utime(file, ns=(1, 1))
    assert start(make_job()).attempt == 2
    assert recorded_inputs(run)[str(file)]["mtime_ns"] == 1
    file.write_text(text.replace("5", "6"))
    with pytest.raises(OutputMismatch, match=r"in\.jsonl \(its content\): put it back, "):
        start(make_job())
    file.write_text(text)
    assert start(make_job()).attempt == 3


def test_if_exists_fail_refuses_a_second_start(make_job):
    start(make_job(token_rows(2), **{"output.if_exists": "fail"}))
    with pytest.raises(ConfigError, match=r"output\.if_exists is 'fail'"):
        start(make_job(**{"output.if_exists": "fail"}))


def test_foreign_parquet_files_are_neither_read_nor_joined(make_job, tmp_path):
    (tmp_path / "out" / "data").mkdir(parents=True)
    (tmp_path / "out" / "data" / "theirs.parquet").write_bytes(b"")
    with pytest.raises(OutputMismatch, match=r"theirs\.parquet"):
        start(make_job(token_rows(2)))


def test_a_full_disk_is_named_with_the_output(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", refuse)
    says = rf"output\.path: cannot write to {tmp_path}: No space left"
    with pytest.raises(StorageUnavailable, match=says), hold_output(StoragePath.of(tmp_path)):
        pass


def test_a_second_live_driver_is_refused_and_a_dead_one_is_not(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], env=environment, **pipes)
    assert holder.stdout.readline() == "held\n"
    with (
        pytest.raises(OutputLocked, match=f"process {holder.pid}"),
        hold_output(StoragePath.of(tmp_path)),
    ):
        pass
    holder.kill()
    holder.communicate()
    with hold_output(StoragePath.of(tmp_path)):
        pass


def test_how_an_attempt_ended_is_noted(make_job):
    run = start(make_job(token_rows(2)))
    with pytest.raises(KeyboardInterrupt), run.recorded_outcome():
        raise KeyboardInterrupt
    assert read_json(run.output / RUN)["attempts"][-1]["outcome"] == "KeyboardInterrupt"


@pytest.mark.parametrize(
    "inputs", [{"list": "../in.json"}, {"files": "1"}, {"list": 3}, {"checksum": 4}, {"bytes": 0}]
)
def test_a_list_that_is_not_the_one_of_the_record_is_damaged(make_job, inputs):
    run = start(make_job(token_rows(2)))
    record = read_json(run.output / RUN)
    write_json(run.output / RUN, record | {"inputs": record["inputs"] | inputs})
    with pytest.raises(OutputDamaged, match="record them as they are now with eagle-ray repair"):
        start(make_job())


WRONG_VALUES = {
    "attempts": [{}, [], [None], [1], None],
    "attempt": ["x", "1", 0, True, None],
    "config": [None, [], {}, "x"],
    "run_id": [None, 7],
    "name": [None],
    "versions": [[]],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WRONG_VALUES.items() for value in values]
)
def test_wrongly_typed_value_damages_a_record_for_every_command(make_job, key, value, capsys):
    """And nothing is deleted."""
    run = start(make_job(token_rows(2)))
    pq.write_table(
        output_schema([]).empty_table(), local_path(run.data) / "part-001-000000.parquet"
    )
    write_json(run.output / RUN, read_json(run.output / RUN) | {key: value})
    job = ["-i", make_job().input.path, "-o", str(run.output)]
    commands = [
        ["status", "RUN"],
        ["report", "RUN"],
        ["compare", "RUN", "RUN"],
        ["export", "RUN", "--to", "csv"],
    ]
    for command in [*commands, ["validate", *job]]:
        assert cli.main([word.replace("RUN", str(run.output)) for word in command]) == 6
        error = capsys.readouterr().err
        assert (
            "_run.json is damaged" in error
            and "eagle-ray repair" in error
            and error.count("\n") == 1
        )
    with pytest.raises(OutputDamaged, match=r"_run\.json is damaged"):
        start(make_job())
    assert len(run.data.list_names()) == 1


@pytest.mark.parametrize(
    "attempts",
    [[(2, "2026-11-01T02:00:00+00:00")], [(1, "yesterday")], [(1, "2026-11-01T02:00:00")]],
)
def test_attempts_that_cannot_be_are_damage(make_job, attempts):
    run = start(make_job(token_rows(2)))
    noted = [{"attempt": number, "started_at": time} for number, time in attempts]
    write_json(run.output / RUN, read_json(run.output / RUN) | {"attempts": noted})
    with pytest.raises(OutputDamaged, match=r"_run\.json is damaged \(attempts"):
        start(make_job())


def test_keys_of_a_newer_release_are_no_damage(make_job):
    run = start(make_job(token_rows(2)))
    record = read_json(run.output / RUN)
    record["attempts"][0] |= {"newer": 1}
    record["attempts"][0]["process"] |= {"newer": 1}
    write_json(run.output / RUN, record | {"newer": {}})
    assert status_of(run.output).state == "running" and start(make_job()).attempt == 2


@pytest.mark.parametrize("place", ['"tool_choice"', '"seed": 0', '"temperature": 0.0'])
def test_a_flipped_bit_in_the_configuration_is_damage(make_job, place):
    run = start(make_job(token_rows(2)))
    file = local_path(run.output) / RUN
    text = file.read_text()
    assert text.count(place) >= 1
    flipped = (
        place[:-2] + chr(ord(place[-2]) ^ 1) + place[-1]
        if place.endswith('"')
        else place[:-1] + "1"
    )
    file.write_text(text.replace(place, flipped, 1))
    with pytest.raises(OutputDamaged, match=rf"{file} is damaged .*repair, put it back") as refused:
        start(make_job())
    assert "--overwrite" not in str(refused.value)


@pytest.mark.parametrize("text", ['{"run_id": "a', "{}", "[]", "", "null", DEEP])
def test_a_damaged_record_is_named_and_can_be_overwritten(make_job, text):
    first = start(make_job(token_rows(2)))
    (local_path(first.output) / RUN).write_text(text)
    with pytest.raises(OutputDamaged, match=r"_run\.json is damaged .*eagle-ray repair") as refused:
        start(make_job())
    assert "--overwrite" not in str(refused.value)  # which deletes the rows
    second = start(make_job(**{"output.if_exists": "overwrite"}))
    assert second.run_id != first.run_id
    second.check_current()


def test_overwrite_deletes_files_of_any_name_with_our_version(make_job):
    first = start(make_job(token_rows(2)))
    pq.write_table(output_schema([]).empty_table(), local_path(first.data) / "moved.parquet")
    assert start(make_job(**{"output.if_exists": "overwrite"})).data.list_names() == []


def test_overwrite_refuses_foreign_files_before_it_deletes_any(make_job):
    first = start(make_job(token_rows(2)))
    pq.write_table(
        output_schema([]).empty_table(), local_path(first.data) / "part-001-000000.parquet"
    )
    pq.write_table(
        output_schema([]).empty_table().replace_schema_metadata({}),
        local_path(first.data) / "theirs.parquet",
    )
    with pytest.raises(OutputMismatch, match=r"data/theirs\.parquet was not made by eagle-ray"):
        start(make_job(**{"output.if_exists": "overwrite"}))
    assert len(first.data.list_names()) == 2
    first.check_current()


def test_an_outcome_that_cannot_be_noted_hides_nothing(make_job):
    run = start(make_job(token_rows(2)))
    with pytest.raises(ZeroDivisionError), run.recorded_outcome():
        (local_path(run.output) / RUN).write_text("{")
        raise ZeroDivisionError


def test_run_of_an_older_release_resumes_despite_missing_keys(make_job):
    first = start(make_job(token_rows(2)))
    record = read_json(first.output / RUN)
    speculative = record["config"]["speculative"]
    del speculative["ranking"]
    speculative["coupled"] = True  # the older spelling
    write_json(first.output / RUN, record)

    assert start(make_job()).attempt == 2


def test_old_spelling_of_another_setting_is_another_config(make_job):
    first = start(make_job(token_rows(2)))
    record = read_json(first.output / RUN)
    del record["config"]["speculative"]["ranking"]
    record["config"]["speculative"]["coupled"] = False
    write_json(first.output / RUN, record)

    with pytest.raises(
        OutputMismatch, match=r"speculative\.ranking: was 'calibrated', now 'coupled'"
    ):
        start(make_job())


@pytest.mark.parametrize(
    ("file", "kind"),
    [("_delta_log/0.json", "a Delta table"), ("metadata/v1.metadata.json", "an Iceberg table")],
)
def test_a_table_is_no_output(tmp_path, file, kind):
    check_no_foreign_data(StoragePath.of(tmp_path))
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text("{}")
    with pytest.raises(
        OutputMismatch, match=f"is {kind}, which deletes files .* Choose another output.path"
    ):
        check_no_foreign_data(StoragePath.of(tmp_path))
