"""RequestOutput: the result for one prompt: its samples with their acceptance statistics, or its error.

    output = llm.generate("Once")[0]
    output.outputs[0].text, output.outputs[0].mean_acceptance_length      # (' upon a time', 3.1)

The names are those of vLLM's outputs; the acceptance statistics come on top.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from eagle_ray.core.counters import AcceptanceStats
from eagle_ray.core.errors import RequestError
from eagle_ray.core.sequence import Sequence
from eagle_ray.requests.answers import (
    FinishedAnswer,
    Logprobs,
    TokenDecoder,
    python_form,
    token_logprobs,
)


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample.

    Attributes:
        text: text of the sample without end-of-sequence token and stop string; "" if the target has
            no tokenizer.
        content, reasoning_content, tool_calls: parts of an answer to messages, with tool calls in
            OpenAI's form. content is the whole text if the target writes no reasoning and got no
            tools.
        token_ids: token ids of the sample, with end-of-sequence token and stop string.
        cumulative_logprob, logprobs: log-probabilities; None unless SamplingParams.logprobs
            requests them.
        finish_reason: reason of its end: "stop", "length" or "tool_calls".
        seed: seed of this sample: SamplingParams(seed=...) with n=1 repeats it.
        stats: acceptance statistics, including tokens that were cut off at the end.
        ttft_s, e2e_s: seconds from the arrival of the prompt to the first and to the last token.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    seed: int
    stats: AcceptanceStats
    ttft_s: float
    e2e_s: float
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None
    content: str = ""
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def mean_acceptance_length(self) -> float | None:
        """Return tau: tokens per target pass; None if no pass followed the prompt's."""
        return self.stats.mean_acceptance_length

    @property
    def num_spec_steps(self) -> int:
        return self.stats.num_steps

    @property
    def num_draft_tokens(self) -> int:
        return self.stats.num_draft_tokens

    @property
    def num_accepted_draft_tokens(self) -> int:
        return self.stats.num_accepted_draft_tokens

    @property
    def acceptance_histogram(self) -> list[int]:
        """Return how many passes accepted 0, 1, ... draft tokens."""
        return self.stats.histogram


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The output for one prompt: its samples, or its error.

    Attributes:
        prompt: text that the model read, chat template included; None for token ids.
        prompt_logprobs: log-probabilities of the prompt's tokens, the first of which has None; None
            unless SamplingParams.prompt_logprobs requests them.
        outputs: samples; empty if there is an error, or if nothing is generated.
        scores: log-probability of each of the prompt's continuations, or of its choices with
            logprobs. This and the following six are None without any.
        score_tokens, score_bytes: tokens and bytes of each continuation.
        is_greedy: whether each token of a continuation is the likeliest one.
        best, best_by_byte: index of the highest score, and of the highest score by byte.
        label_mass: probability that the next token is the first token of any continuation.
        num_verified: number of rows of the target's passes behind the prompt.
        loglikelihood: log-probability of the prompt itself. This and the following three are None
            without score_text.
        tokens, bytes: number of scored tokens, and of bytes of the prompt's text.
        bits_per_byte: bits per byte of the text; None without a text.
        error: reason why the prompt could not be answered, with its code.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: Logprobs | None = None
    error: RequestError | None = None
    scores: list[float] | None = None
    score_tokens: list[int] | None = None
    score_bytes: list[int] | None = None
    is_greedy: list[bool] | None = None
    best: int | None = None
    best_by_byte: int | None = None
    label_mass: float | None = None
    num_verified: int | None = None
    loglikelihood: float | None = None
    tokens: int | None = None
    bytes: int | None = None
    bits_per_byte: float | None = None

    @property
    def finished(self) -> bool:
        return True


def completion_of(
    sequence: Sequence,
    answer: FinishedAnswer,
    num_tops: int | None,
    decode_token: TokenDecoder | None,
) -> CompletionOutput:
    """Return a finished sequence and its answer as a sample.

    Args:
        num_tops: likeliest tokens to report at each output token; None for no log-probabilities.
        decode_token: None without a tokenizer.
    """
    arrived = sequence.arrived_at or 0.0
    logprobs = cumulative_logprob = None
    if num_tops is not None:
        tokens = token_logprobs(sequence.output_ids, sequence.output_logprobs, sequence.output_tops)
        logprobs = python_form(tokens, decode_token, num_tops)
        cumulative_logprob = sum(sequence.output_logprobs)
    return CompletionOutput(
        index=answer.index,
        text=answer.text,
        token_ids=sequence.output_ids,
        finish_reason=answer.finish_reason,
        seed=sequence.sampling.seed or 0,
        stats=sequence.stats or AcceptanceStats.empty(0),
        ttft_s=(sequence.first_token_at or arrived) - arrived,
        e2e_s=(sequence.finished_at or arrived) - arrived,
        cumulative_logprob=cumulative_logprob,
        logprobs=logprobs,
        content=answer.text if answer.content is None else answer.content,
        reasoning_content=answer.reasoning,
        tool_calls=answer.tool_calls,
    )
