"""Time engines: each in its turn over the same requests, over a queue that is always full, or over a job to its end.

    timing = Timing({"eagle2": drafting, "plain": plain})
    timing.warm_up(lambda name: [question()])
    turn = timing.round(lambda name: [question()], "code")
    turn.samples["eagle2"].tokens_per_second / turn.samples["plain"].tokens_per_second

All engines of a Timing share a process and a machine, and each answers from an empty prefix cache. The order changes
from round to round, so that what slows the machine down for a while slows all of them.

    engine.planner = recorder = RecordingPlanner(engine.planner)   # plans as another planner does, and records
    recorder.best_tree(sequence)                                   # the step of which the most drafts were accepted
    recorder.parts, recorder.num_steps                             # seconds of drafts, verify passes and the rest
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from itertools import islice
from typing import Any

from torch import nn

from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.engine import Engine
from eagle_ray.methods.drafter import Draft
from eagle_ray.planner.cost_model import StepCosts
from eagle_ray.planner.planner import Allocation, Planner, StepOutcome
from eagle_ray.tree.expand import DraftPlan

AHEAD = 2  # requests that wait while the slots are full
Ask = Callable[[str], list[Sequence]]  # the requests of a round as new sequences, for the engine of this name


class ForwardTimer:
    """The seconds that the host spends inside the forward passes of some modules, none of them inside another.

    Our own forward calls the linear layers of a model and not the modules around them. On a GPU passes are only
    enqueued in that time: the number says nothing there.

        meter = ForwardTimer(*linear_layers(model), *linear_layers(head))
    """

    def __init__(self, *modules: nn.Module):
        self.seconds = 0.0
        self._started = 0.0
        for module in modules:
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave)

    def _enter(self, *_: object) -> None:
        self._started = time.perf_counter()

    def _leave(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._started


@dataclass(frozen=True, slots=True)
class Sample:
    """What an engine did in `seconds`: forward_s of them inside forward passes, prefill_s on prompts.

    forward_s is 0 without a meter. num_tokens: committed; num_decoded of them by decode steps and not right after
    prompts. num_steps: of the engine; num_plain_steps of them drafted nothing. num_passes: target passes, summed over
    sequences. All this is counted here: sequences' own statistics hear of a step while the next one runs, which may be
    another way's.
    predicted_s, predicted_plain_s: seconds of these steps and of as many plain ones, by the
        planner's costs; 0 without costs.
    """

    seconds: float
    forward_s: float
    prefill_s: float
    num_tokens: int
    num_decoded: int
    num_steps: int
    num_plain_steps: int
    num_probes: int
    num_verify_rows: int
    num_passes: int
    predicted_s: float
    predicted_plain_s: float

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def decoded(self) -> tuple[int, float]:
        """Tokens and seconds of the decode steps alone: prompts, and their first tokens, left out."""
        return self.num_decoded, self.seconds - self.prefill_s

    @property
    def decoded_per_second(self) -> float:
        tokens, seconds = self.decoded
        return tokens / seconds

    @property
    def tau(self) -> float:
        """Tokens of a sequence in a step, those past its end left out."""
        return self.num_decoded / max(self.num_passes, 1)

    @property
    def predicted_ratio(self) -> float | None:
        """Speed over plain decoding by tau and the costs alone, prompts left out; None without costs."""
        return self.tau * self.predicted_plain_s / self.predicted_s if self.predicted_s else None

    def __add__(self, other: Sample) -> Sample:
        return Sample(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Sample) -> Sample:
        return Sample(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


class SteadyQueue:
    """An engine whose slots are always taken: what finishes is replaced at once, and its prompt is part of the time.

    Until its end prompts have passes of their own, so that what they take can be told from the rest.

    One queue goes on from window to window. Queues over the same requests stay side by side as long as their windows
    are of the same number of tokens. in_flight: sequences at once, where the engine has more slots than that.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Iterator[Sequence],
        meter: ForwardTimer | None = None,
        in_flight: int | None = None,
    ):
        self._engine, self._requests, self._meter = engine, requests, meter
        self._size = in_flight or engine.counters.num_slots
        self._max_unfinished = in_flight or engine.counters.num_slots + AHEAD
        self._added: list[Sequence] = []
        self._unfinished = 0
        self._mixed, engine.mixed_prefill = engine.mixed_prefill, False

    @property
    def sequences(self) -> list[Sequence]:
        """Return every request so far, in order; the last ones are unfinished."""
        return list(self._added)

    def fill(self) -> None:
        """Until every slot has had a sequence."""
        while sum(bool(s.output_ids) for s in self._added) < self._size:
            self._step()

    def window(self, num_tokens: int, max_seconds: float, first: Planner | None = None) -> Sample:
        """Until num_tokens more are committed, or max_seconds are over; at least a step.

        first: plans a step before it, whose tokens are among num_tokens but not in the sample.
        """
        wanted = self._num_tokens + num_tokens
        if first is not None:
            self._step_as(first)
        before = self._totals()
        while True:
            self._step()
            if self._num_tokens >= wanted or time.perf_counter() >= before.seconds + max_seconds:
                return self._totals() - before

    def end(self) -> None:
        """Drop what is not finished; the engine is idle."""
        for sequence in self._added:
            self._engine.abort(sequence)
        self._engine.mixed_prefill = self._mixed

    def _step(self) -> None:
        while self._unfinished < self._max_unfinished:
            self._added.append(next(self._requests))
            self._engine.add(self._added[-1])
            self._unfinished += 1
        self._unfinished -= len(self._engine.step())

    def _step_as(self, planner: Planner) -> None:
        self._engine.planner, own = planner, self._engine.planner
        self._step()
        self._engine.planner = own

    @property
    def _num_tokens(self) -> int:
        return sum(len(s.output_ids) for s in self._added)

    def _totals(self) -> Sample:
        return _totals(self._engine, self._added, self._meter)


