"""A second script for a GPU that is lent for 15 minutes: a job's steady state, its memory and real tokens.

    python3 -m jobs.bench.gpu.second_light --out DIR --sections prefix attention fp8 prefill moe
    python3 -m jobs.bench.gpu.second_light --out DIR --model SMOLLM2 --prompts FILE          # all others
    python3 -m jobs.bench.gpu.second_light --write-model SMOLLM2 --gguf FILE                 # SmolLM2's directory

    DIR/second_light.jsonl         a line for each finding, written at once
    DIR/second_light.md            the same as tables
    DIR/triton-cache.tar.gz        compiled kernels; a later call reuses them by --triton-cache

What each section measures stands in `sections/engines.py` and `sections/kernels.py`, the most important first. Each
runs in a process of its own, and one that fails is run again with EAGLE_RAY_KERNELS=portable. What does not fit into
--minutes is recorded as skipped. A machine that is lent has torch, triton and transformers, but neither Ray nor
pydantic: sections of jobs' engines need pydantic's wheels on PYTHONPATH (pydantic, pydantic_core, annotated_types,
typing_inspection), and --write-model gguf's. SmolLM2's GGUF file is larger than one transfer: `jobs.bench.gpu.parts`
carries it. The same code with tiny shapes on a CPU: --smoke.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from jobs.bench.gpu.findings import ROOT, Findings, environment
from jobs.bench.gpu.isolated_runs import IsolatedRun, TimeBudget, run_all
from jobs.bench.gpu.sections.kernels import FINDINGS
from jobs.bench.gpu.sections.kernels import SECTIONS as KERNEL_SECTIONS
from jobs.bench.gpu.triton_cache import triton_cache

MINUTES = 4.0  # of a call, without imports and the packing of Triton's cache
LIMIT_S = {
    "bar-none": 100.0,
    "bar-auto": 120.0,
    "sources": 200.0,
    "host": 60.0,
    "bar-eagle2": 120.0,
    "bar-suffix": 100.0,
    "steady": 150.0,
    "prefix": 60.0,
    "single": 120.0,
    "batches": 120.0,
    "bar-qwen3-8b": 80.0,
    "bar-eagle2+suffix": 120.0,
    "attention": 60.0,
    "fp8": 40.0,
    "prefill": 50.0,
    "moe": 60.0,
    "start": 90.0,
    "real": 120.0,
}  # seconds after which a section is killed, the most important ones first
LEAST_S = 15.0  # a section is skipped if less time is left


def main() -> None:
    args = parse_arguments()
    if args.write_model is not None:
        write_model(args.gguf, args.write_model)
        return
    device = torch.device("cpu" if args.smoke else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("second_light: torch sees no CUDA device. Use --smoke for tiny shapes on a CPU.")
    budget = TimeBudget(60 * args.minutes)
    findings = Findings(args.out, FINDINGS)
    about = {"smoke": args.smoke, "minutes": args.minutes, **environment(device, args.commit)}
    findings.begin("second light", about)
    with triton_cache(args.out, args.triton_cache):
        run_all([section_run(name, args) for name in args.sections], findings, budget)
    findings.add("end", seconds_left=round(budget.left_s, 1))


def section_run(name: str, args: argparse.Namespace) -> IsolatedRun:
    """Return a section as a run of its own, which appends to the findings."""
    of_kernels = name in KERNEL_SECTIONS
    module = "sections.kernels" if of_kernels else "sections.engines"
    words = ["--out", str(args.out), *(["--smoke"] if args.smoke else [])]
    words += ["--model", str(args.model)] if args.model and not of_kernels else []
    words += ["--prompts", str(args.prompts)] if args.prompts and not of_kernels else []
    command = [sys.executable, "-m", f"jobs.bench.gpu.{module}", name, *words]
    return IsolatedRun(name, command, min(LIMIT_S[name], args.limit), least_s=0.0 if args.smoke else LEAST_S)


def write_model(gguf: Path, directory: Path) -> None:
    """Write SmolLM2's GGUF file as a directory that `model.target` can name."""
    directory.mkdir(parents=True)
    from eagle_ray.gguf.llama_checkpoint import GGUFFile, write_checkpoint  # with gguf, which a lent machine lacks

    write_checkpoint(GGUFFile.open(gguf), directory)


def _absolute(path: str) -> Path:
    return Path(path).resolve()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=f"Run it from {ROOT.name}'s root.")
    parser.add_argument("--out", type=_absolute, help="directory of the findings")
    parser.add_argument("--sections", nargs="+", choices=LIMIT_S, default=list(LIMIT_S), help="all by default")
    parser.add_argument("--model", type=_absolute, help="SmolLM2's directory; the embedded tiny pair without it")
    parser.add_argument("--prompts", type=_absolute, help="a JSONL file with turns, messages or prompt")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"of the call; {MINUTES} by default")
    parser.add_argument("--limit", type=float, default=max(LIMIT_S.values()), help="seconds of a section at most")
    parser.add_argument("--triton-cache", type=Path, help="archive of an earlier call, or its --out directory")
    parser.add_argument("--commit", help="where no git says it")
    parser.add_argument("--write-model", type=_absolute, metavar="DIR", help="write SmolLM2's directory and end")
    parser.add_argument("--gguf", type=_absolute, help="of --write-model")
    args = parser.parse_args()
    if (args.write_model is None) == (args.out is None) or (args.write_model is None) != (args.gguf is None):
        parser.error("give either --out, or --write-model and --gguf")
    return args


if __name__ == "__main__":
    main()
