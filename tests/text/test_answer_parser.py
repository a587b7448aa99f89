"""Reasoning and tool calls are found in an answer's text, whole or cut anywhere, and nothing of a text is lost."""

import json
import random

import pytest

from eagle_ray.text.answer import Answer, ChatEvent, ToolCall, answer_of
from eagle_ray.text.answer_parser import AnswerParser, parse_answer
from eagle_ray.text.chat_format import REASONING_PARSERS, TOOL_PARSERS, ChatFormat
from eagle_ray.text.chat_options import ChatOptions

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "get.weather", "f")]
OPTIONS = ChatOptions.of({"tools": TOOLS})
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}"}]}}'
ADD_CALL = ToolCall("add", '{"a": 1, "b": [2, {"c": "}"}]}')
F_CALL = ToolCall("f", "{}")


def parser_of(form, prompt_end="", reasoning=None, options=OPTIONS):
    return AnswerParser.of(ChatFormat(form, reasoning), options, prompt_end)


def answer(form, text, prompt_end="", reasoning=None, options=OPTIONS):
    return parse_answer(text, parser_of(form, prompt_end, reasoning, options))


def merged_events(events):
    """Return the events with neighbours of one kind joined, so that they do not depend on how a text was cut."""
    joined = []
    for event in events:
        last = joined[-1] if joined else None
        if (
            last
            and (last.kind, last.index) == (event.kind, event.index)
            and event.kind not in ("call", "broken")
        ):
            joined[-1] = ChatEvent(last.kind, last.text + event.text, last.index)
        else:
            joined.append(event)
    return joined


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello.\n", Answer("Hello.\n")),
        (f"<tool_call>\n{ADD}\n</tool_call>", Answer("", "", (ADD_CALL,))),
        (f"I add.\n<tool_call>\n{ADD}\n</tool_call>\n", Answer("I add.", "", (ADD_CALL,))),
        (
            f'<tool_call>{ADD}</tool_call>\n<tool_call>\n{{"name": "f", "arguments": {{}}}}\n</tool_call>\nDone.',
            Answer("Done.", "", (ADD_CALL, F_CALL)),
        ),
        (f"<tool_call>\n{ADD}", Answer("", "", (ADD_CALL,))),
        (f"<tool_call>\n{ADD}\n</tool_c", Answer("", "", (ADD_CALL,))),
        (
            '<tool_call>{"arguments": {"a": "é"}, "name": "f"}</tool_call>',
            Answer("", "", (ToolCall("f", '{"a": "é"}'),)),
        ),
        ('<tool_call>{"name": "f"}</tool_call>', Answer("", "", (F_CALL,))),
        (
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
            Answer("", "", (ToolCall("f", '{"a": 1}'),)),
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"s": "</tool_call> \\" \\\\"}}</tool_call>',
            Answer("", "", (ToolCall("f", '{"s": "</tool_call> \\" \\\\"}'),)),
        ),
    ],
)
def test_hermes(text, expected):
    assert answer("hermes", text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "a\n\n<tool_call>\nnothing",
        "Use <tool_call> and </tool_call> for it.",
        '<tool_call>\n{"name": "add", "arguments": {bad}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}, bad}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": NaN}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}, "arguments": {"a": 2}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}, "name": "f"}\n</tool_call>',
        '<tool_call>\n{"name": "unknown", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": "text"}\n</tool_call>',
        '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": 1',
        '<tool_call>\n{"name": "ad',
        '<tool_call>\n{"name": "add", "arguments": '
        + '{"a":' * 3000
        + "1"
        + "}" * 3001
        + "\n</tool_call>",
    ],
)
def test_text_that_only_starts_like_a_call_is_content_unchanged(text):
    assert answer("hermes", text) == Answer(text)
    assert answer("mistral", text.replace("<tool_call>", "[TOOL_CALLS][")).calls == ()
    mistral = text.replace("<tool_call>", "[TOOL_CALLS]")
    assert answer("mistral", mistral) == Answer(mistral)
    llama = text.replace("<tool_call>", "<|python_tag|>")
    assert answer("llama3_json", llama) == Answer(llama)


