"""Sample the target's token: logits processors, keyed noise and the argmax.

The noise of a token is a function of (seed, position, token id) alone, so a sample does not depend on the tree, the
batch, the order of requests, a retry or a resume. Temperature 0 is the argmax; sampling is Gumbel-max with that
noise. With Triton, kernels/sample.py and kernels/topk.py do the same without fp32 copies of the logits; on a CPU
kernels/sample.cpp does it without sorting a vocabulary, which takes 4 to 6 ms a row of 49,152 tokens.

    >>> sample_seed(7, sample_index=0)
    7
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.core.sampling_batch import SamplingBatch, as_int64
from eagle_ray.kernels import cpu_ops
from eagle_ray.kernels.availability import use_triton

GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment: spreads token ids over the 64-bit circle
SLICE_ROWS = 128  # rows of logits that are copied at a time: 0.2 GB for 128k tokens, copies in fp32 included
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def sample(
    logits: Float[Tensor, "R V"], sampling: SamplingBatch, seq: Int[Tensor, " R"], positions: Int[Tensor, " R"]
) -> Int[Tensor, " R"]:
    """Return the token that each row's target samples; ties go to the lowest id.

    seq: the row's sequence, an index into sampling. positions: index, in prompt + output, of the token being
    sampled.
    """
    if use_triton(logits.device):
        return _sample_fused(logits, sampling, seq, positions)
    is_on_host = cpu_ops.available(logits.device, torch.float32)
    if sampling.any_sampled and is_on_host and cpu_ops.has_function("sample_rows_float32"):
        return _sample_compiled(logits, sampling, seq, positions)
    is_fast = is_on_host and logits.dtype is torch.float32
    greedy = cpu_ops.argmax(logits) if is_fast else logits.argmax(-1)  # torch's takes 0.1 ms a row of 49,152 logits
    if not sampling.any_sampled:
        return greedy
    token_ids = torch.arange(logits.shape[-1], device=logits.device)
    noisy = process(logits, sampling, seq) + gumbel_noise(sampling.seed[seq], positions, token_ids)
    return torch.where(sampling.temperature[seq] == 0, greedy, noisy.argmax(-1))


def _sample_compiled(
    logits: Float[Tensor, "R V"], sampling: SamplingBatch, seq: Int[Tensor, " R"], positions: Int[Tensor, " R"]
) -> Int[Tensor, " R"]:
    """Sample by a CPU's library, logits of other dtypes in fp32 copies of some rows at a time."""
    parameters = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed
    parts = zip(*(x.split(SLICE_ROWS) for x in (logits, seq, positions)), strict=True)
    return torch.cat([cpu_ops.sample_rows(x.float(), *parameters, *at) for x, *at in parts])


def _sample_fused(
    logits: Float[Tensor, "R V"], sampling: SamplingBatch, seq: Int[Tensor, " R"], positions: Int[Tensor, " R"]
) -> Int[Tensor, " R"]:
    """Sample by the kernels: those without cuts or those with all of them, so that no other ones are compiled."""
    from eagle_ray.kernels import sample as kernel

    cuts: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    if sampling.any_cut:
        cuts = sampling.top_k, sampling.top_p, sampling.min_p
    return kernel.sample_rows(logits, sampling.temperature, *cuts, sampling.seed, seq, positions)


def process(logits: Float[Tensor, "R V"], sampling: SamplingBatch, seq: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
    """Return logits after temperature, top-k, top-p and min-p, in transformers' order, in fp32; dropped tokens are
    -inf.

    Greedy rows pass through with temperature 1: their result is not used.
    """
    temperature = sampling.temperature[seq]
    scores = logits.float() / torch.where(temperature == 0, 1.0, temperature)[:, None]
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
    rank = torch.where(top_k == 0, vocab, top_k.clamp(max=vocab)) - 1
    threshold = scores.sort(-1, descending=True).values.gather(1, rank[:, None])
    return scores.masked_fill(scores < threshold, -torch.inf)


def _keep_top_p(scores: Float[Tensor, "R V"], top_p: Float[Tensor, " R"]) -> Float[Tensor, "R V"]:
    """Keep the smallest set of most probable tokens whose probability reaches p; at least one token."""
    ascending, order = scores.sort(dim=-1, stable=True)
    drop = ascending.softmax(-1).cumsum(-1) <= (1 - top_p)[:, None]
    drop[:, -1] = False
    drop &= (top_p < 1)[:, None]
    return scores.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), -torch.inf)


def _keep_min_p(scores: Float[Tensor, "R V"], min_p: Float[Tensor, " R"]) -> Float[Tensor, "R V"]:
    """Keep tokens at least min_p times as probable as the most probable one."""
    probs = scores.softmax(-1)
    return scores.masked_fill(probs < min_p[:, None] * probs.amax(-1, keepdim=True), -torch.inf)


def gumbel_noise(
    seed: Int[Tensor, " R"], positions: Int[Tensor, " R"], token_ids: Int[Tensor, " V"]
) -> Float[Tensor, "R V"]:
    """Return standard Gumbel noise keyed by (seed, position, token id), in fp32.

    The upper half of a splitmix64 hash is the uniform v; it stays below 1, so every value is finite.
    """
    v = keyed_hash(seed, positions, token_ids).float().add_(0.5).mul_(2.0**-32)
    return v.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_().log_().neg_()


def keyed_hash(
    seed: Int[Tensor, " R"], positions: Int[Tensor, " R"], token_ids: Int[Tensor, " V"]
) -> Int[Tensor, "R V"]:
    """Return 32 well-mixed bits for each (seed, position, token id), as int64 in [0, 2**32)."""
    key = mix64_tensor(mix64_tensor(seed) + positions)
    return mix64_tensor(key[:, None] + token_ids * as_int64(GOLDEN)).bitwise_right_shift_(32).bitwise_and_(2**32 - 1)


def mix64_tensor(x: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Apply splitmix64's finaliser to int64 bit patterns (multiplication wraps, shifts are logical).

    In place where possible: over a vocabulary, allocating takes longer than the arithmetic.
    """
    x = _xor_shifted(x, 30).mul_(as_int64(_MIX_1))
    x = _xor_shifted(x, 27).mul_(as_int64(_MIX_2))
    return _xor_shifted(x, 31)


def _xor_shifted(x: Int[Tensor, "..."], bits: int) -> Int[Tensor, "..."]:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1).bitwise_xor_(x)


def mix64(x: int) -> int:
    """Apply splitmix64's finaliser to one integer; the result is in [0, 2**64)."""
    x %= 2**64
    x = ((x ^ (x >> 30)) * _MIX_1) % 2**64
    x = ((x ^ (x >> 27)) * _MIX_2) % 2**64
    return x ^ (x >> 31)


def sample_seed(seed: int, sample_index: int) -> int:
    """Return the seed of one of n samples, as a signed 64-bit integer: the seed for sample 0, a mix of both
    for others.
    """
    return as_int64(seed if sample_index == 0 else mix64(mix64(seed) + sample_index))


def log_probs_of(logits: Float[Tensor, "R V"], tokens: Int[Tensor, " R"]) -> Float[Tensor, " R"]:
    """Return the log-probability of each token under the unprocessed logits, in fp32."""
    if use_triton(logits.device):
        from eagle_ray.kernels import topk as kernel

        return kernel.log_probs_of(logits, tokens)
    parts = zip(logits.split(SLICE_ROWS), tokens.split(SLICE_ROWS), strict=True)
    return torch.cat([rows.float().log_softmax(-1).gather(1, picked[:, None])[:, 0] for rows, picked in parts])
