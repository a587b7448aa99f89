"""Parsers are chosen by a template's markers, and markers that are special tokens reach them."""

import pytest

from eagle_ray.config import load_config
from eagle_ray.core.errors import ConfigError, RequestError
from eagle_ray.text.answer import ToolCall
from eagle_ray.text.answer_parser import AnswerParser, parse_answer
from eagle_ray.text.chat_format import ChatFormat
from eagle_ray.text.chat_options import ChatOptions
from eagle_ray.text.tokenizer import Tokenizer
from tests.support.tokenizers import (
    LLAMA3,
    MISTRAL,
    QWEN3,
    R1,
    TEMPLATE,
    special_tokenizer,
    write_tokenizer,
)

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TOOLS = ChatOptions.of({"tools": [ADD]})


@pytest.mark.parametrize(
    ("template", "tool_parser", "reasoning_parser"),
    [
        (QWEN3, "hermes", "qwen3"),
        (R1, None, "qwen3"),
        ("{{ content.split('</think>')[-1] }}", None, "deepseek_r1"),
        (LLAMA3, "llama3_json", None),
        ("<|python_tag|>", "llama3_json", None),
        (MISTRAL, "mistral", None),
        ("<tool_call>\n<function=...>", None, None),
        (TEMPLATE, None, None),
        (None, None, None),
    ],
)
def test_parsers_by_the_template(template, tool_parser, reasoning_parser):
    chat_format = ChatFormat.of(template, "auto", "auto")
    assert (chat_format.tool_parser, chat_format.reasoning_parser) == (
        tool_parser,
        reasoning_parser,
    )
    assert ChatFormat.of(template, "mistral", "deepseek_r1").tool_parser == "mistral"
    assert ChatFormat.of(template, "none", "none").markers == ()


def test_an_unknown_parser_is_refused_by_name():
    for key, names in (
        ("tool_parser", "hermes, llama3_json, mistral"),
        ("reasoning_parser", "qwen3, deepseek_r1"),
    ):
        settings = {f"model.{key}": "hermez", "input.path": "a.jsonl", "output.path": "o"}
        with pytest.raises(ConfigError, match=rf"model\.{key}.*{names}"):
            load_config(None, env={}, overrides=settings)


def test_ids_of_calls_fit_their_template_and_name_their_answer():
    hermes, mistral = ChatFormat("hermes"), ChatFormat("mistral")
    [call] = hermes.openai_calls([ToolCall("add", "{}")], "q1/0")
    assert call == {
        "id": call["id"],
        "type": "function",
        "function": {"name": "add", "arguments": "{}"},
    }
    assert call["id"].startswith("call_") and call["id"] == hermes.call_id(
        "q1/0", 0
    ) != hermes.call_id("q1/1", 0)
    assert len(mistral.call_id("q1/0", 0)) == 9 and mistral.call_id("q1/0", 0).isalnum()


def test_special_token_markers_are_visible_to_the_parser_alone(tmp_path):
    tokenizer = special_tokenizer(tmp_path, MISTRAL, "[TOOL_CALLS]", "[OTHER]")
    ids = tokenizer.encode(
        '[TOOL_CALLS][{"name": "add", "arguments": {}}][OTHER]', add_special_tokens=False
    )
    assert tokenizer.decode(ids) == '[{"name": "add", "arguments": {}}]'
    text = tokenizer.with_markers().final_text([*ids, 1], [])
    assert text == '[TOOL_CALLS][{"name": "add", "arguments": {}}]'
    parser = AnswerParser.of(tokenizer.chat_format, TOOLS, tokenizer.prompt_end([]))
    assert parse_answer(text, parser).calls == (ToolCall("add", "{}"),)
    stream = tokenizer.with_markers().decode_stream([])
    assert "".join(stream.grow([token]) for token in ids) + stream.end([*ids, 1]) == text


def test_an_open_reasoning_is_seen_in_the_prompts_ids(tmp_path):
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, R1))
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    parser = AnswerParser.of(tokenizer.chat_format, ChatOptions(), tokenizer.prompt_end(ids))
    assert parse_answer("Hm.\n</think>\n\nHello.", parser).content == "Hello."


@pytest.mark.parametrize("template", [QWEN3, LLAMA3, MISTRAL])
def test_history_with_calls_and_results_renders_in_each_template(tmp_path, template):
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, template))
    call = tokenizer.chat_format.openai_calls([ToolCall("add", '{"a": 1}')], "q1")[0]
    call["function"]["arguments"] = {"a": 1}
    history = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    written = tokenizer.render_chat(history, options=TOOLS)
    assert '"name": "add", "' in written and '{"a": 1}' in written and "3" in written


@pytest.mark.parametrize(
    ("template", "message"),
    [(TEMPLATE, "does not read them"), ("{{ tools }}", r"Set model\.tool_parser to hermes")],
)
def test_tools_that_cannot_be_used_are_refused(tmp_path, template, message):
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, template))
    with pytest.raises(RequestError, match=message):
        tokenizer.render_chat([{"role": "user", "content": "Hi"}], options=TOOLS)


def test_values_for_the_template(tmp_path):
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, "{{ style }}"))
    options = ChatOptions.of({"chat_template_kwargs": {"style": "short"}})
    assert tokenizer.render_chat([{"role": "user", "content": "Hi"}], options=options) == "short"
