"""Prefiller: chunks of prompts through the target and the drafter, and the first token after each prompt.

A chunk that follows reused blocks starts the target in the middle of a prompt. The drafter's next pair then needs the
feature of the token before, which is kept here for the last token of every block.
Does not know who is admitted or when.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.drafting.drafter import Drafter
from eagle_ray.engine.scheduler import Chunk
from eagle_ray.engine.sequence import Sequence
from eagle_ray.models.target import Prompts, Target
from eagle_ray.speculative.sampling import BatchSampling, log_probs_of, pick


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What follows a prompt. logprob: 0 where nobody asked."""

    sequence: Sequence
    token: int
    logprob: float


class Prefiller:
    """Runs one step's chunks; they must have their slots and blocks."""

    def __init__(self, target: Target, drafter: Drafter):
        self._target, self._drafter = target, drafter
        self._device = target.device

    def run(self, chunks: list[Chunk]) -> list[FirstToken]:
        """Fill target and drafter with the chunks; first tokens of those sequences that have none yet."""
        tokens = [c.sequence.token_ids[c.start : c.end + 1] for c in chunks]
        prompts = Prompts.of(
            [c.sequence.slot for c in chunks],
            [part[: c.num_tokens] for part, c in zip(tokens, chunks, strict=True)],
            self._device,
            [c.start for c in chunks],
        )
        logits, features = self._target.prefill(prompts)
        picking = torch.tensor([i for i, c in enumerate(chunks) if c.picks], dtype=torch.int64, device=self._device)
        sampling = BatchSampling.of([c.sequence.sampling for c in chunks], self._device)
        picks = pick(logits[picking], sampling, picking, prompts.positions[prompts.last[picking]] + 1)
        after = [part[1:] + [0] * (c.num_tokens + 1 - len(part)) for part, c in zip(tokens, chunks, strict=True)]
        next_tokens = torch.tensor([i for part in after for i in part], dtype=torch.int64, device=self._device)
        self._drafter.prefill(prompts, next_tokens.index_copy(0, prompts.last[picking], picks), features)
        return _first_tokens([c.sequence for c in chunks if c.picks], logits[picking], picks)


def _first_tokens(
    sequences: list[Sequence], logits: Float[Tensor, "B V"], picks: Int[Tensor, " B"]
) -> list[FirstToken]:
    asked = any(s.sampling.logprobs for s in sequences)
    logprobs = log_probs_of(logits, picks).tolist() if asked else [0.0] * len(sequences)
    return [FirstToken(*row) for row in zip(sequences, picks.tolist(), logprobs, strict=True)]
