"""Tools, reasoning and template values over HTTP: prompts by the real template, answers that a script writes."""

import asyncio
import json

import pytest

from eagle_ray.assembly.hub import download
from eagle_ray.serve.app import build_app
from eagle_ray.text.tokenizer import Tokenizer
from tests.support.serving import ADD, ARGUMENTS, ASK, CALL, post
from tests.support.tokenizers import LLAMA3, MISTRAL, R1, write_named

CHAT = "/v1/chat/completions"
BAD_SCHEMA = {
    "strict": True,
    "parameters": {"type": "object", "properties": {"a": {"type": "nothing"}}},
}
LLAMA3_CALL = f'{{"name": "add", "parameters": {ARGUMENTS}}}'
LLAMA3_OTHER = '{"name": "f", "parameters": {}}'


def whole_choice(app, **body):
    answer = asyncio.run(post(app, CHAT, {"messages": ASK, **body}))
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]


def streamed_message(app, **body):
    """The deltas, and the message that OpenAI's clients put together from them."""
    events = asyncio.run(post(app, CHAT, {"messages": ASK, "stream": True, **body})).events[:-1]
    choices = [event["choices"][0] for event in events]
    message = {"role": "assistant", "content": None, "refusal": None}
    for delta in (choice["delta"] for choice in choices):
        for name in {"content", "reasoning_content"} & delta.keys():
            if delta[name] is not None:
                message[name] = (message.get(name) or "") + delta[name]
        for part in delta.get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if "id" in part:
                assert part["index"] == len(calls) and part["function"]["name"]
                calls.append({name: part[name] for name in ("id", "type", "function")})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    return choices, message, choices[-1]["finish_reason"]


def without_ids(message):
    """Ids are of a request: leave how they begin."""
    calls = [
        call | {"id": call["id"][:5] if "_" in call["id"] else ""}
        for call in message.get("tool_calls", [])
    ]
    return message | ({"tool_calls": calls} if calls else {})


@pytest.fixture
def with_template(qwen, monkeypatch, tmp_path):
    """A function that gives the endpoint another chat template, whose parsers it then chooses."""

    def change(template):
        (tmp_path / "other.jinja").write_text(template)
        other = Tokenizer.load(download("embedded:tiny", "target"), str(tmp_path / "other.jinja"))
        monkeypatch.setattr(qwen, "text", other)
        return other.chat_format

    return change


def test_a_request_with_tools_has_the_template_for_tools(app, service, monkeypatch, tmp_path):
    named = {
        "default": "[D]{{ messages[0].content }}",
        "tool_use": "[T]{{ tools[0].function.name }}{# <tool_call> #}",
    }
    text = Tokenizer.load(write_named(tmp_path / "t", named, "list"))
    monkeypatch.setattr(service, "text", text)
    for options, prompt in (({}, f"[D]{ASK[0]['content']}"), ({"tools": [ADD]}, "[T]add")):
        answer = asyncio.run(post(app, CHAT, {"messages": ASK, "max_tokens": 1, **options}))
        assert answer.json["usage"]["prompt_tokens"] == len(
            text.encode(prompt, add_special_tokens=False)
        )


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("template", "text", "content", "names"),
    [
        (LLAMA3, LLAMA3_CALL, None, ["add"]),
        (LLAMA3, f"<|python_tag|>{LLAMA3_CALL}; {LLAMA3_OTHER}", None, ["add", "f"]),
        (
            MISTRAL,
            f'Well. [TOOL_CALLS][{{"name": "add", "arguments": {ARGUMENTS}}}]',
            "Well. ",
            ["add"],
        ),
        (MISTRAL, f"[TOOL_CALLS]add[ARGS]{ARGUMENTS}[TOOL_CALLS]f{{}}", None, ["add", "f"]),
        (
            LLAMA3,
            '{"name": "unknown", "parameters": {}}',
            '{"name": "unknown", "parameters": {}}',
            [],
        ),
        (MISTRAL, "[TOOL_CALLS]add{oops}", "[TOOL_CALLS]add{oops}", []),
    ],
)
def test_each_form_of_calls_whole_and_streamed(
    with_template, scripted_app, template, text, content, names, size
):
    tool_parser = with_template(template).tool_parser
    app = scripted_app(text, size)
    tools = [ADD, {"type": "function", "function": {"name": "f"}}]
    choice = whole_choice(app, tools=tools)
    message = choice["message"]
    assert message["content"] == content
    calls = message.get("tool_calls", [])
    assert [call["function"] for call in calls] == [
        {"name": name, "arguments": ARGUMENTS if name == "add" else "{}"} for name in names
    ]
    assert {len(call["id"]) for call in calls} <= {9 if tool_parser == "mistral" else 29}
    _, told, reason = streamed_message(app, tools=tools)
    assert told["content"] == content and reason == choice["finish_reason"] == (
        "tool_calls" if names else "stop"
    )
    if names:  # a call that turns out to be none was begun in the stream
        assert without_ids(told) == without_ids(message)


