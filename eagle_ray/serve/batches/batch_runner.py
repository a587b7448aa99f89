"""BatchRunner: run every open batch as a BatchJob in its own thread. A ReplicaClient answers the lines.

A batch that is not over has a run (``runs/run.py``). Once a second, a runner looks for such batches
and acquires the lease of each that no process holds. So a restarted server continues the batches of
a killed one (``batch_job``).

    runner = BatchRunner(store, limits, answer, window=16)
    await runner.run()
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from eagle_ray.config.serve import BatchesConfig
from eagle_ray.runs.lease import Lease
from eagle_ray.serve.batches.batch_job import BatchJob, BatchStopped
from eagle_ray.serve.batches.batch_models import made_at
from eagle_ray.serve.batches.batch_store import BatchStore
from eagle_ray.serve.batches.replica_client import ReplicaClient, Respond

log = logging.getLogger("eagle_ray")
LOOK_EVERY_S = 1.0
RETRY_AFTER_ERROR_S = 10.0
SWEEP_EVERY_S = 600.0
UPLOAD_WITHIN_S = 86_400.0  # an upload that has not ended after so long was killed


class BatchRunner:
    """Runs batches until its task is cancelled.

    Args:
        store: store of files and batches.
        limits: limits of batches.
        respond: coroutine function by which a replica answers a line.
        window: maximum number of lines in flight, of all batches together.
        knows: function that returns whether an owner's key is still accepted. Batches of other
            owners wait until they expire.
    """

    def __init__(
        self,
        store: BatchStore,
        limits: BatchesConfig,
        respond: Respond,
        window: int,
        knows: Callable[[str], bool] = lambda owner: True,
    ):
        self.store, self.limits, self._knows = store, limits, knows
        self.window = window  # maximum number of lines in flight
        self._client = ReplicaClient(respond, window)
        self._leases: dict[str, Lease] = {}
        self._jobs: dict[str, tuple[BatchJob, threading.Thread]] = {}
        # Monotonic time of the next try, by batch whose last try failed.
        self._not_before: dict[str, float] = {}
        self._swept_at = -SWEEP_EVERY_S

    async def run(self) -> None:
        """Run forever. If storage fails, log the error and try again."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    await asyncio.to_thread(self._look, loop)
                except OSError as error:
                    log.warning("batches: %s", error)
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        """End all jobs and release their leases. The batches stay open."""
        jobs = list(self._jobs.values())
        for job, _ in jobs:
            job.stop()
        for _, thread in jobs:
            thread.join()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start every open batch that no process runs, and delete expired files at intervals."""
        open_ids = self.store.open_ids()
        for owner, id in open_ids:
            if id not in self._jobs and time.monotonic() >= self._not_before.get(id, 0.0):
                self._begin(owner, id, loop)
        known = {id for _, id in open_ids}
        self._leases = {
            id: lease for id, lease in self._leases.items() if id in known or id in self._jobs
        }
        if time.monotonic() - self._swept_at > SWEEP_EVERY_S:
            self._swept_at = time.monotonic()
            sweep(self.store)

    def _begin(self, owner: str, id: str, loop: asyncio.AbstractEventLoop) -> None:
        record = self.store.find(owner, id)
        if record is None or (not self._knows(owner) and time.time() < record.expires_at):
            return
        lease = self._leases.setdefault(id, Lease.of(self.store.work(owner, id)))
        if not lease.try_take():
            return
        job = BatchJob(self.store, self.limits, self.window, self._client.answer, loop, lease)
        lease.on_loss = job.stop
        thread = threading.Thread(target=self._run_job, args=(job, owner, id), daemon=True)
        self._jobs[id] = job, thread
        thread.start()

    def _run_job(self, job: BatchJob, owner: str, id: str) -> None:
        """Run one batch to its end. If it fails for another reason than a stop, try again later."""
        try:
            job.run(owner, id)
        except Exception as error:
            if job.lease.lost is not None:
                log.warning("batch %s: %s", id, job.lease.lost)
            elif not isinstance(error, BatchStopped):
                self._not_before[id] = time.monotonic() + RETRY_AFTER_ERROR_S
                log.exception(
                    "batch %s: stopped, and tried again in %g s: %s", id, RETRY_AFTER_ERROR_S, error
                )
        finally:
            del self._jobs[id]


def sweep(store: BatchStore) -> None:
    """Delete expired files that no open batch reads, and what killed uploads and runners left."""
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
