"""The bench runs, and its table and file say the same."""

import importlib
import json

import pytest


@pytest.fixture
def bench(monkeypatch):
    return importlib.import_module("jobs.bench.engine")


def run(bench, monkeypatch, tmp_path, words: str) -> list[dict]:
    out = tmp_path / "bench.json"
    monkeypatch.setattr("sys.argv", ["bench_engine", *words.split(), "--threads", "1", "--out", str(out)])
    bench.main()
    return json.loads(out.read_text())["cells"]


@pytest.mark.slow
def test_a_small_bench_prints_a_row_for_each_way_and_mode(bench, tmp_path, monkeypatch, capsys):
    words = "--pair tiny --batches 2 --ways plain chain --modes steady drain --rounds 1 --seconds 0.1 --tokens 16"
    cells = run(bench, monkeypatch, tmp_path, words)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| good")]
    assert [(c["mode"], c["way"]) for c in cells] == [
        ("steady", "plain"),
        ("steady", "chain"),
        ("drain", "plain"),
        ("drain", "chain"),
    ]
    assert rows == [bench.line(cell) for cell in cells]
    chain = cells[3]
    assert chain["identity"] == {"num_compared": 6, "num_equal": 6, "num_near_ties": 0, "num_edges": 0}
    assert chain["tau"] > 1.5 and chain["off_share"] == 0 and 0 < chain["outside_share"] < 1


@pytest.mark.slow
def test_new_engines_have_the_same_planners_and_other_prompts(bench, tmp_path, monkeypatch):
    made, taken = [], []
    lane_of, drained = bench.Lane.of, bench.run_requests

    def noted_lane(*way):
        made.append(lane_of(*way))
        return made[-1]

    def noted_drain(engine, rows, meter):
        taken.append((engine, engine.planner, rows[0].prompt_ids))
        return drained(engine, rows, meter)

    monkeypatch.setattr(bench.Lane, "of", noted_lane)
    monkeypatch.setattr(bench, "run_requests", noted_drain)
    words = "--pair tiny --batches 2 --ways plain ours --modes drain --rounds 1 --engines 2"
    plain, ours = run(bench, monkeypatch, tmp_path, words)
    engines, planners = [lane.engine for lane in made], [lane.planner for lane in made[:2]]
    assert {id(engine) for engine, *_ in taken[:4]} == {id(e) for e in engines[:2]}  # a round that does not count, one
    assert {id(engine) for engine, *_ in taken[4:]} == {id(e) for e in engines[2:]}  # that does, and another at once
    assert {id(planner) for _, planner, _ in taken} == {id(p) for p in planners}
    assert taken[4][2] not in [prompt for *_, prompt in taken[:4]]
    assert len(ours["samples"]) == 2 and ours["identity"]["num_compared"] == 9 == plain["identity"]["num_equal"]
