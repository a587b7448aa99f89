"""The catalogue of published draft heads (``assets/heads.yaml``): which heads a target has, and in which order.

    [match, *_] = matches(TargetFacts.named("Qwen/Qwen3-8B"))
    match.target.id                                   # Qwen/Qwen3-8B
    in_order([match])[0].head.id                        # deepseek-ai/dspark_qwen3_8b_block7

It needs no torch and no network.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

CATALOGUE = Path(__file__).parents[1] / "assets" / "heads.yaml"
# Of heads that are alike otherwise, the earlier method is taken.
METHOD_ORDER = ("eagle3", "peagle", "dflash", "eagle2", "eagle1", "hydra", "medusa", "draft_model")
SHAPE_KEYS = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
# Without these a config's shape is not known; Gemma 3's leaves vocab_size to transformers' default.
REQUIRED_SHAPE = ("model_type", "hidden_size", "num_hidden_layers")
NOT_IN_NAMES = re.compile(r"[^a-z0-9.]+")
# What the names of copies in another format end in.
FORMAT = re.compile(
    r"([-_.](gguf|awq|gptq|bnb|fp8|fp16|bf16|mxfp4|nvfp4|int[48]|[48]bits?|w\da\d+|dynamic|block|quantized|unsloth))+$"
)


class Relation(enum.IntEnum):
    """How a target is related to a target of the catalogue, the closest relation first.

    Attributes:
        SAME: it is that repository, or another one with equal weights.
        COPY: its card or the end of its name says that it is a quantised copy.
        SAVED: its config.json says that it was loaded from there when it was saved.
        FINE_TUNE: its card names that repository, or the base model of both.
        SHAPE_AND_NAME: it has that target's shapes, and the family's name is part of its own.
        SHAPE: it has that target's shapes.
        NAME: the family's name is part of its own, and its shapes are unknown.
    """

    SAME = 0
    COPY = 1
    SAVED = 2
    FINE_TUNE = 3
    SHAPE_AND_NAME = 4
    SHAPE = 5
    NAME = 6


@dataclass(frozen=True, slots=True)
class CatalogueHead:
    """A published head. The fields are those of ``assets/heads.yaml``."""

    id: str
    method: str
    layout: str
    tau: float | None = None
    source: str | None = None
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class CatalogueTarget:
    """A target with published heads. The fields are those of ``assets/heads.yaml``."""

    id: str
    family: str
    heads: tuple[CatalogueHead, ...]
    same: tuple[str, ...] = ()
    base: tuple[str, ...] = ()
    shape: Mapping[str, Any] = field(default_factory=dict)
    refused: str | None = None

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> CatalogueTarget:
        """Build a target from an entry of the file."""
        lists = {key: tuple(raw.get(key, ())) for key in ("same", "base")}
        heads = tuple(CatalogueHead(**head) for head in raw["heads"])
        return cls(**{**raw, **lists, "heads": heads})

    @property
    def ids(self) -> frozenset[str]:
        """Return all repositories that hold its weights, in lower case."""
        return frozenset(name.lower() for name in (self.id, *self.same))

    @property
    def bare_names(self) -> frozenset[str]:
        """Return its repositories' names without their owners, which directories are often named by."""
        return frozenset(name.rpartition("/")[2] for name in self.ids)


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Facts about a target by which its heads are found in the catalogue.

    Attributes:
        name: name that the user gives it.
        ids: possible repositories: its hub id, or names made from its directory.
        saved_from: `_name_or_path` of its config.json.
        base_models: base models that its card names.
        is_quantized: whether its card says that it is a quantised copy of the base models.
        shape: values of SHAPE_KEYS in its config; empty if the config is not available.
    """

    name: str
    ids: tuple[str, ...]
    saved_from: str | None = None
    base_models: tuple[str, ...] = ()
    is_quantized: bool = False
    shape: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def named(cls, name: str) -> TargetFacts:
        """Return the facts about a target of which only the name is known."""
        return cls(name, (name,))


@dataclass(frozen=True, slots=True)
class Match:
    """A target of the catalogue, and how the user's target is related to it."""

    target: CatalogueTarget
    relation: Relation

    @property
    def note(self) -> str:
        """Return a sentence, without a full stop, on how well the heads fit, by the relation of the models."""
        name = self.target.id
        return {
            Relation.SAME: f"heads of {name}",
            Relation.COPY: f"a quantised copy of {name}: its heads fit",
            Relation.SAVED: f"saved from {name}: its heads fit in shape; acceptance will be lower if it was trained "
            "since",
            Relation.FINE_TUNE: f"heads of {name} fit in shape; acceptance will be lower",
            Relation.SHAPE_AND_NAME: f"heads of {name} fit in shape; acceptance will be lower",
            Relation.SHAPE: f"heads of {name} fit in shape; acceptance will be lower",
            Relation.NAME: f"by its name alone, heads of {name} fit if it has that model's shapes; "
            "acceptance will be lower",
        }[self.relation]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A head that may fit, and how the user's target is related to the head's own."""

    head: CatalogueHead
    match: Match

    @property
    def refused(self) -> str | None:
        """Return the reason why the head does not run here (its target or its layout), or None if it does."""
        of_target = self.match.target.refused
        return self.head.refused if of_target is None else f"target: {of_target}"


@cache
def catalogue() -> tuple[CatalogueTarget, ...]:
    """Return all targets of the catalogue, in the file's order."""
    raw = yaml.safe_load(CATALOGUE.read_text("utf-8"))
    return tuple(CatalogueTarget.of(target) for target in raw["targets"])


