"""Servers of the endpoint's batches that are killed at random moments, and what must hold at the end.

    kill_servers("/tmp/kept", random.Random(1), num_kills=3)

A server here is usually a runner of batches without HTTP and engine, in a process of its own that
starts in half a second. It answers a line by what its prompt says, writes files in chunks of
CHUNK_BYTES and looks for work many times a second.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, contextmanager
from pathlib import Path

from eagle_ray.config.records import RunRecord
from eagle_ray.config.serve import BatchesConfig
from eagle_ray.port.spend import SpendLog
from eagle_ray.requests.answers import TokenUsage
from eagle_ray.runs import lease
from eagle_ray.runs.lease import hold
from eagle_ray.runs.run import Run
from eagle_ray.serve.batches import batch_job, batch_runner, file_store, replica_client
from eagle_ray.serve.batches.batch_models import BatchRecord
from eagle_ray.serve.batches.batch_runner import BatchRunner, sweep
from eagle_ray.serve.batches.batch_store import BatchStore
from eagle_ray.serve.batches.file_store import FileStore
from eagle_ray.serve.batches.line_answers import response_answer
from eagle_ray.serve.batches.replica_client import ReplicaLost

URL = "/v1/completions"
CHUNK_BYTES = 2000
NUM_LINES = 40
WRONG_EVERY = 7
LEASE_S = 1.0  # in a bucket
Server = subprocess.Popen[bytes]


def create_batch(store: BatchStore, name: str) -> str:
    """Store a file of NUM_LINES lines and a batch of it; return the batch's id."""
    lines = []
    for id in (f"{name} {i}" for i in range(NUM_LINES)):
        body = {"prompt": id, "max_tokens": 4} | ({"top_p": 7} if _is_wrong(id) else {})
        lines.append({"custom_id": id, "method": "POST", "url": URL, "body": body})
    data = "\n".join(map(json.dumps, lines)).encode()
    file = store.files("all").write([data], f"{name}.jsonl", "batch")
    asked = {"endpoint": URL, "input_file_id": file.id, "completion_window": "1d"}
    record = BatchRecord.new(86_400, owner="all", **asked)
    store.create(record, max_open=99)
    return record.id


def start_runner(path: str) -> Server:
    return subprocess.Popen([sys.executable, "-m", "tests.support.batches", path])


def kill_servers(
    path: str,
    choice: random.Random,
    num_kills: int,
    start: Callable[[str], Server] = start_runner,
    start_s: float = 0.5,
    num_batches: int = 4,
) -> None:
    """Run two servers on one store, kill one of them at random moments, start another, and check every batch's end.

    A client cancels one of the batches in the middle. In a bucket, some servers are not killed:
    they are stopped, for longer than a lease lasts, and go on.

    start: starts a server in a process. start_s: seconds until it begins to work, about.
    """
    store = BatchStore.open(path)
    ids, cancelled = [create_batch(store, name) for name in "abcdefghij"[:num_batches]], ""
    servers = [start(path) for _ in range(2)]
    try:
        for kill in range(num_kills):
            time.sleep(choice.uniform(0.0, 2 * start_s))
            victim = servers.pop(choice.randrange(2))
            if store.root.is_s3 and kill % 2:
                os.kill(victim.pid, signal.SIGSTOP)
                time.sleep(choice.uniform(0.0, 3 * LEASE_S))
                os.kill(victim.pid, signal.SIGCONT)
                servers.append(victim)
                continue
            os.kill(victim.pid, signal.SIGKILL)
            victim.wait()
            ids.append(create_batch(store, f"after kill {kill}"))
            if not cancelled and kill >= num_kills // 2:
                cancelled = ids[-1]
                store.cancel(store.get("all", cancelled))
            servers.append(start(path))
        _wait(lambda: not store.open_ids(), servers)
    finally:
        for server in servers:
            server.kill()
            server.wait()
    check_ends(store, ids, may_be_cancelled=cancelled)


