"""What the pages say of `eagle-ray train`: each kind of head, and each kind of data, by the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_ray import LLM
from eagle_ray.cli import main as cli
from tests.support.engines import some_params, some_prompts
from tests.support.tokenizers import write_tokenizer
from tests.support.toy_models import llama

QUICK = {
    "model.dtype": "float32",
    "model.device": "cpu",
    "training.threads": 1,
    "training.batch_tokens": 160,
    "training.shard_tokens": 80,
    "training.dtype": "float32",
    "evaluation.every": 0,
    "evaluation.prompts": 1,
    "evaluation.max_tokens": 2,
}


def train(target: Path, data: Path, head: Path, *flags: str, **settings: object) -> int:
    values = QUICK | {name.replace("__", "."): value for name, value in settings.items()}
    sets = [
        part for key, value in values.items() for part in ("--set", f"{key}={json.dumps(value)}")
    ]
    return cli.main(
        [
            "train",
            "--target",
            str(target),
            "-i",
            str(data),
            "-o",
            str(head),
            "--steps",
            "1",
            *flags,
            *sets,
        ]
    )


def answers_with(target: Path, **draft: object) -> tuple[list[list[int]], int]:
    """Return token ids, and the number of tokens that were drafted."""
    sizes = {
        "slots": 3,
        "max_model_len": 64,
        "max_nodes": 8,
        "max_depth": 2,
        "budget": "uniform",
        "threads": 1,
    }
    with LLM(str(target), **sizes | draft) as llm:
        outputs = [
            output.outputs[0]
            for output in llm.generate(some_prompts(3), some_params(3, max_tokens=8))
        ]
    return [list(output.token_ids) for output in outputs], sum(
        output.num_draft_tokens for output in outputs
    )


@pytest.mark.parametrize("method", ["eagle2", "eagle3", "medusa", "hydra", "dflash"])
def test_each_method_trains_a_head_that_drafts_here(target_directory, answers, tmp_path, method):
    assert train(target_directory, answers, tmp_path / "head", "--method", method) == 0
    produced, num_drafted = answers_with(
        target_directory, draft=str(tmp_path / "head"), method="head"
    )
    assert produced == answers_with(target_directory, method="none")[0] and num_drafted > 0


@pytest.mark.parametrize("method", ["eagle2", "eagle3", "dflash"])
def test_a_draft_vocabulary_is_trained_and_used(target_directory, answers, tmp_path, method):
    head = tmp_path / "head"
    passes = {"loss__passes": 2} if method != "dflash" else {}
    assert (
        train(
            target_directory, answers, head, "--method", method, head__draft_vocab_size=60, **passes
        )
        == 0
    )
    of_target = {"draft_vocab": str(head / "draft_vocab.txt")} if method == "eagle2" else {}
    produced, num_drafted = answers_with(
        target_directory, draft=str(head), method=method, **of_target
    )
    assert produced == answers_with(target_directory, method="none")[0] and num_drafted > 0
    assert (head / "draft_vocab.txt").exists() == (method == "eagle2")


def test_a_head_is_trained_further_from_a_published_one(target_directory, answers, tmp_path):
    assert (
        train(
            target_directory,
            answers,
            tmp_path / "first",
            "--method",
            "eagle3",
            head__draft_vocab_size=60,
        )
        == 0
    )
    start = {"head__start": str(tmp_path / "first")}
    assert train(target_directory, answers, tmp_path / "second", "--method", "eagle3", **start) == 0
    before, after = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("first", "second")
    )
    assert before["draft_vocab_size"] == after["draft_vocab_size"] == 60


def test_sglangs_layout_is_written_on_demand(target_directory, answers, tmp_path):
    assert (
        train(
            target_directory,
            answers,
            tmp_path / "head",
            "--method",
            "eagle2",
            head__layout="sglang",
        )
        == 0
    )
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle"]


@pytest.mark.parametrize("kind", ["chats", "texts"])
def test_chats_and_texts_are_data(tmp_path, kind, capsys):
    write_tokenizer(tmp_path / "target")
    llama(vocab_size=330).save_pretrained(tmp_path / "target")
    chat = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "sat on the mat"},
    ]
    row = {"messages": chat} if kind == "chats" else {"text": "the cat sat on the mat"}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 12)
    assert (
        train(tmp_path / "target", tmp_path / "rows.jsonl", tmp_path / "head", "--method", "eagle2")
        == 0
    )
    assert "use it: eagle-ray run" in capsys.readouterr().out


def test_limit_and_overwrite_are_flags(target_directory, answers, tmp_path):
    assert train(target_directory, answers, tmp_path / "head", "--limit", "8") == 0
    assert (
        train(target_directory, answers, tmp_path / "head", "--limit", "8", optimizer__rate=0.01)
        == 2
    )
    changed = {"optimizer__rate": 0.01}
    assert (
        train(
            target_directory, answers, tmp_path / "head", "--limit", "8", "--overwrite", **changed
        )
        == 0
    )


def test_a_configuration_is_a_flag(target_directory, answers, tmp_path):
    (tmp_path / "train.yaml").write_text(
        "training: {steps: 9}\nhead: {method: medusa, num_levels: 2}\n"
    )
    assert train(target_directory, answers, tmp_path / "head", "-c", f"{tmp_path}/train.yaml") == 0
