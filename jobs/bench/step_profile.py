"""Show where a decoding step's time goes, by part: python jobs/bench/step_profile.py --batches 1 8 32

The embedded pair, widened to 230M parameters, runs with its default settings on real prompts. Every
part below is a function of the engine that is timed by itself: what it calls, if that is a part
too, is not counted twice. The last lines of each table sum up linear layers, attention and all the
rest. Timing the calls itself takes about 0.3 ms a step.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from eagle_ray.assembly.assemble import build_engine
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.hub import download
from eagle_ray.config import SpeculativeConfig
from eagle_ray.core.sequence import Sequence
from eagle_ray.engine import engine as engine_module
from eagle_ray.engine import verify
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.scheduler import Scheduler
from eagle_ray.kernels import cpu_ops, layer_ops
from eagle_ray.methods.calibration import ProposalRecorder
from eagle_ray.methods.candidate_ranker import CandidateRanker
from eagle_ray.methods.eagle.checkpoint import load_head
from eagle_ray.methods.eagle.drafter import EagleDrafter
from eagle_ray.models import decoder
from eagle_ray.models.loader import load_causal_lm
from eagle_ray.models.packed_linear import PackedLinear, pack_linears
from eagle_ray.models.target import TargetModel
from eagle_ray.planner.budget_planner import BudgetPlanner
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.text.tokenizer import Tokenizer
from eagle_ray.tree.draft_tree import DraftTree
from eagle_ray.tree.expand import TreeBuilder
from jobs.bench.prompts import shuffled_prompts
from jobs.bench.widening import BENCH, widen_pair

Part = tuple[
    str, str, Any, str
]  # group, name, and where the function is: an object and its attribute
LINEAR, ATTENTION, TARGET, DRAFT = "linear", "attention", "target pass", "draft"
TREE, PLAN, HOST = "tree and sampling", "planner", "bookkeeping"
PARTS: list[Part] = [
    (LINEAR, "linear layers, packed", PackedLinear, "forward"),
    (LINEAR, "linear layers, others", nn.Linear, "forward"),
    (ATTENTION, "attention", cpu_ops, "attend"),
    (TARGET, "rotary and KV write", cpu_ops, "rotate_and_write"),
    (TARGET, "norms", cpu_ops, "add_rms_norm"),
    (TARGET, "SiLU x up", cpu_ops, "silu_mul"),
    (TARGET, "norms (torch)", layer_ops, "add_rms_norm"),
    (TARGET, "SiLU x up (torch)", layer_ops, "silu_mul"),
    (TARGET, "rotary angles", decoder.Angles, "__call__"),
    (TARGET, "layout", TargetModel, "_tree_layout"),
    (TARGET, "rest of the target's pass", TargetModel, "_run"),
    (DRAFT, "catch up", EagleDrafter, "_catch_up"),
    (DRAFT, "levels", EagleDrafter, "_level"),
    (DRAFT, "head, besides its parts", EagleDrafter, "_run"),
    (DRAFT, "layouts", EagleDrafter, "_layout"),
    (DRAFT, "calibration", ProposalRecorder, "add"),
    (DRAFT, "ranking", CandidateRanker, "_best"),
    (DRAFT, "children", CandidateRanker, "children"),
    (DRAFT, "learning from the samples", EagleDrafter, "on_verified"),
    (DRAFT, "pairs of the accepted path", EagleDrafter, "extend"),
    (DRAFT, "rest of the draft", EagleDrafter, "draft"),
    (TREE, "grow", TreeBuilder, "grow"),
    (TREE, "frontier", TreeBuilder, "_best_frontier"),
    (TREE, "build", TreeBuilder, "build"),
    (TREE, "rerank", DraftTree, "rerank"),
    (TREE, "pack", DraftTree, "pack"),
    (TREE, "ancestors", DraftTree, "ancestors"),
    (TREE, "sampling", verify, "sample"),
    (TREE, "acceptance walk", verify, "accept_path"),
    (TREE, "KV commit", TargetModel, "commit"),
    (TREE, "record", verify, "step_record"),
    (TREE, "rest of verify", engine_module.Verifier, "run"),
    (PLAN, "plan", BudgetPlanner, "plan"),
    (PLAN, "allocate", BudgetPlanner, "allocate"),
    (PLAN, "learn", BudgetPlanner, "observe"),
    (HOST, "scheduler: batch", Scheduler, "batch"),
    (HOST, "scheduler: room", Scheduler, "reserve_or_preempt"),
    (HOST, "scheduler: chunks", Scheduler, "chunks"),
    (HOST, "scheduler: retire", Scheduler, "retire"),
    (HOST, "copy to the host", engine_module.DeviceToHost, "arrays"),
    (HOST, "results to sequences", Engine, "_commit"),
    (HOST, "rest of the step", Engine, "step"),
]


class SelfTimes:
    """Seconds and calls of each part, without those of the parts that it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._inner: list[float] = []

    def reset(self) -> None:
        self.seconds.clear()
        self.calls.clear()

    def timed(self, name: str, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            self._inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                taken = time.perf_counter() - started
                self.seconds[name] += taken - self._inner.pop()
                self.calls[name] += 1
                if self._inner:
                    self._inner[-1] += taken

        return call


@contextmanager
def timed_parts() -> Iterator[SelfTimes]:
    """Time every part while the context is open."""
    times, originals = (
        SelfTimes(),
        [getattr(holder, attribute) for _, _, holder, attribute in PARTS],
    )
    for (group, name, holder, attribute), original in zip(PARTS, originals, strict=True):
        setattr(holder, attribute, times.timed(f"{group}: {name}", original))
    try:
        yield times
    finally:
        for (_, _, holder, attribute), original in zip(PARTS, originals, strict=True):
            setattr(holder, attribute, original)


def load_wide_pair(dtype: torch.dtype) -> tuple[nn.Module, nn.Module, list[list[int]]]:
    """Return the widened pair, packed as the product packs it, and prompts."""
    path = download("embedded:tiny", "target")
    small = load_causal_lm(path, torch.float32, "cpu")
    head = load_head(download("embedded:tiny", "draft"), small.config)
    target, head = (model.to(dtype) for model in widen_pair(small, head, BENCH))
    pack_linears(target)
    pack_linears(head)
    return target, head, shuffled_prompts(Tokenizer.load(path), 16, 7)


def answer(engine: Engine, prompts: list[list[int]], first: int, max_tokens: int) -> int:
    """Answer the prompts greedily and return the number of steps."""
    before = engine.counters.num_steps
    for i, prompt in enumerate(prompts):
        engine.add(
            Sequence(
                f"{first + i}",
                prompt,
                SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens),
            )
        )
    while engine.has_work:
        engine.step()
    return engine.counters.num_steps - before


