"""Sample the rows of sequences with controls, each from logits that are adjusted by the row's own path.

    controlled = ControlledRows.of(batch, tree, keep, num_nodes)      # None if no sequence has controls
    ...                                                               # the target's pass
    picks = controlled.picks(logits, sampling, rows)                  # -1 for rows of other sequences

The copy of the trees to the host starts before the target's pass, so on a GPU the host works out the adjustments while
the pass runs. `picks` needs the tokens of the step before, which may be read after `of`: then a sequence may have
finished meanwhile, and its rows are left out. Nothing is read of other sequences' rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.core.async_copy import DeviceToHost, to_device
from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.core.sequence import Sequence as TokenSequence
from eagle_ray.core.sequence import SequenceStatus
from eagle_ray.sampling.adjustments import Adjustments, Paths
from eagle_ray.sampling.control_state import ControlState
from eagle_ray.sampling.sampler import SLICE_ROWS, sample
from eagle_ray.tree.draft_tree import DraftTree, VerifyRows


class ControlledRows:
    """The controlled sequences of one step and the copy of their trees to the host. Use `of` to build it."""

    def __init__(self, members: list[int], sequences: list[TokenSequence], trees: DeviceToHost | None):
        self._members = members
        self._sequences = sequences
        self._trees = trees

    @classmethod
    def of(
        cls, batch: DecodeBatch, tree: DraftTree, keep: Bool[Tensor, "B N"], num_nodes: int
    ) -> ControlledRows | None:
        """Return the rows of sequences with controls, or None if there are none.

        Args:
            keep: the nodes that are verified.
            num_nodes: at least the number of kept nodes of each tree.
        """
        members = batch.controlled
        if not members:
            return None
        sequences = [batch.sequences[i] for i in members]
        if tree.num_nodes == 1:
            return cls(members, sequences, None)
        rows = to_device(members, keep.device)
        verified = DraftTree(*(column[rows] for column in tree.tensors)).rerank(keep[rows], num_nodes)
        columns = torch.stack([verified.tokens, verified.parents, verified.valid.long()])
        return cls(members, sequences, DeviceToHost(columns))

    def picks(self, logits: Float[Tensor, "R V"], sampling: SamplingBatch, rows: VerifyRows) -> Int[Tensor, " R"]:
        """Return the tokens of controlled sequences' rows, sampled from adjusted logits; -1 for all other rows."""
        picks = torch.full((len(logits),), -1, dtype=torch.int64, device=logits.device)
        each = zip(self._members, self._sequences, self._paths(), strict=True)
        running = [(i, synced(s), paths) for i, s, paths in each if s.status is SequenceStatus.RUNNING]
        if not running:
            return picks
        nodes = [(member, node) for member, _, paths in running for node in range(len(paths))]
        members, indices = to_device(list(zip(*nodes, strict=True)), logits.device)
        own = rows.row_of[members, indices]
        states = [(state, paths) for _, state, paths in running]
        fresh = sample_adjusted(logits, own, states, sampling, members, rows.positions[own] + 1)
        return picks.index_copy(0, own, fresh)

    def _paths(self) -> list[Paths]:
        """Return the path of every verified node of each controlled sequence."""
        if self._trees is None:
            return [[[]] for _ in self._members]
        [(tokens, parents, valid)] = self._trees.read()
        return [paths_of(*columns) for columns in zip(tokens, parents, valid, strict=True)]


def paths_of(tokens: list[int], parents: list[int], valid: list[int]) -> Paths:
    """Return each valid node's tokens from below the root down to the node; valid nodes are a prefix."""
    paths: Paths = []
    for node in range(sum(valid)):
        paths.append([*paths[parents[node]], tokens[node]] if node else [])
    return paths


def synced(sequence: TokenSequence) -> ControlState:
    """Return the state of the sequence's controls after its committed tokens."""
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
    """Return the token that the target samples after each of some rows with controls.

    Args:
        logits: the target's own; they stay as they are. Few sequences' rows are copied at a time.
        sequences: states and paths, as many paths in all as there are rows, in their order.
        seq, positions: see sampler.sample.
    """
    picks, start = [], 0
    for group in _groups_of(sequences):
        part = slice(start, start + sum(len(paths) for _, paths in group))
        adjusted = logits[rows[part]].float()
        Adjustments.of(group, logits.device).apply(adjusted)
        picks.append(sample(adjusted, sampling, seq[part], positions[part]))
        start = part.stop
    return torch.cat(picks)


def _groups_of(sequences: Sequence[tuple[ControlState, Paths]]) -> list[list[tuple[ControlState, Paths]]]:
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
