"""Published head layouts load as they are; what does not fit is refused by name."""

import json

import pytest
import torch
from safetensors.torch import save_file

from eagle_ray.errors import EngineError
from eagle_ray.models.checkpoint import load_head, save_head
from tests.toy import head

RAW = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 40,  # some published heads say so; there is one layer
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
}


@pytest.fixture
def tensors():
    return {key: value.clone() for key, value in head().state_dict().items()}


def write(path, tensors, raw=RAW, layout="safetensors"):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    if layout == "safetensors":
        save_file(tensors, path / "model.safetensors")
    elif layout == "bin":
        torch.save(tensors, path / "pytorch_model.bin")
    else:
        shards = {key: f"part-{i % 2}.bin" for i, key in enumerate(tensors)}
        for name in set(shards.values()):
            torch.save({key: t for key, t in tensors.items() if shards[key] == name}, path / name)
        (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": shards}))
    return path


@pytest.mark.parametrize("layout", ["safetensors", "bin", "sharded"])
def test_every_layout_loads(tmp_path, tensors, layout):
    loaded = load_head(write(tmp_path, tensors, layout=layout), 32, 97)
    assert all(torch.equal(loaded.state_dict()[key], value) for key, value in tensors.items())


def test_rope_theta_is_10000_unless_the_heads_own_config_says(tmp_path, tensors):
    default = load_head(write(tmp_path, tensors), 32, 97)
    assert default.config.rope_parameters["rope_theta"] == 10000.0
    told = load_head(write(tmp_path, tensors, {**RAW, "rope_theta": 500000.0}), 32, 97)
    assert told.config.rope_parameters["rope_theta"] == 500000.0
    new = load_head(
        write(tmp_path, tensors, {**RAW, "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}), 32, 97
    )
    assert new.config.rope_parameters["rope_theta"] == 7.0


def test_fc_has_a_bias_unless_the_config_says_not(tmp_path, tensors):
    assert load_head(write(tmp_path, tensors), 32, 97).fc.bias is not None
    del tensors["fc.bias"]
    assert load_head(write(tmp_path, tensors, {**RAW, "bias": False}), 32, 97).fc.bias is None
    with pytest.raises(EngineError, match=r"missing fc\.bias"):
        load_head(write(tmp_path, tensors), 32, 97)


def test_an_embedding_of_its_own_is_taken(tmp_path, tensors):
    tensors["embed_tokens.weight"] = torch.randn(97, 32)
    loaded = load_head(write(tmp_path, tensors), 32, 97)
    assert torch.equal(loaded.embed_tokens.weight, tensors["embed_tokens.weight"])


def test_unexpected_and_misshapen_tensors_are_named(tmp_path, tensors):
    tensors["layers.1.mlp.gate_proj.weight"] = torch.zeros(2)
    with pytest.raises(EngineError, match=r"unexpected layers\.1\.mlp\.gate_proj\.weight"):
        load_head(write(tmp_path, tensors), 32, 97)
    del tensors["layers.1.mlp.gate_proj.weight"]
    tensors["fc.weight"] = torch.zeros(32, 32)
    with pytest.raises(EngineError, match=r"fc\.weight is \(32, 32\), wanted \(32, 64\)"):
        load_head(write(tmp_path, tensors), 32, 97)


@pytest.mark.parametrize("hidden, vocab, key", [(64, 97, "hidden_size"), (32, 128, "vocab_size")])
def test_a_head_of_another_target_is_refused_with_both_numbers(tmp_path, tensors, hidden, vocab, key):
    with pytest.raises(EngineError, match=key):
        load_head(write(tmp_path, tensors), hidden, vocab)


def test_an_eagle3_head_is_refused_by_name(tmp_path, tensors):
    with pytest.raises(EngineError, match="EAGLE-3"):
        load_head(write(tmp_path, {**tensors, "d2t": torch.zeros(4)}), 32, 97)


def test_a_directory_without_weights_says_so(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    with pytest.raises(EngineError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        load_head(tmp_path, 32, 97)


def test_pickles_may_hold_weights_only(tmp_path, tensors):
    write(tmp_path, tensors, layout="bin")
    torch.save({"fc.weight": Surprise()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        load_head(tmp_path, 32, 97)


class Surprise:
    def __reduce__(self):
        return print, ("a pickle ran code",)


def test_what_is_saved_loads_again(tmp_path):
    saved = head()
    save_head(saved, RAW, tmp_path / "out")
    loaded = load_head(tmp_path / "out", 32, 97)
    for key, value in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value.bfloat16().float())