def table(times: SelfTimes, seconds: float, num_steps: int) -> list[str]:
    """Return the lines of the parts, the slowest first, and of the three sums."""
    lines = ["| part | ms a step | share | calls a step |", "|---|---|---|---|"]

    def line(name: str, taken: float, calls: str) -> str:
        return f"| {name} | {taken / num_steps * 1e3:.2f} | {taken / seconds:.1%} | {calls} |"

    for name, taken in sorted(times.seconds.items(), key=lambda item: -item[1]):
        lines.append(line(name, taken, f"{times.calls[name] / num_steps:.1f}"))
    sums = {
        group: sum(s for n, s in times.seconds.items() if n.startswith(group))
        for group in (LINEAR, ATTENTION)
    }
    sums["everything else"] = seconds - sum(sums.values())
    return lines + [line(f"**{name}**", taken, "") for name, taken in sums.items()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target, head, prompts = load_wide_pair(getattr(torch, args.dtype))

    for batch in args.batches:
        with tempfile.TemporaryDirectory() as costs:
            os.environ["EAGLE_RAY_CACHE"] = costs  # costs of this machine, now
            engine = build_engine(
                target, head, SpeculativeConfig(), EngineArgs(batch, 512, kv_tokens=None)
            )
        answer(engine, prompts[: 2 * batch], 0, args.max_tokens)
        with timed_parts() as times:
            started = time.perf_counter()
            num_steps = answer(engine, (prompts * 2)[-3 * batch :], 10_000, args.max_tokens)
            seconds = time.perf_counter() - started
        print(
            f"\nbatch {batch}, {args.dtype}, {num_steps} steps of {seconds / num_steps * 1e3:.1f} ms\n"
        )
        print("\n".join(table(times, seconds, num_steps)), flush=True)


if __name__ == "__main__":
    main()
