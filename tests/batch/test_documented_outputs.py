"""What the pages say of outputs, by the commands: resume, shards, finish, repair. A toy engine answers, without Ray."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from eagle_ray.cli import main as cli
from tests.support.jobs import PAIR
from tests.support.starts import ToyEngine, append, rows

NAMES = [f"id{i}" for i in range(12)]
Command = Callable[..., int]


@pytest.fixture
def command(tmp_path: Path, engine: ToyEngine, monkeypatch) -> Command:
    """command("run", FLAG, ...): the exit code of a command over one configuration, in the job's directory."""
    monkeypatch.chdir(tmp_path)
    append(tmp_path / "in.jsonl", rows(*NAMES))
    sections = {
        "input": {"path": "in.jsonl"},
        "output": {"path": "out"},
        "model": {"target": str(PAIR / "target")},
    }
    sections |= {"speculative": {"method": "none"}, "report": {"html": False}}
    (tmp_path / "job.yaml").write_text(json.dumps(sections))
    return lambda name, *flags: cli.main([name, "-c", "job.yaml", *flags])


def ids_in(output: Path) -> list[str]:
    files = sorted(output.glob("data/**/*.parquet"))
    return sorted(
        row["request_id"]
        for file in files
        for row in pq.read_table(file, partitioning=None).to_pylist()
    )


