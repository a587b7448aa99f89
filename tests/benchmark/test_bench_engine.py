"""The bench runs, and its table and file say the same."""

import importlib.util
import json
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "jobs" / "bench_engine.py"


def test_a_small_bench_prints_a_row_for_each_way_and_mode(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("bench_engine", BENCH)
    bench = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_engine", bench)
    spec.loader.exec_module(bench)
    words = "--pair tiny --batches 2 --ways plain chain --modes steady drain --rounds 1 --seconds 0.1 --tokens 16"
    out = tmp_path / "bench.json"
    monkeypatch.setattr("sys.argv", ["bench_engine", *words.split(), "--threads", "1", "--out", str(out)])
    bench.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| good")]
    cells = json.loads(out.read_text())["cells"]
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
