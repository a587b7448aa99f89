"""The answers of a request, made from its sequences. As they grow, ``answer_chunks`` has their chunks.

answers = generation.answers(tokenizer)
answers.body()["choices"][0]["message"]["content"]      # 'Paris.'
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce

from eagle_ray.core.counters import AcceptanceStats
from eagle_ray.core.sequence import Sequence
from eagle_ray.requests.answers import (
    FinishedAnswer,
    Json,
    TokenUsage,
    chat_choice,
    metrics_of,
    text_choice,
)
from eagle_ray.requests.token_logprobs import TokenLogprob, token_logprobs
from eagle_ray.text.answer_parser import AnswerParser, parse_answer
from eagle_ray.text.chat_options import ChatOptions
from eagle_ray.text.tokenizer import DecodeStream, TextOptions, Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """How output ids become text, and the text an answer.

    Attributes:
        stops: strings that end an answer.
        chat_options: None if all of a text is content, as that of a text completion.
    """

    tokenizer: Tokenizer
    stops: list[str]
    text_options: TextOptions
    chat_options: ChatOptions | None

    @property
    def has_parts(self) -> bool:
        """Return whether an answer may have parts other than content."""
        if self.chat_options is None:
            return False
        return self.tokenizer.chat_format.reasoning_parser is not None or self.chat_options.has_tools

    def spell(self, token: int) -> str:
        return self.tokenizer.decode_with_special([token])

    def parser(self, prompt_ids: list[int]) -> AnswerParser | None:
        """Return a new parser of an answer's text, or None if all of it is content."""
        if self.chat_options is None or not self.has_parts:
            return None
        end = self.tokenizer.prompt_end(prompt_ids)
        return AnswerParser.of(self.tokenizer.chat_format, self.chat_options, end)

    def finished(self, sequence: Sequence, index: int, call_key: str, num_wanted: int | None = None) -> FinishedAnswer:
        """Return the answer that a finished sequence is.

        Args:
            call_key: what the ids of its tool calls are made of.
            num_wanted: output ids that it is to show; None shows all. With none it ended by length.
        """
        output_ids = sequence.output_ids[:num_wanted]
        text = self.tokenizer.final_text(output_ids, self.stops, self.text_options)
        reason = "length" if num_wanted == 0 else sequence.finish_reason
        parser = self.parser(sequence.prompt_ids)
        if parser is None:
            return FinishedAnswer(index, text, reason)
        marked_text = self.tokenizer.with_markers().final_text(output_ids, self.stops, self.text_options)
        parts = parse_answer(marked_text, parser)
        calls = self.tokenizer.chat_format.openai_calls(parts.calls, call_key)
        return FinishedAnswer(index, text, parts.finish_reason(reason), parts.content, parts.reasoning or None, calls)

    def stream(self) -> DecodeStream:
        """Return what makes text of growing output ids, with the markers that a parser needs."""
        tokenizer = self.tokenizer.with_markers() if self.has_parts else self.tokenizer
        return tokenizer.decode_stream(self.stops, self.text_options)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: ids as the model reads them, and the text that an echo shows."""

    ids: list[int]
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One answer of a request.

    Attributes:
        num_wanted: output ids that it is to show; None shows all.
        first: the sequence of the prompt's first choice, which alone computes the prompt's log-probabilities.
    """

    index: int
    prompt: Prompt
    sequence: Sequence
    num_wanted: int | None
    first: Sequence

    @property
    def output_ids(self) -> list[int]:
        """Return the output ids whose text is shown."""
        return self.sequence.output_ids[: self.num_wanted]

    @property
    def finish_reason(self) -> str | None:
        """Return the finish reason; a choice that was cut to no tokens ended by length."""
        return "length" if self.num_wanted == 0 else self.sequence.finish_reason


