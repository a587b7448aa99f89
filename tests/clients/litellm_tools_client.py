"""litellm with tools, forms and batches against a server: python litellm_tools_client.py URL.

The server's chat template must read tools. Knows nothing of eagle_ray.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch prices

import httpx
import litellm
from weather import ASK, MAX_TOKENS, NAMED, OTHER_TOOL, TOOL, Weather, check_arguments

litellm.suppress_debug_info = True
Settings = dict[str, Any]


def check_tools(provider: str, model: str, here: Settings) -> None:
    """A call by each choice: whole, and built from a stream's chunks by litellm."""
    for choice in ("required", NAMED):
        body = here | {"model": f"{provider}/{model}", "messages": ASK, "tools": [TOOL, OTHER_TOOL]}
        body |= {"tool_choice": choice, "parallel_tool_calls": False}
        whole = litellm.completion(**body).choices[0]
        [call] = whole.message.tool_calls
        check_arguments(call.function.name, call.function.arguments)
        assert whole.finish_reason == "tool_calls"
        built = litellm.stream_chunk_builder(
            list(litellm.completion(stream=True, **body)), messages=ASK
        )
        assert built is not None
        [told] = built.choices[0].message.tool_calls
        assert (told.function.name, told.function.arguments) == (
            call.function.name,
            call.function.arguments,
        )
        result = {"role": "tool", "tool_call_id": call.id, "content": "21"}
        answer = litellm.completion(
            **body | {"messages": [*ASK, whole.message, result], "tool_choice": "none"}
        )
        assert answer.choices[0].message.content


def check_forms(provider: str, model: str, here: Settings) -> None:
    body = here | {"model": f"{provider}/{model}", "messages": ASK, "response_format": Weather}
    content = litellm.completion(**body).choices[0].message.content
    Weather.model_validate_json(content, strict=True)
    assert (
        "".join(c.choices[0].delta.content or "" for c in litellm.completion(stream=True, **body))
        == content
    )


def check_responses(model: str, here: Settings) -> None:
    body = {
        "model": f"openai/{model}",
        "input": "What is the weather in Paris?",
        "max_output_tokens": 12,
    }
    body |= {name: here[name] for name in ("api_base", "api_key", "timeout")}
    whole: Any = litellm.responses(**body)
    told = [
        event.delta
        for event in litellm.responses(stream=True, **body)
        if event.type == "response.output_text.delta"
    ]
    assert "".join(told) == whole.output[0].content[0].text


def check_batches(model: str, here: Settings) -> None:
    url: Any = "/v1/chat/completions"
    body = {
        "model": model,
        "messages": ASK,
        "tools": [TOOL],
        "tool_choice": "required",
        "max_tokens": MAX_TOKENS,
    }
    lines = [
        {"custom_id": f"{i}", "method": "POST", "url": url, "body": body | {"seed": i}}
        for i in range(3)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    there: Any = {
        "custom_llm_provider": "openai",
        "api_base": here["api_base"],
        "api_key": here["api_key"],
    }
    file: Any = litellm.create_file(file=("in.jsonl", content), purpose="batch", **there)
    batch: Any = litellm.create_batch(
        completion_window="24h", endpoint=url, input_file_id=file.id, **there
    )
    while batch.status != "completed":
        assert batch.status in ("validating", "in_progress", "finalizing"), batch
        time.sleep(0.2)
        batch = litellm.retrieve_batch(batch_id=batch.id, **there)
    found: Any = litellm.file_content(file_id=batch.output_file_id, **there)
    answers = [json.loads(line) for line in found.text.splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == ["0", "1", "2"]
    for answer in answers:
        for call in answer["response"]["body"]["choices"][0]["message"]["tool_calls"]:
            check_arguments(call["function"]["name"], call["function"]["arguments"])


def main(url: str) -> None:
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    here = {
        "api_base": f"{url}/v1",
        "api_key": "none",
        "max_tokens": MAX_TOKENS,
        "timeout": 120,
        "num_retries": 0,
    }
    check_tools(
        "openai", model, here
    )  # hosted_vllm takes additionalProperties out, and a tiny target then adds many
    for provider in ("openai", "hosted_vllm"):
        check_forms(provider, model, here)
    check_responses(model, here)
    check_batches(model, here)
    print(
        f"litellm {importlib.metadata.version('litellm')}: tools, pydantic forms, responses, streams, batches"
    )


if __name__ == "__main__":
    main(sys.argv[1])
