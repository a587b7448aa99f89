"""SamplingSettings: how the tokens of one sequence are sampled.

Values are not checked here: requests are checked before, by the table of parameters
(``requests/parameters.py``), which documents each field. Python callers use SamplingParams, which
checks.

    >>> SamplingSettings(temperature=0.8).is_greedy
    False
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

# A temperature this small is greedy decoding, and dividing by it would overflow.
GREEDY_BELOW = 1e-5
NO_LIMIT = 2**31 - 1  # tokens; the engine cuts max_tokens to what the model's length leaves


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Sampling parameters of one sequence, greedy by default."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 256
    stop: list[str] = field(default_factory=list)
    n: int = 1
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: bool | int | None = False
    top_logprobs: int = 0
    prompt_logprobs: bool | int | None = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = field(default_factory=list)
    min_tokens: int = 0
    thinking_budget: int | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    stop_in_reasoning: bool = False
    skip_special_tokens: bool = True
    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    response_format: str | None = None
    continuations: list[Any] | None = None
    score_text: bool = False
    score_stride: int | None = None

    def with_seed(self, seed: int) -> SamplingSettings:
        """Return these settings with another seed."""
        changed = copy.copy(self)
        object.__setattr__(changed, "seed", seed)
        return changed

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def token_limit(self) -> int:
        """Return the maximum tokens of an output, or NO_LIMIT if only the model's length bounds it."""
        return NO_LIMIT if self.max_tokens is None else self.max_tokens

    @cached_property
    def wants_logprobs(self) -> bool:
        """Return whether log-probabilities of the output are requested: by True, or by any number, even 0."""
        return self.logprobs is not None and self.logprobs is not False

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs is not None and self.prompt_logprobs is not False

    @cached_property
    def num_top_logprobs(self) -> int:
        """Return the number of likeliest tokens that are returned with each output token."""
        return max(self.top_logprobs, 0 if self.logprobs is True else int(self.logprobs or 0))

    @property
    def is_scored(self) -> bool:
        """Return whether continuations, choices or the prompt are scored, so that nothing is generated."""
        return self.continuations is not None or self.score_text or self._is_scored_alone

    @property
    def _is_scored_alone(self) -> bool:
        has_choices = self.choice is not None and self.wants_logprobs
        return self.max_tokens == 0 and (has_choices or self.wants_prompt_logprobs)

    def for_scoring(self) -> SamplingSettings:
        """Return these settings without those that only affect generated text."""
        return SamplingSettings(
            max_tokens=0,
            seed=self.seed,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            prompt_logprobs=self.prompt_logprobs,
            continuations=self.continuations,
            score_text=self.score_text,
            score_stride=self.score_stride,
        )

    @property
    def num_top_prompt_logprobs(self) -> int:
        return 0 if self.prompt_logprobs is True else int(self.prompt_logprobs or 0)
