"""Compare the planner with fixed trees and a chain in simulated seconds: python -m jobs.bench.planner

The engine, the embedded pair and the acceptance are real; the seconds of a step come from a table
of costs (jobs/bench/simulated_costs.py). So the figures are the same on every machine. Every method
answers the same prompts. --noise and --mistaken make the planner observe wrong times and start from
wrong costs; the reported seconds are exact. --set MEMORY=25 runs the planner with another value of
one of its constants.

    steady   a queue that is always full, after --warm tokens that do not count, or WARM_EACH for each slot
    drain    --drain rounds of 1.5 rows a slot, of mixed lengths, to the last one's end, on --drain-slots, after one
             round that does not count

Ways are plain decoding (`none`), fixed trees by nodes/depth/width, `chain` (one budget over chains)
and `ours`. With --no-sync each is priced by the passes that are replayed for it. --json writes a
list of {world, batch, temperature, way, tokens_per_s}.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from eagle_ray.assembly.assemble import EngineBundle, build_engine_from_config
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.tree_bounds import NO_TREE, TreeBounds
from eagle_ray.engine.engine import Engine
from eagle_ray.evaluation.timing import SteadyQueue, run_requests
from eagle_ray.models.graphs import CudaGraphRunner, PassSizes
from eagle_ray.planner.budget_planner import BudgetPlanner
from eagle_ray.planner.cost_model import StepCosts
from eagle_ray.planner.planner import UniformPlanner
from jobs.bench.prompts import shuffled_prompts
from jobs.bench.simulated_costs import (
    SimulatedPlanner,
    amx,
    avx512,
    busy,
    cpu,
    flat,
    h100,
    h200,
    mistaken,
)
from jobs.bench.workload import DRAIN_LENGTHS, DRAIN_ROWS, requests

WORLDS: dict[str, Callable[[], StepCosts]] = {
    "cpu": cpu,
    "busy": busy,
    "flat": flat,
    "avx512": avx512,
    "amx": amx,
    "h100": h100,
    "h200": h200,
}
TREES = [
    "1/1/1",
    "2/2/1",
    "3/3/1",
    "4/4/1",
    "4/2/2",
    "6/3/2",
    "8/4/4",
    "12/4/4",
    "24/5/6",
    "60/6/10",
]
BOUNDS = {"chain": TreeBounds(6, 6, 1), "ours": TreeBounds(60, 6, 10)}
DEEP = {"chain": TreeBounds(8, 8, 1), "ours": TreeBounds(60, 8, 10)}
PER_CATEGORY = 32  # prompts
MOST_ROWS = (
    256  # of a fixed tree's pass, or ROWS_EACH for each sequence: larger ones have no chance
)
ROWS_EACH = 4
WARM_EACH, COUNTED_EACH = 100, 150  # tokens for each slot of a steady queue, at least
ENDLESS_S = math.inf
COLUMNS = (
    "| world | batch | T | best other | over plain | ours over plain | ours over best "
    "| rows | depth | off | probes |"
)


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    for setting in args.set:
        set_constant(*setting.split("="))
    drain_slots = args.drain_slots if args.drain else []
    made = built(max([*args.batches, *drain_slots, 1]), args.depth, args.no_sync)
    prompts = shuffled_prompts(made.tokenizer, PER_CATEGORY, args.seed)
    print(f"{COLUMNS}\n{'|---' * 11}|", flush=True)
    rows = []
    for batch, temperatures in itertools.product(args.batches, cells(args)):
        rows += compare(
            args,
            str(batch),
            batch,
            temperatures,
            lambda p, b=batch, t=temperatures: steady(made.engine, p, prompts, b, t, args),
        )
    for slots, temperatures in itertools.product(drain_slots, cells(args)):
        name = f"{slots}, draining"
        rows += compare(
            args,
            name,
            slots,
            temperatures,
            lambda p, n=slots, t=temperatures: drain(made.engine, p, prompts, n, t, args),
        )
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1))


def cells(args: argparse.Namespace) -> list[list[float]]:
    """Return the temperatures of each cell's rows."""
    return [args.temperatures] if args.mixed else [[t] for t in args.temperatures]


def built(slots: int, depth: int = BOUNDS["ours"].depth, replays: bool = False) -> EngineBundle:
    """Return an engine with the ranking of a job, calibrated: budget uniform alone would rank as published.

    replays: it learns from every step, as passes do that are replayed.
    """
    ranking = SpeculativeConfig().ranking
    speculative = SpeculativeConfig(
        method="eagle2", budget="uniform", ranking=ranking, max_depth=depth
    )
    made = build_engine_from_config(ModelConfig(max_model_len=512), speculative, EngineArgs(slots))
    made.engine.drafter.ranking.offers.interval = 1 if replays else None
    return made


def set_constant(name: str, value: str) -> None:
    """Set a constant of the planner in every module that imports it."""
    modules = [
        m
        for key, m in sys.modules.items()
        if key.startswith("eagle_ray.planner.") and hasattr(m, name)
    ]
    if not modules:
        raise SystemExit(f"--set: the planner has no constant {name}")
    for module in modules:
        setattr(module, name, type(getattr(module, name))(float(value)))


