"""The chunks of a streamed response: each event is a chunk of one choice, sent as its sequence grows.

    chunks = ChoiceChunks(request, choice, tokenizer)
    for count in counts:                        # numbers of output ids, as the engine reports them
        yield from chunks.until(count)

A chunk has complete characters only and never a part of a stop string. One engine step gives at most one chunk, or one
for each part of a chat message that it adds to: content, reasoning_content, or a tool call's name or arguments.

With stream_options.include_steps a chunk also says how each token was made: by which decode step, and at which depth of
its draft. The tokens of a step are the accepted drafts at depths 1, 2, ..., then the target's own token at depth 0.
Step 0 is the prompt's pass, which gives one token of the target.

    Steps(sequence).next(["The", " capital", " is"])      # texts of the first three output ids
    # [{'step': 0, 'num_draft_tokens': 0, 'num_accepted_draft_tokens': 0, 'tokens': [
    #      {'id': 95, 'text': 'The', 'depth': 0}]},
    #  {'step': 1, 'num_draft_tokens': 12, 'num_accepted_draft_tokens': 1, 'tokens': [
    #      {'id': 17, 'text': ' capital', 'depth': 1}, {'id': 9, 'text': ' is', 'depth': 0}]}]
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, groupby
from typing import Any

from eagle_ray.core.sequence import Sequence
from eagle_ray.serve.generation_request import Choice, GenerationRequest, answer_parser, stats_of
from eagle_ray.serve.null_tokenizer import NullTokenizer
from eagle_ray.serve.responses import (
    Json,
    call_key,
    finish_reason,
    head,
    metrics_of,
    prompt_part,
    shown_ids,
    whole_usage,
)
from eagle_ray.serve.token_logprobs import chat_logprobs, output_places, text_logprobs
from eagle_ray.text.answer import ChatEvent
from eagle_ray.text.tokenizer import Tokenizer


def last_chunk(asked: GenerationRequest, text: Tokenizer | NullTokenizer) -> Json:
    """Return the chunk after all choices, with usage and speculation metrics."""
    return _head(asked) | {"choices": [], "usage": whole_usage(asked, text), "metrics": metrics_of(asked)}


def wants_usage(asked: GenerationRequest) -> bool:
    options = asked.request.stream_options
    return options is not None and options.include_usage


def wants_steps(asked: GenerationRequest) -> bool:
    options = asked.request.stream_options
    return options is not None and options.include_steps


def _head(asked: GenerationRequest) -> Json:
    return head(asked, "chat.completion.chunk" if asked.is_chat else "text_completion")


def num_logprobs(chunk: Json) -> int:
    """Return how many log-probabilities a chunk holds, without alternatives."""
    found = [choice.get("logprobs") for choice in chunk["choices"]]
    return sum(len(logprobs.get("tokens") or logprobs.get("content") or ()) for logprobs in found if logprobs)


class ChoiceChunks:
    """The chunks of one choice. Their texts concatenated are the text without streaming."""

    def __init__(self, asked: GenerationRequest, choice: Choice, text: Tokenizer | NullTokenizer):
        self._asked, self._choice, self._text = asked, choice, text
        self._parts = MessageParts(asked, choice, text)
        parsed = text if self._parts.is_plain else text.with_markers()
        self._growing = parsed.decode_stream(asked.stops, asked.text_options)
        self._steps = Steps(choice.sequence) if wants_steps(asked) else None
        choice.sequence.has_live_stats = wants_steps(asked)
        self._num_told = 0
        self._is_begun = False
        self._offset = 0  # characters of the tokens whose log-probabilities were told

    def num_untold(self, count: int) -> int:
        """Return how many tokens the chunks up to `count` output ids show, an echo included."""
        echoed = len(self._choice.sequence.prompt_ids) if self._asked.echo and not self._is_begun else 0
        return echoed + count - self._num_told

    def until(self, count: int) -> Iterator[Json]:
        """Yield the chunks up to `count` output ids; the last ones once the sequence is finished."""
        sequence = self._choice.sequence
        if not self._is_begun:
            self._is_begun = True
            yield from self._beginning()
        is_end = sequence.finish_reason is not None and count == len(sequence.output_ids)
        if self._choice.num_wanted is not None:
            count = min(count, self._choice.num_wanted)
        start, self._num_told = self._num_told, count
        yield from self._chunk(self._texts(start, count, is_end), start, count, is_end)

    def _texts(self, start: int, end: int, is_end: bool) -> list[str]:
        """Return what the output ids [start, end) add to the text: by id if steps are requested, else in one piece."""
        ids = self._choice.sequence.output_ids[start:end]
        groups = [ids] if self._steps is None else [[token] for token in ids] or [[]]
        texts = [self._growing.grow(group) for group in groups[:-1]]  # no stop string ends before the last id
        last = self._growing.end(shown_ids(self._choice)) if is_end else self._growing.grow(groups[-1])
        return [*texts, last]

    def _beginning(self) -> Iterator[Json]:
        """Yield the first chunk: the role of a chat message, or an echoed prompt.

        With tools the content is null until there is some: clients that add up the deltas of a call alone get null,
        which is its content in a response that is not streamed.
        """
        if self._asked.is_chat:
            content = None if self._asked.chat_options.has_tools else ""
            delta = {"role": "assistant", "content": content}
            yield self._with({"delta": delta, "logprobs": None, "finish_reason": None})
        elif self._asked.echo:
            echo, logprobs = prompt_part(self._asked, self._choice, self._text)
            self._offset = 0 if logprobs is None else sum(map(len, logprobs["tokens"]))
            yield self._with({"text": echo, "logprobs": logprobs, "finish_reason": None})

    def _chunk(self, texts: list[str], start: int, end: int, is_end: bool) -> Iterator[Json]:
        piece, logprobs = "".join(texts), self._logprobs(start, end)
        tells_ids = self._asked.request.return_token_ids or self._steps is not None
        deltas = self._parts.deltas(piece, is_end) if self._asked.is_chat else []
        if not (piece if not self._asked.is_chat else deltas) and not (
            is_end or logprobs or (tells_ids and end > start)
        ):
            return
        for delta in deltas[:-1]:
            yield self._with({"delta": delta, "logprobs": None, "finish_reason": None})
        reason = finish_reason(self._choice) if is_end else None
        said: Json = {"text": piece}
        if self._asked.is_chat:
            said = {"delta": deltas[-1] if deltas else {}}
            reason = self._parts.finish_reason(reason)
        if self._asked.request.return_token_ids:
            said["token_ids"] = self._choice.sequence.output_ids[start:end]
        if self._steps is not None:
            said["steps"] = self._steps.next(texts[: end - start])
        yield self._with(said | {"logprobs": logprobs, "finish_reason": reason})

    def _logprobs(self, start: int, end: int) -> Json | None:
        if self._asked.request.tops is None or start == end:
            return None
        places = output_places(self._choice.sequence, start, end)
        if self._asked.is_chat:
            return {"content": chat_logprobs(places, self._text), "refusal": None}
        logprobs = text_logprobs(places, self._text, self._asked.request.tops > 0, self._offset)
        self._offset += sum(map(len, logprobs["tokens"]))
        return logprobs

    def _with(self, said: dict[str, Any]) -> Json:
        chunk = _head(self._asked) | {"choices": [{"index": self._choice.index} | said]}
        return chunk | {"usage": None} if wants_usage(self._asked) else chunk


class MessageParts:
    """The deltas of a chat message, made of its text piece by piece. is_plain: the text is all content."""

    def __init__(self, asked: GenerationRequest, choice: Choice, text: Tokenizer | NullTokenizer):
        self._parser = answer_parser(asked, choice, text)
        self._chat_format, self._key = text.chat_format, call_key(asked, choice)
        self._calls: set[int] = set()

    @property
    def is_plain(self) -> bool:
        return self._parser is None

    def deltas(self, piece: str, is_end: bool) -> list[Json]:
        """Return the deltas that a piece of the text adds, the last piece if is_end."""
        if self._parser is None:
            return [{"content": piece}] if piece else []
        events = self._parser.feed(piece) + (self._parser.end() if is_end else [])
        return [delta for event in events if (delta := self._delta(event))]

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if self._calls and reason == "stop" else reason

    def _delta(self, event: ChatEvent) -> Json:
        """Return the delta of an event. A call that is broken was told already; its text follows as content."""
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
        function = {"name": event.text, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": call_id, "type": "function", "function": function}]}


Place = tuple[int, int]
"""A token's step and its depth in that step's draft."""


class Steps:
    """The decode steps of one sequence, read in portions of any size."""

    def __init__(self, sequence: Sequence):
        self._sequence = sequence
        self._places = _places(sequence)
        self._num_told = 0

    def next(self, texts: list[str]) -> list[dict[str, Any]]:
        """Return the next output ids, one per text, grouped by step. The engine must have produced them."""
        start, self._num_told = self._num_told, self._num_told + len(texts)
        ids = self._sequence.output_ids[start : self._num_told]
        told = list(zip(ids, texts, self._places, strict=False))
        return [
            self._counts(step)
            | {"tokens": [{"id": token, "text": text, "depth": depth} for token, text, (_, depth) in tokens]}
            for step, tokens in groupby(told, key=lambda item: item[2][0])
        ]

    def _counts(self, step: int) -> dict[str, int]:
        """Return the candidates that the step verified and accepted, before any cut at the output's end."""
        stats = stats_of(self._sequence)
        return {
            "step": step,
            "num_draft_tokens": stats.per_step_budget[step - 1] - 1 if step else 0,
            "num_accepted_draft_tokens": stats.per_step_accepted[step - 1] if step else 0,
        }


def _places(sequence: Sequence) -> Iterator[Place]:
    """Place by place, each to be asked for once its token is there."""
    yield 0, 0
    for step in count(1):
        for depth in range(1, stats_of(sequence).per_step_accepted[step - 1] + 1):
            yield step, depth
        yield step, 0
