"""Batch lines: what they ask for is what the row asks for, and what this system does not do is refused by name."""

from __future__ import annotations

import json

import pytest

from eagle_ray.batch.driver.input_plan import plan_input, request_rows
from eagle_ray.requests.messages import template_messages
from eagle_ray.requests.parameters import Api
from eagle_ray.requests.refused import refused_at
from tests.support.inputs import CHAT, COMPLETIONS, USER, line
from tests.support.jobs import small_job


@pytest.fixture
def requests(tmp_path):
    """The requests of a batch file of these lines: texts are written as they are."""

    def of(*lines) -> list[dict]:
        texts = [text if isinstance(text, str) else json.dumps(text) for text in lines]
        (tmp_path / "in.jsonl").write_text("\n".join(texts))
        return list(
            request_rows(plan_input(small_job(tmp_path, **{"input.format": "openai_batch"})))
        )

    return of


def test_a_line_of_each_endpoint(requests):
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    chat, text, tokens = requests(
        line(
            "a",
            seed=1,
            n=2,
            stop=["x"],
            max_completion_tokens=5,
            messages=[{"role": "user", "content": parts}],
        ),
        line(
            "b",
            COMPLETIONS,
            temperature=0.5,
            top_p=0.9,
            stop="x",
            max_tokens=7,
            logprobs=0,
            model="absent",
        ),
        line("c", COMPLETIONS, prompt=[1, 2], logprobs=None),
    )
    assert template_messages(chat["messages"]) == [USER]
    assert [chat[name] for name in ("seed", "n", "stop", "max_tokens", "logprobs")] == [
        1,
        2,
        ["x"],
        5,
        None,
    ]
    names = ("prompt", "temperature", "top_p", "stop", "max_tokens", "logprobs")
    assert [text[name] for name in names] == ["Hi", 0.5, 0.9, ["x"], 7, True]
    assert (tokens["prompt"], tokens["prompt_token_ids"], tokens["logprobs"]) == (
        None,
        [1, 2],
        None,
    )
    assert [(row["request_id"], row["url"], row["model"]) for row in (chat, text, tokens)] == [
        ("a", CHAT, "m"),
        ("b", COMPLETIONS, None),
        ("c", COMPLETIONS, "m"),
    ]


def test_parameters_whose_value_asks_for_nothing_are_accepted(requests):
    rows = refused_at(Api.CHAT)
    off = {name: row.no_op_at(Api.CHAT)[0] for name, row in rows.items() if row.no_op} | {
        "tools": [],
        "logit_bias": {},
    }
    [row] = requests(
        line(user="me", metadata={"a": "b"}, temperature=None, suffix=None, **{**off, "n": 1})
    )
    assert row["error_message"] is None


