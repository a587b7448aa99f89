"""Sequence: one request in flight, from its prompt to its last token."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from eagle_ray.core.continuations import ContinuationScores
from eagle_ray.core.control_state import ControlState, WordIds, has_controls, singles_of
from eagle_ray.core.counters import AcceptanceStats
from eagle_ray.core.errors import RequestError
from eagle_ray.core.grammar_spec import GrammarSpec
from eagle_ray.core.grammar_state import GrammarState
from eagle_ray.core.pooling_state import PoolingState
from eagle_ray.core.reasoning_budget import ReasoningIds
from eagle_ray.core.sampling_settings import SamplingSettings

StopCheck = Callable[[list[int]], "int | None"]
TopLogprobs = list[tuple[int, float]]
"""Token ids and their log-probabilities at one place, the likeliest first."""
FinishReason = Literal["stop", "length"]


class SequenceStatus(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    SCORING = "scoring"  # the prompt is computed, and passes over its continuations are left
    RUNNING = "running"
    FINISHED = "finished"


_CLOSES = "which ends the reasoning"
NO_SLOT = -1  # slot of a sequence that is not in the batch


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of one request. Times are seconds on the engine's monotonic clock, None until they happen.

    Attributes:
        prompt_ids: token ids of the prompt, at least one.
        prompt_text: text of the prompt with its special tokens; None if the request gave ids.
        sampling: parameters with the sequence's own seed; without a seed the key of its noise is 0.
        stop_check: callback with all output ids after each step. It returns how many of them to
            keep, up to the token that completes a stop string, or None to go on.
        checks_stop_ids: whether stop_check also finds sampling.stop_token_ids, because they do not
            count within reasoning.
        num_reused: tokens found in the cache when the sequence was last admitted.
        num_prefilled: num_reused and the tokens computed since.
        output_logprobs: log-probability of each output id under the unprocessed logits, if
            sampling.logprobs.
        output_tops: likeliest tokens at the position of each output id, if sampling.top_logprobs.
        prompt_logprobs: the prompt's log-probabilities, if sampling.prompt_logprobs. Entry 0 is
            None: nothing precedes the first token.
        prompt_tops: likeliest tokens at the position of each prompt id, if
            sampling.prompt_logprobs. Entry 0 is empty.
        bad_word_ids: token id sequences of sampling.bad_words.
        reasoning: markers of the reasoning that sampling.thinking_budget bounds; None if there is
            nothing to bound.
        controls: state of the controls and the grammar, once an engine accepts the sequence; None
            without any.
        scoring: continuations of the prompt to score; None without any.
        grammar_spec: required form of the output, by default that of `sampling`; None if it is
            free.
        grammar: state of the output in its compiled grammar; None without one.
        pooling: state of the requested embedding, in place of an output; None without one.
        error: reason why the sequence failed in the engine. It is finished then, without a
            finish_reason.
        category: label of sequences that are expected to have outputs of similar length.
        listener: callback in the engine's thread whenever output ids were added. Tokens already
            reported never change.
        has_live_stats: whether stats include every step that the listener was called for; otherwise
            they may lag until the end.

    Raises:
        RequestError: sampling parameters contradict one another.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingSettings
    stop_check: StopCheck | None = None
    checks_stop_ids: bool = False
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_tops: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_tops: list[TopLogprobs] = field(default_factory=list)
    category: str = ""
    listener: Callable[[], None] | None = None
    has_live_stats: bool = False
    bad_word_ids: WordIds = ()
    reasoning: ReasoningIds | None = None
    controls: ControlState | None = None
    grammar_spec: GrammarSpec | None = None
    grammar: GrammarState | None = None
    pooling: PoolingState | None = None
    error: RequestError | None = None
    prompt_text: str | None = None
    scoring: ContinuationScores | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    slot: int = NO_SLOT
    # The engine sets it when it accepts the sequence.
    stats: AcceptanceStats = field(default_factory=lambda: AcceptanceStats.empty(0))
    # The max_tokens of `sampling`, cut to the room; set when the engine accepts the sequence.
    max_tokens: int = 0
    num_reused: int = 0
    num_prefilled: int = 0
    target_forwards: int = 0
    draft_forwards: int = 0
    arrived_at: float | None = None
    admitted_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None

    def __post_init__(self) -> None:
        if self.grammar_spec is None:
            self.grammar_spec = GrammarSpec.of(self.sampling)
        if (fault := self._contradiction()) is not None:
            raise RequestError("invalid_sampling", fault)

    def _contradiction(self) -> str | None:
        sampling = self.sampling
        allowed = self.sampling.allowed_token_ids
        if allowed is not None and singles_of(self.bad_word_ids).issuperset(allowed):
            return "bad_words forbid every one of allowed_token_ids. Allow at least one more token."
        closing = set() if self.reasoning is None else set(self.reasoning.closings[0])
        if allowed is not None and (lacking := closing.difference(allowed)):
            return f"thinking_budget: allowed_token_ids lacks {min(lacking)}, {_CLOSES}. Add it"
        if forbidden := closing & singles_of(self.bad_word_ids):
            return f"thinking_budget: bad_words forbid token id {min(forbidden)}, {_CLOSES}. Leave that word out"
        is_scored = self.scoring is not None or sampling.wants_prompt_logprobs
        if not sampling.token_limit and not is_scored:
            return "max_tokens: must be 1 or more where nothing is scored. Raise it, or give continuations"
        if sampling.min_tokens > sampling.token_limit:
            return f"min_tokens must be at most max_tokens ({sampling.token_limit}), got {sampling.min_tokens}"
        if self.grammar_spec is not None and sampling.ignore_eos:
            return (
                f"ignore_eos must be false with {self.grammar_spec.name}, whose end ends the output"
            )
        return None

    @property
    def token_ids(self) -> list[int]:
        """Return the committed tokens of prompt and output."""
        return self.prompt_ids + self.output_ids

    def token_ids_from(self, start: int) -> list[int]:
        """Return the committed tokens from a position on."""
        num_prompt = len(self.prompt_ids)
        return (
            self.output_ids[start - num_prompt :] if start >= num_prompt else self.token_ids[start:]
        )

    @property
    def num_tokens(self) -> int:
        """Return the number of committed tokens. The last one is not in the KV cache yet."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_cached(self) -> int:
        """Return the number of tokens whose keys and values are in the target's cache between steps."""
        return len(self.prompt_ids) + len(self.output_ids) - 1

    @property
    def remaining_tokens(self) -> int:
        """Return the number of tokens that it may still generate."""
        return self.max_tokens - len(self.output_ids)

    @property
    def generates(self) -> bool:
        """Return whether the sequence generates text. If not, only its prompt and continuations are scored."""
        return self.max_tokens > 0

    @property
    def num_to_prefill(self) -> int:
        """Return the number of tokens to compute before it can decode: the prompt, and after preemption its outputs."""
        return max(len(self.prompt_ids), self.num_cached)

    @property
    def needs_all_rows(self) -> bool:
        """Return whether every row of the prompt must be computed, so that no prefix may come from the cache."""
        pools_all = self.pooling is not None and self.pooling.needs_all_rows
        return self.sampling.wants_prompt_logprobs or pools_all

    @property
    def root(self) -> int:
        """Return the last committed token: the root of the next tree."""
        return self.output_ids[-1] if self.output_ids else self.prompt_ids[-1]

    @property
    def is_simple(self) -> bool:
        """Return whether new tokens can just be appended, unless they contain an EOS or stop token
        or are the last ones."""
        has_checks = self.stop_check is not None or self.grammar is not None
        return not (has_checks or self.has_live_stats or self.sampling.wants_logprobs)

    def append(self, tokens: list[int], eos_ids: frozenset[int]) -> int:
        """Commit new tokens up to the first one that finishes the sequence, and return how many were cut off.

        The sequence fails if its grammar allows no further token before it is finished.
        """
        start = len(self.output_ids)
        self.output_ids += tokens
        keep, reason = self._cut(start, eos_ids)
        dead_end = (
            None if self.grammar is None else self.grammar.dead_end_in(self.output_ids[start:keep])
        )
        if dead_end is not None:
            keep = start + dead_end.num_tokens

        num_discarded = len(self.output_ids) - keep
        del self.output_ids[keep:]
        del self.output_logprobs[keep:]
        del self.output_tops[keep:]
        if dead_end is not None:
            self.status = SequenceStatus.FINISHED
            self.error = dead_end.error
        elif reason is not None:
            self.status = SequenceStatus.FINISHED
            self.finish_reason = reason
            if self.grammar is not None:
                self.grammar.sync(self.output_ids)
        return num_discarded

    def _cut(self, start: int, eos_ids: frozenset[int]) -> tuple[int, FinishReason | None]:
        """Return how many output ids to keep and why: the earliest of EOS, stop token, stop string
        and max_tokens; a stop wins a tie.
        """
        ends = frozenset() if self.sampling.ignore_eos else eos_ids
        if self.sampling.stop_token_ids and not self.checks_stop_ids:
            ends = ends.union(self.sampling.stop_token_ids)
        stops = [i + 1 for i in range(start, len(self.output_ids)) if self.output_ids[i] in ends][
            :1
        ]
        if (
            self.stop_check is not None
            and (num_retained := self.stop_check(self.output_ids)) is not None
        ):
            stops.append(num_retained)
        if stops and min(stops) <= self.max_tokens:
            return min(stops), "stop"
        if len(self.output_ids) >= self.max_tokens:
            return self.max_tokens, "length"
        return len(self.output_ids), None


