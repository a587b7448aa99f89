"""Heads as they are published: tensors by the facts' own key names and shapes, not by our modules'.

path = write(tmp_path, eagle3_tensors(E3), E3, "sharded safetensors")
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from tests.support.toy_models import LLAMA

RAW: dict[str, Any] = {  # of an EAGLE-1/2 head for `toy.llama`
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
E3: dict[str, Any] = RAW | {"draft_vocab_size": 60}  # of an EAGLE-3 head for `toy.llama` with 8 layers
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LAYOUTS = ["safetensors", "bin", "old bin", "sharded safetensors", "sharded bin"]
Tensors = dict[str, Tensor]


def target_config(**shape: object) -> LlamaConfig:
    """Of a target that both heads go with."""
    return LlamaConfig(**LLAMA | {"num_hidden_layers": 8} | shape)


def eagle_tensors(raw: dict[str, Any] = RAW, seed: int = 0) -> Tensors:
    """EAGLE-1 and 2: fc.bias as the config's `bias` says, default true; biases of q, k and v as `qkv_bias` says."""
    shapes = _layer("layers.0.", raw, raw["hidden_size"]) | {"fc.weight": (raw["hidden_size"], 2 * raw["hidden_size"])}
    if raw.get("bias", True):
        shapes["fc.bias"] = (raw["hidden_size"],)
    return _random(shapes, seed)


def eagle3_tensors(raw: dict[str, Any] = E3, seed: int = 0) -> Tensors:
    """EAGLE-3, with an unsorted choice of the target's tokens; embed_tokens where `target_hidden_size` is set.

    With the norms of EAGLE-3.1 that `fc_norm` and `norm_before_fc` switch on.
    """
    width, vocab_size = raw["hidden_size"], raw["vocab_size"]
    target_width = raw.get("target_hidden_size", width)
    shapes = _layer("midlayer.", raw, 2 * width) | {
        "midlayer.hidden_norm.weight": (width,),
        "midlayer.input_layernorm.weight": (width,),
        "norm.weight": (width,),
        "fc.weight": (width, 3 * target_width),
        "lm_head.weight": (raw["draft_vocab_size"], width),
    }
    if "target_hidden_size" in raw:
        shapes["embed_tokens.weight"] = (vocab_size, width)
    if raw.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (target_width,) for i in range(3)}
    if raw.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * target_width,)
    chosen = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))[: raw["draft_vocab_size"]]
    return _random(shapes, seed) | maps(chosen, vocab_size)


def maps(chosen: Tensor, vocab_size: int) -> Tensors:
    """d2t: offsets to the chosen tokens; t2d: which of the target's they are."""
    mask = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, chosen, True)
    return {"d2t": chosen - torch.arange(len(chosen)), "t2d": mask}


def write(path: Path, tensors: Tensors, raw: dict[str, Any] = RAW, layout: str = "safetensors") -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    kind = layout.split()[-1]
    name = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}[kind]
    if not layout.startswith("sharded"):
        _save(tensors, path / name, layout)
        return path
    shards = {key: f"part-{i % 2}.{kind}" for i, key in enumerate(tensors)}
    for shard in set(shards.values()):
        _save({key: tensor for key, tensor in tensors.items() if shards[key] == shard}, path / shard, kind)
    (path / f"{name}.index.json").write_text(json.dumps({"weight_map": shards}))
    return path


def _save(tensors: Tensors, file: Path, layout: str) -> None:
    if layout == "safetensors":
        save_file(tensors, file)
    else:
        torch.save(tensors, file, _use_new_zipfile_serialization=layout != "old bin")


def _layer(prefix: str, raw: dict[str, Any], inputs: int) -> dict[str, tuple[int, ...]]:
    width, middle = raw["hidden_size"], raw["intermediate_size"]
    head_dim = raw.get("head_dim", width // raw["num_attention_heads"])
    sizes = {name: raw[f"num_{kind}_heads"] * head_dim for name, kind in zip("qkv", KINDS, strict=True)}
    shapes = {f"self_attn.{name}_proj.weight": (size, inputs) for name, size in sizes.items()}
    if raw.get("qkv_bias"):
        shapes |= {f"self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    shapes |= {
        "self_attn.o_proj.weight": (width, sizes["q"]),
        "mlp.gate_proj.weight": (middle, width),
        "mlp.up_proj.weight": (middle, width),
        "mlp.down_proj.weight": (width, middle),
        "post_attention_layernorm.weight": (width,),
    }
    return {prefix + name: shape for name, shape in shapes.items()}


KINDS = ("attention", "key_value", "key_value")


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> Tensors:
    """Large enough that every tensor matters: norms near one, the others of the size of one over a row's root."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {
        name: 1 + 0.3 * t if "norm" in name else t / t.shape[-1] ** 0.5 if t.ndim > 1 else 0.5 * t
        for name, t in tensors.items()
    }
