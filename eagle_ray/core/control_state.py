"""ControlState: the controls of a request (biases, penalties, forbidden tokens) at every node of its draft tree.

Each control is a function of the preceding tokens, so a node is adjusted by its own path: the
sequence's tokens and the node's ancestors. Output under trees therefore equals plain decoding
with the same controls. The order is vLLM's and transformers': forbidden tokens, logit_bias,
repetition_penalty, then frequency_penalty and presence_penalty; after them temperature, top_k,
top_p and min_p. `adjustments.py` applies them.

    state = ControlState(sampling, bad_word_ids, prompt_ids, ends, vocab_size, grammar, reasoning)
    state.sync(output_ids)              # once a step: the tokens committed since
    state.entries                       # adjusted tokens after the committed ones, as parallel lists
    state.overrides(path)               # entries that a node's ancestors change
    state.forbidden(path)               # tokens that cannot be picked after the node
    state.masks(paths)                  # tokens that can be picked after each node, if not all

Counts advance with committed tokens. A path costs what its own tokens change.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from eagle_ray.core.errors import RequestError
from eagle_ray.core.grammar_state import (
    TOKENS_PER_WORD,
    GrammarState,
    Words,
    num_token_words,
    pack_tokens,
)
from eagle_ray.core.reasoning_budget import ReasoningBudget, ReasoningIds, ReasoningPlace
from eagle_ray.core.sampling_settings import SamplingSettings

WordIds = tuple[tuple[int, ...], ...]
"""Token id sequences of words. The last id of one cannot be picked where the others stand before it, in prompt or
output, as in transformers' NoBadWordsLogitsProcessor."""
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
    """The state of one sequence's controls: counts of its tokens, and contexts of its bad words.

    Args:
        bad_word_ids: token ids of sampling.bad_words.
        ends: EOS and stop tokens, which min_tokens forbids at first.
        vocab_size: the number of the target's logits.
        grammar: state of the output's grammar, if it has one.
        reasoning: markers of the reasoning that sampling.thinking_budget bounds, if the answer can
            have any.

    Attributes:
        ends: end tokens of the vocabulary, ascending.
        entries: adjusted tokens after the committed output.
    """

    def __init__(
        self,
        sampling: SamplingSettings,
        bad_word_ids: WordIds,
        prompt_ids: Sequence[int],
        ends: Collection[int],
        vocab_size: int,
        grammar: GrammarState | None = None,
        reasoning: ReasoningIds | None = None,
    ):
        self._sampling = sampling
        self._has_penalties = has_penalties(sampling)
        self.grammar = grammar
        self.ends = sorted(end for end in ends if end < vocab_size)
        self._vocab_size = vocab_size
        self._counts: Counter[int] = Counter()
        self._num_output = 0
        self._prompt = frozenset(prompt_ids) if sampling.repetition_penalty != 1 else frozenset()

        allowed = sampling.allowed_token_ids
        self._allowed = None if allowed is None else frozenset(allowed)
        self._mask = None if self._allowed is None else pack_tokens(self._allowed, vocab_size)

        # Bad words of one token are forbidden everywhere, those of several by their context.
        words = [word for word in bad_word_ids if max(word) < vocab_size]
        self._single = singles_of(words)
        self._words: dict[int, list[tuple[int, ...]]] = defaultdict(list)  # by the last but one
        for word in words:
            if len(word) > 1:
                self._words[word[-2]].append(word)
        self._window = max(map(len, words), default=1) - 1
        self._context = list(prompt_ids[-self._window :]) if self._window else []
        self._num_ruled_out = len(self.ends) + len(self._single)

        self._budget: ReasoningBudget | None = None
        self._place: ReasoningPlace | None = None
        if sampling.thinking_budget is not None and reasoning is not None:
            self._budget = ReasoningBudget(sampling.thinking_budget, reasoning)
            self._place = self._budget.start

        self._biases = {token: bias for token, bias in sampling.logit_bias.items() if bias}
        self._biases |= dict.fromkeys(self._single, -torch.inf)
        self.entries = Entries()
        self._index: dict[int, int] = {}  # token -> its index in entries
        for token in sorted(self._biases.keys() | self._prompt):
            self._set(token)

    def sync(self, output_ids: Sequence[int]) -> None:
        """Add the output ids that were committed since the last call."""
        new = output_ids[self._num_output :]
        self._num_output = len(output_ids)
        if self.grammar is not None:
            self.grammar.sync(output_ids)
        if self._budget is not None:
            self._place = self._budget.after(self._place, new)
        if self._window:
            self._context = [*self._context, *new][-self._window :]
        if self._has_penalties:
            self._counts.update(new)
            for token in set(new):
                self._set(token)

    def overrides(self, path: Sequence[int]) -> list[Entry]:
        """Return the entries that differ at a node from the committed ones, because of the tokens on its path.

        The path excludes the root and includes the node.
        """
        if not path or not self._has_penalties:
            return []
        counts = Counter(path).items()
        return [self._entry(token, self._counts[token] + count) for token, count in counts]

    def forbidden(self, path: Sequence[int]) -> list[int]:
        """Return the tokens that cannot be sampled after this path, in addition to those of `entries` and `masks`.

        A bad word of several tokens is ignored where it would forbid the last allowed token, or a
        forced one.
        """
        if self._forced(path) is not None:
            return []
        ends = self.ends if self._num_output + len(path) < self._sampling.min_tokens else []
        words = self._completions(path)
        if not words or self._allowed is None:
            return [*ends, *words]
        if len(self._allowed) > len(words) + self._num_ruled_out:
            return [*ends, *words]  # without looking at each token: some are left
        is_last = self._allowed <= {*words, *ends, *self._single}
        return ends if is_last else [*ends, *words]

    def masks(self, paths: Sequence[Sequence[int]]) -> Words | None:
        """Return the mask [N, W] of the tokens that can follow each path of a tree; None if all can.

        A path after which grammar and controls leave no token gets a mask of all tokens and is a
        dead end: an output that reaches it fails, as it does in plain decoding.

        Args:
            paths: parents before their children, the empty path first.
        """
        forced = {}
        for i, path in enumerate(paths):
            token = self._forced(path)
            if token is not None:
                forced[i] = token
        if self.grammar is None and not forced:
            if self._mask is None:
                return None
            return np.broadcast_to(self._mask, (len(paths), len(self._mask)))

        # Begin with what the grammar allows, and drop what the controls do not.
        if self.grammar is None:
            masks = np.full((len(paths), num_token_words(self._vocab_size)), -1, np.int32)
        else:
            masks = self.grammar.path_masks(paths)
        if self._mask is not None:
            masks &= self._mask
        for i, token in forced.items():
            masks[i] &= pack_tokens([token], self._vocab_size)
        if self.grammar is None:
            return masks

        for path, mask in zip(paths, masks, strict=True):
            if self._leaves_none(mask, path):
                mask[:] = -1
                self.grammar.mark_dead_end(path, _nothing_left())
        return masks

    def _leaves_none(self, mask: Words, path: Sequence[int]) -> bool:
        """Return whether the tokens of the mask cannot be picked after the path."""
        if not mask.any():
            return True
        barred = {*self.forbidden(path), *self._single}
        num_allowed = int(np.bitwise_count(mask.view(np.uint32)).sum())
        if not barred or num_allowed > len(barred):
            return False

        # Clear the bits of the barred tokens.
        rest = mask.view(np.uint32).copy()
        for token in barred:
            bit = 1 << token % TOKENS_PER_WORD
            rest[token // TOKENS_PER_WORD] &= np.uint32(~bit & 0xFFFFFFFF)
        return not rest.any()

    def _forced(self, path: Sequence[int]) -> int | None:
        """Return the one token that can follow the path, if thinking_budget leaves no other."""
        place = self._place
        budget = self._budget
        if place is None or budget is None:
            return None
        if place.num_tokens + len(path) < budget.max_tokens:
            return None
        return budget.forced(budget.after(place, path))

    def _completions(self, path: Sequence[int]) -> list[int]:
        """Return the tokens that would complete a bad word of several tokens."""
        if not self._words:
            return []
        context = [*self._context, *path][-self._window :]
        if not context:
            return []
        completions = []
        for *begin, last in self._words.get(context[-1], ()):
            if context[-len(begin) :] == begin:
                completions.append(last)
        return completions

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
        sampling = self._sampling
        factor = sampling.repetition_penalty if count or token in self._prompt else 1.0
        subtracted = sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
        return token, self._biases.get(token, 0.0), factor, subtracted


def has_controls(
    sampling: SamplingSettings, bad_word_ids: WordIds, reasoning: ReasoningIds | None = None
) -> bool:
    """Return whether the request adjusts any logit."""
    if sampling.allowed_token_ids is not None or sampling.min_tokens > 0 or bad_word_ids:
        return True
    if sampling.thinking_budget is not None and reasoning is not None:
        return True
    return has_penalties(sampling) or any(sampling.logit_bias.values())


def has_penalties(sampling: SamplingSettings) -> bool:
    """Return whether the request has a penalty that depends on counts of earlier tokens."""
    return bool(
        sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1
    )


def singles_of(bad_word_ids: Iterable[tuple[int, ...]]) -> set[int]:
    """Return the tokens that are bad words by themselves and so are forbidden everywhere."""
    return {word[0] for word in bad_word_ids if len(word) == 1}


def _nothing_left() -> RequestError:
    return RequestError(
        "grammar_conflict",
        "the other controls forbid every token that the grammar allows here: change min_tokens, bad_words or "
        "allowed_token_ids",
    )
