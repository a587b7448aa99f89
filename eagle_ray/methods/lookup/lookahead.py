"""LookaheadDrafter: the target guesses ahead of itself while it verifies (lookahead decoding, arXiv 2402.02057).

In addition to drafts each tree holds a window of guesses: W chains of R tokens, whose first tokens
form one path. The token that the target samples after a chain completes a run of R + 1 tokens. The
run joins the pool, and its last R tokens are the chain of the next step. Drafts are runs of the
pool that continue the text.

    root - a - b - c           chains   a d f     runs  a d f p
           |   |   |                    b e g           b e g q     p, q, r: the target's picks after f, g, h
           d   e   k                    c k h           c k h r
           |   |   |
           f   g   h

A guess itself is hardly ever accepted. Its value is the number of accepted tokens that the pool has
brought per verified guess so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from random import Random
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.methods.calibration import Calibration
from eagle_ray.methods.drafter import Draft, NullDrafter, TokenSequence, VerifyOutput
from eagle_ray.methods.lookup.drafter import (
    LONGEST_NGRAM,
    Counts,
    CursorIndex,
    LookupDrafter,
    NgramCursor,
    count_ngrams,
)
from eagle_ray.methods.method import DraftSettings
from eagle_ray.models.target import TargetModel
from eagle_ray.tree.draft_tree import DraftTree
from eagle_ray.tree.expand import DraftPlan
from eagle_ray.tree.tree_merge import extra_log_values, merge_trees, path_hashes

MAX_POOL_CONTEXTS = 100_000  # in the pool; then it is reset
# Guesses and tokens that the worth of a guess starts from.
FIRST_GUESSES = 50.0
FIRST_EARNED = 1.0
MAX_WORTH = 0.1


class Pool(CursorIndex):
    """The pool of lookahead decoding: runs of tokens that the target continued from guesses, shared
    by all sequences."""

    def __init__(self) -> None:
        self.counts: Counts = {}

    @property
    def cost_key(self) -> dict[str, Any]:
        return {}

    def reader(self) -> PoolReader:
        return PoolReader(self)

    def reset(self) -> None:
        self.counts = {}

    def add(self, run: Sequence[int]) -> None:
        if len(self.counts) >= MAX_POOL_CONTEXTS:
            self.reset()
        count_ngrams(self.counts, (), run)


class PoolReader:
    """Keeps the last tokens of a sequence."""

    def __init__(self, pool: Pool):
        self._pool = pool
        self._tail: tuple[int, ...] = ()

    def read(self, token_ids: list[int]) -> None:
        self._tail = (*self._tail, *token_ids)[-LONGEST_NGRAM:]

    def cursor(self) -> NgramCursor:
        return NgramCursor(self._pool.counts, self._tail)


@dataclass(slots=True)
class _Window:
    """One sequence's guesses, chain by chain."""

    text: TokenSequence
    chains: list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Guessed:
    """The windows of the last draft, and the hashes of the paths to their chains' ends."""

    windows: list[_Window]
    members: Int[Tensor, " M"]
    ends: Int[Tensor, "M W"]


