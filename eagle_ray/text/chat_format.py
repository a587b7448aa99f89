"""ChatFormat: the parsers of a target's answers, and the messages in the form that its chat template reads.

    >>> template_message({"role": "user", "content": [{"type": "text", "text": "Hi"}]})
    {'role': 'user', 'content': 'Hi'}
    >>> ChatFormat.of("...<tool_call>...<think>...", "auto", "auto")
    ChatFormat(tool_parser='hermes', reasoning_parser='qwen3', reads_tools=False, has_thinking_switch=False)

A template gets each content as one text, and the arguments of a tool call as an object, as
transformers documents it; OpenAI's format has text parts, and arguments as JSON. A call without
arguments has an empty object.

The built-in templates, chosen by name, serve targets whose tokenizers were published without one.
Each begins a conversation with the tokenizer's own BOS token, as in the target's training. The
names of parsers are vLLM's.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eagle_ray.text.answer import ToolCall
from eagle_ray.text.strict_json import HalfSurrogate, parse_json

_TEMPLATES = Path(__file__).parent.parent / "assets" / "templates"
TEMPLATE_NAMES = tuple(sorted(path.stem for path in _TEMPLATES.glob("*.jinja")))

TOOL_PARSERS = ("hermes", "llama3_json", "mistral")
REASONING_PARSERS = ("qwen3", "deepseek_r1")
THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
TOOL_OPEN = "<tool_call>"
TOOL_CLOSE = "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGS = "[ARGS]"
# Special tokens that a tokenizer leaves out of a text, and that parsers must see.
MARKERS = {
    "hermes": (TOOL_OPEN, TOOL_CLOSE),
    "llama3_json": (PYTHON_TAG,),
    "mistral": (TOOL_CALLS, CALL_ID, ARGS),
    "qwen3": (THINK_OPEN, THINK_CLOSE),
    "deepseek_r1": (THINK_OPEN, THINK_CLOSE),
}
ReasoningStart = Literal["none", "inside", "optional"]
"""How an answer begins: without reasoning, inside of it, or with a marker that may open it."""
_OTHER_FORMS = ("<function=", "<arg_key>")  # Qwen3-Coder's and GLM's calls, within <tool_call> too
_BLOCK = re.compile(r"\{[{%](.*?)[}%]\}", re.DOTALL)
_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
NO_ARGUMENTS = ("", "null")  # texts that clients send for a call without arguments
# Characters of a tool call; json holds Python's lock while it reads them.
MAX_ARGUMENTS_CHARS = 1 << 20
MISTRAL_ID_CHARS = 9  # Mistral's templates refuse ids of another length


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The parsers of a target's answers.

    Attributes:
        tool_parser: one of TOOL_PARSERS, or None if the form of the target's calls is unknown.
        reasoning_parser: one of REASONING_PARSERS, or None if the target writes no reasoning.
        has_thinking_switch: whether the template has enable_thinking, so that answers begin with
            reasoning unless the prompt has closed it.
        reads_tools: whether the chat template writes tools into a prompt.
    """

    tool_parser: str | None = None
    reasoning_parser: str | None = None
    reads_tools: bool = False
    has_thinking_switch: bool = False

    @classmethod
    def of(cls, template: str | None, tool_parser: str, reasoning_parser: str) -> ChatFormat:
        """Return the format of a chat template. Each parser is auto (chosen by the template's
        markers), none, or a name."""
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
        """Return tool calls in OpenAI's form.

        Args:
            key: key of the answer, from which the calls' ids are made.
        """
        return [
            {
                "id": self.call_id(key, index),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(calls)
        ]

    def call_id(self, key: str, index: int) -> str:
        """Return the id of a tool call, made from the key of its answer. Equal keys give equal ids."""
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
    if TOOL_CALLS in template:
        return "mistral"
    if TOOL_OPEN in template:
        return "hermes"
    is_llama_3 = "<|start_header_id|>" in template and '"parameters"' in template
    return "llama3_json" if is_llama_3 or PYTHON_TAG in template else None


def _reasoning_parser_of(template: str) -> str | None:
    """Return the reasoning parser by the markers in a template, or None."""
    if THINK_OPEN in template:
        return "qwen3"
    return "deepseek_r1" if THINK_CLOSE in template else None


def reasoning_at(reasoning_parser: str | None, prompt_end: str) -> ReasoningStart:
    """Return how an answer begins: "none" without reasoning, "inside" it without an opening marker, or "optional".

    A template may open the reasoning in the prompt, or close it there, as Qwen 3's does for
    enable_thinking: false.
    """
    end = prompt_end.rstrip()
    if reasoning_parser is None or end.endswith(THINK_CLOSE):
        return "none"
    return "inside" if reasoning_parser == "deepseek_r1" or end.endswith(THINK_OPEN) else "optional"


def is_template_name(text: str) -> bool:
    """Return whether a text can name one of a target's own templates, such as rag, rather than a path."""
    return re.fullmatch(r"[A-Za-z_][\w-]*", text) is not None


def template_path(chosen: str) -> Path:
    """Return the path of the Jinja file for a built-in template's name; a path is returned unchanged."""
    return _TEMPLATES / f"{chosen}.jinja" if chosen in TEMPLATE_NAMES else Path(chosen)


def template_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a checked message for a template: its content as one text, and its tool calls' arguments as objects."""
    content = message.get("content")
    calls = message.get("tool_calls")
    written = dict(message)
    if isinstance(content, list):
        written["content"] = "".join(part["text"] for part in content)
    if isinstance(calls, list):
        written["tool_calls"] = [_template_call(call) for call in calls]
    return written


def template_arguments(arguments: Any) -> Any:
    """Parse a tool call's arguments to an object. A text that is no JSON object is returned unchanged.

    Raises HalfSurrogate for a text that contains half a surrogate pair.
    """
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in NO_ARGUMENTS):
        return {}
    if not isinstance(arguments, str) or len(arguments) > MAX_ARGUMENTS_CHARS:
        return arguments
    try:
        value = parse_json(arguments)
    except HalfSurrogate:
        raise
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def unread_arguments(messages: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the location, in messages for a template, of the first tool call arguments that are not an object."""
    for i, message in enumerate(messages):
        calls = message.get("tool_calls")
        for j, call in enumerate(calls if isinstance(calls, list) else ()):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and not isinstance(function.get("arguments"), dict):
                return f"messages[{i}].tool_calls[{j}].function.arguments"
    return None


def _template_call(call: Any) -> Any:
    """Return a tool call with its arguments as an object, if they are one or the JSON of one."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return call | {
        "function": function | {"arguments": template_arguments(function.get("arguments"))}
    }