def check_ends(store: BatchStore, ids: list[str], may_be_cancelled: str | None = None) -> None:
    """Check that every line of every batch stands once in its files, which are whole, and that nothing else is left."""
    files = store.files("all")
    for id in ids:
        record = store.get("all", id)
        assert record.status == "completed" or (
            record.status == "cancelled" and id == may_be_cancelled
        )
        shown, [done, failed] = record.as_json(), [{}, {}]
        for file_id, found in ((shown["output_file_id"], done), (shown["error_file_id"], failed)):
            data = b"".join(files.read(files.get(file_id))) if file_id else b""
            assert data.endswith(b"\n") or not file_id
            lines = [json.loads(line) for line in data.splitlines()]
            found |= {line["custom_id"]: line for line in lines}
            assert len(found) == len(lines) and (
                not file_id or files.get(file_id).bytes == len(data)
            )
        asked = [
            json.loads(line)["custom_id"] for line in files.lines(files.get(record.input_file_id))
        ]
        assert not done.keys() & failed.keys() and sorted(done.keys() | failed.keys()) == sorted(
            asked
        )
        counts = {"total": NUM_LINES, "completed": len(done), "failed": len(failed)}
        assert shown["request_counts"] == counts
        assert all(
            line["response"]["body"].get("text", id) == id for id, line in done.items()
        )  # without an engine
        usages = [TokenUsage.of_body(line["response"]["body"]) for line in done.values()]
        assert shown["usage"]["total_tokens"] == sum(
            usage.prompt + usage.output for usage in usages
        )
        if record.status == "completed":
            assert {id for id in asked if _is_wrong(id)} == failed.keys()
    sweep(
        store
    )  # a second server may have been killed while it looked at a batch that another one had just ended
    assert store.open_ids() == [] and files.unfinished_ids() == []
    assert [*(store.root / "all" / "work").glob("**/*")] == []


def _wait(condition: Callable[[], bool], servers: list[Server], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end and all(server.poll() is None for server in servers)
        time.sleep(0.2)


def _is_wrong(prompt: str) -> bool:
    return int(prompt.split()[-1]) % WRONG_EVERY == 0


async def _respond(owner: str, endpoint: str, body: bytes) -> tuple[int, bytes]:
    asked = json.loads(body)
    await asyncio.sleep(random.uniform(0.0, 0.04))
    if _is_wrong(asked["prompt"]):
        return 400, b'{"error": {"message": "no"}}'
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    return 200, json.dumps({"text": asked["prompt"], "usage": usage}).encode()


def shorten_runner_intervals(
    set_value: Callable[[object, str, float], None], in_bucket: bool = False
) -> None:
    """Make a runner look for work, flush and try again many times a second. set_value: setattr, or a test's own.

    in_bucket: fewer times, as each look at a bucket is several requests.
    """
    seconds = 0.1 if in_bucket else 0.02
    for name in ("LOOK_EVERY_S", "RETRY_AFTER_ERROR_S"):
        set_value(batch_runner, name, seconds)
    for name in ("TRY_AGAIN_AFTER_S", "AFTER_LOSS_S"):
        set_value(replica_client, name, seconds)
    set_value(batch_job, "BATCH_POLL_S", seconds)
    set_value(file_store, "UPLOAD_CHUNK_BYTES", CHUNK_BYTES)
    for name, seconds in {
        "LEASE_S": LEASE_S,
        "SELF_FENCE_S": 0.7,
        "HEARTBEAT_S": 0.2,
        "LEASE_POLL_S": 0.1,
    }.items():
        set_value(lease, name, seconds)


if __name__ == "__main__":
    shorten_runner_intervals(setattr, sys.argv[1].startswith("s3://"))
    asyncio.run(
        BatchRunner(BatchStore.open(sys.argv[1]), BatchesConfig(), _respond, window=4).run()
    )


class Replicas:
    """What answers: a prompt's text says how. Counts how often each prompt was begun."""

    def __init__(self, seconds=0.0):
        self.seconds, self.begun, self.seeds, self.now = seconds, {}, {}, 0
        self.most = 0

    async def respond(self, owner, endpoint, body):
        asked = json.loads(body)
        prompt = asked["prompt"]
        self.begun[prompt] = self.begun.get(prompt, 0) + 1
        self.seeds.setdefault(prompt, set()).add(asked["seed"])
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.seconds)
            if prompt == "kill":
                raise ReplicaLost("killed")
            if prompt == "fault":
                raise RuntimeError("a bug")
            if prompt == "busy" and self.begun[prompt] < 4:
                return 429, b"{}"
            if prompt == "wrong":
                return 400, b'{"error": {"message": "no"}}'
            usage = {
                "prompt_tokens": 2,
                "completion_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 1},
            }
            return 200, json.dumps({"text": prompt, "usage": usage}).encode()
        finally:
            self.now -= 1


