"""Sample the target's token: logits processors, keyed noise and the argmax.

The noise of a token is a function of (seed, position, token id) alone, so a sample does not depend on the tree, the
batch, the order of requests, a retry or a resume. Temperature 0 is the argmax; sampling is Gumbel-max with that
noise. With Triton, kernels/sample.py and kernels/log_probs.py do the same without fp32 copies of the logits.

    >>> SamplingBatch.of([SamplingParams(temperature=0.8, seed=7)]).any_sampled
    True
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.core.async_copy import copy_to_device, to_device
from eagle_ray.core.graph_protocol import Kind, PaddedInput
from eagle_ray.kernels.availability import use_triton
from eagle_ray.requests.parameters import SamplingParams

GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment: spreads token ids over the 64-bit circle
SLICE_ROWS = 128  # rows of logits that are copied at a time: 0.2 GB for 128k tokens, copies in fp32 included
ALL_KINDS: Kind = (True, True, True, True)
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters of B sequences as tensors, and on the host the processors that any of them needs.

    Attributes:
        temperature: 0 for greedy sequences.
        ends: tokens after which a sequence is over; -1 is none.
        end_ids: those of all sequences and their stop tokens, perhaps more.
        logprobs: whether any sequence requests log-probabilities.
        num_tops: how many of the likeliest tokens a sequence requests at most.
        sampled: indices of sequences that are not greedy; sampled_rows is the same on the device.
        is_bound: belongs to a captured pass, which is for any such tensors: `sampled` names every sequence, and
            temperatures decide.
    """

    temperature: Float[Tensor, " B"]
    top_p: Float[Tensor, " B"]
    top_k: Int[Tensor, " B"]
    min_p: Float[Tensor, " B"]
    seed: Int[Tensor, " B"]
    ends: Int[Tensor, "B E"]
    sampled: list[int]
    sampled_rows: Int[Tensor, " S"]
    any_top_p: bool
    any_top_k: bool
    any_min_p: bool
    end_ids: frozenset[int] = frozenset()
    logprobs: bool = False
    num_tops: int = 0
    is_bound: bool = False

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        device: torch.device | str = "cpu",
        eos_ids: Collection[int] = (),
    ) -> SamplingBatch:
        """Return the parameters of a batch, in its order. Top-k off is stored as 0."""
        table = SamplingTable(len(params), device, eos_ids)
        for i, each in enumerate(params):
            table.set(i, each)
        return table.batch(range(len(params)))

    def padded(self, num_sequences: int) -> list[PaddedInput]:
        """Return what `bound` takes, padded to a number of sequences with greedy ones."""
        columns = (self.temperature, self.top_p, self.top_k, self.min_p, self.seed, self.ends)
        fills = (0.0, 1.0, 0, 0.0, 0, -1)
        shapes = [(num_sequences, *x.shape[1:]) for x in columns]
        return [
            PaddedInput(column, shape, fill, is_fixed=True)
            for column, shape, fill in zip(columns, shapes, fills, strict=True)
        ]

    @classmethod
    def bound(
        cls,
        kind: Kind,
        temperature: Float[Tensor, " P"],
        top_p: Float[Tensor, " P"],
        top_k: Int[Tensor, " P"],
        min_p: Float[Tensor, " P"],
        seed: Int[Tensor, " P"],
        ends: Int[Tensor, "P E"],
    ) -> SamplingBatch:
        """Return a batch for a captured pass: any tensors of this kind."""
        any_sampled, any_top_p, any_top_k, any_min_p = kind
        rows = list(range(len(seed))) if any_sampled else []
        every = torch.arange(len(rows), device=seed.device)
        return cls(
            temperature, top_p, top_k, min_p, seed, ends, rows, every, any_top_p, any_top_k, any_min_p, is_bound=True
        )

    @property
    def kind(self) -> Kind:
        """Return whether any sequence is sampled, and which processors any needs."""
        return self.any_sampled, self.any_top_p, self.any_top_k, self.any_min_p

    @property
    def any_sampled(self) -> bool:
        return bool(self.sampled)

    @property
    def any_cut(self) -> bool:
        """Return whether any sequence filters tokens."""
        return self.any_top_k or self.any_top_p or self.any_min_p

    def select(self, members: Sequence[int]) -> SamplingBatch:
        """Return the parameters of some of the sequences."""
        index = to_device(members, self.seed.device)
        sampled = set(self.sampled)
        rows = [i for i, member in enumerate(members) if member in sampled]
        return replace(
            self,
            temperature=self.temperature[index],
            top_p=self.top_p[index],
            top_k=self.top_k[index],
            min_p=self.min_p[index],
            seed=self.seed[index],
            ends=self.ends[index],
            sampled=rows,
            sampled_rows=to_device(rows, self.seed.device),
        )


