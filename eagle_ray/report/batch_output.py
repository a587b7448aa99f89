"""Conversion of the output rows of a request to a line of OpenAI's batch output file.

A successful request has a response with status 200, an invalid request a response with status 400. A request that
failed with a code of NOT_CARRIED_OUT has an error instead of a response.

    line_of(rows, spell)["response"]["body"]["choices"][0]["message"]["content"]      # 'Paris.'
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
Spell = Callable[[int], str]
"""Function that returns the text of one token id."""
Token = tuple[int, float]
"""A token id and its log-probability."""

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
    "token_top_logprobs",
    "prompt_tokens",
    "completion_tokens",
    "finished_at",
    "target_model",
    "config_hash",
    "url",
)  # url exists only if the input is a batch file; without it, rows are chat completions
NOT_CARRIED_OUT = ("timeout", "internal_error", "worker_died")
COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
HALF_A_CHARACTER = "\ufffd"
MIN_LOGPROB = -9999.0  # JSON has no infinity; the endpoint writes this value, too


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
    if rows[0].get("url") == RESPONSES:
        return _response(rows[0], key, spell)
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
    """Return the log-probabilities of a chat choice, with as many alternatives as the request asked for."""
    return [
        _chat_token(token, logprob, spell) | {"top_logprobs": [_chat_token(*other, spell) for other in tops]}
        for token, logprob, tops in _tokens(row)
    ]


def _chat_token(token: int, logprob: float, spell: Spell) -> dict[str, Any]:
    """Return a token. `bytes` is null for one that is part of a character."""
    text = spell(token)
    return {"token": text, "logprob": logprob, "bytes": None if HALF_A_CHARACTER in text else list(text.encode())}


def _text_choice(row: Row, spell: Spell) -> dict[str, Any]:
    return {
        "index": row["sample_index"],
        "text": row["text"],
        "logprobs": _text_logprobs(row, spell) if _has_logprobs(row) else None,
        "finish_reason": row["finish_reason"],
    }


def _text_logprobs(row: Row, spell: Spell) -> dict[str, Any]:
    tokens = _tokens(row)
    texts = [spell(token) for token, _, _ in tokens]
    offsets = [sum(map(len, texts[:i])) for i in range(len(texts))]
    tops = [_by_text([*tops, (token, logprob)], spell) for token, logprob, tops in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [logprob for _, logprob, _ in tokens],
        "top_logprobs": tops if row.get("token_top_logprobs") is not None else None,
        "text_offset": offsets,
    }


def _by_text(tokens: list[Token], spell: Spell) -> dict[str, float]:
    """Return the alternatives and, as OpenAI does, the token itself, by text. Of equal texts the likeliest is kept."""
    found: dict[str, float] = {}
    for token, logprob in sorted(tokens, key=lambda pair: -pair[1]):
        found.setdefault(spell(token), logprob)
    return found


def _has_logprobs(row: Row) -> bool:
    return row["token_logprobs"] is not None and row["output_token_ids"] is not None


def _tokens(row: Row) -> list[tuple[int, float, list[Token]]]:
    """Return the output tokens, each with its log-probability and its alternatives, none if none were asked for."""
    ids, logprobs = row["output_token_ids"], row["token_logprobs"]
    found = row.get("token_top_logprobs")
    tops = [[]] * len(ids) if found is None else found
    return [
        (token, max(logprob, MIN_LOGPROB), [(other["token_id"], max(other["logprob"], MIN_LOGPROB)) for other in top])
        for token, logprob, top in zip(ids, logprobs, tops, strict=True)
    ]


def _response(row: Row, key: str, spell: Spell) -> dict[str, Any]:
    """Return the body of a response. What its request asked for and a run does not store is empty or null."""
    is_cut, created = row["finish_reason"] == "length", int(row["finished_at"].timestamp())
    prompt, completion = row["prompt_tokens"], row["completion_tokens"]
    return {
        "id": f"resp_{key}",
        "object": "response",
        "created_at": created,
        "completed_at": None if is_cut else created,
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": None,
        "metadata": {},
        "model": row["target_model"],
        "output": _output_items(row, key, spell),
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion,
        },
    }


def _output_items(row: Row, key: str, spell: Spell) -> list[dict[str, Any]]:
    """Return the items of a response: its reasoning, its message and its function calls, in this order."""
    message, status = _message(row), "incomplete" if row["finish_reason"] == "length" else "completed"
    items: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        items.append({"type": "reasoning", "id": f"rs_{key}", "summary": [], "content": content, "status": "completed"})
    calls = message.get("tool_calls") or []
    if message["content"] or not calls:
        places = _chat_logprobs(row, spell) if _has_logprobs(row) else []
        logprobs = [place | {"bytes": place["bytes"] or []} for place in places]
        part = {"type": "output_text", "text": message["content"] or "", "annotations": [], "logprobs": logprobs}
        items.append({"type": "message", "id": f"msg_{key}", "role": "assistant", "content": [part], "status": status})
    for i, call in enumerate(calls):
        names = {"call_id": call["id"], **call["function"]}
        items.append({"type": "function_call", "id": f"fc_{key}_{i}", "status": status, **names})
    return items
