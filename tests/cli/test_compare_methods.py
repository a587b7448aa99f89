"""`eagle-ray compare` without runs, over the embedded pair: every number is there and outputs are plain decoding's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_ray.assembly.hub import download
from eagle_ray.cli import main as cli

ROOT = Path(__file__).parents[2]
ROWS = [
    {"messages": "Hi, Olga here. May I ask you something?", "category": "chat"},
    {"prompt": "", "category": "math"},
    {"messages": "What is 3 + 4?", "category": "math"},
    {"messages": "What is 5 + 4?", "category": "math"},
]
TREE = [
    "--set",
    "speculative.max_nodes=8",
    "--set",
    "speculative.max_depth=3",
    "--set",
    "speculative.top_k=4",
]


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    return ["-i", str(file), "--set", "sampling.max_tokens=8", *TREE]


def test_methods_beside_each_other(prompts, capsys, messages):
    methods = f"eagle2,draft_model={download('embedded:tiny', 'target')}"
    assert cli.main(["compare", *prompts, "--json", "--methods", methods, "--per-task", "1"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    cells = {(cell["temperature"], cell["method"], cell["task"]): cell for cell in numbers["cells"]}
    assert len(cells) == 2 * 3 * 3
    assert {cell["questions"] for cell in cells.values() if cell["task"]} == {1}
    for cell in cells.values():
        same = cell["identity"]
        assert (
            same["num_compared"] == cell["questions"] == same["num_equal"] + same["num_near_ties"]
        )
    plain, eagle, itself = (cell["tau"] for key, cell in cells.items() if key[::2] == (0.0, None))
    assert (
        plain == 1 < eagle < itself == 4
    )  # the target as its own draft is right at all three levels
    assert any("left out" in line and "line 2" in line for line in messages)


def test_the_table_has_every_method_and_task(prompts, capsys):
    assert (
        cli.main(
            ["compare", *prompts, "--methods", "eagle2", "--temperatures", "0", "--batch", "2"]
        )
        == 0
    )
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line for line in shown.splitlines() if line}
    assert lines["method"].split() == ["method", "chat", "math", "all"]
    assert lines["plain"].rstrip().endswith("3 of 3") and lines["eagle2"].rstrip().endswith(
        "3 of 3"
    )
    assert "T = 0" in shown and "T = 1" not in shown
    assert "1.00x [-]" in shown and "takes 16 prompts, these are 3" in shown


def test_auto_and_a_merge_of_two_drafts_are_compared_too(prompts, capsys):
    both = f"eagle2+draft_model=embedded:tiny+{download('embedded:tiny', 'target')}"
    flags = ["--set", "speculative.budget=uniform", "--temperatures", "0", "--batch", "3"]
    assert cli.main(["compare", *prompts, *flags, "--json", "--methods", f"auto,none,{both}"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    overall = {cell["method"]: cell for cell in numbers["cells"] if cell["task"] is None}
    assert list(overall) == ["plain", "auto", both]
    assert all(cell["identity"]["num_compared"] == 3 for cell in overall.values())
    assert overall[both]["tau"] == 4  # the target is one of the drafts


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--methods", "eagel2"], "did you mean eagle2"),
        (["runs/only-one"], "give two runs"),
        (["runs/a", "runs/b", "--methods", "eagle2"], "give two runs"),
        (["-i", "nowhere.jsonl"], "no file matches"),
    ],
)
def test_what_cannot_be_compared_is_exit_2(flags, says, capsys):
    assert cli.main(["compare", *flags]) == 2
    assert says in capsys.readouterr().err


def test_the_script_is_the_command():
    command = [sys.executable, "jobs/evaluate.py", "--set", "seed=x"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 2 and done.stderr.startswith(
        "eagle-ray: seed: must be a 64-bit integer"
    )
