"""Fit drafts to grammars: candidates that a grammar forbids come last, and tokens that it forces are added.

    draft = fit_to_grammars(draft, batch, plan)

The target picks only what the grammar allows, so a forbidden candidate would waste a row of the pass. Where a
grammar leaves no choice of text, the tokens that spell it are a draft that no head need make. Reading the candidates
waits for a device, so this is for steps on a CPU that are not replayed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.drafters.drafter import Draft
from eagle_ray.drafters.ensemble import extra_log_values
from eagle_ray.engine.controlled_sampling import synced
from eagle_ray.tree.draft_plan import DraftPlan
from eagle_ray.tree.draft_tree import DraftTree
from eagle_ray.tree.tree_merge import merge

FORBIDDEN = -1e4  # added to the log values of forbidden candidates and what is below them: behind every other one
FORCED = -0.01  # log-probability of a forced token given those before it: near 0, for the target may spell it otherwise


def fit_to_grammars(draft: Draft, batch: DecodeBatch, plan: DraftPlan) -> Draft:
    """Return the draft with the forced tokens of each grammar, and with forbidden candidates behind all others.

    The draft does not become deeper. A batch without grammars gets the draft as it is.
    """
    members = [i for i, sequence in enumerate(batch.sequences) if sequence.grammar is not None]
    if not members or not draft.depth:
        return draft
    for i in members:
        synced(batch.sequences[i])
    draft = _with_forced(draft, batch, plan)
    penalties = torch.zeros_like(draft.tree.log_values)
    tokens, parents = draft.tree.tokens.tolist(), draft.tree.parents.tolist()
    for i in members:  # every node, for candidates that are not valid may stand between others
        allowed = batch.sequences[i].grammar.allowed_nodes(tokens[i], parents[i])
        penalties[i] = torch.where(torch.tensor(allowed), 0.0, FORBIDDEN)
    return replace(draft, tree=replace(draft.tree, log_values=draft.tree.log_values + penalties))


def _with_forced(draft: Draft, batch: DecodeBatch, plan: DraftPlan) -> Draft:
    """Add each sequence's forced tokens as a path of its tree, if it has any and drafts in this step."""
    drafting = set(range(len(batch)) if plan.members is None else plan.members)
    chains: list[list[int]] = [[] for _ in batch.sequences]
    for i, sequence in enumerate(batch.sequences):
        if sequence.grammar is not None and i in drafting:
            chains[i] = sequence.grammar.forced_tokens()[: draft.depth]
    if not any(chains):
        return draft
    merged = merge([draft.tree, _chain_trees(batch.roots.tolist(), chains)], draft.depth)
    extra = extra_log_values(merged.log_probs_by_drafter[..., 0], merged.tree, draft.depth, plan)
    return replace(draft, tree=merged.tree, extra_log_values=extra)


def _chain_trees(roots: list[int], chains: list[list[int]]) -> DraftTree:
    """Return a tree of one path for each root."""
    longest = 1 + max(map(len, chains))
    rows = [[root, *chain] for root, chain in zip(roots, chains, strict=True)]
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    place = torch.arange(longest).expand_as(tokens)
    valid = place <= torch.tensor([[len(chain)] for chain in chains])

    def padded(values: Tensor, padding: float) -> Float[Tensor, "B N"]:
        return torch.where(valid, values, padding)

    return DraftTree(
        tokens=tokens,
        parents=torch.where(valid, place - 1, -1),
        depths=torch.where(valid, place, 0),
        log_values=padded(FORCED * place.float(), -torch.inf),
        draft_log_probs=padded(torch.where(place == 0, 0.0, FORCED), -torch.inf),
        valid=valid,
    )
