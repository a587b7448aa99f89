"""OpenAI's own library with the Responses API, its validation strict: python openai_responses_client.py URL.

Run in an environment that has `openai`; the server's chat template must read tools. Knows nothing
of eagle_ray.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import openai
from weather import MAX_TOKENS, TOOL, Weather, check_arguments

ASK = "What is the weather in Paris?"
STRICT: Any = {"api_key": "none", "max_retries": 0, "_strict_response_validation": True}
FLAT_TOOL: Any = {"type": "function", **TOOL["function"], "strict": True}


def settings(client: openai.OpenAI) -> Any:
    return {"model": client.models.list().data[0].id, "max_output_tokens": MAX_TOKENS}


def check_text(client: openai.OpenAI) -> None:
    body = settings(client) | {
        "input": ASK,
        "instructions": "Be short.",
        "temperature": 0.7,
        "extra_body": {"seed": 3},
    }
    whole = client.responses.create(**body)
    assert whole.output_text and whole.usage and whole.usage.output_tokens <= MAX_TOKENS
    assert whole.status in ("completed", "incomplete") and whole.instructions == "Be short."
    events = list(client.responses.create(stream=True, **body))
    assert (
        "".join(one.delta for one in events if one.type == "response.output_text.delta")
        == whole.output_text
    )
    assert (
        events[-1].type == f"response.{whole.status}"
        and events[-1].response.output_text == whole.output_text
    )
    again = client.responses.create(
        **body | {"input": [{"role": "user", "content": ASK}, *whole.output]}
    )
    assert again.usage and again.usage.input_tokens > whole.usage.input_tokens
    chat = client.chat.completions.create(
        model=body["model"],
        messages=[{"role": "system", "content": "Be short."}, {"role": "user", "content": ASK}],
        max_tokens=MAX_TOKENS,
        temperature=0.7,
        seed=3,
    )
    assert chat.choices[0].message.content == whole.output_text


def check_forms(client: openai.OpenAI) -> None:
    body = settings(client) | {"input": ASK}
    parsed = client.responses.parse(text_format=Weather, **body).output_parsed
    assert isinstance(parsed, Weather)
    with client.responses.stream(text_format=Weather, **body) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_parsed == parsed
    assert kinds[0] == "response.created" and kinds.count("response.output_text.delta") > 2


def check_tools(client: openai.OpenAI) -> None:
    """A call, whole and streamed; its result goes back with the response's own items."""
    body = settings(client) | {"tools": [FLAT_TOOL], "parallel_tool_calls": False}
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        whole = client.responses.create(input=ASK, tool_choice=choice, **body)
        [call] = [item for item in whole.output if item.type == "function_call"]
        check_arguments(call.name, call.arguments)
        with client.responses.stream(input=ASK, tool_choice=choice, **body) as stream:
            stream.until_done()
            [told] = [
                item for item in stream.get_final_response().output if item.type == "function_call"
            ]
        assert (told.name, told.arguments) == (call.name, call.arguments)
    result: Any = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": '{"degrees": 21}',
    }
    history: Any = [{"role": "user", "content": ASK}, *whole.output, result]
    assert client.responses.create(input=history, tool_choice="none", **body).output_text
    tool = openai.pydantic_function_tool(Weather)
    made: Any = client.responses.parse(
        input=ASK, tool_choice="required", **body | {"tools": [tool]}
    ).output[0]
    assert isinstance(made.parsed_arguments, Weather)


def check_errors(client: openai.OpenAI) -> None:
    """What needs stored state is refused by name."""
    body = settings(client) | {"input": ASK}
    for name, value in {
        "previous_response_id": "resp_1",
        "background": True,
        "store": True,
    }.items():
        for stream in (False, True):
            try:
                client.responses.create(stream=stream, **body | {name: value})
            except openai.BadRequestError as error:
                assert (error.param, error.code) == (name, "unsupported_parameter")
            else:
                raise AssertionError(f"{name} was answered")
    try:
        client.responses.retrieve("resp_1")
    except openai.NotFoundError as error:
        assert error.code == "responses_not_kept"
    else:
        raise AssertionError("a response was kept")


async def check_async(client: openai.AsyncOpenAI, body: Any) -> None:
    """Several at a time; one leaves early."""
    async with client.responses.stream(input=ASK, **body) as stream:
        async for _ in stream:
            break
    found = await asyncio.gather(
        *(client.responses.parse(input=ASK, text_format=Weather, **body) for _ in range(4))
    )
    assert all(isinstance(one.output_parsed, Weather) for one in found)


def main(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", timeout=120, **STRICT) as client:
        for check in (check_text, check_forms, check_tools, check_errors):
            check(client)
        body = settings(client)

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", timeout=120, **STRICT) as client:
            await check_async(client, body)

    asyncio.run(run())
    print(
        f"openai {openai.__version__}, strict: responses, their streams, parse, tools, items sent back, errors, async"
    )


if __name__ == "__main__":
    main(sys.argv[1])
