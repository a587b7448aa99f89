"""Log-probabilities that sequences ask for, recorded place by place under the unprocessed logits.

record_outputs(sequence, logprobs=[-0.1], ranked=[[(17, -0.1), (4, -2.5)]])
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.core.sequence import Sequence, TopLogprobs
from eagle_ray.sampling.sampler import log_probs_of


def tops(logits: Float[Tensor, "R V"], most: int) -> list[TopLogprobs]:
    """Return the `most` likeliest tokens of each row, ties in any order. Nothing is computed for 0."""
    if not most:
        return [[] for _ in range(len(logits))]
    return ranked(*(column.tolist() for column in likeliest(logits, most)))


def likeliest(logits: Float[Tensor, "R V"], most: int) -> tuple[Int[Tensor, "R K"], Float[Tensor, "R K"]]:
    """Return the likeliest ids and their log-probabilities, on the device."""
    values, ids = logits.float().log_softmax(-1).topk(min(most, logits.shape[-1]))
    return ids, values


def ranked(ids: list[list[int]], values: list[list[float]]) -> list[TopLogprobs]:
    """Return the likeliest ids and their log-probabilities, on the host."""
    return [list(zip(*row, strict=True)) for row in zip(ids, values, strict=True)]


def record_outputs(sequence: Sequence, logprobs: list[float], ranked: list[TopLogprobs]) -> None:
    """Record log-probabilities of output ids that are about to be appended. ranked: at least the requested number."""
    sampling = sequence.sampling
    if sampling.logprobs:
        sequence.output_logprobs += logprobs
    if sampling.logprobs and sampling.top_logprobs:
        sequence.output_tops += [top[: sampling.top_logprobs] for top in ranked]


def record_prompts(sequence: Sequence, start: int, logits: Float[Tensor, "R V"]) -> None:
    """Record log-probabilities of the prompt ids after rows start, start + 1, ...; a repeated prefill has
    them already.
    """
    if not sequence.prompt_logprobs:
        sequence.prompt_logprobs.append(None)
        sequence.prompt_tops.append([])
    known = len(sequence.prompt_logprobs)
    ids = sequence.prompt_ids[known : start + len(logits) + 1]
    if not ids:
        return
    rows = logits[known - start - 1 :][: len(ids)]
    targets = torch.tensor(ids, dtype=torch.int64, device=logits.device)
    sequence.prompt_logprobs += log_probs_of(rows, targets).tolist()
    sequence.prompt_tops += tops(rows, sequence.sampling.top_logprobs)
