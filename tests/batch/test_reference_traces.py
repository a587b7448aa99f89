"""EAGLE-2 as published, on the command line: method eagle2 with budget uniform repeats the reference's steps."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from eagle_ray.cli.main import main

GOLDENS = Path(__file__).parent.parent / "goldens"
TREE = [
    "speculative.max_nodes=15",
    "speculative.max_depth=4",
    "speculative.top_k=4",
]  # total_token 16, depth 3
MODES = [
    "speculative.method=eagle2",
    "speculative.budget=uniform",
    "speculative.stats=detailed",
    "execution.slots=4",
]


@pytest.mark.parametrize("pair", ["pair_fit", "pair_e3"])
def test_every_step_accepts_what_the_reference_accepts(ray_session, tmp_path, pair):
    prompts = json.loads((GOLDENS / f"{pair}_t16_d3_k4.json").read_text())["prompts"]
    rows = run_command(pair, prompts, tmp_path)
    for prompt, row in zip(prompts, rows, strict=True):
        reference = [step["accept_length"] for step in prompt["steps"]]
        steps, output_ids = row["per_step_accepted"], row["output_token_ids"]
        if (
            prompt["stop"] == "eos"
        ):  # the reference looks for EOS only after the step that follows it
            assert output_ids == prompt["vanilla_ids"]
            assert steps == reference[: len(steps)] and len(reference) - len(steps) <= 1
        else:  # the reference's output lacks the last bonus token
            assert output_ids[:-1] == prompt["output_ids"]
            assert steps == reference
        assert set(row["per_step_budget"]) == {len(step["tokens"]) for step in prompt["steps"]}


def run_command(pair: str, prompts: list[dict], directory: Path) -> list[dict]:
    """Return one output row for each prompt, in the prompts' order."""
    lines = [
        {"id": str(i), "prompt_token_ids": p["prompt"], "max_tokens": len(p["output_ids"]) + 1}
        for i, p in enumerate(prompts)
    ]
    (directory / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    models = [f"model.{part}={GOLDENS / pair / part}" for part in ("target", "draft")]
    sets = [argument for setting in [*models, *TREE, *MODES] for argument in ("--set", setting)]
    assert (
        main(["run", "-i", str(directory / "in.jsonl"), "-o", str(directory / "out"), *sets]) == 0
    )
    table = pq.read_table(directory / "out" / "data", partitioning=None)
    return sorted(table.to_pylist(), key=lambda row: int(row["request_id"]))
