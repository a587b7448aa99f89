"""`eagle-ray compare` with several configurations: DeepSpec's nine, over a hub with tiny random models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eagle_ray.cli import main as cli
from eagle_ray.config import load_config
from tests.support.checkpoints import (
    E3,
    deepspec_config,
    eagle3_tensors,
    hub,
    publish,
    write,
)
from tests.support.families import config_of, random_model

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("deepspec-*.yaml"))
NUM_LAYERS = {"4B": 8, "8B": 9, "14B": 10}
FEATURES = [1, 3, 5]  # layers of the target whose outputs the heads read
WITHOUT_PATH = {
    "markov_rank": 0,
    "markov_head_type": None,
    "enable_confidence_head": False,
    "confidence_head_with_markov": None,
}
FEW = ["--set", "sampling.max_tokens=6", "--set", "model.dtype=float32", "--temperatures", "0"]
FEW += ["--set", "speculative.max_nodes=6", "--set", "speculative.budget=uniform", "--batch", "2"]


def write_eagle3(path: Path, num_layers: int, seed: int) -> Path:
    """A random head in DeepSpec's layout: normed queries and keys, and an lm_head over all tokens."""
    raw = {key: value for key, value in E3.items() if key != "draft_vocab_size"}
    raw |= {"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "num_hidden_layers": 1}
    raw |= {"target_layer_ids": FEATURES, "num_target_layers": num_layers, "ttt_length": 7}
    tensors = eagle3_tensors(E3 | {"draft_vocab_size": 97}, seed)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    for name in ("q_norm", "k_norm"):
        tensors[f"midlayer.self_attn.{name}.weight"] = torch.ones(8)
    tensors["embed_tokens.weight"] = torch.randn(97, 32)
    named = {name.replace("midlayer.", "layers.0."): each for name, each in tensors.items()}
    return write(path, named, raw)


def write_block_head(path: Path, num_layers: int, **own: object) -> Path:
    config = deepspec_config(tuple(FEATURES), num_target_layers=num_layers, **own)
    return publish(path, {key: value for key, value in config.items() if value is not None})


@pytest.fixture(scope="module")
def nine(tmp_path_factory):
    """A hub with the twelve repositories."""
    folder = tmp_path_factory.mktemp("nine")
    repos: dict[str, Path] = {}
    for seed, (size, num_layers) in enumerate(NUM_LAYERS.items()):
        model = random_model(config_of("qwen3", num_hidden_layers=num_layers), seed)
        model.save_pretrained(folder / size)
        name = f"qwen3_{size.lower()}"
        repos[f"Qwen/Qwen3-{size}"] = folder / size
        heads = {
            f"eagle3_{name}_ttt7": write_eagle3(folder / f"e{size}", num_layers, seed),
            f"dflash_{name}_block7": write_block_head(
                folder / f"f{size}", num_layers, **WITHOUT_PATH
            ),
            f"dspark_{name}_block7": write_block_head(folder / f"s{size}", num_layers),
        }
        repos |= {f"deepseek-ai/{head}": path for head, path in heads.items()}
    with hub(repos, gated=set(), cache=folder / "cache"):
        yield


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    prompts = [[1, 5, 9, 11], [1, 7, 3]]
    file.write_text("\n".join(json.dumps({"prompt_token_ids": ids}) for ids in prompts))
    return ["-i", str(file), *FEW]


def flags(paths: list[Path]) -> list[str]:
    return [flag for path in paths for flag in ("-c", str(path))]


def test_nine_pairs_stand_side_by_side(nine, rows, capsys):
    assert len(CONFIGS) == 9
    assert cli.main(["compare", *flags(CONFIGS), *rows]) == 0
    shown = capsys.readouterr().out
    grid = shown[shown.rindex("T = 0") :].splitlines()
    assert grid[0].split() == ["T", "=", "0", "target", "draft", "speed-up", "tau", "nodes", "same"]
    lines = {line.split()[0]: line.split() for line in grid[1:]}
    configs = {path.stem: load_config(path, env={}) for path in CONFIGS}
    assert {name: line[1:3] for name, line in lines.items()} == {
        name: [config.model.target, config.model.draft] for name, config in configs.items()
    }
    assert all(line[-3:] == ["2", "of", "2"] for line in lines.values())  # plain decoding's outputs


def test_the_numbers_are_by_target(nine, rows, capsys):
    pair = [path for path in CONFIGS if path.stem.endswith("-4b")][:2]
    assert cli.main(["compare", *flags(pair), *rows, "--json"]) == 0
    [target] = json.loads(capsys.readouterr().out)["targets"]
    assert target["target"] == "Qwen/Qwen3-4B"
    assert list(target["methods"]) == ["plain", *(path.stem for path in pair)]


def test_what_cannot_be_compared_is_named(nine, rows, tmp_path, capsys):
    first = CONFIGS[0]
    assert cli.main(["compare", *flags([first, first]), *rows]) == 2
    assert f"two configurations are called {first.stem}" in capsys.readouterr().err
    other = tmp_path / "other.yaml"
    other.write_text(first.read_text().replace(first.stem, "other") + "seed: 3\n")
    assert cli.main(["compare", *flags([first, other]), *rows]) == 2
    assert f"{first.stem} and other have seed 0 and 3" in capsys.readouterr().err
    assert cli.main(["compare", *flags([first, CONFIGS[1]]), *rows, "--methods", "eagle2"]) == 2
    assert "--methods: of no use with several -c" in capsys.readouterr().err
