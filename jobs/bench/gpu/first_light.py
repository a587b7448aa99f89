"""What to do with a GPU that is lent for 15 minutes: three calls, each under five minutes and complete in itself.

    python3 -m jobs.bench.gpu.first_light checks --out DIR       # kernels, engine and CUDA graphs: do they work?
    python3 -m jobs.bench.gpu.first_light decode --out DIR       # captures, kernels, prefill, layers of a random 8B
    python3 -m jobs.bench.gpu.first_light benchmark --out DIR    # speeds of an 8B pair, most important cells first

    DIR/checks.jsonl, decode.jsonl, benchmark.jsonl    one line for each finding, written at once
    DIR/checks.md, ...                                 the same as tables
    DIR/triton-cache.tar.gz                            compiled kernels; a later call reuses them by --triton-cache
    DIR/results.json, .md, .html                       of the benchmark

Each check and measurement runs in a process of its own. If it fails, it is run again with EAGLE_RAY_KERNELS=portable.
What does not fit into --minutes is recorded as skipped. It imports torch, triton and transformers but neither Ray nor
pydantic, and it downloads nothing. The same code with tiny shapes on a CPU: --smoke.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from jobs.bench.gpu.check_list import check_runs
from jobs.bench.gpu.decode_findings import FINDINGS as DECODE
from jobs.bench.gpu.decode_findings import measurement_runs
from jobs.bench.gpu.findings import ROOT, Findings, environment
from jobs.bench.gpu.isolated_runs import DEFAULT, PORTABLE, IsolatedRun, TimeBudget, record_run, run_all
from jobs.bench.gpu.triton_cache import triton_cache

MINUTES = 4.5  # of a call, the imports and the packing of Triton's cache excluded
WORKERS = max((os.cpu_count() or 2) // 2, 1)  # checks at a time; their time is spent in imports and compilers
RESERVE_S = 30.0  # between the benchmark's own limit and its being killed
LEAST_BENCHMARK_S = 45.0
RESULTS = "results.json"


def main() -> None:
    args = parse_arguments()
    device = torch.device("cpu" if args.smoke else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("first_light: torch sees no CUDA device. Use --smoke for tiny shapes on a CPU.")
    budget = TimeBudget(60 * args.minutes)
    findings = Findings(args.out, DECODE if args.call == "decode" else args.call)
    about = {"smoke": args.smoke, "minutes": args.minutes, **environment(device, args.commit)}
    findings.begin(f"first light: {args.call}", about)
    with triton_cache(args.out, args.triton_cache):
        CALLS[args.call](args, device, findings, budget)
    findings.add("end", seconds_left=round(budget.left_s, 1))


def run_checks(args: argparse.Namespace, device: torch.device, findings: Findings, budget: TimeBudget) -> None:
    """Run the kernel tests, the device checks and the memory checks."""
    run_all(check_runs(device, args.smoke, findings), findings, budget, 1 if args.smoke else WORKERS)


def run_decode(args: argparse.Namespace, device: torch.device, findings: Findings, budget: TimeBudget) -> None:
    """Run the measurements one after another, so that none disturbs another one's times."""
    run_all(measurement_runs(args.out, args.smoke), findings, budget)


def run_benchmark(args: argparse.Namespace, device: torch.device, findings: Findings, budget: TimeBudget) -> None:
    """Run the benchmark of one shape, once more on the portable path if it measured no drafts."""
    path = args.out / RESULTS
    path.unlink(missing_ok=True)  # of an earlier call in this directory
    for kernels in (DEFAULT, PORTABLE):
        record_run(_benchmark(args, budget), findings, budget, kernels)
        results = json.loads(path.read_text()) if path.exists() else {}
        _add_results(findings, results, kernels)
        if any(cell["way"] == "ours" for cell in results.get("cells", [])):
            return
        if kernels == DEFAULT and path.exists():
            path.replace(path.with_stem("results-default"))


def _add_results(findings: Findings, results: dict[str, Any], kernels: str) -> None:
    """Add what the benchmark found; it writes its file whole after every cell."""
    for cell in results.get("cells", []):
        findings.add("cell", path=kernels, **_cell(cell))
    for kind in ("failed", "skipped"):
        for line in results.get(kind, []):
            findings.add(kind, path=kernels, what=line)


def _benchmark(args: argparse.Namespace, budget: TimeBudget) -> IsolatedRun:
    """Return the benchmark in the time that is left."""
    minutes = max(budget.left_s - RESERVE_S, 0.5 * budget.left_s) / 60
    words = ["--out", str(args.out), "--minutes", f"{minutes:.2f}"]
    words += ["--smoke", "--shapes", "tiny"] if args.smoke else ["--shapes", "8b"]
    words += ["--commit", args.commit] if args.commit else []
    command = [sys.executable, "-m", "jobs.bench.gpu", *words]
    return IsolatedRun("benchmark", command, limit_s=budget.left_s, least_s=LEAST_BENCHMARK_S)


def _cell(cell: dict[str, Any]) -> dict[str, Any]:
    """Return a cell's most important figures; all others are in results.json."""
    kept = ("shape", "batch", "context", "way", "tree", "tokens_per_second", "tau", "step_ms", "roofline")
    ratio = cell["over_plain"]
    figures = {key: cell[key] for key in kept if key in cell}
    return figures | {"over_plain": ratio["mean"], "low": ratio["low"], "high": ratio["high"]}


CALLS = {"checks": run_checks, "decode": run_decode, "benchmark": run_benchmark}


def _absolute(path: str) -> Path:
    return Path(path).resolve()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=f"Run it from {ROOT.name}'s root.")
    parser.add_argument("call", choices=CALLS)
    parser.add_argument("--out", type=_absolute, required=True, help="directory of the findings")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"of the call; {MINUTES} by default")
    parser.add_argument("--triton-cache", type=Path, help="archive of an earlier call, or its --out directory")
    parser.add_argument("--commit", help="where no git says it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
