"""Starts of a job in this process without Ray: its engine is a toy, and what it scans and reads is noted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_ray.batch.driver import execute, job_plan
from eagle_ray.batch.driver import input_plan as plan_module
from eagle_ray.batch.driver.claim import Claim
from eagle_ray.batch.driver.completeness import Completeness
from eagle_ray.batch.reader import scan as scan_module
from eagle_ray.runs import output_index
from eagle_ray.runs.part_files import next_schema, part_name
from eagle_ray.runs.row_index import digests
from eagle_ray.storage.checked_parquet import parquet_bytes

ANSWER = {
    "sample_index": 0,
    "status": "ok",
    "finish_reason": "stop",
    "completion_tokens": 1,
    "prompt_tokens": 1,
}
COUNTED = dict.fromkeys(
    ("num_spec_steps", "num_plain_steps", "num_draft_tokens", "num_accepted_draft_tokens"), 0
)


class DriverKilled(Exception):
    """What a killed driver leaves: nothing is written after it."""


class ToyEngine:
    """Writes the missing rows. max_files: it is killed after so many. bad: ids that become errors."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.rows_per_file = 3
        self.max_files: int | None = None
        self.bad: set[str] = set()

    def execute(self, held: Claim, missing: Completeness) -> None:
        config, plan, run = held.plan.config, held.plan.input, held.run
        left = [
            row
            for row, is_done in zip(plan_module.request_rows(plan), missing.done, strict=True)
            if not is_done
        ]
        schema = next_schema(run.data, plan.carried_fields)
        for number, start in enumerate(range(0, len(left), self.rows_per_file)):
            if number == self.max_files:
                raise DriverKilled
            made = {
                "config_hash": run.config_hash,
                "target_model": config.model.target,
                "method": config.method_name,
            }
            rows = [
                made | self._answer(row, run, schema)
                for row in left[start : start + self.rows_per_file]
            ]
            table = pa.Table.from_pylist(rows, schema)
            (run.data / part_name(run.attempt, number)).create(
                parquet_bytes(table, config.output.compression)
            )
            self.made += [row["request_id"] for row in rows]

    def _answer(self, row: dict[str, Any], run: Any, schema: pa.Schema) -> dict[str, Any]:
        kept = {name: row[name] for name in schema.names if name in row}
        status = {"status": "error", "error_code": "bad"} if row["request_id"] in self.bad else {}
        return kept | ANSWER | COUNTED | status | {"run_id": run.run_id, "attempt": run.attempt}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ToyEngine:
    toy = ToyEngine()
    monkeypatch.setattr(execute, "execute", toy.execute)
    monkeypatch.setattr(job_plan.JobPlan, "check_models", lambda plan: None)
    return toy


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """File name and start of every scan of an input file."""
    found = []
    read = scan_module.rows_in_part

    def noted(part: Any, *others: Any) -> Any:
        found.append((part.file.name, part.start))
        return read(part, *others)

    monkeypatch.setattr(scan_module, "rows_in_part", noted)
    return found


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Name of every output file whose ids are read."""
    found = []
    read = output_index.rows_by_id
    monkeypatch.setattr(
        output_index,
        "rows_by_id",
        lambda file, number: found.append(file.name) or read(file, number),
    )
    return found


def rows(*names: str, text: str = "Hi") -> list[dict[str, str]]:
    return [{"id": name, "prompt": f"{text} {name}"} for name in names]


def append(path: Path, lines: list[dict[str, str]]) -> None:
    with path.open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def answered_prompts(directory: Path) -> dict[str, str]:
    """The prompt that each id's answer is to; an id that stands twice fails."""
    table = pa.concat_tables(
        map(pq.read_table, sorted((directory / "out" / "data").rglob("*.parquet")))
    )
    ids = table["request_id"].to_pylist()
    assert len(set(ids)) == len(ids)
    return dict(zip(ids, table["prompt"].to_pylist(), strict=True))


def delete_index_files(index: Path) -> None:
    for file in index.iterdir():
        file.unlink()


def truncate_index_files(index: Path) -> None:
    for file in index.iterdir():
        file.write_bytes(file.read_bytes()[:-7])


def delete_segments(index: Path) -> None:
    for file in index.glob("*.arrow"):
        file.unlink()


def flip_segment_bits(index: Path) -> None:
    for file in index.glob("*.arrow"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(bytes(data))


def write_other_json(index: Path) -> None:
    for file in index.glob("*.json"):
        file.write_text("[1, 2]")


def leave_index_half_written(index: Path) -> None:
    """A writer that was killed between its segments and its list of them."""
    (index / "finished.json").unlink()
    (index / "input-0123456789ab.arrow").write_bytes(b"half")
    (index / "output.json").unlink(missing_ok=True)


def shard_of(request_id: str, count: int) -> int:
    """The slow, obvious assignment."""
    return int.from_bytes(digests([request_id])[0].ljust(16, b"\0")[:8], "big") % count + 1
