"""The chain of a batch job and training: the target's own answers, and its own prompts."""

from __future__ import annotations

import json

import pytest

from eagle_ray.cli import main as cli
from eagle_ray.cli.train import distinct_turns

SMALL = {
    "model.device": "cpu",
    "data.max_length": 96,
    "data.held_out": 2,
    "data.answers.max_tokens": 16,
    "head.draft_vocab_size": 256,
    "training.steps": 2,
    "training.batch_tokens": 256,
    "evaluation.prompts": 1,
    "evaluation.max_tokens": 8,
}


def train(output, *arguments: str) -> int:
    sets = [
        part for key, value in SMALL.items() for part in ("--set", f"{key}={json.dumps(value)}")
    ]
    return cli.main(["train", "-o", str(output), *arguments, *sets])


def test_a_user_turn_is_asked_once_and_only_if_it_was_finished():
    rows = [
        {"request_id": "user-1", "text": "What is a lion? ", "finish_reason": "stop"},
        {"request_id": "user-0", "text": "Hm", "finish_reason": "stop"},
        {"request_id": "user-3", "text": "What is a lion?", "finish_reason": "stop"},
        {"request_id": "user-2", "text": "Tell me a story about", "finish_reason": "length"},
    ]
    assert list(distinct_turns(rows)) == [
        {"id": "user-1", "messages": [{"role": "user", "content": "What is a lion?"}]}
    ]


def test_the_target_answers_and_the_head_learns_from_it(ray_session, tmp_path, capsys):
    prompts = ["-i", "embedded:prompts", "--limit", "8", "--set", "data.answers.by=target"]
    assert train(tmp_path / "head", *prompts) == 0
    assert f"--set model.draft={tmp_path}/head" in capsys.readouterr().out
    assert (tmp_path / "head" / "answers" / "_SUCCESS").exists()
    record = json.loads((tmp_path / "head" / "training.json").read_text())
    assert record["num_documents"] == 7  # of 8, a fifth at most is held out
    assert train(tmp_path / "head", *prompts) == 0  # finished already


@pytest.mark.slow
def test_the_target_writes_the_prompts_as_well(ray_session, tmp_path):
    turns = ["--set", "data.user_turns.count=24", "--set", "data.user_turns.max_tokens=48"]
    assert train(tmp_path / "head", *turns) == 0
    prompts = [
        json.loads(line) for line in (tmp_path / "head" / "prompts.jsonl").read_text().splitlines()
    ]
    assert prompts and all(row["messages"][0]["role"] == "user" for row in prompts)
