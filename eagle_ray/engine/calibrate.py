"""Measure the costs of a step's parts on this machine, by running steps of given sizes on the engine.

    costs = calibrate_costs(engine, TimeBudget(5.0))

The sequences are synthetic and discarded. Steps run in order of their importance until the time
budget is spent:

    1. one sequence: a plain step, one level, the widest draft, the largest tree; always run
    2. a few sizes of a tree, then batches of 8, 64, ... and of all slots, each step once
    3. after the first two of these batches, steps behind a long prompt
    4. steps 1 and 2 again, then all sizes in between, up to STEP_REPLAYS times

A cost is the lower quartile of its times. The curves interpolate between measured sizes, and the
planner corrects them with later steps (`planner/cost_model.py`).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from statistics import mean

from eagle_ray.core.counters import EngineCounters
from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.core.sequence import Sequence
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.scheduler import Scheduler
from eagle_ray.kv.block_manager import BLOCK_SIZE
from eagle_ray.methods.drafter import Draft
from eagle_ray.models.packed_linear import WARM_ROWS
from eagle_ray.planner.cost_model import BUCKETS, CostCurve, StepCosts
from eagle_ray.planner.planner import Allocation, StepOutcome
from eagle_ray.tree.expand import PLAIN_PLAN, DraftPlan

BUDGET_S = {
    "cpu": 5.0,  # a start of the 230M pair within 15 s on two idle cores; plans within 5 % of those by 45 s of steps
    "cuda": 20.0,  # steps take milliseconds; their graphs are recorded before
}
STEP_REPLAYS = 7
# Replays of a step behind a long prompt: as many as fit, 2 to STEP_REPLAYS of them.
CONTEXT_S = 0.25
SMALL_TREE = 4  # nodes of each sequence, root included
FIRST_TREE_SIZES = (4, 6, 8, 16, 32)  # nodes of one sequence's trees that are taken first
BATCH_STEP = 8  # from one batch size that is taken first to the next
CATCH_UP_TURNS = 3
# Larger passes are not measured where there are many slots: the curve's last line goes on.
MEASURED_ROWS_PER_SLOT = 4
CATCH_UP_STEPS = 7  # plain steps before a draft whose first pass is measured with much to catch up
SHORT_PROMPT = 2  # tokens
LONG_PROMPT = 512  # tokens
SHARED_PROMPT = 8 * BLOCK_SIZE + 1  # tokens: all but the last are in blocks that sequences share
# Sequences behind it: of 8 what a longer context costs once is a third of what is measured.
MAX_SHARED = 32
SHORT_OUTPUT = 48  # tokens of sequences that all slots must hold at once
MAX_DISTINCT = 32  # sequences whose long prompts are computed one by one: the first of them has not ended by then
MIN_S = 1e-6


@dataclass(frozen=True, slots=True)
class CalibrationSetting:
    """The sizes of a step to measure: `num_nodes` nodes of each of `batch_size` sequences are verified, roots included.

    Attributes:
        width, depth: width and depth of the draft.
        num_rows: minimum rows of the pass; rows past the nodes are padding.
    """

    batch_size: int
    num_nodes: int
    width: int
    depth: int
    num_rows: int = 0


class ScriptedPlanner:
    """A planner that plans the step set by its caller and stores its outcome. A smaller draft is
    padded to the set size.

    Args:
        num_children: children drafted per node; None is the draft's width.
        lookups_only: value of that field in every plan that drafts.
    """

    will_draft = True

    def __init__(self, num_children: int | None = None, lookups_only: bool = False) -> None:
        self._num_children = num_children
        self._lookups_only = lookups_only
        self.setting = CalibrationSetting(1, 1, 0, 0)
        self.outcome: StepOutcome | None = None

    def plan(self, batch: DecodeBatch) -> DraftPlan:
        setting = self.setting
        if not setting.depth:
            return PLAIN_PLAN
        return DraftPlan(
            setting.depth,
            setting.width,
            num_children=self._num_children,
            lookups_only=self._lookups_only,
        )

    def allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        allocation = Allocation.uniform(draft, self.setting.num_nodes)
        setting = self.setting
        return replace(allocation, num_rows=max(len(batch) * setting.num_nodes, setting.num_rows))

    def observe(self, outcome: StepOutcome) -> None:
        self.outcome = outcome


class TimeBudget:
    """Seconds that measuring may take, counted from construction.

    Args:
        clock: returns seconds; tests pass their own.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self.seconds = seconds
        self._clock = clock
        self._ends_at = clock() + seconds

    @property
    def is_spent(self) -> bool:
        return self._clock() >= self._ends_at


