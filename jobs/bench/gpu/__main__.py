"""On a machine with a GPU, one call: PYTHONUNBUFFERED=1 python3 -m jobs.bench.gpu --out DIR

Checks the engine on a GPU, then measures it, the most important cells first, in --minutes: written for one H200 with
Python 3.12, torch 2.11, triton 3.6 and transformers 5.17. Nothing is installed and nothing fetched: of what is not part
of Python it imports torch, transformers (with tokenizers, safetensors, jinja2) and jaxtyping, and no room of ours that
needs pydantic or Ray. On a CPU and tiny shapes, the same code: python -m jobs.bench.gpu --smoke

    results.json     everything, rewritten after every cell: a run that is cut off keeps the finished cells
    results.md       tables, and at the end a section for jobs/results/gpu.md, also printed last
    results.html     plots

A *widened* pair is the embedded pair inside a Llama's shape (`jobs/bench/widening.py`): the tiny pair's acceptance at
the shape's real cost. Contexts are positions that each pass reads and no query attends to (`synthetic_context.py`). A
*synthetic* pair accepts with a stated probability (`jobs/bench/synthetic.py`).
EAGLE_RAY_KERNELS=portable does it all without our Triton kernels. A part alone: --only
checks bandwidth "8b: make" "8b: costs" "8b: batch 1,"
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch

from jobs.bench.gpu.embedded_pair import embedded_pair, embedded_prompts
from jobs.bench.gpu.findings import environment, replace_file
from jobs.bench.gpu.gpu_run import GpuRun
from jobs.bench.gpu.hf_baselines import tokens_per_second
from jobs.bench.gpu.report import markdown, page, section
from jobs.bench.gpu.settings import SHAPES, GpuBenchSettings, Results
from jobs.bench.widening import widen_pair

ACCEPTANCES = {"0.4": (0.4, 0.12, 0.05), "0.6": (0.6, 0.12, 0.05), "0.8": (0.8, 0.08, 0.03)}
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
PEER_TOKENS = 64


def main() -> None:
    args = parse_arguments()
    os.environ.setdefault("EAGLE_RAY_CACHE", tempfile.mkdtemp())  # costs of steps are measured in this run
    if args.threads:
        torch.set_num_threads(args.threads)
    settings = settings_of(args)
    if args.peer:
        print(json.dumps(peer(args, settings)), flush=True)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    run = GpuRun(settings, embedded_prompts(), lambda results: save(args.out, results))
    run.results.about = about(args, settings)
    print(json.dumps(run.results.about), flush=True)
    run.all()
    print("\n" + section(asdict(run.results)), flush=True)


def settings_of(args: argparse.Namespace) -> GpuBenchSettings:
    device = torch.device("cpu" if args.smoke else args.device)
    names = args.shapes or (["tiny", "tinier"] if args.smoke else ["8b", "1b", "3b"])
    batches = args.batches or ([1, 2, 4] if args.smoke else BATCHES)
    return GpuBenchSettings(
        shapes={name: SHAPES[name] for name in names},
        batches=batches,
        contexts=args.contexts or ([64, 128] if args.smoke else [1024, 4096, 16384]),
        others=[b for b in batches if b in (1, 4, 16, 64)],
        acceptances={"0.6": ACCEPTANCES["0.6"]} if args.smoke else ACCEPTANCES,
        rounds=args.rounds or (2 if args.smoke else 5),
        seconds=args.seconds or (0.1 if args.smoke else 0.3),
        minutes=args.minutes or 9.0,
        drain_rows=12 if args.smoke else 1000,
        drain_batch=min(4 if args.smoke else 64, max(batches)),
        dtype=torch.float32 if args.smoke else getattr(torch, args.dtype),
        device=device,
        peers=() if args.smoke and not args.peer else ("static", "continuous"),
        peer_s=90,
        num_checked=3 if args.smoke else 12,
        only=tuple(args.only),
    )


def peer(args: argparse.Namespace, settings: GpuBenchSettings) -> dict[str, object]:
    """One peer on one shape, in this process alone: see `gpu_run.run_peer`."""
    small, shape = embedded_pair(torch.float32, settings.device), SHAPES[args.peer_shape]
    model, _ = widen_pair(*small, shape, dtype=settings.dtype, device=settings.device)
    found = tokens_per_second(args.peer, model, embedded_prompts()[: args.peer_batch], PEER_TOKENS)
    return {"tokens_per_second": found, "tokens": PEER_TOKENS, "of": "prompts and all"}


def about(args: argparse.Namespace, settings: GpuBenchSettings) -> dict[str, object]:
    return {
        **environment(settings.device, args.commit),
        "dtype": str(settings.dtype).removeprefix("torch."),
        "rounds": settings.rounds,
        "window_s": settings.seconds,
        "smoke": args.smoke,
    }


def save(out: Path, results: Results) -> None:
    """Whole or not at all, so that a run may be cut off at any moment."""
    found = asdict(results)
    texts = {"results.json": json.dumps(found, indent=1, default=str) + "\n", "results.md": markdown(found)}
    for name, text in {**texts, "results.html": page(found)}.items():
        replace_file(out / name, text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs") / f"gpu-{time.strftime('%Y%m%d-%H%M%S')}")
    parser.add_argument("--minutes", type=float, help="of everything; what does not fit is skipped and named")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on this CPU, in under two minutes")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="the main one first")
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--contexts", type=int, nargs="+", help="columns, the main one first")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, help="of plain decoding in a window")
    parser.add_argument("--only", nargs="+", default=[], help="words of the titles that it prints")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--commit", help="where no git says it")
    parser.add_argument("--peer", choices=["static", "continuous"], help=argparse.SUPPRESS)
    parser.add_argument("--peer-shape", choices=SHAPES, default="8b", help=argparse.SUPPRESS)
    parser.add_argument("--peer-batch", type=int, default=1, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
