"""Drafts of sequences with grammars: the tokens that a grammar predicts, and candidates that it forbids come last.

    chains = GrammarChains.of(batch, most_tokens)                 # None if no sequence has a grammar
    plan = chains.without_long(plan)                              # the head need not draft where a chain is long
    draft = chains.fit(draft, batch, plan)

Where a grammar leaves no choice of text, the tokens that spell it are a draft that no head need make, and so are the
white space and punctuation between them, which an output repeats. They are drafted in plain steps, too: a step with
a chain costs the rows of its pass and nothing else. The target picks only what the grammar allows, so a forbidden
candidate of the head would waste a row.

Reading the candidates waits for a device, so this is for steps on a CPU that are not replayed. On a GPU the chains are
missing. They are known before the step is launched (`GrammarChains.of` reads committed tokens only, and steps of
controlled sequences are not launched ahead), and chains alone have no shape that depends on the device. A graph of
the verify pass takes any tree within its bounds, so a plain step with chains can be replayed as one with a tree; what
is not built is the merge of chains with a head's draft inside the drafter's graph, the budget that fills a fixed
number of rows from both, and the pruning, which needs the candidates on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.engine.controlled_sampling import synced
from eagle_ray.methods.drafter import Draft
from eagle_ray.sampling.grammar_state import GrammarState, PredictedToken
from eagle_ray.tree.draft_plan import DraftPlan
from eagle_ray.tree.draft_tree import DraftTree
from eagle_ray.tree.tree_merge import extra_log_values, merge_trees

FORBIDDEN = -1e4  # added to the log values of forbidden candidates and what is below them: behind every other one
FORCED = -0.01  # log-probability of a forced token given those before it: near 0, for the target may spell it otherwise
RECENT = -0.2  # of a token that came here before
LONG = 2  # tokens of a chain after which a head's draft would not pay


@dataclass(frozen=True, slots=True)
class GrammarChains:
    """The tokens that grammars predict for the sequences of a batch; none for a sequence without a grammar.

    Attributes:
        grammars: by place in the batch.
    """

    chains: list[list[PredictedToken]]
    grammars: dict[int, GrammarState]

    @classmethod
    def of(cls, batch: DecodeBatch, most_tokens: int) -> GrammarChains | None:
        """Return the chains of a batch, or None if no sequence has a grammar.

        Args:
            most_tokens: of a chain, at most as many as the engine's deepest and largest draft has.
        """
        grammars = {i: sequence.grammar for i, sequence in enumerate(batch.sequences) if sequence.grammar is not None}
        if not grammars:
            return None
        can_draft = set(range(len(batch)) if batch.can_draft is None else batch.can_draft)
        chains: list[list[PredictedToken]] = [[] for _ in batch.sequences]
        for i, grammar in grammars.items():
            synced(batch.sequences[i])
            if i in can_draft:
                most = min(most_tokens, batch.remaining_tokens[i] - 1)
                chains[i] = grammar.predicted_tokens(most)
        return cls(chains, grammars)

    def without_long(self, plan: DraftPlan) -> DraftPlan:
        """Return the plan for the sequences without a long chain. A probe is run as it is planned."""
        if plan.probe or not plan.is_drafting or all(len(chain) < LONG for chain in self.chains):
            return plan
        return plan.restrict_to(tuple(i for i, chain in enumerate(self.chains) if len(chain) < LONG))

    def fit(self, draft: Draft, batch: DecodeBatch, plan: DraftPlan) -> Draft:
        """Return the draft with the chains, and with forbidden candidates behind all others."""
        pruned = self._pruned(draft, batch) if draft.depth else draft
        if not any(self.chains):
            return pruned
        chains = _chain_trees(batch.roots.tolist(), self.chains)
        depth = max(draft.depth, max(map(len, self.chains)))
        merged = merge_trees([pruned.tree, chains], depth)
        extra = extra_log_values(merged.log_probs_by_drafter[..., 0], merged.tree, depth, plan)
        return replace(draft, tree=merged.tree, extra_log_values=extra)

    def _pruned(self, draft: Draft, batch: DecodeBatch) -> Draft:
        penalties = torch.zeros_like(draft.tree.log_values)
        tokens, parents = draft.tree.tokens.tolist(), draft.tree.parents.tolist()
        for i, grammar in self.grammars.items():  # every node: candidates that are not valid may stand between others
            allowed = grammar.allowed_nodes(tokens[i], parents[i])
            penalties[i] = torch.where(torch.tensor(allowed), 0.0, FORBIDDEN)
        return replace(draft, tree=replace(draft.tree, log_values=draft.tree.log_values + penalties))


def _chain_trees(roots: list[int], chains: list[list[PredictedToken]]) -> DraftTree:
    """Return a tree of one path for each root."""
    longest = 1 + max(map(len, chains))
    rows = [[root, *(token for token, _ in chain)] for root, chain in zip(roots, chains, strict=True)]
    logs = [[0.0, *(FORCED if is_forced else RECENT for _, is_forced in chain)] for chain in chains]
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    log_probs = torch.tensor([row + [0.0] * (longest - len(row)) for row in logs])
    place = torch.arange(longest).expand_as(tokens)
    valid = place <= torch.tensor([[len(chain)] for chain in chains])

    def padded(values: Tensor) -> Float[Tensor, "B N"]:
        return torch.where(valid, values, -torch.inf)

    return DraftTree(
        tokens=tokens,
        parents=torch.where(valid, place - 1, -1),
        depths=torch.where(valid, place, 0),
        log_values=padded(log_probs.cumsum(1)),
        draft_log_probs=padded(log_probs),
        valid=valid,
    )
