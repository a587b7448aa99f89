"""The worker's counters, as they come out of the endpoint that Prometheus would scrape."""

from __future__ import annotations

import re
import time
from urllib.request import urlopen

import pyarrow as pa
import pytest
import ray

from eagle_ray.data.metrics import DESCRIPTIONS, PREFIX, Metrics
from eagle_ray.data.progress import WORK, Report
from eagle_ray.data.schema import output_schema, table_of
from eagle_ray.data.storage import Location, read_json
from eagle_ray.job import run_job
from tests.conftest import token_rows

SAMPLE = re.compile(r"^(\w+)\{(.*)\} (\S+)$", re.MULTILINE)
KEYS = {"request_id": "a", "sample_index": 0, "row_index": 0, "source_file": "f", "run_id": "r", "attempt": 1}


def answers() -> pa.Table:
    """A row of 12 tokens in 5 steps, one of them plain, and an error row."""
    counts = {"prompt_tokens": 4, "completion_tokens": 12, "num_spec_steps": 5, "num_plain_steps": 1}
    drafts = {"num_draft_tokens": 20, "num_accepted_draft_tokens": 6, "e2e_s": 0.3}
    bad = {"status": "error", "error_code": "prompt_too_long", "error_message": "too long"}
    return table_of([KEYS | counts | drafts | {"status": "ok"}, KEYS | bad], output_schema([]))


def report(steps: int) -> Report:
    """An engine of four slots, three of them busy, after so many steps."""
    work = dict.fromkeys(WORK, 0) | {"num_steps": steps}
    return Report("w", slot_steps=3 * steps, offered_steps=4 * steps, work=work)


@ray.remote(num_cpus=0)
class Working:
    """Two batches in one worker, which stays: Ray exports what living processes say."""

    def __init__(self):
        metrics = Metrics("weekend", "r1", "host:7")
        metrics.count(report(2), None)
        metrics.count(report(5), answers())
        metrics.count(report(9), answers())

    def ready(self) -> bool:
        return True


def scrape(run_id: str) -> dict[str, float]:
    """The samples of a run by name; those of a histogram's buckets by name and bound."""
    node = ray.nodes()[0]
    with urlopen(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = {}
    for name, labels, value in SAMPLE.findall(text):
        if name.startswith(f"ray_{PREFIX}") and f'run_id="{run_id}"' in labels:
            bound = re.search(r'le="([^"]+)"', labels)
            found[f"{name} {bound[1]}" if bound else name] = float(value)
            assert 'run_name="' in labels and 'worker="' in labels
            assert ('code="prompt_too_long"' in labels) == ("row_errors" in name)
    return found


def scraped(run_id: str, wanted: str) -> dict[str, float]:
    """Once the wanted name is among them: workers report every second."""
    deadline = time.monotonic() + 60
    while f"ray_{PREFIX}{wanted}_total" not in (found := scrape(run_id)):
        assert time.monotonic() < deadline, sorted(found)
        time.sleep(0.3)
    return found


@pytest.fixture(scope="module")
def exported(ray_session) -> dict[str, float]:
    worker = Working.remote()
    assert ray.get(worker.ready.remote())
    yield scraped("r1", "row_errors")
    ray.kill(worker)


def test_rows_tokens_and_drafts_add_up_over_batches(exported):
    values = {name.removeprefix(f"ray_{PREFIX}").removesuffix("_total"): value for name, value in exported.items()}
    assert values["rows"] == 4 and values["row_errors"] == 2
    assert values["prompt_tokens"] == 8 and values["output_tokens"] == 24
    assert values["decode_steps"] == 10 and values["spec_decode_num_drafts"] == 8
    assert values["spec_decode_num_draft_tokens"] == 40 and values["spec_decode_num_accepted_tokens"] == 12
    assert values["row_latency_seconds_count"] == 2
    assert values["row_latency_seconds_bucket 0.25"] == 0 and values["row_latency_seconds_bucket 0.5"] == 2


def test_the_engines_counters_are_not_added_up_twice(exported):
    assert exported[f"ray_{PREFIX}engine_steps_total"] == 9
    assert exported[f"ray_{PREFIX}busy_slot_steps_total"] == 27 and exported[f"ray_{PREFIX}slot_steps_total"] == 36


def test_every_counter_that_moved_is_exported_under_its_name(exported):
    still = {f"engine_{name.removeprefix('num_')}" for name in WORK} - {"engine_steps"}
    assert {f"ray_{PREFIX}{name}_total" for name in DESCRIPTIONS.keys() - still} <= exported.keys()


@pytest.mark.slow
def test_a_jobs_workers_are_seen_while_and_after_it_runs(ray_session, make_job):
    config = make_job(token_rows(80), **{"execution.slots": 2, "sampling.max_tokens": 60})
    assert run_job(config) == 0
    run_id = read_json(Location.of(config.output.path) / "_run.json")["run_id"]
    found = scraped(run_id, "rows")
    assert 0 < found[f"ray_{PREFIX}rows_total"] <= 80
    assert found[f"ray_{PREFIX}busy_slot_steps_total"] <= found[f"ray_{PREFIX}slot_steps_total"]
