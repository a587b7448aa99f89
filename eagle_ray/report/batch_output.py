"""Conversion of the output rows of a request to a line of OpenAI's batch output file.

A successful request has a response with status 200, an invalid request a response with status 400. A request that
failed with a code of NOT_CARRIED_OUT has an error instead of a response.

    >>> line_of(rows, spell)["response"]["body"]["choices"][0]["message"]["content"]
    'Paris.'
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
Spell = Callable[[int], str]
"""Function that returns the text of one token id."""

COLUMNS = (
    "request_id",
    "sample_index",
    "run_id",
    "status",
    "finish_reason",
    "error_code",
    "error_message",
    "text",
    "content",
    "reasoning_content",
    "tool_calls",
    "output_token_ids",
    "token_logprobs",
    "prompt_tokens",
    "completion_tokens",
    "finished_at",
    "target_model",
    "config_hash",
    "url",
)  # url exists only if the input is a batch file; without it, rows are chat completions
NOT_CARRIED_OUT = ("timeout", "internal_error", "worker_died")
COMPLETIONS = "/v1/completions"
HALF_A_CHARACTER = "\ufffd"


def line_of(rows: list[Row], spell: Spell) -> dict[str, Any]:
    """Return the line of one request.

    rows: all samples of the request in order, with the columns of COLUMNS that exist in the run.
    """
    first = rows[0]
    key = hashlib.blake2b(f"{first['run_id']}\x1f{first['request_id']}".encode(), digest_size=12).hexdigest()
    line = {"id": f"batch_req_{key}", "custom_id": first["request_id"], "response": None, "error": None}
    if first["error_code"] in NOT_CARRIED_OUT:
        return line | {"error": {"code": first["error_code"], "message": first["error_message"]}}
    status, body = (200, _body(rows, key, spell)) if first["status"] == "ok" else (400, _refusal(first))
    return line | {"response": {"status_code": status, "request_id": key, "body": body}}


def _refusal(row: Row) -> dict[str, Any]:
    kind = {"message": row["error_message"], "type": "invalid_request_error", "param": None, "code": row["error_code"]}
    return {"error": kind}


def _body(rows: list[Row], key: str, spell: Spell) -> dict[str, Any]:
    first, is_text = rows[0], rows[0].get("url") == COMPLETIONS
    prompt, completion = first["prompt_tokens"], sum(row["completion_tokens"] for row in rows)
    choice = _text_choice if is_text else _chat_choice
    return {
        "id": f"{'cmpl' if is_text else 'chatcmpl'}-{key}",
        "object": "text_completion" if is_text else "chat.completion",
        "created": int(first["finished_at"].timestamp()),
        "model": first["target_model"],
        "choices": [choice(row, spell) for row in rows],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
        "system_fingerprint": first["config_hash"],
    }


def _chat_choice(row: Row, spell: Spell) -> dict[str, Any]:
    return {
        "index": row["sample_index"],
        "message": _message(row),
        "logprobs": {"content": _chat_logprobs(row, spell), "refusal": None} if _has_logprobs(row) else None,
        "finish_reason": row["finish_reason"],
    }


def _message(row: Row) -> dict[str, Any]:
    """Return the assistant's message. A run of an earlier version, and text that no parser read, is all content."""
    content, calls = row.get("content"), row.get("tool_calls")
    message = {"role": "assistant", "content": row["text"] if content is None else content, "refusal": None}
    if row.get("reasoning_content") is not None:
        message["reasoning_content"] = row["reasoning_content"]
    if calls is not None:
        message |= {"content": content or None, "tool_calls": json.loads(calls)}
    return message


def _chat_logprobs(row: Row, spell: Spell) -> list[dict[str, Any]]:
    """Return the log-probabilities of a chat choice. `bytes` is null for a token that is part of a character."""
    tokens = [(spell(token), logprob) for token, logprob in _tokens(row)]
    return [
        {
            "token": text,
            "logprob": logprob,
            "bytes": None if HALF_A_CHARACTER in text else list(text.encode()),
            "top_logprobs": [],
        }
        for text, logprob in tokens
    ]


def _text_choice(row: Row, spell: Spell) -> dict[str, Any]:
    return {
        "index": row["sample_index"],
        "text": row["text"],
        "logprobs": _text_logprobs(row, spell) if _has_logprobs(row) else None,
        "finish_reason": row["finish_reason"],
    }


def _text_logprobs(row: Row, spell: Spell) -> dict[str, Any]:
    texts = [spell(token) for token, _ in _tokens(row)]
    offsets = [sum(map(len, texts[:i])) for i in range(len(texts))]
    logprobs = [logprob for _, logprob in _tokens(row)]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}


def _has_logprobs(row: Row) -> bool:
    return row["token_logprobs"] is not None and row["output_token_ids"] is not None


def _tokens(row: Row) -> list[tuple[int, float]]:
    return list(zip(row["output_token_ids"], row["token_logprobs"], strict=True))
