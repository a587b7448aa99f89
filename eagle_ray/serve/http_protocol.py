"""The HTTP parser's own refusals, in OpenAI's form: a request that is not HTTP reaches no application.

Ray Serve's proxy lets uvicorn choose its protocol class by the name "auto". `install` puts ours there, in the proxy's
process, before the server starts.
"""

from __future__ import annotations

import json

from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from eagle_ray.serve.errors import ApiError

MAX_HEADER_BYTES = 64 << 10  # of a request line and its headers, as uvicorn's other parser (h11) has it


def install() -> None:
    """Let uvicorn use ErrorFormProtocol in this process, for servers that start from now on."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{ErrorFormProtocol.__name__}"


class ErrorFormProtocol(AutoHTTPProtocol):
    """uvicorn's protocol class, with refusals in OpenAI's form and a limit on the size of headers."""

    _num_header_bytes = 0
    _reads_headers = False

    def on_message_begin(self) -> None:
        self._num_header_bytes, self._reads_headers = 0, True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._reads_headers = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._num_header_bytes += len(data)
        if self._reads_headers and self._num_header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(f"the headers have more than {MAX_HEADER_BYTES} bytes")

    def send_400_response(self, msg: str) -> None:
        """Answer with uvicorn's message and close the connection."""
        error = ApiError(400, f"{msg.rstrip('.')}. Send an HTTP/1.1 request.", code="bad_http")
        body = json.dumps(error.body()).encode()
        head = (
            "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
