"""Compare the planner with fixed trees on easy and hard texts, in simulated seconds: python -m jobs.bench.mixed_texts

Texts, drafts and seconds are made up, so a run takes seconds and is equal on every machine. A text
is easy or hard: the probability that a drafter's likeliest token is right. The drafter's own
probabilities show only a part of that difference, as those of a head do.

    turns         easy and hard texts in random order, as many of each
    side by side  easy ones in the first half of the slots, hard ones in the other
    hard          hard texts alone
    easy          easy texts alone

One row a cell: plain decoding's tokens/s as 1, the best fixed tree, and the planner.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from eagle_ray.core.tree_bounds import NO_TREE, TreeBounds
from eagle_ray.methods.drafter import Draft
from eagle_ray.planner.budget_planner import BudgetPlanner
from eagle_ray.planner.cost_cache import CURVES
from eagle_ray.planner.cost_model import CostCurve, StepCosts
from eagle_ray.planner.planner import Planner, StepOutcome, UniformPlanner
from eagle_ray.tree.draft_tree import DraftTree
from eagle_ray.tree.expand import DraftPlan, TreeBuilder
from jobs.bench.simulated_costs import SimulatedPlanner, amx, cpu, flat

WORLDS = {"cpu": cpu, "flat": flat, "amx": amx}
BOUNDS = TreeBounds(16, 5, 3)
TREES = ("2/1/2", "2/2/1", "4/4/1", "6/3/2", "8/4/3")
EASY, HARD = 0.85, 0.15  # probability that the likeliest token is right
SPREAD = 0.1  # standard deviation of that probability from token to token
SHOWN = 0.5  # share of a text's difference from the mean that the drafter's probabilities show
MEAN = (EASY + HARD) / 2
LENGTHS = (48, 64, 96, 160)  # tokens of an answer
PROMPT_LENGTH = 60
NUM_IDS = 40  # token ids that the texts consist of


@dataclass(slots=True, eq=False)
class SimulatedText:
    """A sequence, as much of it as a planner reads.

    Attributes:
        chance: probability that the drafter's likeliest token is right.
        length: tokens of its answer.
        num_missed: tokens that the drafter has not read.
    """

    chance: float
    length: int
    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    num_missed: int = 0

    @property
    def remaining(self) -> int:
        return self.length - len(self.output_ids)


@dataclass
class SimulatedBatch:
    """As much of a DecodeBatch as a planner reads."""

    sequences: list[SimulatedText]
    num_prefill_rows: int = 0
    sampling: Sampling = field(default_factory=lambda: Sampling())

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def num_cached(self) -> int:
        return sum(len(s.prompt_ids) + len(s.output_ids) for s in self.sequences)

    @property
    def remaining_tokens(self) -> list[int]:
        return [s.remaining for s in self.sequences]

    @property
    def remaining_on_device(self) -> Tensor:
        return torch.tensor(self.remaining_tokens)


@dataclass
class Sampling:
    any_sampled: bool = False


class MixedTexts:
    """Slots that stay full of texts.

    Args:
        chances: returns the chance of the next text of a slot.
    """

    def __init__(self, size: int, chances: Callable[[int, random.Random], float], seed: int = 0):
        self._chances = chances
        self._draw = random.Random(seed)
        self._next_texts = random.Random(seed)
        self._noise = np.random.default_rng(seed)
        self.texts = [self._new_text(slot) for slot in range(size)]

    def run(self, planner: Planner, num_tokens: int) -> None:
        """Decode until the slots have produced as many tokens."""
        while num_tokens > 0:
            num_tokens -= self.step(planner)

    def step(self, planner: Planner) -> int:
        """Return the number of tokens of one step."""
        size = len(self.texts)
        batch = SimulatedBatch([*self.texts])
        plan = planner.plan(batch)
        draft, chances = self._draft(plan, batch)
        allocation = planner.allocate(draft, plan, batch)
        accepted = [0] * size
        if draft.depth:
            for i, text in enumerate(self.texts):
                path = self._accepted(draft.tree, allocation.keep, chances, i)
                accepted[i] = min(path, text.remaining - 1)

        outcome = StepOutcome(
            plan=plan,
            batch_size=size,
            num_cached=batch.num_cached,
            depth=len(draft.levels),
            num_catch_up=draft.num_catch_up,
            num_rows=allocation.num_rows,
            num_accepted=sum(accepted),
            num_prompt_tokens=0,
            seconds=None,
            num_expected_drafts=allocation.expected,
            sequences=batch.sequences,
            accepted_each=accepted,
            expected_each=allocation.expected_each,
        )
        planner.observe(outcome)
        for slot, (text, number) in enumerate(zip(self.texts, accepted, strict=True)):
            text.output_ids += self._draw.choices(range(NUM_IDS), k=1 + number)
            text.num_missed += 1 + number
            if text.remaining <= 0:
                self.texts[slot] = self._new_text(slot)
        return size + sum(accepted)

    def _new_text(self, slot: int) -> SimulatedText:
        draw = self._next_texts  # every planner gets the same texts
        prompt = draw.choices(range(NUM_IDS), k=PROMPT_LENGTH)
        return SimulatedText(self._chances(slot, draw), draw.choice(LENGTHS), prompt)

    def _draft(self, plan: DraftPlan, batch: SimulatedBatch) -> tuple[Draft, Float[Tensor, "B N"]]:
        """Return a draft, and the true probability of each node given its parent."""
        roots = torch.zeros(len(batch), dtype=torch.int64)
        if not plan.is_drafting:
            return Draft(Draft.empty(roots).tree, [], 0, 0), torch.ones(len(batch), 1)
        members = list(range(len(batch)) if plan.members is None else plan.members)
        builder = TreeBuilder(roots[members], plan.width)
        likeliest = torch.tensor([self.texts[i].chance for i in members])
        chances = [torch.ones(len(members), 1)]
        while builder.depth < plan.max_depth:
            if builder.depth and plan.should_stop and plan.should_stop(builder):
                break
            num_parents = builder.frontier().tokens.shape[1] if builder.depth else 1
            shape = len(members), num_parents
            noise = torch.from_numpy(self._noise.normal(0, SPREAD, shape)).float()
            true = (likeliest[:, None] + noise).clamp(0.02, 0.97)
            shown = SHOWN * true + (1 - SHOWN) * MEAN
            chances.append(_by_rank(true, plan.children).flatten(1))
            tokens = torch.arange(plan.children).expand(*shape, -1)
            builder.grow(_by_rank(shown, plan.children).log(), tokens)
        tree = builder.build()
        every = torch.cat(chances, 1)
        if plan.members is not None:
            index = torch.tensor(members)
            tree = tree.spread(index, roots)
            every = torch.zeros(len(batch), every.shape[1]).index_copy(0, index, every)
        num_missed = 0
        for i in members:
            num_missed += self.texts[i].num_missed
            self.texts[i].num_missed = 0
        return Draft(tree, builder.levels, builder.depth, num_missed), every

    def _accepted(self, tree: DraftTree, keep: Tensor, chances: Tensor, i: int) -> int:
        """Return the length of the path that the target takes among the kept nodes of one tree."""
        parents = tree.parents[i].tolist()
        kept = keep[i].tolist()
        probabilities = chances[i].tolist()
        at = 0
        length = 0
        while True:
            left = self._draw.random()
            following = None
            for node in range(at + 1, len(parents)):
                if parents[node] != at:
                    continue
                left -= probabilities[node]
                if left < 0:
                    following = node
                    break
            if following is None or not kept[following]:
                return length
            at = following
            length += 1


def _by_rank(likeliest: Float[Tensor, "M F"], count: int) -> Float[Tensor, "M F K"]:
    """Return the probabilities of `count` children: each takes the same share of what the ones before left."""
    return likeliest[:, :, None] * (1 - likeliest[:, :, None]) ** torch.arange(count)


def turns(slot: int, draw: random.Random) -> float:
    return draw.choice((EASY, HARD))


def side_by_side(size: int) -> Callable[[int, random.Random], float]:
    return lambda slot, draw: EASY if slot < size / 2 else HARD


def hard(slot: int, draw: random.Random) -> float:
    return HARD


def easy(slot: int, draw: random.Random) -> float:
    return EASY


def scaled(costs: StepCosts, **factors: float) -> StepCosts:
    """Return the costs with these curves times a factor, as a start may have measured them wrongly."""
    for name, factor in factors.items():
        curve = getattr(costs, name)
        setattr(costs, name, CostCurve(curve.rows, [factor * s for s in curve.seconds]))
    return costs


def rate(
    planner: Planner, costs: StepCosts, size: int, chances, seed: int, args
) -> SimulatedPlanner:
    """Return the planner after the run, whose tokens/s are exact."""
    priced = SimulatedPlanner(planner, costs, args.noise, seed)
    MixedTexts(size, chances, seed).run(priced, args.tokens * max(1, size // 4))
    return priced


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    print(
        "| world | texts | sequences | best fixed | over plain | planner over plain | by seed | probes |"
    )
    print("|---" * 8 + "|", flush=True)
    for world, size in itertools.product(args.world, args.batches):
        kinds = {"turns": turns, "side by side": side_by_side(size), "hard": hard, "easy": easy}
        if size == 1:
            del kinds["side by side"]
        for name, chances in kinds.items():
            if args.texts and name not in args.texts:
                continue
            ratios, fixed, probes = [], {tree: [] for tree in TREES}, 0
            for seed in args.seeds:
                costs = WORLDS[world]()
                plain = rate(UniformPlanner(NO_TREE), costs, size, chances, seed, args)
                base = plain.tokens_per_second
                for tree in TREES:
                    bounds = TreeBounds(*map(int, tree.split("/")))
                    done = rate(UniformPlanner(bounds), costs, size, chances, seed, args)
                    fixed[tree].append(done.tokens_per_second / base)
                wrong = dict.fromkeys(CURVES, 1.0) | {n: args.factor for n in args.wrong}
                believed = scaled(WORLDS[world](), **wrong)
                ours = rate(BudgetPlanner(BOUNDS, believed), costs, size, chances, seed, args)
                ratios.append(ours.tokens_per_second / base)
                probes += sum(o.plan.probe for o in ours.outcomes)
            means = {tree: sum(all_) / len(all_) for tree, all_ in fixed.items()}
            best = max(means, key=means.__getitem__)
            best_of = f"{best} {means[best]:.3f}" if means[best] > 1 else "none 1.000"
            label, ratio = best_of.split()
            mean = sum(ratios) / len(ratios)
            each = " ".join(f"{r:.3f}" for r in ratios)
            print(
                f"| {world} | {name} | {size} | {label} | {ratio} | {mean:.3f} | {each} | {probes} |",
                flush=True,
            )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", choices=WORLDS, nargs="+", default=["cpu"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--texts", nargs="*", default=[])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tokens", type=int, default=3000, help="at 1 to 7 sequences; more beyond")
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--wrong", choices=CURVES, nargs="*", default=[])
    parser.add_argument("--factor", type=float, default=1.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
