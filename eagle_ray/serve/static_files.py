"""The web page at ``/``: a few files beside this one, sent as they are.

It is a client like any other: it asks for stream_options.include_steps and draws what it gets. Nothing is built,
nothing comes from elsewhere, and its policy lets it run its own scripts only and talk to this server alone.

    routes = [*api_routes, *page_routes()]
"""

from __future__ import annotations

import hashlib
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{what} {where}" for what, where in POLICY.items()),
    "Cache-Control": "no-cache",  # kept, but asked for again: a new version is seen at once
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def page_routes() -> list[Route]:
    """index.html at the root, its icon where browsers look for one unasked, and every file under /page."""
    found = {file.name: _File(file.name, file.read_bytes()) for file in files(__package__).joinpath("page").iterdir()}
    named = {f"/page/{name}": file for name, file in found.items()}
    named |= {"/": found["index.html"], "/favicon.ico": found["icon.svg"]}
    return [Route(path, file.send) for path, file in named.items()]


class _File:
    """One file, read once."""

    def __init__(self, name: str, content: bytes):
        self._content, self._kind = content, KINDS[name.rpartition(".")[2]]
        self._headers = HEADERS | {"ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def send(self, request: Request) -> Response:
        if self._headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers, media_type=self._kind)