def test_a_broken_call_does_not_hide_the_next_one():
    text = f'<tool_call>{{"name": "add", "arguments": {{bad}}}}</tool_call>\n<tool_call>{ADD}</tool_call>'
    assert answer("hermes", text) == Answer(
        '<tool_call>{"name": "add", "arguments": {bad}}</tool_call>', "", (ADD_CALL,)
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "add", "parameters": {"a": 1}}', Answer("", "", (ToolCall("add", '{"a": 1}'),))),
        ('\n\n{"name": "f", "parameters": {}}', Answer("", "", (F_CALL,))),
        ('<|python_tag|>{"name": "f", "parameters": {}}', Answer("", "", (F_CALL,))),
        (
            '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "add", "arguments": {"a": 1}}',
            Answer("", "", (F_CALL, ToolCall("add", '{"a": 1}'))),
        ),
        ('{"type": "function", "name": "f", "parameters": {}}', Answer("", "", (F_CALL,))),
        ('It is.\n<|python_tag|>{"name": "f", "parameters": {}}', Answer("It is.", "", (F_CALL,))),
        ('{"name": "Ann", "age": 3}', Answer('{"name": "Ann", "age": 3}')),
        ('Say {"name": "f", "parameters": {}}', Answer('Say {"name": "f", "parameters": {}}')),
        ('<|python_tag|>search.call(query="x")', Answer('<|python_tag|>search.call(query="x")')),
    ],
)
def test_llama3_json(text, expected):
    assert answer("llama3_json", text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"[TOOL_CALLS][{ADD}]", Answer("", "", (ADD_CALL,))),
        (
            f'[TOOL_CALLS] [{ADD}, {{"name": "f", "arguments": {{}}}}]',
            Answer("", "", (ADD_CALL, F_CALL)),
        ),
        (
            f'Well. [TOOL_CALLS][{ADD}, {{"name": "unknown"}}]',
            Answer('Well. , {"name": "unknown"}]', "", (ADD_CALL,)),
        ),
        (
            '[TOOL_CALLS]f{}[TOOL_CALLS]add[ARGS]{"a": 1}',
            Answer("", "", (F_CALL, ToolCall("add", '{"a": 1}'))),
        ),
        ("[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]{}", Answer("", "", (F_CALL,))),
        ("[TOOL_CALLS]get.weather{}", Answer("", "", (ToolCall("get.weather", "{}"),))),
        ("[TOOL_CALLS]unknown{}", Answer("[TOOL_CALLS]unknown{}")),
        ("[TOOL_CALLS]f{bad}", Answer("[TOOL_CALLS]f{bad}")),
        ("[TOOL_CALLS]f", Answer("[TOOL_CALLS]f")),
        ("[TOOL_CALLS]" + "f" * 300 + "{}", Answer("[TOOL_CALLS]" + "f" * 300 + "{}")),
        ("[TOOL_CALLS][]", Answer("[TOOL_CALLS][]")),
    ],
)
def test_mistral(text, expected):
    assert answer("mistral", text) == expected


@pytest.mark.parametrize(
    ("reasoning", "prompt_end", "text", "expected"),
    [
        ("qwen3", "<|assistant|>\n", "<think>\nHm.\n</think>\n\nFour.", Answer("Four.", "Hm.")),
        ("qwen3", "<|assistant|>\n", "Four.</think>", Answer("Four.</think>")),
        ("qwen3", "<|assistant|>\n", "\n <think>Hm.</think>Four.", Answer("Four.", "Hm.")),
        ("qwen3", "<think>\n", "Hm.\n</think>\n\nFour.\n", Answer("Four.\n", "Hm.")),
        ("qwen3", "<think>\n\n</think>\n\n", "Four.", Answer("Four.")),
        ("qwen3", "<think>\n", "Hm,\n\nso", Answer("", "Hm,\n\nso")),
        ("qwen3", "", "<think>\n\n</think>\n\nFour.", Answer("Four.")),
        ("qwen3", "", " <th", Answer(" <th")),
        ("deepseek_r1", "<|assistant|>", "Hm.</think>Four.", Answer("Four.", "Hm.")),
        ("deepseek_r1", "<|assistant|><think>\n", "Hm.</think>Four.", Answer("Four.", "Hm.")),
        ("deepseek_r1", "<|assistant|>", "<think>Hm.</think>Four.", Answer("Four.", "Hm.")),
        ("deepseek_r1", "<think>\n</think>", "Four.", Answer("Four.")),
    ],
)
def test_reasoning(reasoning, prompt_end, text, expected):
    assert answer(None, text, prompt_end, reasoning) == expected


def test_calls_in_the_reasoning_are_reasoning():
    call = f"<tool_call>{ADD}</tool_call>"
    text = f"<think>\nSay {call}?\n</think>\n\nYes.\n{call}"
    assert answer("hermes", text, "", "qwen3") == Answer("Yes.", f"Say {call}?", (ADD_CALL,))


