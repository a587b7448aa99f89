"""Published draft-head layouts: a directory with config.json and weights <-> an EagleHead.

Reads safetensors or (weights only) pickled files, single or sharded. Missing, unexpected and misshapen tensors are
refused by name. Reads the raw JSON, never a config class that fills in defaults: an absent rope_theta means 10000.
Does not know the target beyond the numbers a head must share with it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from eagle_ray.errors import EngineError
from eagle_ray.models.heads import EagleHead

PUBLISHED_ROPE_THETA = 10000.0
EAGLE3_KEYS = ("midlayer.", "d2t", "t2d")
IGNORED_KEYS = ("rotary_emb.inv_freq",)  # buffers that old transformers saved; recomputed from the config


def load_head(path: Path, hidden_size: int, vocab_size: int) -> EagleHead:
    """The head published in `path`, in fp32.

    hidden_size, vocab_size: the target's. Raises EngineError naming the file, the key and the numbers that differ.
    """
    raw = json.loads((path / "config.json").read_text())
    tensors = {key: value for key, value in read_tensors(path).items() if not key.endswith(IGNORED_KEYS)}
    if any(key.startswith(EAGLE3_KEYS) for key in tensors):
        raise EngineError(
            f"{path} is an EAGLE-3 head (it has {EAGLE3_KEYS[0]}* keys); this release runs EAGLE-1/2 heads"
        )
    _require_equal(path, "hidden_size", raw["hidden_size"], hidden_size)
    _require_equal(path, "vocab_size", raw["vocab_size"], vocab_size)
    head = EagleHead(head_config(raw), bias=raw.get("bias", True), own_embedding="embed_tokens.weight" in tensors)
    _check_tensors(path, head.state_dict(), tensors)
    head.load_state_dict(tensors)
    return head


def head_config(raw: dict) -> LlamaConfig:
    """The head's Llama shape from its raw config.json; it has one layer whatever num_hidden_layers says."""
    heads = raw["num_attention_heads"]
    rope = {"rope_type": "default", **(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    rope.setdefault("rope_theta", raw.get("rope_theta", PUBLISHED_ROPE_THETA))
    return LlamaConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        hidden_act=raw.get("hidden_act", "silu"),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        attention_bias=raw.get("qkv_bias", False),
        rope_parameters=rope,
    )


def save_head(head: EagleHead, raw_config: dict, path: Path) -> None:
    """Write the published layout: config.json as given and model.safetensors in bf16."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw_config, indent=2) + "\n")
    tensors = {key: value.detach().to(torch.bfloat16).contiguous() for key, value in head.state_dict().items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint directory: model.safetensors or pytorch_model.bin, single or with an index."""
    for name, read in (("model.safetensors", load_file), ("pytorch_model.bin", _load_pickle)):
        index = path / f"{name}.index.json"
        if (path / name).exists():
            return read(path / name)
        if index.exists():
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            return {key: value for shard in shards for key, value in read(path / shard).items()}
    raise EngineError(f"{path} has neither model.safetensors nor pytorch_model.bin")


def _load_pickle(path: Path) -> dict[str, Tensor]:
    return torch.load(path, map_location="cpu", weights_only=True)


def _require_equal(path: Path, key: str, head: int, target: int) -> None:
    if head != target:
        raise EngineError(f"{path}: the head's {key} is {head} and the target's is {target}: they are not a pair")


def _check_tensors(path: Path, wanted: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    missing, unexpected = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    shapes = [
        f"{key} is {tuple(found[key].shape)}, wanted {tuple(wanted[key].shape)}"
        for key in sorted(wanted.keys() & found.keys())
        if found[key].shape != wanted[key].shape
    ]
    faults = [f"missing {', '.join(missing)}"] if missing else []
    faults += [f"unexpected {', '.join(unexpected)}"] if unexpected else []
    if faults or shapes:
        raise EngineError(f"{path}: not an EAGLE-1/2 head: {'; '.join(faults + shapes)}")
