"""The twin engines: plain decoding's tokens are the stored ones, and where they are not, the first such is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.batch.driver.input_plan import plan_input, requests_of
from eagle_ray.batch.worker import baseline as module
from eagle_ray.batch.worker.baseline import BaselineComparison, ChosenRow
from eagle_ray.models.graphs import GRAPHS
from eagle_ray.parallel.lockstep import ALONE
from eagle_ray.sampling.noise import gumbel_noise
from tests.support.jobs import PAIR, token_rows, with_changes
from tests.support.workers import answers

SETTINGS = {"sampling.temperature": 0.8, "sampling.n": 2, "execution.slots": 2}


@pytest.fixture
def job(make_job):
    return make_job(token_rows(6), **SETTINGS)


@pytest.fixture
def rows(job) -> list[ChosenRow]:
    """Both samples of six finished rows."""
    requests = {request.id: request for request in requests_of(plan_input(job))}
    return [
        ChosenRow(requests[row["request_id"]], row["sample_index"], row["output_token_ids"])
        for row in answers(job)
    ]


def test_drafts_and_plain_decoding_are_timed_over_the_same_rows(job, rows):
    found = BaselineComparison(job, WorkerPlan()).measure(rows)
    assert (found["rows"], found["slots"]) == (12, 2)
    assert found["output_tokens"] == sum(len(row.output_ids) for row in rows)
    assert found["speed_up"] == pytest.approx(found["tokens_per_s"] / found["plain_tokens_per_s"])


def test_rows_of_several_ranks_are_verified_in_one_process(job, rows):
    twin = BaselineComparison(with_changes(job, execution={"tensor_parallel": 2}), WorkerPlan())
    assert twin.draft_engine.lockstep is ALONE
    assert twin.verify(rows)["identical"] == len(rows) > 0


def test_neither_pass_finds_the_other_ones_prompts(job, rows):
    twin = BaselineComparison(job, WorkerPlan())
    before = twin.plain_engine.counters.num_reused_tokens
    twin.measure(
        [
            ChosenRow(replace(r.request, prompt_token_ids=list(range(1, 100))), 0, None)
            for r in rows[:1]
        ]
    )
    assert (
        twin.plain_engine.counters.num_reused_tokens
        == before
        == twin.draft_engine.counters.num_reused_tokens
    )


def test_plain_decoding_is_replayed_and_overlapped_like_drafts(job, rows, monkeypatch):
    monkeypatch.setenv(GRAPHS, "on")
    twin = BaselineComparison(job, WorkerPlan())
    assert twin.verify(rows)["identical"] == len(rows) > 0
    twin.measure(rows)
    for engine in (twin.draft_engine, twin.plain_engine):
        assert engine.graphs.num_replayed and engine.counters.num_ahead


def test_stored_outputs_are_plain_decodings_and_others_are_named(job, rows):
    twin = BaselineComparison(job, WorkerPlan())
    assert twin.verify(rows) == {"rows": 12, "identical": 12, "differing": []}
    row = rows[3]
    other = 1 + row.output_ids[2] % 500
    wrong = ChosenRow(
        row.request, row.sample_index, [*row.output_ids[:2], other, *row.output_ids[3:]]
    )
    short = ChosenRow(rows[4].request, rows[4].sample_index, rows[4].output_ids[:-1])
    found = twin.verify([*rows[:3], wrong, short])
    assert (found["rows"], found["identical"]) == (5, 3)
    first, second = found["differing"]
    assert (first["request_id"], first["sample_index"], first["position"]) == (row.request.id, 1, 2)
    assert (first["token"], first["plain_token"], first["near_tie"]) == (
        other,
        row.output_ids[2],
        False,
    )
    assert (
        second["position"] == len(short.output_ids)
        and second["token"] is None
        and not second["near_tie"]
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@torch.inference_mode()
def test_the_gap_is_how_far_plain_decodings_token_led(make_job, monkeypatch, temperature):
    job = make_job(token_rows(1), **{"sampling.temperature": temperature})
    [row] = answers(job)
    [request] = requests_of(plan_input(job))
    prompt, ids = request.prompt_token_ids, row["output_token_ids"]
    model = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).eval()
    scores = model(torch.tensor([prompt + ids[:4]])).logits[0, -1]
    if temperature:
        position = torch.tensor([len(prompt) + 4])
        scores = (
            scores / temperature
            + gumbel_noise(torch.tensor([row["seed"]]), position, torch.arange(len(scores)))[0]
        )
    assert scores.argmax() == ids[4]
    nearest = scores.topk(2).indices[1].item()
    lead = (scores[ids[4]] - scores[nearest]).item()
    wrong = ChosenRow(request, 0, [*ids[:4], nearest, *ids[5:]])
    [found] = BaselineComparison(job, WorkerPlan()).verify([wrong])["differing"]
    assert (found["position"], found["token"]) == (4, nearest)
    assert found["gap"] == pytest.approx(lead, abs=1e-4) and not found["near_tie"]
    monkeypatch.setitem(module.NEAR_TIE, torch.float32, lead + 1e-3)
    [found] = BaselineComparison(job, WorkerPlan()).verify([wrong])["differing"]
    assert found["near_tie"] and found["cause"] == "tie"
