"""Whether two ways of decoding gave the same tokens, and where they parted, whether plain decoding was nearly tied.

Greedy only. Does not know engines.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

NEAR_TIE = 1e-4  # one row against many moves fp32 logits by up to 2e-5


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


def compare(model: nn.Module, prompts: list[list[int]], outputs: list[list[int]], plain: list[list[int]]) -> Identity:
    """Each prompt's output beside plain decoding's, as far as both go; empty ones are not compared."""
    identity = Identity()
    for prompt, ids, wanted in zip(prompts, outputs, plain, strict=False):
        place = first_difference(ids, wanted)
        if place is not None:
            identity += Identity(1, 0, margin(model, prompt + wanted[:place]) <= NEAR_TIE)
        elif ids and wanted:
            identity += Identity(1, 1)
    return identity


def first_difference(ids: list[int], others: list[int]) -> int | None:
    """None where one begins with the other."""
    return next((i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), None)


@torch.inference_mode()
def margin(model: nn.Module, ids: list[int]) -> float:
    """How far the best next token's logit leads the second best."""
    tokens = torch.tensor([ids], device=model.device)
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[:, -1]
    first, second = model.get_output_embeddings()(hidden)[0].float().topk(2).values.tolist()
    return first - second
