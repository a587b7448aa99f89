"""Handle sequences with controls or grammars in a step: adjust logits by each row's path, and draft by grammars.

    controlled = ControlledRows.of(batch, tree, keep, num_nodes)      # None if no sequence has controls
    ...                                                               # the target's pass
    picks = controlled.picks(logits, sampling, rows)                  # -1 for rows of other sequences

Each row is sampled from logits that are adjusted by the row's own path. The copy of the trees to
the host starts before the target's pass, so on a GPU the host computes the adjustments while the
pass runs. `picks` needs the tokens of the previous step, which may be read after `of`. A sequence
that finished with them is left out. Rows of other sequences are not read.

    chains = GrammarChains.of(batch, max_tokens)                 # None if no sequence has a grammar
    plan = chains.without_long(plan)                              # the head need not draft where a chain is long
    draft = chains.fit(draft, batch, plan)

Where a grammar allows only one text, its tokens are drafted without a head, and so are white space
and punctuation that the output has used before. Such a chain is drafted in plain steps, too: it
costs rows of the pass and nothing else. The target samples only what the grammar allows, so a
forbidden candidate of the head would waste a row.

Reading the candidates waits for a device, so chains are for steps on a CPU that are not replayed.
On a GPU they are missing. A step there is launched before the tokens of the one before are read,
which `GrammarChains.of` needs, so a batch with chains would give that up. The rest is at hand: a
graph of the verify pass takes any tree within its bounds, so a plain step with chains can be
replayed as one with a tree. What is not built either is the merge of chains with a head's draft
inside the drafter's graph, the budget that fills a fixed number of rows from both, and the pruning,
which needs the candidates on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.core.control_state import ControlState
from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.device import DeviceToHost, to_device
from eagle_ray.core.grammar_state import GrammarState, PredictedToken
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.core.sequence import Sequence as TokenSequence
from eagle_ray.core.sequence import SequenceStatus
from eagle_ray.methods.drafter import Draft
from eagle_ray.sampling.adjustments import Adjustments, Paths
from eagle_ray.sampling.sampler import SLICE_ROWS, sample
from eagle_ray.tree.draft_tree import DraftTree, VerifyRows
from eagle_ray.tree.expand import DraftPlan
from eagle_ray.tree.tree_merge import extra_log_values, merge_trees


class ControlledRows:
    """The sequences of one step that have controls, and the copy of their trees to the host. Built by `of`."""

    def __init__(
        self, members: list[int], sequences: list[TokenSequence], trees: DeviceToHost | None
    ):
        self._members = members
        self._sequences = sequences
        self._trees = trees

    @classmethod
    def of(
        cls, batch: DecodeBatch, tree: DraftTree, keep: Bool[Tensor, "B N"], num_nodes: int
    ) -> ControlledRows | None:
        """Return the rows of sequences with controls, or None if there are none.

        Args:
            keep: true for the nodes that are verified.
            num_nodes: upper bound on the kept nodes of a tree.
        """
        members = batch.controlled
        if not members:
            return None
        sequences = [batch.sequences[i] for i in members]
        if tree.num_nodes == 1:
            return cls(members, sequences, None)
        rows = to_device(members, keep.device)
        own_trees = DraftTree(*(tensor[rows] for tensor in tree.tensors))
        verified = own_trees.rerank(keep[rows], num_nodes)
        parts = torch.stack([verified.tokens, verified.parents, verified.valid.long()])
        return cls(members, sequences, DeviceToHost(parts))

    def picks(
        self, logits: Float[Tensor, "R V"], sampling: SamplingBatch, rows: VerifyRows
    ) -> Int[Tensor, " R"]:
        """Return the tokens of controlled sequences' rows, sampled from adjusted logits; -1 for all other rows."""
        picks = torch.full((len(logits),), -1, dtype=torch.int64, device=logits.device)

        # A sequence may have finished in the step before, since the trees were copied.
        states: list[tuple[ControlState, Paths]] = []
        members: list[int] = []
        nodes: list[int] = []
        for i, sequence, paths in zip(self._members, self._sequences, self._paths(), strict=True):
            if sequence.status is SequenceStatus.RUNNING:
                states.append((synced(sequence), paths))
                members += [i] * len(paths)
                nodes += range(len(paths))
        if not states:
            return picks

        seq, indices = to_device([members, nodes], logits.device)
        own = rows.row_of[seq, indices]
        positions = rows.positions[own] + 1
        fresh = sample_adjusted(logits, own, states, sampling, seq, positions)
        return picks.index_copy(0, own, fresh)

    def _paths(self) -> list[Paths]:
        """Return the path of every verified node of each controlled sequence."""
        if self._trees is None:
            return [[[]] for _ in self._members]
        [(tokens, parents, valid)] = self._trees.read()
        return [paths_of(*parts) for parts in zip(tokens, parents, valid, strict=True)]


