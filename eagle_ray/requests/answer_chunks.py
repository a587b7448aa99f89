"""The chunks of a streamed response: each event is a chunk of one choice, sent as its sequence grows.

    chunks = ChoiceChunks(answers, choice)
    for count in counts:                        # numbers of output ids, as the engine reports them
        yield from chunks.until(count)

A chunk has complete characters only and never a part of a stop string. One engine step gives at most one chunk, or one
for each part of a chat message that it adds to: content, reasoning_content, or a tool call's name or arguments.

With stream_options.include_steps a chunk also says how each token was made: by which decode step, and at which depth of
its draft. The tokens of a step are the accepted drafts at depths 1, 2, ..., then the target's own token at depth 0.
Step 0 is the prompt's pass, which gives one token of the target.

    Steps(sequence).next(["The", " capital", " is"])      # texts of the first three output ids; returns
    [{'step': 0, 'num_draft_tokens': 0, 'num_accepted_draft_tokens': 0, 'tokens': [
         {'id': 95, 'text': 'The', 'depth': 0}]},
     {'step': 1, 'num_draft_tokens': 12, 'num_accepted_draft_tokens': 1, 'tokens': [
         {'id': 17, 'text': ' capital', 'depth': 1}, {'id': 9, 'text': ' is', 'depth': 0}]}]
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, groupby
from typing import Any

from eagle_ray.core.sequence import Sequence
from eagle_ray.requests.answers import Json, chat_logprobs
from eagle_ray.requests.sequence_answers import Choice, RequestAnswers, stats_of
from eagle_ray.requests.token_logprobs import TokenLogprob, completion_form
from eagle_ray.text.answer import ChatEvent


def num_logprobs(chunk: Json) -> int:
    """Return how many log-probabilities a chunk holds, without alternatives."""
    shown = [choice.get("logprobs") for choice in chunk["choices"]]
    return sum(len(logprobs.get("tokens") or logprobs.get("content") or ()) for logprobs in shown if logprobs)


class ChoiceChunks:
    """The chunks of one choice. Their texts concatenated are the text without streaming."""

    def __init__(self, answers: RequestAnswers, choice: Choice):
        self._answers, self.choice = answers, choice
        self._deltas = MessageDeltas(answers, choice)
        self._growing = answers.reader.stream()
        self._steps = Steps(choice.sequence) if answers.has_steps else None
        choice.sequence.has_live_stats = answers.has_steps
        self._num_sent = 0
        self._is_begun = False
        self._offset = 0  # characters of the tokens whose log-probabilities were sent

    def num_unsent(self, count: int) -> int:
        """Return how many tokens the chunks up to `count` output ids show, an echo included."""
        echoed = len(self.choice.sequence.prompt_ids) if self._answers.has_echo and not self._is_begun else 0
        return echoed + count - self._num_sent

    def until(self, count: int) -> Iterator[Json]:
        """Yield the chunks up to `count` output ids; the last ones once the sequence is finished."""
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
        """Return what the output ids [start, end) add to the text: by id if steps are requested, else in one piece."""
        ids = self.choice.sequence.output_ids[start:end]
        groups = [ids] if self._steps is None else [[token] for token in ids] or [[]]
        texts = [self._growing.grow(group) for group in groups[:-1]]  # no stop string ends before the last id
        last = self._growing.end(self.choice.output_ids) if is_end else self._growing.grow(groups[-1])
        return [*texts, last]

    def _beginning(self) -> Iterator[Json]:
        """Yield the first chunk: the role of a chat message, or an echoed prompt.

        With tools the content is null until there is some: clients that add up the deltas of a call alone get null,
        which is its content in a response that is not streamed.
        """
        if (options := self._answers.reader.chat_options) is not None:
            delta = {"role": "assistant", "content": None if options.has_tools else ""}
            yield self._chunk({"delta": delta, "logprobs": None, "finish_reason": None})
        elif self._answers.has_echo:
            logprobs = self._text_logprobs(self._answers.prompt_logprobs(self.choice))
            yield self._chunk({"text": self.choice.prompt.text, "logprobs": logprobs, "finish_reason": None})

    def _chunks(self, texts: list[str], start: int, end: int, is_end: bool) -> Iterator[Json]:
        """Yield the chunks of the output ids [start, end), whose texts these are; none if there is nothing to show."""
        piece, has_ids = "".join(texts), self._answers.has_token_ids
        reason = self.choice.finish_reason if is_end else None
        tokens = self._answers.output_logprobs(self.choice, start, end)
        shown: Json = {"text": piece}
        has_text = bool(piece)
        if self._answers.is_chat:
            deltas = self._deltas.of(piece, is_end)
            for delta in deltas[:-1]:
                yield self._chunk({"delta": delta, "logprobs": None, "finish_reason": None})
            shown = {"delta": deltas[-1] if deltas else {}}
            has_text, reason = bool(deltas), self._deltas.finish_reason(reason)
        if not (has_text or is_end or tokens or (end > start and (has_ids or self._steps is not None))):
            return
        if has_ids:
            shown["token_ids"] = self.choice.sequence.output_ids[start:end]
        if self._steps is not None:
            shown["steps"] = self._steps.next(texts[: end - start])
        yield self._chunk(shown | {"logprobs": self._logprobs(tokens), "finish_reason": reason})

    def _logprobs(self, tokens: list[TokenLogprob]) -> Json | None:
        if not tokens or not self._answers.is_chat:
            return self._text_logprobs(tokens)
        return chat_logprobs(tokens, self._answers.reader.spell)

    def _text_logprobs(self, tokens: list[TokenLogprob]) -> Json | None:
        if not tokens:
            return None
        logprobs = completion_form(tokens, self._answers.reader.spell, bool(self._answers.num_tops), self._offset)
        self._offset += sum(map(len, logprobs["tokens"]))
        return logprobs

    def _chunk(self, choice: Json) -> Json:
        chunk = self._answers.chunk_head() | {"choices": [{"index": self.choice.index} | choice]}
        return chunk | {"usage": None} if self._answers.has_usage else chunk


class MessageDeltas:
    """The deltas of a chat message, made of its text piece by piece."""

    def __init__(self, answers: RequestAnswers, choice: Choice):
        self._parser = answers.reader.parser(choice.sequence.prompt_ids)
        self._chat_format, self._key = answers.reader.tokenizer.chat_format, answers.call_key(choice)
        self._calls: set[int] = set()

    def of(self, piece: str, is_end: bool) -> list[Json]:
        """Return the deltas that a piece of the text adds, the last piece if is_end."""
        if self._parser is None:
            return [{"content": piece}] if piece else []
        events = self._parser.feed(piece) + (self._parser.end() if is_end else [])
        return [delta for event in events if (delta := self._delta(event))]

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if self._calls and reason == "stop" else reason

    def _delta(self, event: ChatEvent) -> Json:
        """Return the delta of an event. A call that is broken was sent already; its text follows as content."""
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


class Steps:
    """The decode steps of one sequence, read in portions of any size."""

    def __init__(self, sequence: Sequence):
        self._sequence = sequence
        self._origins = _origins(sequence)
        self._num_read = 0

    def next(self, texts: list[str]) -> list[dict[str, Any]]:
        """Return the next output ids, one per text, grouped by step. The engine must have produced them."""
        start, self._num_read = self._num_read, self._num_read + len(texts)
        ids = self._sequence.output_ids[start : self._num_read]
        tokens = list(zip(ids, texts, self._origins, strict=False))
        return [
            self._counts(step)
            | {"tokens": [{"id": token, "text": text, "depth": depth} for token, text, (_, depth) in group]}
            for step, group in groupby(tokens, key=lambda item: item[2][0])
        ]

    def _counts(self, step: int) -> dict[str, int]:
        """Return the candidates that the step verified and accepted, before any cut at the output's end."""
        stats = stats_of(self._sequence)
        return {
            "step": step,
            "num_draft_tokens": stats.per_step_budget[step - 1] - 1 if step else 0,
            "num_accepted_draft_tokens": stats.per_step_accepted[step - 1] if step else 0,
        }


def _origins(sequence: Sequence) -> Iterator[tuple[int, int]]:
    """Yield each token's step and its depth in that step's draft, each to be requested once its token is there."""
    yield 0, 0
    for step in count(1):
        for depth in range(1, stats_of(sequence).per_step_accepted[step - 1] + 1):
            yield step, depth
        yield step, 0
