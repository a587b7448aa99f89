"""Turn the sampling values of a row or a request into what its sequences need besides, and the options of their text.

>>> bad_word_ids_of(["no"], tokenizer)
((645,), (3919,))
>>> text_options(SamplingParams(skip_special_tokens=False))
TextOptions(..., skip_special_tokens=False, ...)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from eagle_ray.core.errors import RequestError
from eagle_ray.requests.parameters import Group, SamplingParams, names_in
from eagle_ray.sampling.control_state import WordIds
from eagle_ray.sampling.grammar import GrammarSpec
from eagle_ray.text.chat_format import ChatFormat, reasoning_at
from eagle_ray.text.chat_options import ChatOptions, needs_grammar, tool_grammar
from eagle_ray.text.output_text import TextOptions

CONTROL_NAMES = names_in(Group.CONTROL)
GRAMMAR_NAMES = names_in(Group.FORM)
MAX_BAD_WORDS_CHARS = 1 << 16  # of all words together, each of which is tokenized twice
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


def bad_word_ids_of(words: Sequence[str], tokenizer: WordEncoder | None) -> WordIds:
    """Return the token ids of bad words. Raises RequestError without a tokenizer, and for too many words."""
    if not words:
        return ()
    if tokenizer is None:
        raise RequestError("no_tokenizer", "the target has no tokenizer, so 'bad_words' cannot be used")
    if (num_chars := sum(map(len, words))) > MAX_BAD_WORDS_CHARS:
        message = (
            f"bad_words: must be at most {MAX_BAD_WORDS_CHARS} characters together, got {num_chars}. Leave some out"
        )
        raise RequestError("invalid_sampling", message)
    return tuple(tuple(ids) for word in words for ids in tokenizer.word_ids(word))


def answer_grammar(
    sampling: SamplingParams, options: ChatOptions | None, tokenizer: ChatTokenizer | None, prompt_ids: Sequence[int]
) -> GrammarSpec | None:
    """Return what an answer must be, by its tools or by its sampling parameters; None if it is free.

    The grammar begins after the answer's reasoning. Raises RequestError if both say what the answer must be.

    Args:
        options: of an answer to messages; None for other prompts.
    """
    spec = GrammarSpec.of(sampling)
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


def text_options(sampling: SamplingParams) -> TextOptions:
    """Return how output ids become text."""
    return TextOptions(
        stop_token_ids=frozenset(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens,
        skip_special_tokens=sampling.skip_special_tokens,
        include_stop=sampling.include_stop_str_in_output,
    )
