"""Build response bodies and streamed chunks from the sequences of a request.

    answers = generation.answers
    answers.body()["choices"][0]["message"]["content"]      # 'Paris.'

    chunks = ChoiceChunks(answers, choice)
    for count in counts:                        # numbers of output ids, as the engine reports them
        yield from chunks.until(count)          # each an event of the stream

A chunk belongs to one choice. It has complete characters only, and never a part of a stop string.
One engine step gives at most one chunk of a text completion. A chat gets one for each part of the
message that grows: content, reasoning_content, or a tool call's name or arguments.

With stream_options.include_steps, a chunk also says which decode step made each token, and at which
depth of its draft. The tokens of a step are the accepted drafts at depths 1, 2, ..., then the
target's own token at depth 0. Step 0 is the prompt's pass, which gives one token of the target.

    Steps(sequence).next(["The", " capital", " is"])      # texts of the first three output ids; returns
    [{'step': 0, 'num_draft_tokens': 0, 'num_accepted_draft_tokens': 0, 'tokens': [
         {'id': 95, 'text': 'The', 'depth': 0}]},
     {'step': 1, 'num_draft_tokens': 12, 'num_accepted_draft_tokens': 1, 'tokens': [
         {'id': 17, 'text': ' capital', 'depth': 1}, {'id': 9, 'text': ' is', 'depth': 0}]}]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import count, groupby
from typing import Any

from eagle_ray.core.counters import AcceptanceStats
from eagle_ray.core.sequence import Sequence
from eagle_ray.requests.answer_models import (
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatFinish,
    ChoiceScores,
    Chunk,
    ChunkDetails,
    Completion,
    Delta,
    DeltaFunction,
    Finish,
    Metrics,
    Step,
    StepToken,
    TextChunk,
    TextChunkChoice,
)
from eagle_ray.requests.answers import (
    FinishedAnswer,
    TextOffsets,
    TokenLogprob,
    TokenUsage,
    chat_choice,
    chat_logprobs,
    completion_form,
    metrics_of,
    scores_form,
    text_choice,
    token_logprobs,
)
from eagle_ray.requests.score_columns import score_columns
from eagle_ray.text.answer import ChatEvent
from eagle_ray.text.answer_parser import AnswerParser, parse_answer
from eagle_ray.text.chat_options import ChatOptions
from eagle_ray.text.tokenizer import DecodeStream, TextOptions, Tokenizer, options_of_answer


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """Turns output ids into text, and the text into an answer.

    Attributes:
        tokenizer: tokenizer of the target, set up for the request's chat options.
        stops: strings that end an answer.
        text_options: settings of detokenization.
        chat_options: options of a chat; None for a text completion, whose text is all content.
    """

    tokenizer: Tokenizer
    stops: list[str]
    text_options: TextOptions
    chat_options: ChatOptions | None

    @property
    def has_parts(self) -> bool:
        """Return whether an answer may have reasoning or tool calls besides its content."""
        if self.chat_options is None:
            return False
        return (
            self.tokenizer.chat_format.reasoning_parser is not None or self.chat_options.has_tools
        )

    def decode_token(self, token: int) -> str:
        return self.tokenizer.token_text(token)

    def parser(self, prompt_ids: list[int]) -> AnswerParser | None:
        """Return a new parser for an answer's text; None if all of it is content."""
        if self.chat_options is None or not self.has_parts:
            return None
        end = self.tokenizer.prompt_end(prompt_ids)
        return AnswerParser.of(self.tokenizer.chat_format, self.chat_options, end)

    def finished(
        self, sequence: Sequence, index: int, call_key: str, num_wanted: int | None = None
    ) -> FinishedAnswer:
        """Return the answer of a finished sequence: text, reasoning, tool calls and finish reason.

        Args:
            sequence: finished sequence.
            index: number of the choice, from 0.
            call_key: text from which the ids of tool calls are made.
            num_wanted: number of output ids that the answer shows; None shows all. With 0, the
                finish reason is length.
        """
        output_ids = sequence.output_ids[:num_wanted]
        options = self._options_for(sequence.prompt_ids)
        text = self.tokenizer.final_text(output_ids, self.stops, options)
        reason: Any = "length" if num_wanted == 0 else sequence.finish_reason
        parser = self.parser(sequence.prompt_ids)
        if parser is None:
            return FinishedAnswer(index, text, reason)
        marked_text = self.tokenizer.with_markers().final_text(output_ids, self.stops, options)
        parts = parse_answer(marked_text, parser)
        calls = self.tokenizer.chat_format.openai_calls(parts.calls, call_key)
        ended: Any = parts.finish_reason(reason)
        return FinishedAnswer(index, text, ended, parts.content, parts.reasoning or None, calls)

    def stream(self, prompt_ids: list[int]) -> DecodeStream:
        """Return an incremental decoder of output ids. It keeps the markers that a parser reads."""
        tokenizer = self.tokenizer.with_markers() if self.has_parts else self.tokenizer
        return tokenizer.decode_stream(self.stops, self._options_for(prompt_ids))

    def _options_for(self, prompt_ids: list[int]) -> TextOptions:
        return options_of_answer(self.text_options, self.chat_options, self.tokenizer, prompt_ids)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt.

    Attributes:
        ids: token ids that the model reads.
        text: text that an echo shows; empty for a prompt of token ids.
    """

    ids: list[int]
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One answer of a request.

    Attributes:
        index: number of the choice within the request, from 0.
        prompt: prompt that it answers.
        sequence: sequence of the engine.
        num_wanted: number of output ids to show; None shows all.
        first: sequence of the prompt's first choice, which alone computes the prompt's
            log-probabilities.
    """

    index: int
    prompt: Prompt
    sequence: Sequence
    num_wanted: int | None
    first: Sequence

    @property
    def output_ids(self) -> list[int]:
        """Return the output ids that are shown."""
        return self.sequence.output_ids[: self.num_wanted]

    @property
    def finish_reason(self) -> Finish | None:
        """Return the finish reason. A choice that shows no tokens ended by length."""
        return "length" if self.num_wanted == 0 else self.sequence.finish_reason

    @property
    def scores(self) -> ChoiceScores:
        """Return the scores of the texts that the answer may be, by column name; empty without any."""
        scoring = self.sequence.scoring
        return {} if scoring is None else scores_form(score_columns(scoring))


