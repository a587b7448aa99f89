"""Measuring what the parts of a step cost on this machine, by taking real steps of set sizes with the engine itself.

    costs = measure(engine, max_nodes=60, max_depth=6, top_k=10)

The sequences are made up and forgotten. Every size is run REPLAYS times, fewer where one step is long, in turn with
the others, and the lower quartile of its times taken. Does not know how the costs will be used.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import mean

from eagle_ray.drafting.drafter import Draft
from eagle_ray.engine.costs import BUCKETS, CostCurve, StepCosts
from eagle_ray.engine.counters import EngineCounters
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.planner import Allocation, Outcome, Planner
from eagle_ray.engine.scheduler import Batch
from eagle_ray.engine.sequence import Sequence
from eagle_ray.models.linear import READY_ROWS
from eagle_ray.speculative.plan import PLAIN, Plan
from eagle_ray.speculative.sampling import SamplingParams

REPLAYS = 7
SMALL_TREE = 3  # nodes of each sequence, root included
LONG_S = 0.25  # a step this long is replayed LONG_REPLAYS times
LONG_REPLAYS = 3
ROWS_PER_SLOT = 4  # larger passes are not measured where there are many slots: the curve's last line goes on
BACKLOG = 7  # plain steps before a draft whose first pass is measured with much to catch up
SHORT_PROMPT, LONG_PROMPT = 8, 512  # tokens
SHORT_OUTPUT = 48  # tokens of sequences that all slots must hold at once
MOST_APART = 32  # sequences whose long prompts are computed one by one: the first of them has not ended by then
LEAST_S = 1e-6


@dataclass(frozen=True, slots=True)
class Setting:
    """num_nodes of each of batch_size sequences are verified, roots included; width and depth of what is drafted.

    num_rows: of the pass, at least; more than the nodes are padding.
    """

    batch_size: int
    num_nodes: int
    width: int
    depth: int
    num_rows: int = 0


class SetPlanner:
    """Does what it is set to, and keeps what came of it. Where less is offered, the pass is padded to its set size.

    num_children: drawn of each node; None is as many as the draft is wide.
    """

    drafting = True

    def __init__(self, num_children: int | None = None) -> None:
        self._num_children = num_children
        self.setting = Setting(1, 1, 0, 0)
        self.outcome: Outcome | None = None

    def plan(self, batch: Batch) -> Plan:
        setting = self.setting
        return Plan(setting.depth, setting.width, num_children=self._num_children) if setting.depth else PLAIN

    def allocate(self, draft: Draft, plan: Plan, batch: Batch) -> Allocation:
        allocation, setting = Allocation.uniform(draft, self.setting.num_nodes), self.setting
        return replace(allocation, num_rows=max(len(batch) * setting.num_nodes, setting.num_rows))

    def learn(self, outcome: Outcome) -> None:
        self.outcome = outcome


class AsAlways(SetPlanner):
    """Does what a planner does that always does the same, for as many sequences as is set."""

    def __init__(self, planner: Planner) -> None:
        super().__init__()
        self._always = planner

    def plan(self, batch: Batch) -> Plan:
        return self._always.plan(batch)

    def allocate(self, draft: Draft, plan: Plan, batch: Batch) -> Allocation:
        return self._always.allocate(draft, plan, batch)


def measure(engine: Engine, max_nodes: int, max_depth: int, top_k: int) -> StepCosts:
    """The costs of an idle engine's steps, up to trees of max_nodes nodes for every slot. Leaves it idle, uncounted."""
    with at_bench(engine, as_replayed(engine, top_k), apart=engine.target.device.type == "cuda") as bench:
        for settings in _rounds(bench.num_slots, max_nodes, max_depth, top_k):
            bench.run(settings)
        num_nodes = min(SMALL_TREE, 1 + max_nodes) if max_depth > 1 else 2
        return bench.costs(Setting(bench.num_slots, num_nodes, min(2, top_k), min(2, max_depth)))


def warm_up(engine: Engine, top_k: int) -> None:
    """An idle engine's first steps, plain and with drafts: what is made once is made before anybody waits for it."""
    with at_bench(engine, as_replayed(engine, top_k)) as bench:
        bench.take(Setting(1, 1, 0, 0))
        if engine.num_spec_tokens:
            bench.take(Setting(1, 2, 1, 1))


def as_replayed(engine: Engine, top_k: int) -> SetPlanner:
    """Where drafts are replayed they are recorded as they will be asked for: with top_k children of a node."""
    return SetPlanner(top_k if engine.graphs else None)


