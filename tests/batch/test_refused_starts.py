"""Starts that are refused, or killed before their first row: the output is byte for byte as it was, or has begun."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from eagle_ray.batch.driver import job_plan
from eagle_ray.batch.driver.claim import hold_output
from eagle_ray.batch.driver.status import status_of
from eagle_ray.cli import main as cli
from eagle_ray.core.errors import ConfigError
from eagle_ray.runs.lease import LOCK
from eagle_ray.runs.part_files import attempt_of, part_files
from eagle_ray.storage.path import StoragePath
from tests.support.jobs import PAIR
from tests.support.starts import answered_prompts, append, rows

WRITES = ("create", "replace", "write_atomic", "remove")
Snapshot = dict[str, bytes]


class Output:
    """A job's directory, how to start it, and how its start is about to be refused."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch):
        self.directory = directory
        self.path = directory / "out"
        self.input = directory / "in.jsonl"
        self.monkeypatch = monkeypatch

    def start(self, *flags: str) -> int:
        settings = {
            "model.target": PAIR / "target",
            "speculative.method": "none",
            "execution.rows_per_file": 2,
        }
        sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        return cli.main(["run", "-i", str(self.input), "-o", str(self.path), *sets, *flags])

    def snapshot(self) -> Snapshot:
        files = [file for file in sorted(self.path.rglob("*")) if file.is_file()]
        return {str(file.relative_to(self.path)): file.read_bytes() for file in files}

    def part(self) -> Path:
        return min((self.path / "data").glob("*.parquet"))

    def rewrite(self, change: Callable[[list[str]], list[str]]) -> None:
        lines = self.input.read_text().splitlines(keepends=True)
        self.input.write_text("".join(change(lines)))

    def add_row(self) -> None:
        append(self.input, rows("z"))


@pytest.fixture(params=["finished", "unfinished"])
def output(request, engine, tmp_path, monkeypatch) -> Output:
    """An output of five rows, one of them an error, which is finished or misses a file."""
    output = Output(tmp_path, monkeypatch)
    append(output.input, rows(*"abcde"))
    engine.bad = {"b"}
    assert output.start() == 0
    if request.param == "unfinished":
        max((output.path / "data").glob("*.parquet")).unlink()
        (output.path / "_SUCCESS").unlink()
    (output.path / LOCK).write_bytes(b"process 7 on elsewhere")  # as a killed driver leaves it
    return output


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(bytes(data))


def change_a_prompt(output: Output) -> list[str]:
    output.rewrite(lambda lines: [line.replace("Hi c", "Ho c") for line in lines])
    return []


def lose_a_row(output: Output) -> list[str]:
    output.rewrite(lambda lines: lines[1:])
    return []


def move_and_change_a_prompt(output: Output) -> list[str]:
    moved = output.directory / "moved.jsonl"
    moved.write_text(output.input.read_text().replace("Hi c", "Ho c"))
    return ["-i", str(moved)]


def move_without_the_index(output: Output) -> list[str]:
    shutil.rmtree(output.path / "_index")
    return move_and_change_a_prompt(output)


def add_a_column(output: Output) -> list[str]:
    output.input.write_text(
        output.input.read_text() + '{"id": "z", "prompt": "Hi z", "colour": "red"}\n'
    )
    return []


def set_other_models(output: Output) -> list[str]:
    def refuse(plan: job_plan.JobPlan) -> None:
        raise ConfigError("model.target: cannot be loaded")

    output.monkeypatch.setattr(job_plan.JobPlan, "check_models", refuse)
    output.add_row()
    return []


def overwrite_with_other_models(output: Output) -> list[str]:
    return [*set_other_models(output), "--overwrite"]


def retry_with_other_models(output: Output) -> list[str]:
    return [*set_other_models(output), "--retry-errors"]


def set_another_seed(output: Output) -> list[str]:
    return ["--set", "seed=9"]


def forbid_resuming(output: Output) -> list[str]:
    return ["--set", "output.if_exists=fail"]


def ask_for_a_shard(output: Output) -> list[str]:
    return ["--shard", "1/2"]


def damage_a_part(output: Output) -> list[str]:
    flip_a_byte(output.part())
    return []


def damage_a_part_without_the_index(output: Output) -> list[str]:
    shutil.rmtree(output.path / "_index")
    data = bytearray(output.part().read_bytes())
    data[6] ^= 1  # in the ids, the first column
    output.part().write_bytes(bytes(data))
    return []


def retry_with_a_damaged_part(output: Output) -> list[str]:
    return [*damage_a_part(output), "--retry-errors"]


def damage_the_record(output: Output) -> list[str]:
    (output.path / "_run.json").write_text("{")
    return []


def damage_the_list_of_inputs(output: Output) -> list[str]:
    min(output.path.glob("_inputs-*.json")).write_text("{}")
    return []


def damage_the_index_and_the_seed(output: Output) -> list[str]:
    for segment in (output.path / "_index").glob("*.arrow"):
        flip_a_byte(segment)
    return ["--set", "seed=9"]


def overwrite_a_foreign_file(output: Output) -> list[str]:
    (output.path / "data" / "theirs.parquet").write_bytes(b"theirs")
    return ["--overwrite"]


def refuse_writes(output: Output, refuses: Callable[[str], bool]) -> None:
    """Let there be no room on the disk for files with these paths."""
    flush = os.fsync

    def refuse(number: int) -> None:
        if refuses(os.readlink(f"/proc/self/fd/{number}")):
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(number)

    output.monkeypatch.setattr(os, "fsync", refuse)


