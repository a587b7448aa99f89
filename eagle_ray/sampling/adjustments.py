"""Adjustments: what controls do to the logits of some rows, as tensors, and the one function that applies it.

    adjustments = Adjustments.of([(state, [[], [17], [17, 4]])], vocab_size, device)   # one sequence, three rows
    adjustments.apply(logits)                                                          # fp32, in place

Three parts, each empty or None if no row needs it: entries that all rows of a sequence share, with what single rows
override; (row, token) pairs that cannot be picked; and a bit mask of allowed tokens for some rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from eagle_ray.core.device import copy_to_device, to_device
from eagle_ray.sampling.control_state import ControlState, Entry
from eagle_ray.sampling.grammar_state import Words, unpack_tokens

Paths = list[list[int]]
"""For each row of a sequence, the tokens between its last committed token and the row's own, which is included."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Places (row, token) in the logits, and what is added, multiplied and subtracted there."""

    rows: Int[Tensor, " E"]
    tokens: Int[Tensor, " E"]
    terms: Float[Tensor, "3 E"]


@dataclass(frozen=True, slots=True)
class Adjustments:
    """The adjustments of R rows that belong to S sequences.

    Attributes:
        owners: the sequence of each row.
        tokens, terms: entries of each sequence; one with fewer than K repeats its first one.
        overrides: entries of single rows, in place of their sequence's.
        forbidden: pairs (row, token).
        mask: bits of allowed tokens, one line for each of mask_rows.
    """

    owners: Int[Tensor, " R"]
    tokens: Int[Tensor, "S K"]
    terms: Float[Tensor, "3 S K"]
    overrides: Pairs | None
    forbidden: Int[Tensor, "2 E"] | None
    mask_rows: Int[Tensor, " M"] | None
    mask: Int32[Tensor, "M W"] | None

    @classmethod
    def of(cls, sequences: Sequence[tuple[ControlState, Paths]], device: torch.device | str = "cpu") -> Adjustments:
        """Return the adjustments of every path of every sequence, one row each, in this order."""
        owners: list[int] = []
        overrides: list[tuple[int, Entry]] = []
        forbidden: list[tuple[int, int]] = []
        mask_rows: list[int] = []
        lines: list[Words] = []
        for i, (state, paths) in enumerate(sequences):
            for row, path in enumerate(paths, len(owners)):
                overrides += [(row, entry) for entry in state.overrides(path)]
                forbidden += [(row, token) for token in state.forbidden(path)]
            if (masks := state.masks(paths)) is not None:
                mask_rows += range(len(owners), len(owners) + len(paths))
                lines.append(masks)
            owners += [i] * len(paths)
        tokens, terms = _entries([state for state, _ in sequences], device)
        return cls(
            owners=to_device(owners, device),
            tokens=tokens,
            terms=terms,
            overrides=_pairs(overrides, device) if overrides else None,
            forbidden=to_device(list(zip(*forbidden, strict=True)), device) if forbidden else None,
            mask_rows=to_device(mask_rows, device) if lines else None,
            mask=copy_to_device(torch.from_numpy(np.concatenate(lines)), device) if lines else None,
        )

    def apply(self, logits: Float[Tensor, "R V"]) -> None:
        """Adjust fp32 logits in place; tokens that cannot be picked become -inf."""
        own = None if self.overrides is None else logits[self.overrides.rows, self.overrides.tokens]
        if self.tokens.shape[1]:
            tokens = self.tokens[self.owners]
            logits.scatter_(1, tokens, _adjusted(logits.gather(1, tokens), self.terms[:, self.owners]))
        if self.overrides is not None and own is not None:
            logits[self.overrides.rows, self.overrides.tokens] = _adjusted(own, self.overrides.terms)
        if self.forbidden is not None:
            logits[self.forbidden[0], self.forbidden[1]] = -torch.inf
        if self.mask is not None and self.mask_rows is not None:
            allowed = unpack_tokens(self.mask, logits.shape[1])
            logits[self.mask_rows] = logits[self.mask_rows].masked_fill(~allowed, -torch.inf)


def _adjusted(x: Float[Tensor, "..."], terms: Float[Tensor, "3 ..."]) -> Float[Tensor, "..."]:
    """Return logits after bias, repetition penalty and counting penalties."""
    bias, factor, subtracted = terms
    x = x + bias
    return torch.where(x > 0, x / factor, x * factor) - subtracted


def _entries(
    states: list[ControlState], device: torch.device | str
) -> tuple[Int[Tensor, "S K"], Float[Tensor, "3 S K"]]:
    """Return the sequences' entries, padded with what changes nothing."""
    longest = max((len(state.entries) for state in states), default=0)
    tokens = torch.zeros(len(states), longest, dtype=torch.int64)
    terms = torch.zeros(3, len(states), longest)
    terms[1] = 1.0
    for i, state in enumerate(states):
        entries, num = state.entries, len(state.entries)
        if num:
            tokens[i, :num] = torch.tensor(entries.tokens)
            tokens[i, num:] = tokens[i, 0]
            terms[:, i, :num] = torch.tensor([entries.biases, entries.factors, entries.subtracted])
            terms[:, i, num:] = terms[:, i, :1]
    return copy_to_device(tokens, device), copy_to_device(terms, device)


def _pairs(entries: list[tuple[int, Entry]], device: torch.device | str) -> Pairs:
    rows, tokens = to_device([[row for row, _ in entries], [entry[0] for _, entry in entries]], device)
    terms = to_device([[entry[i] for _, entry in entries] for i in (1, 2, 3)], device, torch.float32)
    return Pairs(rows, tokens, terms)
