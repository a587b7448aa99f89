"""Deadlines and caps on a simulated clock: python -m jobs.bench.deadlines [--worlds 24] [--first 0].

Three questions, each over generated worlds (`world_of` states their parameters), the first one over public
traces of spot nodes, too, if --trace names their files (`public_spot_traces`):

- fleets: does DeadlinePolicy miss a deadline that UniformProgress meets, and what does it cost next
  to an oracle that knows the future?
- promises: how often does a job end by the moment that was foreseen for 80 and 95 % of cases, and
  how far off is the expected one?
- caps: does a cap of 1.1 times the true cost finish, and how much over a smaller one does a job go?
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from eagle_ray.report.text import render
from eagle_ray.scaling.policy import (
    DeadlinePolicy,
    FixedWorkers,
    FleetSize,
    Policy,
    UniformProgress,
)
from jobs.bench.public_spot_traces import PublicTrace, read_trace
from jobs.bench.simulated_fleet import (
    HOUR_S,
    ON_DEMAND,
    SPOT,
    World,
    heavy_tailed,
    oracle_dollars,
    simulate,
    speed_changes,
    spot_trace,
)

# Mean seconds of spells with and without spot nodes.
SPELLS = {"half": (3600, 1200), "short": (1800, 1800), "long": (7200, 600), "rare": (1200, 3600)}
CHANGES = (1.0, 0.8, 1.25, 0.9)  # factors of the speed in the second half
MEAN_TOKENS = 330  # of heavy_tailed rows
MOMENTS = (0.1, 0.3, 0.5, 0.7, 0.9)  # shares of all tokens at which promises are looked at


@dataclass(frozen=True, slots=True)
class Compared:
    """One policy in one world: its end in times of the deadline, its cost in times of the oracle's, its losses."""

    end: float
    cost: float
    losses: int


