"""Turn the sampling values of a row or a request into the controls of its sequences and the options of their text.

>>> controls_of({"min_tokens": 4, "bad_words": ["no"], ...}, tokenizer)
Controls(..., bad_words=((645,), (3919,)), min_tokens=4)
>>> text_options({"skip_special_tokens": False, ...})
TextOptions(..., skip_special_tokens=False, ...)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from eagle_ray.chat.answer_parser import reasoning_at
from eagle_ray.chat.chat_options import ChatOptions
from eagle_ray.chat.tool_grammar import needs_grammar, tool_grammar
from eagle_ray.errors import RequestError
from eagle_ray.sampling.controls import Controls
from eagle_ray.sampling.grammar import GrammarSpec
from eagle_ray.tokenizer import TextOptions, Tokenizer

CONTROL_NAMES = tuple(Controls.__dataclass_fields__)
TEXT_NAMES = ("stop_token_ids", "min_tokens", "skip_special_tokens", "include_stop_str_in_output")


class WordEncoder(Protocol):
    def word_ids(self, word: str) -> list[list[int]]:
        """Return the token id sequences that a tokenizer writes for a word."""


def controls_of(values: Mapping[str, Any], tokenizer: WordEncoder | None) -> Controls | None:
    """Return the controls that the values name, all of CONTROL_NAMES; None if they change nothing.

    Raises RequestError for bad_words without a tokenizer, and for values out of their range.
    """
    own = {name: values[name] for name in CONTROL_NAMES}
    if own["bad_words"] and tokenizer is None:
        raise RequestError("no_tokenizer", "the target has no tokenizer, so 'bad_words' cannot be used")
    own["bad_words"] = [ids for word in own["bad_words"] for ids in tokenizer.word_ids(word)] if tokenizer else []
    try:
        return Controls.of(**own)
    except ValueError as error:
        raise RequestError("invalid_sampling", str(error)) from None


def tool_call_grammar(options: ChatOptions, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> GrammarSpec | None:
    """Return the grammar that a request's tools hold its answers to; None if they are free."""
    chat_format = tokenizer.chat_format
    if not needs_grammar(options) or chat_format.tool_parser is None:
        return None
    reasoning = reasoning_at(chat_format.reasoning_parser, tokenizer.prompt_end(prompt_ids))
    source = tool_grammar(options, chat_format.tool_parser, tokenizer.special_marker_ids(), reasoning)
    return GrammarSpec("grammar", source)


def refuse_grammar(options: ChatOptions) -> None:
    """Raise RequestError for options that need an output held to a grammar, which the engine does not do yet.

    The place to attach a grammar: give SamplingParams what tool_call_grammar returns, and drop this function.
    """
    if options.must_call:
        wrong = "required" if options.named is None else f"{options.named!r}"
        raise RequestError(
            "unsupported_parameter",
            f"tool_choice: {wrong} is not supported, since it needs a grammar. Use auto or none",
        )
    if options.has_strict_tools:
        raise RequestError(
            "unsupported_parameter", "tools: strict is not supported, since it needs a grammar. Leave strict out"
        )


def text_options(values: Mapping[str, Any]) -> TextOptions:
    """Return the options that the values name, all of TEXT_NAMES."""
    return TextOptions(
        stop_token_ids=frozenset(values["stop_token_ids"]),
        min_tokens=values["min_tokens"],
        skip_special_tokens=values["skip_special_tokens"],
        include_stop=values["include_stop_str_in_output"],
    )
