"""RequestOutput: what one prompt yields: its samples with their acceptance statistics, or its error.

    output = llm.generate("Once")[0]
    output.outputs[0].text, output.outputs[0].mean_acceptance_length      # (' upon a time', 3.1)

The names are those of vLLM's outputs; the acceptance statistics come on top.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from eagle_ray.core.acceptance_stats import AcceptanceStats
from eagle_ray.core.errors import RequestError
from eagle_ray.core.sequence import Sequence, TopLogprobs
from eagle_ray.text.answer import Answer
from eagle_ray.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token under the unprocessed logits.

    Attributes:
        rank: 1 for the likeliest token; None if it is not among the recorded ones.
        decoded_token: its text; None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = list[dict[int, Logprob] | None]
"""For each token, the log-probabilities by token id: its own, and those of the likeliest tokens."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample.

    Attributes:
        text: without end-of-sequence and stop string; "" if the target has no tokenizer.
        content, reasoning_content, tool_calls: the parts of the text of an answer to messages, tool calls in OpenAI's
            form. content is the text if the target neither thinks nor got tools.
        token_ids: with them.
        cumulative_logprob, logprobs: None unless SamplingParams.logprobs asks for them.
        finish_reason: "stop", "length" or "tool_calls".
        seed: the key of this sample's noise: SamplingParams(seed=...) with n=1 repeats it.
        stats: the acceptance statistics, before any cut at the end.
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
    """What one prompt yields.

    Attributes:
        prompt: the text that the model read, chat template included; None for token ids.
        prompt_logprobs: None unless SamplingParams.prompt_logprobs asks for them; the first token has None.
        outputs: one per sample; empty if there is an error.
        error: why the prompt could not be answered, with its code.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: Logprobs | None = None
    error: RequestError | None = None

    @property
    def finished(self) -> bool:
        return True


def completion_of(
    index: int,
    sequence: Sequence,
    text: str,
    num_tops: int | None,
    tokenizer: Tokenizer | None,
    answer: Answer | None = None,
) -> CompletionOutput:
    """Return a finished sequence as the sample of this index.

    answer: the parts of its text, if a parser read it.
    num_tops: likeliest tokens to report at each output token; None for no log-probabilities.
    """
    stats = sequence.stats or AcceptanceStats.empty(0)
    parts = answer or Answer(text)
    calls = tokenizer.chat_format.openai_calls(parts.calls, sequence.request_id) if tokenizer else []
    arrived = sequence.arrived_at or 0.0
    values = None if num_tops is None else sequence.output_logprobs
    logprobs = None
    if num_tops is not None and values is not None:
        logprobs = logprobs_of(sequence.output_ids, list(values), sequence.output_tops, num_tops, tokenizer)
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=sequence.output_ids,
        finish_reason=parts.finish_reason(sequence.finish_reason),
        seed=sequence.sampling.seed,
        stats=stats,
        ttft_s=(sequence.first_token_at or arrived) - arrived,
        e2e_s=(sequence.finished_at or arrived) - arrived,
        cumulative_logprob=None if values is None else sum(values),
        logprobs=logprobs,
        content=parts.content,
        reasoning_content=parts.reasoning or None,
        tool_calls=calls,
    )


def logprobs_of(
    ids: list[int],
    values: list[float | None],
    tops: list[TopLogprobs],
    num_tops: int,
    tokenizer: Tokenizer | None,
) -> Logprobs:
    """Return the log-probabilities of tokens and of the num_tops likeliest at each place, the likeliest first.

    values: None for a token that nothing precedes. tops: empty, or the likeliest tokens at each place.
    """
    found: Logprobs = []
    for i, (token, value) in enumerate(zip(ids, values, strict=True)):
        if value is None:
            found.append(None)
            continue
        ranked = tops[i] if tops else []
        ranks = {other: rank for rank, (other, _) in enumerate(ranked, 1)}
        here = {
            other: Logprob(other_value, ranks[other], _text(other, tokenizer))
            for other, other_value in ranked[:num_tops]
        }
        here.setdefault(token, Logprob(value, ranks.get(token), _text(token, tokenizer)))
        found.append(here)
    return found


def _text(token: int, tokenizer: Tokenizer | None) -> str | None:
    return None if tokenizer is None else tokenizer.decode_with_special([token])