def calibrate_costs(engine: Engine, budget: TimeBudget | None = None) -> StepCosts:
    """Return the costs of an idle engine's steps, up to its largest trees for every slot.

    The engine is left idle, with its counters unchanged.

    Args:
        budget: time limit; None is the device's BUDGET_S. The four steps that every curve needs
            always run, and at most three steps exceed the limit.
    """
    device = engine.target.device.type
    budget = budget or TimeBudget(BUDGET_S[device])
    with calibration_mode(engine, scripted_planner(engine), has_distinct_prompts(engine)) as bench:
        widths = partial(engine.graphs.level_widths, engine.bounds.top_k) if engine.graphs else None
        sizes = CalibrationSizes(bench.num_slots, engine.bounds, device, widths)
        bench.run(sizes.needed())
        batches = sizes.batches()
        bench.run([*sizes.trees(), *chain(*batches[:2])], budget)
        if not budget.is_spent:
            bench.run_contexts(sizes.small_tree, budget)
        bench.run(chain(*batches[2:]), budget)
        bench.run([*sizes.needed(), *sizes.trees(), *chain(*batches)], budget)
        bench.run(sizes.all(), budget)
        return bench.costs()


def warm_up(engine: Engine) -> None:
    """Run an idle engine's first steps, plain and with drafts, so that one-time work is done before requests arrive."""
    with calibration_mode(engine, scripted_planner(engine)) as bench:
        bench.run_step(CalibrationSetting(1, 1, 0, 0))
        if engine.num_spec_tokens:
            bench.run_step(CalibrationSetting(1, 2, 1, 1))


def scripted_planner(engine: Engine) -> ScriptedPlanner:
    """Return a ScriptedPlanner whose drafts replay the engine's graphs, with top_k children per node.

    Its plans ask for lookups alone if the drafter has no model.
    """
    drafter = engine.drafter
    return ScriptedPlanner(
        engine.bounds.top_k if engine.graphs else None,
        drafter.has_lookups and not drafter.has_model,
    )


@contextmanager
def calibration_mode(
    engine: Engine, set_planner: ScriptedPlanner, distinct_prompts: bool = False
) -> Iterator[CalibrationRun]:
    """Open a context for scripted steps on an idle engine. Afterwards it is idle, with its counters
    and drafter unchanged.

    Args:
        distinct_prompts: as for CalibrationRun.
    """
    assert not engine.has_work, "an engine at work cannot be measured"
    planner = engine.planner
    counters = engine.counters
    overlap = engine.overlap
    engine.planner = set_planner
    engine.counters = EngineCounters(counters.num_slots)
    engine.overlap = False
    bench = CalibrationRun(engine, set_planner, distinct_prompts)
    try:
        yield bench
    finally:
        bench.clear()
        engine.reset_learning()
        engine.planner = planner
        engine.counters = counters
        engine.overlap = overlap