@pytest.mark.parametrize("more", [{}, {"tool_choice": "required"}, {"stream": True}])
def test_a_wrong_schema_of_a_tool_is_refused_by_its_parameter(qwen, more):
    tool = {
        "type": "function",
        "function": {"name": "f", "strict": True, "parameters": {"type": "nothing"}},
    }
    answer = asyncio.run(post(build_app(qwen), CHAT, {"messages": ASK, "tools": [tool]} | more))
    error = answer.json["error"]
    assert (answer.status, error["param"], error["code"]) == (400, "tools", "bad_grammar")


def test_usage_counts_the_tokens_of_reasoning(scripted_app, qwen):
    thought = "One and two make three."
    app = scripted_app(f"<think>\n{thought}\n</think>\n\nThree.")
    usage = asyncio.run(post(app, CHAT, {"messages": ASK})).json["usage"]
    details = usage["completion_tokens_details"]
    assert details == {"reasoning_tokens": len(qwen.text.encode(thought, add_special_tokens=False))}
    assert 0 < details["reasoning_tokens"] < usage["completion_tokens"]
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    assert asyncio.run(post(app, CHAT, {"messages": ASK, **stream})).events[-2]["usage"] == usage


def test_reasoning_that_the_prompt_opens_is_streamed(with_template, scripted_app):
    assert with_template(R1).reasoning_parser == "qwen3"
    app = scripted_app("Hm.\n</think>\n\nFour.", 1)
    message = {"role": "assistant", "content": "Four.", "refusal": None, "reasoning_content": "Hm."}
    assert whole_choice(app)["message"] == message
    choices, told, _ = streamed_message(app)
    assert told == message and choices[0]["delta"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("written", "reasoning", "content"),
    [
        ("<think>\nq;w\n</think>\n\nxyz", "q;w", "xyz"),
        ("<think>\nq;w\n</think>\n\nxy;z", "q;w", "xy"),
        ("<think>\nq;w\n</think>;z", "q;w", ""),
        ("<think>\nq;w\n</think>\nx\nz;", "q;w", "x\nz"),
        ("<think>\nq;w", "q;w", ""),
        ("<thin;k", None, "<thin"),
        ("xy;z", None, "xy"),
    ],
)
def test_stop_strings_count_from_the_answer_on(scripted_app, written, reasoning, content, size):
    app = scripted_app(written, size)
    message = whole_choice(app, stop=[";"])["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
    _, told, reason = streamed_message(app, stop=[";"])
    assert (told.get("reasoning_content"), told["content"], reason) == (reasoning, content, "stop")


@pytest.mark.parametrize("size", [1, 3, 100])
def test_newlines_behind_reasoning_are_no_stop_strings(scripted_app, size):
    app = scripted_app("<think>\nq\n\nw\n</think>\n\nx\n\nz", size)
    for message in (
        whole_choice(app, stop=["\n\n"])["message"],
        streamed_message(app, stop=["\n\n"])[1],
    ):
        assert (message["reasoning_content"], message["content"]) == ("q\n\nw", "x")


@pytest.mark.parametrize("size", [1, 3, 100])
def test_stop_strings_count_in_reasoning_if_asked_for(scripted_app, size):
    app = scripted_app("<think>\nq;w\n</think>\n\nxyz", size)
    for stop, reasoning in ((";", "q"), ("w\n", "q;")):
        asked = {"stop": [stop], "stop_in_reasoning": True}
        for message in (whole_choice(app, **asked)["message"], streamed_message(app, **asked)[1]):
            assert (message["reasoning_content"], message["content"]) == (reasoning, "")


def test_stop_tokens_count_from_the_answer_on(scripted_app, qwen):
    [semicolon] = qwen.text.encode(";", add_special_tokens=False)
    app = scripted_app("<think>\nq;w\n</think>\n\nxy;z")
    message = whole_choice(app, stop_token_ids=[semicolon])["message"]
    assert (message["reasoning_content"], message["content"]) == ("q;w", "xy")
    message = whole_choice(app, stop_token_ids=[semicolon], stop_in_reasoning=True)["message"]
    assert (message["reasoning_content"], message["content"]) == ("q", "")


def test_a_real_engine_closes_the_reasoning_after_its_budget(with_template, qwen):
    with_template(R1)
    app, asked = build_app(qwen), {"thinking_budget": 5, "temperature": 0.8, "seed": 3}
    choice = whole_choice(app, **asked, max_tokens=20, return_token_ids=True)
    closing = qwen.text.encode("</think>", add_special_tokens=False)
    ids, message = choice["token_ids"], choice["message"]
    assert ids[5 : 5 + len(closing)] == closing and message["content"]
    assert message["reasoning_content"] == qwen.text.decode(ids[:5]).strip("\n")
    _, told, _ = streamed_message(app, **asked, max_tokens=20)
    assert told == message

    answer = asyncio.run(
        post(app, "/v1/responses", {"input": ASK, **asked, "max_output_tokens": 20})
    ).json
    reasoning, said = answer["output"]
    assert (reasoning["content"][0]["text"], said["content"][0]["text"]) == (
        message["reasoning_content"],
        message["content"],
    )


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"messages": ASK}), ("/v1/responses", {"input": ASK})]
)
def test_a_target_that_does_not_think_has_no_budget(app, path, body):
    answer = asyncio.run(post(app, path, body | {"thinking_budget": 5}))
    error = answer.json["error"]
    assert (answer.status, error["param"], error["code"]) == (
        400,
        "thinking_budget",
        "invalid_sampling",
    )
    assert asyncio.run(post(app, path, body | {"thinking_budget": None})).status == 200


