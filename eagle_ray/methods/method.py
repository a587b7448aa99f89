"""Drafting methods that a job can select, and what each requires as model.draft.

    speculative.method: eagle2
    speculative.method: eagle2+suffix              the nodes of both in one tree
    speculative.method: draft_model+draft_model    SpecInfer: two models, model.draft is the list of them
    speculative.method: auto                       the fastest of those that can run, by a trial on the first prompts

``eagle_ray.methods.registry`` builds their drafters.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

HEAD = "an EAGLE head"
HEAD_3 = "an EAGLE-3 head"
MEDUSA = "Medusa heads"
HYDRA = "Hydra heads"
DFLASH = "a DFlash head, or a causal head of JetSpec"
DRAFT_MODEL = "a small causal LM of the target's vocabulary"
ANY_DRAFT = "a head or draft model of any kind"
AUTO = "auto"  # tries the method of model.draft, if there is one, and WITHOUT_DRAFT
WITHOUT_DRAFT = ("suffix", "ngram", "none")
DATASTORE = "rest"  # the method that reads speculative.datastore

# What model.draft must be for each method; None for methods that use no draft model.
DRAFT_REQUIREMENT: dict[str, str | None] = {
    "auto": ANY_DRAFT,  # optional: see reads_draft
    "ddd": HEAD,  # Dynamic Depth Decoding: EAGLE-2's tree, as deep as its beam is probable
    "dflash": DFLASH,  # a block of tokens in one pass, as a tree by the products of its positions' distributions
    "draft_model": DRAFT_MODEL,  # speculative sampling with an independent model, on EAGLE-2's dynamic tree
    "eagle1": HEAD,  # EAGLE-1's static tree; accepts EAGLE-1, -2 and -3 heads
    "eagle2": HEAD,  # EAGLE-2's dynamic tree; accepts EAGLE-1, -2 and -3 heads
    "eagle3": HEAD_3,  # EAGLE-2's dynamic tree; requires an EAGLE-3 head
    "hydra": HYDRA,  # one head per tree level, conditioned on the drafted path
    "lookahead": None,  # lookahead decoding: n-grams from the target's predictions on its own guesses
    "medusa": MEDUSA,  # one head per tree level, conditioned on the target's last feature
    "ngram": None,  # prompt lookup: continuations of matching tokens earlier in the sequence
    "none": None,  # plain decoding
    "opt_tree": HEAD,  # OPT-Tree: EAGLE-2's tree, as deep as another level adds expected drafts
    "recycling": None,  # Token Recycling: the target's latest top tokens after each token
    "rest": None,  # REST: continuations of matching tokens in speculative.datastore
    "sequoia": HEAD,  # Sequoia: the best static tree for the acceptance rates measured so far
    "suffix": None,  # continuations of the longest matching suffix in any sequence
}
OWN_PLANNERS = {"ddd", "eagle1", "opt_tree", "sequoia"}  # which decide their trees and ignore speculative.budget


def validate_method(method: str) -> str:
    """Return the method unchanged. Raises ValueError if a part is unknown or if its parts cannot be merged."""
    parts = method.split("+")
    for part in parts:
        if part not in DRAFT_REQUIREMENT:
            near = difflib.get_close_matches(part, DRAFT_REQUIREMENT, 1)
            raise ValueError(f"{part!r} is no method" + (f"; did you mean {near[0]}?" if near else ""))
    alike = [part for part in parts if parts.count(part) > 1 and DRAFT_REQUIREMENT[part] is None]
    if alike or (len(parts) > 1 and "none" in parts):
        raise ValueError("the parts of a merge are different ways of drafting, or read different drafts")
    if len(parts) > 1 and AUTO in parts:
        raise ValueError("auto chooses a whole method, so it cannot be merged")
    if len(parts) > 1 and (alone := OWN_PLANNERS & set(parts)):
        raise ValueError(f"{min(alone)} decides its tree alone, so it cannot be merged")
    return method


def draft_parts(method: str) -> list[str]:
    """Return the parts of a method that read model.draft, in order."""
    return [part for part in method.split("+") if DRAFT_REQUIREMENT[part] is not None]


def draft_requirement(method: str) -> str | None:
    """Return what model.draft must be, or None if the method uses no draft model; several are joined by "and"."""
    return " and ".join(str(DRAFT_REQUIREMENT[part]) for part in draft_parts(method)) or None


def plain_decoding_note(method: str, drafts: Sequence[str]) -> str | None:
    """Return what plain decoding of a target without a draft costs and what avoids it; None for other settings."""
    if method != "none" or drafts:
        return None
    free = [name for name, needed in DRAFT_REQUIREMENT.items() if needed is None and name not in ("none", DATASTORE)]
    return (
        "no draft, so each pass of the target gives one token. Name a head as model.draft for several, with the same "
        f"outputs, or set speculative.method to one that needs none: {', '.join([*free, AUTO])}"
    )


def reads_draft(method: str, drafts: Sequence[str]) -> bool:
    """Return whether the method reads model.draft; auto does if it is set."""
    needed = draft_requirement(method)
    return needed is not None and not (needed == ANY_DRAFT and not drafts)
