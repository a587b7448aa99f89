"""Targets are loaded whole or not at all, quantised ones as transformers and their library lay them out."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_ray.core.errors import EngineError
from eagle_ray.models import loader
from eagle_ray.models.loader import eos_ids, load_causal_lm, read_model_config
from tests.support.toy_models import LLAMA, llama


@pytest.fixture
def directory(tmp_path) -> Path:
    """A small Llama, published."""
    llama().save_pretrained(tmp_path)
    return tmp_path


def damage(directory: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of the checkpoint, or leave them out."""
    found = {**load_file(directory / "model.safetensors"), **tensors}
    kept = {key: value for key, value in found.items() if value is not None}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})


def declare(directory: Path, **keys: object) -> None:
    """Write keys into the config."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def load(directory: Path) -> torch.nn.Module:
    return load_causal_lm(directory, torch.float32, "cpu")


def test_a_checkpoint_is_loaded_as_it_was_saved(directory):
    wanted = llama().state_dict()
    assert all(
        torch.equal(value, wanted[key]) for key, value in load(directory).state_dict().items()
    )


def test_a_missing_tensor_is_named(directory):
    damage(directory, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(
        EngineError, match=r"not whole: missing model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        load(directory)


def test_a_tensor_of_another_shape_is_named(directory):
    damage(directory, **{"model.norm.weight": torch.ones(31)})
    with pytest.raises(
        EngineError, match=r"not whole: model\.norm\.weight is \(31,\), wanted \(32,\)"
    ):
        load(directory)


def test_a_head_is_refused_as_a_target(directory):
    damage(directory, **{"fc.weight": torch.zeros(32, 64)})
    with pytest.raises(
        EngineError, match=r"is a draft head .* and no target\. Name it as model\.draft"
    ):
        read_model_config(directory)


def test_an_adapter_is_refused_as_a_target(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(
        EngineError, match=r"it holds an adapter .* and no model\. Merge the adapter"
    ):
        read_model_config(tmp_path)


def test_a_tied_lm_head_is_not_missed(tmp_path):
    model = llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path).lm_head.weight, model.model.embed_tokens.weight)


def test_a_file_that_is_cut_off_is_refused(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(EngineError, match=r"cannot be loaded"):
        load(directory)


def test_unknown_quantizer_is_refused_before_the_start(directory):
    declare(directory, quantization_config={"quant_method": "guesswork", "bits": 3})
    with pytest.raises(EngineError, match=r"quantised \(guesswork\)"):
        read_model_config(directory)
    with pytest.raises(EngineError, match=r"quantised \(guesswork\)"):
        load(directory)


@pytest.mark.skipif(find_spec("aqlm") is not None, reason="aqlm is installed")
def test_missing_quantizer_library_is_refused_with_pip_install(directory):
    declare(directory, quantization_config={"quant_method": "aqlm"})
    with pytest.raises(EngineError, match=r"quantised \(aqlm\).*pip install aqlm"):
        read_model_config(directory)
    with pytest.raises(EngineError, match=r"quantised \(aqlm\).*pip install aqlm"):
        load(directory)


def test_quantizer_that_downloads_kernels_is_refused_with_advice(directory):
    declare(directory, quantization_config={"quant_method": "fbgemm_fp8"})
    with pytest.raises(
        EngineError, match=r"\(fbgemm_fp8\), whose kernels transformers fetches .* AWQ, GPTQ"
    ):
        read_model_config(directory)


@pytest.mark.parametrize("said", [{}, {"llm_int8_threshold": 6.0}])
def test_layers_whose_rows_depend_on_their_company_are_refused(directory, said):
    declare(
        directory,
        quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True, **said},
    )
    with pytest.raises(EngineError, match=r"set llm_int8_threshold to 0\.0"):
        read_model_config(directory)


def test_eos_ids_come_from_the_generation_config_first():
    model = llama()
    model.generation_config.eos_token_id = [4, 5]
    assert eos_ids(model) == {4, 5}
    model.generation_config.eos_token_id = None
    assert eos_ids(model) == {LLAMA["eos_token_id"]}


@pytest.mark.parametrize(
    "device, has_accelerate, straight",
    [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)],
)
def test_a_gpu_gets_its_weights_straight_from_the_files(
    directory, monkeypatch, device, has_accelerate, straight
):
    asked, model = {}, llama()
    monkeypatch.setattr(loader, "find_spec", lambda name: has_accelerate or None)
    monkeypatch.setattr(type(model), "to", lambda self, device: asked.update(moved=device) or self)

    def from_pretrained(path: Path, **options: object) -> tuple[torch.nn.Module, dict]:
        asked.update(options)
        return model, {"missing_keys": [], "mismatched_keys": []}

    monkeypatch.setattr(loader.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    load_causal_lm(directory, torch.float32, device)
    assert asked.get("device_map") == ({"": device} if straight else None)
    assert asked.get("moved") == (None if straight else device)
