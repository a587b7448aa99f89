"""SamplingBatch: the sampling parameters of a batch as tensors, gathered from a SamplingTable of the slots.

>>> SamplingBatch.of([SamplingSettings(temperature=0.8, seed=7)]).any_sampled
True
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.core.device import copy_to_device, to_device
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.core.seeds import as_int64

Kind = tuple[bool, bool, bool, bool]
"""Whether any sequence is sampled, and whether any needs top-p, top-k, min-p."""
ALL_KINDS: Kind = (True, True, True, True)


@dataclass(frozen=True, slots=True)
class PaddedInput:
    """A tensor that fills the beginning of each dimension of a larger one, for captured passes.

    Attributes:
        fill: value of the rest of the larger tensor.
        is_fixed: whether the tensor is never changed in place, so that one object need not be
            copied twice.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    fill: float = 0
    is_fixed: bool = False


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters of B sequences as tensors, and on the host the processors that any of them needs.

    Attributes:
        temperature: 0 for greedy sequences.
        ends: tokens that end each sequence; -1 is none.
        end_ids: EOS and stop tokens of all sequences, perhaps more.
        logprobs: whether any sequence requests log-probabilities.
        num_tops: maximum number of likeliest tokens that a sequence requests.
        sampled: indices of sequences that are not greedy; sampled_rows has them on the device.
        is_bound: whether it belongs to a captured pass, which serves any values. Then `sampled`
            names every sequence, and temperatures decide.
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
        params: Sequence[SamplingSettings],
        device: torch.device | str = "cpu",
        eos_ids: Collection[int] = (),
    ) -> SamplingBatch:
        """Build the parameters of a batch, in its order. Top-k off is stored as 0."""
        table = SamplingTable(len(params), device, eos_ids)
        for i, each in enumerate(params):
            table.set(i, each)
        return table.batch(range(len(params)))

    def padded(self, num_sequences: int) -> list[PaddedInput]:
        """Return the tensors that `bound` takes, padded by greedy sequences to a number of sequences."""
        tensors = (self.temperature, self.top_p, self.top_k, self.min_p, self.seed, self.ends)
        fills = (0.0, 1.0, 0, 0.0, 0, -1)
        shapes = [(num_sequences, *x.shape[1:]) for x in tensors]
        return [
            PaddedInput(tensor, shape, fill, is_fixed=True)
            for tensor, shape, fill in zip(tensors, shapes, fills, strict=True)
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
        """Build a batch for a captured pass, from tensors of this kind of sampling."""
        any_sampled, any_top_p, any_top_k, any_min_p = kind
        rows = list(range(len(seed))) if any_sampled else []
        every = torch.arange(len(rows), device=seed.device)
        return cls(
            temperature,
            top_p,
            top_k,
            min_p,
            seed,
            ends,
            rows,
            every,
            any_top_p,
            any_top_k,
            any_min_p,
            is_bound=True,
        )

    @property
    def kind(self) -> Kind:
        """Return the kind of sampling: whether any sequence is sampled, and which processors are needed."""
        return self.any_sampled, self.any_top_p, self.any_top_k, self.any_min_p

    @property
    def any_sampled(self) -> bool:
        return bool(self.sampled)

    @property
    def any_cut(self) -> bool:
        """Return whether any sequence uses top-k, top-p or min-p."""
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

    def __init__(
        self, num_slots: int, device: torch.device | str = "cpu", eos_ids: Collection[int] = ()
    ):
        self._device = device
        self._eos_ids = np.array(sorted(eos_ids), dtype=np.int64)
        self._floats = np.zeros((3, num_slots), dtype=np.float32)  # temperature, top_p, min_p
        # The rows are top_k, seed and ends.
        self._integers = np.zeros((2 + len(eos_ids), num_slots), dtype=np.int64)
        # Log-probabilities of a token, its own included.
        self._num_logprobs = np.zeros(num_slots, dtype=np.int64)
        self._stops: dict[int, list[int]] = {}  # slot -> stop tokens

    def set(self, slot: int, params: SamplingSettings) -> None:
        """Store the parameters of the sequence that now holds a slot. No seed is stored as 0."""
        self._floats[:, slot] = (
            0.0 if params.is_greedy else params.temperature,
            params.top_p,
            params.min_p,
        )
        self._integers[:2, slot] = params.top_k, as_int64(params.seed or 0)
        self._integers[2:, slot] = -1 if params.ignore_eos else self._eos_ids
        self._num_logprobs[slot] = 1 + params.num_top_logprobs if params.wants_logprobs else 0
        self._stops.pop(slot, None)
        if params.stop_token_ids:
            self._stops[slot] = params.stop_token_ids

    def batch(self, slots: Sequence[int]) -> SamplingBatch:
        """Return the parameters of the sequences in these slots, in this order."""
        index = np.array(slots, dtype=np.int64)
        floats = self._floats.take(index, 1)  # contiguous rows, which kernels can read
        integers = self._integers.take(index, 1)
        num_logprobs = int(self._num_logprobs[index].max(initial=0))

        # Sequences with a temperature: only their other parameters count.
        rows = np.flatnonzero(floats[0])
        sampled_floats = floats[:, rows]
        has_top_p = sampled_floats[1] < 1
        has_min_p = sampled_floats[2] > 0
        has_top_k = integers[0, rows] > 0

        device = self._device
        temperature, top_p, min_p = copy_to_device(torch.from_numpy(floats), device)
        top_k, seed, *ends = copy_to_device(torch.from_numpy(integers), device)
        return SamplingBatch(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            ends=torch.stack(ends, 1) if ends else seed.new_empty(len(index), 0),
            sampled=rows.tolist(),
            sampled_rows=copy_to_device(torch.from_numpy(rows), device),
            any_top_p=bool(has_top_p.any()),
            any_top_k=bool(has_top_k.any()),
            any_min_p=bool(has_min_p.any()),
            end_ids=frozenset(self._eos_ids.tolist()).union(*self._stops.values()),
            logprobs=num_logprobs > 0,
            num_tops=max(num_logprobs - 1, 0),
        )
