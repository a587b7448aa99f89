"""Files and batches of an endpoint in a bucket: the answers, the run and the end of a batch hold there too."""

import asyncio
import json
import random

import pytest

from eagle_ray.port.spend import StoredAnswers
from eagle_ray.runs.lease import LOCK
from eagle_ray.serve.batches import batch_job, batch_runner
from eagle_ray.serve.batches.batch_store import BatchStore
from eagle_ray.serve.batches.line_answers import file_lines
from tests.support.batches import (
    OLD,
    Replicas,
    answer,
    batch_outcome,
    claimed,
    finish,
    kill_servers,
    num_completed,
    run_until,
    runner_of,
    shorten_runner_intervals,
    submit_batch,
    write,
)


@pytest.fixture
def store(bucket):
    return BatchStore.open(f"{bucket}/kept")


def test_a_batch_runs_to_its_end_in_a_bucket(store, monkeypatch):
    monkeypatch.setattr(batch_runner, "LOOK_EVERY_S", 0.2)
    monkeypatch.setattr(batch_job, "BATCH_POLL_S", 0.2)
    assert store.salt() == store.salt() and len(store.salt()) == 16
    batch = submit_batch(store, ["a", "wrong", *"bcdef"])
    [record] = finish(store, runner_of(store, Replicas()), batch)
    done, failed = batch_outcome(store, record)
    assert (record.status, len(done), len(failed)) == ("completed", 6, 1)
    assert (
        store.open_ids() == []
        and not store.work("all", record.id).is_directory()
        and store.owners() == ["all"]
    )
    files = store.files("all")
    assert len(files.ids()) == 3 and files.unfinished_ids() == []
    files.delete(record.output_id)
    assert files.find(record.output_id) is None and not (
        store.root / "all" / "contents" / record.output_id
    ).glob("*")


def test_answers_of_two_processes_in_a_bucket_count_once(store):
    with claimed(store.root / "log") as run:
        write(run, answer("a"), worker="1")
        write(run, answer("a"), answer("b"), worker="2")
    stored = StoredAnswers(run)
    assert (len(stored), stored.usage) == (2, (6, 8, 4, 2))
    assert len([*file_lines(stored, True)]) == 2
    assert stored.columns("b") == answer("b").columns


@pytest.mark.slow
def test_a_store_of_an_earlier_version_in_a_bucket_is_continued(store, monkeypatch):
    monkeypatch.setattr(batch_runner, "LOOK_EVERY_S", 0.2)
    monkeypatch.setattr(batch_job, "BATCH_POLL_S", 0.2)
    for file in OLD.rglob("*"):
        if file.is_file():
            (store.root / file.relative_to(OLD).as_posix()).write_atomic(file.read_bytes())
    batches = [store.find(*pair) for pair in store.open_ids()]
    for record in finish(store, runner_of(store, Replicas()), *batches):
        batch_outcome(store, record)
    assert len(batches) == 4 and not store.closed_ids("all")


def test_runner_without_its_lease_stops_and_batch_resumes_later(store, monkeypatch):
    shorten_runner_intervals(monkeypatch.setattr, in_bucket=True)
    replicas = Replicas(seconds=0.1)
    batch = submit_batch(store, [f"p{i}" for i in range(60)])
    lock, stops = store.work("all", batch.id) / LOCK, []

    def is_over():
        if not stops and num_completed(store, batch) >= 4:
            lock.write_atomic(json.dumps({"holder": "another", "token": "another"}).encode())
            stops.append(False)
        stops.extend([True] * (bool(stops) and replicas.now == 0))
        return not store.open_ids()

    asyncio.run(run_until(runner_of(store, replicas), is_over, poll_s=0.1))
    batch_outcome(store, store.find("all", batch.id))
    assert stops[1:]


@pytest.mark.usefixtures("warm_python")
@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [2, 40])
def test_two_killed_servers_of_a_bucket_answer_each_line_once(bucket, num_kills):
    kill_servers(f"{bucket}/kept", random.Random(num_kills), num_kills)