@pytest.mark.parametrize(
    ("bad", "code", "says"),
    [
        (line(stream=True), "unsupported_parameter", "body.stream is not supported"),
        (line(store=True), "unsupported_parameter", "body.store is not supported"),
        (
            line(service_tier="priority"),
            "unsupported_parameter",
            "body.service_tier is not supported",
        ),
        (
            line(add_special_tokens=True),
            "unsupported_parameter",
            "body.add_special_tokens is not supported",
        ),
        (
            line(web_search_options={}),
            "unsupported_parameter",
            "body.web_search_options is not supported",
        ),
        (line(functions=[{"name": "f"}]), "unsupported_parameter", "body.functions"),
        (
            line(frequency_penalty=2.5),
            "bad_sampling",
            "body.frequency_penalty: must be a number between -2 and 2",
        ),
        (
            line(presence_penalty="much"),
            "bad_sampling",
            "body.presence_penalty: must be a number between -2 and 2",
        ),
        (line(best_of=2), "unsupported_parameter", "body.best_of"),
        (
            line(response_format={"type": "yaml"}),
            "bad_sampling",
            "body.response_format: must be OpenAI's",
        ),
        (line(regex="a", choice=["b"]), "bad_sampling", "body.regex and body.choice both say"),
        (line(top_logprobs=3), "bad_sampling", "body.top_logprobs: only with logprobs"),
        (
            line(logprobs=True, top_logprobs=21),
            "bad_sampling",
            "body.top_logprobs: must be an integer, 0 (off) to 20",
        ),
        (line(logprobs=1), "bad_sampling", "body.logprobs: must be true or false"),
        (
            line(url=COMPLETIONS, logprobs=21),
            "bad_sampling",
            "body.logprobs: must be an integer, 0 to 20",
        ),
        (
            line(url=COMPLETIONS, logprobs=1, top_logprobs=1),
            "unsupported_parameter",
            "body.top_logprobs",
        ),
        (line(url=COMPLETIONS, echo=True), "unsupported_parameter", "body.echo"),
        (line(url=COMPLETIONS, suffix="."), "unsupported_parameter", "body.suffix"),
        (line(url=COMPLETIONS, prompt=["a", "b"]), "unsupported_parameter", "body.prompt"),
        (line(url=COMPLETIONS, messages=[USER]), "unsupported_parameter", "body.messages"),
        (line(prompt="Hi"), "unsupported_parameter", "body.prompt"),
        (line(beam="wide"), "unsupported_parameter", "body.beam"),
        (
            line(repetition_penalty=0),
            "bad_sampling",
            "body.repetition_penalty: must be a number between 0.01 and 100",
        ),
        (line(frequency_penalty=False), "bad_sampling", "body.frequency_penalty: must be"),
        (
            line(min_tokens=-5),
            "bad_sampling",
            "body.min_tokens: must be an integer, 0 (off) to max_tokens",
        ),
        (
            line(stop_token_ids=["a"]),
            "bad_sampling",
            "body.stop_token_ids[0]: stop_token_ids must be a list",
        ),
        (
            line(logit_bias={"5": 101}),
            "bad_sampling",
            "must be token ids with numbers between -100 and",
        ),
        (line(logit_bias={"the": 1}), "bad_sampling", "body.logit_bias.the: logit_bias must"),
        (
            line(allowed_token_ids=[]),
            "bad_sampling",
            "body.allowed_token_ids: must be a list of token ids, at least",
        ),
        (line(bad_words=[""]), "bad_sampling", "body.bad_words: must be a list of words"),
        (line(length_penalty=1.2), "unsupported_parameter", "body.length_penalty"),
        (line(guided_json={"type": "object"}), "unsupported_parameter", "body.guided_json"),
        (line(temperature=1e308), "bad_sampling", "temperature"),
        (line(min_p=2), "bad_sampling", "min_p"),
        (line(ignore_eos="yes"), "bad_sampling", "ignore_eos"),
        (line() | {"priority": 1}, "unsupported_parameter", "priority"),
        (
            line(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
            "unsupported_parameter",
            "content[0]",
        ),
        (
            line(url="/v1/moderations"),
            "bad_type",
            "url must be /v1/chat/completions, /v1/completions, /v1/responses or /v1/embeddings",
        ),
        (line(url=["/v1/completions"]), "bad_type", "url must be"),
        (line(method="GET"), "bad_type", "method must be POST"),
        (line() | {"body": [1]}, "bad_type", "body must be an object"),
        (line(model=5), "bad_type", "body.model: must be the name of a model"),
        (line(messages="Hi"), "bad_type", "body.messages must be a list"),
        (line(messages="absent"), "prompt_missing", "body.messages is absent"),
        (line(messages=[{"role": "robot", "content": "Hi"}]), "bad_role", "messages[0].role"),
        (line(temperature="hot"), "bad_sampling", "temperature"),
        (line(max_tokens=4, max_completion_tokens=5), "bad_sampling", "differ"),
        (line(stop=["a", ""]), "bad_sampling", "stop"),
        (line(top_k=5.0), "bad_sampling", "body.top_k: must be an integer"),
        (line(stop_token_ids="[5]"), "bad_sampling", "body.stop_token_ids: must be a list"),
        (line(logit_bias='{"5": 1}'), "bad_sampling", "body.logit_bias: must be token ids"),
        (line(choice='["a"]'), "bad_sampling", "body.choice: must be a list of texts"),
        (line(tools='[{"type": "function"}]'), "bad_type", "body.tools: must be a list of tools"),
        (line(tools=[{"type": "function"}]), "bad_type", "body.tools[0]: must be"),
        (
            line(parallel_tool_calls="true"),
            "bad_type",
            "body.parallel_tool_calls: must be true or false",
        ),
        (
            line(metadata={"a": 1}),
            "bad_type",
            "body.metadata.a: metadata must be an object of at most 16 texts",
        ),
        (line(url=COMPLETIONS, max_completion_tokens=4), "unsupported_parameter", "use max_tokens"),
        (
            line(url=COMPLETIONS, logprobs=True),
            "bad_sampling",
            "body.logprobs: must be an integer, 0 to 20",
        ),
        (line(messages=[]), "prompt_empty", "body.messages holds no message"),
        (line(url=COMPLETIONS, prompt=""), "prompt_empty", "body.prompt is empty"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_a_bad_line_names_the_parameter_and_keeps_its_id(requests, tmp_path, bad, code, says):
    good, row = requests(line("good"), bad)
    assert good["error_code"] is None
    assert (row["request_id"], row["error_code"]) == ("a", code)
    assert (
        row["error_message"].startswith(f"{tmp_path}/in.jsonl, line 2: ")
        and says in row["error_message"]
    )


def test_controls_of_the_body_are_read(requests):
    controls = {
        "presence_penalty": 0.5,
        "frequency_penalty": -1,
        "repetition_penalty": 1.2,
        "logit_bias": {"5": -100, "17": 2.5},
        "allowed_token_ids": [5, 6],
        "bad_words": ["no", "never"],
        "min_tokens": 3,
        "stop_token_ids": [7],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "prompt_logprobs": True,
        "logprobs": True,
        "top_logprobs": 4,
    }
    [row] = requests(line(**controls))
    assert row["error_message"] is None
    assert {name: row[name] for name in controls} == controls | {"logit_bias": {5: -100.0, 17: 2.5}}


def test_completions_have_the_number_of_alternatives_in_logprobs(requests):
    none, some = requests(line(url=COMPLETIONS, logprobs=0), line("b", url=COMPLETIONS, logprobs=5))
    assert [(row["logprobs"], row["top_logprobs"]) for row in (none, some)] == [
        (True, 0),
        (True, 5),
    ]


def test_min_p_and_ignore_eos_of_the_body_are_read(requests):
    [row] = requests(line(min_p=0.2, ignore_eos=True, top_k=3))
    assert [row[name] for name in ("min_p", "ignore_eos", "top_k")] == [0.2, True, 3]


def response(**body):
    return {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/responses",
        "body": {"model": "m", "input": "Hi"} | body,
    }


def test_a_response_is_the_chat_that_answers_it(requests):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "noon"},
    ]
    tool = {"name": "now", "parameters": {"type": "object"}}
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    plain, full = requests(
        response(
            max_output_tokens=5,
            temperature=0.5,
            store=False,
            reasoning={"effort": None},
            metadata={"a": "b"},
        ),
        response(
            input=items,
            instructions="Be short.",
            tools=[{"type": "function", **tool}],
            tool_choice={"type": "function", "name": "now"},
            text={"format": schema},
            include=["message.output_text.logprobs"],
            top_logprobs=2,
        )
        | {"custom_id": "b"},
    )
    assert plain["error_message"] is None and template_messages(plain["messages"]) == [USER]
    assert (plain["max_tokens"], plain["temperature"], plain["url"]) == (5, 0.5, "/v1/responses")
    assert full["error_message"] is None and (full["logprobs"], full["top_logprobs"]) == (True, 2)
    assert [message["role"] for message in template_messages(full["messages"])] == [
        "system",
        "user",
        "assistant",
        "tool",
    ]
    assert json.loads(full["tools"]) == [{"type": "function", "function": tool}]
    assert json.loads(full["tool_choice"]) == {"type": "function", "function": {"name": "now"}}
    assert json.loads(full["json_schema"] or full["response_format"])["type"] in (
        "object",
        "json_schema",
    )


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        (
            {"previous_response_id": "r"},
            "unsupported_parameter",
            "body.previous_response_id is not supported",
        ),
        ({"store": True}, "unsupported_parameter", "body.store is not supported"),
        ({"background": 0}, "unsupported_parameter", "body.background"),
        (
            {"max_tokens": -1},
            "unsupported_parameter",
            "body.max_tokens is not supported: give max_output_tokens",
        ),
        ({"max_completion_tokens": 5}, "unsupported_parameter", "give max_output_tokens"),
        ({"min_tokens": -1}, "bad_sampling", "0 (off) to max_output_tokens"),
        ({"top_logprobs": 99}, "bad_sampling", "with include: ['message.output_text.logprobs']"),
        (
            {"min_tokens": 9, "max_output_tokens": 4},
            "bad_value",
            "body.min_tokens: must be at most max_output_tokens (4), got 9",
        ),
        ({"logprobs": True}, "unsupported_parameter", "body.logprobs"),
        ({"metadata": "x"}, "bad_type", "body.metadata: must be an object"),
        ({"reasoning": {"effort": "low"}}, "unsupported_parameter", "body.reasoning.effort"),
        ({"input": None}, "missing", "body.input: missing; it must be a text or a list of items"),
        ({"input": 5}, "bad_value", "body.input: must be a text or a list of items"),
        (
            {"max_output_tokens": 0},
            "bad_value",
            "body.max_output_tokens: must be an integer, 1 or more, got 0",
        ),
        ({"text": {"format": 5}}, "bad_value", "body.text.format: must be {type: text}"),
        ({"input": [{"type": "item_reference"}]}, "unsupported_parameter", "body.input[0].type"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "body.tools[0].type"),
        ({"text": {"verbosity": "low"}}, "unsupported_parameter", "body.text.verbosity"),
        ({"top_logprobs": 3}, "bad_value", "body.top_logprobs: only with include"),
        ({"beam": 2}, "unsupported_parameter", "body.beam"),
        ({"temperature": "hot"}, "bad_sampling", "temperature"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_a_response_that_asks_for_more_is_refused_by_name(requests, body, code, says):
    [row] = requests(response(**body))
    assert (row["request_id"], row["error_code"]) == ("a", code) and says in row["error_message"]


@pytest.mark.parametrize("custom_id", ["", "  "])
def test_an_empty_custom_id_is_an_error_row(requests, tmp_path, custom_id):
    [row] = requests(line(custom_id))
    assert (row["request_id"], row["error_code"]) == ("in.jsonl:0", "empty_id")
    assert row["error_message"].startswith(
        f"{tmp_path}/in.jsonl, line 1: custom_id is an empty text."
    )


def test_lines_that_are_none_and_ids_that_are_missing(requests):
    rows = requests('{"custom_id": "a"', "[1]", line(None), line([1]), "")
    assert [row["error_code"] for row in rows] == ["bad_json", "bad_json", None, "bad_type"]
    assert [row["request_id"] for row in rows] == [f"in.jsonl:{i}" for i in range(4)]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, ["openai_batch", "jsonl", "jsonl"]),
        (
            {
                "input.format": "jsonl",
                "input.columns.id": "custom_id",
                "input.columns.messages": "body.messages",
            },
            None,
        ),
        ({"input.columns.id": "custom_id", "input.columns.messages": "body.messages"}, None),
    ],
)
def test_a_batch_file_is_detected_by_its_lines(tmp_path, settings, wanted):
    (tmp_path / "a.jsonl").write_text("\n" + json.dumps(line("a")))
    (tmp_path / "b.jsonl").write_text(
        json.dumps({"custom_id": "x", "body": {}, "url": "u", "prompt": "Hi"})
    )
    (tmp_path / "c.jsonl").write_text("no JSON")
    config = small_job(
        tmp_path,
        **{"input.path": str(tmp_path / "*.jsonl"), "input.on_unknown": "carry"} | settings,
    )
    assert [file.format for file in plan_input(config).files] == (wanted or ["jsonl"] * 3)


