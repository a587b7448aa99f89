"""The job as a whole: every id once, whatever happened on the way."""

import contextlib
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import ray.data

from eagle_ray.batch.driver import settle
from eagle_ray.batch.driver.claim import Claim
from eagle_ray.batch.driver.job_manifest import remove_finished
from eagle_ray.config import JobConfig
from eagle_ray.storage.path import StoragePath, read_json
from tests.support.jobs import (
    exit_code,
    ids_of,
    rows_of,
    small_job,
    start_driver,
    token_rows,
    wait_for_another_file,
    with_changes,
)
from tests.support.processes import children_of, descendants
from tests.support.row_invariants import broken_invariants

INTERRUPTED = "130 ['ray']\n"  # torch is in engines' processes only
SETTINGS = {"sampling.n": 2, "sampling.temperature": 0.7, "execution.rows_per_file": 20}


@pytest.fixture(scope="module")
def done_once(ray_session, tmp_path_factory) -> Path:
    """A finished job of 31 rows, two samples each, the last row bad. Starting workers takes seconds: copy it."""
    directory = tmp_path_factory.mktemp("done")
    rows = [*token_rows(30), {"id": "bad", "prompt": "needs a tokenizer"}]
    config = small_job(
        directory, [row | {"category": f"c{i % 2}"} for i, row in enumerate(rows)], **SETTINGS
    )
    assert exit_code(config) == 0
    return directory


@pytest.fixture
def done(done_once, tmp_path) -> JobConfig:
    """The finished job's configuration, over a copy of its output."""
    shutil.copytree(done_once / "out", tmp_path / "out")
    return small_job(done_once, None, **SETTINGS | {"output.path": str(tmp_path / "out")})


def test_every_row_comes_back_and_keeps_the_laws(done):
    found, output = rows_of(done), Path(done.output.path)
    assert ids_of(done) == sorted([*(f"q{i}" for i in range(30)), "bad"] * 2)
    assert [broken_invariants(row) for row in found] == [[]] * 62
    assert {row["category"] for row in found} == {"c0", "c1"}
    assert (output / "_SUCCESS").exists() and len(list((output / "data").iterdir())) > 2
    assert read_json(StoragePath.of(output / "_progress.json"))["rows_in_files"] == 62


def test_the_summary_counts_what_the_files_hold(done):
    summary, found = read_json(StoragePath.of(done.output.path) / "_summary.json"), rows_of(done)
    assert summary["total"]["rows"] == 62 and summary["total"]["error_codes"] == {"no_tokenizer": 2}
    assert summary["total"]["output_tokens"] == sum(row["completion_tokens"] or 0 for row in found)
    assert summary["groups"]["c1"]["rows"] == 30
    work = summary["last_work"]
    assert 0 < work["engine_s"] <= work["working_s"] and 0 < work["busy_slots"] <= 1


def test_the_report_shows_the_summary(done):
    summary, report = (
        read_json(Path(done.output.path) / "_summary.json"),
        Path(done.output.path, "report.html"),
    )
    assert (
        sum(worker["rows"] for worker in summary["timeline"]["workers"].values()) == 60
    )  # two rows are errors
    html = report.read_text()
    assert (
        "no_tokenizer" in html
        and f"{summary['total']['output_tokens']:,}" in html
        and "Over time" in html
    )
    report.unlink()
    assert exit_code(done) == 0
    assert report.exists()


def test_a_resume_makes_only_what_is_missing(done):
    removed = sorted(Path(done.output.path, "data").iterdir())[0]
    lost = {row["request_id"] for row in rows_of(done) if row in pq.read_table(removed).to_pylist()}
    before = {
        (row["request_id"], row["sample_index"]): row["output_token_ids"] for row in rows_of(done)
    }
    removed.unlink()
    kept = {file: file.read_bytes() for file in Path(done.output.path, "data").iterdir()}
    assert exit_code(done) == 0
    assert {file: file.read_bytes() for file in kept} == kept
    assert {row["request_id"] for row in rows_of(done) if row["attempt"] == 2} == lost
    assert {
        (row["request_id"], row["sample_index"]): row["output_token_ids"] for row in rows_of(done)
    } == before


