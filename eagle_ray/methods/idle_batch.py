"""A batch of padding alone, on which passes are recorded: empty sequences in the null slot."""

from __future__ import annotations

from dataclasses import replace

from eagle_ray.core.async_copy import to_device
from eagle_ray.core.decode_batch import DecodeBatch, DecodeSlots
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.core.sequence import Sequence
from eagle_ray.models.target import TargetModel
from eagle_ray.requests.parameters import SamplingParams


def idle_batch(batch_size: int, target: TargetModel, max_length: int, params: SamplingParams) -> DecodeBatch:
    """Return a batch whose lengths are 0 and, for the host, at most max_length."""
    slots, device = [target.cache.blocks.null_slot] * batch_size, target.device
    sequences = [Sequence("", [0], params) for _ in slots]
    sampling = SamplingBatch.of([params] * batch_size, device, target.eos_ids)
    at, zeros = DecodeSlots.of(slots, [0] * batch_size, device), to_device([0] * batch_size, device)
    at = replace(at, bound=max_length)
    return DecodeBatch(sequences, at, zeros, sampling, [1] * batch_size, zeros, None)
