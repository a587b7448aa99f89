"""The demo: the embedded pair, the real engine, answers in turns and the same questions as a job."""

import subprocess
from pathlib import Path

import duckdb
import pyarrow.parquet as pq

from eagle_ray.batch.driver.input_plan import plan_input, request_rows
from eagle_ray.cli import demo
from eagle_ray.cli.demo import demo_config, run_demo
from eagle_ray.config import changed_keys, load_config
from eagle_ray.storage.path import StoragePath
from tests.support.row_invariants import broken_invariants

CONFIGS = Path(__file__).parents[2] / "configs"


def test_the_demo_shows_text_speed_and_sameness(ray_session, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "gguf_file", lambda: None)  # the tiny pair, whatever is installed
    output = tmp_path / "demo"
    (output / "data").mkdir(parents=True)
    (output / "notes.txt").write_text("mine")
    assert run_demo(StoragePath.of(output)) == 0
    shown = capsys.readouterr().out
    rows = pq.read_table(output / "data").to_pylist()
    categories = {row["category"] for row in rows}
    assert len(rows) >= 24 and {row["status"] for row in rows} == {"ok"}
    assert [broken_invariants(row) for row in rows] == [[]] * len(rows)
    assert (
        f"{2 * len(categories)} of {2 * len(categories)} outputs are token for token plain decoding's"
        in shown
    )
    assert all(shown.count(f"--- {category}: ") == 2 for category in categories)
    live = shown.partition("--- ")[2].partition("category ")[0]
    texts = [row["text"].strip() for row in rows if row["text"].strip() in live]
    assert len(texts) >= 2 * len(categories)  # what was streamed is what the job answers
    assert "└── " in shown and " *\n" in shown
    assert (output / "notes.txt").read_text() == "mine" and (output / "report.html").is_file()
    report = (output / "report.html").read_text()
    assert (
        "as fast as plain decoding" in report
        and '<svg class="tree wide"' in report
        and "edge taken" in report
    )
    tried = next(
        line.removeprefix("try:") for line in shown.splitlines() if line.startswith("try:")
    )
    assert (
        "tau"
        in subprocess.run(tried, shell=True, check=True, capture_output=True, text=True).stdout
    )
    query = f"select count(distinct category) from '{output}/data/*.parquet' where text <> ''"
    assert duckdb.sql(query).fetchall() == [(6,)]


def test_the_demos_settings_are_those_of_its_configuration_file(tmp_path):
    file = load_config(CONFIGS / "demo.yaml", env={}).model_dump(mode="json")
    pair = demo.DemoPair(demo.TINY_SETTINGS, "")
    assert (
        changed_keys(file, demo_config(StoragePath.of(tmp_path), pair).model_dump(mode="json"))
        == []
    )


def test_questions_of_a_real_model_are_bundled(tmp_path):
    config = load_config(
        None, env={}, overrides={"input.path": "embedded:questions", "output.path": str(tmp_path)}
    )
    rows = list(request_rows(plan_input(config)))
    assert (
        len({row["request_id"] for row in rows}) == len(rows) >= 8
        and len({row["category"] for row in rows}) >= 5
    )


def test_an_output_that_cannot_be_made_is_exit_2():
    assert run_demo(StoragePath.of("/dev/null/x")) == 2
