"""Compare ways to decode on one machine: python -m jobs.bench.engine --threads 2

The embedded pair is widened to 230M parameters (jobs/bench/widening.py): real acceptance, though a toy's, at a
real model's proportions of cost. Every way is a planner, over the same weights; ways take turns, in another order and
on another of the engines each round, on the same texts. Ratios are of all rounds' tokens a second, intervals by
bootstrap over rounds, or with --engines over the engines made. "best" is the best fixed tree with our ranking of nodes,
"published" with EAGLE-2's own; they differ where rows are sampled.

    steady   the decode steps of a queue that is always full, over as many tokens as plain decodes in --seconds; "all"
             counts the prompts too, whose number in a window is a matter of luck, over all rounds together
    drain    1.5 rows a slot of mixed prompts and lengths, to the last one's end, prompts and all; not the first job

A table on stdout, everything in --out. In full about an hour on two quiet cores; for two minutes:
--batches 1 8 --ways plain eagle2 ours --rounds 5
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from eagle_ray.assembly.assemble import build_engine
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.hub import download
from eagle_ray.config import SpeculativeConfig
from eagle_ray.core.sequence import Sequence
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.engine.engine import Engine
from eagle_ray.evaluation.method_comparison import Equivalence, compare
from eagle_ray.evaluation.timing import ForwardTimer, Sample, SteadyQueue, run_requests
from eagle_ray.methods.eagle.checkpoint import load_head
from eagle_ray.methods.eagle.heads import EagleHead
from eagle_ray.models.loader import load_causal_lm
from eagle_ray.models.packed_linear import linear_layers, pack_linears
from eagle_ray.planner.planner import Planner, UniformPlanner
from eagle_ray.report.intervals import Counted, pooled_ratio
from eagle_ray.text.tokenizer import Tokenizer
from jobs.bench.prompts import shuffled_prompts
from jobs.bench.widening import BENCH, widen_pair
from jobs.bench.workload import DRAIN_LENGTHS, DRAIN_ROWS, requests


@torch.no_grad()
def damaged_head(head: EagleHead, noise: float, seed: int = 0) -> EagleHead:
    """A copy with Gaussian noise on every matrix; noise: its size relative to the matrix's root mean square."""
    generator = torch.Generator().manual_seed(seed)
    damaged = copy.deepcopy(head)
    for parameter in damaged.parameters():
        if parameter.ndim == 2:
            size = noise * parameter.square().mean().sqrt()
            parameter += size * torch.randn(parameter.shape, generator=generator).to(parameter)
    return damaged


