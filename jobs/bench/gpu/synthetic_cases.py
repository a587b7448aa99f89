"""Cells of a synthetic pair: random weights of a shape, and a stated probability that the head is right.

Every token it makes is known, so whether the walk was kept is seen too.
"""

from __future__ import annotations

import random
from itertools import pairwise

from jobs.bench.embedding_map import ModelShape
from jobs.bench.gpu.cases import Cell, figures, steady
from jobs.bench.gpu.harness import Harness
from jobs.bench.gpu.settings import GpuBenchSettings
from jobs.bench.gpu.time_budget import Agenda
from jobs.bench.gpu.wide_cases import OURS, PLAIN
from jobs.bench.synthetic import successor

PROMPTS, PROMPT = 64, 64  # how many, of how many tokens


def measure_synthetic(
    name: str,
    shape: ModelShape,
    acceptance: tuple[float, ...],
    rig: Harness,
    batch: int,
    settings: GpuBenchSettings,
    agenda: Agenda,
) -> None:
    """Compare ours with plain decoding: one row of the results. rig: of a pair of this acceptance, its costs known."""
    s, draw = settings, random.Random(settings.seed)
    prompts = [[draw.randrange(shape.vocab_size) for _ in range(PROMPT)] for _ in range(PROMPTS)]
    taken = steady(rig, [PLAIN, OURS], Cell(batch, s.contexts[0]), prompts, s.rounds, s.seconds)
    right = all(is_walk(ids, shape.vocab_size) for t in taken.values() for ids in t.outputs.values())
    found = figures(taken["ours"], taken["plain"])
    about = {"shape": name, "batch": batch, "context": s.contexts[0], "acceptance": acceptance, "right": right}
    agenda.results.synthetic.append(about | found)
    ratio, wanted = found["over_plain"]["mean"], found["predicted_ratio"]
    agenda.say(f"   batch {batch}: {ratio:.2f}x, predicted {wanted:.2f}x, walk {'kept' if right else 'LEFT'}")


def is_walk(ids: list[int], vocab_size: int) -> bool:
    """Whether each token is the synthetic target's only choice after the one before it."""
    return all(successor(a, vocab_size) == b for a, b in pairwise(ids))
