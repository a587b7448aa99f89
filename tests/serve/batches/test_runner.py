"""The runner: every line answered once, whatever ends it, and every batch at its own end."""

import asyncio
import random
import time
from types import SimpleNamespace

import pytest

from eagle_ray.port.spend import SpendLog
from eagle_ray.requests.answers import TokenUsage
from eagle_ray.runs.lease import Lease
from eagle_ray.serve.batches import batch_job, file_store
from eagle_ray.serve.batches.batch_models import BatchRecord
from eagle_ray.serve.batches.batch_runner import sweep
from eagle_ray.serve.batches.batch_store import BatchStore
from eagle_ray.serve.batches.replica_client import ReplicaClient
from eagle_ray.storage.path import StoragePath
from tests.support.batches import (
    Replicas,
    batch_outcome,
    finish,
    kill_servers,
    num_completed,
    run_until,
    runner_of,
    shorten_runner_intervals,
    submit_batch,
)


@pytest.fixture
def store(tmp_path, monkeypatch):
    shorten_runner_intervals(monkeypatch.setattr)
    monkeypatch.setattr(file_store, "UPLOAD_CHUNK_BYTES", 1 << 20)
    return BatchStore(StoragePath.of(tmp_path / "kept"))


def times_of(record):
    """The statuses whose times are known."""
    return {
        name.removesuffix("_at")
        for name, value in record
        if name.endswith("_at") and value is not None
    }


def test_each_line_is_answered_once_and_failures_have_a_file(store):
    replicas = Replicas(seconds=0.01)
    [record] = finish(
        store, runner_of(store, replicas), submit_batch(store, ["a", "wrong", "busy", *"bcdefgh"])
    )
    done, failed = batch_outcome(store, record)
    assert (record.status, len(done), len(failed)) == ("completed", 9, 1)
    assert TokenUsage.of_body({"usage": record.usage}) == (18, 45, 9, 0)
    assert {line["response"]["body"]["text"] for line in done} == {*"abcdefgh", "busy"}
    assert failed[0]["response"] == {
        "status_code": 400,
        "request_id": failed[0]["response"]["request_id"],
        "body": {"error": {"message": "no"}},
    }
    assert (
        times_of(record) == {"created", "expires", "in_progress", "finalizing", "completed"}
        and replicas.most == 4
    )
    assert len(replicas.seeds["busy"]) == 1 and replicas.seeds["a"] != replicas.seeds["b"]
    assert store.open_ids() == []


def test_output_and_error_files_exist_only_if_they_have_lines(store):
    right, wrong = finish(
        store,
        runner_of(store, Replicas()),
        submit_batch(store, ["a"]),
        submit_batch(store, ["wrong"]),
    )
    assert (right.output_file_id, right.error_file_id) == (right.output_id, None)
    assert (wrong.output_file_id, wrong.error_file_id) == (None, wrong.error_id)


def test_a_file_with_a_wrong_line_fails_and_nothing_is_answered(store):
    replicas = Replicas()
    bad, long = submit_batch(store, ["a", "b"], method="GET"), submit_batch(store, "abcd")
    bad, long = finish(store, runner_of(store, replicas, max_lines=3), bad, long)
    assert (
        bad.status == "failed"
        and [error["line"] for error in bad.errors["data"]] == [1, 2]
        and not replicas.begun
    )
    assert long.errors["data"][0]["code"] == "too_many_lines" and times_of(long) == {
        "created",
        "expires",
        "failed",
    }
    assert bad.as_json()["errors"]["data"][0]["code"] == "invalid_method"


def test_a_batch_without_its_input_file_fails(store):
    batch = submit_batch(store, "a")
    store.files("all").delete(batch.input_file_id)
    [record] = finish(store, runner_of(store, Replicas()), batch)
    assert record.status == "failed" and record.errors["data"][0]["code"] == "file_not_found"


