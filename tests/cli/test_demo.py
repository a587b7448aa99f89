"""The demo: the embedded pair, the real engine, two jobs side by side, once more over its own output."""

import subprocess
from pathlib import Path

import duckdb
import pyarrow.parquet as pq

from eagle_ray.cli.demo import demo_config, run_demo
from eagle_ray.config import changed_keys, load_config
from eagle_ray.storage.path import StoragePath, read_json
from tests.helpers.row_invariants import broken_laws

CONFIGS = Path(__file__).parents[2] / "configs"


def test_the_demo_shows_text_speed_and_sameness(ray_session, tmp_path, capsys):
    output = tmp_path / "demo"
    (output / "data").mkdir(parents=True)
    (output / "notes.txt").write_text("mine")
    assert run_demo(StoragePath.of(output)) == 0
    shown = capsys.readouterr().out
    rows = [row for part in (output, output / "baseline") for row in pq.read_table(part / "data").to_pylist()]
    count = len(rows) // 2
    assert count >= 24 and {row["status"] for row in rows} == {"ok"}
    assert [broken_laws(row) for row in rows] == [[]] * len(rows)
    assert f"{count} of {count} outputs are token for token plain decoding's" in shown
    own = [line for line in shown.splitlines() if "(raylet)" not in line]  # Ray says things of its own in between
    assert {line.split()[0] for line in own[1:7]} == {row["category"] for row in rows}
    baseline = read_json(StoragePath.of(output / "_summary.json"))["baseline"]
    assert baseline["differing"] == []
    assert baseline["total"]["mean_acceptance_length"] > 1  # how much above it is a matter of the machine
    assert (output / "notes.txt").read_text() == "mine"
    tried = next(line.removeprefix("try:") for line in shown.splitlines() if line.startswith("try:"))
    assert "tau" in subprocess.run(tried, shell=True, check=True, capture_output=True, text=True).stdout
    query = f"select count(distinct category) from '{output}/data/*.parquet' where text <> ''"
    assert duckdb.sql(query).fetchall() == [(6,)]


def test_the_demos_settings_are_those_of_its_configuration_file(tmp_path):
    file = load_config(CONFIGS / "demo.yaml", env={}).model_dump(mode="json")
    assert changed_keys(file, demo_config(StoragePath.of(tmp_path), "eagle2").model_dump(mode="json")) == []


def test_an_output_that_cannot_be_made_is_exit_2():
    assert run_demo(StoragePath.of("/dev/null/x")) == 2
