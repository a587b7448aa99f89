"""Whether two ways of decoding gave the same tokens, and where they parted, whether plain decoding was nearly tied.

Does not know engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat

import torch
from torch import nn

from eagle_ray.engine import reference
from eagle_ray.speculative.sampling import BatchSampling, SamplingParams

NEAR_TIE = 1e-4  # one row against many moves fp32 logits by up to 2e-5
GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class Identity:
    """Counts of outputs. num_near_ties: of those that differ, at a place where the top two logits were nearly equal."""

    num_compared: int = 0
    num_equal: int = 0
    num_near_ties: int = 0

    def __add__(self, other: Identity) -> Identity:
        return Identity(
            self.num_compared + other.num_compared,
            self.num_equal + other.num_equal,
            self.num_near_ties + other.num_near_ties,
        )


def compare(
    model: nn.Module,
    prompts: list[list[int]],
    outputs: list[list[int]],
    plain: list[list[int]],
    params: list[SamplingParams] | None = None,
    near_tie: float = NEAR_TIE,
) -> Identity:
    """Each prompt's output beside plain decoding's, as far as both go; empty ones are not compared.

    params: how each was sampled; None is greedily. near_tie: what one row against many moves logits by.
    """
    identity = Identity()
    for prompt, ids, wanted, sampling in zip(prompts, outputs, plain, params or repeat(GREEDY), strict=False):
        place = first_difference(ids, wanted)
        if place is not None:
            identity += Identity(1, 0, margin(model, prompt + wanted[:place], sampling) <= near_tie)
        elif ids and wanted:
            identity += Identity(1, 1)
    return identity


def first_difference(ids: list[int], others: list[int]) -> int | None:
    """None where one begins with the other."""
    return next((i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), None)


@torch.inference_mode()
def margin(model: nn.Module, ids: list[int], params: SamplingParams = GREEDY) -> float:
    """How far the best next token's score leads the second best: logits, with the noise where it is sampled."""
    tokens = torch.tensor([ids], device=model.device)
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[:, -1]
    logits = model.get_output_embeddings()(hidden).cpu()
    return reference.margin(logits, BatchSampling.of([params]), len(ids))
