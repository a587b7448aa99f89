"""ControlState: one sequence's controls at every node of its draft tree.

    state = ControlState(controls, prompt_ids, ends, vocab_size)
    state.sync(output_ids)              # once a step: the tokens committed since
    state.entries                       # adjusted tokens after the committed ones, as parallel lists
    state.overrides(path)               # entries that a node's ancestors change
    state.forbidden(path)               # tokens that cannot be picked after the node

Counts advance with committed tokens. A path costs what its own tokens change.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Int32
from torch import Tensor

from eagle_ray.sampling.controls import Controls

WORD_BITS = 32  # allowed tokens per word of a bit mask
Entry = tuple[int, float, float, float]
"""Token id, what is added to its logit, the factor of repetition_penalty, what is subtracted last."""


@dataclass(slots=True)
class Entries:
    """Adjusted tokens of a sequence as parallel lists, each token once."""

    tokens: list[int] = field(default_factory=list)
    biases: list[float] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    subtracted: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)


class ControlState:
    """Counts and contexts of one sequence.

    Args:
        ends: EOS and stop tokens, which min_tokens forbids at first.
        vocab_size: the number of the target's logits.

    Attributes:
        ends: those of the vocabulary, ascending.
        entries: adjusted tokens after the committed output.
        mask: allowed_token_ids as bits, token t in bit t % 32 of word t // 32; None allows all.
    """

    def __init__(self, controls: Controls, prompt_ids: Sequence[int], ends: Collection[int], vocab_size: int):
        self._controls = controls
        self.ends = sorted(end for end in ends if end < vocab_size)
        self._allowed = None if controls.allowed_token_ids is None else frozenset(controls.allowed_token_ids)
        self.mask = None if self._allowed is None else pack_mask(controls.allowed_token_ids or (), vocab_size)
        words = [word for word in controls.bad_words if max(word) < vocab_size]
        self._single = {word[0] for word in words if len(word) == 1}
        self._biases: dict[int, float] = dict(controls.logit_bias) | dict.fromkeys(self._single, -torch.inf)
        self._prompt = frozenset(prompt_ids) if controls.repetition_penalty != 1 else frozenset()
        self._counts: Counter[int] = Counter()
        self._num_output = 0
        self._words: dict[int, list[tuple[int, ...]]] = defaultdict(list)  # of several tokens, by the last but one
        for word in words:
            if len(word) > 1:
                self._words[word[-2]].append(word)
        self._num_ruled_out = len(self.ends) + len(self._single)
        self._window = max(map(len, words), default=1) - 1
        self._context = list(prompt_ids[-self._window :]) if self._window else []
        self.entries = Entries()
        self._index: dict[int, int] = {}  # of a token in entries
        for token in sorted(self._biases.keys() | self._prompt):
            self._set(token)

    def sync(self, output_ids: Sequence[int]) -> None:
        """Add the output ids that were committed since the last call."""
        new = output_ids[self._num_output :]
        self._num_output = len(output_ids)
        if self._window:
            self._context = [*self._context, *new][-self._window :]
        if self._controls.has_penalties:
            self._counts.update(new)
            for token in set(new):
                self._set(token)

    def overrides(self, path: Sequence[int]) -> list[Entry]:
        """Return the entries of tokens whose counts a node's ancestors, root excluded and the node included, change."""
        if not path or not self._controls.has_penalties:
            return []
        return [self._entry(token, self._counts[token] + count) for token, count in Counter(path).items()]

    def forbidden(self, path: Sequence[int]) -> list[int]:
        """Return the tokens that cannot be picked after this path, besides those of `entries` and `mask`.

        Bad words of several tokens yield if they would forbid the last of the allowed tokens.
        """
        ends = self.ends if self._num_output + len(path) < self._controls.min_tokens else []
        words = self._completions(path)
        if not words or self._allowed is None or len(self._allowed) > len(words) + self._num_ruled_out:
            return [*ends, *words]
        is_last = self._allowed <= {*words, *ends, *self._single}
        return ends if is_last else [*ends, *words]

    def _completions(self, path: Sequence[int]) -> list[int]:
        """Return the tokens that would complete a bad word of several tokens."""
        if not self._words:
            return []
        context = [*self._context, *path][-self._window :]
        words = self._words.get(context[-1], ()) if context else ()
        return [word[-1] for word in words if tuple(context[1 - len(word) :]) == word[:-1]]

    def _set(self, token: int) -> None:
        """Write the token's entry after the committed output."""
        _, bias, factor, subtracted = self._entry(token, self._counts[token])
        entries = self.entries
        index = self._index.setdefault(token, len(entries))
        if index == len(entries):
            entries.tokens.append(token)
            entries.biases.append(bias)
            entries.factors.append(factor)
            entries.subtracted.append(subtracted)
        entries.factors[index] = factor
        entries.subtracted[index] = subtracted

    def _entry(self, token: int, count: int) -> Entry:
        """Return a token's adjustment after an output that has it `count` times."""
        controls = self._controls
        factor = controls.repetition_penalty if count or token in self._prompt else 1.0
        subtracted = controls.frequency_penalty * count + controls.presence_penalty * (count > 0)
        return token, self._biases.get(token, 0.0), factor, subtracted


def pack_mask(token_ids: Collection[int], vocab_size: int) -> Int32[Tensor, " W"]:
    """Return a bit mask of these tokens, W = ceil(vocab_size / 32)."""
    bits = np.zeros(-(-vocab_size // WORD_BITS) * WORD_BITS, dtype=bool)
    bits[list(token_ids)] = True
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))
