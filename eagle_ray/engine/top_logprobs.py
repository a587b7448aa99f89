"""Log-probabilities that sequences ask for, recorded place by place under the unprocessed logits.

record_outputs(sequence, logprobs=[-0.1], ranked=[[(17, -0.1), (4, -2.5)]])
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.core.sequence import Sequence, TopLogprobs
from eagle_ray.sampling.sampler import SLICE_ROWS, log_probs_of


def tops(logits: Float[Tensor, "R V"], most: int) -> list[TopLogprobs]:
    """Return the `most` likeliest tokens of each row, ties in any order. Nothing is computed for 0."""
    if not most:
        return [[] for _ in range(len(logits))]
    return ranked(*(column.tolist() for column in likeliest(logits, most)))


def likeliest(logits: Float[Tensor, "R V"], most: int) -> tuple[Int[Tensor, "R K"], Float[Tensor, "R K"]]:
    """Return the likeliest ids and their log-probabilities, on the device."""
    parts = [rows.float().log_softmax(-1).topk(min(most, rows.shape[-1])) for rows in logits.split(SLICE_ROWS)]
    return torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])


def log_probs_at(
    logits: Float[Tensor, "R V"], rows: Int[Tensor, " P"], tokens: Int[Tensor, " P"], num_tops: int
) -> tuple[Float[Tensor, " P"], tuple[Int[Tensor, "P K"], Float[Tensor, "P K"]] | None]:
    """Return the log-probability of a token after each of some rows, and the num_tops likeliest there; None for 0."""
    log_probs, tops = [], []
    for part, picked in zip(rows.split(SLICE_ROWS), tokens.split(SLICE_ROWS), strict=True):
        slice_logits = logits[part]
        log_probs.append(log_probs_of(slice_logits, picked))
        if num_tops:
            tops.append(likeliest(slice_logits, num_tops))
    columns = tuple(torch.cat(column) for column in zip(*tops, strict=True))
    return torch.cat(log_probs), (columns[0], columns[1]) if columns else None


def ranked(ids: list[list[int]], values: list[list[float]]) -> list[TopLogprobs]:
    """Return the likeliest ids and their log-probabilities, on the host."""
    return [list(zip(*row, strict=True)) for row in zip(ids, values, strict=True)]


def record_outputs(sequence: Sequence, logprobs: list[float], ranked: list[TopLogprobs]) -> None:
    """Record log-probabilities of output ids that are about to be appended. ranked: at least the requested number."""
    sampling = sequence.sampling
    if sampling.wants_logprobs:
        sequence.output_logprobs += logprobs
    if sampling.wants_logprobs and sampling.num_top_logprobs:
        sequence.output_tops += [top[: sampling.num_top_logprobs] for top in ranked]


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
    sampling = sequence.sampling
    sequence.prompt_tops += tops(rows, max(sampling.num_top_logprobs, sampling.num_top_prompt_logprobs))
