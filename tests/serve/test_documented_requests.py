"""What the page of the endpoint shows and no other test asks for."""

from __future__ import annotations

import asyncio
import json
import textwrap
import time

import pytest

from eagle_ray.serve.app import build_app
from eagle_ray.serve.batches.batch_runner import BatchRunner
from eagle_ray.serve.batches.batch_store import BatchStore
from tests.support.documented import block
from tests.support.serving import CHAT, FRANCE, TEXT, ask, serving

openai = pytest.importorskip("openai")


def test_max_tokens_is_cut_to_the_models_length(app):
    answer = ask(
        app, TEXT, {"prompt": "Hi", "max_tokens": 2**31 - 1, "stop": ["a", "e", "i", "o", "u"]}
    )
    assert answer.status == 200 and answer.json["usage"]["completion_tokens"] < 2048


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": "Hi", "logit_bias": {str(token): 1 for token in range(65_537)}}),
        ("/detokenize", {"tokens": [1] * 131_073}),
    ],
)
def test_long_lists_are_400_by_name(service, monkeypatch, path, body):
    serving_section = service.config.serving.model_copy(update={"max_body_bytes": 2**20})
    monkeypatch.setattr(
        service, "config", service.config.model_copy(update={"serving": serving_section})
    )
    answer = ask(build_app(service), path, body)
    assert answer.status == 400 and list(body)[-1] in answer.json["error"]["message"]


@pytest.mark.parametrize("name", ["json", "regex", "choice", "grammar", "json_object"])
def test_vllms_structured_outputs_are_read(app, name):
    values = {
        "json": {"type": "boolean"},
        "regex": "ab?",
        "choice": ["yes", "no"],
        "grammar": 'start: "ab"',
    }
    body = {"prompt": "Hi", "max_tokens": 12, "structured_outputs": {name: values.get(name, True)}}
    answer = ask(app, TEXT, body)
    assert answer.status == 200
    expected = {
        "json": ("true", "false"),
        "regex": ("a", "ab"),
        "choice": ("yes", "no"),
        "grammar": ("ab",),
    }
    assert name == "json_object" or answer.json["choices"][0]["text"].strip() in expected[name]


def test_the_pages_lines_of_a_batch_run(service, tmp_path, monkeypatch, capsys):
    """They run as they stand in the page, with the openai client and a server of this process."""
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": FRANCE | {"max_tokens": 2}}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requests.jsonl").write_text(json.dumps(line))
    store = BatchStore.open(str(tmp_path / "kept"))

    async def respond(owner, endpoint, body):
        return await service.answer_line(service.keys.client_of(owner), endpoint, body)

    code = textwrap.dedent(block("eagle_ray/serve/README.md", "python", "# The endpoint"))
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.05)))
    with serving(build_app(service, store=store)) as server:
        runner = asyncio.run_coroutine_threadsafe(
            BatchRunner(store, service.config.serving.batches, respond, 8).run(), server.loop
        )
        client = openai.OpenAI(base_url=f"{server.url}v1", api_key="none")
        try:
            exec(compile(code, "README.md", "exec"), {"client": client, "time": time})
        finally:
            runner.cancel()
    assert json.loads(capsys.readouterr().out)["custom_id"] == "a"
