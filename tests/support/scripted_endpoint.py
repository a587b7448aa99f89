"""An endpoint of OpenAI's protocol on 127.0.0.1 that answers as a script says, and counts what it was asked.

    with ScriptedEndpoint(script) as endpoint:
        endpoint.url          # "http://127.0.0.1:40123/v1"

A script gets each request and returns how it is answered: `answered()`, `failed(429, retry_after="2")`,
HANG, CUT, or any Reply.
"""

from __future__ import annotations

import email.utils
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PRICE = {"input": 1000.0, "output": 2000.0}  # dollars for a million tokens
PROMPT_TOKENS, OUTPUT_TOKENS = 10, 5  # of each answer
DOLLARS = (PROMPT_TOKENS * PRICE["input"] + OUTPUT_TOKENS * PRICE["output"]) / 1e6
MODEL = "scripted"


@dataclass(frozen=True)
class Reply:
    """What is sent. cut: bytes of the content after which the connection is closed. wait_s: before anything."""

    status: int = 200
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    wait_s: float = 0.0


@dataclass(frozen=True)
class Asked:
    """One request. number: of all, from 0. tries: earlier requests with the same prompt."""

    number: int
    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    tries: int

    @property
    def prompt(self) -> str:
        messages = self.body.get("messages")
        return json.dumps(self.body.get("prompt") if messages is None else messages)


Script = Callable[[Asked], Reply]


def answered(asked: Asked, text: str | None = None, **choice: Any) -> Reply:
    """A good answer, which repeats the prompt."""
    text = f"answer to {asked.prompt}" if text is None else text
    is_chat = asked.path.endswith("/chat/completions")
    message = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    body = {
        "id": f"r{asked.number}",
        "model": MODEL,
        "system_fingerprint": "fp1",
        "choices": [{"index": 0, "finish_reason": "stop", **message, **choice}],
        "usage": {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": OUTPUT_TOKENS,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    return Reply(content=json.dumps(body).encode())


def failed(
    status: int, message: str = "no", headers: dict[str, str] | None = None, **error: Any
) -> Reply:
    """An error in OpenAI's form."""
    content = json.dumps({"error": {"message": message, **error}}).encode()
    return Reply(status, content, headers or {})


def limited(retry_after: str | None = None) -> Reply:
    return failed(429, "slow down", {} if retry_after is None else {"retry-after": retry_after})


def limited_until(seconds: float) -> Reply:
    """A limited answer with the date of Retry-After."""
    return limited(email.utils.formatdate(time.time() + seconds, usegmt=True))


def error_in_200(code: Any = 502, message: str = "upstream throttled") -> Reply:
    return failed(200, message, code=code)


def cut(asked: Asked) -> Reply:
    return Reply(content=answered(asked).content, cut=20)


HANG = Reply(wait_s=3600.0)
NOT_JSON = Reply(content=b"<html>busy</html>")
FAULTS: list[Script] = [  # that pass
    lambda asked: limited("0.05"),
    lambda asked: limited_until(0.5),
    lambda asked: limited(),
    lambda asked: failed(503),
    cut,
    lambda asked: error_in_200(),
    lambda asked: NOT_JSON,
]


class ScriptedEndpoint:
    """The endpoint, which runs while the context is open. script may be replaced at any time."""

    def __init__(
        self,
        script: Script = answered,
        models: tuple[str, ...] = (MODEL,),
        owner: str = "x",
        port: int = 0,
    ):
        self.script = script
        self.asked: list[Asked] = []
        self.good: Counter[str] = Counter()  # good answers by prompt
        self.num_looks = 0  # at its list of models
        self._prompts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        entries = [{"id": model, "object": "model", "owned_by": owner} for model in models]
        self.models_body = json.dumps({"object": "list", "data": entries}).encode()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )

    def __enter__(self) -> ScriptedEndpoint:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def dollars(self) -> float:
        """What all its good answers cost."""
        return DOLLARS * sum(self.good.values())

    def reply(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Reply:
        with self._lock:
            asked = Asked(len(self.asked), path, body, headers, 0)
            asked = Asked(asked.number, path, body, headers, self._prompts[asked.prompt])
            self._prompts[asked.prompt] += 1
            self.asked.append(asked)
        reply = self.script(asked)
        if self._closing.wait(reply.wait_s) and reply.wait_s:
            return NOT_JSON
        if b'"usage"' in reply.content and reply.cut is None:
            with self._lock:
                self.good[asked.prompt] += 1
        return reply

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 1 << 16
            disable_nagle_algorithm = True

            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                endpoint.num_looks += 1
                self._send(Reply(content=endpoint.models_body))

            def do_POST(self) -> None:
                size = int(self.headers["content-length"])
                body = json.loads(self.rfile.read(size))
                headers = {name.lower(): value for name, value in self.headers.items()}
                self._send(endpoint.reply(self.path, body, headers))

            def _send(self, reply: Reply) -> None:
                self.send_response(reply.status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(reply.content)))
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(reply.content[: reply.cut])
                self.wfile.flush()
                if reply.cut is not None:
                    self.close_connection = True

        return Handler
