"""Drafter: the protocol of whoever offers candidate tokens.

A drafter keeps its own memory of each slot's sequence. `prefill` or `observe` starts it, `extend` tells it what the
target committed, `draft` reads it. It never changes what is produced, only how many tokens a target pass yields.
A step of plain decoding calls `extend` alone, and that runs no model: what was missed is caught up by the next `draft`,
which is also shown the sequences' tokens, for those who draft from text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.kv.kv_cache import DecodeSlots
from eagle_ray.models.target import PrefillBatch
from eagle_ray.sampling.sampler import SamplingBatch
from eagle_ray.tree.accept import VerifyResult
from eagle_ray.tree.draft_plan import DraftPlan
from eagle_ray.tree.draft_tree import DraftTree, VerifyRows


@dataclass(frozen=True, slots=True)
class Draft:
    """Candidate trees of a whole batch, roots alone where nothing was drafted.

    levels: the candidates' log values level by level, [M, F, K] for M members, F parents and their K children; -inf is
    padding. num_passes: forward passes of the drafter's model. num_caught_up: pairs that the first of them had to catch
    up, or tokens that had to be read. is_all: there was nothing more to offer, however deep the plan. beside: the log
    values of candidates that are there whatever the plan's width, by their depth.
    """

    tree: DraftTree
    levels: list[Float[Tensor, "M _ K"]]
    num_passes: int
    num_caught_up: int
    is_all: bool = False
    extra_log_values: list[Float[Tensor, "M _"]] = field(default_factory=list)

    @classmethod
    def empty(cls, roots: Int[Tensor, " B"]) -> Draft:
        """Nothing drafted: a step of plain decoding."""
        return cls(DraftTree.of_roots(roots), [], 0, 0)

    @property
    def depth(self) -> int:
        """The longest draft path, known on the host."""
        return max(len(self.levels), len(self.extra_log_values))


@dataclass(frozen=True, slots=True)
class VerifyOutput:
    """One verify pass and what came of it.

    rows: of `tree`, packed. logits, features: the target's, after each row. result: what it accepted.
    """

    tree: DraftTree
    rows: VerifyRows
    logits: Float[Tensor, "R V"]
    features: Float[Tensor, "R H"]
    result: VerifyResult


@runtime_checkable
class TokenSequence(Protocol):
    """A sequence as far as it is known."""

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output; the last one is the root."""


@runtime_checkable
class Drafter(Protocol):
    """Offers nodes with values; the budget does the rest."""

    def attach_prefix(
        self,
        slots: list[int],
        firsts: list[int],
        columns: list[int],
        tokens: Int[Tensor, " B"],
        features: Float[Tensor, "B H"],
    ) -> None:
        """New sequences whose first columns[b] columns are another's, to be seen from firsts[b] on.

        tokens, features: the pair of column columns[b], which is their own.
        """

    def prefill(self, prompts: PrefillBatch, next_tokens: Int[Tensor, " R"], features: Float[Tensor, "R H"]) -> None:
        """A pass over chunks of prompts: the token after each of its rows and the target's feature of each row."""

    def prefill_deferred(
        self, prompts: PrefillBatch, next_tokens: Int[Tensor, " R"], features: Float[Tensor, "R H"]
    ) -> None:
        """The same without running a model: for later, should drafting begin."""

    def draft(
        self,
        batch: DecodeSlots,
        roots: Int[Tensor, " B"],
        plan: DraftPlan,
        sampling: SamplingBatch,
        texts: Sequence[TokenSequence],
    ) -> Draft:
        """Candidate trees on the given roots, at most plan.max_depth deep; plan.max_depth is at least 1."""

    def reset_learning(self) -> None:
        """Unlearn what the picks so far have taught, as those of made-up sequences should."""

    def extend(self, batch: DecodeSlots, verified: VerifyOutput) -> None:
        """The target accepted a path of each tree on top of `batch`. No model runs."""

    def on_verified(self, result: VerifyResult) -> None:
        """The same once the step's results are on their way to the host: what it teaches for later drafts."""

    @property
    def cost_key(self) -> dict[str, Any]:
        """What its costs depend on beside the target's, as JSON."""

    @property
    def prefill_passes(self) -> int:
        """Forward passes of the drafter's model in one `prefill`."""
