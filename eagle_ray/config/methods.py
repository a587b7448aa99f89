"""Methods: the ways of drafting that a job can name, and what each needs as model.draft.

    speculative.method: eagle2
    speculative.method: eagle2+suffix      the nodes of both in one tree

What builds them is `methods.py` beside this package.
"""

from __future__ import annotations

import difflib

HEAD = "an EAGLE head"
HEAD_3 = "an EAGLE-3 head"
MEDUSA = "Medusa heads"
HYDRA = "Hydra heads"
DRAFT_MODEL = "a small causal LM of the target's vocabulary"
DATASTORE = "rest"  # the method that draws on speculative.datastore

# The name of a method, and what model.draft must be for it; None where it drafts without one.
DRAFT_REQUIREMENT: dict[str, str | None] = {
    "draft_model": DRAFT_MODEL,  # speculative sampling with an independent model, on EAGLE-2's dynamic tree
    "eagle1": HEAD,  # EAGLE-1's static tree; the head may be of any generation
    "eagle2": HEAD,  # EAGLE-2's dynamic tree; the head may be of any generation
    "eagle3": HEAD_3,  # the same tree, and the head must be of EAGLE-3
    "hydra": HYDRA,  # one head for each level, which reads the drafted path
    "lookahead": None,  # what the target made of its own guesses: lookahead decoding
    "medusa": MEDUSA,  # one head for each level, which reads the target's last feature
    "ngram": None,  # what followed the same tokens earlier in the sequence: prompt lookup
    "none": None,  # plain decoding
    "recycling": None,  # what the target last had in mind after each token: Token Recycling
    "rest": None,  # what followed the same tokens in speculative.datastore: REST
    "sequoia": HEAD,  # the static tree that is best for the acceptance measured so far
    "suffix": None,  # what followed the longest run of tokens that occurred before, in any sequence
}
FIXED_TREES = {"eagle1", "sequoia"}  # which nodes there are does not depend on what they are worth


def validate_method(method: str) -> str:
    """The method as given. Raises ValueError where a part of it is not one, or where parts do not go together."""
    parts = method.split("+")
    for part in parts:
        if part not in DRAFT_REQUIREMENT:
            near = difflib.get_close_matches(part, DRAFT_REQUIREMENT, 1)
            raise ValueError(f"{part!r} is no method" + (f"; did you mean {near[0]}?" if near else ""))
    if len(set(parts)) < len(parts) or (len(parts) > 1 and "none" in parts):
        raise ValueError("the parts of a merge are different ways of drafting")
    if len(parts) > 1 and (fixed := FIXED_TREES & set(parts)):
        raise ValueError(f"the tree of {min(fixed)} is fixed, so it cannot be merged")
    if sum(DRAFT_REQUIREMENT[part] is not None for part in parts) > 1:
        raise ValueError("only one part of a merge can read model.draft")
    return method


def draft_requirement(method: str) -> str | None:
    """What model.draft must be; None where the method drafts without one."""
    return next((needed for part in method.split("+") if (needed := DRAFT_REQUIREMENT[part]) is not None), None)