def test_without_tools_nothing_is_a_call():
    text = f"<tool_call>{ADD}</tool_call>"
    assert answer("hermes", text, options=ChatOptions()) == Answer(text)
    assert answer(
        "hermes", text, options=ChatOptions.of({"tools": TOOLS, "tool_choice": "none"})
    ) == Answer(text)


def test_without_parallel_calls_the_first_that_is_one_is_kept():
    first = ChatOptions.of({"tools": TOOLS, "parallel_tool_calls": False})
    broken = '<tool_call>{"name": "f", "arguments": {bad}}</tool_call>'
    text = (
        f"{broken}<tool_call>{ADD}</tool_call>"
        + '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    )
    assert answer("hermes", text, options=first) == Answer(broken, "", (ADD_CALL,))
    assert len(answer("hermes", text).calls) == 2


def test_a_named_tool_is_the_only_one_that_may_be_called():
    named = ChatOptions.of(
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}
    )
    text = f"<tool_call>{ADD}</tool_call>"
    assert answer("hermes", text, options=named) == Answer(text)


def test_arguments_are_told_as_they_come_after_the_name():
    parser = parser_of("hermes")
    pieces = [
        "Hi <tool",
        '_call>\n{"name": "ad',
        'd", "arguments": ',
        '{"a"',
        ": 1",
        "2}",
        "}\n</tool_call>",
    ]
    assert [parser.feed(piece) for piece in pieces] == [
        [ChatEvent("content", "Hi ")],
        [],
        [],
        [ChatEvent("call", "add", 0), ChatEvent("arguments", '{"a"', 0)],
        [ChatEvent("arguments", ": 1", 0)],
        [ChatEvent("arguments", "2}", 0)],
        [],
    ]
    assert parser.end() == []


PIECES = [
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
    ),
    *(
        ADD,
        '{"name": "f", "parameters": {}}',
        '{"name": "f", "arguments": {"a": "\\"}\\\\"}}',
        '{"arguments": {}, "name": "f"}',
    ),
    *(
        "f",
        "add",
        "get.weather",
        "{}",
        '{"a": 1}',
        "{",
        "}",
        "[",
        "]",
        ",",
        ";",
        '"',
        "\\",
        "\n",
        " ",
        "Hello",
        "é",
    ),
    *(
        '{"name": "add", "arguments": {bad}}',
        '{"name": "add", "arguments": {"a": 1}, "x"',
        '"name"',
        "<",
        "\n\n",
    ),
]

CALLS = {
    "hermes": [
        "<tool_call>\n",
        f"<tool_call>\n{ADD}\n</tool_call>\n",
        f"<tool_call>{ADD}}}</tool_call>",
        "</think>",
    ],
    "llama3_json": [f"<|python_tag|>{ADD}", f"; {ADD}", "</think>"],
    "mistral": [
        f"[TOOL_CALLS][{ADD}]",
        f"[TOOL_CALLS][{ADD}, {ADD}",
        "[TOOL_CALLS]add",
        '[TOOL_CALLS]f{"a": 1}',
        "</think>",
    ],
}


@pytest.mark.parametrize("num_texts", [130, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", TOOL_PARSERS)
@pytest.mark.parametrize("reasoning", [None, *REASONING_PARSERS])
def test_events_do_not_depend_on_how_a_text_is_cut(form, reasoning, num_texts):
    draw = random.Random(f"{form} {reasoning}")
    num_calls = 0
    for _ in range(num_texts):
        text = "".join(draw.choices(PIECES + CALLS[form] * 3, k=draw.randint(1, 9)))
        prompt_end = draw.choice(["", "<think>\n"])
        whole = parser_of(form, prompt_end, reasoning)
        expected = merged_events([*whole.feed(text), *whole.end()])
        for cuts in ([1] * len(text), [draw.randint(1, 8) for _ in text]):
            parser, events, at = parser_of(form, prompt_end, reasoning), [], 0
            for size in cuts:
                events += parser.feed(text[at : at + size])
                at += size
            assert merged_events([*events, *parser.end()]) == expected, (text, cuts)
        num_calls += len(answer_of(expected).calls)
        kept = answer_of(expected)
        assert all(isinstance(json.loads(call.arguments), dict) for call in kept.calls)
        if not kept.calls and reasoning is None:
            assert kept.content == text
    assert num_calls > num_texts // 14
