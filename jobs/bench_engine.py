"""Ways to decode, beside each other on one machine: python jobs/bench_engine.py --threads 2

The embedded pair is widened to 230M parameters (eagle_ray/models/widening.py): real acceptance, though a toy's, at a
real model's proportions of cost. Every way is an engine over the same weights; ways take turns, in another order each
round, on the same prompts, and a round's tokens per second are divided by plain decoding's in the same round. Greedy.

    steady   a queue that is always full, over as many tokens as plain decoding commits in --seconds
    drain    1.5 rows a slot of mixed prompts and lengths, to the last one's end

A table on stdout, everything in --out. In full about half an hour on two quiet cores; for two minutes:
--batches 1 8 --ways plain eagle2 ours --rounds 3 --seconds 1
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from eagle_ray.benchmark.forward_meter import ForwardMeter
from eagle_ray.benchmark.identity import Identity, compare
from eagle_ray.benchmark.intervals import ratio_interval
from eagle_ray.benchmark.stretch import Sample, drained, steady
from eagle_ray.benchmark.worse_heads import damaged_head, random_head
from eagle_ray.config import SpeculativeConfig
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.sequence import Sequence
from eagle_ray.models.checkpoint import load_head
from eagle_ray.models.heads import EagleHead
from eagle_ray.models.linear import pack_linears
from eagle_ray.models.target import load_target
from eagle_ray.models.widening import BENCH, widen_pair
from eagle_ray.pair import build_engine, resolve
from eagle_ray.speculative.sampling import SamplingParams
from eagle_ray.text import Text
from eagle_ray.training.prompts import prompt_rows

MAX_MODEL_LEN = 512
MOST_TIMES_PLAIN = 8  # a window that takes this many times what plain decoding took is cut there
TUNING_ROUNDS, TUNING_SHARE = 2, 0.5  # windows per candidate, and their length beside --seconds
DRAIN_ROWS = 1.5  # per slot
DRAIN_LENGTHS = (8, 96, 24, 160, 48, 64, 16, 128)
BAD_NOISE = 0.25  # of the trained weights: tau 1.4 with 8 nodes a tree, 3.7 undamaged; never trained 1.0
TREES = {  # max_nodes, max_depth, top_k
    "2/2/1": (2, 2, 1),
    "4/2/2": (4, 2, 2),
    "4/4/1": (4, 4, 1),
    "8/4/4": (8, 4, 4),
    "12/4/4": (12, 4, 4),
    "24/5/6": (24, 5, 6),
    "59/6/10": (59, 6, 10),
}
HEADS: dict[str, Callable[[EagleHead], EagleHead]] = {
    "good": lambda head: head,
    "bad": lambda head: damaged_head(head, BAD_NOISE),
    "random": random_head,
}
COLUMNS = ("head", "mode", "batch", "way", "tokens/s", "over plain", "95 %", "at least", "tau")
COLUMNS += ("rows/pass", "off", "outside", "same")
WAYS = ("plain", "chain", "eagle2", "best", "adaptive", "ours")
Mode = Callable[[Engine, int, float], Sample]  # engine, offset into the prompts, most seconds


@dataclass(frozen=True, slots=True)
class Models:
    """The pair whose weights every engine shares. prompts: to measure on; tuning: others."""

    causal_lm: nn.Module
    head: EagleHead
    meter: ForwardMeter
    prompts: list[list[int]]
    tuning: list[list[int]]

    @classmethod
    def load(cls, args: argparse.Namespace, head_name: str) -> Models:
        path, dtype = resolve("embedded:tiny", "target"), getattr(torch, args.dtype)
        causal_lm = load_target(path, torch.float32, args.device)
        config = causal_lm.config
        head = load_head(resolve("embedded:tiny", "draft"), config.hidden_size, config.vocab_size)
        head = HEADS[head_name](head).to(args.device)
        if args.pair == "wide":
            causal_lm, head = widen_pair(causal_lm, head, BENCH, dtype=dtype, device=args.device)
        causal_lm, head = causal_lm.to(dtype), head.to(dtype).eval()
        pack_linears(causal_lm)
        pack_linears(head)
        meter = ForwardMeter(causal_lm.base_model, causal_lm.get_output_embeddings(), head)
        text = Text.load(path)
        prompts, tuning = (shuffled_prompts(text, seed) for seed in (args.seed, args.seed + 1))
        return cls(causal_lm, head, meter, prompts, tuning)

    def engine(self, way: SpeculativeConfig, slots: int) -> Engine:
        return build_engine(self.causal_lm, None if way.method == "none" else self.head, way, slots, MAX_MODEL_LEN)


def shuffled_prompts(text: Text, seed: int) -> list[list[int]]:
    """Held-out prompts of the six categories, in turn."""
    rows = [text.encode_chat(row["messages"]) for row in prompt_rows(per_category=32, seed=seed)]
    return [ids for i in range(32) for ids in rows[i::32]]


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    about = f"{platform.machine()}, torch {torch.__version__}, {args.device}, {args.threads} threads, {args.dtype}"
    print(f"{about}, {args.pair} pair, {args.rounds} rounds of {args.seconds:g} s\n")
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---" * len(COLUMNS) + "|", flush=True)
    cells = []
    for head_name in args.heads:
        models = Models.load(args, head_name)
        for batch in args.batches:
            ways = settings_of(args, models, batch)
            engines = {name: models.engine(way, batch) for name, way in ways.items()}
            for mode in args.modes:
                for cell in measured(args, models, engines, mode, batch):
                    cells.append({"head": head_name, "settings": ways[cell["way"]].model_dump(), **cell})
                    print(line(cells[-1]), flush=True)
                    save(args, cells)


def settings_of(args: argparse.Namespace, models: Models, batch: int) -> dict[str, SpeculativeConfig]:
    """What each way is; plain decoding is always among them."""
    ways = {
        "plain": SpeculativeConfig(method="none"),
        "chain": SpeculativeConfig(max_nodes=5, max_depth=5, top_k=1),
        "eagle2": SpeculativeConfig(max_nodes=59, max_depth=6, top_k=10),
        "adaptive": SpeculativeConfig(max_nodes=6, max_depth=6, top_k=1, budget="global"),
        "ours": SpeculativeConfig(max_nodes=60, max_depth=6, top_k=10, budget="global"),
    }
    if "best" in args.ways:
        ways["best"] = best_fixed(args, models, batch)
    return {name: ways[name] for name in WAYS if name in args.ways or name == "plain"}


def best_fixed(args: argparse.Namespace, models: Models, batch: int) -> SpeculativeConfig:
    """The fastest of TREES and of none, on the tuning prompts."""
    ways = {"none": SpeculativeConfig(method="none")}
    ways |= {name: SpeculativeConfig(max_nodes=m, max_depth=d, top_k=k) for name, (m, d, k) in TREES.items()}
    engines = {name: models.engine(way, batch) for name, way in ways.items()}
    window = steady_mode(args, replace(models, prompts=models.tuning), engines["none"], args.seconds * TUNING_SHARE)
    rates = {name: 1.0 for name in ways}
    for _, samples in rounds(engines, window, TUNING_ROUNDS, args.seconds * TUNING_SHARE):
        rates = {name: rates[name] * samples[name].tokens_per_second for name in ways}
    best = max(rates, key=rates.__getitem__)
    told = ", ".join(f"{name} {(rates[name] / rates['none']) ** (1 / TUNING_ROUNDS):.2f}" for name in ways)
    print(f"tuned for batch {batch}: {best} of {told}", file=sys.stderr, flush=True)
    return ways[best]


def measured(
    args: argparse.Namespace, models: Models, engines: dict[str, Engine], mode: str, batch: int
) -> Iterator[dict[str, object]]:
    """One cell per way."""
    make = {"steady": steady_mode, "drain": drain_mode}[mode]
    run, samples = make(args, models, engines["plain"], args.seconds), {name: [] for name in engines}
    identities = {name: Identity() for name in engines}
    for offset, taken in rounds(engines, run, args.rounds, args.seconds):
        prompts = list(itertools.islice(itertools.cycle(models.prompts), offset, offset + 4096))
        for name, sample in taken.items():
            samples[name].append(sample)
            identities[name] += compare(models.causal_lm, prompts, sample.outputs, taken["plain"].outputs)
    for name, taken in samples.items():
        yield cell_of(mode, batch, name, taken, samples["plain"], identities[name], args.device)


def rounds(
    engines: dict[str, Engine], run: Mode, num_rounds: int, seconds: float
) -> Iterator[tuple[int, dict[str, Sample]]]:
    """Every engine's sample, round by round, each round with other prompts and in another order; one to warm up."""
    names = list(engines)
    for turn in range(-1, num_rounds):
        offset, shift = 61 * (turn + 1), turn % len(names)
        most = MOST_TIMES_PLAIN * seconds if turn >= 0 else seconds
        samples = {name: run(engines[name], offset, most) for name in names[shift:] + names[:shift]}
        if turn >= 0:
            yield offset, samples