@dataclass(frozen=True, slots=True, eq=False)
class RequestAnswers:
    """The choices of a request, and the details that its answer shows.

    Attributes:
        id: id of the answer.
        created: Unix time in seconds.
        model: name of the target.
        prompts: prompts of the request.
        choices: choices of the first prompt, then of the next, equally many of each.
        reader: reader of the choices' output ids.
        num_tops: number of alternatives per token; None shows no log-probabilities.
        has_echo: whether a text completion begins with its prompt.
        has_token_ids: whether the ids of prompt and output are shown.
        has_usage: whether a stream ends with a chunk of the usage.
        has_steps: whether chunks say which decode step made each token.
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

    def body(self) -> ChatCompletion | Completion:
        """Return the body of a response that is not streamed. Every sequence must be finished."""
        answers = [self._finished(choice) for choice in self.choices]
        usage = self.usage(answer.reasoning for answer in answers).chat_form()
        decode_token = self.reader.decode_token
        if self.is_chat:
            return ChatCompletion(
                id=self.id,
                object="chat.completion",
                created=self.created,
                model=self.model,
                choices=[chat_choice(answer, decode_token) for answer in answers],
                usage=usage,
                metrics=self.metrics(),
            )
        return Completion(
            id=self.id,
            object="text_completion",
            created=self.created,
            model=self.model,
            choices=[text_choice(answer, decode_token) for answer in answers],
            usage=usage,
            metrics=self.metrics(),
        )

    def chat_chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        """Return an event of a chat's stream."""
        chunk: ChatChunk = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if self.has_usage:
            chunk["usage"] = None
        return chunk

    def text_chunk(self, choices: list[TextChunkChoice]) -> TextChunk:
        """Return an event of a text completion's stream."""
        chunk: TextChunk = {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if self.has_usage:
            chunk["usage"] = None
        return chunk

    def last_chunk(self) -> Chunk:
        """Return the chunk that follows all choices, with the usage and the speculation metrics."""
        reasonings = (
            self._read(choice).reasoning for choice in self.choices if self.reader.has_parts
        )
        chunk: Chunk = self.chat_chunk([]) if self.is_chat else self.text_chunk([])
        chunk["usage"] = self.usage(reasonings).chat_form()
        chunk["metrics"] = self.metrics()
        return chunk

    def usage(self, reasonings: Iterable[str | None]) -> TokenUsage:
        """Return the token usage. A prompt counts once, even if it has several choices.

        Args:
            reasonings: text of each choice's reasoning, without markers.
        """
        encode = self.reader.tokenizer.encode
        return TokenUsage(
            prompt=sum(len(prompt.ids) for prompt in self.prompts),
            output=sum(len(choice.output_ids) for choice in self.choices),
            cached=self._num_cached(),
            reasoning=sum(
                len(encode(text, add_special_tokens=False)) for text in reasonings if text
            ),
        )

    def _num_cached(self) -> int:
        """Return the number of prompt tokens that were in the cache for all choices of their prompt."""
        n = len(self.choices) // len(self.prompts)
        reused = [choice.sequence.num_reused for choice in self.choices]
        return sum(min(reused[start : start + n]) for start in range(0, len(reused), n))

    def metrics(self) -> Metrics:
        """Return the speculation metrics over all choices."""
        return metrics_of(
            reduce(AcceptanceStats.merge, (stats_of(choice.sequence) for choice in self.choices))
        )

    def call_key(self, choice: Choice) -> str:
        """Return the text from which the ids of a choice's tool calls are made."""
        return f"{self.id}/{choice.index}"

    def prompt_logprobs(self, choice: Choice) -> list[TokenLogprob]:
        """Return the log-probabilities of the prompt; empty unless they are shown."""
        sequence = choice.first
        if self.num_tops is None:
            return []
        return token_logprobs(sequence.prompt_ids, sequence.prompt_logprobs, sequence.prompt_tops)

    def output_logprobs(self, choice: Choice, start: int, end: int) -> list[TokenLogprob]:
        """Return the log-probabilities of the output ids [start, end); empty unless they are shown."""
        sequence = choice.sequence
        if self.num_tops is None:
            return []
        logprobs, tops = sequence.output_logprobs[start:end], sequence.output_tops[start:end]
        return token_logprobs(sequence.output_ids[start:end], logprobs, tops)

    def _read(self, choice: Choice) -> FinishedAnswer:
        return self.reader.finished(
            choice.sequence, choice.index, self.call_key(choice), choice.num_wanted
        )

    def _finished(self, choice: Choice) -> FinishedAnswer:
        """Return the answer of a choice with every detail that is shown."""
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
            scores=choice.scores,
        )


