"""The HTTP parser's own refusals, in OpenAI's form: a request that is not HTTP reaches no application.

Ray Serve's proxy lets uvicorn choose its protocol class by the name "auto". `install` puts ours there, in the proxy's
process, before the server starts.
"""

from __future__ import annotations

import json
from typing import Any

from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from eagle_ray.serve.http_errors import ApiError

MAX_HEADER_BYTES = 64 << 10  # of a request line and its headers, as uvicorn's other parser (h11) has it
TOO_LARGE = f"the headers have more than {MAX_HEADER_BYTES} bytes"
_Protocol: Any = AutoHTTPProtocol  # uvicorn chooses the class when it is imported, so it has no type


def install() -> None:
    """Let uvicorn use ErrorFormProtocol in this process, for servers that start from now on."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{ErrorFormProtocol.__name__}"


class ErrorFormProtocol(_Protocol):
    """uvicorn's protocol class, with refusals in OpenAI's form and a limit on the size of headers."""

    _num_parsed = 0  # bytes of the request line, headers and trailers, as the parser reports them
    _num_pending = 0  # bytes of a header or trailer section that has not ended: the parser reports whole headers only
    _num_new = 0  # the part of the current chunk that belongs to such a section

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
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_pending = self._num_new = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_pending = self._num_new = 0
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        self._num_new = len(data)
        super().data_received(data)
        self._num_pending += self._num_new
        if self._num_pending > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(TOO_LARGE)

    def _count(self, num_bytes: int) -> None:
        """Raise ValueError for too many bytes. The parser passes it on to data_received, which answers with 400."""
        self._num_parsed += num_bytes
        if self._num_parsed > MAX_HEADER_BYTES:
            raise ValueError(TOO_LARGE)

    def send_400_response(self, msg: str) -> None:
        """Answer with uvicorn's message, or with the limit that was exceeded, and close the connection."""
        msg = TOO_LARGE if self._num_parsed > MAX_HEADER_BYTES else msg
        error = ApiError(400, f"{msg.rstrip('.')}. Send an HTTP/1.1 request.", code="bad_http")
        body = json.dumps(error.body()).encode()
        head = (
            "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
