"""Reports of a thousand workers to the ProgressActor: python -m jobs.bench.progress_actor [WORKERS]

Two Ray tasks play the workers: each begins batches of 64 rows and finishes them at once. The CPU seconds of the actor's
process, once with the three calls a batch that its begin, its end and the totals take, and once with a worker's own
client, which sends them as one call. On stdout.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
import time

import ray
from ray.actor import ActorHandle

from eagle_ray.batch.worker.actor import ProgressClient
from eagle_ray.batch.worker.progress import WORK_COUNTERS, ProgressActor, WorkerReport

ROWS_PER_BATCH = 64
BATCHES = 5  # of each worker
CALLERS = 2


class TimedActor(ProgressActor):
    """A ProgressActor that tells its process's CPU seconds."""

    def cpu_s(self) -> float:
        return time.process_time()


def main() -> None:
    num_workers = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    own = {"address": "local", "_node_ip_address": "127.0.0.1"}  # no cluster that happens to run here
    ray.init(num_cpus=CALLERS, include_dashboard=False, object_store_memory=100 << 20, **own)
    print("| calls a batch | batches | ms of the actor's CPU a batch | batches/s of one core |\n|---|---|---|---|")
    for name, batches_of in (("3", _three_calls), ("1", _one_call)):
        actor = ray.remote(num_cpus=0)(TimedActor).remote(num_workers)
        before = ray.get(actor.cpu_s.remote())
        task = ray.remote(num_cpus=1)(batches_of)
        ray.get([task.remote(actor, i, num_workers // CALLERS) for i in range(CALLERS)])
        each = (ray.get(actor.cpu_s.remote()) - before) / (num_workers * BATCHES)
        progress = ray.get(actor.snapshot.remote())
        assert progress.rows == num_workers * BATCHES * ROWS_PER_BATCH, progress.rows
        print(f"| {name} | {num_workers * BATCHES:,} | {1e3 * each:.3f} | {1 / each:,.0f} |", flush=True)
    print(f"snapshot: {len(pickle.dumps(progress)):,} bytes")
    ray.shutdown()


def _ids(worker: str, batch: int) -> list[str]:
    return [f"row-{worker}-{batch}-{i}" for i in range(ROWS_PER_BATCH)]


def _report(worker: str, batch: int) -> WorkerReport:
    work = dict.fromkeys(WORK_COUNTERS, 1)
    return WorkerReport(f"host:{worker}", 1, 1, 1.0, work, rows=ROWS_PER_BATCH * (batch + 1))


def _three_calls(actor: ActorHandle, caller: int, num_workers: int) -> None:
    for batch in range(BATCHES):
        for i in range(num_workers):
            worker = f"{caller}-{i}"
            ray.get(actor.begin.remote(worker, _ids(worker, batch)))
            actor.update.remote(worker, _ids(worker, batch), None)
            actor.report.remote(_report(worker, batch))


async def _client_batches(actor: ActorHandle, caller: int, num_workers: int) -> None:
    clients = {f"{caller}-{i}": ProgressClient(actor, f"{caller}-{i}") for i in range(num_workers)}
    for batch in range(BATCHES):
        for worker, client in clients.items():
            await client.begin(_ids(worker, batch))
            client.finish(_ids(worker, batch))
            client.report(_report(worker, batch))
    for client in clients.values():
        client.flush()


def _one_call(actor: ActorHandle, caller: int, num_workers: int) -> None:
    asyncio.run(_client_batches(actor, caller, num_workers))


if __name__ == "__main__":
    main()
