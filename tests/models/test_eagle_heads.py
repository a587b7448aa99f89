"""The heads compute what the papers' formulas say, written out slowly here from the facts."""

import math

import pytest
import torch

from eagle_ray.models.head_checkpoint import load_head
from tests.helpers.published_checkpoints import (
    E3,
    LLAMA3_ROPE,
    RAW,
    eagle3_tensors,
    eagle_tensors,
    target_config,
    write,
)

TARGET = target_config()
LENGTH = 40
VARIANTS = {
    "plain": {},
    "theta": {"rope_theta": 500000.0},
    "no fc bias": {"bias": False},
    "qkv bias": {"qkv_bias": True},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE},
    "head_dim": {"head_dim": 16},
    "all": {"qkv_bias": True, "head_dim": 16, "rope_scaling": LLAMA3_ROPE},
}


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_eagle_is_the_formula(tmp_path, variant):
    raw = RAW | VARIANTS[variant]
    tensors = eagle_tensors(raw)
    embeddings, features = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(1))
    x = torch.cat([embeddings, features], -1) @ tensors["fc.weight"].T + tensors.get("fc.bias", 0)
    wanted = decoder_layer(raw, tensors, "layers.0.", x, x)
    found = load_head(write(tmp_path, tensors, raw), TARGET)(embeddings[None], features[None], positions())
    torch.testing.assert_close(found[0], wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", [*VARIANTS, "narrow", "norm_before_residual"])
@torch.inference_mode()
def test_eagle3_is_the_formula(tmp_path, variant):
    narrow = {"hidden_size": 16, "target_hidden_size": 32}
    raw = E3 | ({"narrow": narrow, "norm_before_residual": {"norm_before_residual": True}} | VARIANTS)[variant]
    tensors, width = eagle3_tensors(raw), raw["hidden_size"]
    generator = torch.Generator().manual_seed(1)
    taps, tokens = torch.randn(LENGTH, 96, generator=generator), torch.randint(97, (LENGTH,), generator=generator)
    embeddings = tensors.get("embed_tokens.weight", torch.randn(97, width, generator=generator))[tokens]
    h = taps @ tensors["fc.weight"].T
    normed = rms_norm(raw, h, tensors["midlayer.hidden_norm.weight"])
    a = torch.cat([rms_norm(raw, embeddings, tensors["midlayer.input_layernorm.weight"]), normed], -1)
    h = decoder_layer(raw, tensors, "midlayer.", a, normed if variant == "norm_before_residual" else h)
    head = load_head(write(tmp_path, tensors, raw), TARGET)
    found = head(embeddings[None], head.project_features(taps)[None], positions())[0]
    torch.testing.assert_close(found, h, atol=2e-5, rtol=1e-5)
    logits = rms_norm(raw, h, tensors["norm.weight"]) @ tensors["lm_head.weight"].T
    torch.testing.assert_close(head.logits(found, None), logits, atol=2e-5, rtol=1e-5)


def positions():
    return torch.arange(LENGTH)[None]


def decoder_layer(raw, tensors, prefix, x, residual):
    """Causal attention that reads x, then the gated MLP, both added to the residual."""
    h = residual + attention(raw, tensors, prefix + "self_attn.", x)
    y = rms_norm(raw, h, tensors[prefix + "post_attention_layernorm.weight"])
    gate, up, down = (tensors[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
    return h + (torch.nn.functional.silu(y @ gate) * (y @ up)) @ down


def attention(raw, tensors, prefix, x):
    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    head_dim = raw.get("head_dim", raw["hidden_size"] // heads)
    q, k, v = (
        (x @ tensors[f"{prefix}{name}_proj.weight"].T + tensors.get(f"{prefix}{name}_proj.bias", 0)).view(
            LENGTH, -1, head_dim
        )
        for name in "qkv"
    )
    q, k = (rotated(raw, part) for part in (q, k))
    outputs = []
    for i in range(heads):
        j = i * kv_heads // heads
        scores = q[:, i] @ k[:, j].T / math.sqrt(head_dim)
        scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
        outputs.append(scores.softmax(-1) @ v[:, j])
    return torch.cat(outputs, -1) @ tensors[prefix + "o_proj.weight"].T


def rotated(raw, part):
    """Pair (i, i + half) of a row at position p turned by p * frequency(i)."""
    half = part.shape[-1] // 2
    angles = torch.arange(LENGTH)[:, None, None] * torch.tensor([frequency(raw, i / half) for i in range(half)])
    a, b = part[..., :half], part[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def frequency(raw, exponent):
    """Llama-3's scaling keeps short waves, stretches long ones by `factor` and mixes between."""
    base, rope = raw.get("rope_theta", 10000.0) ** -exponent, raw.get("rope_scaling")
    if rope is None:
        return base
    if rope.get("type") == "linear":
        return base / rope["factor"]
    turns = rope["original_max_position_embeddings"] * base / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = min(max((turns - low) / (high - low), 0.0), 1.0)
    return kept * base + (1 - kept) * base / rope["factor"]


def rms_norm(raw, x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + raw["rms_norm_eps"]).sqrt() * weight
