"""Parse a line of an OpenAI batch file into a row: ``{"custom_id", "method", "url", "body"}``.

custom_id becomes id, the body's messages, prompt or input the prompt, its parameters the sampling columns. url and
model are passed through; the job's own target is used. An unsupported parameter is refused by name unless its value is
a no-op; it is never ignored.

    >>> body = {"prompt": "Hi", "max_tokens": 4}
    >>> parse_batch_line({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body})
    {'id': 'a', 'url': '/v1/completions', 'model': None, 'prompt': 'Hi', 'max_tokens': 4}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_ray.core.errors import RequestError
from eagle_ray.requests.parameters import CHAT, CHATS, MAX_TOP_LOGPROBS, SAMPLING, Door
from eagle_ray.requests.refused import fix_of, is_no_op
from eagle_ray.requests.response_items import chat_body
from eagle_ray.requests.rows import InputRow, unreadable
from eagle_ray.requests.structured import with_own_keys
from eagle_ray.requests.values import describe_value, unsupported

PROMPT_NAMES = {Door.CHAT: "messages", Door.COMPLETIONS: "prompt"}  # a response is answered as a chat
URLS = tuple(door.value for door in (*PROMPT_NAMES, Door.RESPONSES))
LINE_KEYS = {"custom_id", "method", "url", "body"}
LOGPROBS = ("logprobs", "top_logprobs")
LENGTHS = ("max_tokens", "max_completion_tokens")
KNOWN = frozenset({"model", *SAMPLING, *LENGTHS})
KNOWN_AT = {door: KNOWN | {name} | (CHAT.keys() if door in CHATS else set()) for door, name in PROMPT_NAMES.items()}


def parse_batch_line(line: InputRow) -> InputRow:
    """Return the columns of one parsed line. A bad line keeps its id; its error replaces the prompt."""
    if isinstance(line, RequestError):
        return line
    row: InputRow = {"id": _id_of(line), "url": None, "model": None}
    try:
        if (error := unreadable(line)) is not None:
            raise error
        door = _door_of(line)
        row["url"] = door.value
        if door is Door.RESPONSES:
            line, door = line | {"body": _chat_body_of(line)}, Door.CHAT
        body = _body_of(line, door)
        row["model"] = _model_of(body)
        return row | _prompt_of(body, PROMPT_NAMES[door]) | _parameters_of(body, door)
    except RequestError as error:
        return row | {"prompt": error}


def _id_of(line: Mapping[str, Any]) -> Any:
    custom_id = line.get("custom_id")
    if isinstance(custom_id, str) and not custom_id.strip():
        return RequestError("empty_id", "custom_id is an empty text. Give each line an id of its own.")
    return custom_id


def _door_of(line: Mapping[str, Any]) -> Door:
    if unknown := line.keys() - LINE_KEYS:
        raise unsupported(min(unknown), "a line holds custom_id, method, url and body")
    if line.get("method") != "POST":
        raise RequestError("bad_type", f"method must be POST, got {describe_value(line.get('method'))}")
    if (url := line.get("url")) not in list(URLS):
        raise RequestError("bad_type", f"url must be {', '.join(URLS[:-1])} or {URLS[-1]}, got {describe_value(url)}")
    return Door(url)


def _chat_body_of(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the body of a chat completion that answers the line's response."""
    try:
        return chat_body(line["body"]) if isinstance(line.get("body"), Mapping) else line.get("body")
    except RequestError as error:
        raise RequestError(error.code, f"body.{error}") from None


def _body_of(line: Mapping[str, Any], door: Door) -> Mapping[str, Any]:
    """Return the body, after checking that nothing in it would be ignored."""
    body = line.get("body")
    if not isinstance(body, Mapping):
        raise RequestError("bad_type", f"body must be an object, got {describe_value(body)}")
    body = with_own_keys(body)
    for name, value in body.items():
        if value is None or name in KNOWN_AT[door]:
            continue
        if not is_no_op(name, value, door):
            told = f"{describe_value(value)} asks for what this system does not do; {fix_of(name, door)}"
            raise unsupported(f"body.{name}", told)
    return body


def _model_of(body: Mapping[str, Any]) -> str | None:
    if not isinstance(model := body.get("model"), str | None):
        raise RequestError("bad_type", f"body.model must be a text, got {describe_value(model)}")
    return model


def _prompt_of(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if value is None:
        raise RequestError("prompt_missing", f"body.{name} is absent or null: give it")
    if name == "messages":
        if not isinstance(value, list):
            raise RequestError("bad_type", f"body.messages must be a list of messages, got {describe_value(value)}")
        return {name: value}
    if not isinstance(value, str | list) or (
        isinstance(value, list) and any(type(token) is not int for token in value)
    ):
        raise unsupported("body.prompt", f"give one text or one list of token ids, not {describe_value(value)}")
    return {name if isinstance(value, str) else "prompt_token_ids": value}


def _parameters_of(body: Mapping[str, Any], door: Door) -> dict[str, Any]:
    """Return the columns of the parameters that the body sets."""
    names = [*SAMPLING, *(CHAT if door in CHATS else ())]
    found = {name: body[name] for name in names if body.get(name) is not None and name not in LOGPROBS}
    lengths = [body[name] for name in LENGTHS if body.get(name) is not None]
    if len(lengths) == 2 and lengths[0] != lengths[1]:
        raise RequestError("bad_sampling", f"body.{LENGTHS[0]} and body.{LENGTHS[1]} differ: give one of them")
    if lengths:
        found["max_tokens"] = lengths[0]
    return found | _logprobs(body, door)


def _logprobs(body: Mapping[str, Any], door: Door) -> dict[str, Any]:
    """Return the columns logprobs and top_logprobs. Chat requests have true or false and a number of alternatives,
    completions the number alone.
    """
    value, num_tops = (body.get(name) for name in LOGPROBS)
    if door is Door.COMPLETIONS:
        if not is_no_op("top_logprobs", num_tops, door):
            raise unsupported("body.top_logprobs", "completions have the number of alternatives in logprobs")
        if value is None:
            return {}
        if type(value) is int and 0 <= value <= MAX_TOP_LOGPROBS:
            return {"logprobs": True, "top_logprobs": value}
        wanted = f"a number of alternatives, 0 to {MAX_TOP_LOGPROBS}"
        raise RequestError("bad_sampling", f"body.logprobs must be {wanted}, got {describe_value(value)}")
    if value is not None and not isinstance(value, bool):
        raise RequestError("bad_sampling", f"body.logprobs must be true or false, got {describe_value(value)}")
    if num_tops and not value:
        raise RequestError("bad_sampling", "body.top_logprobs: only with logprobs: true")
    return {name: x for name, x in zip(LOGPROBS, (value, num_tops), strict=True) if x is not None}
