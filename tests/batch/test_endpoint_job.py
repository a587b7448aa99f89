"""Jobs whose rows go to an endpoint: faults, kills, stops, columns, and our own endpoint behind our own job."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_ray.config import JobConfig, load_config
from tests.support.jobs import exit_code, ids_of, rows_of, start_driver
from tests.support.scripted_endpoint import (
    FAULTS,
    HANG,
    MODEL,
    PRICE,
    Asked,
    Reply,
    ScriptedEndpoint,
    answered,
    failed,
)

NUM_ROWS = 40
CONCURRENCY = 4
KEY = "sk-secret-4711"


@pytest.fixture
def endpoint() -> Iterator[ScriptedEndpoint]:
    with ScriptedEndpoint() as endpoint:
        yield endpoint


def job(
    endpoint: ScriptedEndpoint, directory: Path, num_rows: int = NUM_ROWS, **settings: Any
) -> JobConfig:
    rows = [{"id": f"q{i}", "prompt": f"Hi {i}", "tag": i} for i in range(num_rows)]
    (directory / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    usual = {
        "input.path": str(directory / "in.jsonl"),
        "output.path": str(directory / "out"),
        "engine.kind": "http",
        "engine.base_url": endpoint.url,
        "engine.model": MODEL,
        "engine.price": PRICE,
        "engine.concurrency": CONCURRENCY,
        "engine.timeout_s": 5.0,
        "logging.progress_every_s": 1.0,
    }
    return load_config(None, env={}, overrides=usual | settings)


def faulty(asked: Asked) -> Reply:
    """A fault for each prompt's first attempt, of each kind in turn, then a good answer."""
    return FAULTS[asked.number % len(FAULTS)](asked) if asked.tries == 0 else answered(asked)


def summary_of(config: JobConfig) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((Path(config.output.path) / "_summary.json").read_text())
    return summary


def ids(num_rows: int = NUM_ROWS) -> list[str]:
    return sorted(f"q{i}" for i in range(num_rows))