def steady_mode(args: argparse.Namespace, models: Models, plain: Engine, seconds: float) -> Mode:
    """As many tokens as plain decoding commits in `seconds`."""

    def run(engine: Engine, offset: int, most_seconds: float) -> Sample:
        return steady(engine, requests(models.prompts, offset, [args.tokens]), num_tokens, most_seconds, models.meter)

    num_tokens = sys.maxsize
    num_tokens = run(plain, 0, seconds).num_tokens
    return run


def drain_mode(args: argparse.Namespace, models: Models, plain: Engine, seconds: float) -> Mode:
    """The same rows for all ways, whatever they take."""
    num_rows = max(2, int(DRAIN_ROWS * plain.counters.num_slots))

    def run(engine: Engine, offset: int, most_seconds: float) -> Sample:
        rows = requests(models.prompts, offset, DRAIN_LENGTHS)
        return drained(engine, list(itertools.islice(rows, num_rows)), models.meter)

    return run


def requests(prompts: list[list[int]], offset: int, lengths: list[int] | tuple[int, ...]) -> Iterator[Sequence]:
    stream = itertools.islice(itertools.cycle(prompts), offset, None)
    for i, (ids, most) in enumerate(zip(stream, itertools.cycle(lengths), strict=False)):
        yield Sequence(str(i), ids, SamplingParams(max_tokens=most))