def run_requests(
    engine: Engine, requests: list[Sequence], meter: ForwardTimer | None = None, in_flight: int | None = None
) -> Sample:
    """Run all requests and return the sample from the first prompt to the last end. in_flight: requests at a time."""
    before = _totals(engine, [], meter)
    waiting, running = iter(requests), 0
    while True:
        for sequence in islice(waiting, (in_flight or len(requests)) - running):
            engine.add(sequence)
            running += 1
        if not running:
            break
        running -= len(engine.step())
    return _totals(engine, requests, meter) - before


@dataclass(frozen=True, slots=True)
class Round:
    """What each engine did with the same requests, by its name. group: what they are counted under."""

    group: str
    samples: Mapping[str, Sample]
    answers: Mapping[str, list[Sequence]]

    def speed_up(self, name: str, plain: str) -> float:
        """Return how many times as fast as the plain one an engine was, prompts included."""
        return self.samples[name].tokens_per_second / self.samples[plain].tokens_per_second


class Timing:
    """Engines that answer in turns.

    Args:
        engines: by name, idle.
        seed: seed of the order that is drawn for each round; None: the order is turned around from round to round.
    """

    def __init__(self, engines: Mapping[str, Engine], seed: int | None = None):
        self._engines = engines
        self._order = list(engines)
        self._shuffle = None if seed is None else random.Random(seed)

    def warm_up(self, ask: Ask) -> None:
        """Run some requests on each engine: the first steps pay for what is made once."""
        for name in self._engines:
            self._run(name, ask(name))

    def round(self, ask: Ask, group: str = "") -> Round:
        """Run the same requests on each engine, one engine after the other."""
        samples, answers = {}, {}
        for name in self._next_order():
            answers[name] = ask(name)
            samples[name] = self._run(name, answers[name])
        return Round(group, samples, answers)

    def _next_order(self) -> list[str]:
        if self._shuffle is not None:
            return self._shuffle.sample(self._order, len(self._order))
        order = list(self._order)
        self._order.reverse()
        return order

    def _run(self, name: str, sequences: list[Sequence]) -> Sample:
        engine = self._engines[name]
        engine.target.cache.blocks.reset_prefix_cache()
        return run_requests(engine, sequences)


def limited(sequence: Sequence, max_tokens: int) -> Sequence:
    """Return the new sequence with fewer tokens to make, for a warm-up."""
    sequence.sampling = replace(sequence.sampling, max_tokens=max_tokens)
    return sequence


def total(rounds: Iterable[Round], name: str) -> Sample:
    """Return the sum of an engine's samples over one or more rounds."""
    first, *others = (each.samples[name] for each in rounds)
    return sum(others, first)