class LookaheadDrafter(NullDrafter):
    """Verifies guesses together with drafts, and proposes the runs that the target completed from earlier guesses.

    Args:
        bounds: sizes of the trees of continuations. The window has R = max_depth // 2 rows (at
            least 1) and max_depth + 1 - R chains.
    """

    supports_graphs = False
    reads_logits = True
    _guessed: _Guessed | None

    def __init__(self, bounds: TreeBounds, calibration: Calibration | None = None):
        self._pool = Pool()
        self._drafter = LookupDrafter(self._pool, bounds, calibration)
        self._max_depth = bounds.max_depth
        self._num_rows = max(bounds.max_depth // 2, 1)
        self._num_chains = bounds.max_depth + 1 - self._num_rows
        positions = [(r, i) for r in range(self._num_rows) for i in range(self._num_chains)]
        self._positions = sorted(positions, key=sum)  # a position's depth is 1 + r + i
        self._begin()

    @property
    def cost_key(self) -> dict[str, Any]:
        return {"window": [self._num_chains, self._num_rows]}

    def draft(
        self,
        batch: DecodeSlots,
        roots: Int[Tensor, " B"],
        plan: DraftPlan,
        sampling: SamplingBatch,
        texts: Sequence[TokenSequence],
    ) -> Draft:
        """Draft continuations from the pool, and the chains of the window that end within the plan's depth."""
        draft = self._drafter.draft(batch, roots, plan, sampling, texts)
        positions = [(r, i) for r, i in self._positions if i <= plan.max_depth - self._num_rows]
        if not positions:
            return draft

        # The windows as trees, and where their chains end.
        chosen = range(len(texts)) if plan.members is None else plan.members
        windows = [self._window(batch.host_slots[i], texts[i]) for i in chosen]
        members = torch.tensor(list(chosen), device=roots.device)
        guesses = self._tree(roots[members], windows, positions)
        ends = [1 + k for k, (r, _) in enumerate(positions) if r == self._num_rows - 1]
        hashes = path_hashes(guesses, plan.max_depth)
        self._guessed = _Guessed(windows, members, hashes[:, ends])

        merged = merge_trees([draft.tree, guesses.spread(members, roots)], plan.max_depth)
        nothing = merged.tree.log_values.new_full((len(windows), 1, plan.children), -torch.inf)
        from_pool = merged.log_probs_by_drafter[..., 0]
        others = extra_log_values(from_pool, merged.tree, plan.max_depth, plan)
        return Draft(
            merged.tree,
            draft.levels or [nothing],
            0,
            draft.num_catch_up,
            draft.is_exhausted,
            others,
        )

    def extend(self, batch: DecodeSlots, verified: VerifyOutput) -> None:
        """Turn each verified chain and the target's token after it into a run and into the next chain."""
        guessed = self._guessed
        self._guessed = None
        if guessed is None:
            return

        # Find the ends of the chains among the verified nodes.
        members = guessed.members
        codes = path_hashes(verified.tree, self._max_depth)[members]
        valid = verified.tree.valid[members]
        matches = (guessed.ends[:, :, None] == codes[:, None]) & valid[:, None]

        # The target's token after each chain, -1 if the chain was not verified.
        assert verified.logits is not None, "reads_logits asks for them"
        rows = verified.rows.row_of[members].gather(1, matches.long().argmax(2))
        picks = torch.where(matches.any(2), verified.logits.argmax(-1)[rows], -1)

        # Read from the device in one copy.
        accepted = verified.result.num_accepted[members]
        numbers = torch.cat([accepted[:, None], picks], 1).tolist()
        for window, (num_accepted, *row) in zip(guessed.windows, numbers, strict=True):
            self._earned += num_accepted
            self._slide(window, row)

    def reset_learning(self) -> None:
        self._drafter.reset_learning()
        self._begin()

    def _begin(self) -> None:
        self._windows: dict[int, _Window] = {}
        self._guessed = None
        self._random = Random(0)
        self._num_guesses = FIRST_GUESSES
        self._earned = FIRST_EARNED

    def _window(self, slot: int, text: TokenSequence) -> _Window:
        """Return a new sequence's first window, filled with tokens of its own."""
        if slot not in self._windows or self._windows[slot].text is not text:
            chains = [
                tuple(self._random.choices(text.token_ids, k=self._num_rows))
                for _ in range(self._num_chains)
            ]
            self._windows[slot] = _Window(text, chains)
        return self._windows[slot]

    def _tree(
        self, roots: Int[Tensor, " M"], windows: list[_Window], positions: list[tuple[int, int]]
    ) -> DraftTree:
        """Return these positions of the windows as trees in which all nodes have one value."""
        device = roots.device
        guesses = [[window.chains[i][r] for r, i in positions] for window in windows]
        tokens = torch.cat([roots[:, None], torch.tensor(guesses, device=device)], 1)

        # A position is below the row before it, and the first row's below the chain before it.
        index = {position: 1 + k for k, position in enumerate(positions)}
        parents = [-1]
        depths = [0]
        for r, i in positions:
            above = (r - 1, i) if r else (0, i - 1)
            parents.append(index.get(above, 0))
            depths.append(1 + r + i)

        depths_of = torch.tensor(depths, device=device).expand_as(tokens)
        worth = min(self._earned / self._num_guesses, MAX_WORTH)
        log_values = torch.where(depths_of > 0, log(worth), 0.0)
        return DraftTree(
            tokens=tokens,
            parents=torch.tensor(parents, device=device).expand_as(tokens),
            depths=depths_of,
            log_values=log_values,
            draft_log_probs=torch.where(depths_of == 1, log_values, 0.0),
            valid=torch.ones_like(tokens, dtype=torch.bool),
        )

    def _slide(self, window: _Window, picks: list[int]) -> None:
        """Advance the window.

        Args:
            picks: the target's token after each chain, -1 if it was not verified.
        """
        for i, token in enumerate(picks):
            if token >= 0:
                run = (*window.chains[i], token)
                self._pool.add(run)
                self._num_guesses += self._num_rows
                window.chains[i] = run[1:]


def make_drafter(
    speculative: DraftSettings, target: TargetModel, weights: None
) -> LookaheadDrafter:
    return LookaheadDrafter(speculative.tree_bounds, Calibration(speculative.max_depth))