def world_of(seed: int, scale: float = 1.0) -> World:
    """Return a job of 3 to 8 hours that 3 to 7 workers would do, with at most 16.

    A worker has 8 slots of 10 tokens a second and takes four minutes to start. An hour on demand is
    three dollars, on a spot node one.

    Args:
        scale: of the job's length and of the spells, for a test.
    """
    draw = np.random.default_rng(seed)
    hours = float(draw.uniform(3, 8)) * scale
    workers = float(draw.uniform(3, 7))
    up_s, down_s = list(SPELLS.values())[seed % len(SPELLS)]
    change = CHANGES[(seed // len(SPELLS)) % len(CHANGES)]
    slots, token_s = 8, 0.1
    num_rows = int(workers * hours * HOUR_S * slots / token_s / MEAN_TOKENS)
    lengths, classes = heavy_tailed(seed, num_rows, max_tokens=8192)
    return World(
        lengths=lengths,
        classes=classes,
        slots=slots,
        token_s=token_s,
        speed=speed_changes(seed, hours, change),
        room=spot_trace(seed, hours, up_s * scale, down_s * scale, most=16),
        finish_s=hours * HOUR_S,
        prices={ON_DEMAND: 3.0, SPOT: 1.0},
        start_s=240.0 * scale,
    )


def traced_world(seed: int, trace: PublicTrace) -> World:
    """Return the world of the seed, begun at a random moment of a public trace."""
    world = world_of(seed)
    last_begin = max(trace.seconds - 2 * world.finish_s, 0.0)
    begin = float(np.random.default_rng([seed, 1]).uniform(0, last_begin))
    return replace(world, room=trace.starting_at(begin))


def compare(world: World, policy: Policy) -> Compared:
    """Run the policy in the world."""
    outcome = simulate(world, policy)
    end = outcome.ended_s / world.finish_s
    return Compared(end, outcome.dollars / oracle_dollars(world), outcome.losses)


def fixed_world(seed: int, scale: float = 1.0) -> World:
    """Return a world without spot nodes, for a job with a fixed number of workers."""
    return replace(world_of(seed, scale), has_spot=False)


def promise_errors(world: World, workers: int) -> list[tuple[float, float, bool, bool]]:
    """Return for each of MOMENTS the share, the relative error of the expected end, and whether the
    job ended by the likely and by the sure one.

    The error is that of the seconds from the start to the end.
    """
    outcome = simulate(world, FixedWorkers(FleetSize(0, workers)))
    errors = []
    for share in MOMENTS:
        found = [p for p in outcome.promises if p.done_share >= share and p.workers == workers]
        if not found:
            continue
        promise = found[0]
        foreseen = promise.at_s + promise.seconds.expected
        errors.append(
            (
                share,
                foreseen / outcome.ended_s - 1,
                outcome.ended_s <= promise.at_s + promise.seconds.likely,
                outcome.ended_s <= promise.at_s + promise.seconds.sure,
            )
        )
    return errors


def capped(world: World, workers: int, share: float) -> tuple[float, int]:
    """Return the dollars in times of a cap, and the rows left, of a job whose cap is this share of its true cost."""
    policy = FixedWorkers(FleetSize(0, workers))
    cap = share * simulate(world, policy).dollars
    outcome = simulate(replace(world, max_dollars=cap), policy)
    return outcome.dollars / cap, outcome.num_stopped


def place_of(zones: Sequence[Path]) -> str:
    """Return a trace's name: its zone, or the folder of several."""
    return zones[0].stem if len(zones) == 1 else zones[0].parent.name


def fleets_table(worlds: Iterable[tuple[str, World]]) -> str:
    """Return a line for each kind of spells, which names its worlds, and policy."""
    found: dict[tuple[str, str], list[Compared]] = {}
    for spells, world in worlds:
        for policy in (UniformProgress(), DeadlinePolicy()):
            key = (spells, type(policy).__name__)
            found.setdefault(key, []).append(compare(world, policy))
    lines = []
    for (spells, name), each in sorted(found.items()):
        late = sum(one.end > 1 for one in each)
        costs = [one.cost for one in each]
        lines.append(
            [
                spells,
                name,
                str(len(each)),
                str(late),
                f"{max(one.end for one in each):.3f}",
                f"{statistics.fmean(costs):.2f}",
                f"{max(costs):.2f}",
            ]
        )
    header = ["spells", "policy", "worlds", "late", "latest end", "cost", "most"]
    return render(header, lines)


def promises_table(seeds: Iterable[int], change: float = 1.0) -> str:
    """Return a line for each of MOMENTS.

    Args:
        change: of the speed in the middle; 1 for the calibration, since no change can be foreseen.
    """
    found: dict[float, list[tuple[float, bool, bool]]] = {share: [] for share in MOMENTS}
    for seed in seeds:
        world = fixed_world(seed)
        hours = world.finish_s / HOUR_S
        world = replace(world, speed=speed_changes(seed, hours, change))
        for share, *rest in promise_errors(world, workers=6):
            found[share].append(tuple(rest))
    lines = []
    for share, each in found.items():
        errors = [abs(error) for error, _, _ in each]
        lines.append(
            [
                f"{share:.0%}",
                f"{statistics.fmean(errors):.1%}",
                f"{max(errors):.1%}",
                f"{statistics.fmean(likely for _, likely, _ in each):.0%}",
                f"{statistics.fmean(sure for _, _, sure in each):.0%}",
            ]
        )
    return render(["done", "mean error", "most", "by likely", "by sure"], lines)


def caps_table(seeds: Iterable[int]) -> str:
    """Return a line for each share of the true cost."""
    lines = []
    for share in (0.5, 0.8, 0.95, 1.1):
        outcomes = [capped(fixed_world(seed), 6, share) for seed in seeds]
        lines.append(
            [
                f"{share:g}",
                f"{statistics.fmean(spent for spent, _ in outcomes):.3f}",
                f"{max(spent for spent, _ in outcomes):.3f}",
                f"{sum(left == 0 for _, left in outcomes)} of {len(outcomes)}",
            ]
        )
    return render(["cap", "spent", "most", "finished"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, default=24)
    parser.add_argument("--first", type=int, default=0, help="seed of the first world")
    parser.add_argument(
        "--trace",
        type=Path,
        nargs="+",
        action="append",
        metavar="ZONE",
        help="a public trace of spot nodes: the files of its zones, whose nodes are added up",
    )
    args = parser.parse_args()
    seeds = range(args.first, args.first + args.worlds)
    print("fleets: cost in times of the oracle's")
    if args.trace:
        for zones in args.trace:
            name, trace = place_of(zones), read_trace(zones)
            print(fleets_table((name, traced_world(seed, trace)) for seed in seeds), flush=True)
        return
    spells = list(SPELLS)
    print(fleets_table((spells[s % len(spells)], world_of(s)) for s in seeds), flush=True)
    for change in (1.0, 0.8):
        print(f"\npromises: 6 workers, speed times {change:g} from the middle on")
        print(promises_table(seeds, change), flush=True)
    print("\ncaps: in times of the true cost; dollars in times of the cap")
    print(caps_table(seeds))


if __name__ == "__main__":
    main()
