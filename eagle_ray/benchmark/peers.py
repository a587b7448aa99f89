"""Peers: what transformers itself makes of the same weights, where it can: generate with a static cache, compiled, and
continuous batching.

    tokens_per_second("static", model, prompts, num_tokens=64)

Raises whatever transformers raises: who asks must expect anything, time without end included. Does not know our engine.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch
from torch import nn

from eagle_ray.benchmark.device import synchronize

Run = Callable[[nn.Module, list[list[int]], int], int]


def tokens_per_second(peer: str, model: nn.Module, prompts: list[list[int]], num_tokens: int) -> float:
    """Prompts and num_tokens tokens after each of them, on the second run: the first one compiles."""
    run = PEERS[peer]
    run(model, prompts, num_tokens)
    synchronize(model.device)
    started = time.perf_counter()
    made = run(model, prompts, num_tokens)
    synchronize(model.device)
    return made / (time.perf_counter() - started)


@torch.inference_mode()
def _static(model: nn.Module, prompts: list[list[int]], num_tokens: int) -> int:
    """One length for all: transformers pads, and would have to attend to it."""
    shortest = min(map(len, prompts))
    ids = torch.tensor([prompt[-shortest:] for prompt in prompts], device=model.device)
    model.set_attn_implementation("sdpa")
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        cache_implementation="static",
    )
    return out.shape[0] * (out.shape[1] - ids.shape[1])


def _continuous(model: nn.Module, prompts: list[list[int]], num_tokens: int) -> int:
    model.set_attn_implementation("sdpa")
    config = copy.deepcopy(model.generation_config)
    config.update(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
    return sum(len(output.generated_tokens) for output in outputs.values())


PEERS: dict[str, Run] = {"static": _static, "continuous": _continuous}
