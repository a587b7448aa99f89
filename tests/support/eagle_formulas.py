"""The layers of draft heads as the papers' formulas say, written out slowly over one sequence.

y = decoder_layer(raw, tensors, "layers.0.", x, residual=x)      # raw: config.json; tensors: by published names
"""

import math

import torch


def decoder_layer(raw, tensors, prefix, x, residual, window=None):
    """Causal attention that reads x, then the gated MLP, both added to the residual."""
    h = residual + attention(raw, tensors, prefix + "self_attn.", x, window)
    y = rms_norm(raw, h, tensors[prefix + "post_attention_layernorm.weight"])
    gate, up, down = (
        tensors[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up", "down")
    )
    return h + (torch.nn.functional.silu(y @ gate) * (y @ up)) @ down


def attention(raw, tensors, prefix, x, window=None):
    """Rows see themselves and the rows before them, `window` of them in all if it is given.

    Queries and keys are normed head by head if the tensors have q_norm and k_norm.
    """
    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    head_dim = raw.get("head_dim", raw["hidden_size"] // heads)
    q, k, v = (
        (
            x @ tensors[f"{prefix}{name}_proj.weight"].T
            + tensors.get(f"{prefix}{name}_proj.bias", 0)
        ).view(len(x), -1, head_dim)
        for name in "qkv"
    )
    if prefix + "q_norm.weight" in tensors:
        q = rms_norm(raw, q, tensors[prefix + "q_norm.weight"])
        k = rms_norm(raw, k, tensors[prefix + "k_norm.weight"])
    q, k = (rotated(raw, part) for part in (q, k))
    hidden = torch.ones(len(x), len(x)).triu(1).bool()
    if window is not None:
        hidden |= torch.ones(len(x), len(x)).tril(-window).bool()
    outputs = []
    for i in range(heads):
        j = i * kv_heads // heads
        scores = q[:, i] @ k[:, j].T / math.sqrt(head_dim)
        scores = scores.masked_fill(hidden, -torch.inf)
        outputs.append(scores.softmax(-1) @ v[:, j])
    out = torch.cat(outputs, -1) @ tensors[prefix + "o_proj.weight"].T
    return out + tensors.get(prefix + "o_proj.bias", 0)


def rotated(raw, part):
    """Pair (i, i + half) of a row at position p turned by p * frequency(i).

    With a partial_rotary_factor these are pairs of the first numbers of a head; the others stay.
    """
    factor = raw.get("partial_rotary_factor", 1)
    part, rest = part.tensor_split([int(part.shape[-1] * factor)], -1)
    half = part.shape[-1] // 2
    angles = torch.arange(len(part))[:, None, None] * torch.tensor(
        [frequency(raw, i / half) for i in range(half)]
    )
    a, b = part[..., :half], part[..., half:]
    turned = [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()]
    return torch.cat([*turned, rest], -1)


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
