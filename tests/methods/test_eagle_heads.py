"""The heads compute what the papers' formulas say, written out slowly here from the facts."""

import pytest
import torch

from eagle_ray.methods.eagle.checkpoint import load_head
from tests.support.checkpoints import (
    E3,
    LLAMA3_ROPE,
    RAW,
    eagle3_tensors,
    eagle_tensors,
    target_config,
    write,
)
from tests.support.eagle_formulas import decoder_layer, rms_norm

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
    found = load_head(write(tmp_path, tensors, raw), TARGET)(
        embeddings[None], features[None], positions()
    )
    torch.testing.assert_close(found[0], wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", [*VARIANTS, "narrow", "norm_before_residual"])
@torch.inference_mode()
def test_eagle3_is_the_formula(tmp_path, variant):
    narrow = {"hidden_size": 16, "target_hidden_size": 32}
    raw = (
        E3
        | ({"narrow": narrow, "norm_before_residual": {"norm_before_residual": True}} | VARIANTS)[
            variant
        ]
    )
    tensors, width = eagle3_tensors(raw), raw["hidden_size"]
    generator = torch.Generator().manual_seed(1)
    taps, tokens = (
        torch.randn(LENGTH, 96, generator=generator),
        torch.randint(97, (LENGTH,), generator=generator),
    )
    embeddings = tensors.get("embed_tokens.weight", torch.randn(97, width, generator=generator))[
        tokens
    ]
    h = taps @ tensors["fc.weight"].T
    normed = rms_norm(raw, h, tensors["midlayer.hidden_norm.weight"])
    a = torch.cat(
        [rms_norm(raw, embeddings, tensors["midlayer.input_layernorm.weight"]), normed], -1
    )
    h = decoder_layer(
        raw, tensors, "midlayer.", a, normed if variant == "norm_before_residual" else h
    )
    head = load_head(write(tmp_path, tensors, raw), TARGET)
    found = head(embeddings[None], head.project_features(taps)[None], positions())[0]
    torch.testing.assert_close(found, h, atol=2e-5, rtol=1e-5)
    logits = rms_norm(raw, h, tensors["norm.weight"]) @ tensors["lm_head.weight"].T
    torch.testing.assert_close(head.logits(found, None), logits, atol=2e-5, rtol=1e-5)


def positions():
    return torch.arange(LENGTH)[None]