def start_controls(sequence: Sequence, eos_ids: frozenset[int], vocab_size: int) -> None:
    """Create the state of the sequence's controls and grammar, if it has any.

    Raises RequestError for tokens that the target lacks, and for controls that forbid every token.
    """
    check_token_ids(sequence, vocab_size)
    sampling = sequence.sampling
    bad_word_ids = sequence.bad_word_ids
    reasoning = sequence.reasoning
    if sequence.grammar is None and not has_controls(sampling, bad_word_ids, reasoning):
        return
    ends = eos_ids.union(sampling.stop_token_ids)
    allowed = sampling.allowed_token_ids
    if (
        sampling.min_tokens
        and allowed is not None
        and not set(allowed) - ends - singles_of(bad_word_ids)
    ):
        message = "min_tokens: allowed_token_ids holds only tokens that end the output. Allow at least one more"
        raise RequestError("invalid_sampling", message)
    closing_ends = ends.intersection(() if reasoning is None else reasoning.closings[0])
    if closing_ends and sampling.min_tokens > (sampling.thinking_budget or 0):
        message = f"min_tokens forbids token id {min(closing_ends)}, {_CLOSES} and the output. Lower min_tokens"
        raise RequestError("invalid_sampling", f"thinking_budget: {message}")
    sequence.controls = new_controls(sequence, ends, vocab_size, sequence.grammar)


