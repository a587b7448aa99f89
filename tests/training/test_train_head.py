"""A whole run: resume bit for bit, the cache of features, the published layout, errors."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle_ray.assembly.load_models import load_target
from eagle_ray.config import ModelConfig
from eagle_ray.core.errors import ConfigError, EngineError
from eagle_ray.methods.dflash.checkpoint import load_dflash
from eagle_ray.methods.eagle.checkpoint import load_head
from eagle_ray.methods.eagle.draft_vocab import read_draft_vocab
from eagle_ray.methods.head_files import read_config, read_shapes
from eagle_ray.models.loader import read_model_config
from eagle_ray.storage.path import StoragePath
from eagle_ray.training.frozen_target import ComputedFeatures
from eagle_ray.training.job import train_head as train_head_module
from eagle_ray.training.job.feature_cache import FeatureCache
from eagle_ray.training.job.train_head import train_head
from eagle_ray.training.job.training_data import load_data
from eagle_ray.training.packing import PackedBatch


def run(config: Any, **options: Any) -> dict[str, Any]:
    return train_head(config, [config.data.path], **options)


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


@pytest.fixture
def stop_after(monkeypatch):
    """stop_after(3): the process ends after that step, as by a kill."""

    def stop(step: int) -> None:
        show = train_head_module.TrainProgress.show

        def interrupted(self, report, curves):
            show(self, report, curves)
            if report.step == step:
                raise KeyboardInterrupt

        monkeypatch.setattr(train_head_module.TrainProgress, "show", interrupted)

    return stop


def test_target_too_large_for_a_gpu_is_refused_before_loading(make_config, monkeypatch):
    monkeypatch.setattr(train_head_module, "device_type", lambda model: "cuda")
    monkeypatch.setattr(train_head_module, "load_target", lambda model: pytest.fail("loaded"))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1000)
    )
    with pytest.raises(
        ConfigError, match=r"model\.target: the target takes .* training does not split it"
    ):
        run(make_config())


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("muon", "eagle2"),
        ("adamw", "eagle3"),
        pytest.param("muon", "eagle3", marks=pytest.mark.slow),
        pytest.param("adamw", "eagle2", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_repeats_the_numbers_bit_for_bit(
    make_config, tmp_path, stop_after, monkeypatch, method, kind
):
    settings = {"head.method": method, "optimizer.kind": kind, "training.threads": 2}
    whole = run(make_config(**settings, **{"output.path": str(tmp_path / "whole")}))
    with monkeypatch.context():
        stop_after(5)  # the checkpoint is of step 4
        with pytest.raises(KeyboardInterrupt):
            run(make_config(**settings))
    monkeypatch.undo()
    resumed = run(make_config(**settings))
    assert resumed["curves"] == whole["curves"]
    one, other = tensors(tmp_path / "whole"), tensors(tmp_path / "head")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert run(make_config(**settings)) == json.loads(
        (tmp_path / "head" / "training.json").read_text()
    )


def test_the_loss_falls_and_the_engine_measures_tau(make_config, tmp_path):
    settings = {"training.steps": 40, "evaluation.every": 20, "optimizer.rate": 0.02}
    record = run(make_config(**settings))
    losses = [means["loss"] for _, means, _ in record["curves"]["steps"]]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert [step for step, _ in record["curves"]["held_out"]] == [20, 40]
    assert all(result["tau"] >= 1 for _, result in record["curves"]["held_out"])
    page = (tmp_path / "head" / "report.html").read_text()
    assert (
        "Held-out tau" in page and page.count("<svg") == 3 and "speculative.method=eagle2" in page
    )


def test_a_cached_run_equals_one_that_computes(make_config, tmp_path):
    one = run(
        make_config(**{"head.method": "eagle3", "training.steps": None, "training.epochs": 2})
    )
    two = run(
        make_config(
            **{
                "head.method": "eagle3",
                "training.steps": None,
                "training.epochs": 2,
                "data.feature_cache": "off",
                "output.path": str(tmp_path / "computed"),
            }
        )
    )
    assert list((tmp_path / "head" / "features").glob("features-*.bin"))
    for (_, mine, _), (_, theirs, _) in zip(
        one["curves"]["steps"], two["curves"]["steps"], strict=True
    ):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-4)


def test_feature_cache_resumes_after_kill_and_refuses_other_data(
    make_config, tmp_path, monkeypatch
):
    config = make_config()
    data = load_data(config, None, [config.data.path])
    causal_lm = load_target(
        ModelConfig(target=config.model.target, draft=None, device="cpu", dtype="float32")
    )
    source = ComputedFeatures(causal_lm, (2, 4, 5), 64)
    monkeypatch.setattr("eagle_ray.training.job.feature_cache.SHARD_BYTES", 20_000)
    FeatureCache.open(tmp_path / "cache", source, data.documents[:17], {"data": 1})
    monkeypatch.setattr(source, "read", lambda packed: pytest.fail("computed again"))
    FeatureCache.open(tmp_path / "cache", source, data.documents[:17], {"data": 1})
    monkeypatch.undo()
    cache = FeatureCache.open(tmp_path / "cache", source, data.documents, {"data": 1})
    packed = PackedBatch.of(data.documents, [30, 2, 16, 17])
    for name in ("features", "hidden", "greedy_ids"):
        torch.testing.assert_close(
            getattr(cache.read(packed), name), getattr(source.read(packed), name)
        )
    with pytest.raises(EngineError, match="another target or other data"):
        FeatureCache.open(tmp_path / "cache", source, data.documents, {"data": 2})


def test_a_draft_vocabulary_is_the_most_frequent_answer_tokens(make_config, tmp_path):
    run(make_config(**{"head.draft_vocab_size": 20, "training.steps": 1}))
    chosen = read_draft_vocab(str(tmp_path / "head" / "draft_vocab.txt"), None, 97)
    assert len(chosen) == 20 and len(set(chosen)) == 20


# vLLM 0.32.0 (model_executor/models/llama_eagle.py, llama_eagle3.py;
# transformers_utils/configs/eagle.py):
#   EagleLlamaForCausalLM prefixes every name with "model." and has fc without bias, layers.0 without input_layernorm;
#   an unexpected name is an error. The embedding may be absent: it is then the target's.
#   LlamaForCausalLMEagle3 maps "midlayer." to "layers.0.", reads draft_vocab_size, d2t and lm_head of its size; t2d is
#   skipped. q, k and v read 2 H; fc reads 3 H and has no bias.
# SGLang 0.5.23 (srt/models/llama_eagle.py, llama_eagle3.py): LlamaForCausalLMEagle has an fc with
# bias;
#   LlamaForCausalLMEagle3 has none unless the config says bias.
LAYER = [f"self_attn.{name}_proj.weight" for name in "qkvo"] + [
    f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")
]


def test_an_eagle2_head_has_the_names_that_vllm_reads(make_config, tmp_path, target_directory):
    run(make_config(**{"training.steps": 1}))
    raw, found = (
        json.loads((tmp_path / "head" / "config.json").read_text()),
        tensors(tmp_path / "head"),
    )
    assert (
        raw["architectures"] == ["EagleLlamaForCausalLM"]
        and raw["model_type"] == "llama"
        and raw["bias"] is False
    )
    layer = [f"layers.0.{name}" for name in [*LAYER, "post_attention_layernorm.weight"]]
    assert set(found) == {"fc.weight", *layer}
    assert found["fc.weight"].shape == (32, 64) and found["fc.weight"].dtype == torch.bfloat16
    load_head(tmp_path / "head", read_model_config(target_directory))


def test_an_eagle2_head_for_sglang_has_a_bias_and_the_embedding(
    make_config, tmp_path, target_directory
):
    run(make_config(**{"training.steps": 1, "head.layout": "sglang"}))
    raw, found = (
        json.loads((tmp_path / "head" / "config.json").read_text()),
        tensors(tmp_path / "head"),
    )
    assert raw["architectures"] == ["LlamaForCausalLMEagle"] and raw["tie_word_embeddings"] is False
    assert found["fc.bias"].shape == (32,) and found["embed_tokens.weight"].shape == (97, 32)
    load_head(tmp_path / "head", read_model_config(target_directory))


def test_an_eagle3_head_has_the_names_that_vllm_and_sglang_read(
    make_config, tmp_path, target_directory
):
    run(make_config(**{"training.steps": 1, "head.method": "eagle3"}))
    raw, found = (
        json.loads((tmp_path / "head" / "config.json").read_text()),
        tensors(tmp_path / "head"),
    )
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"] and raw["draft_vocab_size"] == 60
    norms = [
        f"{name}.weight" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    ]
    layer = [f"midlayer.{name}" for name in [*LAYER, *norms]]
    assert set(found) == {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", *layer}
    assert found["midlayer.self_attn.q_proj.weight"].shape == (32, 64) and found[
        "fc.weight"
    ].shape == (32, 96)
    ids = torch.arange(60) + found["d2t"]
    assert found["d2t"].dtype == torch.int64 and found["t2d"].dtype == torch.bool
    assert (
        ids.tolist() == sorted(ids.tolist())
        and found["t2d"].nonzero()[:, 0].tolist() == ids.tolist()
    )
    assert (
        load_head(tmp_path / "head", read_model_config(target_directory)).token_ids.tolist()
        == ids.tolist()
    )


def test_an_eagle3_head_over_every_token_has_no_vocabulary_maps(
    make_config, tmp_path, target_directory
):
    """vLLM makes its map only if the sizes differ, and refuses a d2t without it."""
    run(
        make_config(**{"training.steps": 1, "head.method": "eagle3", "head.draft_vocab_size": None})
    )
    assert not {"d2t", "t2d"} & set(tensors(tmp_path / "head"))
    assert load_head(tmp_path / "head", read_model_config(target_directory)).token_ids is None


@pytest.mark.parametrize("method", ["medusa", "hydra"])
def test_medusa_and_hydra_heads_are_published_and_run(make_config, method):
    record = run(
        make_config(**{"head.method": method, "head.num_levels": 2, "head.draft_vocab_size": None})
    )
    assert record["curves"]["held_out"][-1][1]["tau"] >= 1


FURTHER = {"head.draft_vocab_size": None, "head.intermediate_size": None}


@pytest.mark.parametrize("method", ["eagle2", "eagle3"])
def test_a_head_is_trained_further_from_its_published_files(make_config, tmp_path, method):
    """A step of no length publishes the same head again; its vocabulary stays, whatever other data would choose."""
    first, second = tmp_path / "first", tmp_path / "head"
    run(make_config(**{"head.method": method, "output.path": str(first)}))
    settings = {
        "head.start": str(first),
        "optimizer.rate": 1e-12,
        "training.steps": 1,
        "data.limit": 12,
    }
    record = run(make_config(**{"head.method": method} | FURTHER | settings))
    assert record["draft_vocab_size"] == 60
    names = [
        "config.json",
        "model.safetensors",
        *(["draft_vocab.txt"] if method == "eagle2" else []),
    ]
    assert [(first / name).read_bytes() for name in names] == [
        (second / name).read_bytes() for name in names
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head.method": "eagle3"}, "head.start: .* another kind of head than head.method: eagle3"),
        ({"head.start": "nowhere/at-all"}, "head.start: 'nowhere/at-all'"),
        ({"head.method": "medusa"}, "head.start: only eagle2 and eagle3"),
        ({"head.draft_vocab_size": 60}, "head.draft_vocab_size: leave it out"),
    ],
)
def test_a_head_that_cannot_be_trained_further_is_refused(make_config, tmp_path, settings, message):
    run(make_config(**{"output.path": str(tmp_path / "first"), "training.steps": 1}))
    with pytest.raises(ConfigError, match=message):
        run(make_config(**{"head.start": str(tmp_path / "first")} | FURTHER | settings))


def test_a_dflash_head_is_published_and_runs(make_config, tmp_path, target_directory):
    sizes = {
        "head.num_layers": 2,
        "head.block_size": 4,
        "head.causal_head": True,
        "head.draft_vocab_size": None,
    }
    record = run(make_config(**{"head.method": "dflash", **sizes}))
    assert record["curves"]["held_out"][-1][1]["tau"] >= 1
    head = load_dflash(tmp_path / "head", read_model_config(target_directory))
    assert head.block.size == 4 and head.block.causal == (True, True)
    with pytest.raises(ConfigError, match=r"head\.mask_token: must be a token of the target"):
        mask = {"head.mask_token": 10**6, "output.path": str(tmp_path / "other")}
        run(make_config(**{"head.method": "dflash", **sizes, **mask}))
    assert not {"lm_head.weight", "d2t", "t2d"} & read_shapes(tmp_path / "head").keys()


def test_a_dflash_head_has_its_draft_vocabulary_and_named_layers(
    make_config, tmp_path, target_directory
):
    sizes = {"head.num_layers": 1, "head.block_size": 4, "head.target_layer_ids": [1, 4, 6]}
    record = run(make_config(**{"head.method": "dflash", **sizes}))
    assert record["draft_vocab_size"] == 60 and record["curves"]["held_out"][-1][1]["tau"] >= 1
    head = load_dflash(tmp_path / "head", read_model_config(target_directory))
    assert len(head.token_ids) == 60 and head.lm_head.weight.shape == (60, 32)
    assert (
        head.block.feature_layers == (2, 5, 7)
        and not (tmp_path / "head" / "draft_vocab.txt").exists()
    )
    for wrong, error in (
        (
            {"head.target_layer_ids": [1, 7]},
            r"head\.target_layer_ids: must be different layers of the target, 0 to 6",
        ),
        ({"head.causal_head": True}, r"head\.causal_head: .* Leave out head\.draft_vocab_size"),
    ):
        with pytest.raises(ConfigError, match=error):
            run(
                make_config(
                    **{
                        "head.method": "dflash",
                        **sizes,
                        "output.path": str(tmp_path / "other"),
                        **wrong,
                    }
                )
            )


def test_a_markov_head_is_published_and_runs(make_config, tmp_path, target_directory):
    sizes = {
        "head.method": "dflash",
        "head.num_layers": 1,
        "head.block_size": 4,
        "head.markov_rank": 6,
    }
    record = run(make_config(**sizes))
    assert record["curves"]["held_out"][-1][1]["tau"] >= 1
    raw = read_config(tmp_path / "head")
    assert (
        raw["speculators_model_type"] == "dspark"
        and raw["markov_rank"] == 6
        and not raw["enable_confidence_head"]
    )
    head = load_dflash(tmp_path / "head", read_model_config(target_directory))
    assert head.block.path.markov_rank == 6 and head.markov_head.markov_w2.weight.any()
    with pytest.raises(
        ConfigError, match=r"head\.causal_head: DSpark's layouts have no causal heads"
    ):
        run(
            make_config(
                **sizes, **{"head.causal_head": True, "output.path": str(tmp_path / "other")}
            )
        )


def test_checkpoints_of_other_settings_are_refused(make_config, stop_after, monkeypatch):
    stop_after(3)
    with pytest.raises(KeyboardInterrupt):
        run(make_config())
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="another configuration"):
        run(make_config(**{"training.seed": 1}))
    run(make_config(**{"training.seed": 1, "output.if_exists": "overwrite"}))


def test_eagle3_needs_seven_layers(make_config, tmp_path):
    from tests.support.toy_models import llama

    llama(num_hidden_layers=6).save_pretrained(tmp_path / "shallow")
    with pytest.raises(ConfigError, match=r"7 layers or more.*has 6\. Use eagle2"):
        run(make_config(**{"model.target": str(tmp_path / "shallow"), "head.method": "eagle3"}))


def test_only_the_newest_checkpoints_are_kept(make_config, tmp_path):
    run(make_config())
    names = [file.name for file in (StoragePath.of(tmp_path / "head") / "checkpoints").glob("*.pt")]
    assert names == ["step-00000004.pt", "step-00000006.pt"]
