"""BatchJob: run one batch of the endpoint as a job.

A thread holds the lease, claims the run, and answers the lines that have no answer yet:

    validate the lines -> answer those that have no answer -> write the output file and the error file

Answers of a killed process are in the run's files (``line_answers``). The way in which a batch ends
is decided once and stored in its record. A process that takes the batch over then ends it in that
way.

    BatchJob(store, limits, window, answer, loop, lease).run("all", "batch_...")
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import closing
from itertools import islice
from typing import Any

from eagle_ray.config.records import RunRecord
from eagle_ray.config.serve import BatchesConfig
from eagle_ray.port.spend import ANSWERED, Attempt, SpendLog, StoredAnswers
from eagle_ray.runs.lease import Lease
from eagle_ray.runs.process_identity import process_name
from eagle_ray.runs.run import Run
from eagle_ray.serve.batches.batch_input import CheckedLines, check_lines, read_lines
from eagle_ray.serve.batches.batch_models import BatchRecord, Ending, RequestCounts
from eagle_ray.serve.batches.batch_store import BATCHES_PATH_KEY, BatchStore
from eagle_ray.serve.batches.line_answers import error_answer, file_lines, read_answers

log = logging.getLogger("eagle_ray")
Line = tuple[str, dict[str, Any]]  # custom_id and body
AnswerLine = Callable[[BatchRecord, str, dict[str, Any]], Coroutine[Any, Any, Attempt]]
BATCH_POLL_S = 1.0
CANCEL_WITHIN_S = 30.0
ENDINGS: dict[Ending, tuple[str, str]] = {
    "expired": ("batch_expired", "the line was not answered within the batch's completion_window"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before the line was answered"),
}


class BatchStopped(Exception):
    """This process must do no more for the batch."""


class BatchJob:
    """One batch while this process holds its lease. All methods except `stop` block.

    Args:
        store: store of files and batches.
        limits: limits of batches.
        window: maximum number of this batch's lines in flight.
        answer: coroutine function that answers one line. It runs in `loop`.
        loop: event loop of the process.
        lease: lease of the batch, which this process holds.
    """

    def __init__(
        self,
        store: BatchStore,
        limits: BatchesConfig,
        window: int,
        answer: AnswerLine,
        loop: asyncio.AbstractEventLoop,
        lease: Lease,
    ):
        self.lease = lease
        self._store, self._limits, self._window = store, limits, window
        self._answer, self._loop = answer, loop
        self._in_flight: set[Future[Attempt]] = set()
        # Lines that were asked for and have ended; None: the job is to stop.
        self._ended: queue.SimpleQueue[Future[Attempt] | None] = queue.SimpleQueue()
        # Of the claim.
        self._record: BatchRecord
        self._run: Run
        self._log: SpendLog
        self._stored: StoredAnswers

    def stop(self) -> None:
        """Let `run` raise BatchStopped."""
        self._ended.put(None)

    def run(self, owner: str, id: str) -> None:
        """Complete the batch, and release the lease.

        Raises OSError, BatchStopped, and JobError if another process has taken the batch over.
        """
        try:
            # The last holder may have changed it, so it is read again.
            record = self._store.find(owner, id)
            if record is not None and not record.is_over:
                self._claim(record)
        finally:
            self.lease.release()
        if record is not None:
            self._store.close(owner, id)

    def _claim(self, record: BatchRecord) -> None:
        state = Run.inspect(self.lease.output, RunRecord)
        attempts = state.manifest["attempts"][-1:] if state.manifest else []
        facts = {"name": record.id, "attempts": attempts}
        with (
            Run.claim(self.lease, state, facts, key=BATCHES_PATH_KEY) as self._run,
            closing(SpendLog(self._run, process_name(os.getpid()))) as self._log,
        ):
            self._record = record
            self._stored = read_answers(self._run, self._log)
            self._finish()

    def _finish(self) -> None:
        if self._record.status == "validating" and not self._validate():
            return
        if self._record.status == "in_progress":
            self._finalize(self._record.ending or self._answer_lines())
        self._end()

    def _validate(self) -> bool:
        """Check the input file, and store its errors. Return whether it has none."""
        try:
            checked = check_lines(self._input(), self._record.endpoint, self._limits.max_lines)
        except FileNotFoundError as error:
            checked = CheckedLines()
            checked.add("file_not_found", str(error), "input_file_id")
        counts = RequestCounts(total=checked.total, completed=0, failed=0)
        self._record = self._record.changed(request_counts=counts)
        if checked.errors:
            errors = {"object": "list", "data": checked.errors}
            self._save(self._record.moved("failed", errors=errors))
            log.info("batch %s: failed: %s", self._record.id, checked.errors[0]["message"])
            return False
        self._save(self._record.moved("in_progress", model=checked.model))
        return True

    def _input(self) -> Iterator[bytes]:
        """Return the lines of the input file. Raises FileNotFoundError if it was deleted."""
        files = self._store.files(self._record.owner)
        file = files.find(self._record.input_file_id)
        if file is None:
            raise FileNotFoundError(f"the input file {self._record.input_file_id} was deleted")
        return files.lines(file)

    def _unanswered(self) -> Iterator[Line]:
        return (line for line in read_lines(self._input()) if line[0] not in self._stored)

    def _answer_lines(self) -> Ending:
        """Answer the lines that have no answer. Return how the batch ends, which may be early."""
        lines = self._unanswered()
        try:
            while (ending := self._early_ending()) is None:
                until = time.monotonic() + BATCH_POLL_S
                while (left_s := until - time.monotonic()) > 0:
                    self._ask(islice(lines, self._window - len(self._in_flight)))
                    if not self._in_flight:
                        return "completed"
                    self._take_ended(left_s)
                self._log.flush()
                if self._counts() != self._record.request_counts:
                    self._save(self._record)
            return ending
        finally:
            self._cancel_in_flight()

    def _ask(self, lines: Iterable[Line]) -> None:
        for id, body in lines:
            answer = self._answer(self._record, id, body)
            future = asyncio.run_coroutine_threadsafe(answer, self._loop)
            self._in_flight.add(future)
            future.add_done_callback(self._ended.put)

    def _take_ended(self, within_s: float) -> None:
        """Store the answer of the next line that ends. Raises BatchStopped, and the error of an answer.

        Args:
            within_s: seconds to wait at most.
        """
        try:
            future = self._ended.get(timeout=within_s)
        except queue.Empty:
            return
        if future is None:
            raise BatchStopped
        self._in_flight.discard(future)
        self._write([future.result()])

    def _cancel_in_flight(self) -> None:
        """Cancel the lines in flight, and store the answers that have arrived meanwhile."""
        for future in self._in_flight:
            future.cancel()
        ended, _ = wait(self._in_flight, CANCEL_WITHIN_S)
        answered = (future for future in ended if not future.cancelled())
        self._write(future.result() for future in answered if future.exception() is None)

    def _write(self, answers: Iterable[Attempt]) -> None:
        for answer in answers:
            if self._stored.add(answer):
                self._log.append(answer)

    def _reread(self) -> None:
        """Read the stored answers again. Of several answers to a line, the first one counts."""
        self._log.flush()
        self._stored = StoredAnswers(self._run)

    def _early_ending(self) -> Ending | None:
        """Return how the batch ends before its last line: cancelled or expired; None if it goes on."""
        if self._store.cancelling_at(self._record) is not None:
            return "cancelled"
        return "expired" if time.time() >= self._record.expires_at else None

    def _finalize(self, ending: Ending) -> None:
        """Store in the record how the batch ends."""
        self._reread()
        num_answered = len(self._stored)
        total = self._record.request_counts["total"]
        if ending == "completed" and num_answered != total:
            raise RuntimeError(f"{num_answered} of {total} lines have an answer")
        if ending == "cancelled":
            at = self._store.cancelling_at(self._record)
            self._record = self._record.changed(cancelling_at=at or int(time.time()))
        self._save(self._record.moved("finalizing", ending=ending))

    def _end(self) -> None:
        """Answer the remaining lines with the reason for the end, and write the two files."""
        ending = self._record.ending
        assert ending is not None
        if ending in ENDINGS:
            self._answer_the_rest(*ENDINGS[ending])
        files = self._write_files()
        self._save(self._record.moved(ending, **files))
        log.info(
            "batch %s: %s, %s", self._record.id, self._record.status, self._record.request_counts
        )

    def _answer_the_rest(self, code: str, message: str) -> None:
        batch_id = self._record.id
        self._write(error_answer(batch_id, id, code, message) for id, _ in self._unanswered())
        self._reread()

    def _write_files(self) -> dict[str, str]:
        """Write the output file and the error file, unless they have no lines. Return their ids."""
        record, counts = self._record, self._counts()
        written = {}
        if counts["completed"]:
            written["output_file_id"] = self._write_file("output", record.output_id)
        if counts["failed"]:
            written["error_file_id"] = self._write_file("error", record.error_id)
        return written

    def _write_file(self, kind: str, id: str) -> str:
        life = self._record.output_expires_after_s
        file = self._store.files(self._record.owner).write(
            file_lines(self._stored, is_completed=kind == "output"),
            f"{self._record.id}_{kind}.jsonl",
            "batch_output",
            None if life is None else int(time.time()) + life,
            id,
            self._run.check_current,
        )
        return file.id

    def _counts(self) -> RequestCounts:
        total = self._record.request_counts["total"]
        completed = self._stored.num_by_kind[ANSWERED]
        failed = len(self._stored) - completed
        return RequestCounts(total=total, completed=completed, failed=failed)

    def _save(self, record: BatchRecord) -> None:
        usage = self._stored.usage.batch_form()
        self._record = record.changed(request_counts=self._counts(), usage=usage)
        self._store.save(self._record, self._run)