def _totals(engine: Engine, sequences: list[Sequence], meter: ForwardTimer | None) -> Sample:
    """Sums since the engine was made, of these sequences; only differences mean anything."""
    lengths = [len(s.output_ids) for s in sequences]
    return Sample(
        time.perf_counter(),
        0.0 if meter is None else meter.seconds,
        engine.counters.prefill_s,
        sum(lengths),
        sum(lengths) - sum(map(bool, lengths)),
        engine.counters.num_steps,
        engine.counters.num_plain_steps,
        engine.counters.num_probes,
        engine.counters.num_verify_rows,
        engine.counters.num_slot_steps,
        getattr(engine.planner, "predicted_s", 0.0),
        getattr(engine.planner, "predicted_plain_s", 0.0),
    )


@dataclass(frozen=True, slots=True)
class RecordedTree:
    """One sequence's candidates in one step, N nodes, the root first.

    Attributes:
        num_outputs: output tokens before the step.
        values: the probability, by the planner, that the target accepts the path to each node.
        verified: true for a node that got a row.
    """

    num_outputs: int
    tokens: list[int]
    parents: list[int]
    values: list[float]
    verified: list[bool]

    def accepted(self, output_ids: list[int]) -> list[int]:
        """Return the nodes on the path of the sequence's output, without the root."""
        path, at = [], 0
        for token in output_ids[self.num_outputs :]:
            children = [i for i, parent in enumerate(self.parents) if parent == at and self.tokens[i] == token]
            if not children or not self.verified[children[0]]:
                break
            at = children[0]
            path.append(at)
        return path


class RecordingPlanner:
    """Keeps the times of all steps but first ones, and the draft trees of the sequence that runs, if it runs alone.

    Args:
        keeps_trees: which reads each of them back from the device.
        costs: that predict what steps take; None predicts nothing. They learn from the steps unless they are the
            planner's own.

    Attributes:
        draft_s, verify_s, rest_s: seconds of the parts of steps, as StepTimes has them.
        predicted_s, predicted_plain_s: what the costs say of these steps, and of as many plain ones.
        num_steps: steps that are in the sums. A step in which a graph was recorded is not.
    """

    def __init__(self, planner: Planner, costs: StepCosts | None = None, keeps_trees: bool = False):
        self._planner = planner
        self.step_costs = costs
        self._keeps_trees = keeps_trees
        self._sequence: Sequence | None = None
        self._trees: list[RecordedTree] = []
        self.draft_s = self.verify_s = self.rest_s = 0.0
        self.predicted_s = self.predicted_plain_s = 0.0
        self.num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    @property
    def will_draft(self) -> bool:
        return self._planner.will_draft

    @property
    def parts(self) -> tuple[float, float, float]:
        return self.draft_s, self.verify_s, self.rest_s

    def plan(self, batch: DecodeBatch) -> DraftPlan:
        return self._planner.plan(batch)

    def allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        allocation = self._planner.allocate(draft, plan, batch)
        if self._keeps_trees and len(batch) == 1 and draft.depth:
            self._keep(batch.sequences[0], draft, allocation)
        return allocation

    def observe(self, outcome: StepOutcome) -> None:
        if not outcome.is_first:
            self._add(outcome)
        self._planner.observe(outcome)

    def _add(self, outcome: StepOutcome) -> None:
        self.num_steps += 1
        self.draft_s += outcome.seconds.draft
        self.verify_s += outcome.seconds.verify
        self.rest_s += outcome.seconds.overhead
        if self.step_costs is None:
            return
        predicted = self.step_costs.predict(outcome)
        self.predicted_s += predicted.total - self.step_costs.prefill_seconds(outcome)
        self.predicted_plain_s += self.step_costs.plain_seconds(outcome.batch_size, outcome.num_cached)
        if getattr(self._planner, "costs", None) is not self.step_costs:
            self.step_costs.update(outcome, predicted)

    def best_tree(self, sequence: Sequence) -> RecordedTree | None:
        """Return the tree with the longest accepted path, the earliest of several; None if none was drafted."""
        trees = self._trees if sequence is self._sequence else []
        return max(trees, key=lambda tree: len(tree.accepted(sequence.output_ids)), default=None)

    def _keep(self, sequence: Sequence, draft: Draft, allocation: Allocation) -> None:
        if sequence is not self._sequence:
            self._sequence, self._trees = sequence, []
        tree = draft.tree
        count = int(tree.valid[0].sum())
        columns = (tree.tokens, tree.parents, tree.log_values.exp(), allocation.keep)
        self._trees.append(RecordedTree(len(sequence.output_ids), *(column[0, :count].tolist() for column in columns)))
