"""EnsembleDrafter: the nodes of several drafters in one tree, so the budget takes the most valuable nodes of all.

    EnsembleDrafter([eagle, suffix], EnsembleCalibration(max_depth, 2), [the features that eagle reads])

Each part drafts and learns from the target's samples separately, and one with a model has a KV cache of its own. The
value of a node by the drafters that propose it is calibrated here. Two models, or a model and a head, are SpecInfer's
merged trees (arXiv 2305.09781), under one budget.

The plan's depth and width are for the parts with a model: the first of them decides where its draft ends, and the
others go as deep. Parts without a model draft as deep as they can.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.methods.calibration import levels_in_turn
from eagle_ray.methods.combine.calibration import EnsembleCalibration
from eagle_ray.methods.drafter import Draft, Drafter, TokenSequence, VerifyOutput
from eagle_ray.models.graphs import CudaGraphRunner
from eagle_ray.models.target import PromptBatch
from eagle_ray.tree.accept import VerifyResult
from eagle_ray.tree.draft_plan import DraftPlan
from eagle_ray.tree.tree_merge import Merged, extra_log_values, merge_trees


@dataclass(frozen=True, slots=True)
class _Drafted:
    """The candidates of the last step."""

    merged: Merged
    kinds: Int[Tensor, " B"]
    depth: int


class EnsembleDrafter(Drafter):
    """Several drafters as one.

    Args:
        parts: at least two, those with a model first.
        blend: the calibration for as many drafters.
        feature_indices: for each part with a model, which of the target's features it reads.
    """

    supports_graphs = False

    def __init__(
        self, parts: Sequence[Drafter], blend: EnsembleCalibration, feature_indices: Sequence[Int[Tensor, " F"]] = ()
    ):
        self.parts, self._blend = parts, blend
        self._feature_indices = feature_indices
        self._drafted: _Drafted | None = None
        self._num_taught = 0

    @property
    def prefill_passes(self) -> int:
        return sum(part.prefill_passes for part in self.parts)

    @property
    def cost_key(self) -> dict[str, Any]:
        return {"parts": [part.cost_key for part in self.parts]}

    def use_graphs(self, runner: CudaGraphRunner | None, max_depth: int = 0) -> None:
        assert runner is None, "an ensemble drafts on the host"

    def attach_prefix(
        self,
        slots: list[int],
        firsts: list[int],
        columns: list[int],
        tokens: Int[Tensor, " B"],
        features: Float[Tensor, "B H"],
    ) -> None:
        for part, own in self._with_features(features):
            part.attach_prefix(slots, firsts, columns, tokens, own)

    def prefill(self, prompts: PromptBatch, next_tokens: Int[Tensor, " R"], features: Float[Tensor, "R H"]) -> None:
        for part, own in self._with_features(features):
            part.prefill(prompts, next_tokens, own)

    def prefill_deferred(
        self, prompts: PromptBatch, next_tokens: Int[Tensor, " R"], features: Float[Tensor, "R H"]
    ) -> None:
        for part, own in self._with_features(features):
            part.prefill_deferred(prompts, next_tokens, own)

    def mark_consumed(self, slots: list[int], lengths: list[int]) -> int:
        return sum(part.mark_consumed(slots, lengths) for part in self.parts)

    def draft(
        self,
        batch: DecodeSlots,
        roots: Int[Tensor, " B"],
        plan: DraftPlan,
        sampling: SamplingBatch,
        texts: Sequence[TokenSequence],
    ) -> Draft:
        """Return the draft of the first part merged with the nodes of the others."""
        first = self.parts[0].draft(batch, roots, plan, sampling, texts)
        as_deep = replace(plan, max_depth=max(len(first.levels), 1), should_stop=None)
        deepest = replace(plan, should_stop=None)
        drafts = [first]
        for i, part in enumerate(self.parts[1:], 1):
            of_part = as_deep if i < len(self._feature_indices) else deepest
            drafts.append(part.draft(batch, roots, of_part, sampling, texts))
        depth = max(draft.depth for draft in drafts)
        is_all = all(draft.is_exhausted for draft in drafts)
        if not depth:
            return replace(first, is_exhausted=is_all)
        merged, kinds = merge_trees([draft.tree for draft in drafts], depth), (sampling.temperature > 0).long()
        tree = merged.with_log_probs(self._blend.apply(merged.tree.depths, kinds, merged.log_probs_by_drafter), depth)
        self._drafted = _Drafted(merged, kinds, depth)
        return Draft(
            tree,
            first.levels or [tree.log_values.new_full((plan.num_members(len(roots)), 1, plan.children), -torch.inf)],
            sum(draft.num_passes for draft in drafts),
            first.num_catch_up,
            is_all,
            extra_log_values(merged.log_probs_by_drafter[..., 0], tree, depth, plan),
        )

    def extend(self, batch: DecodeSlots, verified: VerifyOutput) -> None:
        for part, own in self._with_features(verified.features):
            part.extend(batch, replace(verified, features=own))

    def on_verified(self, result: VerifyResult) -> None:
        for part in self.parts:
            part.on_verified(result)
        if self._drafted is not None:
            self._update_calibration(self._drafted, result.tokens, result.num_accepted)
        self._drafted = None

    def reset_learning(self) -> None:
        for part in self.parts:
            part.reset_learning()
        self._blend.fit.reset()
        self._drafted, self._num_taught = None, 0

    def _with_features(self, features: Float[Tensor, "R F"]) -> Iterator[tuple[Drafter, Float[Tensor, "R _"]]]:
        """Yield each part with the features that it reads; parts without a model ignore them."""
        for i, part in enumerate(self.parts):
            reads_some = i < len(self._feature_indices) and len(self._feature_indices[i]) < features.shape[1]
            yield part, features[:, self._feature_indices[i]] if reads_some else features

    def _update_calibration(
        self, drafted: _Drafted, picks: Int[Tensor, "B D1"], num_accepted: Int[Tensor, " B"]
    ) -> None:
        """Update the calibration along the target's path through the candidates."""
        tree, log_probs = drafted.merged.tree, drafted.merged.log_probs_by_drafter
        self._num_taught += 1
        taught = levels_in_turn(self._num_taught, min(drafted.depth, picks.shape[1]))
        node = torch.zeros_like(num_accepted)
        reached = torch.ones_like(num_accepted, dtype=torch.bool)
        for level in range(max(taught, default=-1) + 1):
            reached = reached & (num_accepted >= level)
            offered = (tree.parents == node[:, None]) & reached[:, None]
            picked = offered & (tree.tokens == picks[:, level, None])
            if level in taught:
                self._blend.update(level, drafted.kinds, log_probs, offered, picked)
            node, reached = picked.long().argmax(1), picked.any(1)
