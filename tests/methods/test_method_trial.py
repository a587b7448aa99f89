"""The trial of methods: turns, what counts, and the choice, on scripted steps without an engine."""

from dataclasses import dataclass, field

import pytest

from eagle_ray.core.device import StepTimes
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.methods.combine.switch import MAX_STEPS_PER_TURN, NUM_ROUNDS, STEPS_PER_TURN, MethodTrial, SwitchDrafter
from eagle_ray.methods.drafter import NullDrafter
from eagle_ray.planner.planner import StepOutcome, UniformPlanner
from eagle_ray.tree.expand import PLAIN


class Observing(UniformPlanner):
    def __init__(self) -> None:
        super().__init__(TreeBounds(1, 1, 1))
        self.observed: list[StepOutcome] = []

    def observe(self, outcome: StepOutcome) -> None:
        self.observed.append(outcome)


@dataclass
class Job:
    """Steps of one batch, by methods of given accepted drafts and seconds per step."""

    methods: dict[str, tuple[int, float]]
    turns: list[str] = field(default_factory=list)
    chosen: list[tuple[str, dict[str, float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.planners = {method: Observing() for method in self.methods}
        self.switch = SwitchDrafter({method: NullDrafter() for method in self.methods})
        self.switch.use = self.turns.append
        self.switch.keep = lambda method: None
        self.trial = MethodTrial(self.planners, self.switch, lambda *choice: self.chosen.append(choice))

    def step(self, batch_size: int = 8, **facts: object) -> None:
        self.trial.plan(None)
        accepted, seconds = self.methods[self.turns[-1]]
        times = StepTimes(0.0, seconds, 0.0)
        self.trial.observe(StepOutcome(PLAIN, batch_size, 0, 1, 0, batch_size, accepted, 0, times, **facts))

    def run(self, num_steps: int = 400) -> None:
        for _ in range(num_steps):
            self.step()


def test_the_fastest_method_is_kept():
    job = Job({"eagle3": (16, 0.15), "suffix": (2, 0.12), "none": (0, 0.1)})
    job.run()
    assert job.trial.choice == "eagle3"
    [(method, rates)] = job.chosen
    assert method == "eagle3"
    assert rates == pytest.approx({"eagle3": 160.0, "suffix": 10 / 0.12, "none": 80.0})
    assert job.trial.will_draft


def test_plain_decoding_is_kept_if_drafts_do_not_pay():
    job = Job({"eagle3": (4, 0.2), "none": (0, 0.1)})
    job.run()
    assert job.trial.choice == "none"


def test_a_slow_method_takes_no_turn_after_the_first_measured_round():
    job = Job({"eagle3": (16, 0.1), "suffix": (15, 0.1), "none": (0, 0.1)})
    job.run()
    order = ["eagle3", "suffix", "none"]
    assert job.turns == [*order, *order[::-1], "eagle3", "suffix", "suffix", "eagle3", "eagle3"]  # the last is kept


@pytest.mark.parametrize("factors", [(1, 2, 2), (1, 5, 25), (4, 1, 3)])
def test_a_machine_that_changes_its_speed_changes_neither_the_choice_nor_the_order(factors):
    """Seconds of a step in each measured round, by the first of which the slowest method is dropped."""
    seconds = {"ngram": 8 / 10, "eagle3": 8 / 11, "suffix": 8 / 9}
    job = Job({method: (0, each) for method, each in seconds.items()})
    job.run(len(seconds) * (1 + STEPS_PER_TURN))
    for factor, num_methods in zip(factors, (3, 2, 2), strict=True):
        job.methods = {method: (0, factor * each) for method, each in seconds.items()}
        job.run(num_methods * (1 + STEPS_PER_TURN))
    job.step()
    assert job.trial.choice == "eagle3"
    [(_, rates)] = job.chosen
    assert rates == pytest.approx({method: rates["eagle3"] * 8 / 11 / each for method, each in seconds.items()})


def test_the_trial_takes_a_bounded_number_of_steps():
    job = Job({"eagle3": (1, 0.1), "suffix": (1, 0.1), "ngram": (1, 0.1), "none": (1, 0.1)})
    num_steps = (1 + NUM_ROUNDS) * 4 * (1 + STEPS_PER_TURN)
    job.run(num_steps)
    assert job.trial.choice is None
    job.step()
    assert job.trial.choice == "eagle3"  # the first of equal ones


def test_every_step_but_the_first_of_a_turn_teaches_its_own_planner():
    job = Job({"eagle3": (1, 0.1), "none": (1, 0.1)})
    job.run(4 * (1 + STEPS_PER_TURN))
    assert {m: len(p.observed) for m, p in job.planners.items()} == {m: 2 * STEPS_PER_TURN for m in job.planners}


@pytest.mark.parametrize("facts", [{"is_first": True}, {"num_prefill_rows": 3}, {"batch_size": 3}])
def test_steps_that_say_nothing_of_a_full_batch_do_not_count(facts):
    job = Job({"eagle3": (8, 0.1), "none": (0, 0.1)})
    job.run(2 * (1 + STEPS_PER_TURN))  # the round that is not measured
    for _ in range(2 * MAX_STEPS_PER_TURN):
        job.step(**facts)
    assert job.trial.choice is None
    job.run()
    assert job.trial.choice == "eagle3" and job.chosen[0][1] == pytest.approx({"eagle3": 160.0, "none": 80.0})
