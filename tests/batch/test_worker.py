"""A worker on its own: good rows and bad ones, the acceptance laws, seeds, and what is stored."""

import importlib

import pytest

from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.batch.worker import worker as worker_module
from eagle_ray.batch.worker.worker import build_engine_bundle
from eagle_ray.core.sequence import Sequence
from eagle_ray.requests.parameters import SamplingParams
from tests.support.jobs import token_rows
from tests.support.row_invariants import broken_invariants
from tests.support.workers import answers, outputs


def test_prompts_in_smaller_pieces_change_no_output(make_job):
    whole = answers(make_job(token_rows(6), **{"sampling.temperature": 0.8}))
    pieces = answers(make_job(**{"sampling.temperature": 0.8, "execution.prefill_tokens": 16}))
    assert outputs(whole) == outputs(pieces)


@pytest.mark.parametrize("method", ["eagle2", "none"])
def test_every_row_keeps_the_laws(make_job, method):
    settings = {
        "speculative.method": method,
        "speculative.stats": "detailed",
        "sampling.logprobs": True,
    }
    rows = answers(make_job(token_rows(12), **settings))
    assert [broken_invariants(row) for row in rows] == [[]] * 12
    for row in rows:
        assert row["status"] == "ok" and row["method"] == method and row["text"] is None
        assert row["ttft_s"] == pytest.approx(row["queue_s"] + row["prefill_s"])
        assert row["e2e_s"] == pytest.approx(row["ttft_s"] + row["decode_s"])
        assert (row["finished_at"] - row["started_at"]).total_seconds() == pytest.approx(
            row["e2e_s"], abs=1e-3
        )
        assert row["cumulative_logprob"] == pytest.approx(sum(row["token_logprobs"]), abs=1e-3)


def test_eagle_and_plain_decoding_give_the_same_ids_when_sampled(make_job):
    settings = {"sampling.temperature": 0.8, "sampling.n": 2}
    drafted = answers(make_job(token_rows(10), **settings))
    plain = answers(make_job(**settings | {"speculative.method": "none"}))
    assert outputs(drafted) == outputs(plain)


def test_the_share_of_a_gpu_that_a_worker_got_reaches_its_engine(make_job, monkeypatch):
    """With more actors than GPUs the configuration does not name it: execution.gpus_per_actor is auto."""
    built = []

    def build(
        model: object, speculative: object, args: EngineArgs, threads: int, *_: object
    ) -> None:
        built.append((args.gpu_share, threads))
        raise InterruptedError

    monkeypatch.setattr(worker_module, "build_in_thread", build)
    with pytest.raises(InterruptedError):
        build_engine_bundle(make_job(token_rows(1)), WorkerPlan(3, 3, 1 / 3, threads=2))
    assert built == [(1 / 3, 2)]


def test_a_rows_own_settings_are_what_the_engine_is_called_with(make_job):
    [base] = token_rows(1)
    own = [
        {"min_p": 0.0},
        {"min_p": 0.3},
        {"min_p": 0.9, "logprobs": True},
        {"ignore_eos": True},
        {"temperature": 0.0, "min_p": 0.9},
        {"top_k": 2, "max_tokens": 5, "logprobs": False},
    ]
    settings = {"sampling.temperature": 1.5, "sampling.max_tokens": 24, "sampling.min_p": 0.05}
    rows = [base | {"id": f"r{i}", "seed": 3} | values for i, values in enumerate(own)]
    config = make_job(rows, **settings)
    found = answers(config)
    engine = build_engine_bundle(config, WorkerPlan()).engine
    for values, row in zip(own, found, strict=True):
        params = SamplingParams(
            **{"temperature": 1.5, "max_tokens": 24, "min_p": 0.05, "seed": 3} | values
        )
        sequence = Sequence("direct", base["prompt_token_ids"], params)
        engine.add(sequence)
        while engine.has_work:
            engine.step()
        assert row["output_token_ids"] == sequence.output_ids
        assert (row["min_p"], row["ignore_eos"]) == (params.min_p, params.ignore_eos)
        assert (row["token_logprobs"] is not None) == params.logprobs
    assert len({tuple(row["output_token_ids"]) for row in found[:3]}) == 3


def test_a_row_that_ignores_the_end_goes_on_past_it(make_job):
    rows = [row | {"temperature": 1.0, "max_tokens": 160} for row in token_rows(12)]
    slots = {"execution.slots": 12}  # all at once
    ended = [row for row in answers(make_job(rows, **slots)) if row["finish_reason"] == "stop"]
    assert ended
    ids = {row["request_id"] for row in ended}
    longer = answers(
        make_job([row | {"ignore_eos": True} for row in rows if row["id"] in ids], **slots)
    )
    assert {row["finish_reason"] for row in longer} == {"length"}
    for short, long in zip(ended, longer, strict=True):
        assert long["output_token_ids"][: short["completion_tokens"]] == short["output_token_ids"]


