"""Conversations: turns answered in order, each with the answers before it, and one output row for each."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.batch.driver import verification
from eagle_ray.batch.driver.completeness import count_done
from eagle_ray.batch.driver.input_plan import plan_input, request_rows
from eagle_ray.config import JobConfig
from eagle_ray.requests.request import Request
from eagle_ray.requests.request_seeds import seed_of
from eagle_ray.requests.row_schema import output_schema, table_of
from eagle_ray.runs.output_index import OutputIndex
from eagle_ray.runs.run import Run
from eagle_ray.storage.checked_parquet import parquet_bytes
from eagle_ray.storage.path import StoragePath
from tests.support.row_invariants import broken_invariants
from tests.support.workers import answers

TURNS = ["What is the capital of France?", "And of Italy?", "Write a list of animals."]
EMBEDDED = {
    "model.target": "embedded:tiny",
    "model.draft": "embedded:tiny",
    "input.columns.turns": "turns",
}


def conversation(make_job, rows: list[dict], **settings) -> JobConfig:
    return make_job(rows, **EMBEDDED | settings)


def test_each_turn_is_answered_after_the_ones_before_it(make_job):
    rows = [{"id": "a", "turns": TURNS, "stop": "."}, {"id": "b", "turns": json.dumps(TURNS[:1])}]
    found = answers(conversation(make_job, rows))
    assert [(row["request_id"], row["turn_index"]) for row in found] == [
        ("a", 0),
        ("a", 1),
        ("a", 2),
        ("b", 0),
    ]
    assert all(row["status"] == "ok" and not broken_invariants(row) for row in found)
    history = [
        message
        for turn, row in zip(TURNS, found, strict=False)
        for message in (
            {"role": "user", "content": turn},
            {"role": "assistant", "content": row["text"]},
        )
    ]
    for turn, row in enumerate(found[:3]):
        assert json.loads(row["messages"]) == history[: 2 * turn + 1] and row["stop"] == ["."]
    asked = [{"id": "c", "messages": history[:5], "stop": "."}]
    [single] = answers(make_job(asked, **EMBEDDED | {"input.columns.turns": None}))
    assert (
        single["output_token_ids"] == found[2]["output_token_ids"]
        and single["prompt"] == found[2]["prompt"]
    )


def test_each_sample_has_a_conversation_of_its_own(make_job):
    settings = {"sampling.n": 2, "sampling.temperature": 1.0}
    found = answers(conversation(make_job, [{"id": "a", "turns": TURNS[:2]}], **settings))
    assert [(row["sample_index"], row["turn_index"]) for row in found] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert len({row["seed"] for row in found}) == 4
    for first, second in (found[:2], found[2:]):
        assert json.loads(second["messages"])[1] == {"role": "assistant", "content": first["text"]}
    plain = answers(conversation(make_job, None, **settings | {"speculative.method": "none"}))
    assert [row["output_token_ids"] for row in plain] == [row["output_token_ids"] for row in found]


def test_a_failed_turn_ends_its_conversation(make_job):
    rows = [
        {"id": "a", "turns": [TURNS[0], "long " * 3000, TURNS[1]]},
        {"id": "b", "turns": TURNS},
        {"id": "c"},
    ]
    config = conversation(make_job, [*rows, {"id": "d", "turns": ["Hi", 5]}])
    found = answers(config)
    codes = [(row["request_id"], row["turn_index"], row["error_code"]) for row in found]
    assert codes == [
        ("a", 0, None),
        ("a", 1, "prompt_too_long"),
        ("a", 2, "earlier_turn_failed"),
        *(("b", turn, None) for turn in range(3)),
        ("c", 0, "prompt_missing"),
        ("d", 0, "bad_type"),
    ]
    assert (
        "line 1: turn 1 of this conversation is an error (prompt_too_long)"
        in found[2]["error_message"]
    )
    assert "column 'turns[1]' must be a text, got 5 (int)" in found[7]["error_message"]
    [rows] = plan_input(config).rows.by_range(1)
    assert rows["rows"].sum() == len(found)


@pytest.mark.parametrize(
    ("value", "code", "says"),
    [
        ("Hi", "bad_type", "column 'turns' must be a list of texts, got 'Hi' (str)"),
        ([], "prompt_empty", "column 'turns' holds no turn"),
        (["Hi", ""], "prompt_empty", "column 'turns[1]' is an empty text"),
    ],
)
def test_bad_turns_say_what_is_wrong(make_job, value, code, says):
    config = conversation(make_job, [{"turns": value}, {"turns": ["Hi"]}])
    bad, good = request_rows(plan_input(config))
    assert (
        bad["error_code"] == code and says in bad["error_message"] and good["user_turns"] == ["Hi"]
    )


def test_seeds_of_the_first_turn_are_those_of_a_single_prompt():
    request = Request(id="a", source_file="f", row_index=0)
    assert seed_of(request.next_turn([]), 0, 1) == seed_of(request, 0, 1)
    own = replace(request, sampling={"seed": 7})
    assert seed_of(own.next_turn([]), 0, 0) == 7
    turns = [asked.next_turn([""] * turn) for asked in (request, own) for turn in range(3)]
    seeds = [seed_of(turn, 0, j) for turn in turns for j in range(3)]
    assert len(set(seeds)) == 18


def test_turns_are_verified_and_partial_conversation_is_not_done(make_job, monkeypatch):
    config = conversation(make_job, [{"id": "a", "turns": TURNS}, {"id": "b", "turns": TURNS[:1]}])
    plan = plan_input(config)
    run = Run(StoragePath.of(config.output.path), "run", 1, "hash")
    rows = [row | {"worker_id": "w"} for row in answers(config)]

    write(run, rows[1:])  # without the first turn of a
    assert count_done(plan.rows, OutputIndex.read(run.data)).done.tolist() == [False, True]
    write(run, rows)
    assert count_done(plan.rows, OutputIndex.read(run.data)).done.tolist() == [True, True]

    monkeypatch.setattr(
        verification,
        "check_in_worker",
        lambda job, run, chosen: verification.check_chosen(job, run, chosen, WorkerPlan()),
    )
    found = verification.run_checks(config, plan, run, {"verify_rows": 9})["verify_rows"]
    assert found["identical"] == found["rows"] == 4 and found["differing"] == []


def write(run: Run, rows: list[dict]) -> None:
    file = run.data / "part-001-000000.parquet"
    file.write_atomic(parquet_bytes(table_of(rows, output_schema([])), "zstd"))