def test_line_that_kills_its_replica_fails_and_others_succeed(store):
    replicas = Replicas(seconds=0.005)
    [record] = finish(
        store, runner_of(store, replicas), submit_batch(store, [*"abc", "kill", *"defgh"])
    )
    done, [failed] = batch_outcome(store, record)
    assert (
        failed["error"]["code"] == "worker_died" and replicas.begun["kill"] == 3 and len(done) == 8
    )


def test_error_of_a_lost_response_names_its_own_length(store):
    record = BatchRecord.new(
        60, owner="all", endpoint="/v1/responses", input_file_id="f", completion_window="60s"
    )
    client = ReplicaClient(Replicas().respond, window=1)
    answer = asyncio.run(client.answer(record, "a", {"prompt": "kill"}))
    assert "Shorten its prompt or max_output_tokens." in answer.columns["line"]


def test_a_runner_that_is_ended_leaves_the_rest_to_the_next_one(store):
    prompts, replicas = [f"p{i}" for i in range(60)], Replicas(seconds=0.02)
    batch = submit_batch(store, prompts)
    asyncio.run(run_until(runner_of(store, replicas), lambda: num_completed(store, batch) >= 12))
    middle = num_completed(store, batch)
    assert store.find("all", batch.id).status == "in_progress" and 12 <= middle < 60
    kept = set(replicas.begun)
    later = Replicas()
    [record] = finish(store, runner_of(store, later), batch)
    done, failed = batch_outcome(store, record)
    assert record.status == "completed" and len(done) == 60 and not failed
    assert len(later.begun) == 60 - middle or len(later.begun) < 60
    assert kept | set(later.begun) == set(prompts)


class RunnerKilled(BaseException):
    """The process of a runner ends here."""


class CountedWrites:
    """Writes to storage, which all fail once num_left are done, as if the process had been killed there."""

    NAMES = ("write_atomic", "create", "replace", "remove", "remove_tree")

    def __init__(self, monkeypatch):
        self.num_left = None
        for name in self.NAMES:
            monkeypatch.setattr(StoragePath, name, self._counted(getattr(StoragePath, name)))
        monkeypatch.setattr(SpendLog, "append", self._counted(SpendLog.append))

    def _counted(self, write):
        def counted(*args, **more):
            if self.num_left == 0:
                raise RunnerKilled
            if self.num_left is not None:
                self.num_left -= 1
            return write(*args, **more)

        return counted


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_runner_killed_before_any_of_its_writes_is_resumed(store, monkeypatch):
    monkeypatch.setattr(file_store, "UPLOAD_CHUNK_BYTES", 300)
    writes, num_kills, is_killed = CountedWrites(monkeypatch), 0, True
    while is_killed:
        batch = submit_batch(store, ["a", "wrong", "b"])
        writes.num_left = num_kills
        asyncio.run(
            run_until(
                runner_of(store, Replicas()), lambda: writes.num_left == 0 or not store.open_ids()
            )
        )
        is_killed, writes.num_left = writes.num_left == 0, None
        asyncio.run(run_until(runner_of(store, Replicas()), lambda: not store.open_ids()))
        record = store.find("all", batch.id)
        done, failed = batch_outcome(store, record)
        assert (record.status, len(done), len(failed)) == ("completed", 2, 1)
        sweep(store)
        assert (
            [*(store.root / "all" / "work").glob("**/*")]
            == store.files("all").unfinished_ids()
            == []
        )
        num_kills += 1
    assert num_kills > 10


@pytest.mark.parametrize("place", ["_write_files", "_finalize", "_save"])
def test_a_runner_that_fails_in_the_middle_of_an_end_tries_again(store, monkeypatch, place):
    real, failures = getattr(batch_job.BatchJob, place), [OSError("the disk is away")] * 2

    def fails(self, *args, **more):
        if failures:
            raise failures.pop()
        return real(self, *args, **more)

    monkeypatch.setattr(batch_job.BatchJob, place, fails)
    [record] = finish(store, runner_of(store, Replicas()), submit_batch(store, ["a", "wrong", "b"]))
    done, failed = batch_outcome(store, record)
    assert record.status == "completed" and len(done) == 2 and len(failed) == 1 and not failures


