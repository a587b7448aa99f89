"""configs/: one job per published pair, as `eagle-ray validate` sees it where no hub can be reached."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_ray.cli import main as cli
from eagle_ray.config import load_config
from tests.support.tokenizers import write_tokenizer
from tests.support.toy_models import TARGET_JSON

FOLDER = Path(__file__).parent.parent / "configs"
CONFIGS = sorted(FOLDER.glob("eagle[23]-*.yaml"))
EQUAL_DATA = sorted(FOLDER.glob("deepspec-*.yaml"))  # three methods for each of three targets
NAMES = {"eagle3": "EAGLE-3", "dflash": "DFlash", "dspark": "DSpark"}
NODES = {
    "70b": 48,
    "72b": 48,
    "33b": 48,
    "32b": 48,
    "13b": 50,
    "14b": 50,
    "8b": 60,
    "7b": 60,
    "4b": 60,
    "1.7b": 60,
}


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    """An empty cache and a hub that does not answer, on every machine."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("path", [*CONFIGS, *EQUAL_DATA], ids=lambda path: path.stem)
def test_a_published_pair_is_valid_as_far_as_it_can_be_seen(path, no_hub, capsys):
    assert cli.main(["validate", "-c", str(path)]) == 0
    shown, config = capsys.readouterr().out, load_config(path, env={})
    assert "48 good, 0 would become error rows" in shown
    assert f"model    {config.model.target}, head {config.model.draft}" in shown
    for part, name in (("target", config.model.target), ("draft", config.model.draft)):
        assert (
            f"unseen   model.{part}: {name!r} is not on this machine and the hub does not answer"
            in shown
        )


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_its_first_line_says_for_what_and_its_tree_is_the_papers(path):
    config, first = load_config(path, env={}), path.read_text().splitlines()[0]
    assert config.model.target in first and config.model.draft in first
    assert (config.name, config.output.path) == (path.stem, f"runs/{path.stem}")
    generation, tree = path.stem[5], config.speculative
    assert tree.method == f"eagle{generation}" and f"EAGLE-{generation}" in first
    size = next(
        (n for size, n in NODES.items() if f"-{size}" in path.stem), 50
    )  # 50: mixtures of experts
    assert (tree.max_nodes, tree.max_depth, tree.top_k) == (size, {"2": 6, "3": 8}[generation], 10)


@pytest.mark.parametrize("path", EQUAL_DATA, ids=lambda path: path.stem)
def test_pairs_of_equal_data_differ_in_their_heads_alone(path):
    config, first = load_config(path, env={}), path.read_text().splitlines()[0]
    _, kind, _, size = path.stem.split("-")
    assert first.startswith(f"# {NAMES[kind]} for Qwen/Qwen3-{size.upper()}, ")
    assert config.model.target in first and config.model.draft in first
    assert config.model.draft.startswith(f"deepseek-ai/{kind}_qwen3_{size}_")
    assert (config.name, config.output.path) == (path.stem, f"runs/{path.stem}")
    tree, others = config.speculative, load_config(EQUAL_DATA[0], env={})
    assert (tree.max_nodes, tree.max_depth, tree.top_k) == (60, 7, 10)
    assert tree.method == ("eagle3" if kind == "eagle3" else "dflash")
    assert (config.sampling, config.chat) == (others.sampling, others.chat)
    assert config.chat.chat_template_kwargs == {"enable_thinking": False}


def test_every_published_family_is_there():
    targets = " ".join(load_config(path, env={}).model.target for path in CONFIGS)
    for family in (
        "vicuna",
        "Llama-2",
        "Meta-Llama-3-",
        "Llama-3.1",
        "Llama-3.3",
        "Mixtral",
        "Qwen2-",
        "Qwen3",
        "R1",
    ):
        assert family in targets


def job(tmp_path: Path, target: str, draft: str) -> list[str]:
    (tmp_path / "rows.jsonl").write_text(
        '{"id": "a", "messages": "Hi"}\n{"id": "b", "prompt": "x", "temperature": -1}'
    )
    models = ["--set", f"model.target={target}", "--set", f"model.draft={draft}"]
    return ["validate", "-i", f"{tmp_path}/rows.jsonl", "-o", f"{tmp_path}/out", *models]


def test_prompts_are_checked_if_only_the_head_is_unreachable(no_hub, tmp_path, capsys):
    write_tokenizer(tmp_path / "target")
    (tmp_path / "target" / "config.json").write_text(json.dumps(TARGET_JSON))
    assert cli.main(job(tmp_path, str(tmp_path / "target"), "org/head")) == 0
    shown = capsys.readouterr().out
    assert "| <|bos|><|user|>Hi<|end|><|assistant|>" in shown
    assert "unseen   model.draft: 'org/head'" in shown and "unseen   model.target" not in shown


def test_rows_are_checked_where_the_target_is_out_of_reach(no_hub, tmp_path, capsys):
    assert cli.main(job(tmp_path, "org/target", "org/head")) == 0
    shown = capsys.readouterr().out
    assert (
        "1 good, 1 would become error rows" in shown
        and "line 2: " in shown
        and "temperature" in shown
    )
    assert "prompt   the first, 'a', not looked at: it takes the target's tokenizer" in shown


def test_a_run_does_not_start_without_its_models(ray_session, no_hub, tmp_path, capsys):
    assert cli.main(["run", *job(tmp_path, "org/target", "org/head")[1:]]) == 2
    assert "model.target: 'org/target' is not on this machine" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
