"""Tools and template values of rows, and the columns that an answer's parts have."""

import asyncio
import json

import jsonschema
import pyarrow as pa
import pytest

from eagle_ray.api.python_arguments import prompt_requests
from eagle_ray.assembly.hub import download
from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.batch.driver.input_plan import plan_input, request_rows, requests_of
from eagle_ray.batch.worker.worker import Worker
from eagle_ray.core.errors import RequestError
from eagle_ray.core.grammar_spec import GrammarSpec
from eagle_ray.requests.answers import output_line
from eagle_ray.requests.row_schema import request_schema, table_of
from eagle_ray.requests.sequences import sequences_of
from eagle_ray.runs.run import Run
from eagle_ray.storage.path import StoragePath
from eagle_ray.text.tokenizer import Tokenizer
from tests.support.row_invariants import broken_invariants
from tests.support.tokenizers import (
    LLAMA3,
    MISTRAL,
    QWEN3,
    R1,
    special_tokenizer,
    thinking_target,
    write_tokenizer,
)
from tests.support.workers import ScriptedEngine

ASK = [{"role": "user", "content": "Add 1 and 2."}]
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "default": None}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
THINKING = "<think>\nHm.\n</think>\n\n"


@pytest.fixture
def answer_rows(make_job, tmp_path):
    """A function of rows: the output rows of a worker, whose engine writes `text` where that is given."""

    def rows_of(rows, template, text=None, **settings):
        path = tmp_path / "template.jinja"
        path.write_text(template)
        pair = {
            "model.target": "embedded:tiny",
            "model.draft": "embedded:tiny",
            "model.chat_template": str(path),
        }
        config = make_job(rows, **(pair | settings))
        plan = plan_input(config)
        worker = Worker(
            config, Run(StoragePath.of("out"), "run", 1, "hash"), plan.carried_fields, WorkerPlan()
        )
        if text is not None:
            tokenizer = worker.tokenizer
            ids = [*tokenizer.encode(text, add_special_tokens=False), min(tokenizer.eos_ids)]
            worker.client.engine = ScriptedEngine(worker.engine, ids, tokenizer.eos_ids)
        try:
            table: pa.Table = asyncio.run(
                worker.answer(
                    table_of(list(request_rows(plan)), request_schema(plan.carried_fields))
                )
            )
            return table.to_pylist()
        finally:
            worker.close()

    return rows_of


def test_answer_parts_have_columns_and_text_stays_whole(answer_rows):
    rows = [
        {"id": "tools", "messages": ASK, "tools": [ADD], "n": 2},
        {"id": "plain", "messages": ASK},
        {"id": "text", "prompt": "Add"},
        {"id": "none", "messages": ASK, "tools": json.dumps([ADD]), "tool_choice": "none"},
        {"id": "bad", "messages": ASK, "tools": [{"type": "function"}]},
        {"id": "choice", "messages": ASK, "tool_choice": "all"},
        {"id": "prompt", "prompt": "Add", "tools": [ADD]},
    ]
    answers = answer_rows(rows, QWEN3, f"{THINKING}I add.\n{CALL}", **{"sampling.max_tokens": 200})
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

    body = output_line([first], str)["response"]["body"]["choices"][0]
    assert body["finish_reason"] == "tool_calls"
    assert body["message"] == {
        "role": "assistant",
        "content": "I add.",
        "refusal": None,
        "reasoning_content": "Hm.",
        "tool_calls": [call],
    }


def test_a_real_engines_answer_to_an_open_reasoning_is_reasoning(answer_rows):
    """The tiny target never closes it."""
    [row] = answer_rows([{"id": "a", "messages": ASK}], R1)
    assert row["prompt"].endswith("<assistant><think>\n") and row["text"]
    assert (row["content"], row["reasoning_content"]) == ("", row["text"].lstrip("\n"))
    assert broken_invariants(row) == []
    [row] = answer_rows([{"id": "a", "messages": ASK}], R1, **{"model.reasoning_parser": "none"})
    assert (row["content"], row["reasoning_content"]) == (None, None)


