"""Parse a line of an OpenAI batch file into a row: ``{"custom_id", "method", "url", "body"}``.

custom_id becomes id, the body's messages, prompt or input the prompt, its parameters the sampling columns. url and
model are passed through; the job's own target is used. A body has the parameters of its url, of their JSON types, and
prompt_logprobs, which is a column of a job. One that a job does not have is refused by name unless its value asks for
nothing; it is never ignored.

    >>> body = {"prompt": "Hi", "max_tokens": 4}
    >>> parse_batch_line({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body})
    {'id': 'a', 'url': '/v1/completions', 'model': None, 'prompt': 'Hi', 'max_tokens': 4}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_ray.core.errors import RequestError
from eagle_ray.requests.parameters import NOT_OF_JOBS, SAMPLING, TWO_FORMS, Door, Parameter, rows_at, two_forms
from eagle_ray.requests.refused import fix_of, is_no_op
from eagle_ray.requests.response_items import OWN, chat_body
from eagle_ray.requests.rows import InputRow, chat_of, unreadable
from eagle_ray.requests.structured import with_own_keys
from eagle_ray.requests.values import Kind, checked, describe_value, unsupported

PROMPT_NAMES = {Door.CHAT: "messages", Door.COMPLETIONS: "prompt"}  # a response is answered as a chat
URLS = tuple(door.value for door in (*PROMPT_NAMES, Door.RESPONSES))
LINE_KEYS = {"custom_id", "method", "url", "body"}
LENGTHS = ("max_tokens", "max_completion_tokens")
OF_JOBS = {"prompt_logprobs": SAMPLING["prompt_logprobs"]}
KNOWN_AT: Mapping[Door, Mapping[str, Parameter]] = {
    door: {name: row for name, row in rows_at(door).items() if name not in NOT_OF_JOBS} | OF_JOBS
    for door in (*PROMPT_NAMES, Door.RESPONSES)
}


def parse_batch_line(line: InputRow) -> InputRow:
    """Return the columns of one parsed line. A bad line keeps its id; its error replaces the prompt."""
    if isinstance(line, RequestError):
        return line
    row: dict[str, Any] = {"id": _id_of(line), "url": None, "model": None}
    try:
        if (error := unreadable(line)) is not None:
            raise error
        door = _door_of(line)
        row["url"] = door.value
        body = _body_of(line, door)
        row["model"] = body.get("model")
        if door is Door.RESPONSES:
            body, door = dict(_chat_body_of(body)), Door.CHAT
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


def _body_of(line: Mapping[str, Any], door: Door) -> dict[str, Any]:
    """Return the values of the body, after checking that nothing in it would be ignored."""
    body = line.get("body")
    if not isinstance(body, Mapping):
        raise RequestError("bad_type", f"body must be an object, got {describe_value(body)}")
    values: dict[str, Any] = {}
    for name, value in with_own_keys(body).items():
        if value is None:
            continue
        if (row := KNOWN_AT[door].get(name)) is not None:
            if not row.kind_at(door).is_nothing(value) or door in row.required:
                values[name] = _checked(row, value, door)
        elif not is_no_op(name, value, door):
            told = f"{describe_value(value)} asks for what this system does not do; {fix_of(name, door)}"
            raise unsupported(f"body.{name}", told)
    if (both := two_forms(values)) is not None:
        raise RequestError("bad_sampling", f"body.{both[0]} and body.{both[1]} {TWO_FORMS}")
    return values


def _checked(row: Parameter, value: Any, door: Door) -> Any:
    """Return the plain value of a parameter, as a job takes it. Its prompt, and what only responses have, come later.

    A job's limits are those of rows, not those of a server that others use, too.
    """
    if row.name in (*PROMPT_NAMES.values(), *OWN):
        return value
    is_sampling = row.name in SAMPLING and row.name != "logprobs"
    kind: Kind = row.kind_at(Door.JOB if is_sampling else door)
    try:
        return checked(row.name, kind, value)
    except RequestError as error:
        raise RequestError("bad_sampling" if row.name in SAMPLING else "bad_type", f"body.{error}") from None


def _chat_body_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the body of a chat completion that answers a response's."""
    try:
        return chat_body(body)
    except RequestError as error:
        raise RequestError(error.code, f"body.{error}") from None


def _prompt_of(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if value is None:
        raise RequestError("prompt_missing", f"body.{name} is absent or null: give it")
    if name == "messages":
        if not isinstance(value, list):
            raise RequestError("bad_type", f"body.messages must be a list of messages, got {describe_value(value)}")
        if not value:
            raise RequestError("prompt_empty", "body.messages holds no message: give at least one")
        return {name: value}
    if not isinstance(value, str | list) or (
        isinstance(value, list) and any(type(token) is not int for token in value)
    ):
        raise unsupported("body.prompt", f"give one text or one list of token ids, not {describe_value(value)}")
    if not value:
        raise RequestError("prompt_empty", "body.prompt is empty: write a prompt, or drop the line")
    return {name if isinstance(value, str) else "prompt_token_ids": value}


def _parameters_of(body: Mapping[str, Any], door: Door) -> dict[str, Any]:
    """Return the columns of the parameters that the body sets."""
    found = {name: body[name] for name in SAMPLING if name in body}
    lengths = [body[name] for name in LENGTHS if name in body]
    if len(lengths) == 2 and lengths[0] != lengths[1]:
        raise RequestError("bad_sampling", f"body.{LENGTHS[0]} and body.{LENGTHS[1]} differ: give one of them")
    if lengths:
        found["max_tokens"] = lengths[0]
    if door is Door.COMPLETIONS:
        tops = found.pop("logprobs", None)  # the number of alternatives
        return found | ({} if tops is None else {"logprobs": True, "top_logprobs": tops})
    if found.get("top_logprobs") and not found.get("logprobs"):
        raise RequestError("bad_sampling", "body.top_logprobs: only with logprobs: true")
    return found | chat_of(body, "body.{}")
