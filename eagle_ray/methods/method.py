"""Method: one record for each way to draft, all of them in METHODS. CONTRACT.md says how to add one.

    speculative.method: eagle2
    speculative.method: eagle2+suffix              the nodes of both in one tree
    speculative.method: draft_model+draft_model    SpecInfer: two models, model.draft is the list of them
    speculative.method: auto                       all sources of drafts that fit, or those of speculative.sources
    speculative.sources: [head, suffix, grammar]   the same as a list; the names are those of methods, and grammar

    METHODS["eagle2"].make_drafter(speculative, target, weights)       # imports eagle/drafter.py

Records name functions as "module:function" of their folder, which are imported when they are
called: configurations read the records without torch, and an engine imports only its own method.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from eagle_ray.core.tree_bounds import TreeBounds

EAGLE_HEAD = "an EAGLE head"
HEAD_3 = "an EAGLE-3 head"
ANY_DRAFT = "a head or draft model of any kind"
AUTO = "auto"
GRAMMAR = "grammar"  # a source that is no method: tokens that a sequence's grammar predicts
SOURCES = ("head", "suffix", "ngram")  # the methods of auto; the head only where model.draft is set
ALL_TOKENS = "all"  # as speculative.draft_vocab
MAX_WARMUP_SHARE = 0.05  # share of a run: the published numbers are those of 800,000 steps


@runtime_checkable
class DraftSettings(Protocol):
    """Keys of the `speculative` section that drafters and planners read."""

    max_nodes: int
    max_depth: int
    top_k: int
    datastore: str | None
    draft_vocab: str | None
    draft_vocab_size: int | None

    @property
    def merged_methods(self) -> str: ...

    @property
    def ranking(self) -> str: ...

    @property
    def tree_bounds(self) -> TreeBounds: ...


@dataclass(frozen=True, slots=True)
class Training:
    """How the heads of a method are trained, with the numbers of its paper.

    Attributes:
        rate: peak learning rate.
        warmup_steps: at most warmup_share of the run; None is that share.
        passes: unrolled passes, in which the head reads its own outputs.
    """

    rate: float
    warmup_steps: int | None = None
    warmup_share: float = MAX_WARMUP_SHARE
    passes: int = 1


@dataclass(frozen=True, slots=True)
class Method:
    """A way to draft.

    Attributes:
        name: value of speculative.method that selects it.
        about: one line of prose.
        folder: where its functions are, below eagle_ray/methods.
        draft: kind of draft that model.draft must name, in words; None if the method reads none.
        check, load: functions that read a draft's headers, and its weights.
        drafter: function that makes the drafter.
        planner: function that makes the planner of a method that decides its tree alone; None
            leaves the tree to speculative.budget.
        is_kind: whether source `head` may choose this method by looking at the draft's files.
        reads_datastore: it reads speculative.datastore.
        recipe: the class that trains its heads; None if `eagle-ray train` makes none.
        training: the numbers of that training.
    """

    name: str
    about: str
    folder: str
    draft: str | None = None
    check: str = "checkpoint:check"
    load: str = "checkpoint:load"
    drafter: str = "drafter:make_drafter"
    planner: str | None = None
    is_kind: bool = False
    reads_datastore: bool = False
    recipe: str | None = None
    training: Training | None = None

    def check_draft(self, path: Path, target: Any) -> Any:
        """Return the draft in a directory without its weights. Raises EngineError if it does not fit.

        Args:
            target: the target's config.
        """
        return self.function(self.check)(path, target)

    def load_draft(self, path: Path, target: Any, ranks: Any | None = None) -> Any:
        """Return the draft in a directory, in fp32. Raises EngineError if it cannot be read or does not fit.

        Args:
            ranks: the target's RankGroup, which may share the draft; None loads all of it.
        """
        return self.function(self.load)(path, target, ranks)

    def make_drafter(self, speculative: DraftSettings, target: Any, weights: Any) -> Any:
        """Return a drafter over the target.

        Args:
            weights: result of `load_draft`, or None.
        """
        return self.function(self.drafter)(speculative, target, weights)

    def make_planner(self, speculative: DraftSettings, drafter: Any) -> Any | None:
        """Return the method's own planner, or None if speculative.budget decides."""
        return None if self.planner is None else self.function(self.planner)(speculative, drafter)

    def recipe_class(self) -> Any:
        """Return the class that trains the method's heads. The method must have a recipe."""
        assert self.recipe is not None, f"{self.name} has no recipe"
        return self.function(self.recipe)

    def function(self, reference: str) -> Callable[..., Any]:
        """Import the module of a "module:function" reference of this record and return its function or class."""
        module, _, name = reference.partition(":")
        return getattr(import_module(f"eagle_ray.methods.{self.folder}.{module}"), name)


