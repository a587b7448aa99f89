"""The worker's counters, as they come out of the endpoint that Prometheus would scrape."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.request import urlopen

import pyarrow as pa
import pytest
import ray

from eagle_ray.batch.worker.progress import (
    DESCRIPTIONS,
    METRIC_PREFIX,
    WORK_COUNTERS,
    JobMetrics,
    WorkerReport,
)
from eagle_ray.requests.row_schema import output_schema, table_of
from eagle_ray.storage.path import StoragePath, read_json
from tests.support.jobs import exit_code, token_rows

SAMPLE = re.compile(r"^(\w+)\{(.*)\} (\S+)$", re.MULTILINE)
KEYS = {
    "request_id": "a",
    "sample_index": 0,
    "row_index": 0,
    "source_file": "f",
    "run_id": "r",
    "attempt": 1,
}


def answers() -> pa.Table:
    """A row of 12 tokens in 5 steps, one of them plain, and an error row."""
    counts = {
        "prompt_tokens": 4,
        "completion_tokens": 12,
        "num_spec_steps": 5,
        "num_plain_steps": 1,
    }
    drafts = {"num_draft_tokens": 20, "num_accepted_draft_tokens": 6, "e2e_s": 0.3}
    bad = {"status": "error", "error_code": "prompt_too_long", "error_message": "too long"}
    return table_of([KEYS | counts | drafts | {"status": "ok"}, KEYS | bad], output_schema([]))


def report(steps: int) -> WorkerReport:
    """An engine of four slots, three of them busy, after so many steps."""
    work = dict.fromkeys(WORK_COUNTERS, 0) | {"num_steps": steps}
    return WorkerReport("w", slot_steps=3 * steps, offered_steps=4 * steps, work=work)


@ray.remote(num_cpus=0)
class LivingWorker:
    """Two batches in one worker, which stays: Ray exports what living processes say."""

    def __init__(self):
        metrics = JobMetrics("weekend", "r1", "host:7")
        metrics.count(report(2), None)
        metrics.count(report(5), answers())
        metrics.count(report(9), answers())

    def ready(self) -> bool:
        return True


def scrape(run_id: str) -> dict[str, float]:
    """The samples of a run by name; those of a histogram's buckets by name and bound."""
    node = ray.nodes()[0]
    with urlopen(
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=10
    ) as answer:
        text = answer.read().decode()
    found = {}
    for name, labels, value in SAMPLE.findall(text):
        if name.startswith(f"ray_{METRIC_PREFIX}") and f'run_id="{run_id}"' in labels:
            bound = re.search(r'le="([^"]+)"', labels)
            found[f"{name} {bound[1]}" if bound else name] = float(value)
            assert 'run_name="' in labels and 'worker="' in labels
            assert ('code="prompt_too_long"' in labels) == ("row_errors" in name)
    return found


def awaited(look: Callable[[], Any], wanted: Any) -> Any:
    """What is seen, once it is what is wanted or a minute has passed: workers report now and then, a part at a time."""
    deadline = time.monotonic() + 60
    while (found := look()) != wanted and time.monotonic() < deadline:
        time.sleep(0.3)
    return found


def samples(run_id: str, wanted: dict[str, float]) -> dict[str, float]:
    """What is exported under the wanted names in the end."""
    return awaited(
        lambda: {name: value for name, value in scrape(run_id).items() if name in wanted}, wanted
    )


def totals(**values: int) -> dict[str, float]:
    return {f"ray_{METRIC_PREFIX}{name}_total": value for name, value in values.items()}


@pytest.fixture(scope="module")
def run_id(ray_session) -> Iterator[str]:
    worker = LivingWorker.remote()
    assert ray.get(worker.ready.remote())
    yield "r1"
    ray.kill(worker)


def test_rows_tokens_and_drafts_add_up_over_batches(run_id):
    rows = totals(rows=4, row_errors=2, prompt_tokens=8, output_tokens=24, decode_steps=10)
    drafts = {"drafts": 8, "draft_tokens": 40, "accepted_tokens": 12}
    rows |= totals(**{f"spec_decode_num_{name}": value for name, value in drafts.items()})
    assert samples(run_id, rows) == rows
    latency = f"ray_{METRIC_PREFIX}row_latency_seconds"
    seen = {f"{latency}_count": 2, f"{latency}_bucket 0.25": 0, f"{latency}_bucket 0.5": 2}
    assert samples(run_id, seen) == seen


def test_the_engines_counters_are_not_added_up_twice(run_id):
    work = totals(engine_steps=9, busy_slot_steps=27, slot_steps=36)
    assert samples(run_id, work) == work


def test_every_counter_that_moved_is_exported_and_no_other(run_id):
    still = {f"engine_{name.removeprefix('num_')}" for name in WORK_COUNTERS} - {"engine_steps"}
    names = totals(**dict.fromkeys(DESCRIPTIONS.keys() - still, 0)).keys()
    assert (
        awaited(lambda: {name for name in scrape(run_id) if name.endswith("_total")}, names)
        == names
    )


@pytest.mark.slow
def test_a_jobs_workers_are_seen_while_and_after_it_runs(ray_session, make_job):
    config = make_job(token_rows(80), **{"execution.slots": 2, "sampling.max_tokens": 60})
    assert exit_code(config) == 0
    run_id = read_json(StoragePath.of(config.output.path) / "_run.json")["run_id"]
    (rows,) = totals(rows=80)
    assert awaited(lambda: 0 < scrape(run_id).get(rows, 0) <= 80, True)