def test_shards_share_an_output_that_finish_completes(command, tmp_path, capsys):
    for shard in ("1/3", "3/3"):
        assert command("run", "--shard", shard) == 0
    assert cli.main(["finish", "out"]) == 5 and "2/3" in capsys.readouterr().err
    assert command("run", "--shard", "2/3") == 0
    capsys.readouterr()
    assert cli.main(["finish", "out", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["shards"]) == 3
    assert ids_in(tmp_path / "out") == sorted(NAMES) and (tmp_path / "out" / "_SUCCESS").exists()
    append(tmp_path / "in.jsonl", rows("new"))
    for shard in ("1/3", "2/3", "3/3"):
        assert command("run", "--shard", shard) == 0
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    assert cli.main(["finish", "out"]) == 0 and "new" in ids_in(tmp_path / "out")


def test_a_line_for_each_shard_is_in_its_status(command, capsys):
    assert command("run", "--shard", "1/2") == 0
    assert cli.main(["status", "out"]) == 0
    shown = capsys.readouterr().out
    assert "1/2" in shown and "2/2" in shown


def test_shards_are_mixed_with_nothing_else(command, capsys):
    assert command("run", "--shard", "1/3") == 0
    assert command("run", "--shard", "1/2") != 0 and command("run") != 0
    assert command("run", "--shard", "1/3", "--set", "sampling.max_tokens=3") == 6
    assert (
        command("run", "-o", "whole") == 0 and command("run", "-o", "whole", "--shard", "1/3") != 0
    )


def test_finish_judges_error_rows_over_all_shards(command, engine, capsys):
    engine.bad = set(NAMES[:8])
    flags = ["--set", "execution.max_error_rate=0.5"]
    codes = {command("run", "--shard", shard, *flags) for shard in ("1/2", "2/2")}
    assert cli.main(["finish", "out"]) == 4, codes


def test_repair_writes_a_record_that_is_lost(command, tmp_path, capsys):
    assert command("run") == 0
    record = tmp_path / "out" / "_run.json"
    record.write_text("{")
    assert command("run") == 6 and "repair" in capsys.readouterr().err
    assert command("repair", "out", "--set", "sampling.max_tokens=3") == 6
    assert command("repair", "out") == 0
    assert (
        "12 done" in capsys.readouterr().out and (tmp_path / "out" / "_run.json.damaged").exists()
    )
    record.unlink()
    assert command("repair", "out") == 0
    assert command("run") == 0 and ids_in(tmp_path / "out") == sorted(NAMES)


def test_a_shard_is_repaired_with_its_flag(command, tmp_path):
    for shard in ("1/2", "2/2"):
        assert command("run", "--shard", shard) == 0
    (tmp_path / "out" / "_shards" / "0001-of-0002" / "_run.json").unlink()
    assert command("repair", "out", "--shard", "1/2") == 0
    assert command("run", "--shard", "1/2") == 0 and cli.main(["finish", "out"]) == 0


def test_resume_overwrite_and_limit_are_flags(command, engine, tmp_path, capsys):
    assert command("run", "--limit", "5") == 0 and len(ids_in(tmp_path / "out")) == 5
    assert (
        command("run", "--resume", "--set", "output.if_exists=fail") == 0 and len(engine.made) == 12
    )
    assert command("run", "--set", "output.if_exists=fail") == 2
    assert command("run", "--overwrite", "--limit", "2") == 0 and len(ids_in(tmp_path / "out")) == 2
    assert command("run", "--set", "execution.slots=3", "--set", "logging.level=debug") == 0
    capsys.readouterr()
    assert command("run", "--set", "sampling.max_tokens=3") == 6
    assert "sampling.max_tokens: was" in capsys.readouterr().err


def test_error_rows_are_made_again_with_a_flag(command, engine, tmp_path):
    engine.bad = {"id1"}
    assert command("run", "--fail-on-row-errors") == 3
    engine.bad = set()
    assert command("run") == 0 and len(engine.made) == 12
    assert command("run", "--retry-errors", "--fail-on-row-errors") == 0 and engine.made[12:] == [
        "id1"
    ]


def test_an_empty_input_is_allowed_with_a_flag(command, tmp_path):
    (tmp_path / "in.jsonl").write_text("")
    assert command("run") == 2 and command("run", "--allow-empty") == 0


def test_status_and_report_have_everything_as_json(command, capsys):
    assert command("run") == 0
    capsys.readouterr()
    assert cli.main(["status", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"]["rows"] == 12
    assert cli.main(["report", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"]["rows"] == 12


def test_a_caches_loss_costs_only_time(command, tmp_path):
    assert command("run") == 0
    for name in ("_index", "_cache"):
        for file in (tmp_path / "out" / name).glob("*"):
            file.unlink()
    append(tmp_path / "in.jsonl", rows("new"))
    assert command("run") == 0 and len(ids_in(tmp_path / "out")) == 13


def test_finish_takes_the_shards_input_and_limit(command, tmp_path, capsys):
    append(tmp_path / "other.jsonl", rows(*NAMES))
    for shard in ("1/2", "2/2"):
        assert command("run", "--shard", shard, "-i", "other.jsonl", "--limit", "6") == 0
    assert cli.main(["finish", "out", "-i", "other.jsonl", "--limit", "6"]) == 0
    assert len(ids_in(tmp_path / "out")) == 6


def test_repair_takes_the_flags_of_a_run(command, tmp_path, capsys):
    append(tmp_path / "other.jsonl", rows(*NAMES))
    flags = ["-i", "other.jsonl", "-o", "kept", "--limit", "4"]
    assert command("run", *flags) == 0
    (tmp_path / "kept" / "_run.json").unlink()
    assert command("repair", "kept", *flags, "--set", "sampling.max_tokens=3") == 6
    assert (
        command("repair", "kept", *flags, "--set", "sampling.max_tokens=3", "--trust-config") == 0
    )


def test_a_refused_finish_or_repair_changes_nothing(command, tmp_path):
    assert command("run", "--shard", "1/2") == 0
    record = tmp_path / "out" / "_shards" / "0001-of-0002" / "_run.json"
    record.write_text(record.read_text()[:-9])

    def content() -> dict[str, bytes]:
        return {
            str(file): file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()
        }

    before = content()
    assert cli.main(["finish", "out"]) != 0
    assert command("repair", "out", "--shard", "1/2", "--set", "sampling.max_tokens=3") == 6
    assert content() == before