def paths_of(tokens: list[int], parents: list[int], valid: list[int]) -> Paths:
    """Return for each valid node the tokens on its path, without the root's. Valid nodes come before invalid ones."""
    paths: Paths = []
    for node in range(sum(valid)):
        paths.append([*paths[parents[node]], tokens[node]] if node else [])
    return paths


def synced(sequence: TokenSequence) -> ControlState:
    """Update the state of a sequence's controls to its committed tokens and return it."""
    state = sequence.controls
    assert state is not None
    state.sync(sequence.output_ids)
    return state


def sample_adjusted(
    logits: Float[Tensor, "R V"],
    rows: Int[Tensor, " C"],
    sequences: Sequence[tuple[ControlState, Paths]],
    sampling: SamplingBatch,
    seq: Int[Tensor, " C"],
    positions: Int[Tensor, " C"],
) -> Int[Tensor, " C"]:
    """Return the token that the target samples after each row, under the controls of the row's sequence.

    Args:
        logits: logits of the target, which are not changed. They are copied for a few sequences at
            a time.
        sequences: state and paths of each sequence; together they have as many paths as there are
            rows, in the order of the rows.
        seq, positions: sequence and position of each row, as in sampler.sample.
    """
    picks = []
    start = 0
    for group in _groups_of(sequences):
        num_rows = sum(len(paths) for _, paths in group)
        part = slice(start, start + num_rows)
        adjusted = logits[rows[part]].float()
        Adjustments.of(group, logits.device).apply(adjusted)
        picks.append(sample(adjusted, sampling, seq[part], positions[part]))
        start = part.stop
    return torch.cat(picks)


def _groups_of(
    sequences: Sequence[tuple[ControlState, Paths]],
) -> list[list[tuple[ControlState, Paths]]]:
    """Return the sequences in groups of at most SLICE_ROWS paths, or of one sequence."""
    groups: list[list[tuple[ControlState, Paths]]] = [[]]
    num_rows = 0
    for state, paths in sequences:
        if groups[-1] and num_rows + len(paths) > SLICE_ROWS:
            groups.append([])
            num_rows = 0
        groups[-1].append((state, paths))
        num_rows += len(paths)
    return groups


def slow_and_spent(grammars: Mapping[int, GrammarState]) -> tuple[list[int], list[int]]:
    """Return the indices of sequences with a slow grammar, and of those whose grammar has used up its parser time."""
    slow = [i for i, grammar in grammars.items() if grammar.budget.is_slow]
    spent = [i for i, grammar in grammars.items() if grammar.budget.is_spent]
    return slow, spent


# Added to the log values of forbidden candidates and those below them: they come after all others.
FORBIDDEN = -1e4
# Log-probability of a forced token given those before it: below 0, as the target may spell it otherwise.
FORCED = -0.01
RECENT = -0.2  # log-probability of a token that the output had in this place before
LONG_CHAIN = 2  # tokens of a chain after which a head's draft would not pay