def test_samples_depend_on_neither_order_nor_batching_nor_slots(make_job):
    rows, hot = token_rows(10), {"sampling.temperature": 1.0, "sampling.n": 2}
    reference = answers(make_job(rows, **hot))
    assert len({tuple(ids) for ids in outputs(reference).values()}) > 10  # samples do differ
    assert outputs(
        answers(make_job(rows, **hot | {"execution.slots": 1}), batch_size=3, backwards=True)
    ) == outputs(reference)


def test_both_orders_give_the_same_rows(make_job):
    shared = [5 + i % 20 for i in range(70)]
    rows = [
        row
        | {
            "prompt_token_ids": (shared if i % 2 else []) + row["prompt_token_ids"],
            "category": "ab"[i % 2],
        }
        for i, row in enumerate(token_rows(16))
    ]
    rows = [
        row | {"temperature": float(i % 3 == 0), "max_tokens": 4 + 5 * (i % 4)}
        for i, row in enumerate(rows)
    ]
    found = {}
    for order in ("input", "auto"):
        settings = {"execution.order": order, "execution.slots": 2, "sampling.n": 2}
        found[order] = answers(make_job(rows, **settings), batch_size=4)
        assert [row["request_id"] for row in found[order]] == [
            row["id"] for row in rows for _ in range(2)
        ]
    assert outputs(found["auto"]) == outputs(found["input"])
    admitted = [
        [row["request_id"] for row in sorted(rows, key=lambda r: r["queue_s"])]
        for rows in found.values()
    ]
    assert admitted[0] != admitted[1]


def test_bad_rows_become_error_rows_and_the_others_are_answered(make_job):
    rows = [
        {"id": "good", "prompt_token_ids": [1, 2], "topic": "a"},
        {"id": "text", "prompt": "Hi", "topic": "b"},
        {"id": "long", "prompt_token_ids": [1] * 600},
        {"id": "none"},
        {"id": "hot", "prompt_token_ids": [1], "temperature": -1},
        {"id": "wild", "prompt_token_ids": [1, 99999]},
    ]
    found = answers(make_job(rows, **{"model.max_model_len": 500, "sampling.n": 2}))
    assert [row["request_id"] for row in found] == [row["id"] for row in rows for _ in range(2)]
    assert [broken_invariants(row) for row in found] == [[]] * 12
    codes = {row["request_id"]: row["error_code"] for row in found}
    assert (
        codes["good"] is None
        and codes["text"] == "no_tokenizer"
        and codes["long"] == "prompt_too_long"
    )
    assert all(codes[id] for id in ("none", "hot", "wild"))
    assert [row["topic"] for row in found[:4]] == ["a", "a", "b", "b"]


def test_an_error_the_engine_found_names_file_and_row(make_job, tmp_path):
    rows = [{"id": "long", "prompt_token_ids": [1] * 600}, {"id": "none"}]
    long, none = answers(make_job(rows, **{"model.max_model_len": 500}))
    assert long["error_message"].startswith(
        f"{tmp_path}/in.jsonl, line 1: the prompt has 600 tokens"
    )
    assert none["error_message"].count(f"{tmp_path}/in.jsonl, line 2") == 1


@pytest.mark.parametrize(
    "broken",
    ["eagle_ray.requests.sequences.read_prompt", "eagle_ray.requests.output_rows._acceptance"],
)
def test_an_unexpected_error_over_one_row_is_that_rows_error(make_job, monkeypatch, broken):
    module, _, name = broken.rpartition(".")
    works, calls = getattr(importlib.import_module(module), name), iter(range(9))

    def fails_once(*args):
        return works(*args) if next(calls) else 1 / 0

    monkeypatch.setattr(broken, fails_once)
    found = answers(make_job(token_rows(3)))
    assert sorted(row["status"] for row in found) == ["error", "ok", "ok"]
    (bad,) = [row for row in found if row["status"] == "error"]
    assert (
        bad["error_code"] == "internal_error"
        and "ZeroDivisionError: division by zero" in bad["error_message"]
    )
    assert f"line {bad['row_index'] + 1}: " in bad["error_message"]


def test_columns_that_are_not_wanted_are_null(make_job):
    row = answers(
        make_job(token_rows(1), **{"output.store_token_ids": False, "output.store_prompt": False})
    )[0]
    unwanted = (
        "output_token_ids",
        "prompt",
        "token_logprobs",
        "per_step_budget",
        "per_step_accepted",
    )
    assert [row[name] for name in unwanted] == [None] * 5
    assert row["completion_tokens"] > 0 and broken_invariants(row) == []


def test_max_tokens_is_cut_to_the_room_and_the_row_says_so(make_job):
    rows = [{"id": "a", "prompt_token_ids": [1] * 95, "max_tokens": 50}]
    (row,) = answers(make_job(rows, **{"model.max_model_len": 100, "sampling.ignore_eos": True}))
    assert (row["max_tokens"], row["completion_tokens"], row["finish_reason"]) == (5, 5, "length")
