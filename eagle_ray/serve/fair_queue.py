"""FairQueue: order the sequences of clients with different API keys.

The engine serves in order of arrival, so it gets only a few sequences more than it has slots; the others wait here,
in one queue per client. The client that was served the fewest tokens is next. This is the virtual token counter of
Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). While a sequence runs, its prompt and
max_tokens are reserved; when it ends, its client is charged with the tokens that it used.

    queue = FairQueue(num_clients=2, num_places=5)
    async with queue.turn(client=1, tokens=300) as turn:
        turn.used = len((await engine.generate(sequence)).token_ids)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class QueueTurn:
    """One sequence at the engine. used: the tokens that it used."""

    used: int


class FairQueue:
    """Use it on one event loop. num_places: sequences that may be at the engine together."""

    def __init__(self, num_clients: int, num_places: int):
        self._num_free = num_places
        self._served = [0] * num_clients  # tokens, per client
        self._reserved = [0] * num_clients  # tokens that the sequences at the engine may take, per client
        self._waiting: list[dict[asyncio.Future[None], int]] = [{} for _ in range(num_clients)]  # tokens, oldest first
        self._last_served = 0  # the counter of the client that was last given a place

    @asynccontextmanager
    async def turn(self, client: int, tokens: int) -> AsyncIterator[QueueTurn]:
        """Wait for a place and hold it while the block runs. tokens: an upper bound of what the sequence may use."""
        await self._wait(client, tokens)
        turn = QueueTurn(tokens)
        try:
            yield turn
        finally:
            self._release(client, tokens, turn.used)

    async def _wait(self, client: int, tokens: int) -> None:
        place = asyncio.get_running_loop().create_future()
        self._catch_up(client)
        self._waiting[client][place] = tokens
        self._dispatch()
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # the task was cancelled just after it was given its place
                self._release(client, tokens, used=0)
            self._waiting[client].pop(place, None)
            raise

    def _release(self, client: int, tokens: int, used: int) -> None:
        self._reserved[client] -= tokens
        self._served[client] += used
        self._num_free += 1
        self._dispatch()

    def _catch_up(self, client: int) -> None:
        """Raise the counter of a client that was idle: time without requests earns no credit.

        Reservations do not count: a client that reserves much and uses little would delay later clients.
        """
        if not self._waiting[client] and not self._reserved[client]:
            others = [self._served[i] for i, waiting in enumerate(self._waiting) if waiting]
            self._served[client] = max(self._served[client], min(others, default=self._last_served))

    def _dispatch(self) -> None:
        """Give free places to the clients that were served least."""
        while self._num_free and any(self._waiting):
            client = min((i for i, waiting in enumerate(self._waiting) if waiting), key=self._served_tokens)
            place = next(iter(self._waiting[client]))
            tokens = self._waiting[client].pop(place)
            if place.done():  # cancelled, and its task has not run since
                continue
            self._last_served = self._served[client]
            self._reserved[client] += tokens
            self._num_free -= 1
            place.set_result(None)

    def _served_tokens(self, client: int) -> int:
        return self._served[client] + self._reserved[client]