def of_family(name: str) -> list[CatalogueTarget]:
    """Return the catalogue's targets of a family such as Qwen3. Empty if the name is no family's."""
    wanted = words_of(name)
    if not wanted:
        return []
    spelled = "".join(wanted)  # gemma3 and gpt_oss are Gemma-3 and gpt-oss
    known = [(words_of(target.family), target) for target in catalogue()]
    exact = [target for words, target in known if "".join(words) == spelled]
    return exact or [target for words, target in known if spelled in accumulate(words)]


def matches(facts: TargetFacts) -> list[Match]:
    """Return the targets of the catalogue whose heads may fit this target, the closest relation first."""
    related = []
    for target in catalogue():
        relation = _relation(target, facts)
        if relation is not None:
            related.append(Match(target, relation))
    if not related:
        return []

    # A card or an id says more than a name, and a name says more than shapes.
    closest = min(match.relation for match in related)
    limit = Relation.FINE_TUNE if closest <= Relation.FINE_TUNE else closest
    return sorted((m for m in related if m.relation <= limit), key=lambda match: match.relation)


def _relation(target: CatalogueTarget, facts: TargetFacts) -> Relation | None:
    """Return the relation between the target and one of the catalogue's targets, or None if they are unrelated."""
    if any(name.lower() in target.ids for name in facts.ids):
        return Relation.SAME
    if any(facts.shape.get(key, size) != size for key, size in target.shape.items()):
        return None
    has_shape = bool(target.shape) and {*REQUIRED_SHAPE} <= facts.shape.keys()
    if any(name.lower() in target.bare_names for name in facts.ids):
        return Relation.SAME
    if any(_without_format(name) in target.bare_names for name in facts.ids):
        return Relation.COPY
    if facts.saved_from is not None and facts.saved_from.lower() in target.ids:
        return Relation.SAVED

    bases = {name.lower() for name in facts.base_models}
    if bases & target.ids:
        return Relation.COPY if facts.is_quantized else Relation.FINE_TUNE
    if bases & {name.lower() for name in target.base}:
        return Relation.FINE_TUNE

    is_named = any(contains_words(name, target.family) for name in facts.ids)
    if has_shape:
        return Relation.SHAPE_AND_NAME if is_named else Relation.SHAPE
    return Relation.NAME if is_named else None


def _without_format(name: str) -> str:
    """Return a repository's name in lower case, without its owner and the format of its weights: -GGUF, -AWQ."""
    return FORMAT.sub("", name.rpartition("/")[2].lower())


def in_order(related: Iterable[Match]) -> list[Candidate]:
    """Return the heads of these targets in the order in which `model.draft: auto` tries them.

    Heads that run here come first, then the closest relation of the targets, the largest known tau,
    the method by METHOD_ORDER, and the order of the file. configs/README.md states this order.
    """
    candidates = [Candidate(head, match) for match in related for head in match.target.heads]

    def key(candidate: Candidate) -> tuple[bool, int, float, int]:
        head = candidate.head
        is_refused = candidate.refused is not None
        tau = head.tau or 0.0
        return is_refused, candidate.match.relation, -tau, METHOD_ORDER.index(head.method)

    return sorted(candidates, key=key)


def words_of(name: str) -> tuple[str, ...]:
    """Return the words of a name in lower case: qwen, qwen3 and 8b for Qwen/Qwen3-8B."""
    return tuple(word for word in NOT_IN_NAMES.split(name.lower()) if word)


def contains_words(name: str, family: str) -> bool:
    """Return whether a family's name occurs in a name as a sequence of whole words."""
    words: Sequence[str] = words_of(name)
    wanted = words_of(family)
    starts = range(len(words) - len(wanted) + 1)
    return any(tuple(words[i : i + len(wanted)]) == wanted for i in starts)
