"""The first scan of a large input, in the driver and in Ray tasks: python -m jobs.bench.parallel_scan ROWS

Makes ROWS toy rows as JSONL in --files files, and scans them with `plan_input` in turns, each time in a process of its
own: in the driver alone, and in the Ray tasks of a cluster whose head and --nodes further nodes have one core each.
Wall-clock seconds of the scan without Ray's start, CPU seconds and the largest memory of the driver's process, on
stdout; exits with 1 if the two did not find the same rows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from eagle_ray.batch.driver.input_plan import InputPlan, plan_input
from eagle_ray.batch.reader.parallel_scan import ParallelScan
from eagle_ray.config import load_config
from jobs.bench.starts import make_input, settings
from tests.system.chaos import MODEST, cluster

IN_DRIVER, IN_TASKS = "in the driver", "in Ray tasks"
MB = 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=int)
    parser.add_argument("--files", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scan", choices=[IN_DRIVER, IN_TASKS], help=argparse.SUPPRESS)
    parser.add_argument("--dir", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.scan:
        print(json.dumps(measured_scan(options.dir, options.scan, options.nodes)))
        return
    with tempfile.TemporaryDirectory(prefix="parallel-scan-") as temporary:
        sys.exit(measure_all(Path(temporary), options))


def measure_all(directory: Path, options: argparse.Namespace) -> int:
    """Print a row for each scan. Return the exit code."""
    for number, rows in enumerate(np.array_split(np.arange(options.rows), options.files)):
        make_input(directory / "in" / f"{number:06d}.jsonl", int(rows[0]), len(rows))
    print("| round | scan | s | us a row | CPU s of the driver | max MB |\n|---" + "|---" * 5 + "|")
    found = set()
    for number in range(options.rounds):
        for scan in (IN_DRIVER, IN_TASKS):
            command = ["-m", "jobs.bench.parallel_scan", str(options.rows), "--scan", scan, "--dir", str(directory)]
            command += ["--nodes", str(options.nodes)]
            output = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, check=True, text=True).stdout
            facts = json.loads(output.splitlines()[-1])
            found.add((facts["num_rows"], facts["digest"]))
            cells = [number + 1, scan, f"{facts['s']:.1f}", f"{1e6 * facts['s'] / options.rows:.2f}"]
            print(
                "| " + " | ".join(map(str, [*cells, f"{facts['cpu_s']:.1f}", f"{facts['mb']:.0f}"])) + " |", flush=True
            )
    print("both found the same rows" if len(found) == 1 else f"FOUND DIFFERENT ROWS: {found}")
    return 0 if len(found) == 1 else 1


def measured_scan(directory: Path, where: str, num_nodes: int) -> dict[str, float | int | str]:
    """Scan in this process or in a cluster's tasks."""
    config = load_config(None, env={}, overrides=settings(directory))
    if where == IN_DRIVER:
        return _timed(lambda: plan_input(config))
    with cluster(MODEST, num_nodes) as nodes:
        import ray  # its environment is set by now

        nodes.wait_for_nodes()
        with ray.init(nodes.address, log_to_driver=False):
            ray.get(ray.remote(lambda: None).remote())  # a worker process is there
            scan_with = lambda scanner: ParallelScan(scanner, lambda: None, min_bytes=0)  # noqa: E731
            return _timed(lambda: plan_input(config, scan_with=scan_with))


def _timed(plan_of) -> dict[str, float | int | str]:
    began, cpu = time.perf_counter(), time.process_time()
    plan: InputPlan = plan_of()
    facts = {"s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu, "num_rows": plan.num_rows}
    facts["mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MB
    digest = hashlib.blake2b(digest_size=16)
    for rows in plan.rows.by_range(16):
        for name in ("id", "place"):
            digest.update(np.ascontiguousarray(rows[name]).tobytes())
    return facts | {"digest": digest.hexdigest()}


if __name__ == "__main__":
    main()
