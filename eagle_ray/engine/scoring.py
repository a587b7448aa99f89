"""ContinuationScorer: the target's passes over the continuations of prompts, and their log-probabilities.

    scorer.record_root(sequence, logits)          # the prompt's last row scores what follows it
    finished = scorer.run(sequences)              # one pass over rows of several sequences' tries

A pass has at most MAX_SCORED_ROWS rows, and no more than a step's prompt rows, so that decoding
goes on between two passes of a large trie. Sequences take turns: the one that waited for the most
passes comes first. Logits are computed SLICE_ROWS rows at a time. Log-probabilities come from the
target's unprocessed logits, in fp32, at temperature 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from eagle_ray.core.continuations import ROOT, ContinuationScores, ScorePass
from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.device import to_device
from eagle_ray.core.errors import RequestError
from eagle_ray.core.sequence import Sequence
from eagle_ray.kernels.availability import retry_portable
from eagle_ray.models.target import PackedTrees, PromptBatch, TargetModel
from eagle_ray.sampling.sampler import SLICE_ROWS
from eagle_ray.tree.ancestor_words import NODES_PER_WORD
from eagle_ray.tree.draft_tree import DraftTree

MAX_SCORED_ROWS = 512  # rows of a pass
# Nodes of a tree on a GPU: one word of its mask, as drafts have; trees of more were not tried there.
GPU_TREE_ROWS = NODES_PER_WORD


@dataclass(frozen=True, slots=True)
class _Part:
    """One sequence's rows in a scoring pass."""

    sequence: Sequence
    scores: ContinuationScores
    rows: ScorePass

    @property
    def length(self) -> int:
        """Return the number of positions that the KV cache holds before these rows: prompt and trie path."""
        return len(self.sequence.prompt_ids) + self.scores.trie.depths[self.rows.base]

    @property
    def tokens(self) -> list[int]:
        tokens = self.scores.trie.tokens
        return [tokens[node] for node in self.rows.nodes]


