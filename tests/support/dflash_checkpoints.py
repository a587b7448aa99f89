"""Random DFlash heads for the toy Llama as they are published, and the published equations, written out by keys."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from eagle_ray.methods.dflash.checkpoint import load_dflash
from eagle_ray.methods.dflash.heads import DFlashHead
from tests.support.toy_models import LLAMA

HIDDEN, VOCAB, HEADS, KV_HEADS, DIM, INNER = 32, 97, 4, 2, 8, 40
NUM_LAYERS, BLOCK, MASK, EPS = 2, 6, 90, 1e-6
LAYERS = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=DIM,
    hidden_act="silu",
    rms_norm_eps=EPS,
    attention_bias=False,
    rope_theta=10000,
    layer_types=["full_attention"] * NUM_LAYERS,
)


def zlab_config(num_target_layers: int = 2, ids: tuple[int, ...] = (0,), **dflash: Any) -> dict[str, Any]:
    """A config.json in z-lab's layout; `dflash` is added to its dflash_config."""
    section = {"mask_token_id": MASK, "target_layer_ids": list(ids), **dflash}
    top = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": BLOCK}
    return {**top, "num_target_layers": num_target_layers, **LAYERS, "dflash_config": section}


def speculators_config(ids: tuple[int, ...] = (0, 1), **top: Any) -> dict[str, Any]:
    """A config.json in speculators' layout, with a draft vocabulary of 40 tokens."""
    own = {"block_size": BLOCK, "mask_token_id": MASK, "aux_hidden_state_layer_ids": list(ids), "draft_vocab_size": 40}
    return {"speculators_model_type": "dflash", "transformer_layer_config": dict(LAYERS), **own, **top}


def tensors_of(config: dict[str, Any], seed: int = 3) -> dict[str, Tensor]:
    """Random tensors under the published names."""
    random = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=random) * (1.5 / math.sqrt(columns))

    def norm(size: int = HIDDEN) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=random)

    is_speculators = "speculators_model_type" in config
    ids = config["aux_hidden_state_layer_ids"] if is_speculators else config["dflash_config"]["target_layer_ids"]
    tensors = {"fc.weight": matrix(HIDDEN, len(ids) * HIDDEN), "hidden_norm.weight": norm(), "norm.weight": norm()}
    for i in range(NUM_LAYERS):
        for name, rows in (("q", HEADS * DIM), ("k", KV_HEADS * DIM), ("v", KV_HEADS * DIM)):
            tensors[f"layers.{i}.self_attn.{name}_proj.weight"] = matrix(rows, HIDDEN)
        tensors[f"layers.{i}.self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * DIM)
        for name in ("q_norm", "k_norm"):
            tensors[f"layers.{i}.self_attn.{name}.weight"] = norm(DIM)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"layers.{i}.{name}.weight"] = norm()
        for name, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            tensors[f"layers.{i}.mlp.{name}_proj.weight"] = matrix(*shape)
    if is_speculators:
        chosen = torch.randperm(VOCAB, generator=random)[:40].sort().values
        tensors |= {"embed_tokens.weight": matrix(VOCAB, HIDDEN), "lm_head.weight": matrix(40, HIDDEN)}
        tensors |= {"d2t": chosen - torch.arange(40), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}
        tensors["t2d"][chosen] = True
    return tensors


def publish(path: Path, config: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors_of(config) if tensors is None else tensors, path / "model.safetensors")
    return path


def toy_config(num_layers: int = 2) -> LlamaConfig:
    return LlamaConfig(**{**LLAMA, "num_hidden_layers": num_layers})


def published_head(path: Path, config: dict[str, Any], num_target_layers: int = 2) -> DFlashHead:
    """Publish a random head and load it."""
    return load_dflash(publish(path, config), toy_config(num_target_layers)).requires_grad_(False)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotate(x: Tensor, position: int) -> Tensor:
    """One head's vector, turned by the angles of a position."""
    half = DIM // 2
    angles = position * torch.tensor([10000.0 ** (-i / half) for i in range(half)])
    a, b = x[:half], x[half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])


def published_outputs(
    tensors: dict[str, Tensor],
    block: Tensor,
    features: Tensor,
    *,
    causal: bool,
    windows: tuple[int | None, ...] = (None,) * NUM_LAYERS,
) -> Tensor:
    """The outputs of one block, row by row and head by head.

    block: embeddings [N, H] of the root and of masks. features: [T, F], of the T tokens before the root.
    """
    context = rms_norm(features @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    hidden, start = block, len(features)
    for i in range(NUM_LAYERS):
        weights = {k.removeprefix(f"layers.{i}."): v for k, v in tensors.items() if k.startswith(f"layers.{i}.")}
        own = rms_norm(hidden, weights["input_layernorm.weight"])
        rows = torch.cat([context, own])
        out = torch.stack(
            [attended(weights, own[n], rows, start + n, start, causal, windows[i]) for n in range(len(block))]
        )
        hidden = hidden + out @ weights["self_attn.o_proj.weight"].T
        own = rms_norm(hidden, weights["post_attention_layernorm.weight"])
        gate, up = own @ weights["mlp.gate_proj.weight"].T, own @ weights["mlp.up_proj.weight"].T
        hidden = hidden + (gate * gate.sigmoid() * up) @ weights["mlp.down_proj.weight"].T
    return rms_norm(hidden, tensors["norm.weight"])


def attended(
    weights: dict[str, Tensor], own: Tensor, rows: Tensor, position: int, start: int, causal: bool, window: int | None
) -> Tensor:
    """One row's attention. rows: the context, then the block, which begins at position `start`."""
    seen = [j for j in range(len(rows)) if not (causal and j > position)]
    seen = [j for j in seen if window is None or position - j < window]
    outputs = []
    for head in range(HEADS):
        mine, theirs = slice(head * DIM, (head + 1) * DIM), head // (HEADS // KV_HEADS)
        shared = slice(theirs * DIM, (theirs + 1) * DIM)
        query = rms_norm(weights["self_attn.q_proj.weight"][mine] @ own, weights["self_attn.q_norm.weight"])
        query = rotate(query, position)
        keys = [
            rms_norm(weights["self_attn.k_proj.weight"][shared] @ rows[j], weights["self_attn.k_norm.weight"])
            for j in seen
        ]
        scores = torch.stack([query @ rotate(key, j) for key, j in zip(keys, seen, strict=True)]) / math.sqrt(DIM)
        values = torch.stack([weights["self_attn.v_proj.weight"][shared] @ rows[j] for j in seen])
        outputs.append(scores.softmax(0) @ values)
    return torch.cat(outputs)
