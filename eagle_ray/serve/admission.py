"""Decide which requests a replica accepts, and in which order clients get the engine's slots.

A request needs one sequence per prompt and choice, and for each sequence the tokens of its prompt
and max_tokens. These are reserved until the request ends. A request that does not fit now is
refused with 429. A request that never fits is refused with 400.

    admission = Admission(Reservation(sequences=24, tokens=65_536))
    with admission.admit(Reservation(sequences=2, tokens=600)):
        ...
    await idle_slots.wait(need)     # for a line of a batch, which the caller admits at once

Clients with different API keys take turns. The engine serves in order of arrival, so it gets only
as many sequences as it has slots. The others wait in a FairQueue, which has one queue per client.
The next slot goes to the client that was served the fewest tokens. A sequence may keep its slot for
a minute, so some slots are reserved for clients that have none. This is the virtual token counter
of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). While a sequence runs, its
prompt and max_tokens count as served. When it ends, the tokens that it used count instead.

    queue = FairQueue(num_clients=2, max_turns=4, num_reserved=1)
    async with queue.turn(client=1, tokens=300) as turn:
        turn.used = len((await engine.generate(sequence)).token_ids)
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from eagle_ray.serve.http.http_answers import ApiError

MAX_SHARE = 3  # a key holds at most three times what is free: a flood of one key leaves a quarter to the others
NUM_RELEASES = 64  # recent releases, from which the wait of a refused request is estimated
MAX_RETRY_AFTER_S = 60
SLOT_POLL_S = 0.02  # seconds between two looks for a slot for a waiting line
RESERVED_PART = 8  # one slot of eight, at least one of several, is kept free; see num_reserved


def num_reserved(num_slots: int) -> int:
    """Return the number of slots that are kept free for HTTP requests and for clients without a slot.

    Args:
        num_slots: slots of the engine.
    """
    return max(1, num_slots // RESERVED_PART) if num_slots > 1 else 0


@dataclass(frozen=True, slots=True)
class Reservation:
    """Numbers of sequences and tokens that requests need."""

    sequences: int = 0
    tokens: int = 0

    def __add__(self, other: Reservation) -> Reservation:
        return Reservation(self.sequences + other.sequences, self.tokens + other.tokens)

    def __sub__(self, other: Reservation) -> Reservation:
        return Reservation(self.sequences - other.sequences, self.tokens - other.tokens)

    def fits(self, available: Reservation) -> bool:
        return self.sequences <= available.sequences and self.tokens <= available.tokens

    def __str__(self) -> str:
        return f"{_with_noun(self.sequences, 'sequence')} and {_with_noun(self.tokens, 'token')}"


def _with_noun(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class Admission:
    """Counts the sequences and tokens in flight in one replica. Use it on one event loop.

    Args:
        limit: maximum in flight, running and queued together.
        num_clients: number of API keys. With several, no client gets the whole limit.
        longest: tokens of the longest possible sequence. If it is free, a client with nothing in
            flight gets one such sequence, even if its share of the limit is smaller.
    """

    def __init__(self, limit: Reservation, num_clients: int = 1, longest: int = 1):
        self.limit = limit
        self._is_shared = num_clients > 1
        self._longest = longest
        self._in_flight: defaultdict[int, Reservation] = defaultdict(Reservation)  # by client
        self._releases: deque[tuple[float, Reservation]] = deque(maxlen=NUM_RELEASES)

    @property
    def in_flight(self) -> Reservation:
        """Return what all requests in flight need together."""
        return sum(self._in_flight.values(), Reservation())

    @contextmanager
    def admit(self, need: Reservation, client: int = 0, num_prompts: int = 1) -> Iterator[None]:
        """Count a request as in flight while the block runs. Raises ApiError as `check` does."""
        self.check(need, client, num_prompts)
        self._in_flight[client] += need
        try:
            yield
        finally:
            self._in_flight[client] -= need
            self._releases.append((time.monotonic(), need))

    def check(self, need: Reservation, client: int = 0, num_prompts: int = 1) -> None:
        """Raise ApiError for a request that does not fit: 400 if it never will, 429 if it does not now.

        Args:
            need: sequences and tokens of the request.
            client: number of the client's API key.
            num_prompts: number of prompts, which decides the parameter that an error names.
        """
        limit = self._available(Reservation(), Reservation())
        if need.sequences > limit.sequences:
            raise ApiError(
                400,
                f"{'n' if num_prompts == 1 else 'prompt'}: the request makes {need.sequences} choices, and this server "
                f"holds at most {limit.sequences} of one client at once. Send several smaller requests.",
                "n" if num_prompts == 1 else "prompt",
                "too_many_choices",
            )
        if need.tokens > limit.tokens:
            raise ApiError(
                400,
                f"max_tokens: the request's prompts and max_tokens, over all {need.sequences} choices, are "
                f"{need.tokens} tokens, and this server holds at most {limit.tokens} of one client at once. Lower "
                "max_tokens or n, or send several smaller requests.",
                "max_tokens",
                "too_many_tokens",
            )
        room = self._available(self.in_flight, self._in_flight[client])
        if not need.fits(room):
            wait = self._estimated_wait_s(need - room)
            raise ApiError(
                429,
                f"the queue is full: this request needs {need}, and there is room for {room}. Try again in {wait} s.",
                code="queue_full",
                retry_after_s=wait,
            )

    def _available(self, in_flight: Reservation, own: Reservation) -> Reservation:
        """Return how much a client may add.

        Args:
            in_flight: needs of all clients' requests in flight.
            own: needs of this client's requests in flight.
        """
        free = self.limit - in_flight
        if not self._is_shared:
            return free
        # own + x <= MAX_SHARE * (free - x), solved for x
        sequences = (MAX_SHARE * free.sequences - own.sequences) // (MAX_SHARE + 1)
        tokens = (MAX_SHARE * free.tokens - own.tokens) // (MAX_SHARE + 1)
        if own == Reservation():
            sequences = max(sequences, min(1, free.sequences))
            tokens = max(tokens, min(self._longest, free.tokens))
        return Reservation(max(0, sequences), max(0, tokens))

    def _estimated_wait_s(self, missing: Reservation) -> int:
        """Return the seconds until this much is free, if requests keep ending as fast as recently."""
        if not self._releases:
            return 1
        seconds = time.monotonic() - self._releases[0][0]
        released = sum((need for _, need in self._releases), Reservation())
        waits = [
            seconds * lacking / max(1, gone)
            for lacking, gone in (
                (missing.sequences, released.sequences),
                (missing.tokens, released.tokens),
            )
        ]
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(max(waits))))


class IdleSlots:
    """Gives lines of batches the slots that interactive requests leave free. Use it on one event loop.

    A line may run for minutes, and an interactive request must find a slot at once. So a line
    starts only if it and all admitted requests fit into the slots that are not reserved. Lines wait
    for interactive requests, and interactive requests never wait for lines.

    Args:
        admission: counter of the requests in flight.
        num_slots: slots of the engine.
    """

    def __init__(self, admission: Admission, num_slots: int):
        self._admission, self._num_slots = admission, num_slots - num_reserved(num_slots)
        self._waiting: deque[object] = deque()  # lines in the order in which they came

    async def wait(self, need: Reservation) -> None:
        """Wait until a line fits. The caller must admit it before its next await."""
        line = object()
        self._waiting.append(line)
        try:
            while self._waiting[0] is not line or not self._fits(need):
                await asyncio.sleep(SLOT_POLL_S)
        finally:
            self._waiting.remove(line)

    def _fits(self, need: Reservation) -> bool:
        """Return whether slots are free for the line. A line with more sequences than slots needs an idle replica."""
        in_flight = self._admission.in_flight.sequences
        return in_flight == 0 or in_flight + need.sequences <= self._num_slots


@dataclass(slots=True)
class QueueTurn:
    """A sequence's turn at the engine.

    Attributes:
        used: tokens that the sequence has used.
    """

    used: int


class FairQueue:
    """A queue that gives clients turns at the engine by the tokens that each was served. Use it on one event loop.

    Args:
        num_clients: number of clients.
        max_turns: maximum number of sequences at the engine.
        num_reserved: turns that only a client without a turn may take.
    """

    def __init__(self, num_clients: int, max_turns: int, num_reserved: int = 0):
        self.num_free = max_turns
        self._num_reserved = num_reserved
        self._num_turns = [0] * num_clients  # sequences at the engine, by client
        self._served = [0] * num_clients  # tokens, per client
        # Tokens that the sequences at the engine may take, per client.
        self._reserved = [0] * num_clients
        # Tokens of each waiting sequence, oldest first.
        self._waiting: list[dict[asyncio.Future[None], int]] = [{} for _ in range(num_clients)]
        self._last_served = 0  # the counter of the client that was last given a place

    @asynccontextmanager
    async def turn(self, client: int, tokens: int) -> AsyncIterator[QueueTurn]:
        """Wait for a turn, and hold it while the block runs.

        Args:
            client: number of the client.
            tokens: maximum tokens that the sequence may use.
        """
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
        self._num_turns[client] -= 1
        self.num_free += 1
        self._dispatch()

    def _catch_up(self, client: int) -> None:
        """Raise the counter of a client that was idle. Time without requests earns no credit.

        Only used tokens count for an idle client. Reserved tokens do not: a client that reserves
        many and uses few would delay later clients.
        """
        if not self._waiting[client] and not self._reserved[client]:
            others = [self._served[i] for i, waiting in enumerate(self._waiting) if waiting]
            self._served[client] = max(self._served[client], min(others, default=self._last_served))

    def _dispatch(self) -> None:
        """Give free turns to the clients that were served the fewest tokens."""
        while (client := self._next_client()) is not None:
            place = next(iter(self._waiting[client]))
            tokens = self._waiting[client].pop(place)
            if place.done():  # cancelled, and its task has not run since
                continue
            self._last_served = self._served[client]
            self._reserved[client] += tokens
            self._num_turns[client] += 1
            self.num_free -= 1
            place.set_result(None)

    def _next_client(self) -> int | None:
        """Return the client that gets the next free turn; None if no client may take one."""
        if not self.num_free:
            return None
        waiting = [client for client, queue in enumerate(self._waiting) if queue]
        if self.num_free <= self._num_reserved:
            waiting = [client for client in waiting if not self._num_turns[client]]
        return min(waiting, key=self._served_tokens, default=None)

    def _served_tokens(self, client: int) -> int:
        return self._served[client] + self._reserved[client]
