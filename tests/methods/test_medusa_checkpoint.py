"""Medusa and Hydra heads as they are published: read either file, refuse by name what does not fit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu
from transformers import LlamaConfig

from eagle_ray.core.errors import EngineError
from eagle_ray.methods.medusa.checkpoint import check_hydra, check_medusa, load_hydra, load_medusa

H, V, HEADS = 8, 20, 3
TARGET = LlamaConfig(hidden_size=H, vocab_size=V, num_attention_heads=2)
MEDUSA = {
    "medusa_num_heads": HEADS,
    "medusa_num_layers": 2,
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
}
HYDRA = {
    "hydra_num_heads": HEADS,
    "hydra_num_layers": 2,
    "hydra_head_arch": "mlp",
    "grounded_heads": True,
}


def medusa() -> dict[str, Tensor]:
    """Two residual blocks and an lm_head each, under the published names."""
    torch.manual_seed(0)
    blocks = {f"{n}.{k}.linear.weight": torch.randn(H, H) for n in range(HEADS) for k in range(2)}
    biases = {f"{n}.{k}.linear.bias": torch.randn(H) for n in range(HEADS) for k in range(2)}
    return blocks | biases | {f"{n}.2.weight": torch.randn(V, H) for n in range(HEADS)}


def hydra() -> dict[str, Tensor]:
    """The first block of head n reads the feature and n + 1 tokens; an lm_head with a bias each."""
    torch.manual_seed(0)
    tensors = {"input_embed_fn.weight": torch.randn(V, H)}
    for n in range(HEADS):
        for name in (f"hydra_mlp.{n}.0.linear", f"hydra_mlp.{n}.0.res_connection"):
            tensors |= {
                f"{name}.weight": torch.randn(H, (n + 2) * H),
                f"{name}.bias": torch.randn(H),
            }
        tensors |= {
            f"hydra_mlp.{n}.1.linear.weight": torch.randn(H, H),
            f"hydra_mlp.{n}.1.linear.bias": torch.randn(H),
        }
        tensors |= {
            f"hydra_lm_head.{n}.weight": torch.randn(V, H),
            f"hydra_lm_head.{n}.bias": torch.randn(V),
        }
    return tensors


def publish(path: Path, config: dict, tensors: dict[str, Tensor], file: str) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    save = save_file if file.endswith("safetensors") else torch.save
    save(tensors, path / file)
    return path


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_a_medusa_head_is_its_blocks_and_its_lm_head(tmp_path, file):
    tensors, feature = medusa(), torch.randn(2, H)
    heads = load_medusa(publish(tmp_path, MEDUSA, tensors, file), TARGET)
    hidden = feature
    for k in range(2):
        hidden = hidden + silu(
            hidden @ tensors[f"1.{k}.linear.weight"].T + tensors[f"1.{k}.linear.bias"]
        )
    logits = heads.logits(1, feature, torch.zeros(2, 4, 2, H), target_logits=None)
    torch.testing.assert_close(logits, (hidden @ tensors["1.2.weight"].T)[:, None].expand(2, 4, V))
    assert heads.num_levels == HEADS


def test_medusa_heads_without_an_lm_head_use_the_targets(tmp_path):
    tensors = {name: tensor for name, tensor in medusa().items() if ".2." not in name}
    heads = load_medusa(publish(tmp_path, MEDUSA, tensors, "medusa_lm_head.pt"), TARGET)
    feature, lm_head = torch.randn(2, H), torch.randn(V, H)
    logits = heads.logits(
        0, feature, torch.zeros(2, 1, 1, H), target_logits=lambda hidden: hidden @ lm_head.T
    )
    torch.testing.assert_close(logits[:, 0], heads[0](feature) @ lm_head.T)


@pytest.mark.parametrize("file", ["hydra_lm_head.pt", "hydra_lm_head.safetensors"])
def test_a_hydra_head_reads_the_feature_then_the_path(tmp_path, file):
    tensors, feature, path = hydra(), torch.randn(2, H), torch.randn(2, 3, 2, H)
    heads = load_hydra(publish(tmp_path, HYDRA, tensors, file), TARGET)
    for b, f in ((0, 2), (1, 0)):
        x = torch.cat([feature[b], path[b, f, 0], path[b, f, 1]])
        wide = {key: tensors[f"hydra_mlp.1.0.{key}"] for key in ("linear.weight", "linear.bias")}
        kept = (
            tensors["hydra_mlp.1.0.res_connection.weight"] @ x
            + tensors["hydra_mlp.1.0.res_connection.bias"]
        )
        hidden = kept + silu(wide["linear.weight"] @ x + wide["linear.bias"])
        hidden = hidden + silu(
            tensors["hydra_mlp.1.1.linear.weight"] @ hidden + tensors["hydra_mlp.1.1.linear.bias"]
        )
        wanted = tensors["hydra_lm_head.1.weight"] @ hidden + tensors["hydra_lm_head.1.bias"]
        torch.testing.assert_close(heads.logits(1, feature, path, target_logits=None)[b, f], wanted)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"1.0.linear.bias": None}, "missing 1.0.linear.bias"),
        ({"1.0.strange": torch.ones(1)}, "unexpected 1.0.strange"),
        ({"0.2.weight": torch.ones(V + 1, H)}, r"0.2.weight is \(21, 8\), wanted \(20, 8\)"),
    ],
)
def test_what_does_not_fit_is_named_before_weights_are_read(tmp_path, change, fault):
    tensors = {name: tensor for name, tensor in (medusa() | change).items() if tensor is not None}
    path = publish(tmp_path, MEDUSA, tensors, "medusa_lm_head.safetensors")
    with pytest.raises(EngineError, match=f"not Medusa heads of this target: {fault}$"):
        check_medusa(path, TARGET)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            {"hydra_head_arch": "prefix-mlp"},
            "with hydra_head_arch 'prefix-mlp' are not run here, only with 'mlp'",
        ),
        ({"grounded_heads": False}, "with grounded_heads False"),
        (
            {"hydra_num_heads": None},
            "hydra_num_heads in config.json must be an integer, 1 or more, got None",
        ),
        ({"hydra_num_heads": 4}, "missing hydra_lm_head.3.bias"),
    ],
)
def test_hydra_heads_of_other_kinds_are_refused(tmp_path, change, fault):
    with pytest.raises(EngineError, match=fault):
        check_hydra(publish(tmp_path, HYDRA | change, hydra(), "hydra_lm_head.pt"), TARGET)


def test_files_that_are_missing_or_damaged_are_named(tmp_path):
    with pytest.raises(EngineError, match=r"has no config\.json"):
        check_medusa(tmp_path, TARGET)
    publish(tmp_path, MEDUSA, medusa(), "medusa_lm_head.pt")
    with pytest.raises(
        EngineError, match=r"holds neither hydra_lm_head\.safetensors nor hydra_lm_head\.pt"
    ):
        (tmp_path / "config.json").write_text(json.dumps(HYDRA))
        check_hydra(tmp_path, TARGET)
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"short")
    (tmp_path / "config.json").write_text(json.dumps(MEDUSA))
    with pytest.raises(EngineError, match=r"medusa_lm_head\.pt cannot be read"):
        load_medusa(tmp_path, TARGET)