def batch_line(id_, **body):
    return {
        "custom_id": id_,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": ASK, **body},
    }


def test_rows_of_each_form_have_the_same_prompt(make_job, tmp_path):
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "t", QWEN3))
    kwargs = {"enable_thinking": False}
    forms = [
        {"id": "a", "messages": ASK, "tools": [ADD], "chat_template_kwargs": kwargs},
        {
            "id": "a",
            "messages": ASK,
            "tools": json.dumps([ADD]),
            "chat_template_kwargs": json.dumps(kwargs),
        },
        batch_line(
            "a",
            tools=[ADD],
            chat_template_kwargs=kwargs,
            tool_choice="auto",
            parallel_tool_calls=True,
        ),
    ]
    configs = [make_job([form]) for form in forms]
    configs.append(
        make_job(
            [{"id": "a", "messages": ASK}],
            **{"chat.tools": [ADD], "chat.chat_template_kwargs": kwargs},
        )
    )
    prompts = []
    for form, config in zip([*forms, {"id": "a", "messages": ASK}], configs, strict=True):
        (tmp_path / "in.jsonl").write_text(json.dumps(form) + "\n")
        [asked] = requests_of(plan_input(config))
        assert asked.error is None
        prompts.append(sequences_of(asked, config, tokenizer)[0].prompt_text)
    [asked] = prompt_requests({"messages": ASK, "tools": [ADD], "chat_template_kwargs": kwargs})
    prompts.append(sequences_of(asked, make_job(), tokenizer)[0].prompt_text)
    assert len(set(prompts)) == 1
    assert json.dumps(ADD) in prompts[0] and prompts[0].endswith("</think>\n\n")


def test_a_rows_own_values_win_over_the_jobs(make_job):
    def options(row, **settings):
        return prompt_requests({"messages": ASK} | row)[0].chat_options(make_job(**settings))

    settings = {
        "chat.tools": [ADD],
        "chat.chat_template_kwargs": {"a": 1, "b": 1},
        "chat.tool_choice": "none",
    }
    assert options({}, **settings).tools == ()
    assert options(
        {"tool_choice": "auto", "chat_template_kwargs": {"b": 2}}, **settings
    ).template_kwargs == {
        "a": 1,
        "b": 2,
    }
    other = {"type": "function", "function": {"name": "other"}}
    assert options({"tools": [other]}, **settings).callable_names == ("other",)


def test_text_completions_of_a_batch_file_take_no_tools(make_job):
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "Hi", "tools": [ADD]},
    }
    [row] = request_rows(plan_input(make_job([line])))
    assert "body.tools is not supported" in row["error_message"]


def test_required_tool_choice_without_tools_is_a_config_error(make_job):
    with pytest.raises(Exception, match=r"chat\.tool_choice: 'required' needs tools"):
        make_job(**{"chat.tool_choice": "required"})


SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 999},
        "b": {"enum": ["x", "y"]},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
ONE = {"type": "function", "function": {"name": "one", "parameters": SCHEMA}}
TWO = {"type": "function", "function": {"name": "two", "strict": True, "parameters": SCHEMA}}


@pytest.mark.parametrize(
    ("template", "form"), [(QWEN3, "hermes"), (LLAMA3, "llama3_json"), (MISTRAL, "mistral")]
)
def test_a_real_engine_must_call_a_tool_as_its_schema_says(answer_rows, template, form):
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
    rows.append(
        {"id": "s", **ask, "tool_choice": "required", "temperature": 0.9, "seed": 3, "n": 2}
    )
    drafted = answer_rows(rows, template, **{"speculative.budget": "uniform"})
    for row in drafted:
        assert row["status"] == "ok" and row["finish_reason"] == "tool_calls", row["text"]
        [call] = json.loads(row["tool_calls"])
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
        assert call["function"]["name"] in (
            ("two",) if row["request_id"] == "n" else ("one", "two")
        )
    assert sum(row["num_draft_tokens"] for row in drafted) > 0
    plain = answer_rows(rows, template, **{"speculative.method": "none"})
    assert [row["output_token_ids"] for row in plain] == [
        row["output_token_ids"] for row in drafted
    ]