def new_controls(
    sequence: Sequence, ends: Collection[int], vocab_size: int, grammar: GrammarState | None
) -> ControlState:
    """Return the state of the sequence's controls before its first token.

    Args:
        ends: ids of EOS and stop tokens.
        grammar: state of the output's grammar before its first token; the controls advance it.
    """
    words = sequence.bad_word_ids
    reasoning = sequence.reasoning
    return ControlState(
        sequence.sampling, words, sequence.prompt_ids, ends, vocab_size, grammar, reasoning
    )


def check_token_ids(sequence: Sequence, vocab_size: int) -> None:
    """Raise RequestError if a sampling parameter names a token that the target lacks."""
    sampling = sequence.sampling
    named = {
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": [token for token, bias in sampling.logit_bias.items() if bias],
        "allowed_token_ids": sampling.allowed_token_ids,
        "thinking_budget": None if sequence.reasoning is None else sequence.reasoning.closings[0],
    }
    for name, ids in named.items():
        if ids and max(ids) >= vocab_size:
            message = (
                f"{name}: token id {max(ids)} is not in the target's vocabulary of {vocab_size}"
            )
            raise RequestError("invalid_sampling", message)


def _shown(value: object) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"


def check_length(sequence: Sequence, max_model_len: int, vocab_size: int) -> None:
    """Reduce max_tokens to the length that is left. Raises RequestError for a prompt that the target cannot take."""
    prompt_ids = sequence.prompt_ids
    if not isinstance(prompt_ids, list):
        raise RequestError(
            "bad_type", f"prompt_ids must be a list of integers, got {_shown(prompt_ids)}"
        )
    if not set(map(type, prompt_ids)) <= {int}:
        i, unknown = next(
            (i, token) for i, token in enumerate(prompt_ids) if type(token) is not int
        )
        raise RequestError(
            "bad_type", f"prompt_ids[{i}] must be a token id, an integer, got {_shown(unknown)}"
        )
    num_prompt = len(prompt_ids)
    num_behind = 1 if sequence.scoring is None else sequence.scoring.longest
    if num_prompt == 0:
        raise RequestError("prompt_empty", "the prompt has no tokens: give at least one")
    if sequence.scoring is not None and num_prompt + max(num_behind, 1) - 1 > max_model_len:
        raise RequestError(
            "prompt_too_long",
            f"the prompt has {num_prompt} tokens and its longest continuation {num_behind}: shorten them to at most "
            f"{max_model_len + 1} together (model.max_model_len is {max_model_len}), or raise model.max_model_len",
        )
    if num_prompt >= max_model_len and sequence.sampling.token_limit:
        raise RequestError(
            "prompt_too_long",
            f"the prompt has {num_prompt} tokens: shorten it to at most {max_model_len - 1} "
            f"(model.max_model_len is {max_model_len}), or raise model.max_model_len and execution.kv_tokens",
        )
    check_token_range(sequence, vocab_size)
    sequence.max_tokens = min(sequence.sampling.token_limit, max(0, max_model_len - num_prompt))


def check_token_range(sequence: Sequence, vocab_size: int) -> None:
    """Raise RequestError for a prompt, or a continuation of it, with a token that the target lacks."""
    ids_by_source = {"the prompt": sequence.prompt_ids}
    scores = sequence.scoring
    if scores is not None and scores.longest:
        behind = scores.trie.tokens[1:]
        ids_by_source[scores.source] = ids_by_source.get(scores.source, []) + behind

    for source, ids in ids_by_source.items():
        low = min(ids)
        high = max(ids)
        if low < 0 or high >= vocab_size:
            unknown = low if low < 0 else high
            message = (
                f"{source}: token id {unknown} is not in the target's vocabulary of {vocab_size}"
            )
            raise RequestError("bad_token_id", message)
