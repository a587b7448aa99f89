"""MethodTrial: `speculative.method: auto` tries several methods in turns on the first sequences and keeps the fastest.

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

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from statistics import mean

from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.methods.combine.switch import SwitchDrafter
from eagle_ray.methods.drafter import Draft
from eagle_ray.planner.planner import Allocation, Planner, StepOutcome
from eagle_ray.tree.draft_plan import DraftPlan

NUM_ROUNDS = 3  # measured ones
STEPS_PER_TURN = 6  # counted ones: others wait meanwhile, and a head reads again what they decode, at most 128 tokens
MAX_STEPS_PER_TURN = 24  # whatever is counted of them
MIN_SHARE = 0.85  # of the best method's share, for a further turn
FULL_BATCH = 0.75  # of the largest batch seen, for a step that counts


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
