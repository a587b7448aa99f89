"""ReplicaClient: let the endpoint's replicas answer lines of batches, and retry a line whose replica died.

Attempts are counted as in jobs (``port/attempts.py``). A line whose replica died is sent again
while no other line is in flight. After MAX_LOST dead replicas, the line's answer is the error
worker_died. Other lines that were in flight with it are answered.

    client = ReplicaClient(respond, window=16)
    attempt = await client.answer(record, "line 1", {"prompt": "Hi"})
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from eagle_ray.batch.worker.crash_isolation import WORKER_DIED
from eagle_ray.core.json_text import dump_json
from eagle_ray.core.shared_lock import SharedExclusiveLock
from eagle_ray.port.attempts import UNLIMITED, Failures, ask_until_answered
from eagle_ray.port.endpoint_answers import LIMITED, Failed
from eagle_ray.port.spend import Attempt
from eagle_ray.port.throttle import AttemptOutcome, Demand, Permit, Throttle, ThrottleSettings
from eagle_ray.requests.answers import RESPONSES, line_key
from eagle_ray.requests.responses import RESPONSE_LENGTH
from eagle_ray.serve.batches.batch_models import BatchRecord
from eagle_ray.serve.batches.line_answers import error_answer, response_answer

log = logging.getLogger("eagle_ray")
Respond = Callable[[str, str, bytes], Awaitable[tuple[int, bytes]]]
"""Answer (owner, endpoint, body) with a status and a body. Raises ReplicaLost if a replica dies in the middle."""
MAX_LOST = 3  # replicas: one with other lines in flight, then two alone
AFTER_LOSS_S = 2.0  # seconds until Serve sends nothing more to a replica that has died
TRY_AGAIN = (408, 429, 503)  # statuses that say nothing about a line
TRY_AGAIN_AFTER_S = 0.5
BUDGETS = {LIMITED: UNLIMITED, WORKER_DIED: MAX_LOST}


class ReplicaLost(Exception):
    """The replica that was answering a line has died."""


class ReplicaClient:
    """Answers lines of all batches of this process.

    Args:
        respond: coroutine function by which a replica answers a line.
        window: maximum number of lines in flight.
    """

    def __init__(self, respond: Respond, window: int):
        self._respond = respond
        self._throttle = Throttle(ThrottleSettings(concurrency=window, timeout_s=math.inf))
        self._isolation = SharedExclusiveLock()

    async def answer(self, record: BatchRecord, custom_id: str, body: dict[str, Any]) -> Attempt:
        """Return the answer to one line. It waits as long as the replicas are busy or absent."""
        if body.get("seed") is None:
            body = body | {"seed": line_seed(record.id, custom_id)}
        data = dump_json(body, ensure_ascii=False).encode()
        failures = Failures(BUDGETS)

        async def send(permit: Permit) -> Attempt | Failed:
            is_alone = failures.num_by_kind[WORKER_DIED] > 0
            return await self._send(record, custom_id, data, permit, is_alone)

        wait = partial(_wait_for_next, failures)
        try:
            return await ask_until_answered(self._throttle, Demand(), send, wait)
        except Failed as failed:
            length = RESPONSE_LENGTH if record.endpoint == RESPONSES else "max_tokens"
            message = (
                f"{failures.num_by_kind[failed.kind]} replicas died while they answered this line. Shorten its "
                f"prompt or {length}."
            )
            return error_answer(record.id, custom_id, failed.kind, message)

    async def _send(
        self, record: BatchRecord, custom_id: str, data: bytes, permit: Permit, is_alone: bool
    ) -> Attempt | Failed:
        """Send a line once, and release its permit.

        Args:
            record: batch of the line.
            custom_id: id that the client gave the line.
            data: body of the line, as JSON.
            permit: permit of the throttle.
            is_alone: whether no other line may be in flight.
        """
        try:
            async with self._isolation.exclusive() if is_alone else self._isolation.shared():
                status, response = await self._respond(record.owner, record.endpoint, data)
        except ReplicaLost as error:
            log.warning(
                "batch %s: the replica that answered %r has died: %s", record.id, custom_id, error
            )
            return Failed(WORKER_DIED, str(error))
        finally:
            await self._throttle.release(permit, AttemptOutcome(is_good=False))
        if status in TRY_AGAIN:
            return Failed(LIMITED, f"status {status}")
        return response_answer(record.id, custom_id, status, response)


async def _wait_for_next(failures: Failures, failed: Failed) -> None:
    """Wait until a line may be sent again. Raises Failed if too many replicas have died while answering it."""
    is_last = failures.is_last(failed)
    if failed.kind == WORKER_DIED:
        await asyncio.sleep(AFTER_LOSS_S)
    if is_last:
        raise failed
    if failed.kind == LIMITED:
        await asyncio.sleep(TRY_AGAIN_AFTER_S)


def line_seed(batch_id: str, custom_id: str) -> int:
    """Return the seed of a line that sets none. It depends on the ids alone, so a second run samples equally."""
    return int(line_key(batch_id, custom_id)[:15], 16)
