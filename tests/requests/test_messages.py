"""Messages: text parts, tool calls and names reach the chat template as transformers documents them."""

import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from eagle_ray.core.errors import RequestError
from eagle_ray.requests.messages import (
    WrongMessage,
    check_messages,
    parse_messages,
    template_messages,
)

ARGUMENTS = {"city": "Paris", "days": None}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)},
}
USER = {
    "role": "user",
    "name": "ann",
    "content": [{"type": "text", "text": "Wea"}, {"type": "text", "text": "ther?"}],
}
TOOL = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "rain"}
CHAT = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, TOOL]
# As Qwen's, Llama's and DeepSeek's: tests of content for truth, for none, and arguments written by
# tojson.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}>"
    "{% if m.tool_calls and m['content'] is none %}"
    "{% for call in m.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{% else %}{{ m['content'] + '.' }}{% endif %}{% endfor %}"
)


def template_form(messages) -> list[dict]:
    return template_messages(parse_messages(messages, "messages"))


def test_what_the_template_reads():
    user, call, tool = template_form(CHAT)
    assert user == {"role": "user", "name": "ann", "content": "Weather?"} and tool == TOOL
    assert call["content"] is None and call["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    [text], _ = render_jinja_template([[user, call, tool]], chat_template=TEMPLATE)
    assert (
        text
        == '<user ann>Weather?.<assistant>weather{"city": "Paris", "days": null}<tool weather>rain.'
    )


def test_messages_are_kept_as_the_row_has_them():
    assert json.loads(parse_messages(CHAT, "messages")) == CHAT
    assert json.loads(parse_messages(json.dumps(CHAT), "messages")) == CHAT


def test_parquet_has_every_key_of_every_message():
    padded = [
        {"role": m["role"], "name": None, "content": None, "tool_calls": None} | m for m in CHAT
    ]
    assert template_form(padded) == template_form(CHAT)
    call = {"index": None, **CALL, "function": CALL["function"] | {"strict": None}}
    assert template_form(
        [{"role": "assistant", "content": None, "tool_calls": [call]}]
    ) == template_form(CHAT[1:2])
    part = {"type": "text", "text": "Hi", "image_url": None, "cache_control": {"type": "ephemeral"}}
    assert template_form([{"role": "user", "content": [part]}]) == [
        {"role": "user", "content": "Hi"}
    ]


def test_missing_content_and_non_object_arguments_are_unchanged():
    bare = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}
    assert template_form([bare]) == [bare]


@pytest.mark.parametrize(
    "function", [{}, *({"arguments": x} for x in ("null", "", " \n", None, {}))]
)
def test_a_call_without_arguments_has_an_empty_object(function):
    [message] = template_form(
        [{"role": "assistant", "tool_calls": [{"function": {"name": "now"} | function}]}]
    )
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "images (image_url)",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": ""}, {"type": "input_audio"}]},
            "content[1]: audio (",
        ),
        (
            {"role": "user", "content": [{"type": "video"}]},
            "video (video) are not supported: this engine reads text only. Leave the part out",
        ),
        (
            {"role": "user", "content": ["Hi"]},
            'messages[0].content[0] must be {"type": "text", "text": "..."}',
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "the only kind of part that is read"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "image": "b"}]},
            "messages[0].content[0] must be",
        ),
        (
            {"role": "user", "tool_calls": [CALL]},
            "messages[0].tool_calls: only of the assistant, not of role user",
        ),
        ({"role": "assistant", "tool_calls": "f()"}, "messages[0].tool_calls must be a list of {"),
        (
            {"role": "assistant", "tool_calls": ["f()"]},
            "messages[0].tool_calls[0]: tool_calls must be a list of {",
        ),
        (
            {"role": "assistant", "tool_calls": [CALL, {}]},
            "messages[0].tool_calls[1].function: tool_calls must be",
        ),
        (
            {"role": "assistant", "tool_calls": [CALL | {"id": 5}]},
            "messages[0].tool_calls[0].id: tool_calls must be",
        ),
        (
            {"role": "assistant", "content": "a", "refusal": "no"},
            "messages[0].refusal is not supported: this system",
        ),
        (
            {"role": "user", "content": "a", "audio": {"id": "b"}},
            "messages[0].audio is not supported",
        ),
        (
            {"role": "assistant", "content": "a", "function_call": {"name": "f"}},
            "function_call is not supported",
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": []},
            "messages[0].content must be a text, got None",
        ),
        ({"role": "tool", "content": None}, "messages[0].content must be a text, got None"),
    ],
)
def test_what_is_not_read_is_named(message, says):
    with pytest.raises(RequestError) as error:
        parse_messages([message], "messages")
    assert says in str(error.value)


def test_a_wrong_message_has_its_place_for_every_reader():
    with pytest.raises(WrongMessage) as wrong:
        check_messages([USER, {"role": "user", "content": [{"type": "text"}]}])
    assert (wrong.value.steps, wrong.value.code) == ((1, "content", 0), "unsupported_parameter")
    assert wrong.value.place("body.messages") == "body.messages[1].content[0]"