@dataclass(frozen=True, slots=True)
class GrammarChains:
    """The tokens that grammars predict for the sequences of a batch, as drafts.

    Attributes:
        chains: predicted tokens of each sequence; empty without a grammar.
        grammars: grammars by index in the batch.
    """

    chains: list[list[PredictedToken]]
    grammars: dict[int, GrammarState]

    @classmethod
    def of(cls, batch: DecodeBatch, max_tokens: int) -> GrammarChains | None:
        """Return the chains of a batch, or None if no sequence has a grammar.

        Args:
            max_tokens: maximum tokens of a chain, no more than the engine's largest draft has.
        """
        grammars = grammars_of(batch)
        if not grammars:
            return None

        can_draft = _drafting(batch)
        chains: list[list[PredictedToken]] = [[] for _ in batch.sequences]
        for i, grammar in grammars.items():
            synced(batch.sequences[i])
            if i in can_draft:
                limit = min(max_tokens, batch.remaining_tokens[i] - 1)
                chains[i] = grammar.predicted_tokens(limit)
        return cls(chains, grammars)

    def without_long(self, plan: DraftPlan) -> DraftPlan:
        """Return the plan without the sequences whose chain is long, so that the head does not draft for them.

        A probe is not changed.
        """
        if plan.probe or not plan.is_drafting:
            return plan
        short = tuple(i for i, chain in enumerate(self.chains) if len(chain) < LONG_CHAIN)
        if len(short) == len(self.chains):
            return plan
        return plan.restrict_to(short)

    def fit(self, draft: Draft, batch: DecodeBatch, plan: DraftPlan) -> Draft:
        """Return the draft with the chains added, and with candidates that a grammar forbids ranked last."""
        pruned = self._pruned(draft, batch) if draft.depth else draft
        if not any(self.chains):
            return pruned

        chains = _chain_trees(batch.roots.tolist(), self.chains)
        longest = max(map(len, self.chains))
        depth = max(draft.depth, longest)
        merged = merge_trees([pruned.tree, chains], depth)
        head_log_probs = merged.log_probs_by_drafter[..., 0]
        extra = extra_log_values(head_log_probs, merged.tree, depth, plan)
        return replace(draft, tree=merged.tree, extra_log_values=extra)

    def _pruned(self, draft: Draft, batch: DecodeBatch) -> Draft:
        tree = draft.tree
        tokens = tree.tokens.tolist()
        parents = tree.parents.tolist()
        penalties = torch.zeros_like(tree.log_values)

        # All nodes are asked for: candidates that are not valid may stand between others.
        for i in self.grammars.keys() & _drafting(batch):
            allowed = self.grammars[i].allowed_nodes(tokens[i], parents[i])
            penalties[i] = torch.where(torch.tensor(allowed), 0.0, FORBIDDEN)
        return replace(draft, tree=replace(tree, log_values=tree.log_values + penalties))


def grammars_of(batch: DecodeBatch) -> dict[int, GrammarState]:
    """Return the grammars of a batch's sequences, by index in the batch."""
    return {
        i: sequence.grammar
        for i, sequence in enumerate(batch.sequences)
        if sequence.grammar is not None
    }


def _drafting(batch: DecodeBatch) -> set[int]:
    """Return the places of sequences that may be drafted for."""
    if batch.can_draft is None:
        return set(range(len(batch)))
    return set(batch.can_draft)


def _chain_trees(roots: list[int], chains: list[list[PredictedToken]]) -> DraftTree:
    """Return a tree of one path for each root."""
    longest = 1 + max(map(len, chains))

    # A row of each tree: root, chain, padding.
    token_rows = []
    log_prob_rows = []
    for root, chain in zip(roots, chains, strict=True):
        num_padding = longest - 1 - len(chain)
        own_tokens = [root]
        own_log_probs = [0.0]
        for token, is_forced in chain:
            own_tokens.append(token)
            own_log_probs.append(FORCED if is_forced else RECENT)
        token_rows.append(own_tokens + [0] * num_padding)
        log_prob_rows.append(own_log_probs + [0.0] * num_padding)

    tokens = torch.tensor(token_rows)
    log_probs = torch.tensor(log_prob_rows)
    lengths = torch.tensor([[len(chain)] for chain in chains])

    # A node's parent is the node before it, and its depth is its place.
    place = torch.arange(longest).expand_as(tokens)
    valid = place <= lengths
    return DraftTree(
        tokens=tokens,
        parents=torch.where(valid, place - 1, -1),
        depths=torch.where(valid, place, 0),
        log_values=torch.where(valid, log_probs.cumsum(1), -torch.inf),
        draft_log_probs=torch.where(valid, log_probs, -torch.inf),
        valid=valid,
    )