def test_with_nothing_left_neither_ray_nor_torch_is_imported(done):
    driver = start_driver(done)
    out, err = driver.communicate(timeout=60)
    assert "no_tokenizer 2" in out and out.splitlines()[-1] == "0 []", err


def test_restarted_finished_job_keeps_additions_to_its_summary(done):
    """As the demo adds its comparison with plain decoding."""
    place = Path(done.output.path) / "_summary.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"mine": {"identical": 48}}))
    assert exit_code(done) == 0
    assert json.loads(place.read_text())["mine"] == {"identical": 48}


def test_an_id_that_stands_twice_is_written_down_to_one(done):
    before, data = ids_of(done), Path(done.output.path) / "data"
    first = sorted(data.iterdir())[0]
    (data / "part-009-000000.parquet").write_bytes(first.read_bytes())
    assert exit_code(done) == 0
    assert ids_of(done) == before


def test_changed_sampling_is_another_job(done):
    assert exit_code(with_changes(done, sampling={"temperature": 0.1})) == 6


def test_too_many_error_rows_are_exit_code_4_and_no_success(done):
    assert exit_code(with_changes(done, execution={"max_error_rate": 0.01})) == 4
    assert len(rows_of(done)) == 62 and not Path(done.output.path, "_SUCCESS").exists()


def test_a_job_whose_every_row_failed_is_not_done(ray_session, make_job, messages):
    config = make_job([{"id": f"bad{i}", "prompt": "needs a tokenizer"} for i in range(3)])
    assert config.execution.max_error_rate == 1 and exit_code(config) == 4
    assert (
        "stopped: all 3 rows are errors (no_tokenizer 3). error_message names each cause"
        in messages[-1]
    )
    assert (
        ids_of(config) == ["bad0", "bad1", "bad2"]
        and not Path(config.output.path, "_SUCCESS").exists()
    )
    assert exit_code(config) == 4  # also when nothing is left to do


@pytest.mark.parametrize("change", ["longer", "same size", "gone", "touched"])
def test_input_changed_during_the_job_ends_it_with_the_file_name(
    done, tmp_path, messages, monkeypatch, change
):
    """At the worst moment: every row is there and _SUCCESS is about to be written."""
    file = tmp_path / "in.jsonl"
    shutil.copyfile(done.input.path, file)
    config = with_changes(done, input={"path": str(file)})
    assert exit_code(config) == 0
    remove_finished(
        StoragePath.of(config.output.path)
    )  # else the second start would not get as far
    count, content = settle.remove_duplicates, file.read_bytes()

    def change_it(*args: object) -> None:
        count(*args)
        if change == "gone":
            file.unlink()
        else:
            file.write_bytes(
                {"longer": content + b"{}\n", "same size": content[::-1], "touched": content}[
                    change
                ]
            )

    monkeypatch.setattr(settle, "remove_duplicates", change_it)
    assert exit_code(config) == (0 if change == "touched" else 6)
    monkeypatch.undo()
    if change == "touched":
        return
    assert (
        f"stopped: {file} changed while the job read it (" in messages[-1]
        and "Run the same command again" in messages[-1]
    )
    assert "\n" not in messages[-1] and not Path(config.output.path, "_SUCCESS").exists()
    file.write_bytes(content)
    assert exit_code(config) == 0


