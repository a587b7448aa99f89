"""Tools and their choice are checked by name; grammars of calls allow what the parser of their form reads, only."""

import json
import random

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from eagle_ray.assembly.hub import ASSETS
from eagle_ray.core.errors import RequestError
from eagle_ray.core.grammar_spec import GrammarSpec
from eagle_ray.sampling.grammar import GrammarCompiler
from eagle_ray.text.answer_parser import AnswerParser, parse_answer
from eagle_ray.text.chat_format import TOOL_PARSERS, ChatFormat
from eagle_ray.text.chat_options import MAX_TOOLS, ChatOptions, needs_grammar, tool_grammar
from eagle_ray.text.tokenizer import Tokenizer as TargetTokenizer

FILE = ASSETS / "tiny" / "target" / "tokenizer.json"
VOCAB, END = 1600, 4
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
ADD = {"type": "function", "function": {"name": "add", "strict": True, "parameters": SCHEMA}}
F = {"type": "function", "function": {"name": "f"}}
SUB = {"type": "function", "function": {"name": "sub"}}
REQUIRED = {"tools": [ADD, F], "tool_choice": "required"}
CALLS = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "llama3_json": '{"name": "add", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]',
}
SPECIAL = (
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<think>",
    "</think>",
)


def test_what_is_absent_or_null_is_off():
    assert (
        ChatOptions.of({})
        == ChatOptions()
        == ChatOptions.of(dict.fromkeys(["tools", "tool_choice"]))
    )
    assert not ChatOptions.of({"tools": []}).has_tools


def test_the_choice_of_a_tool():
    both = {"tools": [ADD, SUB]}
    assert ChatOptions.of(both).callable_names == ("add", "sub")
    assert ChatOptions.of(both | {"tool_choice": "none"}).tools == ()
    assert ChatOptions.of(both | {"tool_choice": "required"}).must_call
    named = ChatOptions.of(
        both | {"tool_choice": {"type": "function", "function": {"name": "sub"}}}
    )
    assert named.must_call and named.callable_names == ("sub",) and named.tools == (ADD, SUB)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tools": "add"}, "tools: must be a list of tools"),
        ({"tools": [ADD, {"type": "function"}]}, r"tools\[1\]: must be"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\]: must be"),
        (
            {"tools": [{"type": "function", "function": {}}]},
            r"tools\[0\]\.function\.name: must be 1 to 64",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            r"tools\[0\]\.function\.name",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            r"function\.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]},
            r"function\.strict",
        ),
        ({"tools": [ADD, ADD]}, "'add' is the name of two tools"),
        (
            {"tools": [ADD] * (MAX_TOOLS + 1)},
            f"tools: must be at most {MAX_TOOLS} tools, got {MAX_TOOLS + 1}",
        ),
        ({"tools": [ADD], "tool_choice": "any"}, "tool_choice: must be none, auto, required"),
        ({"tools": [ADD], "tool_choice": {"type": "function"}}, "tool_choice: must be"),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "no tool 'sub'",
        ),
        ({"tool_choice": "required"}, "tool_choice: 'required' needs tools"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls: must be true or false"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs: must be an object"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs: must be an object"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs: 'tokenize'"),
        (
            {"chat_template_kwargs": {"self": 1}},
            "chat_template_kwargs: 'self' is not a value of the template",
        ),
        ({"chat_template_kwargs": {"conversations": []}}, "chat_template_kwargs: 'conversations'"),
    ],
)
def test_an_error_names_its_place(values, message):
    with pytest.raises(ValueError, match=message):
        ChatOptions.of(values)


@pytest.fixture(scope="module", params=["plain", "special", "added"])
def written(request):
    """The compiler, the tokenizer and the ids of its markers: texts, special tokens, or tokens that are not special."""
    tokenizer, ids = Tokenizer.from_file(str(FILE)), {}
    if request.param != "plain":
        is_special = request.param == "special"
        tokenizer.add_tokens(
            [AddedToken(token, special=is_special, normalized=False) for token in SPECIAL]
        )
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        for form in TOOL_PARSERS:
            ids |= TargetTokenizer(
                fast, None, frozenset([END]), None, ChatFormat(form, "qwen3")
            ).special_marker_ids()
        assert ids and max(ids.values()) < VOCAB
    return GrammarCompiler(tokenizer.to_str, VOCAB, [END]), tokenizer, ids


def allows(written, source, text):
    """Whether the grammar allows the text and an end after it; refuses every text of which a token is refused."""
    compiler, tokenizer, _ = written
    state = compiler.start(GrammarSpec("grammar", source))
    try:
        for token in tokenizer.encode(text, add_special_tokens=False).ids:
            state.commit([token])
    except RequestError as error:
        assert error.code == "grammar_limit"
        return False
    return state.is_complete


def test_a_schema_that_a_grammar_cannot_hold_names_the_tool():
    free = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "minProperties": 2}},
    }
    options = ChatOptions.of({"tools": [free], "tool_choice": "required"})
    with pytest.raises(
        RequestError, match="tools: the parameters of 'f': minProperties: 2 is not supported"
    ):
        tool_grammar(options, "hermes", {})