METHODS = {
    method.name: method
    for method in (
        Method(
            "eagle1",
            "EAGLE-1's static tree; takes EAGLE-1, -2 and -3 heads",
            "eagle",
            draft=EAGLE_HEAD,
            planner="published_trees:eagle1_planner",
        ),
        Method(
            "eagle2",
            "EAGLE-2's dynamic tree; takes EAGLE-1, -2 and -3 heads",
            "eagle",
            draft=EAGLE_HEAD,
            is_kind=True,
            recipe="recipe:EagleRecipe",
            training=Training(rate=3e-5, warmup_steps=2000),
        ),
        Method(
            "eagle3",
            "EAGLE-2's dynamic tree; takes an EAGLE-3 head",
            "eagle",
            draft=HEAD_3,
            check="checkpoint:check_eagle3",
            load="checkpoint:load_eagle3",
            recipe="recipe:Eagle3Recipe",
            training=Training(rate=5e-5, warmup_steps=12000, passes=7),
        ),
        Method(
            "peagle",
            "P-EAGLE: all levels in one pass, over masks; takes a P-EAGLE head",
            "eagle",
            draft="a P-EAGLE head",
            check="checkpoint:check_peagle",
            load="checkpoint:load_peagle",
            drafter="parallel_drafter:make_parallel_drafter",
            is_kind=True,
        ),
        Method(
            "sequoia",
            "Sequoia: the best static tree for the acceptance rates measured so far",
            "eagle",
            draft=EAGLE_HEAD,
            drafter="published_trees:make_sequoia_drafter",
            planner="published_trees:sequoia_planner",
        ),
        Method(
            "ddd",
            "Dynamic Depth Decoding: EAGLE-2's tree, as deep as its beam is probable",
            "eagle",
            draft=EAGLE_HEAD,
            drafter="published_trees:make_published_drafter",
            planner="published_trees:ddd_planner",
        ),
        Method(
            "opt_tree",
            "OPT-Tree: EAGLE-2's tree, as deep as another level adds expected drafts",
            "eagle",
            draft=EAGLE_HEAD,
            drafter="published_trees:make_published_drafter",
            planner="published_trees:opt_tree_planner",
        ),
        Method(
            "medusa",
            "one head per tree level, conditioned on the target's last feature",
            "medusa",
            draft="Medusa heads",
            check="checkpoint:check_medusa",
            load="checkpoint:load_medusa",
            is_kind=True,
            recipe="recipe:MedusaRecipe",
            training=Training(rate=1e-3, warmup_steps=40),
        ),
        Method(
            "hydra",
            "one head per tree level, conditioned on the drafted path",
            "medusa",
            draft="Hydra heads",
            check="checkpoint:check_hydra",
            load="checkpoint:load_hydra",
            is_kind=True,
            recipe="recipe:MedusaRecipe",
            training=Training(rate=1e-3, warmup_steps=40),
        ),
        Method(
            "dflash",
            "a block of tokens in one pass, as a tree by the products of its positions' distributions, or by paths",
            "dflash",
            draft="a head of DFlash, DFlash2, DSpark or Domino, or a causal head of JetSpec",
            check="checkpoint:meta_dflash",
            load="checkpoint:load_dflash",
            is_kind=True,
            recipe="recipe:DFlashRecipe",
            training=Training(rate=6e-4, warmup_share=0.04),
        ),
        Method(
            "draft_model",
            "speculative sampling with an independent model, on EAGLE-2's dynamic tree",
            "draft_model",
            draft="a small causal LM of the target's vocabulary",
            check="checkpoint:check_draft_model",
            load="checkpoint:load_draft_model",
            is_kind=True,
        ),
        Method(
            "suffix",
            "continuations of the longest matching suffix in any sequence",
            "lookup",
            drafter="suffix:make_drafter",
        ),
        Method(
            "ngram",
            "prompt lookup: continuations of matching tokens earlier in the sequence",
            "lookup",
        ),
        Method(
            "recycling",
            "Token Recycling: the target's latest top tokens after each token",
            "lookup",
            drafter="token_recycling:make_drafter",
        ),
        Method(
            "lookahead",
            "lookahead decoding: n-grams from the target's predictions on its own guesses",
            "lookup",
            drafter="lookahead:make_drafter",
        ),
        Method(
            "rest",
            "REST: continuations of matching tokens in speculative.datastore",
            "lookup",
            drafter="rest:make_drafter",
            reads_datastore=True,
        ),
        Method(
            "none",
            "plain decoding",
            "combine",
            drafter="drafter:make_null_drafter",
        ),
        Method(
            "head",
            "the method of model.draft's own kind",
            "combine",
            draft=ANY_DRAFT,
            check="published_heads:check_any_draft",
            load="published_heads:load_any_draft",
            drafter="drafter:make_head_drafter",
        ),
    )
}


