"""The Responses API: the answers are a chat's, the events add up to the response, and state is refused by name."""

import asyncio
import json

import pytest

from tests.support.serving import ADD, ARGUMENTS, ASK, CALL, get, post, request

URL = "/v1/responses"
BAD_FORM = {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}
TOOL = {
    "type": "function",
    "name": "add",
    "parameters": ADD["function"]["parameters"],
    "strict": False,
}
HEAD = ("response.created", "response.in_progress")


def respond(app, **body):
    answer = asyncio.run(post(app, URL, {"input": "Add 1 and 2."} | body))
    assert answer.status == 200, answer.body
    return answer.json


def stream(app, **body):
    answer = asyncio.run(post(app, URL, {"input": "Add 1 and 2.", "stream": True} | body))
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for part in answer.body.decode().split("\n\n")[:-1]:
        name, _, data = part.partition("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_ids(value):
    """Ids and times are of a request."""
    if isinstance(value, dict):
        return {
            k: without_ids(v)
            for k, v in value.items()
            if k != "id" and not k.endswith(("_id", "_at"))
        }
    return [without_ids(one) for one in value] if isinstance(value, list) else value


def rounded(value):
    """A log-probability is rounded as the pass that verified its token, and drafts may differ."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


def logprobs(tokens):
    return [token["logprob"] for token in tokens]


def texts(response):
    """What the items say, by their types."""
    said = []
    for item in response["output"]:
        if item["type"] == "function_call":
            said.append((item["type"], item["name"], item["arguments"], item["status"]))
        else:
            said.append(
                (item["type"], "".join(part["text"] for part in item["content"]), item["status"])
            )
    return said


@pytest.mark.parametrize("size", [1, 3, 100])
def test_items_whole_and_as_events(scripted_app, size):
    app = scripted_app(f"<think>\nOne and two.\n</think>\n\nI add.\n{CALL}\n{CALL}", size)
    whole = respond(app, tools=[TOOL])
    call = ("function_call", "add", ARGUMENTS, "completed")
    assert texts(whole) == [
        ("reasoning", "One and two.", "completed"),
        ("message", "I add.", "completed"),
        call,
        call,
    ]
    assert (whole["status"], whole["error"], whole["incomplete_details"]) == (
        "completed",
        None,
        None,
    )
    assert (
        len(
            {item["id"] for item in whole["output"]}
            | {whole["output"][i]["call_id"] for i in (2, 3)}
        )
        == 6
    )
    assert whole["tools"] == [TOOL | {"description": None}] and whole["tool_choice"] == "auto"
    events = stream(app, tools=[TOOL])
    assert (
        tuple(event["type"] for event in events[:2]) == HEAD
        and events[-1]["type"] == "response.completed"
    )
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    built = items_of_events(events)
    assert built == events[-1]["response"]["output"]


def items_of_events(events):
    """The items that a client builds from the events alone."""
    items = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
        elif kind == "response.content_part.added":
            items[event["output_index"]]["content"].append(event["part"])
        elif kind in ("response.output_text.delta", "response.reasoning_text.delta"):
            part = items[event["output_index"]]["content"][event["content_index"]]
            part["text"] += event["delta"]
            assert event["item_id"] == items[event["output_index"]]["id"]
            if "logprobs" in part:
                part["logprobs"] += event["logprobs"]
        elif kind == "response.function_call_arguments.delta":
            items[event["output_index"]]["arguments"] += event["delta"]
        elif kind == "response.output_item.done":
            items[event["output_index"]]["status"] = event["item"]["status"]
            assert items[event["output_index"]] == event["item"]
    return items


def test_what_max_output_tokens_cuts_is_incomplete(scripted_app):
    app = scripted_app("Three and more.")
    whole = respond(app, max_output_tokens=4)
    assert whole["status"] == "incomplete" and whole["incomplete_details"] == {
        "reason": "max_output_tokens"
    }
    assert whole["output"][0]["status"] == "incomplete" and whole["usage"]["output_tokens"] == 4
    assert stream(app, max_output_tokens=4)[-1]["type"] == "response.incomplete"


def test_invalid_tool_call_is_incomplete_and_its_text_follows(scripted_app):
    text = '<tool_call>\n{"name": "add", "arguments": {oops}}\n</tool_call>'
    app = scripted_app(text, 1)
    assert texts(respond(app, tools=[TOOL])) == [("message", text, "completed")]
    [call, message] = texts(stream(app, tools=[TOOL])[-1]["response"])
    assert (
        call[0] == "function_call"
        and call[3] == "incomplete"
        and message == ("message", text, "completed")
    )


def test_a_conversation_is_the_chats(qwen, scripted_app):
    app = scripted_app("Three.")
    first = respond(app, instructions="Be short.", tools=[TOOL])
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Add 1 and 2."}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "call_1",
            "name": "add",
            "arguments": '{"a":1,"b":2}',
        },
        {"type": "function_call_output", "call_id": "call_1", "output": "3"},
        *first["output"],
        {"type": None, "role": "user", "content": "Thanks."},
    ]
    second = respond(app, input=items, tools=[TOOL])
    messages = [
        *ASK,
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"a":1,"b":2}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
        {"role": "assistant", "content": "Three."},
        {"role": "user", "content": "Thanks."},
    ]
    tools = [{"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}]
    chat = asyncio.run(
        post(app, "/v1/chat/completions", {"messages": messages, "tools": tools})
    ).json
    assert second["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert (
        second["output"][0]["content"][0]["text"]
        == chat["choices"][0]["message"]["content"]
        == "Three."
    )


def test_answer_cut_off_in_its_reasoning_can_be_sent_back(app):
    """Its output is a reasoning item alone."""
    cut = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    }
    again = {"role": "user", "content": "Go on."}
    found = respond(app, input=[*ASK, cut, again], max_output_tokens=4)
    chat = [*ASK, {"role": "assistant", "content": "", "reasoning_content": "Hm."}, again]
    expected = asyncio.run(
        post(app, "/v1/chat/completions", {"messages": chat, "max_tokens": 4})
    ).json
    assert found["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]


def test_a_real_answer_is_the_chats(app):
    body = {"temperature": 0.8, "seed": 5, "top_p": 0.9}
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "a", "schema": schema}
    for extra, chat_extra in (
        ({"max_output_tokens": 12}, {"max_tokens": 12}),
        (
            {"text": {"format": form}, "max_output_tokens": 60},
            {"response_format": {"type": "json_schema", "json_schema": form}, "max_tokens": 60},
        ),
    ):
        whole = respond(
            app, **body, **extra, include=["message.output_text.logprobs"], top_logprobs=2
        )
        events = stream(
            app, **body, **extra, include=["message.output_text.logprobs"], top_logprobs=2
        )
        chat_body = {"messages": ASK, **body, **chat_extra, "logprobs": True, "top_logprobs": 2}
        [choice] = asyncio.run(post(app, "/v1/chat/completions", chat_body)).json["choices"]
        [part] = whole["output"][0]["content"]
        assert part["text"] == choice["message"]["content"]
        assert logprobs(part["logprobs"]) == pytest.approx(
            logprobs(choice["logprobs"]["content"]), abs=1e-4
        )
        assert items_of_events(events) == events[-1]["response"]["output"]
        assert without_ids(events[-1]["response"]["output"]) == rounded(
            without_ids(whole["output"])
        )
        assert (whole["temperature"], whole["top_p"], whole["store"]) == (0.8, 0.9, False)
        assert whole["metrics"]["speculative_decoding"]["num_spec_tokens"] > 0
    assert json.loads(part["text"])["a"] in (1, 2) and whole["text"]["format"] == form


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"store": True}, "store", "no responses are kept"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
        ({"conversation": "conv_1"}, "conversation", "send the whole conversation"),
        ({"background": True}, "background", "/v1/batches"),
        ({"truncation": "auto"}, "truncation", "leave it out"),
        ({"max_tokens": 3}, "max_tokens", "give max_output_tokens"),
        ({"metadata": [None]}, "metadata", "an object of at most 16 texts"),
        ({"min_tokens": -1}, "min_tokens", "0 (off) to max_output_tokens"),
        (
            {"min_tokens": 9, "max_output_tokens": 4},
            "min_tokens",
            "must be at most max_output_tokens (4), got 9",
        ),
        ({"min_tokens": 10**6}, "min_tokens", "must be at most max_output_tokens"),
        ({"n": 2}, "n", "one answer"),
        ({"response_format": {"type": "text"}}, "response_format", "give text.format"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format", "must be {type: text}"),
        ({"text": {"format": BAD_FORM}}, "text.format", "text.format: "),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "leave it out"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort", "chat_template_kwargs"),
        ({"include": ["reasoning.encrypted_content"]}, "include", "leave it out"),
        ({"top_logprobs": 2}, "top_logprobs", "only with include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "runs no tools of its own"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "must be none, auto"),
        ({"input": []}, "input", "at least one item"),
        (
            {"input": [{"type": "item_reference", "id": "a"}]},
            "input[0].type",
            "reads items of type",
        ),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role", "must be system"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
            "text alone",
        ),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input[0].call_id", "must be a text"),
        (
            {"stream": True, "stream_options": {"include_usage": True}},
            "stream_options",
            "the last event has the usage",
        ),
        ({"input": 3}, "input", "must be a text or a list"),
        ({"input": "a", "temperature": -1}, "temperature", "must be a number"),
        ({"input": "a", "nothing": 1}, "nothing", "leave it out"),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_cannot_be_is_refused_by_name(app, body, param, message, is_streamed):
    answer = asyncio.run(post(app, URL, {"input": "Hi", "stream": is_streamed} | body))
    error = answer.json["error"]
    assert (answer.status, error["param"]) == (400, param) and message in error["message"]


def test_nothing_is_kept(app):
    for answer in (
        asyncio.run(get(app, f"{URL}/resp_1")),
        asyncio.run(request(app, "DELETE", f"{URL}/resp_1")),
        asyncio.run(post(app, f"{URL}/resp_1/cancel", {})),
    ):
        assert (answer.status, answer.json["error"]["code"]) == (404, "responses_not_kept")


def test_a_stream_that_fails_in_the_engine_ends_with_an_error(app):
    events = stream(app, choice=["a"], min_tokens=9, max_output_tokens=20)
    assert events[0]["type"] == "response.created" and events[-1]["type"] == "error"
    assert events[-1]["code"] == "grammar_conflict"
