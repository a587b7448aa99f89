"""Checks of one device before anything is timed on it: that every path of the engine there decodes the same tokens.

    for check in checks(load, prompts, [torch.float32, torch.bfloat16]):
        print(check.line)

    check = run_check("graphs", load, prompts, torch.bfloat16)        # one of NAMES

The embedded pair at its own size: in fp32, where outputs are equal but for near-ties, and in half precision, where what
paths differ by is measured too: the noise that later decides what a near-tie is.

One check in a process of its own: python -m jobs.bench.gpu.device_checks graphs bfloat16. It prints the check's line;
its exit status is 0 for ok, 1 for failed and 77 for a check that this device cannot run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.engine import Engine
from eagle_ray.evaluation.method_comparison import Equivalence, compare, first_difference
from eagle_ray.kernels.availability import CHOICE, use_triton
from eagle_ray.planner.planner import UniformPlanner
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.sampling.near_tie import NEAR_TIE, rounding_cause
from eagle_ray.sampling.sampler import sample
from jobs.bench.gpu.device import release
from jobs.bench.gpu.embedded_pair import embedded_pair, embedded_prompts
from jobs.bench.gpu.harness import LARGEST, Harness, Way
from jobs.bench.gpu.isolated_runs import NOT_ASKED
from jobs.bench.gpu.synthetic_context import in_context

NAMES = ("lossless", "kernels", "edges", "graphs")
SLOTS, LONGEST, TOKENS = 8, 640, 48
EDGE_LOGITS = 256, 128256  # rows and a vocabulary
LEAST_TIE = 1e-3  # of a pair whose sums have many more terms
TREE = Way("tree", LARGEST)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=TOKENS, logprobs=True)
GREEDY = SamplingParams(max_tokens=TOKENS, logprobs=True)
EXIT_STATUS = {True: 0, False: 1, None: NOT_ASKED}
Load = Callable[[torch.dtype], tuple[nn.Module, nn.Module]]


@dataclass(frozen=True, slots=True)
class Check:
    """ok: None where it could not be asked here. noise: what the two paths' log-probabilities differ by at most."""

    name: str
    ok: bool | None
    detail: str
    noise: float | None = None

    @property
    def line(self) -> str:
        said = {True: "ok", False: "FAILED", None: "not asked"}[self.ok]
        return f"check {self.name}: {said}, {self.detail}"


@dataclass(frozen=True, slots=True)
class Outputs:
    """ids and the log-probabilities of each, by prompt."""

    ids: list[list[int]]
    logprobs: list[list[float]]

    def noise(self, other: Outputs) -> float:
        """The largest difference between log-probabilities, as far as the ids agree."""
        most = 0.0
        for i, (a, b) in enumerate(zip(self.ids, other.ids, strict=True)):
            place = first_difference(a, b)
            pairs = list(zip(self.logprobs[i], other.logprobs[i], strict=False))[:place]
            most = max([most, *(abs(x - y) for x, y in pairs)])
        return most


def checks(load: Load, prompts: list[list[int]], dtypes: list[torch.dtype]) -> Iterator[Check]:
    """load: the pair in a dtype, on the device. A check that raises is a failed one."""
    for name in NAMES:
        for dtype in dtypes:
            yield run_check(name, load, prompts, dtype)


def run_check(name: str, load: Load, prompts: list[list[int]], dtype: torch.dtype) -> Check:
    """Run one check of NAMES. A check that raises is a failed one."""
    functions = {"lossless": _lossless, "kernels": _kernels, "edges": check_edges, "graphs": _graphs}
    title = f"{name} {type_name(dtype)}"
    try:
        return functions[name](title, load, dtype, prompts)
    except Exception as error:
        return Check(title, False, f"{type(error).__name__}: {error}"[:500])


def _lossless(title: str, load: Load, dtype: torch.dtype, prompts: list[list[int]]) -> Check:
    """Compare trees of 60 nodes with plain decoding, half of the prompts sampled."""
    model, head = load(dtype)
    rig = Harness.of(model, head, SLOTS, LONGEST)
    params = _params(prompts)
    plain, trees = (generate(engine, prompts, params) for engine in (rig.plain, _drafting(rig)))
    return _compared(title, model, dtype, prompts, params, trees, plain)


def _kernels(title: str, load: Load, dtype: torch.dtype, prompts: list[list[int]]) -> Check:
    """Compare trees of the portable path with those of the kernels, if there are any."""
    model, head = load(dtype)
    if not use_triton(model.device):
        return Check(title, None, "no kernels of ours run on this device")
    both, params = [], _params(prompts)
    for choice in ("triton", "portable"):
        with kernels(choice):
            rig = Harness.of(model, head, SLOTS, LONGEST)
            both.append(generate(_drafting(rig), prompts, params))
    return _compared(title, model, dtype, prompts, params, *both)


