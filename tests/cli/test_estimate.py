"""validate --estimate: what a sample says of the whole job."""

import json
import random
from pathlib import Path

import pytest

from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.batch.driver.input_plan import plan_input, requests_of
from eagle_ray.batch.worker.worker import build_engine_bundle
from eagle_ray.cli.estimate import (
    SampledRow,
    drain_time,
    estimate_job,
    estimate_text,
    job_seconds,
    measure,
    store_estimate,
)
from eagle_ray.core.errors import ConfigError
from tests.support.jobs import token_rows


def test_each_row_takes_the_first_free_slot():
    assert drain_time([3, 1, 1, 1, 5], slots=2) == 8
    assert drain_time([], slots=4) == 0 and drain_time([2], slots=4) == 2


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    draw = random.Random(3)
    rows = [draw.lognormvariate(0, 0.8) for _ in range(2000)]
    truth = drain_time(rows, 16)
    held = 0
    for _ in range(60):
        sample = [SampledRow([seconds], [1]) for seconds in draw.sample(rows, 64)]
        _, low, high = job_seconds(sample, len(rows), workers=1, slots=16)
        held += low <= truth <= high
    assert held >= 51  # 95 % of 60 is 57; a bootstrap over few skewed values holds a little less


def test_many_rows_and_many_workers_scale():
    sample = [SampledRow([1.0, 1.0], [5])] * 8
    assert job_seconds(sample, 10**6, workers=10, slots=20) == pytest.approx([10_000.0] * 3)
    assert job_seconds(sample, 100, workers=2, slots=4) == [25.0] * 3
    mixed = [SampledRow([seconds], [1]) for seconds in (1.0, 3.0)] * 32
    expected, low, high = job_seconds(mixed, 10**6, workers=10, slots=20)
    assert expected == pytest.approx(10_000.0) and (low, high) == pytest.approx(
        (8_765, 11_235), rel=0.01
    )


def test_sample_runs_under_full_load_and_bad_rows_take_no_time(make_job):
    rows = [
        *token_rows(6),
        {"id": "bad", "prompt_token_ids": [10**6]},
        {"id": "two", "prompt_token_ids": [5], "n": 2},
    ]
    config = make_job(rows)
    requests = list(requests_of(plan_input(config)))
    bundle = build_engine_bundle(config, WorkerPlan())
    found = measure(requests, requests[:3], config, bundle, concurrent=3)
    assert [len(row.slot_s) for row in found] == [1] * 6 + [0, 2]
    assert all(seconds > 0 for row in found for seconds in row.slot_s) and found[6].tokens == 0
    assert not bundle.engine.has_work


def test_an_estimate_is_stored_and_said(make_job):
    config = make_job(token_rows(10), **{"execution.price_per_hour": 3.6, "execution.actors": 2})
    estimate = estimate_job(config, num_sampled=4)
    assert (estimate["rows"], estimate["sampled_rows"], estimate["workers"]) == (10, 4, 2)
    expected, low, high = estimate["seconds"]
    assert low <= expected <= high
    assert estimate["dollars"] == pytest.approx(
        [2 * 3.6 / 3600 * seconds for seconds in estimate["seconds"]]
    )
    store_estimate(config, estimate)
    assert json.loads((Path(config.output.path) / "_estimate.json").read_text()) == estimate
    text = estimate_text(estimate)
    memory = ("\nmemory   a worker takes ", ", Python and its packages ")
    for words in ("as if by 2 workers with up to", *memory, "$3.60 for a worker hour"):
        assert words in text


def test_a_sample_of_bad_rows_is_no_estimate(make_job):
    config = make_job([{"id": "a", "prompt_token_ids": [10**6]}])
    with pytest.raises(ConfigError, match="no row of the sample"):
        estimate_job(config)
