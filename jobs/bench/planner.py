"""Compare the planner with every fixed tree in simulated seconds: python -m jobs.bench.planner

The engine, the embedded pair and the acceptance are real; the seconds of a step come from a table of costs
(jobs/bench/simulated_costs.py). So the figures are the same on every machine. Every method answers the same prompts.
--noise and --mistaken make the planner observe wrong times and start from wrong costs; the reported seconds are exact.
--set MEMORY=25 runs the planner with another value of one of its constants.

    steady   a queue that is always full, after --warm tokens that do not count
    drain    --drain rounds of 1.5 rows a slot, of mixed lengths, to the last one's end, on --drain-slots, after one
             round that does not count
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable

import torch

from eagle_ray.assembly.assemble import EngineBundle, build_engine_from_config
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.tree_bounds import NO_TREE, TreeBounds
from eagle_ray.engine.engine import Engine
from eagle_ray.evaluation.timing import SteadyQueue, run_requests
from eagle_ray.models.graphs import CudaGraphRunner
from eagle_ray.planner.budget_planner import BudgetPlanner
from eagle_ray.planner.cost_model import StepCosts
from eagle_ray.planner.planner import Planner, UniformPlanner
from jobs.bench.simulated_costs import SimulatedPlanner, amx, avx512, busy, cpu, flat, h200, mistaken
from jobs.bench.workload import DRAIN_LENGTHS, DRAIN_ROWS, requests
from jobs.tiny_pair.prompts import shuffled_prompts

WORLDS: dict[str, Callable[[], StepCosts]] = {
    "cpu": cpu,
    "busy": busy,
    "flat": flat,
    "avx512": avx512,
    "amx": amx,
    "h200": h200,
}
TREES = ["1/1/1", "2/2/1", "3/3/1", "4/4/1", "4/2/2", "6/3/2", "8/4/4", "12/4/4", "24/5/6"]  # max_nodes/max_depth/top_k
OURS = TreeBounds(60, 6, 10)
PER_CATEGORY = 32  # prompts
MOST_ROWS = 160  # of a fixed tree's pass: larger ones have no chance and take long to lose
ENDLESS_S = math.inf
HEADER = "| batch | best fixed tree | over plain | ours over plain | ours over best | rows | depth | off | probes |"


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    for setting in args.set:
        set_constant(*setting.split("="))
    drain_slots = args.drain_slots if args.drain else []
    most = max([*args.batches, *drain_slots, 1])
    made = built(most)
    prompts = shuffled_prompts(made.tokenizer, PER_CATEGORY, args.seed)
    print(f"{HEADER}\n{'|---' * 9}|", flush=True)
    for batch in args.batches:
        print(line(args, str(batch), batch, lambda p, b=batch: steady(made.engine, p, prompts, b, args)), flush=True)
    for slots in drain_slots:
        name = f"{slots}, draining"
        print(line(args, name, slots, lambda p, n=slots: drain(made.engine, p, prompts, n, args)), flush=True)


def built(slots: int) -> EngineBundle:
    """Return an engine with the ranking of a job, calibrated: budget uniform alone would rank as published."""
    speculative = SpeculativeConfig(method="eagle2", budget="uniform", ranking=SpeculativeConfig().ranking)
    return build_engine_from_config(ModelConfig(max_model_len=512), speculative, EngineArgs(slots))


def set_constant(name: str, value: str) -> None:
    """Set a constant of the planner in every module that imports it."""
    modules = [m for key, m in sys.modules.items() if key.startswith("eagle_ray.planner.") and hasattr(m, name)]
    if not modules:
        raise SystemExit(f"--set: the planner has no constant {name}")
    for module in modules:
        setattr(module, name, type(getattr(module, name))(float(value)))


def line(args: argparse.Namespace, name: str, batch: int, run: Callable[[SimulatedPlanner], None]) -> str:
    """One row of the table: every fixed tree that has a chance, none, and ours, all by `run`."""
    sizes = CudaGraphRunner("cpu", batch, 512, fused=True).pass_sizes(OURS) if args.no_sync else None

    def priced(planner: Planner) -> SimulatedPlanner:
        made = SimulatedPlanner(planner, WORLDS[args.world](), args.noise, args.noise_seed, sizes)
        run(made)
        return made

    trees = {tree: TreeBounds(*map(int, tree.split("/"))) for tree in args.trees}
    trees = {name: tree for name, tree in trees.items() if batch * tree.num_nodes <= MOST_ROWS}
    speeds = {"none": priced(UniformPlanner(NO_TREE)).tokens_per_second}
    speeds |= {name: priced(UniformPlanner(tree)).tokens_per_second for name, tree in trees.items()}
    best = max(speeds, key=speeds.__getitem__)
    costs = mistaken(WORLDS[args.believed or args.world](), args.mistaken, args.noise_seed)
    ours = priced(BudgetPlanner(OURS, costs, not args.no_sync, sizes))
    steps = ours.outcomes
    ratios = [speeds[best] / speeds["none"], ours.tokens_per_second / speeds["none"]]
    ratios.append(ours.tokens_per_second / speeds[best])
    parts = [name, best, *(f"{ratio:.3f}x" for ratio in ratios)]
    parts += [f"{sum(o.num_rows for o in steps) / sum(o.batch_size for o in steps):.2f}"]
    parts += [f"{sum(o.depth for o in steps) / len(steps):.2f}", f"{sum(not o.depth for o in steps) / len(steps):.0%}"]
    parts += [str(sum(o.plan.probe for o in steps))]
    return "| " + " | ".join(parts) + " |"


def steady(
    engine: Engine, planner: SimulatedPlanner, prompts: list[list[int]], batch: int, args: argparse.Namespace
) -> None:
    engine.planner = planner
    engine.drafter.reset_learning()
    queue = SteadyQueue(engine, requests(prompts, [args.tokens_each], args.temperatures), in_flight=batch)
    queue.fill()
    queue.window(args.warm, ENDLESS_S)
    planner.reset()
    queue.window(args.tokens, ENDLESS_S)
    queue.end()


def drain(
    engine: Engine, planner: SimulatedPlanner, prompts: list[list[int]], slots: int, args: argparse.Namespace
) -> None:
    engine.planner = planner
    engine.drafter.reset_learning()
    num_rows = int(DRAIN_ROWS * slots)
    for turn in range(1 + args.drain):
        rows = requests(prompts, DRAIN_LENGTHS, args.temperatures, offset=turn * num_rows)
        run_requests(engine, list(itertools.islice(rows, num_rows)), in_flight=slots)
        if not turn:
            planner.reset()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", choices=WORLDS, default="cpu")
    parser.add_argument("--believed", choices=WORLDS, help="whose costs the planner takes for true at first")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--drain", type=int, default=8, help="rounds; 0: none")
    parser.add_argument("--drain-slots", type=int, nargs="+", default=[16])
    parser.add_argument("--trees", nargs="+", default=TREES)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0], help="of the rows, by turns")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--warm", type=int, default=1000)
    parser.add_argument("--tokens-each", type=int, default=96)
    parser.add_argument("--noise", type=float, default=0.0, help="of what is heard of a step: 0.1 is 10 %%")
    parser.add_argument("--mistaken", type=float, default=0.0, help="costs at the start are off by this: 0.1 is 10 %%")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a constant of the planner")
    parser.add_argument("--no-sync", action="store_true", help="plan as on a GPU, without this step's values")
    parser.add_argument("--noise-seed", type=int, default=0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
