"""Estimate StepCosts for a GPU that is not at hand, from its data sheet and the models' sizes.

    costs = planned_costs(find_card("l40s"), sizes)        # StepCosts, as a start would measure them there

`eagle-ray plan` uses them where no start on such a card has left measured costs. A worker never
does: it measures its own (`engine/calibrate.py`).

A pass reads all weights once and multiplies each of its rows with them. Which of the two takes
longer depends on the rows, and near that point they overlap in part: the seconds are a norm of
both, plus a constant per layer. The constants were fitted to a Llama 8B in bf16 on an H200
(jobs/results/gpu.md, 2026-11-26), whose passes they give to within 7 %. On an H100 that model's
passes are -4 to +9 % off the measured ones, and its cached tokens -9 %; the form of the norm was
chosen to fit both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eagle_ray.parallel.draft_shards import COLLECTIVE_S
from eagle_ray.planner.cards import Card
from eagle_ray.planner.cost_model import BUCKETS, CostCurve, StepCosts

BANDWIDTH_SHARE = 0.85  # of the published bandwidth with which weights are read
CONTEXT_SHARE = 0.65  # of it with which keys and values are read
LAYER_S = 37e-6  # of a layer, whatever its size
TFLOPS_SHARE = 0.8  # of the published products that passes of many rows reach
OVERLAP = 1.5  # exponent of the norm of both times: 1 is no overlap
DRAFT_PASS_S = 0.3e-3  # of a head's pass, beyond its weights
DRAFT_ROW_S = 2e-6  # of a row of it, beyond its products: the choice of children
# Rows of a sequence read the context together, but for this share.
ROW_CONTEXT_SHARE = 0.015
# What the host does in a step, by its sequences: plain, and with drafts. That of 256 and 512 was counted
# without a GPU, on 2026-11-27.
PLAIN_HOST_S = {1: 0.08e-3, 16: 0.1e-3, 64: 0.2e-3, 256: 1.2e-3, 512: 2.0e-3}
DRAFT_HOST_S = {1: 0.2e-3, 16: 0.22e-3, 64: 0.45e-3}


@dataclass(frozen=True, slots=True)
class PairSizes:
    """Sizes of a target and its drafter on one GPU. With several ranks they are one rank's part.

    Attributes:
        dense_bytes: bytes of the target's weights that every pass reads.
        expert_bytes: bytes of the weights of its experts.
        active_share: share of the experts that a row goes through; 1 without experts.
        dense_weights, expert_weights: numbers of dense weights and of experts' weights.
        kv_bytes: bytes per token of keys and values.
        draft_bytes: bytes of the drafter's weights.
        itemsize: bytes of an element of the activations.
        hidden_size, num_layers: shape of the target.
        num_ranks: number of GPUs that share the target.
    """

    dense_bytes: float
    expert_bytes: float
    active_share: float
    dense_weights: float
    expert_weights: float
    kv_bytes: float
    draft_bytes: float
    itemsize: int
    hidden_size: int
    num_layers: int
    num_ranks: int = 1

    def read_bytes(self, rows: int) -> float:
        """Return the bytes that a pass of these rows reads: dense weights, and the experts that at
        least one row goes through."""
        untouched = (1.0 - self.active_share) ** rows
        return self.dense_bytes + self.expert_bytes * (1.0 - untouched)

    @property
    def row_operations(self) -> float:
        """Return the arithmetic operations per row: a product and a sum for each weight."""
        return 2.0 * (self.dense_weights + self.active_share * self.expert_weights)


def planned_costs(card: Card, sizes: PairSizes) -> StepCosts:
    """Return the estimated costs of steps on such a card, or on as many of them as the sizes have ranks."""
    context_s = sizes.kv_bytes / (card.bandwidth_gb_s * 1e9 * CONTEXT_SHARE)
    layers_s = sizes.num_layers * LAYER_S

    def verify(rows: int) -> float:
        seconds = _pass_seconds(card, sizes.read_bytes(rows), rows * sizes.row_operations)
        return layers_s + seconds + _collective_seconds(card, sizes, rows)

    def draft_pass(rows: int) -> float:
        operations = rows * 2.0 * sizes.draft_bytes / sizes.itemsize
        return DRAFT_PASS_S + _pass_seconds(card, sizes.draft_bytes, operations)

    def expand(rows: int) -> float:
        return draft_pass(rows) + rows * DRAFT_ROW_S

    def catch_up(rows: int) -> float:
        return draft_pass(rows) + expand(1)

    return StepCosts(
        verify=_curve(verify),
        attention_per_token=context_s,
        catch_up=_curve(catch_up),
        expand=_curve(expand),
        plain_overhead=CostCurve([*PLAIN_HOST_S], [*PLAIN_HOST_S.values()]),
        draft_overhead=CostCurve([*DRAFT_HOST_S], [*DRAFT_HOST_S.values()]),
        attention_per_row=ROW_CONTEXT_SHARE * context_s,
    )


def _pass_seconds(card: Card, num_bytes: float, operations: float) -> float:
    """Return the seconds to read the weights and to multiply with them, which overlap in part."""
    read_s = num_bytes / (card.bandwidth_gb_s * 1e9 * BANDWIDTH_SHARE)
    product_s = operations / (card.tflops * 1e12 * TFLOPS_SHARE)
    return (read_s**OVERLAP + product_s**OVERLAP) ** (1.0 / OVERLAP)


def _collective_seconds(card: Card, sizes: PairSizes, rows: int) -> float:
    """Return the seconds in which ranks add up their results: twice in each layer."""
    if sizes.num_ranks == 1:
        return 0.0
    num_bytes = 2.0 * rows * sizes.hidden_size * sizes.itemsize
    each = COLLECTIVE_S["cuda"] + num_bytes / (card.link_gb_s * 1e9)
    return 2 * sizes.num_layers * each


def _curve(seconds_of: Callable[[int], float]) -> CostCurve:
    return CostCurve([*BUCKETS], [seconds_of(rows) for rows in BUCKETS])
