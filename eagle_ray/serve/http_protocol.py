"""The HTTP parser's own refusals, in OpenAI's form: a request that is not HTTP reaches no application.

A connection is closed if the head of a request, its first line and headers, is not here in time, or does not begin.

Ray Serve's proxy lets uvicorn choose its protocol class by the name "auto". `install` puts ours there, in the proxy's
process, before the server starts.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from eagle_ray.serve.http_errors import ApiError

MAX_HEADER_BYTES = 64 << 10  # of a request line and its headers, as uvicorn's other parser (h11) has it
HEAD_WITHIN_S = 30.0  # of a new connection, or of the first byte of a further request
VERSIONS = ("1.0", "1.1")
H2C_OFFER = re.compile(rb"(\r\n)upgrade(:[ \t]*h2c[ \t]*\r\n)", re.IGNORECASE)
TOO_LARGE = f"the headers have more than {MAX_HEADER_BYTES} bytes"
_Protocol: Any = AutoHTTPProtocol  # uvicorn chooses the class when it is imported, so it has no type


def install() -> None:
    """Let uvicorn use ErrorFormProtocol in this process, for servers that start from now on."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{ErrorFormProtocol.__name__}"


class ErrorFormProtocol(_Protocol):
    """uvicorn's protocol class, with refusals in OpenAI's form and limits on the size and the time of headers.

    uvicorn itself closes a connection that is idle after a response. It does not if anything more arrives.
    """

    _num_parsed = 0  # bytes of the request line, headers and trailers, as the parser reports them
    _num_pending = 0  # bytes of a header or trailer section that has not ended: the parser reports whole headers only
    _num_new = 0  # the part of the current chunk that belongs to such a section
    _fault = ""  # why the parser was stopped
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._num_parsed = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or a trailer behind a chunked body."""
        self._count(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._num_pending = self._num_new = 0
        self._stop_head_timer()
        if (problem := self._problem_of_head(self.parser.get_http_version())) is not None:
            self._stop(problem)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_pending = self._num_new = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_pending = self._num_new = 0
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self._is_between_requests:
            data = _without_h2c(data)
        self._num_new = len(data)
        super().data_received(data)
        self._num_pending += self._num_new
        if self._num_pending > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(TOO_LARGE)
        if self._is_between_requests and self._head_timer is None:
            self._start_head_timer()

    @property
    def _is_between_requests(self) -> bool:
        """Return whether no request is being answered: what arrives now begins one, or belongs to one that is over."""
        return self.cycle is None or self.cycle.response_complete

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_WITHIN_S, self._end_of_head_time)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_of_head_time(self) -> None:
        """Close the connection, with an answer to a request that has begun."""
        self._head_timer = None
        if self.transport.is_closing() or not self._is_between_requests:
            return
        if self._num_pending:
            message = f"the headers were not here after {HEAD_WITHIN_S:g} s. Send them at once."
            self._refuse(ApiError(408, message, code="headers_too_slow"), "408 Request Timeout")
        else:
            self.transport.close()

    def _problem_of_head(self, version: str) -> str | None:
        """Return what the parser accepts in a request line and its headers although it is not HTTP/1.0 or HTTP/1.1."""
        if version not in VERSIONS:
            return f"HTTP/{version} is not spoken here"
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (version == "1.1" and num_hosts == 0):
            return f"Host: the request has {num_hosts} of these headers, and needs one"
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if any(coding != b"chunked" for coding in codings):
            return "Transfer-Encoding: only chunked is read, and no packed body"
        return None

    def _count(self, num_bytes: int) -> None:
        self._num_parsed += num_bytes
        if self._num_parsed > MAX_HEADER_BYTES:
            self._stop(TOO_LARGE)

    def _stop(self, fault: str) -> None:
        """Raise ValueError. The parser passes it on to data_received, which answers with 400."""
        self._fault = fault
        raise ValueError(fault)

    def send_400_response(self, msg: str) -> None:
        """Answer with uvicorn's message, or with what stopped the parser, and close the connection."""
        message = f"{(self._fault or msg).rstrip('.')}. Send an HTTP/1.1 request."
        self._refuse(ApiError(400, message, code="bad_http"), "400 Bad Request")

    def _refuse(self, error: ApiError, status: str) -> None:
        """Answer with an error and close the connection."""
        body = json.dumps(error.body()).encode()
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def _without_h2c(data: bytes) -> bytes:
    """Rename an offer of HTTP/2 in the head that the data begins with: it asks for nothing, and the parser would take
    the request for one without a body. Java's HttpClient makes this offer in every first request.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return H2C_OFFER.sub(b"\\1Offered\\2", head + end) + rest
