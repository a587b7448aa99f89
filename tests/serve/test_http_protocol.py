"""What reaches no application because it is not HTTP is refused in OpenAI's form, over a real socket."""

import asyncio
import json
import socket

import pytest
import uvicorn

from eagle_ray.serve import proxy_errors
from eagle_ray.serve.proxy_errors import MAX_HEADER_BYTES, install

CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"


async def app(scope, receive, send):
    num_bytes, is_more = 0, True
    while is_more:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        is_more = message.get("more_body", False)
    headers = [(b"content-type", b"text/plain"), (b"body-bytes", str(num_bytes).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"fine"})


def exchange_bytes(
    request: bytes, rest: bytes = b"", pause_s: float | None = None
) -> tuple[bytes, bytes]:
    """Head and body of the answer of a server as Ray Serve's proxy starts it.

    rest: sent after the first answer, or after a pause.
    """

    async def main():
        install()
        listening = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(
            uvicorn.Config(app, lifespan="off", log_level=None, log_config=None)
        )
        server.install_signal_handlers = lambda: None
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        try:
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            writer.write(request)
            answer = await reader.readuntil(b"fine") if rest and pause_s is None else b""
            await asyncio.sleep(pause_s or 0)
            writer.write(rest)
            answer += await reader.read()
            writer.close()
        finally:
            server.should_exit = True
            await serving
        return answer

    head, _, body = asyncio.run(main()).partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/2.0\r\nHost: a\r\n\r\n",
        b"GET / HTTP/0.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nhost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon here\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        CHUNKED.replace(b"chunked", b"gzip, chunked") + b"1\r\na\r\n0\r\n\r\n",
        b"GET /" + b"a" * MAX_HEADER_BYTES,
        b"GET / HTTP/1.1\r\nA: " + b"a" * MAX_HEADER_BYTES,
        b"GET / HTTP/1.1\r\nConnection: close\r\nA: " + b"a" * MAX_HEADER_BYTES + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nConnection: close\r\n"
        + b"A: a\r\n" * (MAX_HEADER_BYTES // 6)
        + b"\r\n",
        CHUNKED + b"1\r\na\r\n0\r\n" + b"A: a\r\n" * (MAX_HEADER_BYTES // 6) + b"\r\n",
    ],
)
def test_what_is_not_http_is_refused_in_openais_form(request_bytes):
    head, body = exchange_bytes(request_bytes)
    assert head.startswith(b"HTTP/1.1 400 ") and b"application/json" in head.lower()
    error = json.loads(body)["error"]
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error",
        None,
        "bad_http",
    )


def test_what_is_http_is_answered():
    """A body may be longer than headers may be. HTTP/1.0 needs no Host."""
    assert exchange_bytes(b"GET / HTTP/1.0\r\n\r\n")[0].startswith(b"HTTP/1.1 200 ")
    body = b"x" * 3 * MAX_HEADER_BYTES
    length = str(len(body)).encode()
    head, answer = exchange_bytes(
        b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: "
        + length
        + b"\r\n\r\n"
        + body
    )
    assert head.startswith(b"HTTP/1.1 200 ") and b"fine" in answer


@pytest.mark.parametrize("offer", [b"Upgrade: h2c\r\n", b"upgrade:H2C \r\n"])
def test_an_offer_of_http_2_is_not_taken_and_the_body_is_read(offer):
    """As Java's HttpClient makes it."""
    head, answer = exchange_bytes(
        b"POST / HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: 5\r\nHost: a\r\n"
        b"HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA\r\n"
        + offer
        + b"\r\nhello",
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    )
    assert (
        head.startswith(b"HTTP/1.1 200 ")
        and b"body-bytes: 5" in head
        and answer.count(b"fine") == 2
    )


def test_body_does_not_count_to_the_headers_of_the_next_request():
    """The first bytes of the second request come with the first request's long body."""
    body = b"x" * (MAX_HEADER_BYTES + 1000)
    first = (
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: "
        + str(len(body)).encode()
        + b"\r\n\r\n"
        + body
    )
    head, answers = exchange_bytes(
        first + b"GET / HTTP/1.1\r\nHost: a\r\nConne", b"ction: close\r\n\r\n"
    )
    assert head.startswith(b"HTTP/1.1 200 ") and answers.count(b"fine") == 2


@pytest.mark.parametrize(
    ("sent", "rest", "statuses"),
    [
        (b"", b"", []),
        (b"GET / HT", b"", [b"408"]),
        (b"GET / HTTP/1.1\r\nA: b\r\n", b"", [b"408"]),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"GET / HT", [b"200", b"408"]),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\r\n", [b"200", b"408"]),
    ],
)
def test_a_connection_without_a_whole_head_is_closed(monkeypatch, sent, rest, statuses):
    """Whether it sends nothing, or a part of it at the beginning, or behind another request."""
    monkeypatch.setattr(proxy_errors, "HEAD_WITHIN_S", 0.5)
    head, answer = exchange_bytes(sent, rest)
    assert [part[:3] for part in (head + answer).split(b"HTTP/1.1 ")[1:]] == statuses


def test_slow_answer_and_slow_body_outlast_the_header_timeout(monkeypatch):
    monkeypatch.setattr(proxy_errors, "HEAD_WITHIN_S", 0.5)
    body = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 3\r\n\r\nab"
    assert exchange_bytes(body, b"c", pause_s=1.0)[0].startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "request_line", [b"GET / HTTP/2.0\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n"]
)
def test_other_versions_and_two_hosts_are_refused(request_line):
    head, _ = exchange_bytes(request_line + b"Connection: close\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