@pytest.mark.parametrize("size", [1, 3, 100])
def test_reasoning_content_and_calls_whole_and_streamed(scripted_app, size):
    app = scripted_app(f"<think>\nOne and two.\n</think>\n\nI add.\n{CALL}\n{CALL}", size)
    choice = whole_choice(app, tools=[ADD])
    call = {"id": "call_", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
    message = {
        "role": "assistant",
        "content": "I add.",
        "refusal": None,
        "reasoning_content": "One and two.",
    }
    assert without_ids(choice["message"]) == message | {"tool_calls": [call, call]}
    assert choice["finish_reason"] == "tool_calls"
    first, second = (call["id"] for call in choice["message"]["tool_calls"])
    assert first != second and len(first) == len(second) == 29

    choices, told, reason = streamed_message(app, tools=[ADD])
    assert choices[0]["delta"] == {"role": "assistant", "content": None}
    assert without_ids(told) == without_ids(choice["message"]) and reason == "tool_calls"
    assert len({call["id"] for call in told["tool_calls"]}) == 2
    fragments = [
        c for c in choices if "arguments" in str(c["delta"]) and "id" not in str(c["delta"])
    ]
    assert len(fragments) >= (2 if size == 100 else 4)


def test_lone_tool_calls_have_null_content_and_can_be_serial(scripted_app):
    app = scripted_app(f"{CALL}\n{CALL}")
    choice = whole_choice(app, tools=[ADD], parallel_tool_calls=False)
    assert choice["message"]["content"] is None and len(choice["message"]["tool_calls"]) == 1
    _, told, reason = streamed_message(app, tools=[ADD], parallel_tool_calls=False)
    assert without_ids(told) == without_ids(choice["message"]) and reason == "tool_calls"


def test_what_is_no_call_is_content(scripted_app):
    text = '<tool_call>\n{"name": "add", "arguments": {oops}}\n</tool_call>'
    app = scripted_app(text)
    choice = whole_choice(app, tools=[ADD])
    assert (choice["message"], choice["finish_reason"]) == (
        {"role": "assistant", "content": text, "refusal": None},
        "stop",
    )
    _, told, reason = streamed_message(app, tools=[ADD])
    assert told["content"] == text and reason == "stop"
    app = scripted_app(CALL)
    for body in ({}, {"tools": [ADD], "tool_choice": "none"}):
        assert whole_choice(app, **body)["message"]["content"] == CALL
        assert streamed_message(app, **body)[1:] == (
            {"role": "assistant", "content": CALL, "refusal": None},
            "stop",
        )


def test_tool_call_cut_by_max_tokens_is_content_of_reason_length(scripted_app):
    app = scripted_app(CALL)
    choice = whole_choice(app, tools=[ADD], max_tokens=20, return_token_ids=True)
    assert choice["finish_reason"] == "length" and choice["message"]["content"].startswith(
        "<tool_call>"
    )
    assert "tool_calls" not in choice["message"] and len(choice["token_ids"]) == 20


def test_logprobs_and_ids_of_a_stream_are_told_once(scripted_app):
    app = scripted_app(f"Yes.\n{CALL}")
    choices, _, _ = streamed_message(app, tools=[ADD], return_token_ids=True)
    ids = [token for choice in choices for token in choice.get("token_ids", [])]
    assert ids == whole_choice(app, tools=[ADD], return_token_ids=True)["token_ids"]


HISTORY = [
    *ASK,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "add", "arguments": '{"a":1,"b":2}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "3"},
]


def test_tools_and_history_go_through_the_template(qwen, scripted_app):
    app = scripted_app("Three.")
    choice = whole_choice(app, messages=HISTORY, tools=[ADD], return_token_ids=True)
    prompt = qwen.text.decode_with_special(choice["prompt_token_ids"])
    assert prompt == (
        "<|im_start|>system\nTools:\n" + json.dumps(ADD) + "\nCall one as <tool_call>\n"
        '{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nAdd 1 and 2.<|im_end|>\n"
        '<|im_start|>assistant\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    choice = whole_choice(app, tools=[ADD], tool_choice="none", return_token_ids=True)
    assert "add" not in qwen.text.decode_with_special(choice["prompt_token_ids"])


def test_template_values_reach_the_template(qwen, scripted_app):
    app = scripted_app("Four.")
    choice = whole_choice(
        app, chat_template_kwargs={"enable_thinking": False}, return_token_ids=True
    )
    prompt = qwen.text.decode_with_special(choice["prompt_token_ids"])
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert choice["message"] == {"role": "assistant", "content": "Four.", "refusal": None}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [ADD], "tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": ADD["function"] | BAD_SCHEMA}]}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": {}}, "tools"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
def test_what_is_wrong_is_refused_by_name(qwen, body, param):
    answer = asyncio.run(post(build_app(qwen), CHAT, {"messages": ASK, **body}))
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


def test_a_target_whose_template_reads_no_tools_refuses_them(app):
    answer = asyncio.run(post(app, CHAT, {"messages": ASK, "tools": [ADD]}))
    error = answer.json["error"]
    assert (answer.status, error["param"], error["code"]) == (400, "tools", "unsupported_parameter")
