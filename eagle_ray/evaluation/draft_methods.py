"""Draft methods: what the comparison of methods can compare, by name, and an engine for each over the same target.

    plain                       no drafts: what the others are held against
    eagle1, eagle2              as published: the same tree for everyone, the head's own confidences
    eagle2-without-value        EAGLE-2 with a part of it taken out, the paper's ablations (section 5.4): a node is
                                judged by its own confidence, in growing and in choosing, not by its path's product
    eagle2-without-reranking    what was expanded is verified, and nothing else: the best of each level, however deep,
                                but for the last level, whose nodes are not expanded and only reranking would choose
    ours                        the job's own `speculative` section
    auto                        the job's own section, with all sources that fit
    none                        another name of plain
    any other method            of methods/method.py, with the job's tree for everyone
    eagle2:25                   a way with another max_nodes
    medusa=DIR                  a way with a model.draft of its own
    eagle3+draft_model=A+B      one with several

What verifies fewer nodes than eagle2 is held against eagle2 with as many: eagle1 against eagle2:25. Ablations keep the
ancestors of all they keep, so that outputs stay plain decoding's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from eagle_ray.assembly.assemble import build_engine
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.load_models import load_draft
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.errors import ConfigError
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.engine.engine import Engine
from eagle_ray.methods.drafter import Draft
from eagle_ray.methods.method import (
    ANY_DRAFT,
    AUTO,
    HEAD,
    HEAD_3,
    METHODS,
    draft_requirement,
    methods_without_draft,
    reads_draft,
    validate_method,
)
from eagle_ray.methods.pair_drafter import PairDrafter
from eagle_ray.models.loader import CausalLM
from eagle_ray.planner.planner import Allocation, UniformPlanner
from eagle_ray.tree.budget import ranks
from eagle_ray.tree.draft_tree import DraftTree
from eagle_ray.tree.expand import DraftPlan, TreeBuilder
from eagle_ray.tree.static_tree import MC_SIM_7B_63

PLAIN, PUBLISHED, OURS = "plain", "eagle2", "ours"
WITHOUT_VALUE, WITHOUT_RERANKING = "eagle2-without-value", "eagle2-without-reranking"
Adjust = Callable[[Engine, SpeculativeConfig], None]
AS_PUBLISHED: dict[str, object] = {"method": "eagle2", "budget": "uniform", "ranking": "published"}


@dataclass(frozen=True, slots=True)
class DraftMethod:
    """name: as shown in tables. drafts: what it reads. reference: the method it is compared with.

    adjust: done to its engine.
    """

    name: str
    speculative: SpeculativeConfig
    drafts: tuple[str, ...]
    reference: str
    adjust: Adjust | None = None

    def model(self, model: ModelConfig) -> ModelConfig:
        """Return the models with the method's own drafts."""
        draft = self.drafts[0] if len(self.drafts) == 1 else list(self.drafts) or None
        return model.model_copy(update={"draft": draft})

    def as_json(self) -> dict[str, object]:
        """Return the method's drafts, by their names, and its settings."""
        return {"draft": " + ".join(self.drafts) or None, **self.speculative.model_dump()}

    def engine(self, causal_lm: CausalLM, weights: nn.Module | None, slots: int, max_model_len: int) -> Engine:
        """weights: what the method reads from its drafts."""
        engine = build_engine(causal_lm, weights, self.speculative, EngineArgs(slots, max_model_len, kv_tokens=None))
        if self.adjust is not None:
            self.adjust(engine, self.speculative)
        return engine


def default_names(speculative: SpeculativeConfig) -> list[str]:
    """Return all methods that the job's model.draft allows, or that need none, with their references."""
    alone, method = methods_without_draft(), speculative.merged_methods
    if draft_requirement(method) not in (HEAD, HEAD_3, ANY_DRAFT):
        return alone if method == "none" else list(dict.fromkeys([method, *alone]))
    merged = [f"{PUBLISHED}+suffix"] if "suffix" in alone else []
    published_trees = [method.name for method in METHODS.values() if method.planner is not None]
    names = [*published_trees, PUBLISHED, WITHOUT_VALUE, WITHOUT_RERANKING, OURS, *alone, *merged]
    return list(dict.fromkeys(name for way in names for name in (way, _reference_method(way, speculative))))


def parse_methods(names: Iterable[str], model: ModelConfig, speculative: SpeculativeConfig) -> list[DraftMethod]:
    """Plain decoding first, then each of names once. Raises ConfigError for a name that is none."""
    known = [PLAIN if name == "none" else name for name in names]
    return [_parse_method(name, model, speculative) for name in dict.fromkeys([PLAIN, *known])]


def _parse_method(name: str, model: ModelConfig, speculative: SpeculativeConfig) -> DraftMethod:
    way, _, draft = name.partition("=")
    method, _, nodes = way.partition(":")
    settings, adjust = SPECIAL.get(method, (AS_PUBLISHED | {"method": method}, None))
    _check_method(str(settings.get("method", speculative.merged_methods)))
    chosen = speculative.model_copy(update=settings | ({"max_nodes": _nodes(name, nodes)} if nodes else {}))
    drafts = tuple(draft.split("+")) if draft else model.drafts
    reads = reads_draft(chosen.merged_methods, drafts)
    if reads and not drafts:
        needed = draft_requirement(chosen.merged_methods)
        raise ConfigError(f"--methods: {method} needs {needed}: set model.draft, or give {method}=DIRECTORY")
    return DraftMethod(name, chosen, drafts if reads else (), _reference_method(method, speculative), adjust)


