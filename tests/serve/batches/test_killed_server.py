"""OpenAI's own client against a server that is killed in the middle of a batch, and started again."""

import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from functools import partial

import pytest

from tests.support.batches import kill_servers

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.slow
URL = "/v1/completions"


def start_server(path):
    """Return a server's process and its port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.serve.batches.plain_server", str(port), path]
    ), port


def start(tmp_path):
    """Return a server's process and a client of it, once it answers."""
    process, port = start_server(str(tmp_path / "kept"))
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1",
        api_key="none",
        timeout=60,
        max_retries=0,
        _strict_response_validation=True,
    )
    wait_until(lambda: process.poll() is not None or is_up(client))
    return process, client


def is_up(client):
    try:
        return bool(client.models.list().data)
    except openai.APIConnectionError:
        return False


def wait_until(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.1)


def has_completed(client, id, count):
    return client.batches.retrieve(id).request_counts.completed >= count


def line(id, **body):
    return json.dumps(
        {"custom_id": id, "method": "POST", "url": URL, "body": {"prompt": "Once"} | body}
    )


def answers(client, *ids):
    return [
        json.loads(line) for id in ids if id for line in client.files.content(id).text.splitlines()
    ]


def test_server_killed_twice_answers_each_line_once(tmp_path):
    more = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.8}
    lines = [line(f"row {i}", seed=i, **more) for i in range(50)] + [line("wrong", top_p=7)]
    process, client = start(tmp_path)
    file = client.files.create(
        file=("in.jsonl", io.BytesIO("\n".join(lines).encode())), purpose="batch"
    )
    batch = client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
    for count in (1, 20):
        wait_until(partial(has_completed, client, batch.id, count))
        assert client.batches.retrieve(batch.id).status == "in_progress"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process, client = start(tmp_path)
    try:
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        batch = client.batches.retrieve(batch.id)
        found = answers(client, batch.output_file_id)
        assert sorted(line["custom_id"] for line in found) == sorted(f"row {i}" for i in range(50))
        [wrong] = answers(client, batch.error_file_id)
        assert wrong["response"]["body"]["error"]["param"] == "top_p"
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (51, 50, 1)
        texts = {
            line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in found
        }
        for i in (0, 25, 49):
            asked = {
                "prompt": "Once",
                "max_tokens": 60,
                "temperature": 0.8,
                "extra_body": {"ignore_eos": True},
            }
            now = client.completions.create(model="embedded:tiny", seed=i, **asked)
            assert now.choices[0].text == texts[f"row {i}"]
        check_ends(client)
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_two_killed_engine_servers_answer_each_line_once(tmp_path):
    kill_servers(
        str(tmp_path / "kept"), random.Random(5), 6, lambda path: start_server(path)[0], start_s=5.0
    )


def check_ends(client):
    """A batch that is cancelled, one that is late, one too many, and a file of wrong lines."""
    lines = "\n".join(line(f"{i}", max_tokens=400, ignore_eos=True) for i in range(100))
    file = client.files.create(file=io.BytesIO(lines.encode()), purpose="batch").id
    mine = client.batches.create(
        input_file_id=file, endpoint=URL, completion_window="24h", metadata={"a": "b"}
    )
    late = client.batches.create(input_file_id=file, endpoint=URL, completion_window="4s")
    with pytest.raises(openai.RateLimitError) as refused:
        client.batches.create(input_file_id=file, endpoint=URL, completion_window="24h")
    assert refused.value.code == "too_many_batches"
    wait_until(lambda: client.batches.retrieve(mine.id).request_counts.total == 100)
    assert client.batches.cancel(mine.id).status == "cancelling"
    wait_until(lambda: client.batches.retrieve(mine.id).status == "cancelled")
    wait_until(lambda: client.batches.retrieve(late.id).status == "expired")
    for batch in (client.batches.retrieve(mine.id), client.batches.retrieve(late.id)):
        found = answers(client, batch.output_file_id, batch.error_file_id)
        assert sorted(int(line["custom_id"]) for line in found) == list(range(100))
    assert [batch.id for batch in client.batches.list(limit=1)][:2] == [late.id, mine.id]
    bad = client.files.create(file=io.BytesIO(b"{}\nx"), purpose="batch").id
    failed = client.batches.create(input_file_id=bad, endpoint=URL, completion_window="24h")
    wait_until(lambda: client.batches.retrieve(failed.id).status == "failed")
    assert [error.line for error in client.batches.retrieve(failed.id).errors.data] == [1, 2]
    assert client.files.delete(file).deleted and file not in [one.id for one in client.files.list()]
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file)
