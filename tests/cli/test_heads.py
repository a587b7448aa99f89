"""`eagle-ray heads`: thirty targets, fine-tunes, families, and a head looked at without its target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from eagle_ray.assembly.head_catalogue import CATALOGUE, catalogue
from eagle_ray.assembly.hub import ASSETS
from eagle_ray.cli import main as cli
from tests.support.checkpoints import hub, published_draft
from tests.support.jobs import PAIR

TINY, SMOLLM2 = ASSETS / "tiny", ASSETS / "smollm2"
TARGETS = [target.id for target in catalogue()]


@pytest.fixture(autouse=True)
def no_hub(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


def heads(capsys, *flags: str) -> str:
    assert cli.main(["heads", *flags]) == 0
    return capsys.readouterr().out


def refusal(capsys, *flags: str) -> str:
    assert cli.main(["heads", *flags]) == 2
    captured = capsys.readouterr()
    return captured.err or captured.out


@pytest.mark.parametrize("target", TARGETS)
def test_each_target_has_its_heads(target, capsys):
    listed = {head["id"]: head for head in json.loads(heads(capsys, target, "--json"))}
    [entry] = [
        each for each in yaml.safe_load(CATALOGUE.read_text())["targets"] if each["id"] == target
    ]
    assert listed.keys() == {head["id"] for head in entry["heads"]}
    refused = {head["id"] for head in entry["heads"] if "refused" in head or "refused" in entry}
    assert {name for name, head in listed.items() if not head["loads"]} == refused


def test_the_table_shows_method_layout_tau_and_what_loads(capsys):
    lines = heads(capsys, "Qwen/Qwen3-8B").splitlines()
    assert lines[0].startswith("Qwen/Qwen3-8B: ") and "that load" in lines[0]
    assert lines[1].split() == ["head", "method", "layout", "tau", "loads"]
    first, peagle = lines[2].split(), next(line for line in lines if "peagle" in line)
    assert first == ["deepseek-ai/dspark_qwen3_8b_block7", "dflash", "DeepSpec", "3.41", "yes"]
    assert peagle.split()[1:] == ["peagle", "speculators", "-", "yes"]
    [refused] = [
        line for line in heads(capsys, "moonshotai/Kimi-K2.5").splitlines() if "nvidia" in line
    ]
    assert "no: target: multi-head latent attention" in refused
    assert any(line.startswith("  tau of deepseek-ai/dspark_qwen3_8b_block7: ") for line in lines)


def test_a_family_and_no_target_list_more(capsys):
    family = heads(capsys, "qwen3")
    assert "Qwen/Qwen3-8B: " in family and "Qwen/Qwen3-30B-A3B: " in family
    everything = heads(capsys)
    assert all(target in everything for target in TARGETS)


def test_a_fine_tune_gets_the_heads_of_its_base(tmp_path, capsys):
    shape = next(target.shape for target in catalogue() if target.family == "Llama-3.1-8B")
    path = tmp_path / "tune"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(dict(shape)))
    (path / "README.md").write_text("---\nbase_model: meta-llama/Llama-3.1-8B\n---\n")
    shown = heads(capsys, str(path))
    said = "heads of meta-llama/Llama-3.1-8B-Instruct fit in shape; acceptance will be lower"
    assert shown.startswith(f"{path}: {said}") and "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B" in shown


def test_a_fine_tune_at_the_hub_is_read_there(tmp_path, capsys):
    tune = tmp_path / "tune"
    shutil.copytree(TINY / "target", tune)
    (tune / "README.md").write_text("---\nbase_model: embedded:tiny\n---\n")
    with hub({"org/tune": tune}, gated=set(), cache=tmp_path / "hub") as sent:
        assert "heads of embedded:tiny fit in shape" in heads(capsys, "org/tune")
    assert "org/tune/model.safetensors" not in sent


@pytest.mark.parametrize("name", ["日本", "-", "..."])
def test_a_name_without_words_lists_nothing(capsys, name):
    said = refusal(capsys, name)
    assert f"TARGET: {name!r} is not in the catalogue" in said and said.count("\n") == 1


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B ", " Qwen/Qwen3-8B", "Qwen/Qwen3-8B/"])
def test_a_name_may_be_copied_with_what_is_around_it(capsys, name):
    assert heads(capsys, name).startswith("Qwen/Qwen3-8B: ")


def test_a_head_in_place_of_a_target_names_its_target(capsys):
    said = refusal(capsys, "RedHatAI/Qwen3-8B-speculator.eagle3")
    assert "is a draft head of Qwen/Qwen3-8B, and no target. Name the target: " in said


@pytest.mark.parametrize("name", ["", " ", "x" * 5000, "\0"])
def test_what_is_no_name_is_shown_in_one_short_line(capsys, name):
    said = refusal(capsys, name)
    assert said.startswith("eagle-ray: TARGET: '") and said.count("\n") == 1 and len(said) < 500


def test_an_adapter_is_checked_before_its_config_is_missed(tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert cli.main(["heads", "--check", str(tmp_path)]) == 2
    assert "it holds an adapter (adapter_config.json) and no head" in capsys.readouterr().out


def test_an_unknown_target_says_what_to_do(tmp_path, capsys):
    assert "is not in the catalogue, and no files of it can be had" in refusal(capsys, "org/model")
    (tmp_path / "empty").mkdir()
    assert "has no config.json of a model" in refusal(capsys, str(tmp_path / "empty"))
    unknown = refusal(capsys, str(PAIR / "target"))
    assert "no published head is known for" in unknown and "hidden_size 64" in unknown
    assert unknown.count("\n") == 1


def check(capsys, path: Path, *flags: str) -> dict[str, str]:
    """Return the lines of a check, by their first word."""
    cli.main(["heads", "--check", str(path), *flags])
    lines = capsys.readouterr().out.splitlines()
    return {line.split()[0]: line[10:] for line in lines if line[0] != " "}


def test_a_head_is_looked_at_without_its_target(capsys):
    found = check(capsys, SMOLLM2 / "draft")
    assert found["kind"] == "an EAGLE-3 head, for method eagle3" and found["layout"] == "EAGLE-3"
    assert found["shape"] == "1 layer, hidden_size 576, vocab_size 49152, draft_vocab_size 3840"
    assert found["size"] == "6.2 M parameters, 6.4 MB"
    assert " used: " in found["keys"] and found["tensors"].startswith("15 used: d2t, ")
    assert found["fits"].startswith("it loads for a target of its sizes")


@pytest.mark.parametrize("kind", ["eagle2", "eagle3", "dflash", "vanilla", "medusa", "hydra"])
def test_each_kind_of_head_is_known(tmp_path, capsys, kind):
    found = check(capsys, published_draft(tmp_path / kind, kind, 8))
    methods = {"vanilla": "dflash"}
    assert found["kind"].endswith(f"for method {methods.get(kind, kind)}") and "fits" in found


def test_a_pair_fits_and_another_is_refused_with_both_numbers(capsys):
    assert check(capsys, TINY / "draft", "--target", "embedded:tiny")["fits"] == "yes"
    other = check(capsys, SMOLLM2 / "draft", "--target", "embedded:tiny")
    assert other["kind"] == "an EAGLE-3 head, for method eagle3"
    assert "hidden_size is 576 and the target's is 256" in other["refused"]


def test_what_is_not_read_is_refused_by_its_name(tmp_path, capsys):
    shutil.copytree(SMOLLM2 / "draft", tmp_path / "head")
    raw = json.loads((tmp_path / "head" / "config.json").read_text())
    (tmp_path / "head" / "config.json").write_text(json.dumps(raw | {"norm_before_residul": True}))
    assert cli.main(["heads", "--check", str(tmp_path / "head")]) == 2
    shown = capsys.readouterr().out
    assert "1 refused: norm_before_residul (unknown; did you mean norm_before_residual?)" in shown


def test_the_check_as_json(capsys):
    assert cli.main(["heads", "--check", str(TINY / "draft"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["method"], report["layout"], report["problem"]) == ("eagle2", "EAGLE", None)
    assert "fc.weight" in report["contents"]["used_tensors"]


def test_wrong_usage_names_the_flag(tmp_path, capsys):
    assert "--target: goes with --check" in refusal(capsys, "--target", "embedded:tiny")
    assert "TARGET: of no use with --check" in refusal(capsys, "x", "--check", str(TINY / "draft"))
    assert "is no directory" in refusal(capsys, "--check", str(tmp_path / "none"))
    assert "--target: " in refusal(capsys, "--check", str(TINY / "draft"), "--target", "org/model")
