"""Convert lines of OpenAI's batch files into rows of a job.

A line is ``{"custom_id", "method", "url", "body"}``. Its parts become columns of a row:

    custom_id                        id
    messages, prompt or input        the prompt
    other parameters of the body     sampling columns
    url, model                       carried to the output; the job's own target answers

A body may have the parameters of its url, with their JSON types, and prompt_logprobs, which is a
column of a job. The table in ``parameters.py`` checks each of them.

    >>> body = {"prompt": "Hi", "max_tokens": 4}
    >>> parse_batch_line({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body})
    {'id': 'a', 'url': '/v1/completions', 'model': None, 'prompt': 'Hi', 'max_tokens': 4}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_ray.core.errors import RequestError
from eagle_ray.requests.parameters import (
    NOT_OF_JOBS,
    SAMPLING,
    TWO_FORMS,
    Api,
    Parameter,
    rows_at,
    two_forms,
)
from eagle_ray.requests.refused import is_no_op, refusal
from eagle_ray.requests.request import InputRow, chat_of, unreadable
from eagle_ray.requests.responses import RESPONSES_ONLY, chat_body
from eagle_ray.requests.values import (
    HTTP,
    Kind,
    checked,
    describe_value,
    unsupported,
)
from eagle_ray.text.structured import with_own_keys

PROMPT_NAMES = {Api.CHAT: "messages", Api.COMPLETIONS: "prompt"}  # a response is answered as a chat
URLS = tuple(api.value for api in (*PROMPT_NAMES, Api.RESPONSES, Api.EMBEDDINGS))
LINE_KEYS = {"custom_id", "method", "url", "body"}
LENGTHS = ("max_tokens", "max_completion_tokens")
# Parameters of sampling whose rules name others that a response calls otherwise.
NAMED_OF_RESPONSES = ("min_tokens", "top_logprobs")
JOB_ONLY_PARAMETERS = {
    name: row for name, row in SAMPLING.items() if Api.JOB in row.apis and not row.apis & HTTP
}
KNOWN_AT: Mapping[Api, Mapping[str, Parameter]] = {
    api: {name: row for name, row in rows_at(api).items() if name not in NOT_OF_JOBS}
    | JOB_ONLY_PARAMETERS
    for api in (*PROMPT_NAMES, Api.RESPONSES)
}


def parse_batch_line(line: InputRow) -> InputRow:
    """Return the columns of one parsed line. In the row of a bad line, a RequestError replaces the prompt."""
    if isinstance(line, RequestError):
        return line
    row: dict[str, Any] = {"id": _id_of(line), "url": None, "model": None}
    try:
        if (error := unreadable(line)) is not None:
            raise error
        api = _api_of(line)
        row["url"] = api.value
        if api is Api.EMBEDDINGS:
            return row | _embedding_columns(line)
        body = _body_of(line, api)
        row["model"] = body.get("model")
        if api is Api.RESPONSES:
            body, api = dict(_chat_body_of(body)), Api.CHAT
        return row | _prompt_of(body, PROMPT_NAMES[api]) | _parameters_of(body, api)
    except RequestError as error:
        return row | {"prompt": error}


EMBEDDING_FIELDS = ("input", "model", "prompt_name", "encoding_format", "user")


def _embedding_columns(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a line of /v1/embeddings. The configuration sets the width of a job's vectors."""
    body = line.get("body")
    if not isinstance(body, Mapping):
        raise RequestError("bad_type", f"body must be an object, got {describe_value(body)}")
    given = {name: value for name, value in body.items() if value is not None}
    for name in given:
        if name == "dimensions":
            raise unsupported(
                "body.dimensions", "set embedding.dimensions, which counts for all rows"
            )
        if name not in EMBEDDING_FIELDS:
            raise unsupported(f"body.{name}", "leave it out")
    if "input" not in given:
        raise RequestError("prompt_missing", "body.input is absent or null: give it")
    columns = {"model": given.get("model"), **_prompt_of(given, "input")}
    if "input" in columns:
        columns["prompt"] = columns.pop("input")
    return columns | ({"prompt_name": given["prompt_name"]} if "prompt_name" in given else {})


