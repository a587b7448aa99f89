"""Ways: what the comparison of methods can compare, by name, and an engine for each over the same target.

    plain                       no drafts: what the others are held against
    eagle2                      as published: the same tree for everyone, the head's own confidences, nothing calibrated
    eagle2-without-value        the paper's ablations (`ablations.py`)
    eagle2-without-reranking
    ours                        the job's own `speculative` section
    any other method            of config/methods.py, with the job's tree for everyone
    medusa=DIR                  a method with a model.draft of its own

Does not know prompts or clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from eagle_ray.benchmark.ablations import ExpandedPlanner, OwnConfidence
from eagle_ray.config import ConfigError, ModelConfig, SpeculativeConfig
from eagle_ray.config.methods import HEAD, HEAD_3, NEEDS, known_method, needs
from eagle_ray.engine.engine import Engine
from eagle_ray.pair import build_engine, load_draft

PLAIN, PUBLISHED, OURS = "plain", "eagle2", "ours"
TREES = ("eagle1", "sequoia")  # other trees over the same head
WITHOUT_VALUE, WITHOUT_RERANKING = "eagle2-without-value", "eagle2-without-reranking"
Adjust = Callable[[Engine, SpeculativeConfig], None]
AS_PUBLISHED = {"method": "eagle2", "budget": "uniform", "coupled": False}


@dataclass(frozen=True, slots=True)
class Way:
    """name: as it stands in tables. draft: model.draft, None where it reads none. adjust: done to its engine."""

    name: str
    speculative: SpeculativeConfig
    draft: str | None
    adjust: Adjust | None = None

    def engine(self, causal_lm: nn.Module, weights: nn.Module | None, slots: int, max_model_len: int) -> Engine:
        """weights: what the method reads from `draft`."""
        engine = build_engine(causal_lm, weights, self.speculative, slots, max_model_len)
        if self.adjust is not None:
            self.adjust(engine, self.speculative)
        return engine


def default_names(speculative: SpeculativeConfig) -> list[str]:
    """All that the job's own model.draft allows, and what needs none."""
    alone = [name for name, needed in NEEDS.items() if needed is None and name not in ("none", "rest")]
    if needs(speculative.method) not in (HEAD, HEAD_3):
        return alone if speculative.method == "none" else list(dict.fromkeys([speculative.method, *alone]))
    other_trees = [name for name in TREES if name in NEEDS]
    return [*other_trees, PUBLISHED, WITHOUT_VALUE, WITHOUT_RERANKING, OURS, *alone]


def ways_of(names: Iterable[str], model: ModelConfig, speculative: SpeculativeConfig) -> list[Way]:
    """Plain decoding first, then each of names once. Raises ConfigError for a name that is none."""
    return [_way(name, model, speculative) for name in dict.fromkeys([PLAIN, *names])]


def _way(name: str, model: ModelConfig, speculative: SpeculativeConfig) -> Way:
    method, _, draft = name.partition("=")
    settings, adjust = SPECIAL.get(method, ({"method": method, "budget": "uniform", "coupled": False}, None))
    try:
        known_method(settings.get("method", speculative.method))
    except ValueError as error:
        known = ", ".join([*SPECIAL, *(each for each in NEEDS if each not in SPECIAL and each != "none")])
        raise ConfigError(f"--methods: {error}; there are {known}") from None
    speculative = speculative.model_copy(update=settings)
    needed = needs(speculative.method)
    draft = draft or model.draft
    if needed is not None and draft is None:
        raise ConfigError(f"--methods: {method} needs {needed}: set model.draft, or give {method}=DIRECTORY")
    return Way(name, speculative, None if needed is None else draft, adjust)


def weights_of(ways: Iterable[Way], model: ModelConfig, causal_lm: nn.Module) -> dict[str, nn.Module | None]:
    """What each way reads from its draft, loaded once for all that read the same."""
    loaded: dict[tuple[str | None, str | None], nn.Module | None] = {(None, None): None}
    found = {}
    for way in ways:
        key = (needs(way.speculative.method), way.draft)
        if key not in loaded:
            loaded[key] = load_draft(model.model_copy(update={"draft": way.draft}), way.speculative, causal_lm)
        found[way.name] = loaded[key]
    return found


def _uncalibrated(engine: Engine, speculative: SpeculativeConfig) -> None:
    """The ranking of EAGLE-2 as it was published."""
    engine.drafter.ranking.calibration = None


def _without_value(engine: Engine, speculative: SpeculativeConfig) -> None:
    _uncalibrated(engine, speculative)
    engine.drafter.builder = OwnConfidence


def _without_reranking(engine: Engine, speculative: SpeculativeConfig) -> None:
    _uncalibrated(engine, speculative)
    engine.planner = ExpandedPlanner(speculative.max_nodes, speculative.max_depth, speculative.top_k)


SPECIAL: dict[str, tuple[dict[str, object], Adjust | None]] = {
    PLAIN: ({"method": "none", "budget": "uniform"}, None),
    PUBLISHED: (AS_PUBLISHED, _uncalibrated),
    WITHOUT_VALUE: (AS_PUBLISHED, _without_value),
    WITHOUT_RERANKING: (AS_PUBLISHED, _without_reranking),
    OURS: ({}, None),
}