def test_every_row_is_answered_once_whatever_fails(
    ray_session: None, endpoint: ScriptedEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENDPOINT_KEY", KEY)
    endpoint.script = faulty
    config = job(endpoint, tmp_path, **{"engine.api_key_env": "ENDPOINT_KEY"})
    assert exit_code(config) == 0
    rows = rows_of(config)
    assert ids_of(config) == ids() and endpoint.num_looks == 1
    assert {row["status"] for row in rows} == {"ok"} and {row["http_attempts"] for row in rows} == {
        2
    }
    assert all(row["text"] == f'answer to "Hi {row["tag"]}"' for row in rows)
    spend = summary_of(config)["spend"]
    assert spend["requests"] == len(endpoint.asked) and spend["answered"] == NUM_ROWS
    assert spend["dollars"] == pytest.approx(endpoint.dollars)
    assert {asked.headers["authorization"] for asked in endpoint.asked} == {f"Bearer {KEY}"}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    num_requests = len(endpoint.asked)
    assert exit_code(config) == 0 and len(endpoint.asked) == num_requests  # it is done
    other = config.model_copy(
        update={"engine": config.engine.model_copy(update={"model": "other"})}
    )
    assert exit_code(other) == 6  # the output is of another configuration


def test_a_stopped_job_keeps_what_it_has_and_goes_on(
    ray_session: None, endpoint: ScriptedEndpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint.script = lambda asked: failed(402, "pay") if asked.number >= 15 else answered(asked)
    config = job(endpoint, tmp_path)
    assert exit_code(config) == 2
    stopped = json.loads((tmp_path / "out" / "_STOPPED.json").read_text())
    assert (stopped["reason"], stopped["rows_left"]) == ("insufficient_quota", NUM_ROWS - 15)
    assert len(ids_of(config)) == 15 and not (tmp_path / "out" / "_SUCCESS").exists()
    endpoint.script = answered
    num_requests = len(endpoint.asked)
    assert exit_code(config) == 0 and ids_of(config) == ids()
    assert len(endpoint.asked) - num_requests == NUM_ROWS - 15
    assert not (tmp_path / "out" / "_STOPPED.json").exists()


def test_a_limit_of_dollars_ends_the_job(
    ray_session: None, endpoint: ScriptedEndpoint, tmp_path: Path
) -> None:
    settings = {"engine.max_dollars": 0.25, "sampling.max_tokens": 8}
    config = job(endpoint, tmp_path, **settings)
    assert exit_code(config) == 8
    assert endpoint.dollars <= 0.25 and len(ids_of(config)) == sum(endpoint.good.values()) > 4


def test_what_may_have_been_paid_counts_for_the_limit(
    ray_session: None, endpoint: ScriptedEndpoint, tmp_path: Path
) -> None:
    """No request is answered, so that no dollar is known to be spent."""
    endpoint.script = lambda asked: HANG
    limit = 0.25
    settings = {
        "engine.max_dollars": limit,
        "engine.timeout_s": 0.5,
        "engine.attempts": {"failed": 100},
        "sampling.max_tokens": 8,
    }
    config = job(endpoint, tmp_path, **settings)
    assert exit_code(config) == 8
    stopped = json.loads((tmp_path / "out" / "_STOPPED.json").read_text())
    assert (stopped["reason"], stopped["rows_left"]) == ("max_dollars", NUM_ROWS)
    assert stopped["spent"] == 0.0
    perhaps = sum(attempt["perhaps_dollars"] for attempt in attempts_in(tmp_path / "out"))
    assert limit / 2 < perhaps <= limit
    num_asked = len(endpoint.asked)
    endpoint.script = answered
    assert exit_code(config) == 8 and len(endpoint.asked) == num_asked  # they still count


def attempts_in(output: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's files of attempts."""
    files = sorted((output / "spend").glob("*.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def kill_until_done(config: JobConfig, num_kills: int, address: str, seed: int) -> None:
    """Start the job again and again, killed after a random time, then to its end."""
    chance = random.Random(seed)
    for _ in range(num_kills):
        driver = start_driver(config, address)
        spend = Path(config.output.path) / "spend"
        deadline = time.monotonic() + 60
        wanted = size_of(spend) + chance.randrange(1, 3000)
        while driver.poll() is None and size_of(spend) < wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
    driver = start_driver(config, address)
    output, errors = driver.communicate(timeout=120)
    assert output.splitlines()[-1].startswith("0 "), errors


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.jsonl"))


def check_after_kills(endpoint: ScriptedEndpoint, config: JobConfig, num_kills: int) -> None:
    assert ids_of(config) == ids(config.input.limit or NUM_ROWS)
    spend = summary_of(config)["spend"]
    paid = sum(endpoint.good.values())
    num_lost = paid - spend["answered"]  # answers that came when no process was there
    assert 0 <= num_lost <= num_kills * CONCURRENCY
    assert paid - len(endpoint.good) <= num_kills * CONCURRENCY


def test_killed_jobs_pay_for_what_was_in_flight_at_most(
    ray_session: None, endpoint: ScriptedEndpoint, tmp_path: Path
) -> None:
    import ray

    def slow(asked: Asked) -> Reply:
        reply = faulty(asked)
        return Reply(reply.status, reply.content, reply.headers, reply.cut, 0.02)

    endpoint.script = slow
    config = job(endpoint, tmp_path)
    address = ray.get_runtime_context().gcs_address
    kill_until_done(config, 1, address, seed=1)
    check_after_kills(endpoint, config, 1)


@pytest.mark.slow
def test_many_kills(ray_session: None, endpoint: ScriptedEndpoint, tmp_path: Path) -> None:
    import ray

    endpoint.script = lambda asked: Reply(content=answered(asked).content, wait_s=0.02)
    config = job(endpoint, tmp_path)
    kill_until_done(config, 20, ray.get_runtime_context().gcs_address, seed=2)
    check_after_kills(endpoint, config, 20)


def test_workers_share_one_throttle(
    ray_session: None, endpoint: ScriptedEndpoint, tmp_path: Path
) -> None:
    config = job(
        endpoint, tmp_path, **{"engine.requests_per_minute": 1200.0, "execution.actors": 2}
    )
    began = time.monotonic()
    assert exit_code(config) == 0 and ids_of(config) == ids()
    assert time.monotonic() - began >= NUM_ROWS * 60 / 1200  # one limit over both workers


def test_another_configuration_of_limits_resumes(
    ray_session: None, endpoint: ScriptedEndpoint, tmp_path: Path
) -> None:
    endpoint.script = lambda asked: failed(401) if asked.number >= 8 else answered(asked)
    config = job(endpoint, tmp_path)
    assert exit_code(config) == 2
    endpoint.script = answered
    engine = config.engine.model_copy(update={"concurrency": 2, "timeout_s": 9.0})
    assert exit_code(config.model_copy(update={"engine": engine})) == 0
    assert ids_of(config) == ids()