def random_head(head: EagleHead, seed: int = 0) -> EagleHead:
    """A head of the same shape that was never trained."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        bias, own = head.fc.bias is not None, head.embed_tokens is not None
        fresh = EagleHead(copy.deepcopy(head.config), bias=bias, own_embedding=own)
    return fresh.to(head.fc.weight).requires_grad_(False)


MAX_MODEL_LEN = 512
MOST_TIMES_PLAIN = 3  # a window that takes this many times what plain decoding took is cut there
LEAD_INS = {"steady": 8, "drain": 1}  # rounds that do not count: planners look around at first
LEAST_TOKENS = 4  # of a window: several are committed at a step
TUNING_ROUNDS, TUNING_S = 4, 0.5  # windows of each tree
MOST_TUNED_ROWS = {"cpu": 256, "cuda": 1024}  # of a pass: larger ones have no chance and take minutes to lose
PER_CATEGORY = 32  # prompts to measure on, and as many to tune on
BAD_NOISE = 0.25  # of the trained weights: tau 1.4 with 8 nodes a tree, 3.7 undamaged; never trained 1.0
LARGEST = TreeBounds(60, 6, 10)
TREES = {
    "1/1/1": TreeBounds(1, 1, 1),
    "2/2/1": TreeBounds(2, 2, 1),
    "3/3/1": TreeBounds(3, 3, 1),
    "4/2/2": TreeBounds(4, 2, 2),
    "4/4/1": TreeBounds(4, 4, 1),
    "6/3/2": TreeBounds(6, 3, 2),
    "8/4/4": TreeBounds(8, 4, 4),
    "12/4/4": TreeBounds(12, 4, 4),
    "24/5/6": TreeBounds(24, 5, 6),
    "59/6/10": TreeBounds(59, 6, 10),
}
HEADS: dict[str, Callable[[EagleHead], EagleHead]] = {
    "good": lambda head: head,
    "bad": lambda head: damaged_head(head, BAD_NOISE),
    "random": random_head,
}
COLUMNS = ("head", "mode", "batch", "way", "tokens/s", "over plain", "95 %", "at least", "over published", "over best")
COLUMNS += ("all", "tau", "predicted", "rows/pass", "off", "probes", "outside", "same")
Count = Callable[[Sample], Counted]  # tokens and seconds
WAYS = ("plain", "chain", "eagle2", "published", "best", "adaptive", "ours")
FIXED = ("published", "best")  # among them: the best fixed tree, ranked as EAGLE-2 does and as we do
Measured = tuple[dict[str, list[Sample]], dict[str, Equivalence]]  # of each way: by rounds, and over all of them


@dataclass(frozen=True, slots=True)
class Models:
    """The pair whose weights every engine shares. prompts: to measure on; tuning: others."""

    causal_lm: nn.Module
    head: EagleHead
    meter: ForwardTimer
    prompts: list[list[int]]
    tuning: list[list[int]]

    @classmethod
    def load(cls, args: argparse.Namespace, head_name: str) -> Models:
        path, dtype = download("embedded:tiny", "target"), getattr(torch, args.dtype)
        causal_lm = load_causal_lm(path, torch.float32, args.device)
        head = load_head(download("embedded:tiny", "draft"), causal_lm.config)
        head = HEADS[head_name](head).to(args.device)
        if args.pair == "wide":
            causal_lm, head = widen_pair(causal_lm, head, BENCH, dtype=dtype, device=args.device)
        causal_lm, head = causal_lm.to(dtype), head.to(dtype).eval()
        pack_linears(causal_lm)
        pack_linears(head)
        meter = ForwardTimer(*linear_layers(causal_lm), *linear_layers(head))
        text = Tokenizer.load(path)
        prompts, tuning = (shuffled_prompts(text, PER_CATEGORY, seed) for seed in (args.seed, args.seed + 1))
        return cls(causal_lm, head, meter, prompts, tuning)

    def engine(self, way: SpeculativeConfig, slots: int) -> Engine:
        return build_engine(self.causal_lm, self.head, way, EngineArgs(slots, MAX_MODEL_LEN, kv_tokens=None))


@dataclass(frozen=True, slots=True)
class Lane:
    """An engine, and the planner of the way that it was made for. drafts: whether any way that drafts can run on it;
    one that ranks as published cannot.

    Where an engine's memory happens to lie makes it up to 3 % faster or slower than its twin. So ways that draft change
    lanes each round, and all lanes are behind the same texts. What the way before left unread by the draft head is read
    in a step that does not count. Against plain decoding, with an engine that cannot draft, only --engines helps.
    """

    engine: Engine
    planner: Planner
    drafts: bool

    @classmethod
    def of(cls, models: Models, way: SpeculativeConfig, slots: int) -> Lane:
        made = models.engine(way, slots)
        if way.method == "none" or way.ranking != "coupled":
            return cls(made, made.planner, False)
        return cls(models.engine(fixed_tree(LARGEST), slots), made.planner, True)


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    os.environ.setdefault("EAGLE_RAY_CACHE", tempfile.mkdtemp())  # costs of steps are measured in this run
    about = f"{platform.machine()}, torch {torch.__version__}, {args.device}, {args.threads} threads, {args.dtype}"
    print(f"{about}, {args.pair} pair, {args.rounds} rounds of {args.seconds:g} s\n")
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---" * len(COLUMNS) + "|", flush=True)
    cells = []
    for head_name in args.heads:
        models = Models.load(args, head_name)
        for batch in args.batches:
            ways = settings_of(args, models, batch)
            for mode in args.modes:
                samples, identities = measured(args, models, ways, mode, batch)
                for name, taken in samples.items():
                    about = {"head": head_name, "mode": mode, "batch": batch, "way": name}
                    cells.append(about | figures(taken, samples, identities[name], COUNTS[mode], args.device))
                    cells[-1]["settings"] = ways[name].model_dump()
                    print(line(cells[-1]), flush=True)
                save(args, cells)


def settings_of(args: argparse.Namespace, models: Models, batch: int) -> dict[str, SpeculativeConfig]:
    """What each way is; plain decoding is always among them."""
    ways = {
        "plain": SpeculativeConfig(method="none"),
        "chain": fixed_tree(TreeBounds(5, 5, 1)),
        "eagle2": fixed_tree(TreeBounds(59, 6, 10)),
        "adaptive": SpeculativeConfig(method="eagle2", max_nodes=6, max_depth=6, top_k=1, budget="global"),
        "ours": fixed_tree(LARGEST).model_copy(update={"budget": "global"}),
    }
    if "best" in args.ways:
        ways["best"] = best_fixed(args, models, batch)
    if "published" in args.ways:
        ways["published"] = best_fixed(args, models, batch, ranking="published")
    return {name: ways[name] for name in WAYS if name in args.ways or name == "plain"}


def fixed_tree(bounds: TreeBounds, ranking: str = "coupled") -> SpeculativeConfig:
    """Return settings that draft the same tree for every sequence at every step."""
    return SpeculativeConfig(**asdict(bounds), budget="uniform", ranking=ranking)


def best_fixed(args: argparse.Namespace, models: Models, batch: int, ranking: str = "coupled") -> SpeculativeConfig:
    """Return the fastest of TREES, with this ranking of nodes, and of plain decoding on the tuning prompts."""
    most = MOST_TUNED_ROWS[torch.device(args.device).type]
    trees = {name: TREES[name] for name in args.trees if batch * TREES[name].num_nodes <= most}
    ways = {"plain": SpeculativeConfig(method="none")}
    ways |= {name: fixed_tree(tree, ranking) for name, tree in trees.items()}
    lanes = {name: Lane.of(models, way, batch) for name, way in ways.items()}
    samples, _ = steady(args, replace(models, prompts=models.tuning), lanes, TUNING_ROUNDS, TUNING_S, 0)
    rates = {name: sum(taken[1:], taken[0]).decoded_per_second for name, taken in samples.items()}
    best = max(rates, key=rates.__getitem__)
    told = ", ".join(f"{name} {rate / rates['plain']:.2f}" for name, rate in rates.items())
    print(f"tuned for batch {batch}, ranking {ranking}: {best} of {told}", file=sys.stderr, flush=True)
    return ways[best]


def measured(
    args: argparse.Namespace, models: Models, ways: dict[str, SpeculativeConfig], mode: str, batch: int
) -> Measured:
    """Rounds of `mode`, or where engines are made several times the sums over each making's: planners stay, texts and
    the places in memory change.
    """
    lanes: dict[str, Lane] = {}
    makings: list[Measured] = []
    for i in range(args.engines):
        made = {name: Lane.of(models, way, batch) for name, way in ways.items()}
        lanes = {name: replace(lane, planner=lanes.get(name, lane).planner) for name, lane in made.items()}
        first = i * len(models.prompts) // args.engines
        turned = replace(models, prompts=models.prompts[first:] + models.prompts[:first])
        makings.append(MODES[mode](args, turned, lanes, args.rounds, args.seconds, 0 if i else LEAD_INS[mode]))
    if len(makings) == 1:
        return makings[0]
    samples = {name: [sum(s[name][1:], s[name][0]) for s, _ in makings] for name in ways}
    return samples, {name: sum((same[name] for _, same in makings), Equivalence()) for name in ways}


def steady(
    args: argparse.Namespace,
    models: Models,
    lanes: dict[str, Lane],
    num_rounds: int,
    seconds: float,
    lead_in: int,
) -> Measured:
    """Windows of a queue that is always full, each over as many tokens as plain commits in `seconds`."""
    queues = {
        name: SteadyQueue(lane.engine, requests(models.prompts, [args.tokens], args.temperatures), models.meter)
        for name, lane in lanes.items()
    }
    for queue in queues.values():
        queue.fill()
    num_tokens = max(LEAST_TOKENS, queues["plain"].window(sys.maxsize, seconds).num_tokens)
    for name in lanes.keys() - {"plain"}:
        queues[name].window(num_tokens, seconds)
    samples: dict[str, list[Sample]] = {name: [] for name in lanes}
    users = {name: name for name in lanes}
    for turn, name, lane in turns(lanes, lead_in + num_rounds):
        first = None if users[lane] == name else UniformPlanner(TreeBounds(1, 1, 1))
        sample = queues[lane].window(num_tokens, MOST_TIMES_PLAIN * seconds, first)
        users[lane] = name
        if turn >= lead_in:
            samples[name].append(sample)
    for queue in queues.values():
        queue.end()
    return samples, identities(models, {name: queue.sequences for name, queue in queues.items()})


def drain(
    args: argparse.Namespace,
    models: Models,
    lanes: dict[str, Lane],
    num_rounds: int,
    seconds: float,
    lead_in: int,
) -> Measured:
    """The same rows for all ways, whatever time they take; other rows in each round."""
    num_rows = max(2, int(DRAIN_ROWS * lanes["plain"].engine.counters.num_slots))
    samples: dict[str, list[Sample]] = {name: [] for name in lanes}
    done: dict[str, list[Sequence]] = {name: [] for name in lanes}
    for turn, name, lane in turns(lanes, lead_in + num_rounds):
        stream = requests(models.prompts, DRAIN_LENGTHS, args.temperatures, offset=turn * num_rows)
        rows = list(itertools.islice(stream, num_rows))
        sample = run_requests(lanes[lane].engine, rows, models.meter)
        done[name] += rows
        if turn >= lead_in:
            samples[name].append(sample)
    return samples, identities(models, done)


def identities(models: Models, sequences: dict[str, list[Sequence]]) -> dict[str, Equivalence]:
    """Compare each way's outputs with plain decoding's."""
    plain = sequences["plain"]
    asked = [s.prompt_ids for s in plain], [s.sampling for s in plain]
    outputs = {name: [s.output_ids for s in theirs] for name, theirs in sequences.items()}
    return {name: compare(models.causal_lm, asked[0], ids, outputs["plain"], asked[1]) for name, ids in outputs.items()}


def turns(lanes: dict[str, Lane], num_rounds: int) -> Iterator[tuple[int, str, str]]:
    """(round, way, lane): everyone once a round, in a random order, on a random lane, which has its planner by then."""
    shuffle = random.Random(0)
    drafting = [name for name, lane in lanes.items() if lane.drafts]
    for turn in range(num_rounds):
        seats = {name: name for name in lanes}
        seats |= dict(zip(drafting, shuffle.sample(drafting, len(drafting)), strict=True))
        for name in shuffle.sample(list(lanes), len(lanes)):
            lanes[seats[name]].engine.planner = lanes[name].planner
            yield turn, name, seats[name]


def figures(
    samples: list[Sample], others: dict[str, list[Sample]], identity: Equivalence, count: Count, device: str
) -> dict[str, object]:
    """others: of all ways, in the same rounds."""
    mine = [count(sample) for sample in samples]
    over = {name: list(zip(mine, map(count, taken), strict=True)) for name, taken in others.items()}
    total, plain = (sum(taken[1:], taken[0]) for taken in (samples, others["plain"]))
    return {
        "tokens_per_second": statistics.median(tokens / seconds for tokens, seconds in mine),
        "over_plain": asdict(pooled_ratio(over["plain"])),
        **{f"over_{name}": asdict(pooled_ratio(over[name])) for name in FIXED if name in over},
        "all": total.tokens_per_second / plain.tokens_per_second,
        "tau": total.tau,
        "rows_per_pass": total.num_verify_rows / total.num_steps,
        "off_share": total.num_plain_steps / total.num_steps,
        "probes": total.num_probes,
        "predicted_ratio": total.predicted_ratio,
        "outside_share": 1 - total.forward_s / total.seconds if device == "cpu" else None,
        "identity": asdict(identity),
        "samples": [asdict(sample) for sample in samples],
    }


def line(cell: dict[str, object]) -> str:
    """A cell as a row of the table. same: equal outputs of all compared, and near-ties among the others."""
    ratio, same, outside = cell["over_plain"], cell["identity"], cell["outside_share"]
    parts = [cell["head"], cell["mode"], cell["batch"], cell["way"], f"{cell['tokens_per_second']:.1f}"]
    parts += [f"{ratio['mean']:.3f}x", f"[{ratio['low']:.3f}, {ratio['high']:.3f}]", f"{ratio['bound']:.3f}x"]
    rivals, predicted = [cell.get(f"over_{name}") for name in FIXED], cell["predicted_ratio"]
    parts += ["-" if over is None else f"{over['mean']:.3f}x, at least {over['bound']:.3f}x" for over in rivals]
    parts += [f"{cell['all']:.3f}x", f"{cell['tau']:.2f}", "-" if predicted is None else f"{predicted:.2f}x"]
    parts += [f"{cell['rows_per_pass']:.1f}", f"{cell['off_share']:.0%}", cell["probes"]]
    parts += ["-" if outside is None else f"{outside:.0%}", f"{same['num_equal']}/{same['num_compared']}"]
    ties = f" ({same['num_near_ties']} ties)" if same["num_near_ties"] else ""
    return "| " + " | ".join(str(part) for part in parts) + ties + " |"


def save(args: argparse.Namespace, cells: list[dict[str, object]]) -> None:
    about = {
        "arguments": {k: str(v) for k, v in vars(args).items()},
        "torch": torch.__version__,
        "cpu": platform.processor(),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({**about, "cells": cells}, indent=1, default=str) + "\n")


MODES = {"steady": steady, "drain": drain}
COUNTS: dict[str, Count] = {
    "steady": lambda sample: sample.decoded,
    "drain": lambda sample: (sample.num_tokens, sample.seconds),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--trees", nargs="+", choices=TREES, default=list(TREES), help="among which the best is")
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=["good"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["steady"])
    parser.add_argument("--pair", choices=["wide", "tiny"], default="wide")
    parser.add_argument("--rounds", type=int, default=40, help="with each making of the engines")
    parser.add_argument("--engines", type=int, default=1, help="times that all engines are made, one after another")
    parser.add_argument("--seconds", type=float, default=0.4, help="of plain decoding in a steady window")
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of an output in steady windows")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0], help="of the rows, by turns")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("runs") / f"bench-{time.strftime('%Y%m%d-%H%M%S')}.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
