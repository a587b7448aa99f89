"""plan: which of several clusters would do, and what it costs there."""

import json
from datetime import datetime, timedelta, timezone

import pytest

from eagle_ray.cli import main as cli
from eagle_ray.cli.estimate import SampledRow
from eagle_ray.cli.job_work import JobWork
from eagle_ray.cli.worker_counts import WorkerCounts, spread
from eagle_ray.models.loader import read_model_config
from eagle_ray.planner.cost_cache import cache_path, keep_costs
from eagle_ray.planner.steady_step import SteadyStep
from jobs.bench.simulated_costs import h100
from tests.support.jobs import PAIR, token_rows

NOW = datetime(2026, 11, 29, 20, 0, tzinfo=timezone.utc)
GPUS = ["--gpus", "h100:8,l40s:16", "--finish-by", "4h"]
PRICES = ["--price", "h100=2.5,l40s=0.8"]


@pytest.fixture
def job(tmp_path, monkeypatch) -> list[str]:
    """The flags of a job on the small pair, with a cache of its own."""
    monkeypatch.setenv("EAGLE_RAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in token_rows(24)))
    flags = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out")]
    flags += ["--set", f"model.target={PAIR / 'target'}", "--set", f"model.draft={PAIR / 'draft'}"]
    return [*flags, "--set", "sampling.max_tokens=6"]


def planned(capsys, *flags: str) -> str:
    assert cli.main(["plan", *flags]) == 0
    return capsys.readouterr().out


def table_of(text: str) -> dict[str, list[str]]:
    """Return the cells of each cluster's line, by its name."""
    lines = [
        line.lstrip("* ").split() for line in text.splitlines() if "~11-" in line or "~12-" in line
    ]
    return {name: cells for name, *cells in lines}


def test_each_cluster_has_a_line_and_the_cheapest_a_star(job, capsys):
    text = planned(capsys, *job, *GPUS, *PRICES)
    lines = table_of(text)
    assert lines.keys() == {"h100:8", "l40s:16"}
    assert all(cells[-1] == "yes" and cells[3] == "~1" for cells in lines.values())
    assert "\n* l40s:16 " in text and "* the cheapest that holds until" in text
    assert "steps    planned: l40s, by its published 864 GB/s and 362 TFLOPS (bf16)" in text
    assert "rows     planned: 24 with " in text and "drafts   left out" in text


def test_without_prices_all_that_hold_are_named(job, capsys):
    text = planned(capsys, *job, *GPUS)
    assert "workers that hold until" in text and "h100:8 with 1, l40s:16 with 1; --price" in text


def test_a_limit_counts(job, capsys):
    assert "rows     planned: 5 with " in planned(capsys, *job, "--limit", "5", *GPUS)


def test_what_an_estimate_has_decoded_is_measured(job, capsys):
    assert cli.main(["validate", *job, "--estimate", "6"]) == 0
    capsys.readouterr()
    text = planned(capsys, *job, *GPUS)
    assert "rows     measured: 24 with " in text and "by 6 rows in _estimate.json" in text
    assert "drafts   measured: their acceptance in _estimate.json" in text
    other = planned(capsys, *job, "--set", "sampling.max_tokens=7", *GPUS)
    assert "rows     planned: 24 with " in other  # the estimate is another configuration's


def kept_parts() -> dict:
    shape = read_model_config(PAIR / "target").to_dict()
    return {"target": shape, "method": "eagle2", "device": "NVIDIA H100 80GB HBM3"}


def test_costs_that_a_start_on_such_a_card_has_kept_are_used(job, capsys):
    job = [*job, "--set", "speculative.method=eagle2"]
    before = planned(capsys, *job, *GPUS)
    keep_costs(kept_parts(), h100())
    text = planned(capsys, *job, *GPUS)
    assert "steps    measured: h100, by an earlier start" in text
    assert "steps    planned: l40s" in text
    assert table_of(text)["h100:8"][2] != table_of(before)["h100:8"][2]


def test_costs_of_the_run_s_workers_are_used(job, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_RAY_CACHE", str(tmp_path / "there"))
    keep_costs(kept_parts(), h100())
    file = cache_path(kept_parts())
    kept = tmp_path / "out" / "_cache" / f"costs-{file.name}"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(file.read_bytes())
    monkeypatch.setenv("EAGLE_RAY_CACHE", str(tmp_path / "here"))
    text = planned(capsys, *job, "--set", "speculative.method=eagle2", *GPUS)
    assert "steps    measured: h100" in text


def test_a_deadline_that_no_number_of_workers_meets(job, capsys):
    text = planned(capsys, *job, "--gpus", "h100:8", "--finish-by", "30s")
    assert "none holds until" in text and table_of(text)["h100:8"][-1] == "no"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpus", "v100:8", "--finish-by", "4h"], "--gpus: 'v100' is no known card. Known: a10,"),
        (["--gpus", "h100:0", "--finish-by", "4h"], "--gpus: 'h100:0' has no cards"),
        (["--gpus", "h100", "--finish-by", "4h"], "--gpus: 'h100' has no cards. Give NAME:NUMBER"),
        (["--gpus", "h100:8"], "execution.finish_by: a plan needs one. Give --finish-by 06:00"),
        ([*GPUS, "--price", "h100=free"], "--price: 'h100=free' is no price"),
        ([*GPUS, "--price", "l4=1"], "--price: 'l4=1' is of a card that --gpus lacks"),
        (["--gpus", "h100:1", "--finish-by", "2020-01-01T00:00Z"], "is past. Set a later one"),
        (
            [*GPUS, "--max-dollars", "5", "--set", "execution.price_per_hour=1"],
            "execution.max_dollars: no price for h100. Give --price h100=DOLLARS",
        ),
        (
            [*GPUS, "--set", "execution.gpus_per_actor=0.5"],
            "execution.gpus_per_actor: 0.5, and a plan counts whole GPUs",
        ),
        (
            ["--gpus", "h100:1", *GPUS[2:], "--set", "execution.gpus_per_actor=2"],
            "more GPUs than the 1",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(job, capsys, flags, words):
    assert cli.main(["plan", *job, *flags]) == 2
    err = capsys.readouterr().err
    assert words in err and len(err.strip().splitlines()) == 1


def test_a_pair_that_does_not_fit_is_said_to(job, capsys, monkeypatch):
    monkeypatch.setattr("eagle_ray.doctor.card_fit.NODE_GPUS", 1)
    job = [*job, "--set", "execution.slots=64", "--set", "execution.kv_tokens=2000000000"]
    text = planned(capsys, *job, "--gpus", "l4:2", "--finish-by", "4h")
    assert "no cluster holds until" in text
    assert "l4:2: the pair does not fit: each card would hold " in text


def test_rows_hold_a_slot_for_their_tokens_and_all_slots_prompts():
    work = JobWork([SampledRow([], [100, 300], 50)], 10, None, True, False)
    [row] = work.rows_at(SteadyStep(0.02, 2.0, 1e-5), slots=8)
    assert row.slot_s == pytest.approx([1.0 + 8 * 50e-5, 3.0 + 8 * 50e-5])
    assert work.outputs(4) == 5 and work.mean_positions == 250
    assert work.full_batch(8).num_cached == 8 * (100 * 100 + 300 * 200) / 400


def test_an_uncertain_speed_makes_later_ends_sure():
    rows = [SampledRow([2.0], [9])] * 8
    certain, uncertain = (
        WorkerCounts(lambda workers: rows, 1000, 10, 40.0, 3.6, NOW, deviation).with_workers(2)
        for deviation in (0.0, 0.25)
    )
    assert certain.ends_at == uncertain.ends_at == NOW + timedelta(seconds=140)
    assert certain.surely_at == certain.ends_at < uncertain.likely_at < uncertain.surely_at
    assert spread([3.0], 0.0) == [3.0]