@dataclass(frozen=True, slots=True)
class CalibrationSizes:
    """The steps to measure for an engine with num_slots slots and trees within the given bounds.

    Attributes:
        widths: returns the widths of replayed draft levels for a number of sequences, the widest
            last. None if levels are not replayed, so that a level costs what its rows cost.
    """

    num_slots: int
    bounds: TreeBounds
    device: str
    widths: Callable[[int], list[int]] | None = None

    def needed(self) -> list[CalibrationSetting]:
        """Return the steps with one sequence that every curve needs."""
        return [*self._steps_of(1), *self._trees_of(1, self._nodes_of(1)[-1:])]

    def trees(self) -> list[CalibrationSetting]:
        """Return further tree sizes to measure with one sequence."""
        return self._trees_of(1, [n for n in FIRST_TREE_SIZES if n in self._nodes_of(1)[:-1]])

    def batches(self) -> list[list[CalibrationSetting]]:
        """Return the steps of batch sizes BATCH_STEP times apart, up to all slots, as one list per batch size.

        With one slot there is one empty list. The widest drafts of one batch size show the cost of
        a level by its rows; those of larger batches would take too long. A replayed level is
        measured at the width of its recording.
        """
        sizes = []
        size = BATCH_STEP
        while size < self.num_slots:
            sizes.append(size)
            size *= BATCH_STEP
        sizes += [self.num_slots] if self.num_slots > 1 else []

        batches: list[list[CalibrationSetting]] = []
        for size in sizes:
            steps = self._steps_of(size) if not batches else self._steps_of(size)[:-1]
            batches.append(
                [
                    *steps,
                    *self._trees_of(
                        size, [SMALL_TREE] if self.bounds.num_nodes >= SMALL_TREE else []
                    ),
                ]
            )
        return batches or [[]]

    def all(self) -> Iterator[CalibrationSetting]:
        """Yield all steps by batch size: a plain step, one level, wider drafts, a small tree, and
        trees of more and more rows.

        A batch size is repeated before the next one begins, since new sequences have to compute
        their prompts.
        """
        largest_rows = 0
        for size in [
            *(n for n in BUCKETS if n < self.num_slots and n & (n - 1) == 0),
            self.num_slots,
        ]:
            nodes = [n for n in self._nodes_of(size) if n == SMALL_TREE or n * size > largest_rows]
            steps = [*self._steps_of(size), *self._trees_of(size, nodes)]
            largest_rows = max(largest_rows, *(step.batch_size * step.num_nodes for step in steps))
            for turn in range(STEP_REPLAYS):
                yield from steps
                if turn < CATCH_UP_TURNS:
                    yield from [steps[0]] * catch_up_steps(size, self.device, self.bounds.max_depth)
                    yield steps[1]

    @property
    def small_tree(self) -> CalibrationSetting:
        """Return the step with small trees that measures the cost of long contexts for several rows per sequence."""
        num_nodes = min(SMALL_TREE, self.bounds.num_nodes) if self.bounds.max_depth > 1 else 2
        return CalibrationSetting(
            self.num_slots, num_nodes, min(2, self.bounds.top_k), min(2, self.bounds.max_depth)
        )

    def _steps_of(self, size: int) -> list[CalibrationSetting]:
        """Return a plain step, one level, drafts of every width that is replayed, and the widest one."""
        narrow = [] if self.widths is None else self.widths(size)[:-1]
        widths = [*narrow, self.bounds.top_k]
        drafts = [
            CalibrationSetting(size, 2, width, min(2, self.bounds.max_depth)) for width in widths
        ]
        return [CalibrationSetting(size, 1, 0, 0), CalibrationSetting(size, 2, 1, 1), *drafts]

    def _nodes_of(self, size: int) -> list[int]:
        """Return the sizes of one sequence's tree for this batch size, root included."""
        limit = max_rows(self.num_slots, self.bounds.max_nodes)
        nodes = [n for n in BUCKETS if 1 < n <= self.bounds.num_nodes and self._width_of(n)]
        return [n for n in nodes if n == SMALL_TREE or n * size <= limit]

    def _trees_of(self, size: int, nodes: Iterable[int]) -> list[CalibrationSetting]:
        return [
            CalibrationSetting(size, n, self._width_of(n), min(2, self.bounds.max_depth))
            for n in nodes
        ]

    def _width_of(self, num_nodes: int) -> int:
        """Return the least width with which a draft of two levels has num_nodes nodes, root included, or 0."""
        below = min(2, self.bounds.max_depth) - 1
        return next(
            (w for w in range(1, self.bounds.top_k + 1) if w + below * w**2 >= num_nodes - 1), 0
        )