def test_rows_of_a_file_that_was_cut_are_not_called_missing(
    ray_session, make_job, messages, monkeypatch
):
    """Its readers find it. That ids are missing would be true, and to run the job again no help."""
    config = make_job(token_rows(600), **{"sampling.max_tokens": 1})  # two shards
    file, missing = Path(config.input.path), Claim.missing

    def cut_first(held: Claim) -> object:
        file.write_bytes(file.read_bytes()[:-200])
        return missing(held)

    monkeypatch.setattr(Claim, "missing", cut_first)
    assert exit_code(config) == 6
    assert f"{file} changed while the job read it" in messages[-1] and "missing" not in messages[-1]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"target": "/nowhere"}, "model.target: there is no directory '/nowhere' here"),
        ({"draft": "/nowhere"}, "model.draft: there is no directory '/nowhere' here"),
        ({"draft": "embedded:tiny"}, "the head's hidden_size is 256 and the target's is 64"),
        ({"max_model_len": 10**9}, "model.max_model_len: 1000000000 is more than"),
    ],
)
def test_models_that_cannot_work_are_named_in_one_line(make_job, model, says, messages):
    config = with_changes(make_job(token_rows(2)), model=model)
    assert exit_code(config) == 2
    assert says in messages[-1] and "\n" not in messages[-1]
    assert not Path(config.output.path).exists()


def test_models_are_checked_before_overwrite_deletes_anything(done):
    before = ids_of(done)
    wrong = with_changes(done, output={"if_exists": "overwrite"}, model={"target": "/nowhere"})
    assert exit_code(wrong) == 2
    assert ids_of(done) == before and exit_code(done) == 0


@pytest.mark.parametrize("place", ["/dev/null/x", "/proc/x", "{tmp}/file", "{tmp}/dangling"])
def test_an_output_that_cannot_be_made_is_named_in_one_line(make_job, tmp_path, place, messages):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling" / "data").symlink_to(tmp_path / "nothing" / "there")
    place = place.format(tmp=tmp_path)
    assert exit_code(make_job(token_rows(2), **{"output.path": place})) == 2
    assert f"output.path: cannot write to {place}" in messages[-1]


def test_a_damaged_part_file_is_named_with_the_remedy(done, messages):
    before, first = ids_of(done), sorted(Path(done.output.path, "data").iterdir())[0]
    first.write_bytes(first.read_bytes()[:-20])
    assert exit_code(done) == 6
    assert f"{first} is damaged" in messages[-1] and "delete it" in messages[-1]
    first.unlink()
    assert exit_code(done) == 0 and ids_of(done) == before


def test_a_damaged_progress_file_stops_nothing(done):
    (Path(done.output.path) / "_progress.json").write_text('{"rows')
    assert exit_code(done) == 0
    assert read_json(StoragePath.of(done.output.path) / "_summary.json")["last_work"] is None


