"""Files and batches of a real `eagle-ray serve` with OpenAI's own client; its worker and then all of it is killed."""

import io
import json
import os
import signal

import pytest

from tests.support.processes import descendants
from tests.support.serving import Server, replicas
from tests.support.serving import wait_until as until_soon

pytestmark = [pytest.mark.ray, pytest.mark.slow]
openai = pytest.importorskip("openai")
URL = "/v1/completions"
WITHIN_S = 900  # on a machine that many share


def wait_until(condition):
    until_soon(condition, WITHIN_S)


def client_of(server):
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1",
        api_key="none",
        timeout=60,
        _strict_response_validation=True,
    )


def line(id, **body):
    body = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "temperature": 0.8} | body
    return json.dumps({"custom_id": id, "method": "POST", "url": URL, "body": body})


def upload(client, lines):
    return client.files.create(
        file=("in.jsonl", io.BytesIO("\n".join(lines).encode())), purpose="batch"
    )


def start(tmp_path, name):
    (tmp_path / name).mkdir()
    server = Server(tmp_path / name, **{"batches.path": tmp_path / "kept", "batches.max_open": 2})
    try:
        server.until_ready(WITHIN_S)
    except AssertionError:
        kill_whole(server)
        raise
    return server, client_of(server)


def kill_whole(server):
    """Kill the command and every process of its Ray, as a machine that loses power does."""
    for pid in [server.process.pid, *descendants(server.process.pid)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    server.process.wait()


def answers(client, file_id):
    return (
        [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
        if file_id
        else []
    )


def test_a_batch_survives_a_killed_worker_and_a_killed_server(tmp_path):
    ids = [f"row {i}" for i in range(60)]
    server, client = start(tmp_path, "first")
    try:
        lines = [line(id, seed=i) for i, id in enumerate(ids)] + [line("wrong", top_p=5)]
        batch = client.batches.create(
            input_file_id=upload(client, lines).id,
            endpoint=URL,
            completion_window="24h",
            metadata={"run": "a"},
        )

        def completed():
            try:
                return client.batches.retrieve(batch.id).request_counts.completed
            except openai.InternalServerError:  # no replica is up now
                return 0

        wait_until(lambda: completed() >= 8)
        [replica] = replicas()
        before = completed()
        os.kill(replica, signal.SIGKILL)
        wait_until(lambda: completed() >= before + 12)
        before = completed()
        assert before < 60, "the batch ended before the server could be killed: give it more lines"
    finally:
        kill_whole(server)

    server, client = start(tmp_path, "second")
    try:
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        batch = client.batches.retrieve(batch.id)
        done, failed = answers(client, batch.output_file_id), answers(client, batch.error_file_id)
        assert sorted(line["custom_id"] for line in done) == sorted(ids)
        assert [line["custom_id"] for line in failed] == ["wrong"]
        assert failed[0]["response"]["body"]["error"]["param"] == "top_p"
        assert (batch.request_counts.completed, batch.request_counts.failed) == (
            60,
            1,
        ) and batch.metadata["run"] == "a"
        texts = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in done}
        settings = {
            "prompt": "Once",
            "max_tokens": 300,
            "temperature": 0.8,
            "extra_body": {"ignore_eos": True},
        }
        for i in (0, 30, 59):
            now = client.completions.create(model="embedded:tiny", seed=i, **settings)
            assert now.choices[0].text == texts[f"row {i}"]

        long = upload(client, [line(f"{i}", max_tokens=1500) for i in range(300)]).id
        mine = client.batches.create(input_file_id=long, endpoint=URL, completion_window="24h")
        late = client.batches.create(input_file_id=long, endpoint=URL, completion_window="6s")
        with pytest.raises(openai.RateLimitError) as refused:
            client.with_options(max_retries=0).batches.create(
                input_file_id=long, endpoint=URL, completion_window="24h"
            )
        assert refused.value.code == "too_many_batches"
        wait_until(lambda: client.batches.retrieve(mine.id).request_counts.total == 300)
        answer = client.completions.create(model="embedded:tiny", prompt="Once", max_tokens=1)
        assert answer.usage.completion_tokens == 1
        assert (
            client.batches.retrieve(mine.id).status == "in_progress"
        )  # it has not waited for the lines
        assert client.batches.cancel(mine.id).status == "cancelling"
        wait_until(lambda: client.batches.retrieve(mine.id).status == "cancelled")
        wait_until(lambda: client.batches.retrieve(late.id).status == "expired")
        for batch in (client.batches.retrieve(mine.id), client.batches.retrieve(late.id)):
            found = answers(client, batch.output_file_id) + answers(client, batch.error_file_id)
            assert sorted(int(line["custom_id"]) for line in found) == list(range(300))
        assert [batch.id for batch in client.batches.list(limit=2)][:2] == [late.id, mine.id]
        assert client.files.delete(long).deleted
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=90) == 0
    finally:
        if server.process.poll() is None:
            kill_whole(server)
