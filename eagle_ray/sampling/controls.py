"""Controls: what a request does to the target's logits before a token is picked.

Each control is a function of the tokens before the place, so a node of a draft tree is adjusted by its own path: the
sequence's tokens and the node's ancestors. Output under trees therefore equals plain decoding with the same controls.
The order is vLLM's and transformers': forbidden tokens, logit_bias, repetition_penalty, then frequency_penalty and
presence_penalty; after them temperature, top_k, top_p and min_p. `control_state.py` follows the counts of one sequence,
`adjustments.py` applies them.

    >>> Controls.of(min_tokens=4, logit_bias={17: -2.0})
    Controls(presence_penalty=0.0, ..., logit_bias=((17, -2.0),), ..., min_tokens=4)
    >>> Controls.of(frequency_penalty=0.0) is None
    True
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from eagle_ray.requests.sampling_limits import (
    MAX_LOGIT_BIAS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
)


@dataclass(frozen=True, slots=True)
class Controls:
    """Adjustments of one sequence's logits. Raises ValueError naming a field with an invalid value.

    Attributes:
        presence_penalty: subtracted from the logit of each token that the output has.
        frequency_penalty: subtracted from a token's logit as often as the output has the token.
        repetition_penalty: divides the positive logits of tokens in prompt or output and multiplies negative ones, as
            transformers does; 1 is off.
        logit_bias: (token id, what is added to its logit), each id once.
        allowed_token_ids: the only tokens that can be picked; None allows all.
        bad_words: token id sequences. The last id of one cannot be picked where the others stand before it, in prompt
            or output, as in transformers' NoBadWordsLogitsProcessor.
        min_tokens: EOS and stop tokens cannot be among the first min_tokens output ids.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            self._check_number(name, -MAX_PENALTY, MAX_PENALTY)
        self._check_number("repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        if not isinstance(self.min_tokens, int) or self.min_tokens < 0:
            raise ValueError(f"min_tokens must be an integer, 0 or more, got {self.min_tokens!r}")
        self._check_bias()
        self._check_tokens()

    @classmethod
    def of(
        cls,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        allowed_token_ids: Iterable[int] | None = None,
        bad_words: Iterable[Iterable[int]] = (),
        min_tokens: int = 0,
    ) -> Controls | None:
        """Return the controls, or None if none of them changes anything."""
        controls = cls(
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
            tuple(sorted((token, value) for token, value in (logit_bias or {}).items() if value)),
            None if allowed_token_ids is None else tuple(sorted(set(allowed_token_ids))),
            tuple(tuple(word) for word in bad_words),
            min_tokens,
        )
        return None if controls == cls() else controls

    @property
    def has_penalties(self) -> bool:
        """Return whether the counts of the tokens before a place matter."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def forbidden(self) -> frozenset[int]:
        """Return the tokens that bad words of one token forbid everywhere."""
        return frozenset(word[0] for word in self.bad_words if len(word) == 1)

    def _check_number(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not isinstance(value, (int, float)) or not low <= value <= high:
            raise ValueError(f"{name} must be a number between {low:g} and {high:g}, got {value!r}")

    def _check_bias(self) -> None:
        for token, value in self.logit_bias:
            is_number = isinstance(value, (int, float)) and math.isfinite(value)
            if not isinstance(token, int) or token < 0 or not is_number or abs(value) > MAX_LOGIT_BIAS:
                raise ValueError(
                    f"logit_bias must map token ids to numbers between {-MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}, "
                    f"got {token!r}: {value!r}"
                )

    def _check_tokens(self) -> None:
        named = [("allowed_token_ids", self.allowed_token_ids or ()), *(("bad_words", word) for word in self.bad_words)]
        for name, ids in named:
            if any(not isinstance(token, int) or token < 0 for token in ids):
                raise ValueError(f"{name} must hold token ids, integers from 0, got {list(ids)!r}")
        if any(not word for word in self.bad_words):
            raise ValueError("bad_words must hold words of at least one token")
        if self.allowed_token_ids is None:
            return
        if not self.allowed_token_ids:
            raise ValueError("allowed_token_ids must hold at least one token id, or be absent")
        if self.forbidden.issuperset(self.allowed_token_ids):
            raise ValueError("bad_words forbid every one of allowed_token_ids. Allow at least one more token.")
