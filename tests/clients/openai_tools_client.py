"""OpenAI's own library with tools and structured output, its validation strict: python openai_tools_client.py URL.

Run in an environment that has `openai`; the server's chat template must read tools. Knows nothing
of eagle_ray.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import openai
from weather import ASK, FORMAT, MAX_TOKENS, NAMED, OTHER_TOOL, TOOL, Weather, check_arguments

STRICT: Any = {"api_key": "none", "max_retries": 0, "_strict_response_validation": True}
TOOLS: Any = [TOOL, OTHER_TOOL]
STRICT_TOOL: Any = {"type": "function", "function": TOOL["function"] | {"strict": True}}


def settings(client: openai.OpenAI) -> Any:
    return {"model": client.models.list().data[0].id, "messages": ASK, "max_tokens": MAX_TOKENS}


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


def check_tool_choice(client: openai.OpenAI) -> None:
    """Each choice of a tool, sampled with a seed: a call where one must be, and a stream with the same message."""
    body = settings(client) | {"tools": TOOLS, "temperature": 0.8, "seed": 3}
    choices: Any = {
        "required": {"get_weather", "get_time"},
        "named": {"get_weather"},
        "auto": None,
        "none": set(),
    }
    for name, expected in choices.items():
        choice = NAMED if name == "named" else name
        for extra in ({}, {"parallel_tool_calls": False}):
            whole = client.chat.completions.create(tool_choice=choice, **body, **extra).choices[0]
            with client.chat.completions.stream(tool_choice=choice, **body, **extra) as stream:
                stream.until_done()
            told = stream.current_completion_snapshot.choices[
                0
            ]  # get_final_completion raises at the length's end
            assert calls_of(told.message) == calls_of(whole.message), (name, told, whole)
            assert (
                told.message.content == whole.message.content
                and told.finish_reason == whole.finish_reason
            ), (
                name,
                told,
                whole,
            )
            names = {called for called, _ in calls_of(whole.message)}
            if expected is not None:
                assert names <= expected and bool(names) == bool(expected), (name, whole)
            if names:
                assert whole.finish_reason == "tool_calls"
            if extra:
                assert len(calls_of(whole.message)) <= 1
            for call in calls_of(whole.message):
                check_arguments(*call)


def check_chunks(client: openai.OpenAI) -> None:
    """The chunks of a call: its id and name come once, then its arguments in pieces."""
    body = settings(client) | {
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    pieces = []
    for chunk in client.chat.completions.create(stream=True, **body):
        pieces += chunk.choices[0].delta.tool_calls or []
    assert [piece.index for piece in pieces] == [0] * len(pieces) and len(pieces) > 2
    first, *rest = pieces
    assert first.id and first.function and first.function.name == "get_weather"
    assert not any(piece.id or (piece.function and piece.function.name) for piece in rest)
    check_arguments(
        "get_weather", "".join(piece.function.arguments or "" for piece in pieces if piece.function)
    )


def check_strict_tools(client: openai.OpenAI) -> None:
    """A strict tool leaves an answer free, and what it calls fits."""
    for seed in range(3):
        body = settings(client) | {
            "tools": [STRICT_TOOL],
            "tool_choice": "auto",
            "temperature": 1.0,
            "seed": seed,
        }
        for call in calls_of(client.chat.completions.create(**body).choices[0].message):
            check_arguments(*call)


def check_conversation(client: openai.OpenAI) -> None:
    """The call and its result go back, as the library has them, for an answer."""
    body = settings(client) | {"tools": [TOOL]}
    called = client.chat.completions.create(tool_choice="required", **body).choices[0].message
    assert called.tool_calls
    results: Any = [
        {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 21}'}
        for call in called.tool_calls
    ]
    for message in (called, called.model_dump(), called.model_dump(exclude_none=True)):
        answer = client.chat.completions.create(
            **body | {"messages": [*ASK, message, *results]}, tool_choice="none"
        )
        assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls


def check_parse(client: openai.OpenAI) -> None:
    """Pydantic classes as forms of answers and as tools, whole and streamed."""
    body = settings(client)
    parsed = (
        client.chat.completions.parse(response_format=Weather, **body).choices[0].message.parsed
    )
    assert isinstance(parsed, Weather)
    with client.chat.completions.stream(response_format=Weather, **body) as stream:
        events = [event.type for event in stream]
    assert stream.get_final_completion().choices[0].message.parsed == parsed
    assert events.count("content.delta") > 2 and "content.done" in events
    tool = openai.pydantic_function_tool(Weather)
    called = (
        client.chat.completions.parse(tools=[tool], tool_choice="required", **body)
        .choices[0]
        .message
    )
    assert called.tool_calls and isinstance(called.tool_calls[0].function.parsed_arguments, Weather)
    with client.chat.completions.stream(tools=[tool], tool_choice="required", **body) as stream:
        stream.until_done()
    [call, *_] = stream.get_final_completion().choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == called.tool_calls[0].function.parsed_arguments
    try:
        client.chat.completions.parse(response_format=Weather, **body | {"max_tokens": 3})
    except openai.LengthFinishReasonError:
        pass
    else:
        raise AssertionError("an answer that max_tokens cut was parsed")
    loose = client.chat.completions.create(response_format={"type": "json_object"}, **body).choices[
        0
    ]
    assert loose.finish_reason == "length" or isinstance(
        json.loads(loose.message.content or ""), dict
    )


def check_errors(client: openai.OpenAI) -> None:
    """What cannot be is refused by name, before a stream begins too."""
    body = settings(client)
    wrong: Any = {
        "tools": {"tools": [{"type": "web_search"}]},
        "tool_choice": {
            "tools": TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "nothing"}},
        },
        "response_format": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}
        },
    }
    for name, extra in wrong.items():
        for stream in (False, True):
            try:
                client.chat.completions.create(stream=stream, **body, **extra)
            except openai.BadRequestError as error:
                assert (error.param or "").startswith(name), error
            else:
                raise AssertionError(f"{name} was answered")


def check_batches(client: openai.OpenAI) -> None:
    """Chat lines with tools and a form, from the upload to the deletion; a file with a wrong line fails."""
    common = settings(client)
    bodies: dict[str, Any] = {
        "tools": common | {"tools": TOOLS, "tool_choice": "required"},
        "form": common | {"response_format": FORMAT},
        "plain": common | {"max_tokens": 8},
        "wrong": common | {"tools": TOOLS, "tool_choice": "always"},
    }
    url: Any = "/v1/chat/completions"
    lines = [
        {"custom_id": id, "method": "POST", "url": url, "body": body} for id, body in bodies.items()
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.wait_for_processing(
        client.files.create(file=("in.jsonl", content), purpose="batch").id
    )
    assert (file.bytes, file.purpose, client.files.retrieve(file.id)) == (
        len(content),
        "batch",
        file,
    )
    life: Any = {"anchor": "created_at", "seconds": 3600}
    batch = client.batches.create(
        input_file_id=file.id, endpoint=url, completion_window="24h", output_expires_after=life
    )
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    counts = batch.request_counts
    assert batch.status == "completed" and counts and (counts.completed, counts.failed) == (3, 1), (
        batch
    )
    assert (
        batch.output_file_id
        and batch.error_file_id
        and batch.usage
        and batch.usage.output_tokens > 0
    )
    output = client.files.retrieve(batch.output_file_id)
    assert output.expires_at and 0 <= output.expires_at - output.created_at - 3600 < 60
    found = {}
    for line in client.files.content(batch.output_file_id).text.splitlines():
        answer = json.loads(line)
        found[answer["custom_id"]] = answer["response"]["body"]["choices"][0]["message"]
    for call in found["tools"]["tool_calls"]:
        check_arguments(call["function"]["name"], call["function"]["arguments"])
    Weather.model_validate_json(found["form"]["content"], strict=True)
    now = client.chat.completions.create(**bodies["form"]).choices[0].message.content
    assert found["form"]["content"] == now and found["plain"]["content"]
    [line] = client.files.content(batch.error_file_id).text.splitlines()
    assert json.loads(line)["custom_id"] == "wrong"
    assert json.loads(line)["response"]["body"]["error"]["param"] == "tool_choice"
    for id in (file.id, batch.output_file_id, batch.error_file_id):
        assert client.files.delete(id).deleted

    broken = client.files.create(file=("in.jsonl", content + b"\nno json"), purpose="batch")
    failing = client.batches.create(input_file_id=broken.id, endpoint=url, completion_window="24h")
    while failing.status == "validating":
        time.sleep(0.2)
        failing = client.batches.retrieve(failing.id)
    assert failing.status == "failed" and failing.errors and failing.errors.data
    assert failing.errors.data[0].line == len(lines) + 1
    client.files.delete(broken.id)


def main(url: str) -> None:
    checks = [
        check_tool_choice,
        check_chunks,
        check_strict_tools,
        check_conversation,
        check_parse,
        check_errors,
    ]
    with openai.OpenAI(base_url=f"{url}/v1", timeout=120, **STRICT) as client:
        for check in [*checks, check_batches]:
            check(client)
    print(
        f"openai {openai.__version__}, strict: tools auto, none, required, named, strict and from pydantic, calls sent "
        "back, parse, response_format, all streamed too, and batches of them"
    )


if __name__ == "__main__":
    main(sys.argv[1])
