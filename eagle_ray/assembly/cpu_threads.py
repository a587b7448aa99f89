"""Choose how many CPU threads an engine computes with, by timing a pass before the first request.

The call sets torch's number of threads, to at most the present one:

    choose_threads(causal_lm, args.slots)
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import nn

from eagle_ray.assembly.worker_plan import usual_slots
from eagle_ray.families import layers_of
from eagle_ray.kernels import cpu_ops
from eagle_ray.models.decoder import is_dense
from eagle_ray.models.loader import CausalLM
from eagle_ray.models.packed_linear import multiplies_here, multiplies_quantized, run_linears
from eagle_ray.models.runtime import MIN_SPEEDUP, MIN_TEAM_SPEEDUP, tune_num_threads

MIN_TRIAL_ROWS = 8  # rows of the pass: even one sequence has prompts and drafts


def choose_threads(causal_lm: CausalLM, slots: int | Literal["auto"]) -> None:
    """Set torch's number of threads to the fastest one for a pass with as many tokens as the engine has slots."""
    num_rows = max(usual_slots(slots, on_gpu=False), MIN_TRIAL_ROWS)
    in_team = computes_in_team(causal_lm)
    min_speedup = MIN_TEAM_SPEEDUP if in_team else MIN_SPEEDUP
    tune_num_threads(partial(_trial_pass, causal_lm, num_rows, in_team), min_speedup)


def computes_in_team(causal_lm: CausalLM, draft: nn.Module | None = None) -> bool:
    """Return whether passes run in our own team of threads (kernels/team.h), with torch's operations in one thread.

    That needs all products to be this engine's. With dense weights its own forward must run them,
    too, because in transformers' forward attention and experts are torch's and need OpenMP's
    threads.
    """
    if not multiplies_here(causal_lm, draft):
        return False
    return multiplies_quantized(causal_lm, draft) or is_dense(causal_lm)


def _trial_pass(causal_lm: CausalLM, num_rows: int, in_team: bool) -> None:
    """Run about as much as a pass over num_rows tokens does in an engine."""
    with cpu_ops.team(in_team):
        if is_dense(causal_lm):
            run_linears(causal_lm, num_rows)  # the engine's own forward runs merged layers once
        else:
            token_ids = torch.zeros(1, num_rows, dtype=torch.int64)
            layers_of(causal_lm)(input_ids=token_ids, use_cache=False)
