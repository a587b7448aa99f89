"""Sections that measure an engine on a lent GPU, in the order in which a card's minutes are worth most.

    python3 -m jobs.bench.gpu.second_light --out DIR --call kernels              # 8 minutes; needs no model
    python3 -m jobs.bench.gpu.second_light --out DIR --call quantised            # 6 minutes; needs no model
    python3 -m jobs.bench.gpu.second_light --out DIR --call model --model SMOLLM2 --prompts FILE      # 6 minutes
    python3 -m jobs.bench.gpu.second_light --out DIR --sections prefix moe       # some by name
    python3 -m jobs.bench.gpu.second_light --write-model SMOLLM2 --gguf FILE     # SmolLM2's directory

    DIR/second_light.jsonl         a line for each finding, written at once
    DIR/second_light.md            the same as tables
    DIR/triton-cache.tar.gz        compiled kernels; a later call reuses them by --triton-cache

What each section measures stands in `sections/`. Each runs in a process of its own. One that fails
by Triton or CUDA is run again with EAGLE_RAY_KERNELS=portable. What does not fit into --minutes is
recorded as skipped.

A machine that is lent has torch, triton and transformers, but neither Ray nor pydantic. Sections of
jobs' engines need pydantic's wheels on PYTHONPATH (pydantic, pydantic_core, annotated_types,
typing_inspection), and --write-model gguf's. SmolLM2's GGUF file is larger than one transfer:
`jobs.bench.gpu.parts` carries it. `third_light` comes after the last call. The same code with tiny
shapes on a CPU: --smoke.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from jobs.bench.gpu.findings import ROOT, Findings, environment
from jobs.bench.gpu.isolated_runs import IsolatedRun, TimeBudget, run_all
from jobs.bench.gpu.sections.checks import kernel_test_runs, sanitizer_runs
from jobs.bench.gpu.sections.kernels import FINDINGS
from jobs.bench.gpu.sections.kernels import SECTIONS as KERNEL_SECTIONS
from jobs.bench.gpu.sections.quantised import SECTIONS as QUANTISED_SECTIONS
from jobs.bench.gpu.triton_cache import triton_cache

TEST_WORKERS = 8  # kernel tests at a time; their time is spent in imports and compilers


@dataclass(frozen=True, slots=True)
class Call:
    """What one call runs.

    Attributes:
        minutes: of the call, without imports and the packing of Triton's cache.
        sections: the most important first.
    """

    minutes: float
    sections: tuple[str, ...]


CALLS = {
    "kernels": Call(
        8.0, ("work-list", "sanitizer", "kernel-tests", "random-smollm2", "random-qwen3-8b")
    ),
    "quantised": Call(6.0, ("quantised", "moe", "attention", "products", "prefill", "prefix")),
    "model": Call(6.0, ("bar-none", "bar-suffix", "real", "bar-eagle2")),
    "more": Call(
        6.0, ("bar-auto", "sources", "steady", "single", "batches", "start", "bar-eagle2+suffix")
    ),
}
LIMITS_S = {
    "work-list": (10.0, 30.0),
    "random-smollm2": (50.0, 90.0),
    "random-qwen3-8b": (60.0, 120.0),
    "quantised": (60.0, 240.0),
    "moe": (40.0, 60.0),
    "attention": (40.0, 60.0),
    "products": (20.0, 40.0),
    "prefill": (30.0, 50.0),
    "prefix": (40.0, 60.0),
    "bar-none": (60.0, 120.0),
    "bar-suffix": (60.0, 100.0),
    "real": (60.0, 120.0),
    "bar-eagle2": (60.0, 120.0),
    "bar-auto": (60.0, 120.0),
    "sources": (60.0, 200.0),
    "steady": (60.0, 150.0),
    "single": (60.0, 120.0),
    "batches": (60.0, 180.0),
    "start": (40.0, 90.0),
    "bar-eagle2+suffix": (60.0, 120.0),
}  # seconds without which a section is skipped, and after which it is killed
ALL = tuple(name for call in CALLS.values() for name in call.sections)


def main() -> None:
    args = parse_arguments()
    if args.write_model is not None:
        write_model(args.gguf, args.write_model)
        return
    device = torch.device("cpu" if args.smoke else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("second_light: torch sees no CUDA device. Use --smoke for tiny shapes on a CPU.")
    call = CALLS[args.call]
    minutes = args.minutes or call.minutes
    budget = TimeBudget(60 * minutes)
    findings = Findings(args.out, FINDINGS)
    findings.begin(
        "second light",
        {"smoke": args.smoke, "minutes": minutes, **environment(device, args.commit)},
    )
    with triton_cache(args.out, args.triton_cache):
        for name in args.sections or call.sections:
            run_section(name, args, device, findings, budget)
    findings.add("end", seconds_left=round(budget.left_s, 1))


def run_section(
    name: str,
    args: argparse.Namespace,
    device: torch.device,
    findings: Findings,
    budget: TimeBudget,
) -> None:
    """Run a section: a process of its own, or one for each kernel test or memory check."""
    if name == "kernel-tests":
        run_all(
            kernel_test_runs(device, args.smoke),
            findings,
            budget,
            1 if args.smoke else TEST_WORKERS,
        )
    elif name == "sanitizer":
        run_all(sanitizer_runs(findings), findings, budget)
    else:
        run_all([section_run(name, args)], findings, budget)


def section_run(name: str, args: argparse.Namespace) -> IsolatedRun:
    """Return a section as a run of its own, which appends to the findings."""
    words = ["--out", str(args.out), *(["--smoke"] if args.smoke else [])]
    module = "engines"
    if name in KERNEL_SECTIONS:
        module = "kernels"
    elif name in QUANTISED_SECTIONS:
        module = "quantised"
    else:
        words += ["--model", str(args.model)] if args.model else []
        words += ["--prompts", str(args.prompts)] if args.prompts else []
    command = [sys.executable, "-m", f"jobs.bench.gpu.sections.{module}", name, *words]
    least_s, limit_s = (0.0, args.limit) if args.smoke else LIMITS_S[name]
    return IsolatedRun(name, command, min(limit_s, args.limit), least_s=least_s)


def write_model(gguf: Path, directory: Path) -> None:
    """Write SmolLM2's GGUF file as a directory that `model.target` can name."""
    directory.mkdir(parents=True)
    from eagle_ray.gguf.gguf_file import GGUFFile  # with gguf, which a lent machine lacks
    from eagle_ray.gguf.gguf_target import write_checkpoint

    write_checkpoint(GGUFFile.open(gguf), directory)


