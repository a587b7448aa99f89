"""`eagle-ray compare --engines`: a job of each engine on the same rows, and their agreement, speed and price."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from eagle_ray.cli import main as cli
from eagle_ray.report.engine_comparison import Agreement, EngineRun
from tests.support.scripted_endpoint import MODEL, PRICE, ScriptedEndpoint

ROWS = [{"id": f"q{i}", "prompt": f"Hi {i}"} for i in range(6)]
OWN = {
    "model": {"target": "embedded:tiny", "draft": "embedded:tiny"},
    "sampling": {"max_tokens": 8},
}


@pytest.fixture
def endpoint() -> Iterator[ScriptedEndpoint]:
    with ScriptedEndpoint() as endpoint:
        yield endpoint


@pytest.fixture
def files(tmp_path: Path, endpoint: ScriptedEndpoint) -> list[str]:
    """Configurations of our own engine and of an endpoint, over the same rows."""
    rows = tmp_path / "in.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    engine = {"kind": "http", "base_url": endpoint.url, "model": MODEL, "price": PRICE}
    http = {"engine": engine, "sampling": OWN["sampling"]}
    paths = []
    for name, config in (("own", OWN), ("http", http)):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"input": {"path": str(rows)}, **config}))
        paths.append(str(path))
    return paths


def test_engines_stand_side_by_side_and_are_asked_once(
    ray_session: None,
    endpoint: ScriptedEndpoint,
    files: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["compare", "--engines", ",".join(files), "-o", str(tmp_path / "out")]
    assert cli.main([*command, "--json"]) == 0
    own, http = json.loads(capsys.readouterr().out)["engines"]
    assert (own["engine"], own["kind"], own["model"]) == ("own", "own", "embedded:tiny")
    assert (http["engine"], http["kind"], http["model"]) == ("http", "http", MODEL)
    assert own["rows"] == http["rows"] == http["compared"] == len(ROWS)
    assert own["mean_acceptance_length"] >= 1 and own["compared"] is None
    assert http["same"] == 0 and 0 <= http["share_alike"] < 1
    price = 1e6 * endpoint.dollars / http["output_tokens"]
    assert http["dollars_per_million_tokens"] == pytest.approx(price)
    assert own["dollars_per_million_tokens"] is None
    num_requests = len(endpoint.asked)
    assert cli.main(command) == 0 and len(endpoint.asked) == num_requests
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:4] == ["engine", "model", "rows", "errors"]
    assert table[1].startswith("own ") and table[2].startswith("http ")
    assert "0 of 6" in table[2]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda command: command[:3], "-o: required with --engines"),
        (lambda command: [*command, "--methods", "eagle2"], "--engines: --methods is of no use"),
        (lambda command: [*command, "RUN", "RUN"], "--engines: RUN is of no use"),
        (
            lambda command: [*command[:2], command[2].split(",")[0], *command[3:]],
            "Give two or more",
        ),
        (lambda command: ["compare", "-o", "x"], "-o: where the outputs of --engines go"),
    ],
)
def test_flags_that_do_not_go_together_are_named(
    files: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[list[str]], list[str]],
    words: str,
) -> None:
    command = ["compare", "--engines", ",".join(files), "-o", str(tmp_path / "out")]
    assert cli.main(change(command)) == 2
    assert words in capsys.readouterr().err


def test_rows_must_be_the_same_and_names_distinct(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, http = files
    other = yaml.safe_load(Path(http).read_text())
    other["sampling"]["max_tokens"] = 9
    Path(http).write_text(yaml.safe_dump(other))
    command = ["compare", "-o", str(tmp_path / "out"), "--engines"]
    assert cli.main([*command, f"{own},{http}"]) == 2
    error = capsys.readouterr().err
    assert "own and http have sampling.max_tokens 8 and 9" in error
    assert "--set sampling.max_tokens=..." in error
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "own.yaml").write_text(Path(own).read_text())
    assert cli.main([*command, f"{own},{tmp_path / 'again' / 'own.yaml'}"]) == 2
    assert "two configurations are called own" in capsys.readouterr().err


def run_of(*answers: tuple[list[int] | None, str]) -> EngineRun:
    rows = [
        {"request_id": str(i), "turn_index": None, "sample_index": 0, "status": "ok"}
        | {"output_token_ids": ids, "text": text}
        for i, (ids, text) in enumerate(answers)
    ]

    def read(columns: list[str]) -> list[pa.Table]:
        return [pa.Table.from_pylist(rows).select(columns)] if rows else []

    summary: dict[str, Any] = {}
    return EngineRun("a", "http", "m", summary, read)


def test_outputs_are_compared_by_ids_or_else_by_text() -> None:
    first = run_of(([1, 2, 3, 4], "abcd"), ([5], "e"), ([], ""))
    by_ids = Agreement.of(run_of(([1, 2, 9], "abcd"), ([5], "other"), ([], "")), first)
    assert (by_ids.num_rows, by_ids.num_same) == (3, 2)
    assert by_ids.share_alike == pytest.approx((0.5 + 1 + 1) / 3)
    by_text = Agreement.of(run_of((None, "abcx"), (None, "e")), first)
    assert (by_text.num_rows, by_text.num_same) == (2, 1)
    assert by_text.share_alike == pytest.approx((0.75 + 1) / 2)
    assert Agreement.of(run_of(), first).share_alike is None
