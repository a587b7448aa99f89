"""Harness: one pair in memory with two engines over the same cache, one that decodes plainly and one that drafts.

    rig = Harness.of(model, head, slots=256, longest=1440, kv_columns=500_000)
    rig.measure()
    rig.set_aside(256 * 1024, longest=1440)
    engine = rig.engine(Way("ours", (60, 6, 10), "global"), context=1024, batch=64)

Only one of the engines may be at work at a time. It is built from the engine's own parts, without a configuration:
nothing here needs pydantic or Ray.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import nn

from eagle_ray.core.sequence import Sequence
from eagle_ray.core.tree_bounds import NO_TREE, TreeBounds
from eagle_ray.engine.calibrate import calibrate_costs
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.graph_warmup import capture, capture_fixed
from eagle_ray.evaluation.timing import RecordingPlanner
from eagle_ray.methods.calibration import Calibration
from eagle_ray.methods.coupling import Coupling
from eagle_ray.methods.drafter import Drafter, NullDrafter
from eagle_ray.methods.eagle.drafter import EagleDrafter
from eagle_ray.models.graphs import CudaGraphRunner
from eagle_ray.models.target import TargetModel
from eagle_ray.planner.budget_planner import BudgetPlanner
from eagle_ray.planner.cost_model import StepCosts
from eagle_ray.planner.planner import Planner, UniformPlanner
from eagle_ray.requests.parameters import SamplingParams
from jobs.bench.gpu.synthetic_context import ContextBlocks, begin, fill, in_context

LARGEST = TreeBounds(60, 6, 10)
SHORT_PROMPT = 8  # tokens
STEPS = SamplingParams(max_tokens=24, ignore_eos=True)  # of what a context costs
PREFILL_TOKENS = {"cpu": 512, "cuda": 4096}  # a step: a window begins sooner, and prompts are not part of it


@dataclass(frozen=True, slots=True)
class Way:
    """name: as it stands in tables. budget: global, or uniform for the same tree for everyone; NO_TREE is plain.

    overlap: where steps are replayed, the next one is launched before one is read.
    """

    name: str
    tree: TreeBounds = NO_TREE
    budget: str = "uniform"
    overlap: bool = True

    @property
    def is_plain(self) -> bool:
        return self.tree == NO_TREE


@dataclass(slots=True)
class Harness:
    """costs: of its steps, once they are measured."""

    model: nn.Module
    blocks: ContextBlocks
    plain: Engine
    drafting: Engine
    costs: StepCosts | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        head: nn.Module,
        slots: int,
        longest: int,
        kv_columns: int | None = None,
        graphs: bool = True,
    ) -> Harness:
        """longest: most tokens of a sequence. kv_columns: of the pool, in all; None lets every slot be full."""
        target = TargetModel(model, slots, longest + LARGEST.num_positions, kv_columns)
        blocks = ContextBlocks.in_place_of(target)
        depth = LARGEST.max_depth
        drafter = EagleDrafter(
            head, target, calibration=Calibration(depth, target.device), coupling=Coupling(depth, target.device)
        )
        plain = _engine(target, NullDrafter(), NO_TREE, longest, graphs)
        drafting = _engine(target, drafter, LARGEST, longest, graphs)
        return cls(model, blocks, plain, drafting)

    def measure(self) -> StepCosts:
        """Of this pair's steps here, before anything is set aside.

        Their graphs are captured first, as at a job's start: else captures use up the time that measuring has.
        """
        if self.drafting.graphs is not None and self.drafting.target.device.type == "cuda":
            capture(self.drafting)
            capture_fixed(self.plain)
        self.costs = calibrate_costs(self.drafting)
        return self.costs

    def set_aside(self, columns: int, longest: int) -> None:
        """Room for contexts. longest: the last position of any sequence."""
        self.blocks.set_aside(columns)
        frequency = self.model.base_model.rotary_emb.inv_freq[-1].item()
        for cache in (self.plain.target.cache, self.drafting.drafter.cache):
            fill(cache, self.blocks.blocks_for(columns), frequency, longest)

    def measure_contexts(self, columns: int, batch: int) -> None:
        """What a cached token adds to a pass behind contexts as long as the cells': `measure` reads short ones,
        which on a CPU are the same for all sequences.
        """
        seconds, cached = [], []
        for context in (0, columns):
            engine = self.engine(Way("plain"), context, batch)
            prompt = in_context([1] * SHORT_PROMPT, context)
            sequences = [Sequence(str(i), prompt, STEPS) for i in range(batch)]
            for sequence in sequences:
                engine.add(sequence)
            while any(len(s.output_ids) < 4 for s in sequences):  # all are there, and everything has run once
                engine.step()
            before, steps = engine.planner.verify_s, engine.counters.num_steps
            while all(s.finish_reason is None for s in sequences):
                engine.step()
            seconds.append((engine.planner.verify_s - before) / (engine.counters.num_steps - steps))
            cached.append(batch * context)
            for sequence in sequences:
                engine.abort(sequence)
        self.costs.attention_per_token = max(seconds[1] - seconds[0], 0.0) / cached[1]

    def engine(self, way: Way, context: int, batch: int, planner: Planner | None = None) -> Engine:
        """The idle engine of a way, its next sequences behind contexts. planner: one that has seen this cell before."""
        engine = self.plain if way.is_plain else self.drafting
        begin(engine, self.blocks, context, batch)
        engine.overlap = way.overlap
        engine.planner = planner or self.planner(way)
        return engine

    def planner(self, way: Way) -> RecordingPlanner:
        costs = copy.deepcopy(self.costs)
        if way.budget == "global":
            graphs = self.drafting.graphs
            can_sync = self.drafting.target.device.type == "cpu" and graphs is None
            sizes = graphs.pass_sizes(way.tree) if graphs else None
            return RecordingPlanner(BudgetPlanner(way.tree, costs, can_sync, sizes), costs)
        return RecordingPlanner(UniformPlanner(way.tree), costs)

    @property
    def num_captured(self) -> int:
        """Graphs recorded so far."""
        return sum(engine.graphs.num_captured for engine in (self.plain, self.drafting) if engine.graphs)


def _engine(target: TargetModel, drafter: Drafter, tree: TreeBounds, longest: int, graphs: bool) -> Engine:
    tokens, made = PREFILL_TOKENS[target.device.type], CudaGraphRunner.of(target) if graphs else None
    return Engine(target, drafter, UniformPlanner(tree), longest, tree, tokens, made)
