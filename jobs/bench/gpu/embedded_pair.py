"""The embedded pair at its own size, and held-out prompts for it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import nn

import eagle_ray
from eagle_ray.methods.eagle.checkpoint import load_head
from eagle_ray.models.loader import load_causal_lm
from eagle_ray.text.tokenizer import Tokenizer
from jobs.bench.prompts import prompt_rows

ASSETS = Path(eagle_ray.__file__).parent / "assets" / "tiny"
PER_CATEGORY = 32  # prompts
SEED = 7  # of the prompts


@cache
def embedded_pair(dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, nn.Module]:
    """Target and head, loaded once."""
    model = load_causal_lm(ASSETS / "target", dtype, str(device))
    return model, load_head(ASSETS / "draft", model.config).to(device, dtype).eval()


def embedded_prompts() -> list[list[int]]:
    """Return held-out prompts of the six categories, in turn."""
    text = Tokenizer.load(ASSETS / "target")
    rows = [text.encode_chat(row["messages"]) for row in prompt_rows(per_category=PER_CATEGORY, seed=SEED)]
    return [ids for i in range(PER_CATEGORY) for ids in rows[i::PER_CATEGORY]]
