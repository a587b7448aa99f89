"""OpenAI's own library, its response validation strict, against a server: python openai_client.py URL.

Run in an environment that has `openai`; knows nothing of eagle_ray.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import openai
import pytest

PROMPT = "<|bos|><|user|>What do you think about singing?<|end|><|assistant|>"
FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
STRICT: Any = {"api_key": "none", "max_retries": 0, "_strict_response_validation": True}


def check_sync(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert client.models.retrieve(model.id) == model
    chat = client.chat.completions.create(model=model.id, messages=FRANCE, max_tokens=12)
    assert chat.choices[0].message.content and chat.usage and chat.usage.completion_tokens <= 12
    stream = client.chat.completions.create(
        model=model.id, messages=FRANCE, max_tokens=12, stream=True
    )
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        == chat.choices[0].message.content
    )
    text = client.completions.create(model=model.id, prompt=PROMPT, max_tokens=12)
    chunks = list(
        client.completions.create(model=model.id, prompt=PROMPT, max_tokens=12, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == text.choices[0].text
    assert len(chunks) > 2 and chunks[-1].choices[0].finish_reason == text.choices[0].finish_reason


def check_parameters(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    settings: Any = {"model": model, "max_tokens": 8, "temperature": 0.9, "seed": 7, "n": 3}
    first, again = (client.chat.completions.create(messages=FRANCE, **settings) for _ in range(2))
    assert [c.message.content for c in first.choices] == [c.message.content for c in again.choices]
    assert len({c.message.content for c in first.choices}) > 1
    found = client.chat.completions.create(
        model=model,
        messages=FRANCE,
        max_tokens=5,
        logprobs=True,
        top_logprobs=2,
        user="me",
        store=False,
    )
    logprobs = found.choices[0].logprobs
    assert (
        logprobs
        and logprobs.content
        and all(len(place.top_logprobs) == 2 for place in logprobs.content)
    )
    whole = client.completions.create(model=model, prompt=PROMPT, max_tokens=20).choices[0].text
    cut = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=20, stop=[whole[4:7]]
    ).choices[0]
    assert cut.text == whole[: whole.find(whole[4:7])] and cut.finish_reason == "stop"
    echoed = client.completions.create(
        model=model, prompt=["Once", "Now"], echo=True, logprobs=1, max_tokens=1
    )
    for choice, prompt in zip(echoed.choices, ("Once", "Now"), strict=True):
        assert choice.text.startswith(prompt) and choice.logprobs
        assert len(choice.logprobs.tokens or []) == len(choice.logprobs.token_logprobs or []) > 1
    pieces = list(
        client.completions.create(
            model=model, prompt="Once", echo=True, logprobs=1, max_tokens=9, stream=True
        )
    )
    assert "".join(piece.choices[0].text for piece in pieces).startswith("Once")
    usage: Any = {"stream": True, "stream_options": {"include_usage": True}}
    for stream in (
        client.chat.completions.create(model=model, messages=FRANCE, max_tokens=9, **usage),
        client.completions.create(model=model, prompt="Once", max_tokens=9, **usage),
    ):
        last = list(stream)[-1]
        assert (
            last.choices == []
            and last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
        )
        drafts = last.model_extra["metrics"]["speculative_decoding"]
        assert sum(drafts["acceptance_histogram"]) == drafts["num_spec_steps"]


def check_errors(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt", prompt="Once")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model, messages=FRANCE, modalities=["audio"])
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "modalities")
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as long:
            client.completions.create(model=model, prompt=[5] * 20_000, stream=stream)
        assert long.value.code == "prompt_too_long"


def check_batches(client: openai.OpenAI) -> None:
    """Upload, run, poll, download, cancel and delete."""
    bodies: list[dict[str, Any]] = [{"prompt": PROMPT, "max_tokens": 8}] * 3 + [
        {"prompt": PROMPT, "top_p": 7}
    ]
    lines = [
        {"custom_id": f"row {i}", "method": "POST", "url": "/v1/completions", "body": body}
        for i, body in enumerate(bodies)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert client.files.content(file.id).read() == content and file.id in [
        one.id for one in client.files.list()
    ]
    window: Any = {"completion_window": "24h", "endpoint": "/v1/completions"}
    batch = client.batches.create(input_file_id=file.id, metadata={"run": "a"}, **window)
    while batch.status not in ("completed", "failed"):
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    assert batch.request_counts and (
        batch.request_counts.completed,
        batch.request_counts.failed,
    ) == (3, 1)
    assert batch.output_file_id and batch.error_file_id and batch.metadata == {"run": "a"}
    found = [
        json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()
    ]
    assert sorted(line["custom_id"] for line in found) == ["row 0", "row 1", "row 2"]
    [wrong] = client.files.content(batch.error_file_id).text.splitlines()
    assert json.loads(wrong)["response"]["body"]["error"]["param"] == "top_p"
    model = client.models.list().data[0].id
    now = client.completions.create(model=model, prompt=PROMPT, max_tokens=8)
    assert {line["response"]["body"]["choices"][0]["text"] for line in found} == {
        now.choices[0].text
    }
    again = client.batches.create(input_file_id=file.id, **window)
    assert client.batches.cancel(again.id).status in ("cancelling", "cancelled")
    while client.batches.retrieve(again.id).status != "cancelled":
        time.sleep(0.5)
    assert [one.id for one in client.batches.list(limit=1)][:2] == [again.id, batch.id]
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


async def check_async(client: openai.AsyncOpenAI) -> None:
    """Many at a time; one leaves early."""
    model = (await client.models.list()).data[0].id
    alone = await client.completions.create(model=model, prompt=PROMPT, max_tokens=12)

    async def streamed() -> str:
        stream = await client.completions.create(
            model=model, prompt=PROMPT, max_tokens=12, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    leaving = await client.chat.completions.create(
        model=model, messages=FRANCE, max_tokens=500, stream=True
    )
    async for _ in leaving:
        break
    await leaving.close()
    assert set(await asyncio.gather(*(streamed() for _ in range(12)))) == {alone.choices[0].text}


def main(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", timeout=60, **STRICT) as client:
        for check in (check_sync, check_parameters, check_errors, check_batches):
            check(client)

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", timeout=60, **STRICT) as client:
            await check_async(client)

    asyncio.run(run())
    print(
        f"openai {openai.__version__}, strict: models, chat, completions, streams, n, seed, logprobs, echo, stop, "
        "usage, errors, files, batches, async"
    )


if __name__ == "__main__":
    main(sys.argv[1])