def test_grammar_begins_after_reasoning_opened_by_the_prompt(make_job, tmp_path):
    tokenizer = special_tokenizer(tmp_path / "t", R1, "<think>", "</think>")
    [asked] = prompt_requests({"messages": ASK, "json_object": True})
    [sequence] = sequences_of(asked, make_job(), tokenizer)
    assert sequence.grammar_spec == GrammarSpec("json_object", after=tokenizer.reasoning_end_id())
    [asked] = prompt_requests({"prompt": "Hi", "json_object": True})
    assert sequences_of(asked, make_job(), tokenizer)[0].grammar_spec == GrammarSpec("json_object")


def test_tools_and_a_form_that_both_say_what_the_answer_must_be(make_job, tmp_path):
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "t", QWEN3))
    [asked] = prompt_requests(
        {"messages": ASK, "tools": [ADD], "tool_choice": "required", "json_object": True}
    )
    with pytest.raises(RequestError, match="json_object: the tools of the request say"):
        sequences_of(asked, make_job(), tokenizer)


def bounded_rows() -> list[dict]:
    """Rows of each budget, greedy and sampled."""
    rows = [
        {"id": f"{budget}", "messages": ASK, "thinking_budget": budget}
        for budget in (0, 1, 7, 30, None)
    ]
    rows += [
        row | {"id": f"{row['id']} sampled", "temperature": 1.0, "seed": 5, "n": 2} for row in rows
    ]
    return [row | {"max_tokens": 24, "min_tokens": 20} for row in rows]


@pytest.mark.parametrize(
    "has_own_tokens",
    [
        pytest.param(True, id="one token", marks=pytest.mark.slow),
        pytest.param(False, id="several tokens"),
    ],
)
def test_reasoning_ends_at_its_budget_under_every_draft_method(
    answer_rows, tmp_path, has_own_tokens
):
    """The tiny target never closes it by itself."""
    settings = {"model.target": str(thinking_target(tmp_path / "target"))} if has_own_tokens else {}
    plain = answer_rows(bounded_rows(), R1, **settings, **{"speculative.method": "none"})
    for method in ("eagle2", "suffix"):
        drafted = answer_rows(
            bounded_rows(),
            R1,
            **settings,
            **{"speculative.method": method, "speculative.budget": "uniform"},
        )
        assert [row["output_token_ids"] for row in drafted] == [
            row["output_token_ids"] for row in plain
        ]
        assert sum(row["num_accepted_draft_tokens"] for row in drafted) > 0
    tokenizer = Tokenizer.load(settings.get("model.target") or download("embedded:tiny", "target"))
    closing = tokenizer.encode("</think>", add_special_tokens=False)
    assert (len(closing) == 1) is has_own_tokens
    for row in plain:
        name, ids = row["request_id"].split()[0], row["output_token_ids"]
        assert row["status"] == "ok" and broken_invariants(row) == []
        if name in ("30", "None"):
            assert row["content"] == ""
            continue
        budget = int(name)
        end = budget + len(closing)
        assert ids[budget:end] == closing and row["content"] == tokenizer.decode(ids[end:]).lstrip(
            "\n"
        )
        assert (row["reasoning_content"] or "") == tokenizer.decode(ids[:budget]).strip("\n")
        assert json.loads(row["sampling_controls"]) == {"min_tokens": 20, "thinking_budget": budget}


def test_a_form_begins_after_a_reasoning_that_is_closed(answer_rows, tmp_path):
    ask = {"messages": ASK, "regex": "[a-c]{4}", "max_tokens": 24}
    rows = [{"id": f"{n}", **ask, "thinking_budget": n} for n in (0, 3, 9)]
    settings = {
        "model.target": str(thinking_target(tmp_path / "target")),
        "speculative.budget": "uniform",
    }
    for row in answer_rows(rows, R1, **settings):
        assert (
            row["content"] in row["text"].rpartition("</think>")[2]
            and row["structured_outcome"] == "complete"
        )
        assert len(row["content"]) == 4 and {*row["content"]} <= {*"abc"}