def fill_the_disk(output: Output) -> list[str]:
    refuse_writes(output, lambda path: path.startswith(str(output.path)))
    output.add_row()
    return []


def fill_the_disk_at_the_record(output: Output) -> list[str]:
    """There is room for the list of input files, and then no more."""
    refuse_writes(output, lambda path: "_run.json" in path)
    output.add_row()
    return []


def overwrite_on_a_full_disk(output: Output) -> list[str]:
    return [*fill_the_disk_at_the_record(output), "--overwrite", "--set", "seed=9"]


REFUSALS = {
    change_a_prompt: 6,
    lose_a_row: 6,
    move_and_change_a_prompt: 6,
    move_without_the_index: 6,
    add_a_column: 6,
    set_other_models: 2,
    overwrite_with_other_models: 2,
    retry_with_other_models: 2,
    set_another_seed: 6,
    forbid_resuming: 2,
    ask_for_a_shard: 6,
    damage_a_part: 6,
    damage_a_part_without_the_index: 6,
    retry_with_a_damaged_part: 6,
    damage_the_record: 6,
    damage_the_list_of_inputs: 6,
    damage_the_index_and_the_seed: 6,
    overwrite_a_foreign_file: 6,
    fill_the_disk: 5,
    fill_the_disk_at_the_record: 5,
    overwrite_on_a_full_disk: 5,
}


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.__name__)
def test_a_refused_start_changes_no_byte_of_the_output(
    output: Output, refusal: Callable[[Output], list[str]]
):
    flags = refusal(output)
    before = output.snapshot()
    assert output.start(*flags) == REFUSALS[refusal]
    assert output.snapshot() == before


def test_a_busy_output_is_refused_without_a_trace(output: Output):
    with hold_output(StoragePath.of(output.path)):
        before = output.snapshot()
        assert output.start() == 7
        assert output.start("--overwrite") == 7
        assert output.snapshot() == before


def test_the_named_remedy_works_after_a_refusal(output: Output, engine):
    before = output.input.read_text()
    change_a_prompt(output)
    assert output.start() == 6
    output.input.write_text(before)
    assert output.start() == 0
    assert answered_prompts(output.directory) == {name: f"Hi {name}" for name in "abcde"}


def test_a_refused_first_start_leaves_no_directory(engine, tmp_path, monkeypatch):
    output = Output(tmp_path, monkeypatch)
    append(output.input, rows("a"))
    assert output.start(*set_other_models(output)) == 2
    assert output.start("--shard", "1/2") == 2
    assert not output.path.exists()


class Killed(BaseException):
    """The process is gone: no handler of an error writes anything more."""


@contextmanager
def killed_at(number: int, is_done: bool) -> Iterator[list[str]]:
    """Kill this process at a write, once it is done or before. Yields the writes."""
    writes: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in WRITES:
            patch.setattr(
                StoragePath, name, _counted(getattr(StoragePath, name), writes, number, is_done)
            )
        yield writes


def _counted(write: Callable, writes: list[str], number: int, is_done: bool) -> Callable:
    def counted(path: StoragePath, *args: object, **named: object) -> object:
        if len(writes) > number:
            raise Killed
        writes.append(path.name)
        is_last = len(writes) > number
        if is_last and not is_done:
            raise Killed
        result = write(path, *args, **named)
        if is_last:
            raise Killed
        return result

    return counted


def start_grown(output: Output) -> int:
    return output.start()


def start_another_run(output: Output) -> int:
    return output.start("--overwrite", "--set", "seed=9")


def start_again_with_errors(output: Output) -> int:
    return output.start("--retry-errors")


@pytest.mark.parametrize(
    ("start", "is_done"),
    [
        (start_another_run, True),
        pytest.param(start_another_run, False, marks=pytest.mark.slow),
        pytest.param(start_grown, True, marks=pytest.mark.slow),
        pytest.param(start_grown, False, marks=pytest.mark.slow),
        pytest.param(start_again_with_errors, True, marks=pytest.mark.slow),
        pytest.param(start_again_with_errors, False, marks=pytest.mark.slow),
    ],
)
def test_a_start_killed_at_any_write_leaves_the_old_or_new_run(
    engine, tmp_path, monkeypatch, start, is_done
):
    """Before its first row. The old run is finished as before; the new attempt is recorded, and not finished."""
    engine.bad = {"b"}
    for number in range(100):
        directory = tmp_path / str(number)
        directory.mkdir()
        output = Output(directory, monkeypatch)
        append(output.input, rows(*"abcde"))
        assert output.start() == 0
        old_input = output.input.read_text()
        output.add_row()
        before = output.snapshot()

        engine.max_files = 0  # a start that is not killed before is killed at its first row
        with killed_at(number, is_done) as writes, suppress(Killed):
            start(output)
        engine.max_files = None
        is_recorded = (output.path / "_run.json").read_bytes() != before["_run.json"]
        status = status_of(StoragePath.of(output.path))
        assert status.attempt == (2 if is_recorded else 1)
        assert (status.state == "done") == (not is_recorded)

        if is_recorded:
            flags = ["--set", "seed=9"] if start is start_another_run else []
            assert output.start(*flags) == 0 and len(answered_prompts(directory)) == 6
            first = 2 if start is start_another_run else 1
            assert all(
                attempt_of(file) >= first
                for file in part_files(StoragePath.of(output.path / "data"))
            )
        else:
            assert {name: output.snapshot()[name] for name in before} == before
            output.input.write_text(old_input)
            assert output.start() == 0 and len(answered_prompts(directory)) == 5
        if len(writes) <= number:
            return
    raise AssertionError("a start has more writes than were tried")
