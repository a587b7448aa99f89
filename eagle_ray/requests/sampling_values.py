"""Turn the sampling values of a row or a request into the controls of its sequences and the options of their text.

controls_of({"min_tokens": 4, "bad_words": ["no"], ...}, tokenizer)
# Controls(..., bad_words=((645,), (3919,)), min_tokens=4)
text_options({"skip_special_tokens": False, ...})
# TextOptions(..., skip_special_tokens=False, ...)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from eagle_ray.core.errors import RequestError
from eagle_ray.requests.sampling_limits import MAX_BAD_WORDS_CHARS, STRUCTURED_KEYS
from eagle_ray.sampling.controls import Controls
from eagle_ray.sampling.grammar import GrammarSpec
from eagle_ray.text.answer_parser import reasoning_at
from eagle_ray.text.chat_format import ChatFormat
from eagle_ray.text.chat_options import ChatOptions
from eagle_ray.text.tokenizer import TextOptions
from eagle_ray.text.tool_grammar import needs_grammar, tool_grammar

CONTROL_NAMES = tuple(Controls.__dataclass_fields__)
GRAMMAR_NAMES = STRUCTURED_KEYS
TEXT_NAMES = ("stop_token_ids", "min_tokens", "skip_special_tokens", "include_stop_str_in_output")


class WordEncoder(Protocol):
    def word_ids(self, word: str) -> list[list[int]]:
        """Return the token id sequences that a tokenizer writes for a word."""


class ChatTokenizer(Protocol):
    """What a grammar needs to know of a target's tokenizer."""

    chat_format: ChatFormat

    def prompt_end(self, prompt_ids: Sequence[int]) -> str:
        """Return the text of the last ids of a prompt."""

    def special_marker_ids(self) -> dict[str, int]:
        """Return the ids of the answers' markers that are special tokens."""

    def reasoning_end_id(self) -> int:
        """Return the token that ends reasoning. Raises RequestError if it takes several."""


def controls_of(values: Mapping[str, Any], tokenizer: WordEncoder | None) -> Controls | None:
    """Return the controls that the values name, all of CONTROL_NAMES; None if they change nothing.

    Raises RequestError for bad_words without a tokenizer, and for values out of their range.
    """
    own = {name: values[name] for name in CONTROL_NAMES}
    if own["bad_words"] and tokenizer is None:
        raise RequestError("no_tokenizer", "the target has no tokenizer, so 'bad_words' cannot be used")
    if (num_chars := sum(map(len, own["bad_words"]))) > MAX_BAD_WORDS_CHARS:
        message = (
            f"bad_words: must be at most {MAX_BAD_WORDS_CHARS} characters together, got {num_chars}. Leave some out"
        )
        raise RequestError("invalid_sampling", message)
    own["bad_words"] = [ids for word in own["bad_words"] for ids in tokenizer.word_ids(word)] if tokenizer else []
    try:
        return Controls.of(**own)
    except ValueError as error:
        raise RequestError("invalid_sampling", str(error)) from None


def merged_values(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults overridden by a row's or a request's own values, of which None are absent.

    One that says what its output must be does without what the defaults say about that.
    """
    own = {name: value for name, value in own.items() if value is not None}
    kept = dict(defaults)
    if any(own.get(name) for name in GRAMMAR_NAMES):
        kept |= {name: None for name in GRAMMAR_NAMES if name in kept}
    return kept | own


def grammar_of(values: Mapping[str, Any]) -> GrammarSpec | None:
    """Return what the output must be, by the values of GRAMMAR_NAMES; None if it is free."""
    response_format = json.loads(values["response_format"] or "{}")
    if (kind := response_format.get("type")) == "json_schema":
        return GrammarSpec(kind, json.dumps(response_format[kind]["schema"], ensure_ascii=False))
    if kind == "json_object" or values["json_object"]:
        return GrammarSpec("json_object")
    if values["choice"]:
        return GrammarSpec("choice", json.dumps(list(values["choice"]), ensure_ascii=False))
    found = [name for name in ("json_schema", "regex", "grammar") if values[name]]
    return GrammarSpec(found[0], values[found[0]]) if found else None


def answer_grammar(
    values: Mapping[str, Any], options: ChatOptions | None, tokenizer: ChatTokenizer | None, prompt_ids: Sequence[int]
) -> GrammarSpec | None:
    """Return what an answer must be, by its tools or by the values of GRAMMAR_NAMES; None if it is free.

    The grammar begins after the answer's reasoning. Raises RequestError if both say what the answer must be.

    Args:
        options: of an answer to messages; None for other prompts.
    """
    spec = grammar_of(values)
    if options is None or tokenizer is None:
        return spec
    chat_format = tokenizer.chat_format
    reasoning = reasoning_at(chat_format.reasoning_parser, tokenizer.prompt_end(prompt_ids))
    if needs_grammar(options) and chat_format.tool_parser is not None:
        if spec is not None:
            message = f"{spec.kind}: the tools of the request say what the answer must be already. Leave one out"
            raise RequestError("invalid_sampling", message)
        source = tool_grammar(options, chat_format.tool_parser, tokenizer.special_marker_ids(), reasoning)
        return GrammarSpec("grammar", source, param="tools")
    begins_with_reasoning = reasoning == "inside" or (reasoning == "optional" and chat_format.has_thinking_switch)
    if spec is None or not begins_with_reasoning:
        return spec
    return replace(spec, after=tokenizer.reasoning_end_id())


def text_options(values: Mapping[str, Any]) -> TextOptions:
    """Return the options that the values name, all of TEXT_NAMES."""
    return TextOptions(
        stop_token_ids=frozenset(values["stop_token_ids"]),
        min_tokens=values["min_tokens"],
        skip_special_tokens=values["skip_special_tokens"],
        include_stop=values["include_stop_str_in_output"],
    )