def test_a_reasoning_is_bounded_that_the_answer_opens(answer_rows, tmp_path):
    target = thinking_target(tmp_path / "target")
    opening, closing = Tokenizer.load(target).encode("<think></think>", add_special_tokens=False)
    opened = {"messages": ASK, "logit_bias": {str(opening): 100}, "max_tokens": 12}
    closed = {"messages": ASK, "chat_template_kwargs": {"enable_thinking": False}}
    rows = [{"id": "opened", **opened}, {"id": "free", "messages": ASK}, {"id": "closed", **closed}]
    settings = {"model.target": str(target), "speculative.budget": "uniform"}
    first, *unbounded = answer_rows(rows, QWEN3, **settings)
    bounded, *others = answer_rows(rows, QWEN3, **settings, **{"sampling.thinking_budget": 3})
    assert first["output_token_ids"] == [opening] * 12
    assert bounded["output_token_ids"][:6] == [opening] * 4 + [closing, opening]
    assert [row["output_token_ids"] for row in others] == [
        row["output_token_ids"] for row in unbounded
    ]


def test_the_markers_of_a_reasoning_are_those_of_the_tokenizer(make_job, tmp_path):
    def reasoning(template, **columns):
        tokenizer = special_tokenizer(tmp_path / "t", template, "<think>", "</think>")
        [asked] = prompt_requests({"messages": ASK, "thinking_budget": 5} | columns)
        return sequences_of(asked, make_job(), tokenizer)[0].reasoning

    inside, optional = reasoning(R1), reasoning(QWEN3)
    assert inside.openings == () and inside.closings[0] == optional.closings[0] == (303,)
    assert optional.openings[0] == (302,) and all(302 in ids for ids in optional.openings)
    assert reasoning(QWEN3, chat_template_kwargs={"enable_thinking": False}) is None
    assert reasoning(R1, thinking_budget=None) is None


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        (
            {"messages": ASK},
            LLAMA3,
            "the target's answers have no reasoning that is known. Leave it out, or set",
        ),
        ({"prompt": "Hi"}, R1, "only with messages. Leave it out of requests with other prompts"),
        (
            {"messages": ASK, "allowed_token_ids": [5]},
            R1,
            "allowed_token_ids lacks 303, which ends the reasoning",
        ),
        (
            {"messages": ASK, "bad_words": ["</think>"]},
            R1,
            "bad_words forbid token id 303, which ends the reasoning",
        ),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(make_job, tmp_path, row, template, message):
    tokenizer = special_tokenizer(tmp_path / "t", template, "<think>", "</think>")
    [asked] = prompt_requests(row | {"thinking_budget": 5})
    with pytest.raises(RequestError) as error:
        sequences_of(asked, make_job(), tokenizer)
    assert error.value.code == "invalid_sampling" and str(error.value).startswith(
        f"thinking_budget: {message}"
    )


def test_a_line_of_a_batch_file_has_a_budget(make_job):
    rows = request_rows(
        plan_input(
            make_job([batch_line("a", thinking_budget=0), batch_line("b", thinking_budget=-1)])
        )
    )
    good, bad = rows
    assert (good["thinking_budget"], good["error_message"]) == (0, None)
    form = "an integer, 0 (no reasoning) or more, or null for no limit"
    assert f"body.thinking_budget: must be {form}, got -1" in bad["error_message"]


def test_the_stored_prompt_is_the_one_that_was_read(answer_rows, monkeypatch):
    read = []
    encode = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer,
        "encode",
        lambda self, text, *how, **more: read.append(text) or encode(self, text, *how, **more),
    )
    clock = "{{ strftime_now('%H:%M:%S.%f') }} {{ messages[0].content }}"
    rows = answer_rows([{"id": "a", "messages": ASK, "n": 2}, {"id": "b", "messages": ASK}], clock)
    rendered = [text for text in read if text.endswith(ASK[0]["content"])]
    assert len(rendered) == 2 and {row["prompt"] for row in rows} == set(rendered)