def _absolute(path: str) -> Path:
    return Path(path).resolve()


def parse_arguments() -> argparse.Namespace:
    calls = "; ".join(f"{name}: {' '.join(call.sections)}" for name, call in CALLS.items())
    epilog = f"Run it from {ROOT.name}'s root. {calls}."
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=epilog)
    parser.add_argument("--out", type=_absolute, help="directory of the findings")
    parser.add_argument(
        "--call", choices=CALLS, default="kernels", help="a group of sections and its minutes"
    )
    parser.add_argument("--sections", nargs="+", choices=ALL, help="by name, in place of a call's")
    parser.add_argument(
        "--model", type=_absolute, help="SmolLM2's directory; the embedded tiny pair without it"
    )
    parser.add_argument(
        "--prompts", type=_absolute, help="a JSONL file with turns, messages or prompt"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--minutes", type=float, help="of the call, in place of its own")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of a section at most")
    parser.add_argument(
        "--triton-cache", type=Path, help="archive of an earlier call, or its --out directory"
    )
    parser.add_argument("--commit", help="where no git says it")
    parser.add_argument(
        "--write-model", type=_absolute, metavar="DIR", help="write SmolLM2's directory and end"
    )
    parser.add_argument("--gguf", type=_absolute, help="of --write-model")
    args = parser.parse_args()
    if (args.write_model is None) == (args.out is None) or (args.write_model is None) != (
        args.gguf is None
    ):
        parser.error("give either --out, or --write-model and --gguf")
    return args


if __name__ == "__main__":
    main()