@contextmanager
def at_bench(engine: Engine, set_planner: SetPlanner, apart: bool = False) -> Iterator[Bench]:
    """An idle engine that takes made-up steps, one by one; it is left idle and uncounted, and has learnt nothing.

    apart: as for Bench.
    """
    assert not engine.has_work, "an engine at work cannot be measured"
    planner, counters, overlap = engine.planner, engine.counters, engine.overlap
    engine.planner, engine.counters, engine.overlap = set_planner, EngineCounters(counters.num_slots), False
    bench = Bench(engine, apart)
    yield bench
    bench.clear()
    engine.drafter.forget()
    engine.planner, engine.counters, engine.overlap = planner, counters, overlap


def _rounds(num_slots: int, max_nodes: int, max_depth: int, top_k: int) -> Iterator[list[Setting]]:
    """For each batch size: a plain step, one level, the widest level, a small tree, and trees of ever more rows."""
    depth, limit = min(2, max_depth), most_rows_of(num_slots, max_nodes)
    most_rows = 0
    for batch_size in [*(n for n in BUCKETS if n < num_slots and n & (n - 1) == 0), num_slots]:
        trees = [Setting(batch_size, 1, 0, 0), Setting(batch_size, 2, 1, 1), Setting(batch_size, 2, top_k, depth)]
        for n in BUCKETS:
            width = next((w for w in range(1, top_k + 1) if w + (depth - 1) * w**2 >= n - 1), 0)
            new = most_rows < batch_size * n <= limit
            if 1 < n <= 1 + max_nodes and width and (n == 4 or new):
                trees.append(Setting(batch_size, n, width, depth))
        most_rows = max(most_rows, *(tree.batch_size * tree.num_nodes for tree in trees))
        yield trees


def most_rows_of(num_slots: int, max_nodes: int) -> int:
    """The largest pass that is measured."""
    return max(ROWS_PER_SLOT * num_slots, 1 + max_nodes)


