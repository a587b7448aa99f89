"""Run one job of many rows behind a scripted endpoint, and watch the memory of its driver and of its worker.

Their resident memory is read once a second. What is kept of each row must not grow with their number: the median of
the last tenth of the rows may be BYTES_PER_ROW a row above that of the fourth tenth: buffers are full by then. Exit
code 1 if it is more, or if a row is missing.

    python -m tests.system.endpoint_memory --rows 100000
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from eagle_ray.config import JobConfig, load_config
from tests.support.jobs import ids_of, start_driver
from tests.support.processes import descendants
from tests.support.scripted_endpoint import MODEL, PRICE, ScriptedEndpoint

BYTES_PER_ROW = 100  # a prompt and its answer here have more
WORKER = "EngineActor"  # in the title of the worker's process
Sample = tuple[
    int, int, int
]  # rows that the endpoint was asked for; bytes of the driver, and of the worker


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000)
    num_rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as directory, ScriptedEndpoint() as endpoint:
        config = job(endpoint, Path(directory), num_rows)
        began = time.monotonic()
        driver = start_driver(config)
        samples = list(samples_of(endpoint, psutil.Process(driver.pid)))
        output, errors = driver.communicate()
        if not output or not output.splitlines()[-1].startswith("0 "):
            print(errors, file=sys.stderr)
            return 1
        found = ids_of(config)
        seconds = time.monotonic() - began
        print(f"{len(found)} rows, {len(endpoint.asked)} requests, {seconds:.0f} s")
        is_whole = len(found) == len(set(found)) == num_rows
    return 0 if is_whole and is_flat(samples, num_rows) else 1


def job(endpoint: ScriptedEndpoint, directory: Path, num_rows: int) -> JobConfig:
    with (directory / "in.jsonl").open("w") as file:
        for i in range(num_rows):
            file.write(json.dumps({"id": f"q{i}", "prompt": f"Say the number {i}. " * 10}) + "\n")
    settings = {
        "input.path": str(directory / "in.jsonl"),
        "output.path": str(directory / "out"),
        "engine.kind": "http",
        "engine.base_url": endpoint.url,
        "engine.model": MODEL,
        "engine.price": PRICE,
        "engine.concurrency": 16,
    }
    return load_config(None, env={}, overrides=settings)


def samples_of(endpoint: ScriptedEndpoint, driver: psutil.Process) -> Iterator[Sample]:
    """Yield the memory of both processes once a second, while the driver runs and has a worker."""
    while driver.is_running() and driver.status() != psutil.STATUS_ZOMBIE:
        try:
            children = map(psutil.Process, descendants(driver.pid))
            workers = [one for one in children if WORKER in " ".join(one.cmdline())]
            if workers:
                yield len(endpoint.asked), memory_of(driver), sum(map(memory_of, workers))
        except psutil.NoSuchProcess:
            pass
        endpoint.good.clear()  # the endpoint's own memory
        time.sleep(1.0)


def memory_of(process: psutil.Process) -> int:
    return int(process.memory_info().rss)


def is_flat(samples: list[Sample], num_rows: int) -> bool:
    """Print how the memory of each process grew, and return whether it stayed in its bounds."""
    are_flat = True
    for place, name in ((1, "driver"), (2, "worker")):
        medians = [
            statistics.median(
                one[place] for one in samples if tenth == one[0] * 10 // (num_rows + 1)
            )
            for tenth in range(10)
        ]
        shown = ", ".join(f"{median / 1e6:.1f}" for median in medians)
        growth = (medians[9] - medians[3]) / (0.6 * num_rows)
        print(f"{name}: {shown} MB by tenths of the rows; {growth:.0f} bytes a row")
        are_flat = are_flat and growth <= BYTES_PER_ROW
    return are_flat


if __name__ == "__main__":
    sys.exit(main())
