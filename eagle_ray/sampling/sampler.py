"""Sample the target's token: logits processors, keyed noise and the argmax.

Temperature 0 is the argmax; sampling is Gumbel-max with the noise of `noise.py`. With Triton,
kernels/sample.py and kernels/topk.py do the same without fp32 copies of the logits; on a CPU
kernels/sample.cpp does it without sorting a vocabulary, which takes 4 to 6 ms a row of 49,152
tokens.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.kernels import cpu_ops
from eagle_ray.kernels.availability import use_triton
from eagle_ray.sampling.noise import gumbel_noise

# Rows of logits that are copied at a time: 0.2 GB for 128k tokens, copies in fp32 included.
SLICE_ROWS = 128


def sample(
    logits: Float[Tensor, "R V"],
    sampling: SamplingBatch,
    seq: Int[Tensor, " R"],
    positions: Int[Tensor, " R"],
) -> Int[Tensor, " R"]:
    """Return the sampled token of each row; ties go to the lowest id.

    Args:
        seq: index of each row's sequence in `sampling`.
        positions: index, in prompt + output, of the token being sampled.
    """
    if use_triton(logits.device):
        return _sample_fused(logits, sampling, seq, positions)
    is_on_host = cpu_ops.available(logits.device, torch.float32)
    if sampling.any_sampled and is_on_host and cpu_ops.has_function("sample_rows_float32"):
        return _sample_compiled(logits, sampling, seq, positions)

    # Torch's argmax takes 0.1 ms a row of 49,152 logits on a CPU.
    is_fast = is_on_host and logits.dtype is torch.float32
    greedy = cpu_ops.argmax(logits) if is_fast else logits.argmax(-1)
    if not sampling.any_sampled:
        return greedy

    # Gumbel-max: the token with the highest sum of score and noise.
    scores = process(logits, sampling, seq)
    token_ids = torch.arange(logits.shape[-1], device=logits.device)
    seeds = sampling.seed[seq]
    noisy = scores + gumbel_noise(seeds, positions, token_ids)
    sampled = noisy.argmax(-1)

    is_greedy = sampling.temperature[seq] == 0
    return torch.where(is_greedy, greedy, sampled)


def _sample_compiled(
    logits: Float[Tensor, "R V"],
    sampling: SamplingBatch,
    seq: Int[Tensor, " R"],
    positions: Int[Tensor, " R"],
) -> Int[Tensor, " R"]:
    """Sample by a CPU's library, logits of other dtypes in fp32 copies of some rows at a time."""
    parameters = (
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seed,
    )
    parts = zip(
        logits.split(SLICE_ROWS),
        seq.split(SLICE_ROWS),
        positions.split(SLICE_ROWS),
        strict=True,
    )
    tokens = []
    for part, part_seq, part_positions in parts:
        part = part.float()
        tokens.append(cpu_ops.sample_rows(part, *parameters, part_seq, part_positions))
    return torch.cat(tokens)


def _sample_fused(
    logits: Float[Tensor, "R V"],
    sampling: SamplingBatch,
    seq: Int[Tensor, " R"],
    positions: Int[Tensor, " R"],
) -> Int[Tensor, " R"]:
    """Sample with the kernels for no filter, or with those for all filters; no others are compiled."""
    from eagle_ray.kernels import sample as kernel

    cuts: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    if sampling.any_cut:
        cuts = (sampling.top_k, sampling.top_p, sampling.min_p)
    return kernel.sample_rows(logits, sampling.temperature, *cuts, sampling.seed, seq, positions)


def process(
    logits: Float[Tensor, "R V"], sampling: SamplingBatch, seq: Int[Tensor, " R"]
) -> Float[Tensor, "R V"]:
    """Return logits after temperature, top-k, top-p and min-p, in transformers' order, in fp32.

    Dropped tokens are -inf. Greedy rows pass through with temperature 1: their result is not used.
    """
    temperature = sampling.temperature[seq]
    divisor = torch.where(temperature == 0, 1.0, temperature)
    scores = logits.float() / divisor[:, None]
    if sampling.any_top_k:
        scores = _keep_top_k(scores, sampling.top_k[seq])
    if sampling.any_top_p:
        scores = _keep_top_p(scores, sampling.top_p[seq])
    if sampling.any_min_p:
        scores = _keep_min_p(scores, sampling.min_p[seq])
    return scores


def _keep_top_k(scores: Float[Tensor, "R V"], top_k: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
    """Keep the k highest scores and their ties; k = 0 keeps all."""
    vocab = scores.shape[-1]
    num_left = torch.where(top_k == 0, vocab, top_k.clamp(max=vocab))
    last = num_left - 1

    # Ties with the last one that is kept are kept, too.
    descending = scores.sort(-1, descending=True).values
    threshold = descending.gather(1, last[:, None])
    is_below = scores < threshold
    return scores.masked_fill(is_below, -torch.inf)


def _keep_top_p(scores: Float[Tensor, "R V"], top_p: Float[Tensor, " R"]) -> Float[Tensor, "R V"]:
    """Keep the smallest set of most probable tokens whose probability reaches p; at least one token."""
    # The least probable tokens, as many as have 1 - p together, but never the most probable one.
    ascending, order = scores.sort(dim=-1, stable=True)
    mass = ascending.softmax(-1).cumsum(-1)
    drop = mass <= (1 - top_p)[:, None]
    drop[:, -1] = False

    # At p = 1 not even a token whose probability rounds to 0 is dropped.
    has_cut = top_p < 1
    drop &= has_cut[:, None]
    drop_by_token = torch.zeros_like(drop)
    drop_by_token = drop_by_token.scatter(1, order, drop)
    return scores.masked_fill(drop_by_token, -torch.inf)


def _keep_min_p(scores: Float[Tensor, "R V"], min_p: Float[Tensor, " R"]) -> Float[Tensor, "R V"]:
    """Keep tokens at least min_p times as probable as the most probable one."""
    probs = scores.softmax(-1)
    largest = probs.amax(-1, keepdim=True)
    floor = min_p[:, None] * largest
    is_below = probs < floor
    return scores.masked_fill(is_below, -torch.inf)


def log_probs_of(logits: Float[Tensor, "R V"], tokens: Int[Tensor, " R"]) -> Float[Tensor, " R"]:
    """Return the log-probability of each token under the unprocessed logits, in fp32."""
    if use_triton(logits.device):
        from eagle_ray.kernels import topk as kernel

        return kernel.log_probs_of(logits, tokens)

    # Some rows at a time, since their fp32 copies take memory.
    parts = zip(logits.split(SLICE_ROWS), tokens.split(SLICE_ROWS), strict=True)
    log_probs = []
    for rows, picked in parts:
        by_token = rows.float().log_softmax(-1)
        log_prob = by_token.gather(1, picked[:, None])
        log_probs.append(log_prob[:, 0])
    return torch.cat(log_probs)
