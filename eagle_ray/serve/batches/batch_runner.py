"""BatchRunner: answer the lines of all open batches, and complete each batch.

A batch that is not over has a run (``runs/run.py``). A runner looks for such batches once a second
and takes the lease of each that no process holds, so a restarted server goes on with what a killed
one left. Answers are in the run's parts (``batch_store``), each of which is complete or absent. The
runner answers the lines that have none there, and at the end splits the parts into the output file
and the error file.

A line whose replica dies is answered again while no other line is in flight. If MAX_LOST replicas
have died, the line becomes the error worker_died. The lines that were in flight with it are
answered.

    runner = BatchRunner(store, limits, answer, window=16)
    await runner.run()
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from eagle_ray.batch.worker.crash_isolation import WORKER_DIED, SharedExclusiveLock
from eagle_ray.config.records import RunRecord
from eagle_ray.config.serve import BatchesConfig
from eagle_ray.core.json_text import dump_json
from eagle_ray.runs.lease import Lease
from eagle_ray.runs.run import Run
from eagle_ray.serve.batches.batch_input import CheckedLines, check_lines, read_lines
from eagle_ray.serve.batches.batch_models import BatchRecord, Ending, RequestCounts, made_at
from eagle_ray.serve.batches.batch_store import (
    AnswerLog,
    BatchStore,
    LineAnswer,
    error_answer,
    line_seed,
    response_answer,
)

log = logging.getLogger("eagle_ray")
Line = tuple[str, dict[str, Any]]  # custom_id and body
Respond = Callable[[str, str, bytes], Awaitable[tuple[int, bytes]]]
"""Answer (owner, endpoint, body) with a status and a body. Raises ReplicaLost if a replica dies in the middle."""
BATCH_POLL_S = 1.0
ANSWER_LOG_S = 2.0  # an answer is in the log after so long: what a kill may cost
FLUSH_BYTES = 4 << 20
RETRY_AFTER_ERROR_S = 10.0
LINES_AT_ONCE = 64  # lines that are read at once
MAX_LOST = 3  # replicas: one with other lines in flight, then two alone
AFTER_LOSS_S = 2.0  # seconds until Serve sends nothing more to a replica that has died
TRY_AGAIN = (408, 429, 503)  # statuses that say nothing about a line
TRY_AGAIN_AFTER_S = 0.5
SWEEP_EVERY_S = 600.0
UPLOAD_WITHIN_S = 86_400.0  # an upload that has not ended after so long was killed
ENDINGS: dict[Ending, tuple[str, str]] = {
    "expired": ("batch_expired", "the line was not answered within the batch's completion_window"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before the line was answered"),
}


class ReplicaLost(Exception):
    """The replica that had the line has died."""


class BatchRunner:
    """Runs batches until its task is cancelled.

    Args:
        knows: whether an owner's key is still accepted. Batches of others wait, and expire.
        window: lines in flight together, of all batches.
    """

    def __init__(
        self,
        store: BatchStore,
        limits: BatchesConfig,
        respond: Respond,
        window: int,
        knows: Callable[[str], bool] = lambda owner: True,
    ):
        self.store, self.limits, self._respond, self._knows = store, limits, respond, knows
        self.window = window  # maximum number of lines in flight
        self.slots = asyncio.Semaphore(window)
        self._isolation = SharedExclusiveLock()
        self._leases: dict[str, Lease] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Monotonic time of the next try, by batch whose last try failed.
        self._not_before: dict[str, float] = {}
        self._swept_at = -SWEEP_EVERY_S

    async def run(self) -> None:
        """Run forever. Errors of storage are logged, and tried again."""
        try:
            while True:
                try:
                    await self.look()
                except OSError as error:
                    log.warning("batches: %s", error)
                await asyncio.sleep(BATCH_POLL_S)
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Cancel the tasks and release the leases. The batches stay open."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def look(self) -> None:
        """Begin every open batch that no process runs, and delete what has expired."""
        open_ids = await asyncio.to_thread(self.store.open_ids)
        for owner, id in open_ids:
            if id not in self._tasks and time.monotonic() >= self._not_before.get(id, 0.0):
                await self._begin(owner, id)
        known = {id for _, id in open_ids}
        self._leases = {
            id: lease for id, lease in self._leases.items() if id in known or id in self._tasks
        }
        if time.monotonic() - self._swept_at > SWEEP_EVERY_S:
            self._swept_at = time.monotonic()
            await asyncio.to_thread(sweep, self.store)

    async def _begin(self, owner: str, id: str) -> None:
        record = await asyncio.to_thread(self.store.find, owner, id)
        if record is None or (not self._knows(owner) and time.time() < record.expires_at):
            return
        lease = self._leases.setdefault(id, Lease.of(self.store.work(owner, id)))
        if not await asyncio.to_thread(lease.try_take):
            return

        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(self._run_batch(owner, id, lease))

        def cancel() -> None:
            loop.call_soon_threadsafe(task.cancel)

        lease.on_loss = cancel
        self._tasks[id] = task
        task.add_done_callback(lambda _: self._tasks.pop(id, None))

    async def _run_batch(self, owner: str, id: str, lease: Lease) -> None:
        """Run one batch to its end, or until it fails for a reason that is not its own."""
        try:
            try:
                is_over = await self._attempt(owner, id, lease)
            finally:  # also if this task is cancelled while no thread is free
                await asyncio.shield(
                    asyncio.get_running_loop().run_in_executor(None, lease.release)
                )
            if is_over:
                await asyncio.to_thread(self.store.close, owner, id)
        except asyncio.CancelledError:
            if lease.lost is None:
                raise
            log.warning("batch %s: %s", id, lease.lost)
        except Exception as error:
            self._not_before[id] = time.monotonic() + RETRY_AFTER_ERROR_S
            log.exception(
                "batch %s: stopped, and tried again in %g s: %s", id, RETRY_AFTER_ERROR_S, error
            )

    async def _attempt(self, owner: str, id: str, lease: Lease) -> bool:
        """Run a batch to its end if it is still open. Return whether it was."""
        # The last holder may have changed it, so it is read again.
        record = await asyncio.to_thread(self.store.find, owner, id)
        if record is not None and not record.is_over:
            state = await asyncio.to_thread(Run.inspect, lease.output, RunRecord)
            facts = {
                "name": id,
                "attempts": state.manifest["attempts"][-1:] if state.manifest else [],
            }
            claim = Run.claim(lease, state, facts, key="serving.batches.path")
            run = await asyncio.to_thread(claim.__enter__)
            try:
                await RunningBatch(self, record, run).finish()
            finally:
                await asyncio.to_thread(claim.__exit__, *sys.exc_info())
        return record is not None

    async def answer(self, record: BatchRecord, custom_id: str, body: dict[str, Any]) -> LineAnswer:
        """Return the answer of one line, however long the replicas are busy or away."""
        if "seed" not in body or body["seed"] is None:
            body = body | {"seed": line_seed(record.id, custom_id)}
        data = dump_json(body, ensure_ascii=False).encode()
        num_lost = 0
        while num_lost < MAX_LOST:
            try:
                async with self._isolation.exclusive() if num_lost else self._isolation.shared():
                    status, response = await self._respond(record.owner, record.endpoint, data)
            except ReplicaLost as error:
                num_lost += 1
                log.warning(
                    "batch %s: the replica that answered %r has died: %s",
                    record.id,
                    custom_id,
                    error,
                )
                await asyncio.sleep(AFTER_LOSS_S)
                continue
            if status not in TRY_AGAIN:
                return response_answer(record.id, custom_id, status, response)
            await asyncio.sleep(TRY_AGAIN_AFTER_S)
        message = f"{num_lost} replicas died while they answered this line. Shorten its prompt or max_tokens."
        return error_answer(record.id, custom_id, WORKER_DIED, message)


@dataclass(slots=True)
class RunningBatch:
    """One batch while this process holds its lease."""

    runner: BatchRunner
    record: BatchRecord
    run: Run
    _log: AnswerLog = field(init=False)
    _lines: Iterator[Line] = field(init=False)  # that have no answer
    _block: list[Line] = field(default_factory=list)  # lines that were read ahead, in reverse order
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _new: list[LineAnswer] = field(default_factory=list)  # not in the log yet
    _flushed_at: float = 0.0

    def __post_init__(self) -> None:
        self._log = AnswerLog(self.run)

    async def finish(self) -> None:
        """Complete the batch. Raises OSError, and JobError if another process has taken it over."""
        if self.record.status == "validating" and not await self._validate():
            return
        await asyncio.to_thread(self._log.load)
        if self.record.status == "in_progress":
            await self._finalize(self.record.ending or await self._answer_lines())
        await self._end()

    async def _validate(self) -> bool:
        """Check the input file. Returns whether the batch is in progress now, and not failed."""
        expected = self.record.endpoint, self.runner.limits.max_lines
        try:
            checked = await asyncio.to_thread(lambda: check_lines(self._input(), *expected))
        except FileNotFoundError as error:
            checked = CheckedLines()
            checked.add("file_not_found", str(error), "input_file_id")
        self.record = self.record.changed(
            request_counts=RequestCounts(total=checked.total, completed=0, failed=0)
        )
        if checked.errors:
            await self._save(
                self.record.moved("failed", errors={"object": "list", "data": checked.errors})
            )
            log.info("batch %s: failed: %s", self.record.id, checked.errors[0]["message"])
            return False
        await self._save(self.record.moved("in_progress", model=checked.model))
        return True

    def _input(self) -> Iterator[bytes]:
        """Return the lines of the input file. Raises FileNotFoundError if it was deleted."""
        files = self.runner.store.files(self.record.owner)
        file = files.find(self.record.input_file_id)
        if file is None:
            raise FileNotFoundError(f"the input file {self.record.input_file_id} was deleted")
        return files.lines(file)

    async def _answer_lines(self) -> Ending:
        """Answer the lines that the log lacks. Returns how the batch ends: early if it expires or is cancelled."""
        if (ending := await self._early_ending()) is not None:
            return ending  # no line of it is begun
        self._lines = self._unanswered()
        tasks = [asyncio.ensure_future(self._answer_some()) for _ in range(self.runner.window)]
        pending = set(tasks)
        try:
            while pending and ending is None:
                await self._flush()
                done, pending = await asyncio.wait(
                    pending, timeout=BATCH_POLL_S, return_when=asyncio.FIRST_EXCEPTION
                )
                for task in done:
                    task.result()  # an error is no answer but a fault of this process
                ending = await self._early_ending()
            return ending or "completed"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer_some(self) -> None:
        """Answer lines one after another until none are left."""
        while (line := await self._next_line()) is not None:
            async with self.runner.slots:
                answer = await self.runner.answer(self.record, *line)
            self._new.append(answer)

    async def _next_line(self) -> Line | None:
        async with self._reading:
            if not self._block:
                self._block = await asyncio.to_thread(
                    lambda: list(islice(self._lines, LINES_AT_ONCE))
                )
                self._block.reverse()
            return self._block.pop() if self._block else None

    def _unanswered(self) -> Iterator[Line]:
        answered = set(self._log.answered)
        return ((id, body) for id, body in read_lines(self._input()) if id not in answered)

    async def _early_ending(self) -> Ending | None:
        """Return how the batch ends before its last line, if the client has cancelled it or it has expired."""
        if await asyncio.to_thread(self.runner.store.cancelling_at, self.record) is not None:
            return "cancelled"
        return "expired" if time.time() >= self.record.expires_at else None

    async def _flush(self, is_last: bool = False) -> None:
        """Put new answers into the log if it is time, and the counts into the record."""
        size = sum(len(answer.line) for answer in self._new)
        is_due = time.monotonic() - self._flushed_at >= ANSWER_LOG_S or size >= FLUSH_BYTES
        if not self._new or not (is_due or is_last):
            return
        new, self._new = self._new, []
        await asyncio.to_thread(self._log.append, new)
        self._flushed_at = time.monotonic()
        if not is_last:
            await self._save(self.record)

    async def _finalize(self, ending: Ending) -> None:
        """Record how the batch ends."""
        await self._flush(is_last=True)
        num_answered = len(self._log.answered)
        total = self.record.request_counts["total"]
        if ending == "completed" and num_answered != total:
            raise RuntimeError(f"{num_answered} of {total} lines have an answer")
        if ending == "cancelled":
            at = await asyncio.to_thread(self.runner.store.cancelling_at, self.record)
            self.record = self.record.changed(cancelling_at=at or int(time.time()))
        await self._save(self.record.moved("finalizing", ending=ending))

    async def _end(self) -> None:
        """Answer the lines that are left with how the batch ends, and split the log into two files."""
        assert self.record.ending is not None
        if self.record.ending in ENDINGS:
            await asyncio.to_thread(self._answer_the_rest, *ENDINGS[self.record.ending])
        files = await asyncio.to_thread(self._write_files)
        await self._save(self.record.moved(self.record.ending, **files))
        log.info("batch %s: %s, %s", self.record.id, self.record.status, self.record.request_counts)

    def _answer_the_rest(self, code: str, message: str) -> None:
        lines = self._unanswered()
        while block := [
            error_answer(self.record.id, id, code, message) for id, _ in islice(lines, 4096)
        ]:
            self._log.append(block)

    def _write_files(self) -> dict[str, str]:
        """Write the output file and the error file, each if it has lines; return their ids."""
        record, life, written = self.record, self.record.output_expires_after_s, {}
        expires_at = None if life is None else int(time.time()) + life
        for kind, id, is_completed in (
            ("output", record.output_id, True),
            ("error", record.error_id, False),
        ):
            if self._log.completed if is_completed else self._log.failed:
                name = f"{record.id}_{kind}.jsonl"
                files = self.runner.store.files(record.owner)
                files.write(
                    self._log.lines(is_completed),
                    name,
                    "batch_output",
                    expires_at,
                    id,
                    self.run.check_current,
                )
                written[f"{kind}_file_id"] = id
        return written

    async def _save(self, record: BatchRecord) -> None:
        counts = record.request_counts | {
            "completed": self._log.completed,
            "failed": self._log.failed,
        }
        self.record = record.changed(request_counts=counts, usage=self._log.usage.batch_form())
        await asyncio.to_thread(self.runner.store.save, self.record, self.run)


def sweep(store: BatchStore) -> None:
    """Delete expired files that no open batch reads, and the leftovers of killed uploads and runners."""
    for owner, id in store.open_ids():
        if store.find(owner, id) is None and time.time() - made_at(id) > UPLOAD_WITHIN_S:
            store.remove_open(owner, id)
    for owner in store.owners():
        records = [store.find(*pair) for pair in store.open_ids(owner)]
        in_use = {
            id
            for record in records
            if record
            for id in (record.input_file_id, record.output_id, record.error_id)
        }
        files = store.files(owner)
        for id in files.ids():
            file = files.find(id)
            if (
                file
                and file.expires_at is not None
                and file.expires_at <= time.time()
                and id not in in_use
            ):
                files.delete(id)
        for id in files.unfinished_ids():
            if time.time() - made_at(id) > UPLOAD_WITHIN_S and id not in in_use:
                files.discard(id)
        for id in store.closed_ids(owner):
            store.close(owner, id)