def parts_of(method: str) -> list[Method]:
    """Return the records of the methods whose drafts are merged; one record if nothing is merged."""
    return [METHODS[name] for name in (SOURCES if method == AUTO else method.split("+"))]


def validate_method(method: str) -> str:
    """Return the method unchanged. Raises ValueError if a part is unknown or if its parts cannot be merged."""
    if method == AUTO:
        return method
    names = method.split("+")
    if AUTO in names:
        raise ValueError(
            "auto is all sources that fit, so nothing is merged with it; name the parts"
        )
    for name in names:
        if name not in METHODS:
            near = difflib.get_close_matches(name, sorted([*METHODS, AUTO]), 1)
            raise ValueError(
                f"{name!r} is no method" + (f"; did you mean {near[0]}?" if near else "")
            )
    alike = [part for part in parts_of(method) if names.count(part.name) > 1 and part.draft is None]
    if alike or (len(names) > 1 and "none" in names):
        raise ValueError(
            "the parts of a merge are different ways of drafting, or read different drafts"
        )
    alone = [part.name for part in parts_of(method) if part.planner is not None]
    if len(names) > 1 and alone:
        raise ValueError(f"{min(alone)} decides its tree alone, so it cannot be merged")
    return method


def validate_sources(names: Sequence[str]) -> None:
    """Raise ValueError unless these names are sources of drafts that can share a tree."""
    if names.count(GRAMMAR) > 1:
        raise ValueError(f"{GRAMMAR} is named twice")
    validate_method(merged(names))


def merged(sources: Sequence[str]) -> str:
    """Return the method name that merges these sources: joined by +, with the grammar left out."""
    return "+".join(name for name in sources if name != GRAMMAR) or "none"


def spelled_out(method: str, drafts: Sequence[str]) -> str:
    """Return a method name with `auto` replaced by the methods that fit, joined by +."""
    parts = [part for part in parts_of(method) if part.draft is None or reads_draft(method, drafts)]
    return "+".join(part.name for part in parts)


def draft_parts(method: str) -> list[Method]:
    """Return the parts of a method that read model.draft, in order."""
    return [part for part in parts_of(method) if part.draft is not None]


def draft_requirement(method: str) -> str | None:
    """Return what model.draft must be, or None if the method uses no draft model; several are joined by "and"."""
    return " and ".join(str(part.draft) for part in draft_parts(method)) or None


def reads_draft(method: str, drafts: Sequence[str]) -> bool:
    """Return whether the method reads model.draft; auto does if it is set."""
    return draft_requirement(method) is not None and not (method == AUTO and not drafts)


def plans_alone(method: str) -> bool:
    """Return whether the method decides its tree and ignores speculative.budget."""
    return any(part.planner is not None for part in parts_of(method))


def methods_without_draft() -> list[str]:
    """Return the methods that need no draft model and no file."""
    drafting = [
        method
        for method in METHODS.values()
        if method.name != "none" and not method.reads_datastore
    ]
    return sorted(method.name for method in drafting if method.draft is None)


def trained_methods() -> list[str]:
    """Return the methods whose heads `eagle-ray train` makes."""
    return [method.name for method in METHODS.values() if method.training is not None]


def training_of(method: str) -> Training:
    """Return how a method's heads are trained. Raises ValueError if they are not."""
    training = METHODS[method].training if method in METHODS else None
    if training is None:
        raise ValueError(f"{method!r} has no training")
    return training


def plain_decoding_note(method: str, drafts: Sequence[str]) -> str | None:
    """Return a warning that a target without a draft runs at plain speed, with a remedy; None if it does not apply."""
    if method not in ("none", AUTO) or drafts:
        return None
    if method == AUTO:
        return (
            "no draft, so drafts are looked up in earlier text alone. Name a head as model.draft for more tokens per "
            "pass of the target, with the same outputs"
        )
    return (
        "no draft, so each pass of the target gives one token. Name a head as model.draft for several, with the same "
        f"outputs, or set speculative.method to one that needs none: {', '.join([*methods_without_draft(), AUTO])}"
    )