def max_rows(num_slots: int, max_nodes: int) -> int:
    """Return the number of rows of the largest pass to measure."""
    return max(MEASURED_ROWS_PER_SLOT * num_slots, 1 + max_nodes)


def max_concurrent(scheduler: Scheduler, length: int) -> int:
    """Return how many measured sequences with distinct prompts of this length can run at once."""
    return max(scheduler.max_concurrent(length + SHORT_OUTPUT), 1)


def context_sizes(scheduler: Scheduler, distinct_prompts: bool) -> tuple[int, int]:
    """Return the tokens of a long prompt, and how many sequences at most are measured with such prompts.

    Args:
        distinct_prompts: as for CalibrationRun.
    """
    wanted = LONG_PROMPT if distinct_prompts else SHARED_PROMPT
    length = max(min(wanted, scheduler.max_solo_length - SHORT_OUTPUT), SHORT_PROMPT)
    return length, min(
        max_concurrent(scheduler, length), MAX_DISTINCT if distinct_prompts else MAX_SHARED
    )


def measured_sizes(engine: Engine) -> dict[str, int]:
    """Return the sizes to measure on this engine. They are equal for all KV caches that are large enough."""
    length, behind_context = context_sizes(engine.scheduler, has_distinct_prompts(engine))
    short = max_concurrent(engine.scheduler, SHORT_PROMPT)
    return {"sequences": short, "context": length, "behind_context": behind_context}


def has_distinct_prompts(engine: Engine) -> bool:
    """Return whether measured sequences need distinct prompts. On a GPU they do, since it would
    reuse a shared prompt's cache."""
    return engine.target.device.type == "cuda"


def catch_up_steps(batch_size: int, device: str, max_depth: int) -> int:
    """Return how many plain steps to run before a draft, so that the draft first reads the tokens of these steps.

    The time of reading them is measured, too. On a CPU that pass must have at most WARM_ROWS rows:
    a larger one compiles a kernel, which distorts its time. On a GPU no more tokens may wait than a
    replayed draft reads, because an extra pass would read the others.
    """
    limit = WARM_ROWS // batch_size - 2 if device == "cpu" else max_depth - 2
    return max(min(CATCH_UP_STEPS, limit), 1)