def check_edges(title: str, load: Load, dtype: torch.dtype, prompts: list[list[int]]) -> Check:
    """Picks under top-p by either path, from random logits: how many differ, all of them for want of exact sums."""
    device = load(dtype)[0].device
    if not use_triton(device):
        return Check(title, None, "no kernels of ours run on this device")
    logits = (2 * torch.randn(*EDGE_LOGITS, generator=torch.Generator(device).manual_seed(0), device=device)).to(dtype)
    params = [SamplingParams(temperature=1.0, top_p=(i + 0.5) / len(logits), seed=i) for i in range(len(logits))]
    sampling, rows, both = SamplingBatch.of(params, device), torch.arange(len(logits), device=device), []
    for choice in ("triton", "portable"):
        with kernels(choice):
            both.append(sample(logits, sampling, rows, rows).tolist())
    found = Equivalence()
    for i, (mine, other) in enumerate(zip(*both, strict=True)):
        cause = None
        if mine != other:
            cause = rounding_cause(logits[i], params[i], i, other, mine, NEAR_TIE[torch.float32])
        found += Equivalence(1, mine == other, cause == "tie", cause == "cut")
    return Check(title, found.is_explained, f"{_told(found)}, picks of random logits")


def _graphs(title: str, load: Load, dtype: torch.dtype, prompts: list[list[int]]) -> Check:
    """Compare replayed steps with eager ones."""
    model, head = load(dtype)
    both, params = [], _params(prompts)
    for graphs in (True, False):
        rig = Harness.of(model, head, SLOTS, LONGEST, graphs=graphs)
        if graphs and rig.drafting.graphs is None:
            return Check(title, None, "this engine has no graphs")
        both.append(generate(_drafting(rig), prompts, params))
    return _compared(title, model, dtype, prompts, params, *both)


def _compared(
    title: str,
    model: nn.Module,
    dtype: torch.dtype,
    prompts: list[list[int]],
    params: list[SamplingParams],
    outputs: Outputs,
    wanted: Outputs,
) -> Check:
    """In fp32 all but near-ties are equal; in bf16 a difference is only counted."""
    noise, tie = outputs.noise(wanted), NEAR_TIE[torch.float32]
    if dtype != torch.float32:
        tie = max(tie, 2 * noise)
    found = compare(model, prompts, outputs.ids, wanted.ids, params, tie)
    release(model.device)
    return Check(title, found.is_explained, f"{_told(found)}, log-probabilities within {noise:.2g}", noise)


def _told(found: Equivalence) -> str:
    edges = f", {found.num_edges} at the edge of top-k, top-p or min-p" if found.num_edges else ""
    return f"{found.num_equal} of {found.num_compared} outputs equal, {found.num_near_ties} near-ties{edges}"


def same_function(
    title: str, small: tuple[nn.Module, nn.Module], wide: Harness, prompts: list[list[int]], noise: float
) -> Check:
    """Compare a widened pair with the small one in fp32, both in plain decoding. noise: of the widened pair's dtype."""
    prompts, params = prompts[:SLOTS], [SamplingParams(max_tokens=TOKENS)] * SLOTS
    wanted = generate(Harness.of(*small, SLOTS, LONGEST).plain, prompts, params)
    tie = max(noise, LEAST_TIE)
    found = compare(small[0], prompts, generate(wide.plain, prompts, params).ids, wanted.ids, near_tie=tie)
    return Check(title, found.is_explained, f"{_told(found)} (a lead under {tie:.2g})")


def same_in_context(title: str, wide: Harness, prompts: list[list[int]], context: int, noise: float) -> Check:
    """Compare trees behind a context with attention weight 0, one prompt at a time, with plain decoding without it."""
    prompts = prompts[: min(4, wide.blocks.num_slots)]
    params, ids = [SamplingParams(max_tokens=TOKENS)] * len(prompts), []
    wanted = generate(wide.engine(Way("plain"), 0, len(prompts)), prompts, params)
    for prompt in prompts:
        ids += generate(wide.engine(TREE, context, 1), [in_context(prompt, context)], params[:1]).ids
    found = compare(wide.model, prompts, ids, wanted.ids, near_tie=noise)
    return Check(title, found.is_explained, _told(found))


def generate(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> Outputs:
    sequences = [Sequence(str(i), ids, p) for i, (ids, p) in enumerate(zip(prompts, params, strict=True))]
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    return Outputs([s.output_ids for s in sequences], [s.output_logprobs for s in sequences])


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def kernels(choice: str) -> Iterator[None]:
    """What is built within takes Triton's kernels or the portable path."""
    before = os.environ.get(CHOICE)
    os.environ[CHOICE] = choice
    try:
        yield
    finally:
        os.environ.pop(CHOICE) if before is None else os.environ.update({CHOICE: before})


def _drafting(rig: Harness) -> Engine:
    rig.drafting.planner = UniformPlanner(TREE.tree)
    return rig.drafting


def _params(prompts: list[list[int]]) -> list[SamplingParams]:
    return [SAMPLED if i % 2 else GREEDY for i in range(len(prompts))]


def main() -> None:
    """Run one check, print its line and exit with its status."""
    parser = argparse.ArgumentParser(description="One check of the device.")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--prompts", type=int, default=12)
    args = parser.parse_args()
    load = partial(embedded_pair, device=torch.device(args.device))
    check = run_check(args.name, load, embedded_prompts()[: args.prompts], getattr(torch, args.dtype))
    print(check.line, flush=True)
    sys.exit(EXIT_STATUS[check.ok])


if __name__ == "__main__":
    main()
