"""Plan a pair for a GPU that is not at hand: how many a worker needs, its memory, and its step costs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eagle_ray.assembly.hub import model_limits
from eagle_ray.assembly.load_models import planned_dtype
from eagle_ray.assembly.memory_plan import DeviceMemory, MemoryPlan
from eagle_ray.assembly.model_memory import plan_checkpoint
from eagle_ray.assembly.pair_sizes import pair_sizes
from eagle_ray.assembly.tensor_parallel import SharedTarget
from eagle_ray.core.errors import ConfigError, EngineError
from eagle_ray.doctor.memory_check import NODE_GPUS
from eagle_ray.doctor.pair_check import PairHere
from eagle_ray.doctor.step_costs import stored_costs
from eagle_ray.planner.cards import Card
from eagle_ray.planner.cost_model import StepCosts
from eagle_ray.planner.planned_costs import planned_costs
from eagle_ray.report.text import gib


@dataclass(frozen=True, slots=True)
class CardFit:
    """A worker's memory on cards of one kind.

    Attributes:
        num_gpus: number of cards per worker.
        memory: memory plan of each card.
        fits: whether the pair fits there.
    """

    num_gpus: int
    memory: MemoryPlan
    fits: bool

    def slots_of(self, positions: float) -> int:
        """Return the number of sequences that run at once if a finished one has this many tokens on average."""
        tokens = self.memory.kv_tokens
        if tokens is None:
            return self.memory.slots
        each = positions + self.memory.lengths.tree_columns
        return max(1, min(self.memory.slots, int(tokens / each)))

    def why_not(self, card: Card) -> str:
        """Return why the pair does not fit."""
        need = gib(self.memory.with_slots(1).total)
        cards = "card" if self.num_gpus == 1 else f"of {self.num_gpus} cards"
        return (
            f"the pair does not fit: each {cards} would hold {need}, and has {card.memory_gb:g} GB"
        )


def card_fit(here: PairHere, card: Card, num_cards: int) -> CardFit:
    """Return the worker with the fewest cards that the pair fits into, or with the maximum that can share it.

    Raises ConfigError if the weights are not on this machine, or no such number of cards is
    possible.
    """
    dtype = planned_dtype(here.config.model, "cuda", here.target, here.shape)
    fit = None
    for num_gpus in _numbers_of_gpus(here, num_cards):
        memory = _memory(here, card, num_gpus, dtype)
        fit = CardFit(num_gpus, memory, memory.fits)
        if fit.fits:
            break
    if fit is None:
        raise ConfigError(
            f"execution.gpus_per_actor: a worker takes more GPUs than the {num_cards} of {card.name}. Set it to less"
        )
    return fit


def card_costs(here: PairHere, card: Card, fit: CardFit) -> tuple[StepCosts, bool]:
    """Return the costs of a worker's steps, and whether they were measured on such a card.

    Measured costs are for one GPU; for workers with several they are estimated.
    """
    costs = stored_costs(here, card.is_device) if fit.num_gpus == 1 else None
    if costs is not None:
        return costs, True
    dtype = planned_dtype(here.config.model, "cuda", here.target, here.shape)
    return planned_costs(card, pair_sizes(here.shape, dtype, fit.memory, fit.num_gpus)), False


def _numbers_of_gpus(here: PairHere, num_cards: int) -> list[int]:
    """Return the numbers of GPUs that a worker may have, ascending."""
    execution = here.config.execution
    wanted = execution.gpus_per_actor
    if wanted != "auto" and wanted != int(wanted):
        raise ConfigError(
            f"execution.gpus_per_actor: {wanted:g}, and a plan counts whole GPUs. Leave it out"
        )
    if wanted == "auto" and execution.tensor_parallel != "auto":
        wanted = execution.tensor_parallel
    if wanted != "auto":
        return [int(wanted)] if int(wanted) <= num_cards else []
    shared = SharedTarget(here.config.model, here.target, here.shape, has_draft=bool(here.drafts))
    return [size for size in sorted(shared.sizes) if size <= min(NODE_GPUS, num_cards)]


def _memory(here: PairHere, card: Card, num_gpus: int, dtype: torch.dtype) -> MemoryPlan:
    """Return the memory of a worker, or of each of its ranks, on an empty card."""
    config = here.config
    num_bytes = int(card.memory_gb * 1e9)
    lengths = model_limits(config.model).lengths(config.speculative, config.execution.kv_tokens)
    try:
        plan = plan_checkpoint(
            config,
            here.target,
            here.drafts,
            here.shape,
            "cuda",
            dtype,
            lengths,
            DeviceMemory(num_bytes, num_bytes),
            num_ranks=num_gpus,
        )
    except EngineError as error:
        raise ConfigError(str(error)) from error
    if plan is None:
        raise ConfigError(
            "model.target: the sizes of its weights are not known, since its files are not here. `hf download` it"
        )
    return plan
