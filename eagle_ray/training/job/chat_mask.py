"""Chat mask: which tokens of a rendered conversation are answers of the assistant.

    document = encode_conversation(tokenizer, messages)

    <user> question <end> <assistant>    answer <end>    <user> question <end> <assistant>    answer <end>
    -------- prompt, not counted ---- -- counted --- ...

The text up to an answer is what the template renders for the messages before it, with the generation prompt; the
answer's text is what it adds for the assistant's message. Both are encoded separately, as in the engine, where the
prompt's last token is never merged with the answer's first. After the token that ends an answer nothing is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle_ray.core.errors import RequestError
from eagle_ray.text.tokenizer import Tokenizer
from eagle_ray.training.packing import Document

Message = dict[str, Any]


def encode_conversation(tokenizer: Tokenizer, messages: Sequence[Message]) -> Document:
    """Return the conversation up to its last answer, with the answers counted.

    Raises RequestError if there is no answer, or if the template renders an earlier turn otherwise once later ones
    follow.
    """
    ids: list[int] = []
    is_answer: list[bool] = []
    done = ""
    for i, message in enumerate(messages):
        if message.get("role") != "assistant" or i == 0:
            continue
        prompt = tokenizer.render_chat(messages[:i])
        whole = tokenizer.render_chat(messages[: i + 1], add_generation_prompt=False)
        if not (prompt.startswith(done) and whole.startswith(prompt)):
            raise RequestError(
                "template_rewrites",
                "the chat template renders a turn otherwise once others follow, so answers cannot be told from "
                "prompts: give single turns, or a run's Parquet",
            )
        question, answer = _encode(tokenizer, prompt[len(done) :]), _encode(tokenizer, whole[len(prompt) :])
        ids += question + answer
        num_counted = _answer_length(answer, tokenizer.eos_ids)
        is_answer += [False] * len(question) + [True] * num_counted + [False] * (len(answer) - num_counted)
        done = whole
    if not any(is_answer):
        raise RequestError("no_answer", "the conversation holds no answer of the assistant")
    return Document(ids, is_answer)


def user_turn_prefix(tokenizer: Tokenizer) -> str:
    """Return what the chat template renders before a first user's words, for the target to write them.

    Raises RequestError if the template hides where they begin.
    """
    mark = "\u2063user turn\u2063"
    before, found, _ = tokenizer.render_chat([{"role": "user", "content": mark}]).partition(mark)
    if not found:
        raise RequestError("no_user_turn", "the chat template changes a user's words, so no prompt can end before them")
    return before


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _answer_length(ids: Sequence[int], eos_ids: frozenset[int]) -> int:
    """Return the tokens up to the last one that ends an answer; all of them if there is none."""
    return next((i + 1 for i in reversed(range(len(ids))) if ids[i] in eos_ids), len(ids))
