"""HeadCheck: warn if a head's first drafts are accepted far less often than recorded for it.

    engine.head_check = HeadCheck(promised=0.83)     # share of drafts whose first token the target takes
    ...
    engine.counters.draft_warning                    # None, or what is wrong with the head

A head of another base model, or one that gets other features than in its training, changes no
output. It only costs time, which would go unnoticed. So the first drafts are counted: in how many
of them the target's next token is among the head's own candidates. Looked-up candidates do not
count, nor do drafts for sequences that few heads can predict: those sampled at a high temperature,
and those with a grammar or other controls.

The warning comes as soon as the share is certainly too low, which takes some 25 drafts if none is
accepted. Counting ends after MAX_DRAFTS.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor

from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.device import DeviceToHost, to_device
from eagle_ray.methods.drafter import Draft
from eagle_ray.tree.draft_tree import DraftTree, VerifyResult
from eagle_ray.tree.expand import DraftPlan

MAX_DRAFTS = 100
MIN_SHARE = 0.3  # share of drafts whose first token is taken: 1.3 tokens a pass
PROMISE_SHARE = 0.5  # share of the recorded acceptance; texts differ
STANDARD_ERRORS = 3.0  # a share is certainly too low if its interval of these is
MAX_JUDGED_TEMPERATURE = 1.0
CAUSES = (
    "another base model or fine-tune of it, another chat template, features of another dtype or "
    "quantisation, or answers in another reasoning mode than the head was trained on"
)


class HeadCheck:
    """Counts how many of a head's first drafts are accepted, and warns if that share is too low.

    Args:
        promised: recorded share of drafts whose first token the target took, for this pair or head;
            None if there is no record.
    """

    def __init__(self, promised: float | None = None):
        self._promised = promised
        self._num_drafts = 0
        self._num_taken = 0
        self._num_tokens = 0  # that these passes gave, the bonus token included

    @property
    def min_share(self) -> float:
        """Return the share of accepted drafts below which a warning is given."""
        return max(MIN_SHARE, PROMISE_SHARE * (self._promised or 0.0))

    @property
    def is_over(self) -> bool:
        """Return whether enough drafts are counted."""
        return self._num_drafts >= MAX_DRAFTS

    def add(self, taken: Iterable[bool], num_accepted: Iterable[int]) -> str | None:
        """Count one step's drafts. Return a warning about the head if its share is certainly too low, else None.

        Args:
            taken: for each draft, whether the target's token was among the first level's.
            num_accepted: accepted tokens of each draft, looked-up ones included.
        """
        drafts = [*taken]
        self._num_drafts += len(drafts)
        self._num_taken += sum(drafts)
        self._num_tokens += sum(num_accepted) + len(drafts)
        if not self._num_drafts or upper_bound(self._num_taken, self._num_drafts) >= self.min_share:
            return None
        share = self._num_taken / self._num_drafts
        return (
            f"the head does not fit its target: of its first {self._num_drafts} drafts the target took the first "
            f"token of {self._num_taken} ({share:.0%}), with {self._num_tokens / self._num_drafts:.2f} tokens a pass, "
            f"and {self._expected()}. Outputs are right, and slower. Usual causes: {CAUSES}"
        )

    def launched(
        self, batch: DecodeBatch, plan: DraftPlan, draft: Draft, result: VerifyResult
    ) -> DraftsUnderWay | None:
        """Start counting a launched step. Return None if the step has no drafts to count."""
        return DraftsUnderWay.of(batch, plan, draft, result)

    def _expected(self) -> str:
        if self.min_share > MIN_SHARE:
            return f"its record says {self._promised:.0%}"
        return f"a head that fits has {MIN_SHARE:.0%} or more"


class DraftsUnderWay:
    """Counts of a launched step for HeadCheck, on their way from the device to the host."""

    def __init__(self, rows: list[int], taken: Bool[Tensor, " R"]):
        self.rows = rows
        self._copy = DeviceToHost(taken)

    def read(self) -> list[bool]:
        """Wait for the counts. Return for each counted sequence whether the target's token was
        among the first level's."""
        (taken,) = self._copy.read()
        return taken

    @classmethod
    def of(
        cls, batch: DecodeBatch, plan: DraftPlan, draft: Draft, result: VerifyResult
    ) -> DraftsUnderWay | None:
        """Return the counts of a step, or None if the head drafted for none of its sequences.

        Args:
            draft: the draft as verified, including looked-up nodes.
        """
        if not draft.num_passes:
            return None
        members = range(len(batch)) if plan.members is None else plan.members
        rows = [i for i in members if is_typical(batch.sequences[i])]
        if not rows:
            return None
        tree = draft.tree if draft.model_tree is None else draft.model_tree
        index = to_device(rows, tree.tokens.device)
        return cls(rows, first_taken(tree, result.tokens, index))


def is_typical(sequence: Any) -> bool:
    """Return whether a head should be able to predict a sequence: no grammar, no controls, no high temperature."""
    is_free = sequence.grammar_spec is None and sequence.controls is None
    params = sequence.sampling
    return is_free and (params.is_greedy or params.temperature <= MAX_JUDGED_TEMPERATURE)


def first_taken(
    tree: DraftTree, tokens: Int[Tensor, "B D1"], rows: Int[Tensor, " R"]
) -> Bool[Tensor, " R"]:
    """Return for each row whether the target's first token is among the children of the tree's root."""
    is_child = (tree.depths[rows] == 1) & tree.valid[rows]
    return (is_child & (tree.tokens[rows] == tokens[rows, :1])).any(1)


def upper_bound(num_taken: int, num_drafts: int) -> float:
    """Return the upper end of Wilson's interval of a share."""
    z2 = STANDARD_ERRORS**2
    share = num_taken / num_drafts
    spread = sqrt(share * (1 - share) / num_drafts + z2 / (4 * num_drafts**2))
    return (share + z2 / (2 * num_drafts) + STANDARD_ERRORS * spread) / (1 + z2 / num_drafts)