@dataclass(frozen=True, slots=True, eq=False)
class RequestAnswers:
    """The choices of a request, and what is to be shown of them.

    Attributes:
        choices: those of the first prompt, then those of the next, as many of each.
        num_tops: likeliest tokens at each token; None shows no log-probabilities.
        has_echo: a text completion begins with its prompt.
        has_token_ids: with the ids of prompt and output.
        has_usage: a stream's last chunk has the usage.
        has_steps: the chunks say how each token was made.
    """

    id: str
    created: int
    model: str
    prompts: list[Prompt]
    choices: list[Choice]
    reader: AnswerReader
    num_tops: int | None
    has_echo: bool
    has_token_ids: bool
    has_usage: bool
    has_steps: bool

    @property
    def is_chat(self) -> bool:
        return self.reader.chat_options is not None

    def head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def body(self) -> Json:
        """Return the body of a response that is not streamed; every sequence is finished."""
        kind, choice_of = ("chat.completion", chat_choice) if self.is_chat else ("text_completion", text_choice)
        answers = [self._finished(choice) for choice in self.choices]
        return self.head(kind) | {
            "choices": [choice_of(answer, self.reader.spell) for answer in answers],
            "usage": self.usage(answer.reasoning for answer in answers).chat_form(),
            "metrics": self.metrics(),
        }

    def chunk_head(self) -> Json:
        return self.head("chat.completion.chunk" if self.is_chat else "text_completion")

    def last_chunk(self) -> Json:
        """Return the chunk after all choices, with usage and speculation metrics."""
        reasonings = (self._read(choice).reasoning for choice in self.choices if self.reader.has_parts)
        usage = self.usage(reasonings).chat_form()
        return self.chunk_head() | {"choices": [], "usage": usage, "metrics": self.metrics()}

    def usage(self, reasonings: Iterable[str | None]) -> TokenUsage:
        """Return the token usage. A prompt counts once, however many choices it has.

        reasonings: the texts of the choices' reasoning, without their markers.
        """
        encode = self.reader.tokenizer.encode
        return TokenUsage(
            prompt=sum(len(prompt.ids) for prompt in self.prompts),
            output=sum(len(choice.output_ids) for choice in self.choices),
            cached=self._num_cached(),
            reasoning=sum(len(encode(text, add_special_tokens=False)) for text in reasonings if text),
        )

    def _num_cached(self) -> int:
        """Return how many prompt tokens were in the cache for all choices of their prompt."""
        n = len(self.choices) // len(self.prompts)
        reused = [choice.sequence.num_reused for choice in self.choices]
        return sum(min(reused[start : start + n]) for start in range(0, len(reused), n))

    def metrics(self) -> Json:
        """Return the speculation metrics over all choices."""
        return metrics_of(reduce(AcceptanceStats.merge, (stats_of(choice.sequence) for choice in self.choices)))

    def call_key(self, choice: Choice) -> str:
        """Return what the ids of a choice's tool calls are made of."""
        return f"{self.id}/{choice.index}"

    def prompt_logprobs(self, choice: Choice) -> list[TokenLogprob]:
        """Return the log-probabilities of the prompt; none unless they are to be shown."""
        sequence = choice.first
        if self.num_tops is None:
            return []
        return token_logprobs(sequence.prompt_ids, sequence.prompt_logprobs, sequence.prompt_tops)

    def output_logprobs(self, choice: Choice, start: int, end: int) -> list[TokenLogprob]:
        """Return the log-probabilities of the output ids [start, end); none unless they are to be shown."""
        sequence = choice.sequence
        if self.num_tops is None:
            return []
        logprobs, tops = sequence.output_logprobs[start:end], sequence.output_tops[start:end]
        return token_logprobs(sequence.output_ids[start:end], logprobs, tops)

    def _read(self, choice: Choice) -> FinishedAnswer:
        return self.reader.finished(choice.sequence, choice.index, self.call_key(choice), choice.num_wanted)

    def _finished(self, choice: Choice) -> FinishedAnswer:
        """Return a choice's answer with all that is to be shown of it."""
        answer, output_ids = self._read(choice), choice.output_ids
        text, logprobs = answer.text, self.output_logprobs(choice, 0, len(output_ids))
        if self.has_echo:
            text = choice.prompt.text + text
            logprobs = self.prompt_logprobs(choice) + logprobs
        return replace(
            answer,
            text=text,
            logprobs=None if self.num_tops is None else logprobs,
            has_tops=bool(self.num_tops),
            shown_ids=(choice.sequence.prompt_ids, output_ids) if self.has_token_ids else None,
        )


def stats_of(sequence: Sequence) -> AcceptanceStats:
    """Return the acceptance statistics of a sequence that the engine has accepted."""
    assert sequence.stats is not None, "the engine sets them when it accepts a sequence"
    return sequence.stats
