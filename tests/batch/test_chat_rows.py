"""Tools and template values of rows, and the columns that an answer's parts have."""

import asyncio
import json

import jsonschema
import pyarrow as pa
import pytest

from eagle_ray.api.prompts import prompt_requests
from eagle_ray.batch.input.plan import plan_input, request_rows, requests_of
from eagle_ray.batch.output.manifest import RunHandle
from eagle_ray.batch.worker import Worker
from eagle_ray.core.errors import RequestError
from eagle_ray.requests.answers import line_of
from eagle_ray.requests.row_schema import request_schema, table_of
from eagle_ray.requests.sequences import prompt_text_of, sequences_of
from eagle_ray.sampling.grammar import GrammarSpec
from eagle_ray.storage.path import StoragePath
from eagle_ray.text.tokenizer import Tokenizer
from tests.helpers.chat_templates import LLAMA3, MISTRAL, QWEN3, R1
from tests.helpers.row_invariants import broken_laws
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.tokenizers import special_tokenizer, write_tokenizer

ASK = [{"role": "user", "content": "Add 1 and 2."}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "default": None}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
THINKING = "<think>\nHm.\n</think>\n\n"


@pytest.fixture
def answered(make_job, tmp_path):
    """A function of rows: the output rows of a worker, whose engine writes `text` where that is given."""

    def rows_of(rows, template, text=None, **settings):
        path = tmp_path / "template.jinja"
        path.write_text(template)
        pair = {"model.target": "embedded:tiny", "model.draft": "embedded:tiny", "model.chat_template": str(path)}
        config = make_job(rows, **(pair | settings))
        plan = plan_input(config)
        worker = Worker(config, RunHandle(StoragePath.of("out"), "run", 1, "hash"), plan.passthrough, threads=1)
        if text is not None:
            tokenizer = worker._tokenizer
            ids = [*tokenizer.encode(text, add_special_tokens=False), min(tokenizer.eos_ids)]
            worker._engine = ScriptedEngine(worker._engine, ids, tokenizer.eos_ids)
        try:
            table: pa.Table = asyncio.run(
                worker.answer(table_of(list(request_rows(plan)), request_schema(plan.passthrough)))
            )
            return table.to_pylist()
        finally:
            worker.close()

    return rows_of


def test_the_parts_of_an_answer_have_columns_and_the_text_stays_whole(answered):
    rows = [
        {"id": "tools", "messages": ASK, "tools": [ADD], "n": 2},
        {"id": "plain", "messages": ASK},
        {"id": "text", "prompt": "Add"},
        {"id": "none", "messages": ASK, "tools": json.dumps([ADD]), "tool_choice": "none"},
        {"id": "bad", "messages": ASK, "tools": [{"type": "function"}]},
        {"id": "choice", "messages": ASK, "tool_choice": "all"},
        {"id": "prompt", "prompt": "Add", "tools": [ADD]},
    ]
    answers = answered(rows, QWEN3, f"{THINKING}I add.\n{CALL}", **{"sampling.max_tokens": 200})
    by_id = {(row["request_id"], row["sample_index"]): row for row in answers}
    names = ("content", "reasoning_content", "finish_reason")
    first, second = by_id["tools", 0], by_id["tools", 1]
    assert [first[name] for name in names] == ["I add.", "Hm.", "tool_calls"]
    assert first["text"] == f"{THINKING}I add.\n{CALL}"
    [call] = json.loads(first["tool_calls"])
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert call["id"] != json.loads(second["tool_calls"])[0]["id"]
    for id_ in ("plain", "none"):
        assert [by_id[id_, 0][name] for name in names] == [f"I add.\n{CALL}", "Hm.", "stop"]
        assert by_id[id_, 0]["tool_calls"] is None and "add" not in by_id[id_, 0]["prompt"]
    assert [by_id["text", 0][name] for name in names] == [None, None, "stop"]
    errors = {id_: by_id[id_, 0]["error_message"] for id_ in ("bad", "choice", "prompt")}
    assert "column 'tools[0]': must be" in errors["bad"] and "line 5" in errors["bad"]
    assert "tool_choice: must be none, auto" in errors["choice"]
    assert "tools: only with messages" in errors["prompt"]

    body = line_of([first], str)["response"]["body"]["choices"][0]
    assert body["finish_reason"] == "tool_calls"
    assert body["message"] == {
        "role": "assistant",
        "content": "I add.",
        "refusal": None,
        "reasoning_content": "Hm.",
        "tool_calls": [call],
    }


def test_a_real_engines_answer_to_an_open_reasoning_is_reasoning(answered):
    """The tiny target never closes it."""
    [row] = answered([{"id": "a", "messages": ASK}], R1)
    assert row["prompt"].endswith("<assistant><think>\n") and row["text"]
    assert (row["content"], row["reasoning_content"]) == ("", row["text"].lstrip("\n"))
    assert broken_laws(row) == []
    [row] = answered([{"id": "a", "messages": ASK}], R1, **{"model.reasoning_parser": "none"})
    assert (row["content"], row["reasoning_content"]) == (None, None)


def batch_line(id_, **body):
    return {"custom_id": id_, "method": "POST", "url": "/v1/chat/completions", "body": {"messages": ASK, **body}}