def compare(
    args: argparse.Namespace,
    name: str,
    batch: int,
    temperatures: list[float],
    run: Callable[[SimulatedPlanner], None],
) -> list[dict]:
    """Print a row of the table for each world and return what --json writes.

    What a fixed tree accepts depends on no costs, so it runs once for all worlds.
    """
    worlds = {world: WORLDS[world]() for world in args.world}
    fixed = {}
    for way, tree in fixed_trees(args.trees, batch):
        fixed[way] = SimulatedPlanner(
            UniformPlanner(tree), worlds[args.world[0]], sizes=sizes_of(args, tree, batch)
        )
        run(fixed[way])

    results = []
    for world, costs in worlds.items():
        speeds = {way: planner.tokens_per_second_at(costs) for way, planner in fixed.items()}
        for way, bounds in budgets(args).items():
            sizes = sizes_of(args, bounds, batch)
            believed = mistaken(WORLDS[args.believed or world](), args.mistaken, args.noise_seed)
            planner = BudgetPlanner(bounds, believed, not args.no_sync, sizes)
            priced = SimulatedPlanner(planner, costs, args.noise, args.noise_seed, sizes)
            run(priced)
            speeds[way] = priced.tokens_per_second
        temperature = temperatures[0] if len(temperatures) == 1 else temperatures
        print(line([world, name, str(temperature)], speeds, priced), flush=True)
        cell = {"world": world, "batch": batch, "temperature": temperature}
        results += [
            cell | {"way": way, "tokens_per_s": round(speed, 2)} for way, speed in speeds.items()
        ]
    return results


def fixed_trees(names: list[str], batch: int) -> Iterator[tuple[str, TreeBounds]]:
    """Yield plain decoding and every fixed tree that has a chance."""
    yield "none", NO_TREE
    for name in names:
        tree = TreeBounds(*map(int, name.split("/")))
        if batch * tree.num_nodes <= max(MOST_ROWS, ROWS_EACH * batch):
            yield name, tree


def budgets(args: argparse.Namespace) -> dict[str, TreeBounds]:
    """Return the ways that plan; ours comes last."""
    bounds = BOUNDS if args.depth == BOUNDS["ours"].depth else DEEP
    return {way: tree for way, tree in bounds.items() if way == "ours" or args.chain}


def sizes_of(args: argparse.Namespace, bounds: TreeBounds, batch: int) -> PassSizes | None:
    """Return the passes that are replayed for these trees, or None if steps run as they are."""
    return (
        CudaGraphRunner("cpu", batch, 512, fused=True).pass_sizes(bounds) if args.no_sync else None
    )


def line(names: list[str], speeds: dict[str, float], ours: SimulatedPlanner) -> str:
    """Return one row of the table."""
    others = {way: speed for way, speed in speeds.items() if way != "ours"}
    best, steps = max(others, key=others.__getitem__), ours.outcomes
    ratios = (
        others[best] / speeds["none"],
        speeds["ours"] / speeds["none"],
        speeds["ours"] / others[best],
    )
    parts = [*names, best, *(f"{ratio:.3f}x" for ratio in ratios)]
    parts += [f"{sum(o.num_rows for o in steps) / sum(o.batch_size for o in steps):.2f}"]
    parts += [
        f"{sum(o.depth for o in steps) / len(steps):.2f}",
        f"{sum(not o.depth for o in steps) / len(steps):.0%}",
    ]
    parts += [str(sum(o.plan.probe for o in steps))]
    return "| " + " | ".join(parts) + " |"


def steady(
    engine: Engine,
    planner: SimulatedPlanner,
    prompts: list[list[int]],
    batch: int,
    temperatures: list[float],
    args: argparse.Namespace,
) -> None:
    engine.planner = planner
    engine.drafter.reset_learning()
    queue = SteadyQueue(
        engine, requests(prompts, [args.tokens_each], temperatures), in_flight=batch
    )
    queue.fill()
    queue.window(max(args.warm, WARM_EACH * batch), ENDLESS_S)
    planner.reset()
    queue.window(max(args.tokens, COUNTED_EACH * batch), ENDLESS_S)
    queue.end()


def drain(
    engine: Engine,
    planner: SimulatedPlanner,
    prompts: list[list[int]],
    slots: int,
    temperatures: list[float],
    args: argparse.Namespace,
) -> None:
    engine.planner = planner
    engine.drafter.reset_learning()
    num_rows = int(DRAIN_ROWS * slots)
    for turn in range(1 + args.drain):
        rows = requests(prompts, DRAIN_LENGTHS, temperatures, offset=turn * num_rows)
        run_requests(engine, list(itertools.islice(rows, num_rows)), in_flight=slots)
        if not turn:
            planner.reset()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", choices=WORLDS, nargs="+", default=["cpu"])
    parser.add_argument(
        "--believed", choices=WORLDS, help="whose costs the planner takes for true at first"
    )
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--drain", type=int, default=0, help="rounds; 0: none")
    parser.add_argument("--drain-slots", type=int, nargs="+", default=[16])
    parser.add_argument("--trees", nargs="*", default=TREES, help="nodes/depth/width")
    parser.add_argument(
        "--no-chain", dest="chain", action="store_false", help="leave out chains under a budget"
    )
    parser.add_argument(
        "--depth", type=int, choices=(6, 8), default=6, help="most levels under a budget"
    )
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0], help="a cell for each"
    )
    parser.add_argument(
        "--mixed", action="store_true", help="one cell, whose rows have the temperatures by turns"
    )
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--warm", type=int, default=1000)
    parser.add_argument("--tokens-each", type=int, default=96)
    parser.add_argument(
        "--noise", type=float, default=0.0, help="of what is heard of a step: 0.1 is 10 %%"
    )
    parser.add_argument(
        "--mistaken",
        type=float,
        default=0.0,
        help="costs at the start are off by this: 0.1 is 10 %%",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a constant of the planner"
    )
    parser.add_argument(
        "--no-sync", action="store_true", help="plan as on a GPU, without this step's values"
    )
    parser.add_argument("--noise-seed", type=int, default=0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
