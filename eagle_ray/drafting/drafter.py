"""Drafter: the protocol of whoever offers candidate tokens.

A drafter keeps its own memory of each slot's sequence: `prefill` starts it, `extend` keeps it in step with what the
target committed, `draft` reads it. It never changes what is produced, only how many tokens a target pass yields.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.models.kv_cache import BatchSlots
from eagle_ray.models.target import Prompts
from eagle_ray.speculative.budget import Plan
from eagle_ray.speculative.tree import DraftTree, VerifyRows
from eagle_ray.speculative.verify import VerifyResult


@runtime_checkable
class Drafter(Protocol):
    """Offers nodes with values; the budget does the rest."""

    def prefill(self, prompts: Prompts, next_tokens: Int[Tensor, " R"], features: Float[Tensor, "R H"]) -> None:
        """Chunks of prompts: the target's features of every row, and the token after it, known or just picked."""

    def draft(self, batch: BatchSlots, roots: Int[Tensor, " B"], plan: Plan) -> DraftTree:
        """Candidate trees on the given roots, at most plan.max_depth deep."""

    def extend(self, batch: BatchSlots, rows: VerifyRows, result: VerifyResult, features: Float[Tensor, "R H"]) -> None:
        """The target accepted `result` on top of `batch`; features are those of the verify pass's rows."""

    def num_passes(self, plan: Plan) -> int:
        """Forward passes of the drafter's model in one step under `plan`."""
