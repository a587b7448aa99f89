"""Requests of the benches: the same prompts again and again, in lengths and at temperatures by turns.

Does not know engines.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from eagle_ray.engine.sequence import Sequence
from eagle_ray.speculative.sampling import SamplingParams

DRAIN_ROWS = 1.5  # of a draining job, per slot
DRAIN_LENGTHS = (8, 96, 24, 160, 48, 64, 16, 128)


def requests(
    prompts: list[list[int]], lengths: Iterable[int], temperatures: Iterable[float], offset: int = 0
) -> Iterator[Sequence]:
    """Without end. lengths: most tokens of an output. offset: prompts that are passed over."""
    stream = itertools.islice(itertools.cycle(prompts), offset, None)
    for i, (ids, most, heat) in enumerate(zip(stream, itertools.cycle(lengths), itertools.cycle(temperatures))):
        yield Sequence(str(i), ids, SamplingParams(heat, seed=i, max_tokens=most))
