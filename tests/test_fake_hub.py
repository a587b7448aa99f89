"""Models by their hub ids, against a hub on this machine: what is fetched to look at a pair, and what to run it."""

from __future__ import annotations

import pytest

from eagle_ray.assembly.assemble import build_engine_from_config
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.hub import download
from eagle_ray.cli import main as cli
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.errors import ConfigError
from tests.support.checkpoints import hub
from tests.support.jobs import PAIR

E3 = PAIR.parent / "pair_e3"


@pytest.fixture
def requested_files(tmp_path):
    """The files that the hub sent."""
    repos = {"org/target": E3 / "target", "org/head": E3 / "draft", "org/other": PAIR / "draft"}
    with hub(repos, gated={"org/secret"}, cache=tmp_path / "cache") as sent:
        yield sent


def validate(tmp_path, draft: str, target: str = "org/target") -> int:
    (tmp_path / "rows.jsonl").write_text('{"prompt_token_ids": [1, 5, 6]}')
    models = [
        "--set",
        f"model.target={target}",
        "--set",
        f"model.draft={draft}",
        "--set",
        "speculative.method=eagle3",
    ]
    return cli.main(["validate", "-i", f"{tmp_path}/rows.jsonl", "-o", f"{tmp_path}/out", *models])


def test_a_pair_is_looked_at_without_the_targets_weights(requested_files, tmp_path, capsys):
    assert validate(tmp_path, "org/head") == 0
    assert "token ids [1, 5, 6]" in capsys.readouterr().out
    assert "org/target/config.json" in requested_files and not [
        name for name in requested_files if name[4:] == "target/model.safetensors"
    ]


def test_a_head_of_another_target_is_refused_through_the_hub_too(requested_files, tmp_path, capsys):
    assert validate(tmp_path, "org/other") == 2
    assert "is an EAGLE-1/2 head" in capsys.readouterr().err


def test_a_gated_model_says_how_to_be_let_in(requested_files, tmp_path, capsys):
    assert validate(tmp_path, "org/head", target="org/secret") == 2
    assert "model.target: 'org/secret' is gated: ask for access" in capsys.readouterr().err


def test_a_name_that_the_hub_does_not_know_is_refused(requested_files):
    with pytest.raises(
        ConfigError, match=r"model\.draft: the hub has no repository of 'org/nobody'"
    ):
        download("org/nobody", "draft")


def test_what_runs_is_fetched_whole(requested_files, tmp_path):
    model = ModelConfig(target="org/target", draft="org/head", max_model_len=64)
    pair = build_engine_from_config(
        model,
        SpeculativeConfig(method="eagle3", max_nodes=4, max_depth=2, budget="uniform"),
        EngineArgs(1),
    )
    assert pair.draft_name == "org/head" and pair.engine.target.vocab_size == 512
    assert {"org/target/model.safetensors", "org/head/model.safetensors"} <= set(requested_files)
