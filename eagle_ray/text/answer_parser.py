"""AnswerParser: split the text of an answer into reasoning, content and tool calls, as it grows or at once.

>>> from eagle_ray.text.chat_options import NO_OPTIONS
>>> chat_format = ChatFormat("hermes", "qwen3")
>>> parse_answer("<think>\\nHm.\\n</think>\\n\\nFour.", AnswerParser.of(chat_format, NO_OPTIONS, ""))
Answer(content='Four.', reasoning='Hm.', calls=())
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from eagle_ray.text.answer import Answer, ChatEvent, answer_of
from eagle_ray.text.chat_format import ChatFormat
from eagle_ray.text.chat_options import ChatOptions
from eagle_ray.text.reasoning_parser import CLOSE, OPEN, ReasoningParser, ReasoningStart
from eagle_ray.text.tool_forms import HermesParser, Llama3JsonParser, MistralParser
from eagle_ray.text.tool_parser import ToolParser

_TOOL_PARSERS: dict[str, Callable[[Collection[str]], ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
}


class AnswerParser:
    """The parsers that one answer goes through. is_parallel: keep every call, not only the first."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None, is_parallel: bool = True):
        self._reasoning, self._tools = reasoning, tools
        self._is_parallel = is_parallel
        self._only_call: int | None = None

    @classmethod
    def of(cls, chat_format: ChatFormat, options: ChatOptions, prompt_end: str) -> AnswerParser:
        """Return a new parser for one answer. prompt_end: the last characters of the prompt, markers included."""
        reasoning = tools = None
        if chat_format.reasoning_parser is not None:
            is_inside = reasoning_at(chat_format.reasoning_parser, prompt_end) == "inside"
            reasoning = ReasoningParser(is_inside)
        if options.has_tools and chat_format.tool_parser is not None:
            tools = _TOOL_PARSERS[chat_format.tool_parser](options.callable_names)
        return cls(reasoning, tools, options.parallel_tool_calls)

    def feed(self, text: str) -> list[ChatEvent]:
        """Return the events that are certain after a further piece of the text."""
        events = [ChatEvent("content", text)] if self._reasoning is None else self._reasoning.feed(text)
        return list(self._kept(self._with_calls(events)))

    def end(self) -> list[ChatEvent]:
        """Return the remaining events, once the text is whole."""
        events = self._with_calls([] if self._reasoning is None else self._reasoning.end())
        if self._tools is not None:
            events += self._tools.end()
        return list(self._kept(events))

    def _with_calls(self, events: list[ChatEvent]) -> list[ChatEvent]:
        if self._tools is None:
            return events
        found = [self._tools.feed(event.text) if event.kind == "content" else [event] for event in events]
        return [event for part in found for event in part]

    def _kept(self, events: Iterable[ChatEvent]) -> Iterable[ChatEvent]:
        for event in events:
            if self._is_parallel or event.kind in ("content", "reasoning") or self._is_only_call(event):
                yield event

    def _is_only_call(self, event: ChatEvent) -> bool:
        if self._only_call is None:
            self._only_call = event.index
        is_kept = event.index == self._only_call
        if is_kept and event.kind == "broken":
            self._only_call = None
        return is_kept


def parse_answer(text: str, parser: AnswerParser) -> Answer:
    """Return the answer that a whole text is."""
    return answer_of([*parser.feed(text), *parser.end()])


def reasoning_at(reasoning_parser: str | None, prompt_end: str) -> ReasoningStart:
    """Return whether an answer begins with reasoning: none, inside (no opening marker announces it), or optional.

    A template may open the reasoning in the prompt, or close it there, as Qwen 3's does for enable_thinking: false.
    """
    end = prompt_end.rstrip()
    if reasoning_parser is None or end.endswith(CLOSE):
        return "none"
    return "inside" if reasoning_parser == "deepseek_r1" or end.endswith(OPEN) else "optional"