class CalibrationRun:
    """An engine with synthetic sequences, and the seconds measured so far, by rows.

    Args:
        planner: the engine's planner.
        distinct_prompts: whether every sequence gets a long prompt of its own, and so its own KV
            blocks. Short prompts always differ.

    Attributes:
        temperature: temperature of new sequences.
        num_slots: sequences that can run at once with short prompts.
    """

    def __init__(self, engine: Engine, planner: ScriptedPlanner, distinct_prompts: bool = False):
        self._engine = engine
        self._planner = planner
        self._distinct_prompts = distinct_prompts
        self._num_added = 0
        self.temperature = 0.0
        self.num_slots = self.max_concurrent(SHORT_PROMPT)
        self._running: list[Sequence] = []
        self._context_steps: list[CalibrationSetting] = []  # a plain step and one with trees
        # Behind short prompts, by setting.
        self._shallow: dict[CalibrationSetting, list[StepOutcome]] = defaultdict(list)
        # Behind long ones.
        self._deep: dict[CalibrationSetting, list[StepOutcome]] = defaultdict(list)
        # By rows and sequences.
        self._verify: dict[tuple[int, int], list[float]] = defaultdict(list)
        self._read: dict[int, list[StepOutcome]] = defaultdict(list)
        self._level: dict[int, list[StepOutcome]] = defaultdict(list)
        self._overhead: dict[bool, dict[int, list[float]]] = {
            True: defaultdict(list),
            False: defaultdict(list),
        }

    def max_concurrent(self, length: int) -> int:
        """Return how many sequences with distinct prompts of this length can run at once."""
        return max_concurrent(self._engine.scheduler, length)

    def run(self, settings: Iterable[CalibrationSetting], budget: TimeBudget | None = None) -> None:
        """Run the steps in order until the budget is spent. Without a budget run all of them."""
        for setting in settings:
            if budget is not None and budget.is_spent:
                return
            self._record(setting, self.run_step(setting))

    def run_contexts(self, tree: CalibrationSetting, budget: TimeBudget) -> None:
        """Run steps with long prompts; those with several rows per sequence only while the budget lasts.

        On a CPU all sequences share one prompt, computed once, but each sequence reads its blocks
        again. A GPU would find shared blocks in its cache, so there each sequence has its own
        prompt, and fewer sequences run if they do not fit.

        Args:
            tree: sizes of these steps; the batch size is lowered if fewer long prompts fit.
        """
        length, limit = context_sizes(self._engine.scheduler, self._distinct_prompts)
        batch_size = min(tree.batch_size, limit)
        self._context_steps = [
            CalibrationSetting(batch_size, 1, 0, 0),
            replace(tree, batch_size=batch_size),
        ]
        plain, tree = self._context_steps
        # The machine may have been busier before.
        for step in [plain] if tree in self._shallow else [plain, tree]:
            for outcome in self._repeat(step, SHORT_PROMPT, budget):
                self._record(step, outcome)
        self.clear()
        self.run_step(CalibrationSetting(1, 1, 0, 0), length)
        for step in self._context_steps:
            self._deep[step] = self._repeat(step, length, budget)
        self.clear()

    def _repeat(
        self, step: CalibrationSetting, length: int, budget: TimeBudget
    ) -> list[StepOutcome]:
        """Repeat the step as often as fits into CONTEXT_S. If the budget is spent, run a plain step
        once and a tree not at all.
        """
        outcomes: list[StepOutcome] = []
        replays = 1
        while len(outcomes) < replays:
            if budget.is_spent and (outcomes or step.num_nodes > 1):
                break
            outcomes.append(self.run_step(step, length))
            replays = min(max(int(CONTEXT_S / outcomes[0].seconds.total), 2), STEP_REPLAYS)
        return outcomes

    def _record(self, setting: CalibrationSetting, outcome: StepOutcome) -> None:
        self._shallow[setting].append(outcome)
        self._verify[outcome.num_rows, outcome.batch_size].append(outcome.seconds.verify)
        self._overhead[setting.depth > 0][setting.batch_size].append(outcome.seconds.overhead)
        if not setting.depth or outcome.caught_up_before:
            return
        if min(setting.depth, outcome.depth) > 1:
            self._level[outcome.level_rows].append(outcome)
        else:  # one level was asked for, though a block of several was drafted in one pass, or no more was offered
            self._read[bisect_left(BUCKETS, outcome.pair_rows)].append(outcome)

    def costs(self) -> StepCosts:
        """Return the measured cost curves. Without `run_contexts`, cached tokens cost nothing until
        later steps correct that."""
        attend, attend_row = self._contexts()
        each = seconds_per_sequence(self._verify)
        read = self._read_curve()
        plain_rest, draft_rest = (_curve(self._overhead[drafted]) for drafted in (False, True))
        verify = self._verify_curve(each)
        level = self._level_curve(read)
        return StepCosts(verify, attend, read, level, plain_rest, draft_rest, attend_row, each)

    def _level_curve(self, read: CostCurve) -> CostCurve:
        """Return the seconds of a further level: a draft's time after its first pass. One-level drafts have none."""
        level = {}
        for rows, outcomes in self._level.items():
            level[rows] = [(o.seconds.draft - read(o.pair_rows)) / (o.depth - 1) for o in outcomes]
        return _curve(level) if level else read

    def _verify_curve(self, each: float) -> CostCurve:
        """Return the seconds of a pass by rows, without the part that each sequence adds."""
        seconds: defaultdict[int, list[float]] = defaultdict(list)
        for (rows, batch_size), times in self._verify.items():
            seconds[rows] += [s - each * batch_size for s in times]
        return _curve(seconds)

    def _read_curve(self) -> CostCurve:
        """Return the seconds of catching up by rows, bucket by bucket at their mean number."""
        seconds = {}
        for outcomes in self._read.values():
            rows = round(mean(o.pair_rows for o in outcomes))
            seconds[rows] = [o.seconds.draft for o in outcomes]
        return _curve(seconds)

    def clear(self) -> None:
        for sequence in self._running:
            self._engine.abort(sequence)
        self._running = []

    def _contexts(self) -> tuple[float, float]:
        """Return the seconds for each cached token, and for each with each row of its sequence beyond the first."""
        if not self._context_steps:
            return 0.0, 0.0
        plain, tree = self._context_steps
        attend = self._per_token(plain)
        if not self._deep[tree]:
            return attend, 0.0
        return attend, max(self._per_token(tree) - attend, 0.0) / (tree.num_nodes - 1)

    def _per_token(self, step: CalibrationSetting) -> float:
        """Return the seconds for each cached token in passes of this step, from long prompts against short ones."""
        seconds = []
        num_cached = []
        for outcomes in (self._deep[step], self._shallow[step]):
            seconds.append(_lower_quartile([o.seconds.verify for o in outcomes]))
            num_cached.append(mean(o.num_cached for o in outcomes))
        return max(seconds[0] - seconds[1], 0.0) / max(num_cached[0] - num_cached[1], 1)

    def run_step(self, setting: CalibrationSetting, length: int = SHORT_PROMPT) -> StepOutcome:
        """Run one step of exactly setting.batch_size sequences; new ones get prompts of this length."""
        while True:
            self._running = [s for s in self._running if s.finish_reason is None]
            for sequence in self._running[setting.batch_size :]:
                self._engine.abort(sequence)
            del self._running[setting.batch_size :]
            while len(self._running) < setting.batch_size:
                self._add(length)
            self._planner.setting = setting
            self._planner.outcome = None
            self._engine.step()
            if error := self._engine.counters.planner_error:
                raise RuntimeError(f"the planner failed in a measured step: {error}")
            outcome = self._planner.outcome
            if (
                outcome is not None
                and outcome.batch_size == setting.batch_size
                and not outcome.is_first
            ):
                return outcome

    def _add(self, length: int) -> None:
        self._num_added += 1
        limit = self._engine.max_model_len
        length = max(min(length, max(limit // 2, limit - SHORT_OUTPUT)), 1)
        # Rows of one text would choose the same experts.
        is_own = self._distinct_prompts or length <= SHORT_PROMPT
        first = self._num_added if is_own else 0
        prompt = [(first + 7 * i) % self._engine.target.vocab_size for i in range(length)]
        params = SamplingSettings(
            temperature=self.temperature, max_tokens=SHORT_OUTPUT, ignore_eos=True
        )
        sequence = Sequence(f"measure-{self._num_added}", prompt, params)
        self._engine.add(sequence)
        self._running.append(sequence)


def _curve(seconds: dict[int, list[float]]) -> CostCurve:
    rows = sorted(seconds)
    return CostCurve(rows, [max(_lower_quartile(seconds[n]), MIN_S) for n in rows])


def seconds_per_sequence(seconds: dict[tuple[int, int], list[float]]) -> float:
    """Return the seconds that one more sequence adds to a pass of equal rows: least squares over
    pairs of batch sizes.
    """
    typical = {size: _lower_quartile(times) for size, times in seconds.items()}
    pairs = [
        (b - a, typical[n, b] - typical[n, a])
        for n, a in typical
        for other, b in typical
        if other == n and b > a
    ]
    return max(sum(more * s for more, s in pairs) / max(sum(more**2 for more, _ in pairs), 1), 0.0)


def _lower_quartile(seconds: list[float]) -> float:
    """Return the lower quartile: other work on the machine only makes a step longer."""
    return sorted(seconds)[len(seconds) // 4]
