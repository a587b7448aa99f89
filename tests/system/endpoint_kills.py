"""Kill jobs whose rows go to an endpoint, with every fault that an endpoint has, and check rows and money from outside.

A job has ROWS rows. Its driver is killed with SIGKILL up to KILLS_OF_A_JOB times, at random moments of its
spending, and started again, until its last row; then another job begins. The endpoint is scripted: the first request
of a prompt fails in one of eight ways or is answered, and now and then the key or the account is refused, which stops
the job. Exit code 1 where a check fails.

    python -m tests.system.endpoint_kills --kills 200 --seed 1
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from eagle_ray.batch.driver.ray_environment import LOCAL, prepare_ray_environment
from eagle_ray.config import JobConfig, load_config
from tests.support.jobs import ids_of, start_driver
from tests.support.scripted_endpoint import (
    DOLLARS,
    FAULTS,
    HANG,
    MODEL,
    PRICE,
    Asked,
    Reply,
    Script,
    ScriptedEndpoint,
    answered,
    failed,
)

ROWS = 60
CONCURRENCY = 4
KILLS_OF_A_JOB = 8
ANSWER_S = 0.02  # seconds of a good answer
STOPS: list[Script] = [lambda asked: failed(401), lambda asked: failed(402, "pay")]
STOP_EVERY = 100  # requests, about
SPEND_BYTES = 8_000  # of the spend log between two kills, at most
ALL_FAULTS: list[Script] = [*FAULTS, lambda asked: HANG]
SHARE_OF_FAULTS = 0.3  # of prompts


@dataclass
class Totals:
    """The counts of all jobs so far.

    Attributes:
        paid: good answers that the endpoint has sent.
        twice: good answers of prompts that had one already.
        lost: good answers that no spend log has.
    """

    kills: int = 0
    jobs: int = 0
    rows: int = 0
    requests: int = 0
    paid: int = 0
    twice: int = 0
    lost: int = 0
    ends: Counter[int] = field(default_factory=Counter)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no job after them")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    choice = random.Random(options.seed)
    prepare_ray_environment(LOCAL)
    import ray

    ray.init(
        num_cpus=2,
        object_store_memory=100 << 20,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
    )
    address = ray.get_runtime_context().gcs_address
    totals = Totals()
    until = time.monotonic() + options.seconds
    try:
        while totals.kills < options.kills and time.monotonic() < until:
            with tempfile.TemporaryDirectory() as directory:
                problem = run_one(Path(directory), address, choice, totals)
            print(totals, flush=True)
            if problem is not None:
                print(problem, file=sys.stderr)
                return 1
    finally:
        ray.shutdown()
    return 0


def run_one(directory: Path, address: str, choice: random.Random, totals: Totals) -> str | None:
    """Run a job through its kills to its end. Returns what is wrong with what it left, if something is."""
    faults: dict[str, Script] = {}
    for i in range(ROWS):
        if choice.random() < SHARE_OF_FAULTS:
            faults[f"Hi {i}"] = choice.choice(ALL_FAULTS)
    stops = random.Random(choice.random())

    def script(asked: Asked) -> Reply:
        if stops.random() < 1 / STOP_EVERY:
            return stops.choice(STOPS)(asked)
        fault = faults.get(json.loads(asked.prompt))
        if asked.tries == 0 and fault is not None:
            return fault(asked)
        return Reply(content=answered(asked).content, wait_s=ANSWER_S)

    with ScriptedEndpoint(script) as endpoint:
        config = job(endpoint, directory)
        num_kills = 0
        while num_kills < KILLS_OF_A_JOB:
            code = killed_or_ended(config, address, choice)
            totals.ends[-signal.SIGKILL if code is None else code] += 1
            num_kills += code is None
            if code == 0:
                break
        while True:
            driver = start_driver(config, address)
            output, errors = driver.communicate(timeout=600)
            code = code_in(output)
            totals.ends[code] += 1
            if code == 0:
                break
            if code != 2:  # not a refused key
                return f"exit code {code}\n{errors}"
        return check(endpoint, config, num_kills, totals)


def job(endpoint: ScriptedEndpoint, directory: Path) -> JobConfig:
    rows = [{"id": f"q{i}", "prompt": f"Hi {i}"} for i in range(ROWS)]
    (directory / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "input.path": str(directory / "in.jsonl"),
        "output.path": str(directory / "out"),
        "engine.kind": "http",
        "engine.base_url": endpoint.url,
        "engine.model": MODEL,
        "engine.price": PRICE,
        "engine.concurrency": CONCURRENCY,
        "engine.timeout_s": 1.0,
        "engine.attempts": {"limited": 100, "failed": 100},
    }
    return load_config(None, env={}, overrides=settings)


def killed_or_ended(config: JobConfig, address: str, choice: random.Random) -> int | None:
    """Start the job and kill it once its spend log has grown by a random amount; its exit code if it ends before."""
    spend = Path(config.output.path) / "spend"
    driver = start_driver(config, address)
    wanted = size_of(spend) + choice.randrange(1, SPEND_BYTES)
    deadline = time.monotonic() + 120
    while driver.poll() is None and size_of(spend) < wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    if driver.poll() is None:
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
        return None
    output, _ = driver.communicate()
    return code_in(output)


def code_in(output: str) -> int:
    """Return the exit code that a driver of start_driver prints last."""
    return int(output.splitlines()[-1].split()[0]) if output else 1


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.jsonl"))


def check(
    endpoint: ScriptedEndpoint, config: JobConfig, num_kills: int, totals: Totals
) -> str | None:
    """Count what a finished job has left. Returns what is wrong, if something is."""
    spend = json.loads((Path(config.output.path) / "_summary.json").read_text())["spend"]
    paid = sum(endpoint.good.values())
    lost = paid - spend["answered"]
    twice = paid - len(endpoint.good)
    totals.kills += num_kills
    totals.jobs += 1
    totals.rows += ROWS
    totals.requests += len(endpoint.asked)
    totals.paid += paid
    totals.twice += twice
    totals.lost += lost
    found = ids_of(config)
    if found != sorted(f"q{i}" for i in range(ROWS)):
        return f"{len(found)} rows of {len(set(found))} ids, and {ROWS} were asked for"
    if not 0 <= lost <= num_kills * CONCURRENCY or twice > num_kills * CONCURRENCY:
        return f"{lost} answers are in no log and {twice} were paid twice, after {num_kills} kills"
    if abs(spend["dollars"] - DOLLARS * spend["answered"]) > 1e-6:
        return f"{spend['dollars']} dollars for {spend['answered']} answers of {DOLLARS}"
    return None


if __name__ == "__main__":
    sys.exit(main())
