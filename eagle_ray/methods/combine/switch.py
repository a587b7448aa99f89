"""SwitchDrafter: one of several drafters at a time, for a trial of which is the fastest.

    switch = SwitchDrafter({"eagle3": eagle, "suffix": suffix, "none": NullDrafter()})
    switch.use("suffix")        # drafts from the next step on
    switch.keep("eagle3")       # for good: the others read nothing more

Until one is kept, all of them read the prompts and the accepted paths, so each can draft for every sequence at any
step.

MethodTrial plans for `speculative.method: auto`: it tries the methods in turns on the first sequences and keeps the
fastest.

    trial = MethodTrial({"eagle3": planner, "suffix": another, "none": UniformPlanner(NO_TREE)}, switch)
    Engine(target, switch, trial, ...)

    round 0 (not measured)          round 1                         round 2 ...
    eagle3  suffix  ngram  none  |  none  ngram  suffix  eagle3  |  eagle3  none
    ------- STEPS_PER_TURN each --------------------------------  a method that is far behind takes no further turn

The sequences are the job's own and no step is repeated: outputs do not depend on drafts, so a trial costs only what the
slower methods are slower. The rate of a method is the tokens per second of its decode steps. Steps with prompt rows or
one-time work, and steps of a batch that is still filling or already draining, are not counted. Neither is the first
step of a turn: a drafter then catches up with what other methods decoded.

Contexts grow and machines slow down, so methods are compared only within a round, as shares of its best rate. Two
methods are compared by the rounds in which both took turns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor
from transformers import PretrainedConfig

from eagle_ray.core.decode_batch import DecodeBatch, DecodeSlots
from eagle_ray.core.errors import EngineError
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.methods.drafter import Draft, Drafter, LoadedDraft, NullDrafter, TokenSequence, VerifyOutput
from eagle_ray.methods.method import METHODS, DraftSettings
from eagle_ray.models.graphs import CudaGraphRunner
from eagle_ray.models.target import PromptBatch, TargetModel
from eagle_ray.planner.planner import Allocation, Planner, StepOutcome
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.draft_tree import VerifyResult
from eagle_ray.tree.expand import DraftPlan

NUM_ROUNDS = 3  # measured ones
STEPS_PER_TURN = 6  # counted ones: others wait meanwhile, and a head reads again what they decode, at most 128 tokens
MAX_STEPS_PER_TURN = 24  # whatever is counted of them
MIN_SHARE = 0.85  # of the best method's share, for a further turn
FULL_BATCH = 0.75  # of the largest batch seen, for a step that counts


class SwitchDrafter:
    """drafters: by method; the first one drafts first. Where passes are recorded, the memory of those that are not kept
    stays allocated, since recorded passes write into it.
    """

    def __init__(self, drafters: Mapping[str, Drafter]):
        self._drafters = dict(drafters)
        self._current = next(iter(self._drafters.values()))
        self._reading = list(self._drafters.values())
        self._is_replayed = False
        self.supports_graphs = all(drafter.supports_graphs for drafter in self._reading)

    @property
    def methods(self) -> list[str]:
        """Return the methods to choose from, in order."""
        return list(self._drafters)

    def use(self, method: str) -> None:
        """Draft with this method from now on."""
        self._current = self._drafters[method]

    def keep(self, method: str) -> None:
        """Draft with this method for good. The other drafters cannot be used again, and are freed if they can be."""
        self.use(method)
        for drafter in self._reading:
            if drafter is not self._current:
                drafter.reset_learning()  # an index may be large
        self._reading = [self._current]
        if not self._is_replayed:
            self._drafters = {method: self._current}

    @property
    def prefill_passes(self) -> int:
        return sum(drafter.prefill_passes for drafter in self._reading)

    @property
    def cost_key(self) -> dict[str, Any]:
        """Return the cost key of the drafter in use."""
        return self._current.cost_key

    def use_graphs(self, runner: CudaGraphRunner | None, max_depth: int = 0) -> None:
        self._is_replayed = runner is not None
        for drafter in self._drafters.values():
            drafter.use_graphs(runner, max_depth)

    def recordings(self, top_k: int, max_length: int, params: SamplingParams) -> Iterator[Callable[[], None]]:
        return chain.from_iterable(drafter.recordings(top_k, max_length, params) for drafter in self._reading)

    def attach_prefix(
        self,
        slots: list[int],
        firsts: list[int],
        lengths: list[int],
        tokens: Int[Tensor, " B"],
        features: Float[Tensor, "B H"],
    ) -> None:
        for drafter in self._reading:
            drafter.attach_prefix(slots, firsts, lengths, tokens, features)

    def prefill(self, prompts: PromptBatch, next_tokens: Int[Tensor, " R"], features: Float[Tensor, "R H"]) -> None:
        for drafter in self._reading:
            drafter.prefill(prompts, next_tokens, features)

    def prefill_deferred(
        self, prompts: PromptBatch, next_tokens: Int[Tensor, " R"], features: Float[Tensor, "R H"]
    ) -> None:
        for drafter in self._reading:
            drafter.prefill_deferred(prompts, next_tokens, features)

    def draft(
        self,
        batch: DecodeSlots,
        roots: Int[Tensor, " B"],
        plan: DraftPlan,
        sampling: SamplingBatch,
        texts: Sequence[TokenSequence],
    ) -> Draft:
        return self._current.draft(batch, roots, plan, sampling, texts)

    def draft_async(
        self, at: DecodeSlots, roots: Int[Tensor, " B"], plan: DraftPlan, sampling: SamplingBatch
    ) -> Draft | None:
        return self._current.draft_async(at, roots, plan, sampling)

    def mark_consumed(self, slots: list[int], lengths: list[int]) -> int:
        return self._current.mark_consumed(slots, lengths)

    def extend(self, batch: DecodeSlots, verified: VerifyOutput) -> None:
        for drafter in self._reading:
            drafter.extend(batch, verified)

    def on_verified(self, result: VerifyResult) -> None:
        self._current.on_verified(result)

    def reset_learning(self) -> None:
        for drafter in self._reading:
            drafter.reset_learning()


@dataclass(slots=True)
class _Tally:
    """Counted tokens and seconds of one method."""

    num_tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Return the tokens per second, or 0 if no step was counted."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


class MethodTrial:
    """Plans as the planner of the method whose turn it is, later as that of the method that was kept.

    Args:
        planners: by method; on equal rates the first one is kept.
        switch: drafts with the same methods.
        on_choice: called once with the method and the tokens per second of all.
    """

    def __init__(
        self,
        planners: Mapping[str, Planner],
        switch: SwitchDrafter,
        on_choice: Callable[[str, dict[str, float]], None] = lambda method, rates: None,
    ):
        self._planners, self._switch, self._on_choice = dict(planners), switch, on_choice
        self._contenders = list(planners)
        self._rounds: list[dict[str, _Tally]] = []  # measured ones
        self._turns = self._schedule()
        self._largest_batch = 0
        self.choice: str | None = None
        self._begin_turn()

    @property
    def will_draft(self) -> bool:
        return self.choice is None or self._current.will_draft

    def plan(self, batch: DecodeBatch) -> DraftPlan:
        if self.choice is None and self._turn_is_over:
            self._begin_turn()
        return self._current.plan(batch)

    def allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        return self._current.allocate(draft, plan, batch)

    def observe(self, outcome: StepOutcome) -> None:
        """Pass the outcome on and count it. The first one of a turn may be of the turn before, if steps overlap."""
        self._num_steps += 1
        if self._num_steps == 1:
            return
        self._current.observe(outcome)
        if self.choice is None:
            self._count(outcome)

    def _count(self, outcome: StepOutcome) -> None:
        self._largest_batch = max(self._largest_batch, outcome.batch_size)
        if not self._counts(outcome):
            return
        self._num_counted += 1
        if self._is_measured:
            tally = self._rounds[-1][self._method]
            tally.num_tokens += outcome.batch_size + outcome.num_accepted
            tally.seconds += outcome.seconds.total

    def _counts(self, outcome: StepOutcome) -> bool:
        """Return whether the step is an ordinary one of a full batch."""
        is_ordinary = not (outcome.is_first or outcome.num_prefill_rows or outcome.num_prompt_tokens)
        return is_ordinary and outcome.batch_size >= FULL_BATCH * self._largest_batch

    @property
    def _turn_is_over(self) -> bool:
        return self._num_counted >= STEPS_PER_TURN or self._num_steps >= MAX_STEPS_PER_TURN

    def _begin_turn(self) -> None:
        """Let the next method draft, or keep the best one."""
        turn = next(self._turns, None)
        if turn is None:
            self._choose()
            return
        self._method, self._is_measured = turn
        self._use(self._method)

    def _use(self, method: str) -> None:
        self._switch.use(method)
        self._current = self._planners[method]
        self._num_steps = self._num_counted = 0

    def _schedule(self) -> Iterator[tuple[str, bool]]:
        """Yield the method of each turn, and whether it is measured; every other round is in reverse order."""
        for number in range(1 + NUM_ROUNDS):
            if number > 0:
                self._rounds.append({method: _Tally() for method in self._contenders})
            order = self._contenders[:: -1 if number % 2 else 1]
            for method in order:
                yield method, number > 0
            self._drop_slow()
            if len(self._contenders) == 1:
                return

    def _drop_slow(self) -> None:
        """Take methods that are far behind out of the trial."""
        shares = self._shares(self._contenders)
        limit = MIN_SHARE * max(shares.values())
        self._contenders = [method for method in self._contenders if shares[method] >= limit]

    def _choose(self) -> None:
        shares = self._shares(self._contenders)
        self.choice = max(self._contenders, key=shares.__getitem__)
        self._use(self.choice)
        self._switch.keep(self.choice)
        self._on_choice(self.choice, self._rates(self.choice))
        self._planners = {self.choice: self._current}

    def _shares(self, methods: Collection[str]) -> dict[str, float]:
        """Return each method's mean share of the best rate of a round, over the rounds in which all of them took turns.

        A round in which nothing of some method was counted says nothing; without any other, all are equal.
        """
        rounds = [tallies for tallies in self._rounds if set(methods) <= tallies.keys()]
        rates = [{method: tally.rate for method, tally in tallies.items()} for tallies in rounds]
        complete = [each for each in rates if min(each.values()) > 0]
        if not complete:
            return dict.fromkeys(methods, 1.0)
        return {method: mean(each[method] / max(each.values()) for each in complete) for method in methods}

    def _rates(self, choice: str) -> dict[str, float]:
        """Return the tokens per second of the choice, and of the others as if each had taken turns in all rounds."""
        own = [tallies[choice] for tallies in self._rounds]
        rate = _Tally(sum(tally.num_tokens for tally in own), sum(tally.seconds for tally in own)).rate
        rates = {}
        for method in self._planners:
            shares = self._shares([method, choice])
            rates[method] = rate * shares[method] / shares[choice]
        return rates


def check(path: Path, target: PretrainedConfig) -> LoadedDraft:
    """Return the draft in a directory without its weights, of whichever kind. Raises EngineError with every reason."""
    reasons = []
    for method in METHODS.values():
        if method.is_candidate and method.draft is not None:
            try:
                return method.check_draft(path, target)
            except EngineError as error:
                reasons.append(f"as {method.draft}: {error}")
    raise EngineError(f"{path} is no draft that a method can read. {'. '.join(reasons)}")


def load(path: Path, target: PretrainedConfig) -> LoadedDraft:
    """Return the draft in a directory, of whichever kind. Raises EngineError."""
    return METHODS[check(path, target).method].load_draft(path, target)


def make_drafter(speculative: DraftSettings, target: TargetModel, weights: LoadedDraft | None) -> SwitchDrafter:
    """Return a drafter of each method that auto can choose from here.

    On a GPU a drafter that steps cannot be replayed with is left out: all others would be slow for its sake.
    """
    free = [method.name for method in METHODS.values() if method.is_candidate and method.draft is None]
    names = free if weights is None else [weights.method, *free]
    drafters = {name: METHODS[name].make_drafter(speculative, target, weights) for name in names}
    on_cpu = target.device.type == "cpu"
    return SwitchDrafter({name: drafter for name, drafter in drafters.items() if on_cpu or drafter.supports_graphs})


def make_null_drafter(speculative: DraftSettings, target: TargetModel, weights: None) -> NullDrafter:
    return NullDrafter()
