"""Parse the names of draft methods to compare, and build an engine for each over one target.

    plain                       no drafts: the baseline of all others
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

A method that verifies fewer nodes than eagle2 is compared with eagle2 of as many: eagle1 with
eagle2:25.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from eagle_ray.assembly.assemble import build_engine
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.load_models import load_draft
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.engine.engine import Engine
from eagle_ray.evaluation.ablations import ExpandedPlanner, OwnConfidence, num_expanded
from eagle_ray.methods.method import (
    ANY_DRAFT,
    AUTO,
    EAGLE_HEAD,
    HEAD_3,
    METHODS,
    draft_requirement,
    methods_without_draft,
    reads_draft,
    validate_method,
)
from eagle_ray.methods.pair_drafter import PairDrafter
from eagle_ray.models.loader import CausalLM
from eagle_ray.tree.static_tree import MC_SIM_7B_63

PLAIN_NAME = "plain"
PUBLISHED = "eagle2"
OURS = "ours"
WITHOUT_VALUE = "eagle2-without-value"
WITHOUT_RERANKING = "eagle2-without-reranking"
Adjust = Callable[[Engine, SpeculativeConfig], None]
AS_PUBLISHED: dict[str, object] = {"method": "eagle2", "budget": "uniform", "ranking": "published"}


@dataclass(frozen=True, slots=True)
class DraftMethod:
    """A method that is compared with others.

    Attributes:
        name: name of the method in tables.
        drafts: draft models that it reads.
        reference: name of the method that it is compared with.
        adjust: function that changes its engine.
    """

    name: str
    speculative: SpeculativeConfig
    drafts: tuple[str, ...]
    reference: str
    adjust: Adjust | None = None

    def model(self, model: ModelConfig) -> ModelConfig:
        """Return the models with the method's own drafts."""
        draft: str | list[str] | None = list(self.drafts) or None
        if len(self.drafts) == 1:
            draft = self.drafts[0]
        return model.model_copy(update={"draft": draft})

    def as_json(self) -> dict[str, object]:
        """Return the method's drafts, by their names, and its settings."""
        return {"draft": " + ".join(self.drafts) or None, **self.speculative.model_dump()}

    def engine(
        self, causal_lm: CausalLM, weights: nn.Module | None, slots: int, max_model_len: int
    ) -> Engine:
        """Return a new engine of the method.

        Args:
            weights: loaded drafts of the method.
        """
        args = EngineArgs(slots, max_model_len, kv_tokens=None)
        engine = build_engine(causal_lm, weights, self.speculative, args)
        if self.adjust is not None:
            self.adjust(engine, self.speculative)
        return engine


def default_names(speculative: SpeculativeConfig) -> list[str]:
    """Return the names of all methods that the job's model.draft allows or that need none, with their references."""
    alone = methods_without_draft()
    method = speculative.merged_methods
    if draft_requirement(method) not in (EAGLE_HEAD, HEAD_3, ANY_DRAFT):
        return alone if method == "none" else list(dict.fromkeys([method, *alone]))

    merged = [f"{PUBLISHED}+suffix"] if "suffix" in alone else []
    published_trees = [method.name for method in METHODS.values() if method.planner is not None]
    names = [*published_trees, PUBLISHED, WITHOUT_VALUE, WITHOUT_RERANKING, OURS, *alone, *merged]
    with_references: dict[str, None] = {}  # each once, in this order
    for name in names:
        with_references[name] = None
        with_references[_reference_method(name, speculative)] = None
    return list(with_references)


def parse_methods(
    names: Iterable[str], model: ModelConfig, speculative: SpeculativeConfig
) -> list[DraftMethod]:
    """Return plain decoding, then each of names once. Raises ConfigError for a name that is none."""
    known = [PLAIN_NAME if name == "none" else name for name in names]
    return [_parse_method(name, model, speculative) for name in dict.fromkeys([PLAIN_NAME, *known])]


def _parse_method(name: str, model: ModelConfig, speculative: SpeculativeConfig) -> DraftMethod:
    way, _, draft = name.partition("=")
    method, _, nodes = way.partition(":")
    settings, adjust = SPECIAL.get(method, (AS_PUBLISHED | {"method": method}, None))
    _check_method(str(settings.get("method", speculative.merged_methods)))
    if nodes:
        settings = settings | {"max_nodes": _nodes(name, nodes)}
    chosen = speculative.model_copy(update=settings)

    drafts = tuple(draft.split("+")) if draft else model.drafts
    reads = reads_draft(chosen.merged_methods, drafts)
    if reads and not drafts:
        needed = draft_requirement(chosen.merged_methods)
        raise ConfigError(
            f"--methods: {method} needs {needed}: set model.draft, or give {method}=DIRECTORY"
        )
    reference = _reference_method(method, speculative)
    return DraftMethod(name, chosen, drafts if reads else (), reference, adjust)


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
        raise ConfigError(
            f"--methods: {name}: what follows the colon is a number of nodes, 1 or more"
        )
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
    PLAIN_NAME: ({"method": "none", "budget": "uniform"}, None),
    "eagle1": (AS_PUBLISHED | {"method": "eagle1"}, None),
    PUBLISHED: (AS_PUBLISHED, None),
    WITHOUT_VALUE: (AS_PUBLISHED, _without_value),
    WITHOUT_RERANKING: (AS_PUBLISHED, _without_reranking),
    AUTO: ({"method": AUTO, "sources": None}, None),
    OURS: ({}, None),
}