def test_an_output_in_the_home_directory(done, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert exit_code(with_changes(done, output={"path": "~/out"})) == 0
    assert not Path("~").exists()


def test_interrupted_then_killed_job_ends_with_every_id_once(ray_session, make_job):
    rows = token_rows(24)
    config = make_job(
        rows, **{"execution.slots": 1, "execution.rows_per_file": 1, "sampling.max_tokens": 80}
    )
    for number, last_words in ((signal.SIGTERM, INTERRUPTED), (signal.SIGKILL, "")):
        driver = start_driver(config, ray.get_runtime_context().gcs_address)
        wait_for_another_file(config)
        driver.send_signal(number)
        out, err = driver.communicate(timeout=60)
        assert out == last_words, err
        assert "Traceback" not in err and ("Run the same command again" in err) == (
            number != signal.SIGKILL
        )
        assert not Path(config.output.path, "_SUCCESS").exists()
    assert exit_code(config) == 0
    assert ids_of(config) == sorted(row["id"] for row in rows)
    assert {row["attempt"] for row in rows_of(config)} == {1, 2, 3}


@pytest.mark.slow
def test_job_killed_with_all_processes_resumes_with_its_index(make_job):
    """All of its processes at once. Rows repeat, so that the first one of a start shows what its index knows."""
    rows = [row | {"prompt_token_ids": [7, 8, 9] * 9} for row in token_rows(300)]
    settings = {"speculative.method": "suffix", "execution.slots": 1, "execution.rows_per_file": 1}
    config = make_job(rows, **settings, **{"sampling.max_tokens": 80, "sampling.ignore_eos": True})
    driver = start_driver(config)
    cache = Path(config.output.path, "_cache")
    deadline = time.monotonic() + 240
    while (
        not any(file.stat().st_size > 2000 for file in cache.glob("learned-*"))
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    wait_for_another_file(config)
    for process in [driver.pid, *descendants(driver.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    driver.communicate(timeout=60)
    (left,) = cache.glob("learned-*")
    assert exit_code(config) == 0
    assert ids_of(config) == sorted(row["id"] for row in rows)
    by_attempt = {
        number: [row for row in rows_of(config) if row["attempt"] == number] for number in (1, 2)
    }
    assert len({tuple(row["output_token_ids"]) for row in rows_of(config)}) == 1
    (kept,) = cache.glob("learned-*")
    assert (
        kept != left
        and by_attempt[1][0]["mean_acceptance_length"] < by_attempt[2][0]["mean_acceptance_length"]
    )


@pytest.mark.slow
def test_job_with_deleted_output_ends_and_does_not_recreate_it(ray_session, make_job):
    limits = {"execution.slots": 1, "execution.rows_per_file": 1, "sampling.max_tokens": 80}
    config = make_job(
        token_rows(4000), **limits
    )  # on a busy machine the first file may come a minute late
    driver = start_driver(config, ray.get_runtime_context().gcs_address)
    wait_for_another_file(config)
    shutil.rmtree(config.output.path, ignore_errors=True)  # a writer may be in the middle of a file
    shutil.rmtree(config.output.path, ignore_errors=True)
    out, err = driver.communicate(timeout=120)
    assert out.startswith("6 "), err
    assert err.count("the output was deleted while the job ran") == 1 and "Traceback" not in err
    assert not re.search("4,?000 of 4,?000 rows", err)
    assert not Path(config.output.path).exists()


def test_unwritable_report_does_not_fail_a_finished_job(done, messages):
    report = Path(done.output.path) / "report.html"
    report.unlink()
    report.mkdir()
    assert exit_code(done) == 0
    assert [line for line in messages if "report.html could not be written: Is a directory" in line]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_job_with_a_killed_ray_process_ends_and_can_be_resumed(ray_session, make_job, name):
    config = make_job(
        token_rows(24),
        **{"execution.slots": 1, "execution.rows_per_file": 1, "sampling.max_tokens": 80},
    )
    driver = start_driver(config)
    wait_for_another_file(config)
    (process,) = [
        pid for pid in children_of(driver.pid) if name in os.path.realpath(f"/proc/{pid}/exe")
    ]
    os.kill(process, signal.SIGKILL)
    out, err = driver.communicate(timeout=90)
    assert out.startswith("5 "), err
    assert f"stopped: Ray's own process {name} has ended" in err and "Traceback" not in err
    assert exit_code(config) == 0
    assert len(ids_of(config)) == 24


def test_blocks_that_ray_cuts_part_no_id(ray_session, make_job, monkeypatch):
    """As it does from 192 MB on: a long prompt and many samples, or a batch of them."""
    monkeypatch.setattr(ray.data.DataContext.get_current(), "target_max_block_size", 1000)
    config = make_job(token_rows(12), **{"sampling.n": 5, "execution.rows_per_file": 1})
    assert exit_code(config) == 0
    assert len(ids_of(config)) == 60


def test_an_input_of_other_columns_cannot_go_on_with_the_output(done, tmp_path, messages):
    (tmp_path / "more.jsonl").write_text(
        '{"id": "new", "prompt_token_ids": [1], "category": 5, "late": "x"}\n'
    )
    before = ids_of(done)
    assert exit_code(with_changes(done, input={"path": str(tmp_path / "more.jsonl")})) == 6
    assert "category (was string, now int64), late (was absent, now string)" in messages[-1]
    assert ids_of(done) == before and exit_code(done) == 0