WRONG = {
    "list": [1, 2],
    "cut": '{"custom_id": "a", "method": "POST", "url": "/v1/chat/comp',
    "extra key": line() | {"metadata": {"a": 1}},
    "prompt": line() | {"prompt": "Hi"},
    "no body": {"custom_id": "a", "method": "POST", "url": CHAT},
    "text as body": line() | {"body": "Hi"},
    "null": None,
    "not UTF-8": "\udcff",
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_first_line_is_one_error_row(tmp_path, wrong):
    """Beside a whole batch file, too, whose columns the other file does not need."""
    text = wrong if isinstance(wrong, str) else json.dumps(wrong)
    lines = [text, json.dumps(line("b")), json.dumps(line("c"))]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "wrong.jsonl").write_bytes(
        "\n".join(lines).encode("utf-8", "surrogateescape")
    )
    (tmp_path / "in" / "whole.jsonl").write_text(json.dumps(line("d")))
    found = list(
        request_rows(plan_input(small_job(tmp_path, **{"input.path": str(tmp_path / "in")})))
    )
    assert [row["request_id"] for row in found if row["error_code"] is None] == ["d", "b", "c"]
    assert len(found) == 4


def test_any_number_of_wrong_lines_may_come_first(tmp_path):
    (tmp_path / "in.jsonl").write_text("[1]\n" * 300 + json.dumps(line("b")))
    *wrong, good = request_rows(plan_input(small_job(tmp_path)))
    assert len(wrong) == 300 and (good["request_id"], good["error_code"]) == ("b", None)


@pytest.mark.parametrize("wrong", ["extra key", "no body", "text as body"])
def test_a_file_of_wrong_requests_alone_says_what_is_wrong(tmp_path, wrong):
    (tmp_path / "in.jsonl").write_text(json.dumps(WRONG[wrong]))
    [row] = request_rows(plan_input(small_job(tmp_path)))
    assert row["request_id"] == "a" and row["error_code"] in ("unsupported_parameter", "bad_type")


def test_requests_of_a_detected_file(tmp_path):
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps(line(name)) for name in "ab"))
    found = list(request_rows(plan_input(small_job(tmp_path))))
    assert [(row["request_id"], row["error_code"], row["url"]) for row in found] == [
        ("a", None, CHAT),
        ("b", None, CHAT),
    ]
