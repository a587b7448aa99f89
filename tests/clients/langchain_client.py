"""langchain-openai against a server: python langchain_client.py URL.

The server's chat template must read tools. Knows nothing of eagle_ray.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
from typing import Any

import httpx
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from weather import MAX_TOKENS, OTHER_TOOL, Weather, check_arguments

ASK = "What is the weather in Paris?"


@tool(args_schema=Weather)
def get_weather(city: str, days: int, is_celsius: bool) -> str:
    """Get the weather of a city."""
    return f"21 degrees in {city}"


def check_messages(chat: ChatOpenAI) -> None:
    answer = chat.invoke([SystemMessage("Be short."), HumanMessage(ASK)])
    assert answer.content and answer.usage_metadata and answer.usage_metadata["output_tokens"] > 0
    pieces = list(chat.stream([SystemMessage("Be short."), HumanMessage(ASK)]))
    assert "".join(str(piece.content) for piece in pieces) == answer.content and len(pieces) > 2
    assert sum(piece.usage_metadata is not None for piece in pieces) == 1
    assert [one.content for one in chat.batch([ASK] * 3)] == [chat.invoke(ASK).content] * 3


def check_forms(chat: ChatOpenAI) -> None:
    for method in ("json_schema", "function_calling"):
        for form in (Weather, Weather.model_json_schema()):
            found: Any = chat.with_structured_output(form, method=method).invoke(ASK)
            found = Weather.model_validate(found, strict=True) if form is not Weather else found
            assert isinstance(found, Weather), (method, found)
    strict: Any = chat.with_structured_output(
        Weather, method="function_calling", strict=True, include_raw=True
    )
    found = strict.invoke(ASK)
    assert isinstance(found["parsed"], Weather) and found["parsing_error"] is None
    assert list(chat.with_structured_output(Weather).stream(ASK))[
        -1
    ] == chat.with_structured_output(Weather).invoke(ASK)


def check_tools(chat: ChatOpenAI) -> None:
    """A call by each choice, whole and streamed; the tool runs, and its result goes back."""
    for choice in ("any", "required", "get_weather"):
        bound = chat.bind_tools(
            [get_weather, OTHER_TOOL], tool_choice=choice, strict=True, parallel_tool_calls=False
        )
        answer: AIMessage = bound.invoke(ASK)
        assert len(answer.tool_calls) == 1, answer
        [call] = answer.tool_calls
        check_arguments(call["name"], call["args"])
        whole: Any = None
        for piece in bound.stream(ASK):
            whole = piece if whole is None else whole + piece
        assert (
            isinstance(whole, AIMessageChunk)
            and whole.response_metadata["finish_reason"] == "tool_calls"
        )
        assert [(one["name"], one["args"]) for one in whole.tool_calls] == [
            (call["name"], call["args"])
        ]
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    history: list[BaseMessage] = [HumanMessage(ASK), answer, result]
    assert chat.bind_tools([get_weather], tool_choice="none").invoke(history).content
    free = chat.bind_tools([get_weather, OTHER_TOOL]).invoke(ASK)
    assert free.content or free.tool_calls


def check_responses(chat: ChatOpenAI) -> None:
    """The Responses API: a text, its stream, a form, and a call whose result goes back."""
    answer = chat.invoke(ASK)
    assert answer.text and "".join(piece.text for piece in chat.stream(ASK)) == answer.text
    assert isinstance(chat.with_structured_output(Weather).invoke(ASK), Weather)
    called = chat.bind_tools(
        [get_weather], tool_choice="required", strict=True, parallel_tool_calls=False
    ).invoke(ASK)
    [call] = called.tool_calls
    check_arguments(call["name"], call["args"])
    history: list[BaseMessage] = [HumanMessage(ASK), called, get_weather.invoke(call)]
    assert chat.bind_tools([get_weather], tool_choice="none").invoke(history).text


async def check_async(chat: ChatOpenAI) -> None:
    forms: Any = chat.with_structured_output(Weather)
    assert all(isinstance(found, Weather) for found in await forms.abatch([ASK] * 4))
    assert (
        "".join([str(piece.content) async for piece in chat.astream(ASK)])
        == (await chat.ainvoke(ASK)).content
    )


def main(url: str) -> None:
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    settings: Any = {"model": model, "max_tokens": MAX_TOKENS, "stream_usage": True}
    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120, **settings)
    for check in (check_messages, check_forms, check_tools):
        check(chat)
    check_responses(
        ChatOpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            max_retries=0,
            timeout=120,
            use_responses_api=True,
            **settings,
        )
    )
    asyncio.run(check_async(chat))
    version = importlib.metadata.version("langchain-openai")
    parts = "messages, streams, batch, with_structured_output, bind_tools by each choice, calls sent back, async"
    print(f"langchain-openai {version}: {parts}; by responses too")


if __name__ == "__main__":
    main(sys.argv[1])