def submit_batch(store, prompts, window_s=60, owner="all", **changes):
    lines = [
        {"custom_id": f"{i}", "method": "POST", "url": URL, "body": {"prompt": prompt}} | changes
        for i, prompt in enumerate(prompts)
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    file = store.files(owner).write([data], "in.jsonl", "batch")
    asked = {"endpoint": URL, "input_file_id": file.id, "completion_window": f"{window_s}s"}
    record = BatchRecord.new(window_s, owner=owner, **asked)
    store.create(record, max_open=9)
    return record


def runner_of(store, replicas, window=4, max_lines=1000, **more):
    return BatchRunner(store, BatchesConfig(max_lines=max_lines), replicas.respond, window, **more)


async def run_until(runner, condition, seconds=120.0, poll_s=0.01):
    """Run the runner until the condition holds, then end it as a shutdown does. poll_s: from look to look."""
    running, end = asyncio.ensure_future(runner.run()), time.monotonic() + seconds
    try:
        while not condition():
            assert time.monotonic() < end and not running.done()
            await asyncio.sleep(poll_s)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def finish(store, runner, *batches):
    """Run the batches to their ends; return their records."""
    ids = {batch.id for batch in batches}
    poll_s = 0.1 if store.root.is_s3 else 0.01
    asyncio.run(
        run_until(runner, lambda: not ids & {id for _, id in store.open_ids()}, poll_s=poll_s)
    )
    return [store.find(batch.owner, batch.id) for batch in batches]


def lines_in(store, record, id):
    files = FileStore(store.root, record.owner)
    file = files.find(id)
    return [json.loads(line) for line in files.lines(file)] if file else []


def batch_outcome(store, record):
    """The ids of the output file and of the error file; together every id once."""
    done, failed = (
        lines_in(store, record, record.output_id),
        lines_in(store, record, record.error_id),
    )
    ids = sorted(line["custom_id"] for line in done + failed)
    assert ids == sorted(set(ids))
    assert record.request_counts == {
        "total": len(ids),
        "completed": len(done),
        "failed": len(failed),
    }
    return done, failed


def num_completed(store, batch):
    return store.find(batch.owner, batch.id).request_counts["completed"]


OLD = Path(__file__).parents[1] / "goldens" / "batch_store" / "store"


def answer(id, status=200, usage=(3, 4)):
    details = {
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    counts = {"prompt_tokens": usage[0], "completion_tokens": usage[1]} | details
    body = {"usage": counts} if status == 200 else {"error": {}}
    return response_answer("batch_1", id, status, json.dumps(body).encode())


@contextmanager
def claimed(directory):
    """A run in the directory."""
    with hold(directory) as lease, Run.claim(lease, Run.inspect(directory, RunRecord), {}) as run:
        yield run


def write(run, *answers, worker="w"):
    """Write answers as a process of the run does."""
    with closing(SpendLog(run, worker)) as log:
        for each in answers:
            log.append(each)