def backlog(batch_size: int, device: str) -> int:
    """Plain steps before a draft that catches up. A CPU would compile a kernel for a pass of more than READY_ROWS, and
    its time say little: what the steps leave, and the draft before them, has to fit.
    """
    return max(min(BACKLOG, READY_ROWS // batch_size - 2), 1) if device == "cpu" else BACKLOG


class Bench:
    """An engine, made-up sequences to keep it busy, and the seconds seen so far, by rows.

    apart: every sequence has a prompt of its own, and so its own blocks. temperature: of the sequences to come.
    num_slots: how many of them can run at once, behind short prompts.
    """

    def __init__(self, engine: Engine, apart: bool = False):
        self._engine, self._planner, self._apart = engine, engine.planner, apart
        self._num_added, self.temperature = 0, 0.0
        self.num_slots = self.num_together(SHORT_PROMPT)
        self._running: list[Sequence] = []
        self._verify: dict[tuple[int, int], list[float]] = defaultdict(list)  # by rows and sequences
        self._read: dict[int, list[Outcome]] = defaultdict(list)
        self._level: dict[int, list[Outcome]] = defaultdict(list)
        self._rest: dict[bool, dict[int, list[float]]] = {True: defaultdict(list), False: defaultdict(list)}

    def num_together(self, length: int) -> int:
        """How many sequences can run at once behind prompts of this length, whose blocks are each one's own."""
        return max(self._engine.scheduler.num_together(length + SHORT_OUTPUT), 1)

    def run(self, settings: list[Setting]) -> None:
        """Replay steps of some sizes, by turns, so that a busy moment of the machine hits none of them alone."""
        first = [self.take(setting) for setting in settings]  # pays for what is made once
        replays = REPLAYS if max(o.seconds.total for o in first) < LONG_S else LONG_REPLAYS
        for turn in range(replays):
            for setting in settings:
                self._note(setting, self.take(setting))
            if turn < LONG_REPLAYS:
                self._run_backlog(settings[0])

    def _run_backlog(self, plain: Setting) -> None:
        for _ in range(backlog(plain.batch_size, self._engine.target.device.type)):
            self._note(plain, self.take(plain))
        shallow = Setting(plain.batch_size, 2, 1, 1)
        self._note(shallow, self.take(shallow))

    def _note(self, setting: Setting, outcome: Outcome) -> None:
        self._verify[outcome.num_rows, outcome.batch_size].append(outcome.seconds.verify)
        self._rest[setting.depth > 0][setting.batch_size].append(outcome.seconds.rest)
        if outcome.depth > 1:
            self._level[setting.batch_size * setting.width].append(outcome)
        elif setting.depth:  # one level was asked for, or no more was offered
            self._read[bisect_left(BUCKETS, outcome.num_caught_up)].append(outcome)

    def costs(self, tree: Setting) -> StepCosts:
        """tree: a small one, by which contexts of more than one row for each sequence are measured."""
        each, read, level = added_by_each(self._verify), self._read_curve(), defaultdict(list)
        for rows, outcomes in self._level.items():
            level[rows] = [(o.seconds.draft - read(o.num_caught_up)) / (o.depth - 1) for o in outcomes]
        level = _curve(level) if level else read  # drafts of one level have no further ones to price
        plain_rest, draft_rest = (_curve(self._rest[drafted]) for drafted in (False, True))
        attend, attend_tree = self._attend(tree)
        attend_row = max(attend_tree - attend, 0.0) / (tree.num_nodes - 1)
        return StepCosts(self._verify_curve(each), attend, read, level, plain_rest, draft_rest, attend_row, each)

    def _verify_curve(self, each: float) -> CostCurve:
        """each: what a sequence adds, which is taken off."""
        seconds = defaultdict(list)
        for (rows, batch_size), times in self._verify.items():
            seconds[rows] += [s - each * batch_size for s in times]
        return _curve(seconds)

    def _read_curve(self) -> CostCurve:
        """Caught-up pairs vary from step to step: bucket by bucket, at their mean number."""
        seconds = {}
        for outcomes in self._read.values():
            rows = round(mean(o.num_caught_up for o in outcomes))
            seconds[rows] = [o.seconds.draft for o in outcomes]
        return _curve(seconds)

    def clear(self) -> None:
        for sequence in self._running:
            self._engine.abort(sequence)
        self._running = []

    def _attend(self, tree: Setting) -> list[float]:
        """Seconds for each cached token, in plain steps and in those of a tree, behind a long prompt and a short one.

        On a CPU all have the same prompt, and so the same blocks, which are computed once, but each reads them for
        itself. A GPU would find what others have read in its cache: there they have blocks of their own, fewer
        sequences if need be.
        """
        long = max(min(LONG_PROMPT, self._engine.scheduler.longest - SHORT_OUTPUT), SHORT_PROMPT)
        num_together = self.num_together(long)
        batch_size = min(num_together, MOST_APART) if self._apart else num_together
        steps = [Setting(batch_size, 1, 0, 0), replace(tree, batch_size=batch_size)]
        behind = []
        for length in (long, SHORT_PROMPT):
            self.clear()
            self.take(Setting(1, 1, 0, 0), length)
            behind.append([self._passed(step, length) for step in steps])
        return [max(s - s0, 0.0) / max(n - n0, 1) for (s, n), (s0, n0) in zip(*behind, strict=True)]

    def _passed(self, setting: Setting, length: int) -> tuple[float, float]:
        """Seconds of such a pass behind prompts of this length, and the tokens that were cached."""
        outcomes = [self.take(setting, length) for _ in range(1 + REPLAYS)][1:]
        return _typical([o.seconds.verify for o in outcomes]), mean(o.num_cached for o in outcomes)

    def take(self, setting: Setting, length: int = SHORT_PROMPT) -> Outcome:
        """One step of exactly setting.batch_size sequences, the new ones behind prompts of this length."""
        while True:
            self._running = [s for s in self._running if s.finish_reason is None]
            for sequence in self._running[setting.batch_size :]:
                self._engine.abort(sequence)
            del self._running[setting.batch_size :]
            while len(self._running) < setting.batch_size:
                self._add(length)
            self._planner.setting, self._planner.outcome = setting, None
            self._engine.step()
            outcome = self._planner.outcome
            if outcome is not None and outcome.batch_size == setting.batch_size and not outcome.is_first:
                return outcome

    def _add(self, length: int) -> None:
        self._num_added += 1
        most = self._engine.max_model_len
        length = max(min(length, max(most // 2, most - SHORT_OUTPUT)), 1)
        first = self._num_added if self._apart else 0
        prompt = [(first + 7 * i) % self._engine.target.vocab_size for i in range(length)]
        params = SamplingParams(self.temperature, max_tokens=SHORT_OUTPUT, ignore_eos=True)
        sequence = Sequence(f"measure-{self._num_added}", prompt, params)
        self._engine.add(sequence)
        self._running.append(sequence)


def _curve(seconds: dict[int, list[float]]) -> CostCurve:
    rows = sorted(seconds)
    return CostCurve(rows, [max(_typical(seconds[n]), LEAST_S) for n in rows])


def added_by_each(seconds: dict[tuple[int, int], list[float]]) -> float:
    """What a sequence more adds to a pass of the same rows: least squares over all pairs of batch sizes."""
    typical = {size: _typical(times) for size, times in seconds.items()}
    pairs = [(b - a, typical[n, b] - typical[n, a]) for n, a in typical for other, b in typical if other == n and b > a]
    return max(sum(more * s for more, s in pairs) / max(sum(more**2 for more, _ in pairs), 1), 0.0)


def _typical(seconds: list[float]) -> float:
    """The lower quartile: other work on the machine only ever makes a step longer."""
    return sorted(seconds)[len(seconds) // 4]
