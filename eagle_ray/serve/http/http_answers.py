r"""Write HTTP answers: JSON of any size, server-sent events, and errors.

An answer of megabytes is written in a thread. A single call of `json.dumps` holds Python's lock
until it returns, so it would stop the event loop even from a thread. `json_parts` writes in parts,
between which the event loop runs.

    >>> json_body({"tokens": [1, 2]})
    b'{"tokens":[1,2]}'
    >>> event({"choices": []})
    'data: {"choices":[]}\n\n'
    >>> typed_form({"choices": [{"text": "a", "logprobs": None, "finish_reason": None}]})["choices"]
    [{'text': 'a', 'logprobs': None, 'finish_reason': 'length'}]

An error is ``{"error": {message, type, param, code}}`` with its status.

    >>> ApiError(404, "there is no model 'x'", param="model", code="model_not_found").body()["error"]["code"]
    'model_not_found'
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from eagle_ray.core.errors import EngineError, RequestError
from eagle_ray.requests.answer_models import Chunk, Completion, Refusal, StreamEvent, TextChunk

TextAnswer = TypeVar("TextAnswer", Completion, TextChunk)

# {"choices": [{"logprobs": {"content": [...]}}]}: the containers around the longest lists.
MAX_DEPTH = 4
NUM_VALUES = 4096  # numbers or texts that are encoded in one call
NUM_OBJECTS = 32  # the same of objects, each of which has up to 20 alternatives
LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
END_OF_STREAM = "data: [DONE]\n\n"
TYPED_CLIENT = "x-stainless-lang"  # a header of every library that OpenAI has had generated
encode_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def json_body(value: Any) -> bytes:
    """Return the JSON bytes that Starlette's JSONResponse would send."""
    return "".join(json_parts(value)).encode()


def json_parts(value: Any, depth: int = MAX_DEPTH) -> Iterator[str]:
    """Yield the JSON text of a value in parts.

    Args:
        value: value to write.
        depth: levels of objects, and of lists of objects, that are written in parts.
    """
    if isinstance(value, dict) and value and depth:
        for i, (key, inner) in enumerate(value.items()):
            yield f"{',' if i else '{'}{encode_json(key)}:"
            yield from json_parts(inner, depth - 1)
        yield "}"
    elif isinstance(value, list) and value:
        yield from _list_parts(value, depth)
    else:
        yield encode_json(value)


def _list_parts(values: list[Any], depth: int) -> Iterator[str]:
    holds_objects = any(isinstance(value, (dict, list)) for value in values[:2])
    if holds_objects and depth:
        for i, value in enumerate(values):
            yield "," if i else "["
            yield from json_parts(value, depth - 1)
    else:
        size = NUM_OBJECTS if holds_objects else NUM_VALUES
        for start in range(0, len(values), size):
            yield f"{',' if start else '['}{encode_json(values[start : start + size])[1:-1]}"
    yield "]"


def event(body: Chunk | StreamEvent | Refusal) -> str:
    """Return a server-sent event. If its body has a type, that is the event's name.

    Some clients end a line at characters that JSON does not escape, so these are escaped here. A
    chunk without log-probabilities is short, and is written in one call.
    """
    values: Mapping[str, Any] = body
    is_short = "choices" in values and not any(choice["logprobs"] for choice in values["choices"])
    text = encode_json(body) if is_short else "".join(json_parts(body))
    name = f"event: {values['type']}\n" if "type" in values else ""
    return f"{name}data: {text.translate(LINE_ENDS)}\n\n"


def is_typed(headers: Mapping[str, str]) -> bool:
    """Return whether a request comes from a client library whose types allow no null.

    Args:
        headers: headers of the request, with names in lower case.
    """
    return TYPED_CLIENT in headers


def typed_form(body: TextAnswer) -> TextAnswer:
    """Replace the nulls of a text completion, or of a chunk of it, that OpenAI's client libraries refuse.

    OpenAI's servers and vLLM send null as the finish_reason of a chunk before the last one, as the
    log-probability of a prompt's first token, and as the alternatives to it. The types of OpenAI's
    libraries allow no null there, so `_strict_response_validation` refuses it. These clients get
    other values: the finish_reason "length", since the chunk ends for its length; a log-probability
    of 0, since the first token is given and so certain; and no alternatives.
    """
    for choice in body["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "length"
        logprobs = choice["logprobs"]
        if logprobs is not None:
            values = logprobs["token_logprobs"]
            logprobs["token_logprobs"] = [0.0 if value is None else value for value in values]
            tops = logprobs["top_logprobs"]
            if tops is not None:
                logprobs["top_logprobs"] = [top or {} for top in tops]
    return body


RETRY_AFTER_S = 1
MAX_MESSAGE_CHARS = 1000  # characters of a message
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
# By a RequestError's code: the parameter that causes it.
PARAMS = {
    "prompt_empty": "prompt",
    "prompt_too_long": "prompt",
    "bad_token_id": "prompt",
    "no_tokenizer": "prompt",
    "no_chat_template": "messages",
    "bad_messages": "messages",
    "kv_space": "max_tokens",
    "grammar_conflict": "min_tokens",
}


class ApiError(Exception):
    """The error with which one request is answered.

    Args:
        status: HTTP status.
        message: text for the client.
        param: parameter at fault; None if it is none.
        code: short name that does not change between versions.
        retry_after_s: seconds to wait after a 429 or 503.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int = RETRY_AFTER_S,
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self._retry_after_s = retry_after_s

    def body(self) -> Refusal:
        kind = TYPES.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        param = None if self.param is None else _shortened(self.param)
        return {
            "error": {
                "message": _shortened(str(self)),
                "type": kind,
                "param": param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": str(self._retry_after_s)} if self.status in (429, 503) else {}


def api_error(error: Exception) -> ApiError:
    """Return the error to send to a client. Its own mistakes are described; faults of the server are not."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError) and error.code == "grammar_queue_full":
        return ApiError(429, str(error), code=error.code)
    if isinstance(error, RequestError):
        return ApiError(400, str(error), _param_of(error), error.code)
    if isinstance(error, EngineError):
        return ApiError(
            503,
            "this replica's engine has ended; ask again, another one answers",
            code="engine_dead",
        )
    return ApiError(
        500,
        f"internal error ({type(error).__name__}); the server's log has more",
        code="internal_error",
    )


def _param_of(error: RequestError) -> str | None:
    """Return the parameter at fault. If the error has none, the message may begin with the parameter's name."""
    if error.param is not None:
        return error.param
    if error.code in ("invalid_sampling", "invalid_chat", "bad_grammar", "unsupported_parameter"):
        return str(error).split()[0].rstrip(":")
    return PARAMS.get(error.code)


def _shortened(text: str) -> str:
    """Return a client's text in a form that can be sent back: shortened, without unpaired surrogates."""
    short = text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]}..."
    return short.encode("utf-8", "backslashreplace").decode("utf-8")
