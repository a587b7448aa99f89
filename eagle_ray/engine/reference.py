"""Plain decoding, slow and obvious: the oracle that every clever path is held equal to.

One prompt at a time, one token a pass, transformers' own attention and cache. Shares with the engine only the pick,
whose noise is a function of (seed, position, token).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from eagle_ray.sampling.near_tie import NEAR_TIE, reachable_tokens
from eagle_ray.sampling.sampler import SamplingBatch, SamplingParams, sample


@dataclass(frozen=True, slots=True)
class PlainOutput:
    """One decoded prompt.

    Attributes:
        ids: output ids, EOS included.
        reachable: for each output id, the tokens that floating-point error could have made it. Outputs of two exact
            implementations may first differ only in one of these.
    """

    ids: list[int]
    reachable: list[frozenset[int]]


@torch.inference_mode()
def reference_decode(
    model: nn.Module, prompt_ids: list[int], params: SamplingParams, eos_ids: frozenset[int]
) -> PlainOutput:
    """Decode one prompt with a transformers causal LM whose attention is transformers' own (eager or sdpa)."""
    sampling = SamplingBatch.of([params])
    ids, reachable, cache = list(prompt_ids), [], None
    chunk = torch.tensor([ids])
    while len(ids) - len(prompt_ids) < params.max_tokens:
        out = model(chunk, past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[:, -1]
        token = sample(logits, sampling, torch.tensor([0]), torch.tensor([len(ids)])).item()
        tokens = reachable_tokens(logits[0], params, len(ids), NEAR_TIE[torch.float32])
        reachable.append(frozenset(tokens.nonzero().flatten().tolist()))
        ids.append(token)
        if token in eos_ids and not params.ignore_eos:
            break
        chunk = torch.tensor([[token]])
    return PlainOutput(ids[len(prompt_ids) :], reachable)
