"""How each output token came: in which decode step, and from which depth of its draft.

A step's tokens are the drafts that the target accepted, at depths 1, 2, ..., and behind them one that it picked itself,
of depth 0. Step 0 is the prompt's pass, whose one token is the target's own.

    >>> Steps(sequence).next(["The", " capital", " is"])      # texts of the first three output ids
    [{'step': 0, 'num_draft_tokens': 0, 'num_accepted_draft_tokens': 0, 'tokens': [
         {'id': 95, 'text': 'The', 'depth': 0}]},
     {'step': 1, 'num_draft_tokens': 12, 'num_accepted_draft_tokens': 1, 'tokens': [
         {'id': 17, 'text': ' capital', 'depth': 1}, {'id': 9, 'text': ' is', 'depth': 0}]}]
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, groupby
from typing import Any

from eagle_ray.core.sequence import Sequence

Place = tuple[int, int]
"""A token's step and its depth in that step's draft."""


class Steps:
    """The steps of one sequence, from its first output id on, in portions of any size."""

    def __init__(self, sequence: Sequence):
        self._sequence = sequence
        self._places = _places(sequence)
        self._num_told = 0

    def next(self, texts: list[str]) -> list[dict[str, Any]]:
        """The next output ids, one for each text, by step. They must be there already."""
        start, self._num_told = self._num_told, self._num_told + len(texts)
        ids = self._sequence.output_ids[start : self._num_told]
        told = list(zip(ids, texts, self._places, strict=False))
        return [
            self._counts(step)
            | {"tokens": [{"id": token, "text": text, "depth": depth} for token, text, (_, depth) in tokens]}
            for step, tokens in groupby(told, key=lambda item: item[2][0])
        ]

    def _counts(self, step: int) -> dict[str, int]:
        """Candidates that the step verified and accepted, before any cut at the output's end."""
        stats = self._sequence.stats
        return {
            "step": step,
            "num_draft_tokens": stats.per_step_budget[step - 1] - 1 if step else 0,
            "num_accepted_draft_tokens": stats.per_step_accepted[step - 1] if step else 0,
        }


def _places(sequence: Sequence) -> Iterator[Place]:
    """Place by place, each to be asked for once its token is there."""
    yield 0, 0
    for step in count(1):
        for depth in range(1, sequence.stats.per_step_accepted[step - 1] + 1):
            yield step, depth
        yield step, 0