def stats_of(sequence: Sequence) -> AcceptanceStats:
    """Return the acceptance statistics of a sequence that the engine has accepted."""
    assert sequence.stats is not None, "the engine sets them when it accepts a sequence"
    return sequence.stats


def num_logprobs(chunk: Chunk) -> int:
    """Return the number of log-probabilities in a chunk, without alternatives."""
    num = 0
    for choice in chunk["choices"]:
        logprobs: Any = choice["logprobs"]
        if logprobs is not None:
            num += len(logprobs["content"] if "content" in logprobs else logprobs["tokens"])
    return num


class ChoiceChunks:
    """The chunks of one choice. Their texts, joined, are the text of an answer that is not streamed."""

    def __init__(self, answers: RequestAnswers, choice: Choice):
        self._answers, self.choice = answers, choice
        self._deltas = MessageDeltas(answers, choice)
        self._growing = answers.reader.stream(choice.sequence.prompt_ids)
        self._steps = Steps(choice.sequence) if answers.has_steps else None
        choice.sequence.has_live_stats = answers.has_steps
        self._num_sent = 0
        self._is_begun = False
        self._offsets = TextOffsets()  # offsets of the tokens whose log-probabilities are sent

    def num_unsent(self, count: int) -> int:
        """Return the number of tokens in the chunks up to `count` output ids, those of an echo included."""
        echoed = (
            len(self.choice.sequence.prompt_ids)
            if self._answers.has_echo and not self._is_begun
            else 0
        )
        return echoed + count - self._num_sent

    def until(self, count: int) -> Iterator[Chunk]:
        """Yield the chunks up to `count` output ids, and the last chunks if the sequence ends there."""
        sequence = self.choice.sequence
        if not self._is_begun:
            self._is_begun = True
            yield from self._beginning()
        is_end = sequence.finish_reason is not None and count == len(sequence.output_ids)
        if self.choice.num_wanted is not None:
            count = min(count, self.choice.num_wanted)
        start, self._num_sent = self._num_sent, count
        yield from self._chunks(self._texts(start, count, is_end), start, count, is_end)

    def _texts(self, start: int, end: int, is_end: bool) -> list[str]:
        """Return the text that output ids [start, end) add: one piece per id if steps are shown, else one piece."""
        ids = self.choice.sequence.output_ids[start:end]
        groups = [ids] if self._steps is None else [[token] for token in ids] or [[]]
        # No stop string ends before the last id.
        texts = [self._growing.grow(group) for group in groups[:-1]]
        last = (
            self._growing.end(self.choice.output_ids) if is_end else self._growing.grow(groups[-1])
        )
        return [*texts, last]

    def _beginning(self) -> Iterator[Chunk]:
        """Yield the first chunk: the role of a chat message, or an echoed prompt.

        With tools, the content of the first chunk is null. If the answer has tool calls alone,
        clients that add up its deltas then get null, which is its content in a response that is not
        streamed.
        """
        if (options := self._answers.reader.chat_options) is not None:
            yield self._chat_chunk(
                {"role": "assistant", "content": None if options.has_tools else ""}
            )
        elif self._answers.has_echo:
            tokens = self._answers.prompt_logprobs(self.choice)
            yield self._text_chunk(self.choice.prompt.text, {}, tokens, None)

    def _chunks(self, texts: list[str], start: int, end: int, is_end: bool) -> Iterator[Chunk]:
        """Yield the chunks that show the output ids [start, end); none if there is nothing to show.

        Args:
            texts: text that these ids add: one piece per id if steps are shown, else one piece.
            start, end: range of output ids.
            is_end: whether the choice ends here. The last chunk then has the finish reason.
        """
        piece = "".join(texts)
        reason = self.choice.finish_reason if is_end else None
        tokens = self._answers.output_logprobs(self.choice, start, end)
        has_new_ids = end > start and (self._answers.has_token_ids or self._steps is not None)
        if not self._answers.is_chat:
            if piece or is_end or tokens or has_new_ids:
                details = self._details(texts, start, end, is_end)
                yield self._text_chunk(piece, details, tokens, reason)
            return

        # Several deltas are several chunks; the last one has the logprobs and the reason.
        deltas = self._deltas.of(piece, is_end)
        for delta in deltas[:-1]:
            yield self._chat_chunk(delta)
        if deltas or is_end or tokens or has_new_ids:
            last: Delta = deltas[-1] if deltas else {}
            details = self._details(texts, start, end, is_end)
            yield self._chat_chunk(last, details, tokens, self._deltas.finish_reason(reason))

    def _details(self, texts: list[str], start: int, end: int, is_end: bool) -> ChunkDetails:
        """Return the requested details of the output ids [start, end): ids, steps and scores."""
        details: ChunkDetails = {}
        if self._answers.has_token_ids:
            details["token_ids"] = self.choice.sequence.output_ids[start:end]
        if self._steps is not None:
            details["steps"] = self._steps.next(texts[: end - start])
        if is_end:
            details.update(self.choice.scores)
        return details

    def _chat_chunk(
        self,
        delta: Delta,
        details: ChunkDetails | None = None,
        tokens: Iterable[TokenLogprob] = (),
        reason: ChatFinish | None = None,
    ) -> ChatChunk:
        shown = list(tokens)
        logprobs = None
        if shown:
            logprobs = chat_logprobs(shown, self._answers.reader.decode_token)
        choice: ChatChunkChoice = {
            "index": self.choice.index,
            "delta": delta,
            **(details or {}),
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        return self._answers.chat_chunk([choice])

    def _text_chunk(
        self, text: str, details: ChunkDetails, tokens: list[TokenLogprob], reason: Finish | None
    ) -> TextChunk:
        logprobs = None
        if tokens:
            has_tops = bool(self._answers.num_tops)
            decode_token = self._answers.reader.decode_token
            logprobs = completion_form(tokens, decode_token, has_tops, self._offsets)
        choice: TextChunkChoice = {
            "index": self.choice.index,
            "text": text,
            **details,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        return self._answers.text_chunk([choice])


class MessageDeltas:
    """Turns the growing text of a streamed chat message into deltas."""

    def __init__(self, answers: RequestAnswers, choice: Choice):
        self._parser = answers.reader.parser(choice.sequence.prompt_ids)
        self._chat_format, self._key = (
            answers.reader.tokenizer.chat_format,
            answers.call_key(choice),
        )
        self._calls: set[int] = set()

    def of(self, piece: str, is_end: bool) -> list[Delta]:
        """Return the deltas that a piece of text adds.

        Args:
            piece: text to add.
            is_end: whether the piece is the last one.
        """
        if self._parser is None:
            return [{"content": piece}] if piece else []
        events = self._parser.feed(piece) + (self._parser.end() if is_end else [])
        return [delta for event in events if (delta := self._delta(event))]

    def finish_reason(self, reason: Finish | None) -> ChatFinish | None:
        return "tool_calls" if self._calls and reason == "stop" else reason

    def _delta(self, event: ChatEvent) -> Delta:
        """Return the delta of a parser's event; empty if the event adds nothing.

        The event "broken" takes back a call whose beginning was sent. The text of the call follows
        as content.
        """
        if event.kind == "content":
            return {"content": event.text}
        if event.kind == "reasoning":
            return {"reasoning_content": event.text}
        if event.kind == "arguments":
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
        if event.kind == "broken":
            self._calls.discard(event.index)
            return {}
        self._calls.add(event.index)
        call_id = self._chat_format.call_id(self._key, event.index)
        function: DeltaFunction = {"name": event.text, "arguments": ""}
        return {
            "tool_calls": [
                {"index": event.index, "id": call_id, "type": "function", "function": function}
            ]
        }


class Steps:
    """The decode steps of one sequence, read in portions of any size."""

    def __init__(self, sequence: Sequence):
        self._sequence = sequence
        self._origins = _origins(sequence)
        self._num_read = 0

    def next(self, texts: list[str]) -> list[Step]:
        """Return the steps of the next output ids, which the engine must have produced.

        Args:
            texts: text of each of these output ids.
        """
        start, self._num_read = self._num_read, self._num_read + len(texts)
        ids = self._sequence.output_ids[start : self._num_read]
        tokens = list(zip(ids, texts, self._origins, strict=False))
        steps = []
        for number, group in groupby(tokens, key=lambda item: item[2][0]):
            made: list[StepToken] = [
                {"id": token, "text": text, "depth": depth} for token, text, (_, depth) in group
            ]
            steps.append(self._step(number, made))
        return steps

    def _step(self, number: int, tokens: list[StepToken]) -> Step:
        """Return a step with the numbers of candidates that it verified and accepted.

        The numbers include candidates that were cut off at the end of the output.
        """
        stats = stats_of(self._sequence)
        return {
            "step": number,
            "num_draft_tokens": stats.per_step_budget[number - 1] - 1 if number else 0,
            "num_accepted_draft_tokens": stats.per_step_accepted[number - 1] if number else 0,
            "tokens": tokens,
        }


def _origins(sequence: Sequence) -> Iterator[tuple[int, int]]:
    """Yield the step that made each output token, and the token's depth in that step's draft.

    Request a pair only when its token exists.
    """
    yield 0, 0
    for step in count(1):
        for depth in range(1, stats_of(sequence).per_step_accepted[step - 1] + 1):
            yield step, depth
        yield step, 0
