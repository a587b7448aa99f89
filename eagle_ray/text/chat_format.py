"""ChatFormat: how the answers of a target hold reasoning and tool calls. Chosen by its chat template's own markers.

    >>> ChatFormat.of("...<tool_call>...<think>...", "auto", "auto")
    ChatFormat(tool_parser='hermes', reasoning_parser='qwen3', reads_tools=False, has_thinking_switch=False)

The names are vLLM's.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle_ray.text.answer import ToolCall

TOOL_PARSERS = ("hermes", "llama3_json", "mistral")
REASONING_PARSERS = ("qwen3", "deepseek_r1")
# Special tokens that a tokenizer leaves out of a text, and that parsers must see.
MARKERS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "qwen3": ("<think>", "</think>"),
    "deepseek_r1": ("<think>", "</think>"),
}
_OTHER_FORMS = ("<function=", "<arg_key>")  # Qwen3-Coder's and GLM's calls, within <tool_call> too
_BLOCK = re.compile(r"\{[{%](.*?)[}%]\}", re.DOTALL)
_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
MISTRAL_ID_CHARS = 9  # Mistral's templates refuse ids of another length


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The parsers of a target's answers.

    Attributes:
        tool_parser: one of TOOL_PARSERS, or None if the form of its calls is not known.
        reasoning_parser: one of REASONING_PARSERS, or None if it does not think.
        has_thinking_switch: whether the template has enable_thinking, so that answers begin with reasoning unless the
            prompt has closed it.
        reads_tools: whether the chat template writes tools into a prompt.
    """

    tool_parser: str | None = None
    reasoning_parser: str | None = None
    reads_tools: bool = False
    has_thinking_switch: bool = False

    @classmethod
    def of(cls, template: str | None, tool_parser: str, reasoning_parser: str) -> ChatFormat:
        """Return the format of a template. The parsers are auto (by the template's markers), none, or a name."""
        text = template or ""
        return cls(
            _tool_parser_of(text) if tool_parser == "auto" else _named(tool_parser),
            _reasoning_parser_of(text) if reasoning_parser == "auto" else _named(reasoning_parser),
            _reads_tools(text),
            "enable_thinking" in text,
        )

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the markers that the parsers look for."""
        names = (name for name in (self.tool_parser, self.reasoning_parser) if name is not None)
        return tuple(marker for name in names for marker in MARKERS[name])

    def openai_calls(self, calls: Sequence[ToolCall], key: str) -> list[dict[str, Any]]:
        """Return tool calls in OpenAI's form. key: names the answer that they are in."""
        return [
            {
                "id": self.call_id(key, index),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(calls)
        ]

    def call_id(self, key: str, index: int) -> str:
        """Return the id of a tool call. Equal keys, which name an answer, have equal ids."""
        digest = hashlib.blake2b(f"{key}\x1f{index}".encode(), digest_size=12).hexdigest()
        return digest[:MISTRAL_ID_CHARS] if self.tool_parser == "mistral" else f"call_{digest}"


def _reads_tools(template: str) -> bool:
    """Return whether `tools` stands in one of the template's blocks, strings aside."""
    blocks = (_STRING.sub("", block) for block in _BLOCK.findall(template))
    return any(re.search(r"\btools\b", block) for block in blocks)


def _named(name: str) -> str | None:
    return None if name == "none" else name


def _tool_parser_of(template: str) -> str | None:
    if any(mark in template for mark in _OTHER_FORMS):
        return None
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    is_llama_3 = "<|start_header_id|>" in template and '"parameters"' in template
    return "llama3_json" if is_llama_3 or "<|python_tag|>" in template else None


def _reasoning_parser_of(template: str) -> str | None:
    """A template that only closes reasoning, to leave it out of earlier turns, is of a model that writes no opening."""
    if "<think>" in template:
        return "qwen3"
    return "deepseek_r1" if "</think>" in template else None
