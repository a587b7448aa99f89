"""Continuations of a job's rows: from its configuration and from a column, in every format, into the output rows."""

from __future__ import annotations

import json
import math

import pytest

from eagle_ray.batch.driver.input_plan import request_rows
from eagle_ray.requests import sequences
from eagle_ray.requests.request import Request
from eagle_ray.requests.scored_prompts import scored_choices
from tests.support.inputs import TINY, plan, write
from tests.support.row_invariants import broken_invariants
from tests.support.workers import answers

STORY = "Tell me a story about a fox."
LABELS = [" fox", " dog", "", " fox"]
ROWS = [
    {"id": "own", "prompt": "The quick brown", "continuations": LABELS},
    {"id": "chat", "messages": STORY, "continuations": ["Once", "No"]},
    {"id": "ids", "prompt_token_ids": [5, 6, 7], "continuations": [[8, 9], [8]]},
    {"id": "generated", "messages": STORY},
    {"id": "choice", "prompt": "The", "choice": [" fox", " dog"], "logprobs": True},
    {"id": "two", "prompt": "x", "continuations": ["a"], "n": 2},
    {"id": "bad", "prompt_token_ids": [5], "continuations": ["a"]},
]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_every_format_has_continuations(tmp_path, suffix):
    for given in (["yes", "", 'a "b"'], [[5, 6], [7]]):
        the_plan = plan(write(tmp_path / f"a.{suffix}", {"prompt": "x", "continuations": given}))
        [row] = [row for row in request_rows(the_plan) if row["prompt"] == "x"]
        assert row["error_message"] is None and the_plan.carried_fields == []
        assert Request.of_row(row).sampling == {"continuations": given}


@pytest.mark.parametrize("wrong", ["yes", [], [1], [["a"]], [-1], {"a": 1}])
def test_wrong_continuations_are_their_rows_error(tmp_path, wrong):
    the_plan = plan(write(tmp_path / "a.jsonl", {"prompt": "x", "continuations": wrong}))
    [row] = [row for row in request_rows(the_plan) if row["error_message"] is not None]
    form = "column 'continuations' must be a list of texts or lists of token ids, at least one, got"
    assert form in row["error_message"]


def test_the_wrong_one_of_many_continuations_is_named(tmp_path):
    given = [" yes"] * 50 + [3]
    the_plan = plan(write(tmp_path / "a.jsonl", {"prompt": "x", "continuations": given}))
    [row] = [row for row in request_rows(the_plan) if row["error_message"] is not None]
    assert row["error_message"].endswith(", where continuations[50] is 3")


def test_scored_and_generated_rows_share_a_job(make_job):
    forward = answers(make_job(ROWS, **TINY))
    rows = {row["request_id"]: row for row in forward}
    assert [problem for row in forward for problem in broken_invariants(row)] == []
    own = rows["own"]
    assert own["status"] == "ok" and own["text"] is None and own["finish_reason"] == "length"
    assert own["scores"][0] == own["scores"][3] and own["scores"][2] == 0.0
    assert own["score_bytes"] == [4, 4, 0, 4] and own["best"] == 2 and own["best_by_byte"] in (0, 1)
    assert own["is_greedy"][2] and 0 < own["label_mass"] < 1
    assert json.loads(own["continuations"]) == LABELS
    assert own["num_draft_tokens"] is None and own["mean_acceptance_length"] is None
    for name in (
        "own",
        "ids",
    ):  # at most 1.05 times the tokens of the context and all continuations
        row = rows[name]
        num_rows = row["prompt_tokens"] + row["num_verified"]
        assert num_rows <= 1.05 * (row["prompt_tokens"] + sum(row["score_tokens"]))
    assert rows["chat"]["num_verified"] is not None and len(rows["chat"]["scores"]) == 2
    assert rows["ids"]["score_tokens"] == [2, 1]
    assert rows["generated"]["scores"] is None and rows["generated"]["text"]
    assert rows["choice"]["text"] in (" fox", " dog") and len(rows["choice"]["scores"]) == 2
    assert "n: must be 1 where nothing is generated" in rows["two"]["error_message"]
    assert "continuations[0]: a text cannot follow" in rows["bad"]["error_message"]

    backward = answers(make_job(ROWS, **TINY), batch_size=2, backwards=True)
    for row in backward:
        if row["scores"] is not None:
            assert row["scores"] == pytest.approx(rows[row["request_id"]]["scores"], abs=1e-4)


DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 20
DOCUMENTS = [
    {"id": "document", "prompt": DOCUMENT, "score_text": True},
    {"id": "stride", "prompt": DOCUMENT, "score_text": True, "score_stride": 7},
    {"id": "chat", "messages": STORY, "score_text": True},
    {"id": "ids", "prompt_token_ids": [5, 6, 7], "score_text": True},
    {"id": "generated", "messages": STORY},
    {"id": "scored", "prompt": "The quick brown", "continuations": LABELS},
    {"id": "both", "prompt": "x", "score_text": True, "continuations": ["a"]},
    {"id": "far", "prompt": "x", "score_text": True, "score_stride": 999},
    {"id": "lone", "prompt": "x", "score_stride": 5},
]


def test_documents_share_a_job_with_other_rows(make_job):
    """A document longer than the model's length is one row, whose text is null."""
    settings = TINY | {"model.max_model_len": 96}
    found = answers(make_job(DOCUMENTS, **settings))
    assert [problem for row in found for problem in broken_invariants(row)] == []
    rows = {row["request_id"]: row for row in found}
    document = rows["document"]
    assert document["status"] == "ok" and document["text"] is None and document["scores"] is None
    assert document["completion_tokens"] == 0 and document["bytes"] == len(DOCUMENT)
    assert document["prompt_tokens"] == document["tokens"] + 1 > 96
    nats = -document["loglikelihood"]
    assert document["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(DOCUMENT))
    assert document["e2e_s"] >= document["queue_s"] and document["num_verified"] > 96
    assert document["num_draft_tokens"] is None and document["target_forwards"] > 2
    assert rows["stride"]["tokens"] == document["tokens"]
    assert rows["stride"]["loglikelihood"] != document["loglikelihood"]
    assert rows["ids"]["tokens"] == 3 and rows["chat"]["loglikelihood"] < 0
    assert rows["generated"]["text"] and rows["generated"]["loglikelihood"] is None
    assert rows["scored"]["scores"] and rows["scored"]["tokens"] is None
    assert "score_text: not with continuations" in rows["both"]["error_message"]
    assert "score_stride: must be at most 96" in rows["far"]["error_message"]
    assert "score_stride: only with score_text" in rows["lone"]["error_message"]


def test_samples_share_the_tokens_of_their_choices(make_job, monkeypatch):
    calls = []

    def counted(*args, **named):
        calls.append(args)
        return scored_choices(*args, **named)

    monkeypatch.setattr(sequences, "scored_choices", counted)
    found = answers(make_job([ROWS[4] | {"n": 3, "temperature": 1.0}], **TINY))
    assert [row["sample_index"] for row in found] == [0, 1, 2] and len(calls) == 1
    assert all(row["text"] in (" fox", " dog") for row in found)
    for row in found[1:]:
        assert row["scores"] == pytest.approx(found[0]["scores"], abs=1e-4)
        assert row["num_verified"] == found[0]["num_verified"]


def test_choices_with_max_tokens_0_are_scored_not_generated(make_job):
    row = ROWS[4] | {"max_tokens": 0}
    [scored, generated] = answers(make_job([row, ROWS[4] | {"id": "generated"}], **TINY))
    assert scored["status"] == "ok" and scored["text"] is None and scored["completion_tokens"] == 0
    assert scored["scores"] == pytest.approx(generated["scores"], abs=1e-4)
    assert json.loads(scored["continuations"]) == ROWS[4]["choice"]
    assert broken_invariants(scored) == []
    [refused] = answers(make_job([row | {"logprobs": False}], **TINY))
    assert "max_tokens: must be 1 or more where nothing is scored" in refused["error_message"]


def test_a_job_has_continuations_for_all_its_rows(make_job):
    settings = TINY | {"sampling.continuations": [" yes", " no"], "sampling.max_tokens": 0}
    rows = answers(make_job([{"id": "a", "prompt": "Is it?"}, ROWS[0]], **settings))
    assert [len(row["scores"]) for row in rows] == [2, 4]


def test_prompts_are_not_stored_where_they_must_not(make_job):
    [row, *_] = answers(make_job(ROWS[:1], **TINY, **{"output.store_prompt": False}))
    assert row["continuations"] is None and row["scores"] is not None