class ContinuationScorer:
    """Computes the log-probabilities of continuations of prompts whose slots and blocks are reserved.

    Args:
        prefill_tokens: maximum prompt rows per step, for which memory is planned.
    """

    def __init__(self, target: TargetModel, prefill_tokens: int):
        self._target = target
        self._device = target.device
        self._prefill_tokens = prefill_tokens
        self._num_passes = 0

    @property
    def max_rows(self) -> int:
        """Return the maximum number of rows of a pass."""
        return min(MAX_SCORED_ROWS, self._prefill_tokens)

    @property
    def max_tree(self) -> int:
        """Return the maximum number of rows of one sequence's trees in a pass."""
        is_on_cpu = torch.device(self._device).type == "cpu"
        return self.max_rows if is_on_cpu else min(self.max_rows, GPU_TREE_ROWS)

    def plan(self, sequence: Sequence, room: int) -> None:
        """Divide the rows of a sequence's continuations into passes that fit `room` positions behind its prompt."""
        if sequence.scoring is not None:
            sequence.scoring.plan(room, self.max_rows, self.max_tree)

    def record_root(self, sequence: Sequence, logits: Float[Tensor, " V"]) -> None:
        """Record the log-probabilities of the continuations' first tokens, from the logits after
        the prompt's last token."""
        scores = sequence.scoring
        assert scores is not None
        self._record([(scores, [ROOT])], lambda start, end: logits[None])

    def run(self, sequences: list[Sequence]) -> list[Sequence]:
        """Run one pass, if any rows are left, and return the sequences whose scores are complete.

        A sequence gets an error if the target computed NaN for it.

        Args:
            sequences: sequences whose prompts are computed, oldest first.
        """
        parts = self._parts(sequences)
        if parts:
            hidden = retry_portable(lambda: self._hidden(parts))

            def logits(start: int, end: int) -> Float[Tensor, "R V"]:
                return self._target.logits(hidden[start:end])

            self._record([(part.scores, part.rows.nodes) for part in parts], logits)
        for part in parts:
            part.sequence.target_forwards += 1

        finished = [s for s in sequences if s.scoring is not None and s.scoring.is_complete]
        for sequence in finished:
            if sequence.scoring is not None and sequence.scoring.has_nan:
                sequence.error = RequestError(
                    "not_finite",
                    "scores: the target computes what is no number (NaN). Set model.dtype to float32",
                )
        return finished

    def _parts(self, sequences: list[Sequence]) -> list[_Part]:
        """Return the sequences and rows of the next pass: rows of trees first, at least one sequence."""
        waiting: list[_Part] = []
        for sequence in sequences:
            scores = sequence.scoring
            if scores is None or scores.is_complete:
                continue
            if scores.last_turn is None:
                scores.last_turn = self._num_passes
            waiting.append(_Part(sequence, scores, scores.next_pass))
        waiting.sort(key=lambda part: part.scores.last_turn or 0)  # the oldest of equals first

        self._num_passes += 1
        parts: list[_Part] = []
        num_rows = 0
        for part in waiting:
            num_rows += len(part.rows.nodes)
            if parts and num_rows > self.max_rows:
                break
            part.scores.last_turn = self._num_passes
            parts.append(part)
        return sorted(parts, key=lambda part: part.rows.is_run)

    def _hidden(self, parts: list[_Part]) -> Float[Tensor, "R H"]:
        """Return the hidden states of all rows, in the order of the parts."""
        trees = [part for part in parts if not part.rows.is_run]
        runs = [part for part in parts if part.rows.is_run]
        self._target.cache.blocks.sync_table()
        prompts = None
        if runs:
            prompts = PromptBatch.of(
                [part.sequence.slot for part in runs],
                [part.tokens for part in runs],
                self._device,
                [part.length for part in runs],
            )
        return self._target.hidden_states(self._packed(trees) if trees else None, prompts)

    def _packed(self, parts: list[_Part]) -> PackedTrees:
        """Return the rows of trees whose first nodes follow the cached positions."""
        sizes = [len(part.rows.nodes) for part in parts]
        shape = (len(parts), max(sizes))
        tokens = np.zeros(shape, dtype=np.int64)
        parents = np.full(shape, -1, dtype=np.int64)
        depths = np.zeros(shape, dtype=np.int64)
        for i, part in enumerate(parts):
            trie = part.scores.trie
            nodes = part.rows.nodes
            place = {node: j for j, node in enumerate(nodes)}
            first_depth = trie.depths[part.rows.base] + 1
            tokens[i, : len(nodes)] = part.tokens
            parents[i, : len(nodes)] = [place.get(trie.parents[node], -1) for node in nodes]
            depths[i, : len(nodes)] = [trie.depths[node] - first_depth for node in nodes]

        own_tokens, own_parents, own_depths = torch.from_numpy(
            np.stack([tokens, parents, depths])
        ).to(self._device)
        index = torch.arange(shape[1], device=self._device)
        valid = index < to_device(sizes, self._device)[:, None]
        values = torch.where(valid, 0.0, -torch.inf)
        tree = DraftTree(
            tokens=own_tokens,
            parents=own_parents,
            depths=own_depths,
            log_values=values,
            draft_log_probs=values,
            valid=valid,
        )

        slots = [part.sequence.slot for part in parts]
        batch = DecodeSlots.of(slots, [part.length for part in parts], self._device)
        rows = tree.pack(batch.lengths, sum(sizes), sizes)
        return PackedTrees(tree, rows, batch, int(depths.max()))

    def _record(
        self,
        parts: list[tuple[ContinuationScores, list[int]]],
        logits_of: Callable[[int, int], Float[Tensor, "R V"]],
    ) -> None:
        """Record the log-probabilities of all children of the nodes that are the rows of a pass.

        Args:
            logits_of: returns the logits of rows [start, end).
        """
        owners: list[int] = []
        tokens: list[int] = []
        children_by_part: list[list[int]] = []
        num_rows = 0
        for scores, nodes in parts:
            own_rows, own_tokens, children = scores.children_of(nodes)
            owners += [num_rows + row for row in own_rows]
            tokens += own_tokens
            children_by_part.append(children)
            num_rows += len(nodes)

        row_of = np.array(owners, dtype=np.int64)  # ascending
        token_of = np.array(tokens, dtype=np.int64)
        log_probs = np.zeros(len(row_of), dtype=np.float32)
        likeliest = np.zeros(len(row_of), dtype=bool)
        for start in range(0, num_rows, SLICE_ROWS):
            end = min(start + SLICE_ROWS, num_rows)
            first, last = np.searchsorted(row_of, [start, end])
            part = slice(int(first), int(last))
            if part.start < part.stop:
                picked = (row_of[part] - start, token_of[part])
                log_probs[part], likeliest[part] = self._picked(logits_of(start, end), *picked)

        first = 0
        for (scores, nodes), children in zip(parts, children_by_part, strict=True):
            own = slice(first, first + len(children))
            scores.record(nodes, children, log_probs[own], likeliest[own])
            first += len(children)

    def _picked(
        self, logits: Float[Tensor, "R V"], rows: np.ndarray, tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probabilities of tokens after some rows, and whether each is the likeliest there."""
        row_at, token_at = torch.from_numpy(np.stack([rows, tokens])).to(self._device)
        raw = logits.float()
        log_probs = raw.log_softmax(-1)[row_at, token_at]
        likeliest = raw.argmax(-1)[row_at] == token_at
        return log_probs.cpu().numpy(), likeliest.cpu().numpy()
