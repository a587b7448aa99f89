"""Flow control of request bodies: Serve's proxy reads at most MAX_AHEAD_BYTES more of one than its replica has taken.

Serve's own queues between the two have no limit, so a fast upload to a slow disk would be in the memory of both. The
proxy says in the scope that it counts; the application then tells it what it has taken, by a message that the proxy
keeps from the client. While the window is full, the proxy does not read, and TCP slows the client down.

    proxy:    window = BodyWindow(receive)                  replica:  Middleware(AcknowledgeBody)
              await app(counting(scope), window.receive, send)
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

TAKEN = "eagle_ray.body_taken"  # the key of the scope's extensions, and the type of the message
MAX_AHEAD_BYTES = 4 << 20
ACKNOWLEDGE_BYTES = 1 << 19  # of the body for each message


def counting(scope: Scope) -> Scope:
    """Return a scope that asks the application for messages of type TAKEN."""
    return {**scope, "extensions": {**(scope.get("extensions") or {}), TAKEN: {}}}


class BodyWindow:
    """The proxy's side: the receive of one request."""

    def __init__(self, receive: Receive):
        self._receive = receive
        self._num_ahead = 0  # bytes
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def receive(self) -> Message:
        """Return the client's next message, once the window has room."""
        await self._has_room.wait()
        message = await self._receive()
        self._move(len(message.get("body", b"")))
        return message

    def take(self, message: Message) -> bool:
        """Widen the window if it is a message of type TAKEN; return whether it is one."""
        if message["type"] != TAKEN:
            return False
        self._move(-message["num_bytes"])
        return True

    def _move(self, num_bytes: int) -> None:
        self._num_ahead += num_bytes
        if self._num_ahead < MAX_AHEAD_BYTES:
            self._has_room.set()
        else:
            self._has_room.clear()


class AcknowledgeBody:
    """The application's side: what it has read when it asks for more is taken."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if TAKEN not in (scope.get("extensions") or {}):
            await self._app(scope, receive, send)
            return
        num_new = 0

        async def acknowledging() -> Message:
            nonlocal num_new
            if num_new >= ACKNOWLEDGE_BYTES:
                await send({"type": TAKEN, "num_bytes": num_new})
                num_new = 0
            message = await receive()
            num_new += len(message.get("body", b""))
            return message

        await self._app(scope, acknowledging, send)