def test_a_runner_that_is_ended_releases_its_leases(store):
    replicas = Replicas(seconds=60)
    batch, runner = submit_batch(store, "a"), runner_of(store, replicas)
    asyncio.run(run_until(runner, lambda: replicas.now))
    assert replicas.now == 0 and store.open_ids() == [("all", batch.id)]
    assert Lease.of(store.work("all", batch.id)).try_take()


def test_a_fault_of_ours_is_no_answer_of_a_line(store):
    replicas = Replicas()
    batch = submit_batch(store, ["a", "fault"])
    asyncio.run(run_until(runner_of(store, replicas), lambda: replicas.begun.get("fault", 0) >= 2))
    assert store.find("all", batch.id).status == "in_progress"


def test_two_runners_share_the_batches_and_answer_no_line_twice(store):
    replicas = Replicas(seconds=0.01)
    batches = [submit_batch(store, [f"{name}{i}" for i in range(10)]) for name in "ab"]

    async def both():
        over = [
            asyncio.ensure_future(run_until(runner_of(store, replicas), is_over)) for _ in range(2)
        ]
        await asyncio.gather(*over)

    def is_over():
        return all(store.find("all", batch.id).is_over for batch in batches)

    asyncio.run(both())
    assert set(replicas.begun.values()) == {1} and len(replicas.begun) == 20


def test_cancelled_batch_keeps_its_answers_and_names_other_lines(store):
    replicas = Replicas(seconds=0.03)
    batch, runner = submit_batch(store, [f"p{i}" for i in range(100)]), runner_of(store, replicas)

    async def cancel_in_the_middle():
        running = asyncio.ensure_future(runner.run())
        while num_completed(store, batch) < 8:
            await asyncio.sleep(0.01)
        at = store.cancel(store.find("all", batch.id))
        shown = store.find("all", batch.id)
        assert shown.is_over or shown.as_json(at)["status"] == "cancelling"
        while not store.find("all", batch.id).is_over:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return at

    at = asyncio.run(cancel_in_the_middle())
    record = store.find("all", batch.id)
    done, failed = batch_outcome(store, record)
    assert record.status == "cancelled" and 8 <= len(done) < 100 and replicas.now == 0
    assert {line["error"]["code"] for line in failed} == {"batch_cancelled"}
    assert record.as_json()["cancelling_at"] in (None, at) and record.cancelling_at == at


def test_a_batch_that_is_late_expires_with_what_it_has(store, monkeypatch):
    replicas, late = (
        Replicas(seconds=0.05),
        SimpleNamespace(time=lambda: time.time() + 120, monotonic=time.monotonic),
    )
    runner, batch = (
        runner_of(store, replicas, window=1),
        submit_batch(store, [f"p{i}" for i in range(1000)]),
    )

    async def expire_in_the_middle():
        await run_until(runner, lambda: num_completed(store, batch) >= 3)
        monkeypatch.setattr(batch_job, "time", late)
        await run_until(runner, lambda: store.find("all", batch.id).is_over)

    asyncio.run(expire_in_the_middle())
    record = store.find("all", batch.id)
    done, failed = batch_outcome(store, record)
    assert record.status == "expired" and 3 <= len(done) < 1000 and record.expired_at
    assert {line["error"]["code"] for line in failed} == {"batch_expired"}


def test_batches_of_a_revoked_key_wait_and_expire(store):
    replicas, known = Replicas(), {"all"}
    wait, late = (
        submit_batch(store, "ab", owner="key-1"),
        submit_batch(store, "cd", owner="key-2", window_s=0),
    )
    runner = runner_of(store, replicas, knows=known.__contains__)
    mine, late = finish(store, runner, submit_batch(store, "xy"), late)
    assert (
        mine.status == "completed"
        and late.status == "expired"
        and set(replicas.begun) == {"x", "y"}
    )
    assert store.find("key-1", wait.id).status == "validating"


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("num_kills", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_two_servers_killed_at_random_answer_each_line_once(tmp_path, num_kills):
    kill_servers(str(tmp_path / "kept"), random.Random(num_kills), num_kills)
