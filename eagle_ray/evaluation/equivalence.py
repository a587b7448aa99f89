"""Whether two ways of decoding gave the same tokens, and where they parted, whether plain decoding was nearly tied."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat

import torch
from jaxtyping import Float
from torch import Tensor

from eagle_ray.models.loader import CausalLM
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.sampling.near_tie import NEAR_TIE, rounding_cause

GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class Equivalence:
    """How many outputs were compared, and why the others differ.

    Attributes:
        num_near_ties: outputs that first differ where both tokens' scores were nearly equal.
        num_edges: outputs that first differ where a token crosses the edge of top-k, top-p or min-p.
    """

    num_compared: int = 0
    num_equal: int = 0
    num_near_ties: int = 0
    num_edges: int = 0

    def __add__(self, other: Equivalence) -> Equivalence:
        return Equivalence(
            self.num_compared + other.num_compared,
            self.num_equal + other.num_equal,
            self.num_near_ties + other.num_near_ties,
            self.num_edges + other.num_edges,
        )

    @property
    def is_explained(self) -> bool:
        """Return whether at least one output was compared and rounding explains all differences."""
        return self.num_equal + self.num_near_ties + self.num_edges == self.num_compared > 0


def compare(
    model: CausalLM,
    prompts: list[list[int]],
    outputs: list[list[int]],
    plain: list[list[int]],
    params: list[SamplingParams] | None = None,
    near_tie: float = NEAR_TIE[torch.float32],
) -> Equivalence:
    """Compare each prompt's output with plain decoding's, up to the shorter one's end; empty ones are skipped.

    params: how each was sampled; None is greedily. near_tie: what one row against many moves logits by.
    """
    identity = Equivalence()
    for prompt, ids, wanted, sampling in zip(prompts, outputs, plain, params or repeat(GREEDY), strict=False):
        place = first_difference(ids, wanted)
        if place is not None:
            logits = next_logits(model, prompt + wanted[:place])
            tokens = wanted[place], ids[place]
            cause = rounding_cause(logits[0], sampling, len(prompt) + place, *tokens, near_tie)
            identity += Equivalence(1, 0, cause == "tie", cause == "cut")
        elif ids and wanted:
            identity += Equivalence(1, 1)
    return identity


def first_difference(ids: list[int], others: list[int]) -> int | None:
    """None where one begins with the other."""
    return next((i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), None)


@torch.inference_mode()
def next_logits(model: CausalLM, ids: list[int]) -> Float[Tensor, "1 V"]:
    """Return the logits of the token after these ids, on the host."""
    tokens = torch.tensor([ids], device=model.device)
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[:, -1]
    return model.get_output_embeddings()(hidden).cpu()
