"""Targets with several chat templates: the one that transformers chooses, for prompts and for parsers of answers."""

import json

import pytest
from transformers import AutoTokenizer

from eagle_ray.config import load_config
from eagle_ray.core.errors import ConfigError, EngineError, RequestError
from eagle_ray.gguf.tokenizer_files import tokenizer_config
from eagle_ray.requests.output_rows import answer_reader
from eagle_ray.requests.request import Request
from eagle_ray.requests.sequences import sequences_of
from eagle_ray.text.chat_options import NO_OPTIONS, ChatOptions
from eagle_ray.text.chat_template import ChatTemplateError
from eagle_ray.text.tokenizer import Tokenizer
from tests.support.gguf import toy_metadata
from tests.support.tokenizers import QWEN3, R1, write_named

HI = [{"role": "user", "content": "Hi"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TOOLS = ChatOptions.of({"tools": [ADD]})
DEFAULT = "[D]{{ messages[0].content }}"
PRINTS_TOOLS = "[D]{{ tools }}"
TOOL_USE = "[T]{% for t in tools %}{{ t.function.name }}{% endfor %}{{ messages[0].content }}{# <tool_call> <think> #}"
NAMED = {
    "default": DEFAULT,
    "tool_use": TOOL_USE,
    "rag": "[R]{{ messages[0].content }}{# </think> #}",
}


@pytest.mark.parametrize("layout", ["list", "files"])
@pytest.mark.parametrize(
    "templates", [NAMED, NAMED | {"default": PRINTS_TOOLS}, {"default": QWEN3}]
)
def test_prompts_are_those_of_transformers(tmp_path, layout, templates):
    text = Tokenizer.load(write_named(tmp_path / "t", templates, layout))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "t")
    for options in (NO_OPTIONS, TOOLS):
        wanted = theirs.apply_chat_template(
            HI, tools=list(options.tools) or None, tokenize=False, add_generation_prompt=True
        )
        assert text.render_chat(HI, options=options) == wanted


@pytest.mark.parametrize("layout", ["list", "files"])
def test_a_name_in_the_configuration_is_the_one_template(tmp_path, layout):
    directory = write_named(tmp_path / "t", NAMED, layout)
    text = Tokenizer.load(directory, "rag")
    assert text.render_chat(HI) == "[R]Hi" and text.chat_format.reasoning_parser == "deepseek_r1"
    with pytest.raises(RequestError, match="template does not read them"):
        text.render_chat(HI, options=TOOLS)
    assert Tokenizer.load(directory, "tool_use").render_chat(HI, options=TOOLS) == "[T]addHi"
    with pytest.raises(
        ChatTemplateError, match=r"no chat template 'rga'\. Name one of its own \(default, .*rag"
    ):
        Tokenizer.load(directory, "rga")


def test_configurations_take_names_and_refuse_paths(tmp_path):
    paths = {"input.path": "a.jsonl", "output.path": "out", "model.target": "embedded:tiny"}
    given = load_config(None, env={}, overrides=paths | {"model.chat_template": "rag"})
    assert given.model.chat_template == "rag"
    with pytest.raises(ConfigError, match=r"'./rag' cannot be read \(No such file"):
        load_config(None, env={}, overrides=paths | {"model.chat_template": "./rag"})


def test_parsers_are_those_of_the_template_of_the_conversation(tmp_path, make_job):
    text = Tokenizer.load(write_named(tmp_path / "t", NAMED, "list"))
    config = make_job()
    plain = Request(id="a", source_file="a", row_index=0, messages=json.dumps(HI))
    with_tools = Request(
        id="b",
        source_file="a",
        row_index=1,
        messages=json.dumps(HI),
        chat={"tools": json.dumps([ADD])},
    )
    readers = [answer_reader(request, config, text) for request in (plain, with_tools)]
    found = [(r.has_parts, r.tokenizer.chat_format.tool_parser) for r in readers]
    assert found == [(False, None), (True, "hermes")]
    must_call = Request(
        id="c",
        source_file="a",
        row_index=2,
        messages=json.dumps(HI),
        chat={"tools": json.dumps([ADD]), "tool_choice": json.dumps("required")},
    )
    [sequence] = sequences_of(must_call, config, text)
    assert sequence.prompt_text == "[T]addHi" and sequence.grammar_spec is not None
    assert "</think>" in sequence.grammar_spec.source  # reasoning, too, is that of tool_use
    assert sequences_of(plain, config, text)[0].prompt_text == "[D]Hi"


@pytest.mark.parametrize("layout", ["list"])
def test_templates_without_a_default_are_named(tmp_path, layout):
    directory = write_named(tmp_path / "t", {"tool_use": TOOL_USE, "rag": R1}, layout)
    with pytest.raises(EngineError, match=r"Set model\.chat_template to one of tool_use, rag"):
        Tokenizer.load(directory)
    assert Tokenizer.load(directory, "tool_use").render_chat(HI, options=TOOLS) == "[T]addHi"


def test_gguf_files_keep_their_named_templates():
    metadata = toy_metadata() | {
        "tokenizer.chat_template": DEFAULT,
        "tokenizer.chat_template.tool_use": TOOL_USE,
    }
    assert tokenizer_config(metadata, 64)["chat_template"] == [
        {"name": "default", "template": DEFAULT},
        {"name": "tool_use", "template": TOOL_USE},
    ]