@pytest.mark.parametrize("form", TOOL_PARSERS)
def test_a_required_call_is_a_call_that_fits_its_schema(written, form):
    source = tool_grammar(ChatOptions.of(REQUIRED), form, written[2])
    call = CALLS[form]
    assert allows(written, source, call) and allows(written, source, "\n\n" + call)
    assert allows(written, source, call.replace('"add"', '"f"').replace('"a": 1', '"free": [null]'))
    for wrong in (
        "Hello.",
        call[:-1],
        call.replace('"a"', '"b"'),
        call.replace('"add"', '"sub"'),
        call + ".",
    ):
        assert not allows(written, source, wrong), wrong


def test_several_calls_unless_parallel_calls_are_off(written):
    for form, joined in (
        ("hermes", "\n".join([CALLS["hermes"]] * 2)),
        ("llama3_json", "; ".join([CALLS["llama3_json"]] * 2)),
        ("mistral", CALLS["mistral"][:-1] + ", " + CALLS["mistral"].removeprefix("[TOOL_CALLS][")),
    ):
        assert allows(written, tool_grammar(ChatOptions.of(REQUIRED), form, written[2]), joined)
        single = ChatOptions.of(REQUIRED | {"parallel_tool_calls": False})
        assert not allows(written, tool_grammar(single, form, written[2]), joined)
        assert allows(written, tool_grammar(single, form, written[2]), CALLS[form])


@pytest.mark.parametrize("form", TOOL_PARSERS)
def test_a_named_tool_is_the_one_that_is_called(written, form):
    named = {"tools": [ADD, F], "tool_choice": {"type": "function", "function": {"name": "f"}}}
    source = tool_grammar(ChatOptions.of(named), form, written[2])
    assert not allows(written, source, CALLS[form])
    assert allows(written, source, CALLS[form].replace('"add"', '"f"'))


def test_mistral_may_write_the_name_before_the_arguments(written):
    source = tool_grammar(ChatOptions.of(REQUIRED), "mistral", written[2])
    for text in ('[TOOL_CALLS]add{"a": 1}', '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]f[ARGS]{}'):
        assert allows(written, source, text)
    assert not allows(written, source, '[TOOL_CALLS]add[ARGS]{"b": "x"}')


@pytest.mark.parametrize("form", TOOL_PARSERS)
def test_strict_tools_leave_an_answer_free_until_it_calls(written, form):
    options = ChatOptions.of({"tools": [ADD, F]})
    assert needs_grammar(options) and not needs_grammar(ChatOptions.of({"tools": [F]}))
    source = tool_grammar(options, form, written[2])
    call = CALLS[form]
    for text in (
        "",
        "Hello.",
        "Say {x}.\n",
        call,
        *([f"I add.\n{call}"] if form != "llama3_json" else []),
    ):
        assert allows(written, source, text), text
    assert not allows(written, source, call.replace('"a"', '"b"'))
    assert not allows(written, source, call.replace('"add"', '"sub"'))


@pytest.mark.parametrize("form", TOOL_PARSERS)
def test_the_grammar_begins_after_the_reasoning(written, form):
    inside = tool_grammar(ChatOptions.of(REQUIRED), form, written[2], "inside")
    assert allows(written, inside, f"I {{might}} add.\n</think>\n\n{CALLS[form]}")
    assert not allows(written, inside, CALLS[form])
    assert not allows(written, inside, "I add.\n</think>\n\nThree.")
    optional = tool_grammar(ChatOptions.of(REQUIRED), form, written[2], "optional")
    assert allows(written, optional, f"<think>\nI {{might}} add.\n</think>\n\n{CALLS[form]}")
    assert allows(written, optional, CALLS[form])
    assert not allows(written, optional, f"Well.\n</think>\n\n{CALLS[form]}")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("form", TOOL_PARSERS)
def test_the_parser_reads_whatever_a_grammar_writes(written, form, seed):
    compiler, tokenizer, ids = written
    options = ChatOptions.of(
        {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False}
    )
    state = compiler.start(GrammarSpec("grammar", tool_grammar(options, form, ids)))
    choose, output = random.Random(seed), []
    while len(output) < 300:
        forced = state.forced_tokens()
        bits = np.unpackbits(state.tree_masks([0], [-1])[0].view(np.uint8), bitorder="little")[
            :VOCAB
        ]
        choices = np.flatnonzero(bits).tolist()
        token = END if END in choices else forced[0] if forced else choose.choice(choices)
        if token == END:
            break
        state.commit([token])
        output.append(token)
    text = tokenizer.decode(output, skip_special_tokens=False)
    answer = parse_answer(text, AnswerParser.of(ChatFormat(form), options, ""))
    if not state.is_complete:
        pytest.skip("the random text has not ended")
    [call] = answer.calls
    assert (
        call.name == "add"
        and json.loads(call.arguments).keys() <= {"a", "b"}
        and not answer.content.strip()
    )