class SamplingTable:
    """The sampling parameters of the sequences in slots, on the host, from which batches are gathered."""

    def __init__(self, num_slots: int, device: torch.device | str = "cpu", eos_ids: Collection[int] = ()):
        self._device, self._eos_ids = device, np.array(sorted(eos_ids), dtype=np.int64)
        self._floats = np.zeros((3, num_slots), dtype=np.float32)  # temperature, top_p, min_p
        self._integers = np.zeros((2 + len(eos_ids), num_slots), dtype=np.int64)  # top_k, seed, ends
        self._num_logprobs = np.zeros(num_slots, dtype=np.int64)  # of a token, its own included
        self._stops: dict[int, list[int]] = {}  # by slot

    def set(self, slot: int, params: SamplingParams) -> None:
        """Store the parameters of the sequence that holds a slot from now on. No seed is 0."""
        self._floats[:, slot] = 0.0 if params.is_greedy else params.temperature, params.top_p, params.min_p
        self._integers[:2, slot] = params.top_k, as_int64(params.seed or 0)
        self._integers[2:, slot] = -1 if params.ignore_eos else self._eos_ids
        self._num_logprobs[slot] = 1 + params.num_top_logprobs if params.wants_logprobs else 0
        self._stops.pop(slot, None)
        if params.stop_token_ids:
            self._stops[slot] = params.stop_token_ids

    def batch(self, slots: Sequence[int]) -> SamplingBatch:
        """Return the parameters of the sequences in these slots, in this order."""
        index = np.array(slots, dtype=np.int64)
        floats, integers = self._floats.take(index, 1), self._integers.take(index, 1)  # rows that kernels can read
        rows = np.flatnonzero(floats[0])
        temperature, top_p, min_p = copy_to_device(torch.from_numpy(floats), self._device)
        top_k, seed, *ends = copy_to_device(torch.from_numpy(integers), self._device)
        num_logprobs = int(self._num_logprobs[index].max(initial=0))
        return SamplingBatch(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            ends=torch.stack(ends, 1) if ends else seed.new_empty(len(index), 0),
            sampled=rows.tolist(),
            sampled_rows=copy_to_device(torch.from_numpy(rows), self._device),
            any_top_p=bool((floats[1, rows] < 1).any()),
            any_top_k=bool((integers[0, rows] > 0).any()),
            any_min_p=bool((floats[2, rows] > 0).any()),
            end_ids=frozenset(self._eos_ids.tolist()).union(*self._stops.values()),
            logprobs=num_logprobs > 0,
            num_tops=max(num_logprobs - 1, 0),
        )


def sample(
    logits: Float[Tensor, "R V"], sampling: SamplingBatch, seq: Int[Tensor, " R"], positions: Int[Tensor, " R"]
) -> Int[Tensor, " R"]:
    """Return the token that each row's target samples; ties go to the lowest id.

    seq: the row's sequence, an index into sampling. positions: index, in prompt + output, of the token being
    sampled.
    """
    if use_triton(logits.device):
        return _pick_fused(logits, sampling, seq, positions)
    greedy = logits.argmax(-1)
    if not sampling.any_sampled:
        return greedy
    token_ids = torch.arange(logits.shape[-1], device=logits.device)
    noisy = process(logits, sampling, seq) + gumbel_noise(sampling.seed[seq], positions, token_ids)
    return torch.where(sampling.temperature[seq] == 0, greedy, noisy.argmax(-1))


def _pick_fused(
    logits: Float[Tensor, "R V"], sampling: SamplingBatch, seq: Int[Tensor, " R"], positions: Int[Tensor, " R"]
) -> Int[Tensor, " R"]:
    """Sample by the kernels: those without cuts or those with all of them, so that no other ones are compiled."""
    from eagle_ray.kernels import sample as kernel

    cuts: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    if sampling.any_cut:
        cuts = sampling.top_k, sampling.top_p, sampling.min_p
    return kernel.pick(logits, sampling.temperature, *cuts, sampling.seed, seq, positions)


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


def as_int64(x: int) -> int:
    """Return the signed 64-bit integer with the same bits as x."""
    return (x + 2**63) % 2**64 - 2**63


def log_probs_of(logits: Float[Tensor, "R V"], tokens: Int[Tensor, " R"]) -> Float[Tensor, " R"]:
    """Return the log-probability of each token under the unprocessed logits, in fp32."""
    if use_triton(logits.device):
        from eagle_ray.kernels import log_probs as kernel

        return kernel.log_probs_of(logits, tokens)
    parts = zip(logits.split(SLICE_ROWS), tokens.split(SLICE_ROWS), strict=True)
    return torch.cat([rows.float().log_softmax(-1).gather(1, picked[:, None])[:, 0] for rows, picked in parts])
