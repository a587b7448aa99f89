"""The GPU benchmark's script runs from end to end on a CPU, and what it leaves says what it saw."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jobs.bench.gpu import wide_cases
from jobs.bench.gpu.report import markdown, page, section
from jobs.bench.gpu.wide_cases import OURS

ROOT = Path(__file__).parents[2]
SMALLEST = "--smoke --shapes tinier --batches 2 --contexts 32 --rounds 2 --seconds 0.02 --threads 1"


@pytest.fixture(scope="module")
def bench_results(tmp_path_factory):
    """A run of one cell, with what `--only` names."""
    out = tmp_path_factory.mktemp("gpu")
    only = ["--only", "lossless", "bandwidth", "tinier: make", "tinier: costs", "tinier: batch 2, context 32"]
    run_script([*SMALLEST.split(), *only, "--out", str(out)])
    return out


def run_script(words: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["bench_gpu", *words])
        runpy.run_module("jobs.bench.gpu", run_name="__main__")


@pytest.mark.slow
def test_a_cell_is_measured_and_every_output_is_plain_decodings(bench_results):
    results = json.loads((bench_results / "results.json").read_text())
    assert results["failed"] == [] and all(check["ok"] for check in results["checks"])
    assert [check["name"] for check in results["checks"]] == [
        "tinier decodes as the small pair",
        "tinier: context 32 changes nothing",
    ]
    cells = {cell["way"]: cell for cell in results["cells"]}
    assert list(cells) == ["plain", "ours", "fixed", "eagle2", "chain"]
    for cell in cells.values():
        same = cell["identity"]
        assert same["num_equal"] == same["num_compared"] >= 2
        assert cell["step_ms"] > 0 and set(cell["parts_ms"]) == {"draft", "verify", "rest", "host"}
    assert cells["plain"]["tau"] == 1 and cells["plain"]["roofline"] > 0
    assert cells["eagle2"]["tau"] > 1.5 and cells["eagle2"]["rows_per_pass"] == pytest.approx(
        128
    )  # 2 * 60, in the bucket above
    assert results["about"]["smoke"] and results["about"]["dtype"] == "float32"


@pytest.mark.slow
def test_tables_page_and_section_say_the_same(bench_results):
    results = json.loads((bench_results / "results.json").read_text())
    text = (bench_results / "results.md").read_text()
    assert text == markdown(results) and section(results) in text
    assert "says nothing of a GPU" in text and "acceptance is the embedded toy pair's own" in text
    assert text.count("| tinier | 32 | 2 |") == 5
    shown = (bench_results / "results.html").read_text()
    assert shown == page(results) and shown.count("<svg") == 1


@pytest.mark.slow
def test_faults_are_recorded_by_cell_and_cut_off_run_is_saved(tmp_path, monkeypatch, capsys):
    """Memory runs out in a cell, a job fails, and somebody ends the run when the drain is over."""
    steady = wide_cases.steady

    def without_memory(rig, ways, cell, *rest):
        if OURS in ways and cell.batch == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return steady(rig, ways, cell, *rest)

    def cut_off(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(wide_cases, "steady", without_memory)
    monkeypatch.setattr(wide_cases.cases, "drain", lambda *_: {}["plain"])
    monkeypatch.setattr(wide_cases, "seconds_of_parts", cut_off)
    words = SMALLEST.replace("--batches 2", "--batches 1 4") + f" --out {tmp_path}"
    with pytest.raises(KeyboardInterrupt):
        run_script(words.split())
    results = json.loads((tmp_path / "results.json").read_text())
    assert [line.split(": ")[:3] for line in results["failed"]] == [
        ["tinier", "batch 1, context 32", "OutOfMemoryError"],
        ["tinier", "drain", "KeyError"],
    ]
    rows = [(cell["batch"], cell["context"], cell["way"]) for cell in results["cells"]]
    assert rows[:3] == [(1, 0, "plain"), (4, 32, "plain"), (4, 32, "ours")]
    assert rows[3:7] == [(batch, 32, way) for batch in (1, 4) for way in ("plain apart", "ours apart")]
    assert rows[7:] == [(batch, 32, way) for batch in (1, 4) for way in ("fixed", "eagle2", "chain")]
    said = capsys.readouterr().out
    order = [
        "== checks",
        "== bandwidth",
        ": make",
        ": plain",
        ": costs",
        "!! FAILED",
        "batch 4, context 32\n",
        "rivals",
    ]
    assert sorted(order, key=said.index) == order
    assert "CUDA out of memory" in (tmp_path / "results.md").read_text()


@pytest.mark.slow
def test_what_there_is_no_time_for_is_named(tmp_path):
    run_script([*SMALLEST.split(), "--minutes", "0.001", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["skipped"] == ["checks", "bandwidth", "tinier: make", "tinier: synthetic 0.6"]
    assert (
        results["cells"] == [] and "Skipped: checks; bandwidth; tinier: make; " in (tmp_path / "results.md").read_text()
    )


@pytest.mark.slow
def test_nothing_on_its_path_needs_pydantic_or_ray(tmp_path):
    """As on the device machine, which has neither."""
    for name in ("pydantic", "ray", "s3fs", "beartype"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not on the device machine')\n")
    known = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "jobs.bench.gpu", "--help"]
    done = subprocess.run(command, env=known, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "--smoke" in done.stdout


@pytest.mark.slow
def test_the_whole_smoke(tmp_path):
    run_script(["--smoke", "--threads", "1", "--rounds", "1", "--seconds", "0.05", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["failed"] == [] and results["skipped"] == []
    assert {"plain", "ours", "fixed"} == {drain["way"] for drain in results["drains"]}
    assert {c["shape"] for c in results["cells"]} == {"tiny", "tinier"}
    assert all(s["right"] for s in results["synthetic"]) and results["synthetic"]
