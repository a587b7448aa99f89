"""What a row's chat columns make: options for the chat template, and the parts of the row's answers.

answer_of_row(row, config, tokenizer, sequence)      # Answer(content='Four.', reasoning='Two and two.', calls=())
"""

from __future__ import annotations

import json
from typing import Any

from eagle_ray.config import JobConfig
from eagle_ray.core.errors import RequestError
from eagle_ray.core.sequence import Sequence
from eagle_ray.requests.row_schema import CHAT_FIELDS
from eagle_ray.text.answer import Answer
from eagle_ray.text.answer_parser import AnswerParser, parse_answer
from eagle_ray.text.chat_options import NO_OPTIONS, ChatOptions
from eagle_ray.text.tokenizer import TextOptions, Tokenizer

JSON_COLUMNS = ("tools", "tool_choice", "chat_template_kwargs")


def is_chat(row: dict[str, Any]) -> bool:
    """Return whether the row's prompt goes through the chat template."""
    return row["messages"] is not None or row.get("user_turns") is not None


def chat_options_of(row: dict[str, Any], config: JobConfig) -> ChatOptions:
    """Return the options in force for a row: its own, then the job's. Raises RequestError."""
    own = {field.name: row.get(field.name) for field in CHAT_FIELDS}
    own |= {name: json.loads(own[name]) for name in JSON_COLUMNS if own[name] is not None}
    try:
        options = config.chat.options(own)
    except ValueError as error:
        raise RequestError("invalid_chat", str(error)) from None
    if is_chat(row):
        return options
    if options.has_tools:
        raise RequestError("invalid_chat", "tools: only with messages. Leave tools out of rows with other prompts")
    return NO_OPTIONS


def answer_of_row(
    row: dict[str, Any],
    config: JobConfig,
    tokenizer: Tokenizer | None,
    sequence: Sequence,
    stops: list[str],
    text_options: TextOptions,
) -> Answer | None:
    """Return the parts of a finished sequence's text, or None if no parser reads it: then it is all content."""
    if tokenizer is None or not is_chat(row):
        return None
    options = chat_options_of(row, config)
    if tokenizer.chat_format.reasoning_parser is None and not options.has_tools:
        return None
    parser = AnswerParser.of(tokenizer.chat_format, options, tokenizer.prompt_end(sequence.prompt_ids))
    return parse_answer(tokenizer.with_markers().final_text(sequence.output_ids, stops, text_options), parser)


def answer_columns(answer: Answer | None, tokenizer: Tokenizer | None, key: str) -> dict[str, Any]:
    """Return the output columns of an answer's parts; none if no parser read it. key: names the answer in its run."""
    if answer is None or tokenizer is None:
        return {}
    calls = tokenizer.chat_format.openai_calls(answer.calls, key)
    return {
        "content": answer.content,
        "reasoning_content": answer.reasoning or None,
        "tool_calls": json.dumps(calls, ensure_ascii=False) if calls else None,
    }
