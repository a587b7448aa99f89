"""Reading a request's body: JSON by its name, never past its limit, not for ever, and not once its client has left.

data = await read_body(request, most=8 << 20)
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.requests import Request

from eagle_ray.serve.http_errors import ApiError

ARRIVES_WITHIN_S = 60.0


class ClientDisconnected(Exception):
    """The client disconnected; no one waits for the response."""


async def read_body(request: Request, most: int) -> bytes:
    """most: bytes. Raises ApiError, and ClientDisconnected where it breaks off."""
    _check_kind(request.headers)
    if int(request.headers.get("content-length", 0)) > most:
        raise _too_large(most)
    try:
        return await asyncio.wait_for(_whole(request, most), ARRIVES_WITHIN_S)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body was not here after {ARRIVES_WITHIN_S:g} s", code="body_too_slow") from None
    except ApiError:
        raise
    except Exception:  # ClientDisconnect, and what the server that we run in has for it: Ray's own is a cancelled task
        raise ClientDisconnected from None


async def _whole(request: Request, most: int) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise _too_large(most)
    return bytes(body)


def _check_kind(headers: Mapping[str, str]) -> None:
    """Web pages of strangers may send other kinds, or name none, to this machine without asking it.

    From elsewhere nothing said is JSON: only browsers name an origin.
    """
    said = headers.get("content-type", "")
    kind = said.partition(";")[0].strip().lower()
    if (
        (kind or "origin" in headers)
        and kind != "application/json"
        and not (kind.startswith("application/") and kind.endswith("+json"))
    ):
        raise ApiError(415, f"Content-Type must be application/json, got {said}", code="bad_content_type")


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body has more than {most} bytes", code="body_too_large")
