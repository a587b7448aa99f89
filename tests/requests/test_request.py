"""Request: what a row asks survives a table of Arrow, and the job's settings stand behind its own."""

import json
import pickle

import pytest

from eagle_ray.core.errors import RequestError
from eagle_ray.requests.parameters import CHAT, SAMPLING
from eagle_ray.requests.request import Request, table_of_requests
from eagle_ray.requests.row_schema import REQUEST, request_schema, table_of

PLACE = {"source_file": "a.jsonl", "row_index": 3, "source_line": 4}
VALUES = {
    "temperature": 0.5,
    "n": 2,
    "seed": -1,
    "stop": ["a"],
    "logit_bias": {5: -1.0},
    "allowed_token_ids": [1, 5],
}
CHAT_VALUES = {
    "tool_choice": '"none"',
    "parallel_tool_calls": False,
    "chat_template_kwargs": '{"a": 1}',
}


def rows_of(*requests):
    return [Request.of_row(row) for row in table_of_requests(requests).to_pylist()]


PROMPTS = [
    {"prompt": "Hi"},
    {"messages": '[{"role": "user", "content": "Hi"}]'},
    {"prompt_token_ids": [1]},
    {"user_turns": ["a", "b"]},
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_request_survives_a_table(prompt):
    request = Request(id="q", **PLACE, **prompt, sampling=VALUES, chat=CHAT_VALUES)
    assert rows_of(request) == [request]
    assert pickle.loads(pickle.dumps(request)) == request


def test_a_bad_request_keeps_its_error_and_its_samples():
    bad = Request(
        id="q",
        **PLACE,
        sampling={"n": 3},
        error=RequestError("bad_json", "a.jsonl, line 4: no JSON"),
    )
    [read] = rows_of(bad)
    assert (read.error.code, str(read.error), read.sampling) == (
        "bad_json",
        str(bad.error),
        {"n": 3},
    )
    with pytest.raises(RequestError, match=r"^a\.jsonl, line 4: no JSON$"):
        read.check()
    assert read.error_text(read.error) == str(bad.error)
    assert (
        Request(id="q", **PLACE).error_text(RequestError("x", "wrong")) == "a.jsonl, line 4: wrong"
    )


def test_every_parameter_of_a_row_has_a_column():
    assert [*SAMPLING, *CHAT] == [name for name in REQUEST.names if name in {*SAMPLING, *CHAT}]


def test_other_columns_are_carried():
    schema = request_schema([REQUEST.field("prompt").with_name("note")])
    request = Request(id="q", **PLACE, prompt="Hi", carried={"note": "x"})
    assert [Request.of_row(row) for row in table_of([request.to_row()], schema).to_pylist()] == [
        request
    ]


def test_its_own_values_stand_before_the_jobs(make_job):
    job = make_job(
        **{
            "sampling.top_k": 9,
            "sampling.regex": "a",
            "sampling.n": 2,
            "chat.chat_template_kwargs": {"b": 2},
        }
    )
    request = Request(
        id="q", **PLACE, user_turns=["Hi", "So"], sampling={"json_object": True}, chat=CHAT_VALUES
    )
    params = request.sampling_params(job)
    assert (params.top_k, params.regex, params.json_object) == (9, None, True)
    assert request.chat_options(job).template_kwargs == {"a": 1, "b": 2}
    assert (request.num_samples(job), request.num_turns, request.num_rows(job)) == (2, 2, 4)


def test_a_turn_has_the_messages_up_to_its_question():
    request = Request(id="q", **PLACE, user_turns=["Hi", "So", "Bye"])
    turn = request.next_turn(["Yes", None])
    said = [("user", "Hi"), ("assistant", "Yes"), ("user", "So"), ("user", "Bye")]
    assert turn.turn_index == 2
    assert [
        (message["role"], message["content"]) for message in json.loads(turn.turn_messages)
    ] == said
