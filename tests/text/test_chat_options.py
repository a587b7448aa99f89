"""Tools, tool_choice and template values are checked, and each error names its place."""

import pytest

from eagle_ray.text.chat_options import MAX_TOOLS, ChatOptions

ADD = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
SUB = {"type": "function", "function": {"name": "sub"}}


def test_what_is_absent_or_null_is_off():
    assert ChatOptions.of({}) == ChatOptions() == ChatOptions.of(dict.fromkeys(["tools", "tool_choice"]))
    assert not ChatOptions.of({"tools": []}).has_tools


def test_the_choice_of_a_tool():
    both = {"tools": [ADD, SUB]}
    assert ChatOptions.of(both).callable_names == ("add", "sub")
    assert ChatOptions.of(both | {"tool_choice": "none"}).tools == ()
    assert ChatOptions.of(both | {"tool_choice": "required"}).must_call
    named = ChatOptions.of(both | {"tool_choice": {"type": "function", "function": {"name": "sub"}}})
    assert named.must_call and named.callable_names == ("sub",) and named.tools == (ADD, SUB)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tools": "add"}, "tools: must be a list of tools"),
        ({"tools": [ADD, {"type": "function"}]}, r"tools\[1\]: must be"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\]: must be"),
        ({"tools": [{"type": "function", "function": {}}]}, r"tools\[0\]\.function\.name: must be 1 to 64"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, r"tools\[0\]\.function\.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, r"function\.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]}, r"function\.strict"),
        ({"tools": [ADD, ADD]}, "'add' is the name of two tools"),
        ({"tools": [ADD] * (MAX_TOOLS + 1)}, f"tools: must be at most {MAX_TOOLS} tools, got {MAX_TOOLS + 1}"),
        ({"tools": [ADD], "tool_choice": "any"}, "tool_choice: must be none, auto, required"),
        ({"tools": [ADD], "tool_choice": {"type": "function"}}, "tool_choice: must be"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "no tool 'sub'"),
        ({"tool_choice": "required"}, "tool_choice: 'required' needs tools"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls: must be true or false"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs: must be an object"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs: must be an object"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs: 'tokenize'"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs: 'self' is not a value of the template"),
        ({"chat_template_kwargs": {"conversations": []}}, "chat_template_kwargs: 'conversations'"),
    ],
)
def test_an_error_names_its_place(values, message):
    with pytest.raises(ValueError, match=message):
        ChatOptions.of(values)