def cell_of(
    mode: str, batch: int, way: str, samples: list[Sample], plain: list[Sample], identity: Identity, device: str
) -> dict[str, object]:
    ratios = [a.tokens_per_second / b.tokens_per_second for a, b in zip(samples, plain, strict=True)]
    steps = sum(s.num_steps for s in samples)
    return {
        "mode": mode,
        "batch": batch,
        "way": way,
        "tokens_per_second": statistics.median(s.tokens_per_second for s in samples),
        "ratios": ratios,
        "over_plain": asdict(ratio_interval(ratios)),
        "tau": statistics.fmean(s.tau for s in samples),
        "rows_per_pass": sum(s.num_verify_rows for s in samples) / steps,
        "off_share": sum(s.num_plain_steps for s in samples) / steps,
        "outside_share": None
        if device == "cuda"
        else 1 - sum(s.forward_s for s in samples) / sum(s.seconds for s in samples),
        "identity": asdict(identity),
    }


def line(cell: dict[str, object]) -> str:
    """A cell as a row of the table. same: equal outputs of all compared, and near-ties among the others."""
    ratio, same, outside = cell["over_plain"], cell["identity"], cell["outside_share"]
    parts = [cell["head"], cell["mode"], cell["batch"], cell["way"], f"{cell['tokens_per_second']:.1f}"]
    parts += [f"{ratio['mean']:.3f}x", f"[{ratio['low']:.3f}, {ratio['high']:.3f}]", f"{ratio['bound']:.3f}x"]
    parts += [f"{cell['tau']:.2f}", f"{cell['rows_per_pass']:.1f}", f"{cell['off_share']:.0%}"]
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


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=["good"])
    parser.add_argument("--modes", nargs="+", choices=["steady", "drain"], default=["steady"])
    parser.add_argument("--pair", choices=["wide", "tiny"], default="wide")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of plain decoding in a steady window")
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of an output in steady windows")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("runs") / f"bench-{time.strftime('%Y%m%d-%H%M%S')}.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
