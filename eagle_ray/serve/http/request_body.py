"""Read the body of an HTTP request and parse it. Raises ApiError that names the first wrong parameter.

The content type must be JSON. The body must arrive within limits of size and time. If the client
disconnects, reading stops. JSON is parsed strictly: duplicate keys, NaN and unpaired surrogates are
errors.

    >>> from eagle_ray.requests.openai_bodies import CompletionRequest
    >>> parse(CompletionRequest, b'{"prompt": "Hi", "echo": true}').echo
    True
"""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import Mapping

from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from eagle_ray.core.errors import RequestError
from eagle_ray.requests.openai_bodies import BodyClass
from eagle_ray.serve.http.http_answers import ApiError, api_error
from eagle_ray.text.strict_json import HalfSurrogate, parse_json

MAX_CONTAINERS = 1 << 16  # objects and lists of a body; a conversation of more fits no model
MAX_VALUES = 1 << 18  # values of a body, or twice the model's length if that is more


def check_containers(body: bytes, max_model_len: int = 0) -> None:
    """Raise ApiError for a body of a million values, which would take seconds and gigabytes to parse."""
    max_values = max(MAX_VALUES, 2 * max_model_len)
    if body.count(b"{") + body.count(b"[") <= MAX_CONTAINERS and body.count(b",") <= max_values:
        return

    # Brackets and commas within strings do not count.
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside = b"".join(unescaped.split(b'"')[::2])
    if outside.count(b"{") + outside.count(b"[") > MAX_CONTAINERS:
        message = f"the body has more than {MAX_CONTAINERS} objects and lists. Send several smaller requests."
        raise ApiError(400, message, code="too_many_values")
    if outside.count(b",") > max_values:
        message = f"the body has more than {max_values} values. Send several smaller requests."
        raise ApiError(400, message, code="too_many_values")


def parse(kind: type[BodyClass], body: bytes) -> BodyClass:
    """Parse the body of a request. Raises ApiError that names the wrong parameter."""
    try:
        data = parse_json(body.decode("utf-8"))
    except HalfSurrogate as error:
        raise _text_error(error) from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="bad_json") from None
    if not isinstance(data, dict):
        raise ApiError(
            400, f"the body must be a JSON object, got {reprlib.repr(data)}", code="bad_json"
        )
    try:
        return kind.read(data)
    except RequestError as error:
        raise api_error(error) from None


def _text_error(error: HalfSurrogate) -> ApiError:
    """Return the error of a text with an unpaired surrogate. It names the parameter that has the text."""
    param = next((step for step in error.place[:1] if isinstance(step, str)), None)
    return ApiError(400, str(error), param, "bad_value" if param else "bad_json")


ARRIVES_WITHIN_S = 60.0
CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii")  # charsets of JSON; ASCII is UTF-8


class ClientDisconnected(Exception):
    """The client has disconnected, so nothing waits for the response."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the bytes of a body. Raises ApiError, and ClientDisconnected if the body breaks off.

    Args:
        request: HTTP request.
        max_bytes: maximum size of the body.
    """
    _check_kind(request.headers)
    if int(request.headers.get("content-length", 0)) > max_bytes:
        raise body_too_large(max_bytes)
    try:
        return await asyncio.wait_for(_whole(request, max_bytes), ARRIVES_WITHIN_S)
    except asyncio.TimeoutError:
        raise ApiError(
            408, f"the body was not here after {ARRIVES_WITHIN_S:g} s", code="body_too_slow"
        ) from None
    except ApiError:
        raise
    except Exception:  # ClientDisconnect, and what the server that we run in has for it: Ray's own is a cancelled task
        raise ClientDisconnected from None


async def _whole(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise body_too_large(max_bytes)
    return bytes(body)


def _check_kind(headers: Mapping[str, str]) -> None:
    """Raise ApiError if the content type is not JSON. Web pages must set it, and other clients may omit it.

    Only browsers send an Origin header. Without this check, a page of another server could send
    requests for which browsers do not ask this server's consent.
    """
    content_type = headers.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    if (
        (kind or "origin" in headers)
        and kind != "application/json"
        and not (kind.startswith("application/") and kind.endswith("+json"))
    ):
        raise ApiError(
            415,
            f"Content-Type must be application/json, got {content_type}",
            code="bad_content_type",
        )
    _check_charset(content_type)
    check_encoding(headers)


def body_too_large(max_bytes: int) -> ApiError:
    """Return the error of a body that is larger than max_bytes."""
    return ApiError(413, f"the body has more than {max_bytes} bytes", code="body_too_large")


def check_encoding(headers: Mapping[str, str]) -> None:
    """Raise ApiError for a compressed body."""
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        message = f"Content-Encoding: {reprlib.repr(encoding)} is not read. Send the body as it is, not packed."
        raise ApiError(415, message, code="bad_content_encoding")


def _check_charset(content_type: str) -> None:
    """Raise ApiError if the content type names another charset than UTF-8."""
    _, options = parse_options_header(content_type)
    charset = options.get(b"charset", b"utf-8").decode("latin-1").lower()
    if charset not in CHARSETS:
        raise ApiError(
            415,
            f"Content-Type: charset must be utf-8, got {reprlib.repr(charset)}",
            code="bad_content_type",
        )