def _reference_method(method: str, speculative: SpeculativeConfig) -> str:
    """Return the full method, with as many nodes if this one always verifies fewer."""
    counts = {
        "eagle1": len(MC_SIM_7B_63.truncate(speculative.tree_bounds).paths),
        WITHOUT_RERANKING: num_expanded(speculative.max_depth, speculative.top_k),
    }
    nodes = counts.get(method, speculative.max_nodes)
    return PUBLISHED if nodes == speculative.max_nodes else f"{PUBLISHED}:{nodes}"


def _check_method(method: str) -> None:
    try:
        validate_method(method)
    except ValueError as error:
        known = ", ".join([*SPECIAL, *sorted(METHODS.keys() - SPECIAL.keys() - {"none"})])
        raise ConfigError(f"--methods: {error}; there are {known}") from None


def _nodes(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(f"--methods: {name}: what follows the colon is a number of nodes, 1 or more")
    return int(text)


def load_method_weights(
    ways: Iterable[DraftMethod], model: ModelConfig, causal_lm: CausalLM
) -> dict[str, nn.Module | None]:
    """Return the weights of each method, loaded once if several read one draft."""
    loaded: dict[tuple[str | None, tuple[str, ...]], nn.Module | None] = {}
    weights: dict[str, nn.Module | None] = {}
    for way in ways:
        key = (draft_requirement(way.speculative.merged_methods), way.drafts)
        if way.drafts and key not in loaded:
            loaded[key] = load_draft(way.model(model), way.speculative, causal_lm)
        weights[way.name] = loaded.get(key)
    return weights


def _without_value(engine: Engine, speculative: SpeculativeConfig) -> None:
    assert isinstance(engine.drafter, PairDrafter)
    engine.drafter.builder = OwnConfidence


def _without_reranking(engine: Engine, speculative: SpeculativeConfig) -> None:
    engine.planner = ExpandedPlanner(speculative.max_depth, speculative.top_k)


SPECIAL: dict[str, tuple[dict[str, object], Adjust | None]] = {
    PLAIN: ({"method": "none", "budget": "uniform"}, None),
    "eagle1": (AS_PUBLISHED | {"method": "eagle1"}, None),
    PUBLISHED: (AS_PUBLISHED, None),
    WITHOUT_VALUE: (AS_PUBLISHED, _without_value),
    WITHOUT_RERANKING: (AS_PUBLISHED, _without_reranking),
    AUTO: ({"method": AUTO, "sources": None}, None),
    OURS: ({}, None),
}


class OwnConfidence(TreeBuilder):
    """Expands the nodes that are likeliest given their parents, and values a node by the least confidence on its path.

    Choosing by that least one is choosing by the nodes' own confidence, the surest first among those whose parents are
    chosen: all that stand above a threshold, path and all, come before all others.
    """

    def grow(
        self,
        log_probs: Float[Tensor, "B F K"],
        tokens: Int[Tensor, "B F K"],
        draft_log_probs: Float[Tensor, "B F K"] | None = None,
    ) -> None:
        above = self._frontier_values[:, :, None]
        own = log_probs if draft_log_probs is None else draft_log_probs
        super().grow(torch.minimum(above, log_probs) - above, tokens, own)
        self._own = log_probs.flatten(1)

    def best_nodes(self, values: Float[Tensor, "B C"]) -> Int[Tensor, "B F"]:
        return super().best_nodes(self._own)


class ExpandedPlanner(UniformPlanner):
    """Verifies the nodes that EAGLE-2 would have expanded: top_k of each level but the last, which is not drafted."""

    def __init__(self, max_depth: int, top_k: int):
        depth = max(max_depth - 1, 1)
        super().__init__(TreeBounds(num_expanded(max_depth, top_k), depth, top_k))

    def allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        keep = expanded(draft.tree, plan.width)
        num_nodes = min(1 + draft.depth * plan.width, draft.tree.num_nodes)
        return Allocation(keep, num_nodes, len(keep) * num_nodes)


def num_expanded(max_depth: int, top_k: int) -> int:
    """Nodes, roots not counted."""
    return max(max_depth - 1, 1) * top_k


def expanded(tree: DraftTree, width: int) -> Bool[Tensor, "B N"]:
    """Return the root and the `width` most valuable nodes of each level, ties to the earlier one."""
    keep = tree.depths == 0
    for depth in range(1, int(tree.depths.max()) + 1):
        here: Bool[Tensor, "B N"] = (tree.depths == depth) & tree.valid
        order: Int[Tensor, "B N"] = ranks(tree.log_values.masked_fill(~here, -torch.inf))
        keep = keep | (here & (order < width))
    return keep & tree.valid
