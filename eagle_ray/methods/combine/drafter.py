"""EnsembleDrafter: the nodes of several drafters in one tree, so the budget takes the most valuable nodes of all.

    EnsembleDrafter([eagle, suffix], EnsembleCalibration(max_depth, 2), [the features that eagle
    reads])

Each part drafts and learns from the target's samples separately, and one with a model has a KV
cache of its own. The value of a node by the drafters that propose it is calibrated here. Two
models, or a model and a head, are SpecInfer's merged trees (arXiv 2305.09781), under one budget.

The plan's depth and width are for the parts with a model: the first of them decides where its draft
ends, and the others go as deep. Parts without a model draft as deep as they can; if
`plan.lookups_only`, they draft alone. Where they find nothing, the draft is the model's. Where
steps are replayed, look-ups are merged as merged_lookups.py says.

Any method, merged or not, is checked, loaded and made from here:

    check_drafts(method, paths, target_config)                      # from headers, before anything is started
    weights = load_drafts(method, paths, target_config)             # weights of model.draft, if the method reads one
    target = TargetModel(..., feature_layers=layers_read(drafts_of(weights), num_layers))
    drafter = make_drafter(speculative, target, weights)
    planner = make_planner(speculative, drafter)                    # if the method decides its tree
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PretrainedConfig

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.device import to_device
from eagle_ray.core.errors import EngineError
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.core.tree_bounds import NO_TREE, TreeBounds
from eagle_ray.methods.calibration import WARMUP_STEPS, is_due, state_of_part
from eagle_ray.methods.combine.calibration import BlendedTree, EnsembleCalibration, children_on_path
from eagle_ray.methods.combine.merged_lookups import AheadLookups
from eagle_ray.methods.drafter import (
    Draft,
    Drafter,
    LoadedDraft,
    NullDrafter,
    TokenSequence,
    VerifyOutput,
)
from eagle_ray.methods.eagle.draft_buffers import DraftShape
from eagle_ray.methods.lookup.drafter import LookupDrafter
from eagle_ray.methods.method import METHODS, DraftSettings, draft_parts, parts_of
from eagle_ray.methods.pair_drafter import QUEUE_WINDOW
from eagle_ray.models.graphs import CudaGraphRunner
from eagle_ray.models.target import PromptBatch, TargetModel
from eagle_ray.parallel.rank_group import RankGroup
from eagle_ray.planner.planner import Planner
from eagle_ray.tree.draft_tree import DraftTree, VerifyResult
from eagle_ray.tree.expand import DraftPlan

BLEND_INTERVAL = 16  # steps between updates after the warm-up: one takes 0.7 ms on a CPU, and 60 launches on a GPU
MAX_UPDATED_ROWS = 8  # sequences of an update, by turns: of 32 it takes 10 ms on a CPU


@dataclass(frozen=True, slots=True)
class _Drafted:
    """The candidates of the last step.

    Attributes:
        sets: as in EnsembleCalibration.
    """

    blended: BlendedTree
    sets: Int[Tensor, " B"]
    depth: int


class EnsembleDrafter(Drafter):
    """Several drafters as one: their trees are merged, with one calibrated value per node.

    Args:
        parts: the drafters; those with a model come first.
        blend: the calibration for as many drafters.
        feature_indices: for each part with a model, which of the target's features it reads.
        bounds: bounds of the trees; replayed steps take no more candidates.
    """

    def __init__(
        self,
        parts: Sequence[Drafter],
        blend: EnsembleCalibration,
        feature_indices: Sequence[Int[Tensor, " F"]] = (),
        bounds: TreeBounds = NO_TREE,
    ):
        self.parts = parts
        self._blend = blend
        self._bounds = bounds
        self._feature_indices = feature_indices
        self._models = [part for part in parts if part.has_model]
        self._lookups = [cast(LookupDrafter, part) for part in parts if part.has_lookups]
        num_known = len(self._models) + len(self._lookups)
        is_replayable = len(self._models) <= 1 and num_known == len(parts)
        self.supports_graphs = is_replayable and all(part.supports_graphs for part in parts)
        self._ahead: AheadLookups | None = None  # where steps are replayed
        self._num_candidates = bounds.num_candidates
        self._drafted: _Drafted | None = None
        self._num_taught = 0
        self._num_updates = 0
        self.has_model = bool(self._models)
        self.has_lookups = bool(self._lookups)
        self.reads_logits = any(part.reads_logits for part in parts)

    @property
    def prefill_passes(self) -> int:
        return sum(part.prefill_passes for part in self.parts)

    @property
    def cost_key(self) -> dict[str, Any]:
        return {"parts": [part.cost_key for part in self.parts]}

    def use_graphs(self, runner: CudaGraphRunner | None, max_depth: int = 0) -> None:
        """Replay the model's drafts. The operations that merge lookups with them run unrecorded."""
        for part in self.parts:
            part.use_graphs(runner, max_depth)
        self._ahead = None
        if runner is not None:
            assert self.supports_graphs, (
                "several models, or parts that draft on the host, are not replayed"
            )
            self._ahead = AheadLookups(
                self._lookups, runner.num_slots, max_depth, self._blend.fit.parameters.device
            )
            self._num_candidates = runner.num_nodes(self._bounds.num_candidates)

    def pair_recordings(self, max_length: int) -> Iterator[Callable[[], None]]:
        return chain.from_iterable(part.pair_recordings(max_length) for part in self.parts)

    def recordings(
        self, top_k: int, max_length: int, params: SamplingSettings
    ) -> Iterator[Callable[[], None]]:
        return chain.from_iterable(
            part.recordings(top_k, max_length, params) for part in self.parts
        )

    def attach_prefix(
        self,
        slots: list[int],
        firsts: list[int],
        lengths: list[int],
        tokens: Int[Tensor, " B"],
        features: Float[Tensor, "B H"],
    ) -> None:
        for part, own in self._with_features(features):
            part.attach_prefix(slots, firsts, lengths, tokens, own)

    def prefill(
        self, prompts: PromptBatch, next_tokens: Int[Tensor, " R"], features: Float[Tensor, "R H"]
    ) -> None:
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
        """Return the nodes of all parts in one tree. Its levels are the model's, or its own if no model drafted."""
        if self._ahead is not None:
            model = self._models[0] if self._models and not plan.lookups_only else None
            own = None if model is None else model.draft(batch, roots, plan, sampling, texts)
            return self._with_lookups(self._ahead, own, batch, roots, plan, sampling, texts)
        drafts = self._draft_parts(batch, roots, plan, sampling, texts)
        models = []
        others = []
        for part, draft in zip(self.parts, drafts, strict=True):
            if draft is None:
                continue
            if part.has_model:
                models.append(draft)
            else:
                others.append(draft)
        is_all = all(draft.is_exhausted for draft in models)  # looked-up drafts are never continued
        self._drafted = None
        if len(models) < 2 and not any(draft.depth for draft in others):
            alone = models[0] if models else Draft.empty(roots)
            return replace(alone, is_exhausted=is_all)

        depth = max(draft.depth for draft in (*models, *others))
        sets = self._blend.sets((sampling.temperature > 0).long(), has_model=bool(models))
        trees = [None if draft is None else draft.tree for draft in drafts]
        blended = self._blend.merge(trees, depth, sets, 0 if models else None)
        self._drafted = _Drafted(blended, sets, depth)
        extra = self._extra(blended, plan)
        if not models:
            return Draft(blended.tree, list(extra[:, :, None].unbind()), 0, 0, is_all)
        num_passes = sum(draft.num_passes for draft in models)
        return Draft(
            blended.tree,
            models[0].levels,
            num_passes,
            models[0].num_catch_up,
            is_all,
            list(extra.unbind()),
            model_tree=models[0].tree,
        )

    def draft_async(
        self,
        at: DecodeSlots,
        roots: Int[Tensor, " B"],
        plan: DraftPlan,
        sampling: SamplingBatch,
        texts: Sequence[TokenSequence],
    ) -> Draft | None:
        """Return the model's replayed draft merged with lookups, or None if the model's draft cannot be replayed."""
        if self._ahead is None or not plan.has_known_shape:
            return None
        own = None
        if self._models and not plan.lookups_only:
            own = self._models[0].draft_async(at, roots, plan, sampling, texts)
            if own is None:
                return None
        return self._with_lookups(self._ahead, own, at, roots, plan, sampling, texts)

    def _with_lookups(
        self,
        lookups: AheadLookups,
        own: Draft | None,
        batch: DecodeSlots,
        roots: Int[Tensor, " B"],
        plan: DraftPlan,
        sampling: SamplingBatch,
        texts: Sequence[TokenSequence],
    ) -> Draft:
        """Return a model's draft, if there is one, with what is looked up; nothing waits for the device."""
        self._drafted = None
        looked_up = lookups.look_up(batch, texts, plan, sampling)
        if looked_up is None:
            return own or replace(Draft.empty(roots), is_exhausted=True)

        first = own or Draft.empty(roots)
        depth = max(first.depth, plan.max_depth)
        merged = lookups.merge(looked_up, first.tree, batch, depth, self.has_model)
        sets = self._blend.sets((sampling.temperature > 0).long(), has_model=own is not None)
        blended = self._blend.value(
            merged, depth, sets, None if own is None else 0, self._num_candidates
        )
        self._drafted = _Drafted(blended, sets, depth)
        extra = self._extra(blended, plan)
        if own is None:
            return Draft(blended.tree, list(extra[:, :, None].unbind()), 0, 0, is_exhausted=True)
        return replace(
            own, tree=blended.tree, extra_log_values=list(extra.unbind()), model_tree=own.tree
        )

    def _extra(self, blended: BlendedTree, plan: DraftPlan) -> Float[Tensor, "D M N"]:
        """Return, by depth, the log values of nodes that no model proposes, of the plan's members."""
        if plan.members is None:
            return blended.extra
        return blended.extra[:, to_device(plan.members, blended.extra.device)]

    def _draft_parts(
        self,
        batch: DecodeSlots,
        roots: Int[Tensor, " B"],
        plan: DraftPlan,
        sampling: SamplingBatch,
        texts: Sequence[TokenSequence],
    ) -> list[Draft | None]:
        """Return each part's draft; None for a model that the plan leaves out."""
        deepest = plan.without_stop()
        model_plan = plan
        drafts: list[Draft | None] = []
        for part in self.parts:
            if part.has_model and plan.lookups_only:
                drafts.append(None)
                continue
            own_plan = model_plan if part.has_model else deepest
            draft = part.draft(batch, roots, own_plan, sampling, texts)
            if part.has_model and len(self._models) > 1:
                model_plan = replace(deepest, max_depth=max(len(draft.levels), 1))
            drafts.append(draft)
        return drafts

    def extend(self, batch: DecodeSlots, verified: VerifyOutput) -> None:
        for part, features in self._with_features(verified.features):
            own = verified
            if features is not verified.features:
                own = replace(verified, features=features)
            part.extend(batch, own)
        if self._ahead is not None:
            self._ahead.extend(batch, verified.result)

    @property
    def extend_key(self) -> tuple[Hashable, ...]:
        return tuple(part.extend_key for part in self.parts)

    def on_verified(self, result: VerifyResult) -> None:
        for part in self.parts:
            part.on_verified(result)
        if self._drafted is not None:
            self._update_calibration(self._drafted, result.tokens, result.num_accepted)
        self._drafted = None

    def lookup_hits(
        self, batch: DecodeSlots, texts: Sequence[TokenSequence]
    ) -> tuple[int, int] | None:
        known = (part.lookup_hits(batch, texts) for part in self._lookups)
        return next((counts for counts in known if counts is not None), None)

    def reset_learning(self) -> None:
        for part in self.parts:
            part.reset_learning()
        self._blend.fit.reset()
        self._drafted = None
        self._num_taught = 0
        self._num_updates = 0

    def state(self) -> dict[str, Tensor]:
        """Return the parts' states and the calibration, each under a prefix of its own."""
        states = [self._blend.fit.state(), *(part.state() for part in self.parts)]
        together = {}
        for i, state in enumerate(states):
            for name, tensor in state.items():
                together[f"{i}.{name}"] = tensor
        return together

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of all parts. A part that does not fit raises ValueError after the others are loaded."""
        loads = [self._blend.fit.load_state, *(part.load_state for part in self.parts)]
        faults = []
        for i, load in enumerate(loads):
            try:
                if own := state_of_part(state, str(i)):
                    load(own)
            except ValueError as error:
                faults.append(str(error))
        if faults:
            raise ValueError("; ".join(faults))
        self._num_taught = max(self._num_taught, WARMUP_STEPS)

    def _with_features(
        self, features: Float[Tensor, "R F"]
    ) -> Iterator[tuple[Drafter, Float[Tensor, "R _"]]]:
        """Yield each part with its features. Parts without a model ignore them."""
        for i, part in enumerate(self.parts):
            own = features
            if i < len(self._feature_indices):
                index = self._feature_indices[i]
                if len(index) < features.shape[1]:
                    own = features[:, index]
            yield part, own

    def _update_calibration(
        self, drafted: _Drafted, picks: Int[Tensor, "B D1"], num_accepted: Int[Tensor, " B"]
    ) -> None:
        """Update the calibration along the target's path through the candidates of some rows, if an update is due."""
        self._num_taught += 1
        num_levels = min(drafted.depth, picks.shape[1], self._blend.num_levels)
        if not is_due(self._num_taught, num_levels, BLEND_INTERVAL):
            return

        # Some of the rows in each update; a replayed result has padding after them.
        blended = drafted.blended
        num_rows = len(drafted.sets)
        num_turns = -(-num_rows // MAX_UPDATED_ROWS)
        rows = slice(self._num_updates % num_turns, num_rows, num_turns)
        self._num_updates += 1
        tree = DraftTree(*(tensor[rows] for tensor in blended.tree.tensors))
        offered, picked = children_on_path(tree, picks[rows], num_accepted[rows], num_levels)
        self._blend.update(drafted.sets[rows], blended.log_probs[rows], offered, picked)


class DraftList(nn.ModuleList):
    """The weights of several drafts, in the order of the method's parts that read one."""


def drafts_of(weights: nn.Module | None) -> list[Any]:
    """Return as a list what `load_drafts` returned: no draft, one, or several."""
    if weights is None:
        return []
    return list(weights) if isinstance(weights, DraftList) else [weights]


def check_drafts(method: str, paths: Sequence[Path], target: PretrainedConfig) -> list[LoadedDraft]:
    """Return the drafts with shapes and without weights. Raises EngineError where `load_drafts` would.

    Args:
        paths: one for each part of the method that reads a draft.
    """
    drafts = [
        part.check_draft(path, target)
        for part, path in zip(draft_parts(method), paths, strict=True)
    ]
    _check_features(drafts, target.num_hidden_layers)
    return drafts


def load_drafts(
    method: str, paths: Sequence[Path], target: PretrainedConfig, ranks: RankGroup | None = None
) -> nn.Module:
    """Return the weights of model.draft in fp32. Raises EngineError if they do not fit the method or the target.

    Args:
        ranks: ranks of the target, which may share its drafts; None loads each draft whole.
    """
    drafts = [
        part.load_draft(path, target, ranks)
        for part, path in zip(draft_parts(method), paths, strict=True)
    ]
    _check_features(drafts, target.num_hidden_layers)
    return drafts[0] if len(drafts) == 1 else DraftList(drafts)


def _check_features(drafts: Sequence[LoadedDraft], num_layers: int) -> None:
    """Raise EngineError if some drafts read the target's last output and others its layers: no pass returns both."""
    reads = [draft.feature_layers(num_layers) for draft in drafts]
    if None in reads and any(reads):
        raise EngineError(
            "some of these heads read the target's last output (EAGLE-1/2, Medusa, Hydra) and others its layers "
            "(EAGLE-3, DFlash), so they cannot be merged; merge heads of one kind, or a head and a draft_model"
        )


def layers_read(drafts: Sequence[LoadedDraft], num_layers: int) -> tuple[int, ...] | None:
    """Return the layers of the target that the drafters read; None is the last hidden state.

    Args:
        drafts: results of `load_drafts` or `check_drafts`.
    """
    layers = [draft.feature_layers(num_layers) for draft in drafts]
    return tuple(dict.fromkeys(layer for each in layers for layer in each or ())) or None


def kv_numbers(drafts: Sequence[LoadedDraft]) -> int:
    """Return how many numbers the KV caches of all drafters store per token; Medusa heads store none."""
    specs = [getattr(draft, "kv_spec", None) for draft in drafts]
    return sum(spec.numbers_per_token for spec in specs if spec is not None)


def slot_bytes(
    drafts: Sequence[LoadedDraft],
    num_features: int,
    hidden_size: int,
    bounds: TreeBounds,
    itemsize: int,
) -> int:
    """Return about how many bytes the drafters reserve per slot, apart from KV caches.

    A drafter has a queue of features, the tensors of a draft, and the head's output for the root.

    Args:
        drafts: the drafts that are loaded.
        num_features: elements of a token's feature.
        hidden_size: elements of a hidden state of the target.
        bounds: bounds of the trees.
        itemsize: bytes of an element.
    """
    draft = DraftShape(1, bounds.top_k, bounds.top_k, bounds.max_depth)
    features = (QUEUE_WINDOW * num_features + hidden_size) * itemsize
    return len(drafts) * (features + draft.num_bytes(hidden_size, itemsize))


def make_drafter(
    speculative: DraftSettings, target: TargetModel, weights: nn.Module | None
) -> Drafter:
    """Return the drafter of a method; an ensemble if several are merged."""
    parts = [
        part
        for part in parts_of(speculative.merged_methods)
        if part.draft is None or weights is not None
    ]
    if len(parts) == 1:
        drafter = parts[0].make_drafter(speculative, target, weights)
        if not drafter.has_lookups or target.device.type == "cpu":
            return drafter
        # An ensemble of one looks up ahead of steps in flight.
        blend = EnsembleCalibration(speculative.max_depth, 1, target.device)
        return EnsembleDrafter([drafter], blend, (), speculative.tree_bounds)

    # Each model with the features that it reads, then the parts without one.
    drafts = drafts_of(weights)
    features = [_features_read(draft, drafts, target) for draft in drafts]
    models = [part for part in parts if part.draft]
    drafters = []
    for part, draft, own in zip(models, drafts, features, strict=True):
        view = _with_features(target, own)
        drafters.append(part.make_drafter(speculative, view, draft))
    for part in parts:
        if part.draft is None:
            drafters.append(part.make_drafter(speculative, target, None))
    blend = EnsembleCalibration(speculative.max_depth, len(drafters), target.device)
    return EnsembleDrafter(drafters, blend, features, speculative.tree_bounds)


def make_planner(speculative: DraftSettings, drafter: Drafter) -> Planner | None:
    """Return the planner of a method that decides its tree, or None if speculative.budget does."""
    parts = parts_of(speculative.merged_methods)
    return parts[0].make_planner(speculative, drafter) if len(parts) == 1 else None


def _features_read(
    draft: LoadedDraft, drafts: Sequence[LoadedDraft], target: TargetModel
) -> Int[Tensor, " F"]:
    """Return the indices of the target's features that one of several drafts reads."""
    num_layers = target.model.config.get_text_config(decoder=True).num_hidden_layers
    width = target.hidden_size
    device = target.device
    own = draft.feature_layers(num_layers)
    if own is None:
        return torch.arange(width, device=device)
    layers = layers_read(drafts, num_layers) or ()
    spans = [torch.arange(width, device=device) + width * layers.index(layer) for layer in own]
    return torch.cat(spans) if spans else torch.arange(0, device=device)


def _with_features(target: TargetModel, features: Int[Tensor, " F"]) -> TargetModel:
    """Return a view of the target whose features are these. It shares model and caches."""
    view = copy(target)
    view.feature_size = len(features)
    return view


def make_head_drafter(
    speculative: DraftSettings, target: TargetModel, weights: LoadedDraft
) -> Drafter:
    """Return the drafter of the method that a loaded draft belongs to, for source `head`, which names no method."""
    return METHODS[weights.method].make_drafter(speculative, target, weights)


def make_null_drafter(
    speculative: DraftSettings, target: TargetModel, weights: None
) -> NullDrafter:
    """Return the drafter of plain decoding."""
    return NullDrafter()
