"""Whether two ways of decoding gave the same tokens, and where they parted, whether plain decoding was nearly tied.

Does not know engines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import repeat

import torch
from jaxtyping import Float
from torch import Tensor, nn

from eagle_ray.engine import reference
from eagle_ray.speculative.sampling import BatchSampling, SamplingParams, process

NEAR_TIE = 1e-4  # one row against many moves fp32 logits by up to 2e-5
EDGE = 1e-5  # of probability: what sums in fp32 over a large vocabulary, and logits that differ by 2e-5, may be off by
GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class Identity:
    """Counts of outputs. num_near_ties: of those that differ, at a place where the top two logits were nearly equal.

    num_edges: of the others that differ, where a token stood so near to top-p's edge that rounding keeps or drops it.
    """

    num_compared: int = 0
    num_equal: int = 0
    num_near_ties: int = 0
    num_edges: int = 0

    def __add__(self, other: Identity) -> Identity:
        return Identity(
            self.num_compared + other.num_compared,
            self.num_equal + other.num_equal,
            self.num_near_ties + other.num_near_ties,
            self.num_edges + other.num_edges,
        )

    @property
    def is_explained(self) -> bool:
        """Whether nothing differs but by rounding, of one output at least."""
        return self.num_equal + self.num_near_ties + self.num_edges == self.num_compared > 0


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
            logits = next_logits(model, prompt + wanted[:place])
            is_tie = margin(logits, sampling, len(prompt) + place) <= near_tie
            is_edge = not is_tie and at_edge(logits, sampling, (ids[place], wanted[place]))
            identity += Identity(1, 0, is_tie, is_edge)
        elif ids and wanted:
            identity += Identity(1, 1)
    return identity


def first_difference(ids: list[int], others: list[int]) -> int | None:
    """None where one begins with the other."""
    return next((i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), None)


@torch.inference_mode()
def next_logits(model: nn.Module, ids: list[int]) -> Float[Tensor, "1 V"]:
    """Of the token after these, on the host."""
    tokens = torch.tensor([ids], device=model.device)
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[:, -1]
    return model.get_output_embeddings()(hidden).cpu()


def margin(logits: Float[Tensor, "1 V"], params: SamplingParams, position: int) -> float:
    """How far the best token's score leads the second best: logits, with the noise where it is sampled."""
    return reference.margin(logits, BatchSampling.of([params]), position)


def at_edge(logits: Float[Tensor, "1 V"], params: SamplingParams, tokens: tuple[int, ...]) -> bool:
    """Whether top-p keeps or drops one of the tokens by less than EDGE of probability: see kernels/pick.py."""
    if not (params.temperature > 0 and params.top_p < 1):
        return False
    before = BatchSampling.of([replace(params, top_p=1.0, min_p=0.0)])
    ascending, order = process(logits, before, torch.tensor([0]))[0].double().sort(stable=True)
    reached = ascending.softmax(-1).cumsum(-1)[order.argsort()]
    return bool(((reached[list(tokens)] - (1 - params.top_p)).abs() < EDGE).any())
