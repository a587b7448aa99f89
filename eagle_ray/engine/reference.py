"""Plain decoding, slow and obvious: the oracle that every clever path is held equal to.

One prompt at a time, one token a pass, transformers' own attention and cache. Shares with the engine only the pick,
whose noise is a function of (seed, position, token). Does not know trees, slots or batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eagle_ray.speculative.sampling import BatchSampling, SamplingParams, gumbel_noise, pick, process


@dataclass(frozen=True, slots=True)
class PlainOutput:
    """Output ids, EOS included; margins[i]: how far the chosen token's score, noise added, led the second best.

    Outputs of two exact implementations may part only where the margin is within floating-point error.
    """

    ids: list[int]
    margins: list[float]


@torch.inference_mode()
def decode_plainly(
    model: nn.Module, prompt_ids: list[int], params: SamplingParams, eos_ids: frozenset[int]
) -> PlainOutput:
    """Decode one prompt with a transformers causal LM whose attention is transformers' own (eager or sdpa)."""
    sampling = BatchSampling.of([params])
    ids, margins, cache = list(prompt_ids), [], None
    chunk = torch.tensor([ids])
    while len(ids) - len(prompt_ids) < params.max_tokens:
        out = model(chunk, past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[:, -1]
        token = pick(logits, sampling, torch.tensor([0]), torch.tensor([len(ids)])).item()
        margins.append(margin(logits, sampling, len(ids)))
        ids.append(token)
        if token in eos_ids and not params.ignore_eos:
            break
        chunk = torch.tensor([[token]])
    return PlainOutput(ids[len(prompt_ids) :], margins)


def margin(logits: Tensor, sampling: BatchSampling, position: int) -> float:
    """How far the best score leads the second best, noise included. logits: [1, V], of the token at `position`."""
    scores = logits.float()
    if sampling.any_sampled:
        noise = gumbel_noise(sampling.seed, torch.tensor([position]), torch.arange(logits.shape[-1]))
        scores = process(logits, sampling, torch.tensor([0])) + noise
    first, second = scores[0].topk(2).values.tolist()
    return first - second
