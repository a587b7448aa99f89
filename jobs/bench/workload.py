"""Requests of the benches: the same prompts again and again, in lengths and at temperatures by turns."""

from __future__ import annotations

import itertools
from collections import abc

from eagle_ray.core.sequence import Sequence
from eagle_ray.requests.parameters import SamplingParams

DRAIN_ROWS = 1.5  # of a draining job, per slot
DRAIN_LENGTHS = (8, 96, 24, 160, 48, 64, 16, 128)


def requests(
    prompts: list[list[int]],
    lengths: abc.Sequence[int],
    temperatures: abc.Sequence[float],
    offset: int = 0,
) -> abc.Iterator[Sequence]:
    """Without end, every length at every temperature. lengths: most tokens of an output. offset: those passed over."""
    for i in itertools.count(offset):
        turn, place = divmod(i, len(lengths))
        temperature = temperatures[(turn + place) % len(temperatures)]
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=lengths[place])
        yield Sequence(str(i), prompts[i % len(prompts)], params)