def _id_of(line: Mapping[str, Any]) -> Any:
    custom_id = line.get("custom_id")
    if isinstance(custom_id, str) and not custom_id.strip():
        return RequestError(
            "empty_id", "custom_id is an empty text. Give each line an id of its own."
        )
    return custom_id


def _api_of(line: Mapping[str, Any]) -> Api:
    if unknown := line.keys() - LINE_KEYS:
        raise unsupported(min(unknown), "a line holds custom_id, method, url and body")
    if line.get("method") != "POST":
        raise RequestError(
            "bad_type", f"method must be POST, got {describe_value(line.get('method'))}"
        )
    if (url := line.get("url")) not in list(URLS):
        raise RequestError(
            "bad_type",
            f"url must be {', '.join(URLS[:-1])} or {URLS[-1]}, got {describe_value(url)}",
        )
    return Api(url)


def _body_of(line: Mapping[str, Any], api: Api) -> dict[str, Any]:
    """Return the parameters of a line's body. Raises RequestError for a parameter that would be ignored."""
    body = line.get("body")
    if not isinstance(body, Mapping):
        raise RequestError("bad_type", f"body must be an object, got {describe_value(body)}")
    values: dict[str, Any] = {}
    for name, value in with_own_keys(body).items():
        if value is None:
            continue
        row = KNOWN_AT[api].get(name)
        if row is None:
            if not is_no_op(name, value, api):
                raise unsupported(f"body.{name}", refusal(name, value, api))
        elif api in row.required or not row.kind_at(api).is_nothing(value):
            values[name] = _checked(row, value, api)

    both = two_forms(values)
    if both is not None:
        first, second = both
        raise RequestError("bad_sampling", f"body.{first} and body.{second} {TWO_FORMS}")
    return values


def _checked(row: Parameter, value: Any, api: Api) -> Any:
    """Return the plain value of a parameter as a job reads it.

    Prompts, and parameters that only responses have, are checked later. The limits of rows apply,
    not the lower limits of a server with several clients.
    """
    if row.name in (*PROMPT_NAMES.values(), *RESPONSES_ONLY):
        return value
    is_sampling = row.name in SAMPLING and row.name != "logprobs"
    if api is Api.RESPONSES and row.name in NAMED_OF_RESPONSES:
        is_sampling = False
    kind: Kind = row.kind_at(Api.JOB if is_sampling else api)
    try:
        return checked(row.name, kind, value)
    except RequestError as error:
        raise RequestError(
            "bad_sampling" if row.name in SAMPLING else "bad_type", f"body.{error}"
        ) from None


def _chat_body_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a body of /v1/responses to the body of a chat completion."""
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
            raise RequestError(
                "bad_type", f"body.messages must be a list of messages, got {describe_value(value)}"
            )
        if not value:
            raise RequestError("prompt_empty", "body.messages holds no message: give at least one")
        return {name: value}
    if not isinstance(value, str | list) or (
        isinstance(value, list) and any(type(token) is not int for token in value)
    ):
        raise unsupported(
            f"body.{name}", f"give one text or one list of token ids, not {describe_value(value)}"
        )
    if not value:
        raise RequestError(
            "prompt_empty", f"body.{name} is empty: write a prompt, or drop the line"
        )
    return {name if isinstance(value, str) else "prompt_token_ids": value}


def _parameters_of(body: Mapping[str, Any], api: Api) -> dict[str, Any]:
    """Return the columns of the parameters that the body sets."""
    columns = {name: body[name] for name in SAMPLING if name in body}
    lengths = [body[name] for name in LENGTHS if name in body]
    if len(lengths) == 2 and lengths[0] != lengths[1]:
        raise RequestError(
            "bad_sampling", f"body.{LENGTHS[0]} and body.{LENGTHS[1]} differ: give one of them"
        )
    if lengths:
        columns["max_tokens"] = lengths[0]
    if api is Api.COMPLETIONS:
        tops = columns.pop("logprobs", None)  # the number of alternatives
        if tops is None:
            return columns
        return columns | {"logprobs": True, "top_logprobs": tops}
    if columns.get("top_logprobs") and not columns.get("logprobs"):
        raise RequestError("bad_sampling", "body.top_logprobs: only with logprobs: true")
    return columns | chat_of(body, "body.{}")