def test_rows_of_each_form_have_the_same_prompt(make_job, tmp_path):
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "t", QWEN3))
    kwargs = {"enable_thinking": False}
    forms = [
        {"id": "a", "messages": ASK, "tools": [ADD], "chat_template_kwargs": kwargs},
        {"id": "a", "messages": ASK, "tools": json.dumps([ADD]), "chat_template_kwargs": json.dumps(kwargs)},
        batch_line("a", tools=[ADD], chat_template_kwargs=kwargs, tool_choice="auto", parallel_tool_calls=True),
    ]
    configs = [make_job([form]) for form in forms]
    configs.append(
        make_job([{"id": "a", "messages": ASK}], **{"chat.tools": [ADD], "chat.chat_template_kwargs": kwargs})
    )
    prompts = []
    for form, config in zip([*forms, {"id": "a", "messages": ASK}], configs, strict=True):
        (tmp_path / "in.jsonl").write_text(json.dumps(form) + "\n")
        [asked] = requests_of(plan_input(config))
        assert asked.error is None
        prompts.append(prompt_text_of(asked, config, tokenizer))
    [asked] = prompt_requests({"messages": ASK, "tools": [ADD], "chat_template_kwargs": kwargs})
    prompts.append(prompt_text_of(asked, make_job(), tokenizer))
    assert len(set(prompts)) == 1
    assert json.dumps(ADD) in prompts[0] and prompts[0].endswith("</think>\n\n")


def test_a_rows_own_values_win_over_the_jobs(make_job):
    def options(row, **settings):
        return prompt_requests({"messages": ASK} | row)[0].chat_options(make_job(**settings))

    settings = {"chat.tools": [ADD], "chat.chat_template_kwargs": {"a": 1, "b": 1}, "chat.tool_choice": "none"}
    assert options({}, **settings).tools == ()
    assert options({"tool_choice": "auto", "chat_template_kwargs": {"b": 2}}, **settings).template_kwargs == {
        "a": 1,
        "b": 2,
    }
    other = {"type": "function", "function": {"name": "other"}}
    assert options({"tools": [other]}, **settings).callable_names == ("other",)


def test_text_completions_of_a_batch_file_take_no_tools(make_job):
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi", "tools": [ADD]}}
    [row] = request_rows(plan_input(make_job([line])))
    assert "body.tools is not supported" in row["error_message"]


def test_a_choice_that_the_jobs_tools_lack_is_an_error_before_the_start(make_job):
    with pytest.raises(Exception, match=r"chat\.tool_choice: 'required' needs tools"):
        make_job(**{"chat.tool_choice": "required"})


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ONE = {"type": "function", "function": {"name": "one", "parameters": SCHEMA}}
TWO = {"type": "function", "function": {"name": "two", "strict": True, "parameters": SCHEMA}}


@pytest.mark.parametrize(("template", "form"), [(QWEN3, "hermes"), (LLAMA3, "llama3_json"), (MISTRAL, "mistral")])
def test_a_real_engine_must_call_a_tool_as_its_schema_says(answered, template, form):
    """The tiny target was never shown a tool: the grammar alone makes it call one, by drafts or without any."""
    ask = {
        "messages": ASK,
        "chat_template_kwargs": {"enable_thinking": False},
        "tools": [ONE, TWO],
        "parallel_tool_calls": False,
        "max_tokens": 200,
    }
    named = {"type": "function", "function": {"name": "two"}}
    rows = [{"id": "g", **ask, "tool_choice": "required"}, {"id": "n", **ask, "tool_choice": named}]
    rows.append({"id": "s", **ask, "tool_choice": "required", "temperature": 0.9, "seed": 3, "n": 2})
    drafted = answered(rows, template, **{"speculative.budget": "uniform"})
    for row in drafted:
        assert row["status"] == "ok" and row["finish_reason"] == "tool_calls", row["text"]
        [call] = json.loads(row["tool_calls"])
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
        assert call["function"]["name"] in (("two",) if row["request_id"] == "n" else ("one", "two"))
    assert sum(row["num_draft_tokens"] for row in drafted) > 0
    plain = answered(rows, template, **{"speculative.method": "none"})
    assert [row["output_token_ids"] for row in plain] == [row["output_token_ids"] for row in drafted]


def test_a_form_begins_after_reasoning_that_the_prompt_has_opened(make_job, tmp_path):
    tokenizer = special_tokenizer(tmp_path / "t", R1, "<think>", "</think>")
    [asked] = prompt_requests({"messages": ASK, "json_object": True})
    [sequence] = sequences_of(asked, make_job(), tokenizer)
    assert sequence.grammar_spec == GrammarSpec("json_object", after=tokenizer.reasoning_end_id())
    [asked] = prompt_requests({"prompt": "Hi", "json_object": True})
    assert sequences_of(asked, make_job(), tokenizer)[0].grammar_spec == GrammarSpec("json_object")


def test_tools_and_a_form_that_both_say_what_the_answer_must_be(make_job, tmp_path):
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "t", QWEN3))
    [asked] = prompt_requests({"messages": ASK, "tools": [ADD], "tool_choice": "required", "json_object": True})
    with pytest.raises(RequestError, match="json_object: the tools of the request say"):
        sequences_of(asked, make_job(), tokenizer)
