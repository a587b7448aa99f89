"""Adjustments: logit biases, penalties, forbidden tokens and grammar masks of a batch's rows, as tensors.

    paths = [[], [17], [17, 4]]                                # one row each: the tokens from the root to its node
    adjustments = Adjustments.of([(state, paths)], device)     # state: the sequence's ControlState
    adjustments.apply(logits)                                  # fp32 [3, V], in place

There are three parts, each empty or None if no row needs it. Biases and penalties are entries, which
all rows of a sequence share; single rows override some of them. Forbidden tokens are (row, token)
pairs. Grammars are a bit mask of allowed tokens for some rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from eagle_ray.core.control_state import ControlState, Entry
from eagle_ray.core.device import copy_to_device, to_device
from eagle_ray.core.grammar_state import Words, unpack_tokens

Paths = list[list[int]]
"""For each row of a sequence, the tokens between its last committed token and the row's own, which is included."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Adjustments of E single logits.

    Attributes:
        rows: row of each logit.
        tokens: token of each logit.
        terms: bias that is added, factor of repetition_penalty, and penalty that is subtracted.
    """

    rows: Int[Tensor, " E"]
    tokens: Int[Tensor, " E"]
    terms: Float[Tensor, "3 E"]


@dataclass(frozen=True, slots=True)
class Adjustments:
    """The adjustments of R rows of logits, which belong to S sequences.

    Attributes:
        owners: the sequence of each row.
        tokens: tokens that a sequence's entries adjust in all of its rows; a sequence with fewer
            than K entries repeats its first one.
        terms: bias, factor and penalty of these entries, as in `Pairs`.
        overrides: entries of single rows, which replace their sequence's entries.
        forbidden: (row, token) pairs whose logits become -inf.
        mask_rows: rows with a mask of allowed tokens.
        mask: the masks, 32 tokens a word, one line for each of mask_rows.
    """

    owners: Int[Tensor, " R"]
    tokens: Int[Tensor, "S K"]
    terms: Float[Tensor, "3 S K"]
    overrides: Pairs | None
    forbidden: Int[Tensor, "2 E"] | None
    mask_rows: Int[Tensor, " M"] | None
    mask: Int32[Tensor, "M W"] | None

    @classmethod
    def of(
        cls, sequences: Sequence[tuple[ControlState, Paths]], device: torch.device | str = "cpu"
    ) -> Adjustments:
        """Return the adjustments of every path of every sequence, one row each, in this order.

        Args:
            sequences: controls of each sequence, and the paths of its rows. A path has the tokens
                after the committed ones, down to the row's node; [] is the root.
        """
        owners: list[int] = []
        overrides: list[tuple[int, Entry]] = []
        forbidden_rows: list[int] = []
        forbidden_tokens: list[int] = []
        mask_rows: list[int] = []
        lines: list[Words] = []
        for i, (state, paths) in enumerate(sequences):
            first_row = len(owners)
            owners += [i] * len(paths)

            # What single rows need beyond their sequence's entries.
            for row, path in enumerate(paths, first_row):
                overrides += [(row, entry) for entry in state.overrides(path)]
                for token in state.forbidden(path):
                    forbidden_rows.append(row)
                    forbidden_tokens.append(token)

            # A sequence has a mask for each of its rows, or none.
            masks = state.masks(paths)
            if masks is not None:
                mask_rows += range(first_row, len(owners))
                lines.append(masks)

        # To the device: only what some row needs.
        states = [state for state, _ in sequences]
        tokens, terms = _entries(states, device)
        override_pairs = _pairs(overrides, device) if overrides else None
        forbidden = None
        if forbidden_rows:
            forbidden = to_device([forbidden_rows, forbidden_tokens], device)
        masked = None
        mask = None
        if lines:
            masked = to_device(mask_rows, device)
            mask = copy_to_device(torch.from_numpy(np.concatenate(lines)), device)
        return cls(
            owners=to_device(owners, device),
            tokens=tokens,
            terms=terms,
            overrides=override_pairs,
            forbidden=forbidden,
            mask_rows=masked,
            mask=mask,
        )

    def apply(self, logits: Float[Tensor, "R V"]) -> None:
        """Adjust fp32 logits in place; tokens that cannot be sampled become -inf."""
        # Overridden logits are read first: they take the place of their sequence's entries.
        overrides = self.overrides
        own = None if overrides is None else logits[overrides.rows, overrides.tokens]

        if self.tokens.shape[1]:
            tokens = self.tokens[self.owners]
            terms = self.terms[:, self.owners]
            adjusted = _adjusted(logits.gather(1, tokens), terms)
            logits.scatter_(1, tokens, adjusted)
        if overrides is not None and own is not None:
            logits[overrides.rows, overrides.tokens] = _adjusted(own, overrides.terms)

        if self.forbidden is not None:
            rows, tokens = self.forbidden
            logits[rows, tokens] = -torch.inf
        if self.mask is not None and self.mask_rows is not None:
            allowed = unpack_tokens(self.mask, logits.shape[1])
            masked = logits[self.mask_rows].masked_fill(~allowed, -torch.inf)
            logits[self.mask_rows] = masked


def _adjusted(x: Float[Tensor, "..."], terms: Float[Tensor, "3 ..."]) -> Float[Tensor, "..."]:
    """Return logits after bias, repetition penalty and counting penalties."""
    bias, factor, subtracted = terms
    x = x + bias

    # The penalty lowers a logit of either sign, as in transformers.
    penalized = torch.where(x > 0, x / factor, x * factor)
    return penalized - subtracted


def _entries(
    states: list[ControlState], device: torch.device | str
) -> tuple[Int[Tensor, "S K"], Float[Tensor, "3 S K"]]:
    """Return the sequences' entries, padded with entries that change nothing."""
    longest = max((len(state.entries) for state in states), default=0)
    tokens = torch.zeros(len(states), longest, dtype=torch.int64)
    terms = torch.zeros(3, len(states), longest)
    terms[1] = 1.0  # the factor of repetition_penalty
    for i, state in enumerate(states):
        entries = state.entries
        num = len(entries)
        if num == 0:
            continue
        tokens[i, :num] = torch.tensor(entries.tokens)
        own_terms = [entries.biases, entries.factors, entries.subtracted]
        terms[:, i, :num] = torch.tensor(own_terms)

        # Written twice, an entry is still that entry.
        tokens[i, num:] = tokens[i, 0]
        terms[:, i, num:] = terms[:, i, :1]
    return copy_to_device(tokens, device), copy_to_device(terms, device)


def _pairs(entries: list[tuple[int, Entry]], device: torch.device | str) -> Pairs:
    """Return the entries of single rows as tensors."""
    entry_rows: list[int] = []
    token_ids: list[int] = []
    biases: list[float] = []
    factors: list[float] = []
    subtracted: list[float] = []
    for row, (token, bias, factor, less) in entries:
        entry_rows.append(row)
        token_ids.append(token)
        biases.append(bias)
        factors.append(factor)
        subtracted.append(less)

    rows, tokens = to_device([entry_rows, token_ids], device)
    terms = to_device([biases, factors, subtracted], device, torch.float32)
    return Pairs(rows, tokens, terms)
