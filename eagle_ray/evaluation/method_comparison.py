"""The paper's comparison: every method answers the same questions, one after another, in one process.

    turns = list(rounds(engines, questions, temperature=1.0))
    figures(turns, "eagle2", plain="plain", ...)         # figures of all rounds, or of one task's

A round is a few questions of one task, as many as an engine has slots. Each method answers them
from an empty cache, in an order drawn for each round, and its speed is divided by plain decoding's
in that round: a machine that is slow for a while slows both.

Two outputs of one prompt are compared token for token; where they first differ, the target's logits
show whether the two tokens were nearly tied.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from eagle_ray.core import sequence as engine_sequence
from eagle_ray.core.counters import AcceptanceStats
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.engine.engine import Engine
from eagle_ray.evaluation.timing import Round, Timing, limited, total
from eagle_ray.families import layers_of
from eagle_ray.models.loader import CausalLM
from eagle_ray.report.intervals import (
    Counted,
    DifferenceInterval,
    Interval,
    difference_interval,
    ratio_interval,
)
from eagle_ray.sampling.near_tie import NEAR_TIE, rounding_cause

COMPARISON_WARM_UP_TOKENS = 16
GREEDY = SamplingSettings()
# Rounds, or questions, for an interval: of fewer it says more about their number than about the methods.
MIN_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Equivalence:
    """How many outputs were compared and identical, and why the others differ.

    Attributes:
        num_near_ties: number of outputs that first differ where both tokens' scores were nearly
            equal.
        num_edges: number of outputs that first differ where a token crosses the edge of top-k,
            top-p or min-p.
    """

    num_compared: int = 0
    num_equal: int = 0
    num_near_ties: int = 0
    num_edges: int = 0

    def __add__(self, other: Equivalence) -> Equivalence:
        return Equivalence(
            self.num_compared + other.num_compared,
            self.num_equal + other.num_equal,
            self.num_near_ties + other.num_near_ties,
            self.num_edges + other.num_edges,
        )

    @property
    def is_explained(self) -> bool:
        """Return whether at least one output was compared and rounding explains all differences."""
        return self.num_equal + self.num_near_ties + self.num_edges == self.num_compared > 0


Compare = Callable[[list[engine_sequence.Sequence], list[engine_sequence.Sequence]], Equivalence]


def compare(
    model: CausalLM,
    prompts: list[list[int]],
    outputs: list[list[int]],
    plain: list[list[int]],
    params: list[SamplingSettings] | None = None,
    near_tie: float = NEAR_TIE[torch.float32],
) -> Equivalence:
    """Compare each prompt's output with plain decoding's, up to the shorter one's end; empty ones are skipped.

    Args:
        params: sampling parameters of each output; None is greedy.
        near_tie: maximum change of a logit between passes of one row and of many.
    """
    identity = Equivalence()
    rows = zip(prompts, outputs, plain, params or repeat(GREEDY), strict=False)
    for prompt, ids, wanted, sampling in rows:
        place = first_difference(ids, wanted)
        if place is None:
            if ids and wanted:
                identity += Equivalence(num_compared=1, num_equal=1)
            continue

        # Let the target tell whether rounding may have decided.
        logits = next_logits(model, prompt + wanted[:place])
        position = len(prompt) + place
        cause = rounding_cause(logits[0], sampling, position, wanted[place], ids[place], near_tie)
        identity += Equivalence(1, 0, cause == "tie", cause == "cut")
    return identity


def first_difference(ids: list[int], others: list[int]) -> int | None:
    """Return the index of the first difference, or None if one begins with the other."""
    for i, (a, b) in enumerate(zip(ids, others, strict=False)):
        if a != b:
            return i
    return None


@torch.inference_mode()
def next_logits(model: CausalLM, ids: list[int]) -> Float[Tensor, "1 V"]:
    """Return the logits of the token after these ids, on the host."""
    tokens = torch.tensor([ids], device=model.device)
    hidden = layers_of(model)(input_ids=tokens, use_cache=False).last_hidden_state[:, -1]
    return model.get_output_embeddings()(hidden).cpu()


@dataclass(frozen=True, slots=True)
class BenchmarkPrompt:
    """A question of a benchmark.

    Attributes:
        task: name of its task.
        ask: returns the prompt as a new sequence, at a given temperature.
    """

    task: str
    ask: Callable[[], engine_sequence.Sequence]

    def at(self, temperature: float) -> engine_sequence.Sequence:
        sequence = self.ask()
        sequence.sampling = replace(sequence.sampling, temperature=temperature)
        return sequence


def rounds(
    engines: Mapping[str, Engine],
    questions: Sequence[BenchmarkPrompt],
    temperature: float,
    seed: int = 0,
) -> Iterator[Round]:
    """Run every prompt once, in rounds by task, and yield each round.

    Args:
        engines: new engines with equal numbers of slots, by method.
    """
    timing = Timing(engines, seed)
    slots = min(engine.counters.num_slots for engine in engines.values())
    timing.warm_up(lambda name: [limited(questions[0].at(temperature), COMPARISON_WARM_UP_TOKENS)])
    for engine in engines.values():
        engine.drafter.reset_learning()
    for task, group in _groups(questions, slots):
        yield timing.round(partial(_sequences, group, temperature), task)


def _sequences(
    group: Sequence[BenchmarkPrompt], temperature: float, name: str
) -> list[engine_sequence.Sequence]:
    return [question.at(temperature) for question in group]


def _groups(
    questions: Sequence[BenchmarkPrompt], size: int
) -> Iterator[tuple[str, list[BenchmarkPrompt]]]:
    """Yield up to `size` questions of one task at a time, tasks in the order in which they first occur."""
    for task in dict.fromkeys(question.task for question in questions):
        of_task = [question for question in questions if question.task == task]
        for start in range(0, len(of_task), size):
            yield task, of_task[start : start + size]


def figures(
    turns: Sequence[Round], name: str, plain: str, reference: str | None, compare: Compare
) -> dict[str, Any]:
    """Return one method's numbers over some rounds, as JSON.

    Args:
        reference: method whose tau it is compared with.
        compare: function that compares answers with plain decoding's.
    """
    answers = outputs_of(turns, name)
    stats = _pooled(answers)
    sample = total(turns, name)
    speeds = [turn.speed_up(name, plain) for turn in turns]
    steps = stats.num_steps
    tau_less = None
    if reference is not None:
        difference = _tau_difference(answers, outputs_of(turns, reference))
        tau_less = {"of": reference, **difference}
    return {
        "questions": len(answers),
        "tokens": sample.num_tokens,
        "tokens_per_s": sample.tokens_per_second,
        "speed_up": _speed_up(speeds),
        "tau": stats.mean_acceptance_length,
        "tau_less": tau_less,
        "steps": steps,
        "nodes_per_step": stats.num_draft_tokens / steps if steps else None,
        "accepted_by_depth": [count / steps for count in stats.accepted_by_depth] if steps else [],
        "verified_by_depth": [count / steps for count in stats.proposed_by_depth] if steps else [],
        "calibration_error": {
            "drafted": stats.drafted.calibration_error,
            "calibrated": stats.calibrated.calibration_error,
        },
        "confidences": asdict(stats.drafted),
        "identity": asdict(compare(answers, outputs_of(turns, plain))),
    }


def _speed_up(ratios: list[float]) -> dict[str, float | None]:
    """Return the geometric mean over rounds, with its interval."""
    return _if_enough(ratio_interval(ratios), len(ratios))


def outputs_of(turns: Sequence[Round], name: str) -> list[engine_sequence.Sequence]:
    """Return one method's outputs, in the order of the prompts."""
    return list(itertools.chain.from_iterable(turn.answers[name] for turn in turns))


def _pooled(answers: Sequence[engine_sequence.Sequence]) -> AcceptanceStats:
    total = AcceptanceStats.empty(0)
    for sequence in answers:
        total = total.merge(sequence.stats)
    return total


def _tau_difference(
    answers: Sequence[engine_sequence.Sequence], others: Sequence[engine_sequence.Sequence]
) -> dict[str, float | None]:
    """Return the difference of pooled taus, with its interval over prompts."""
    pairs = zip(answers, others, strict=True)
    counts = [(_accepted_per_step(a), _accepted_per_step(b)) for a, b in pairs]
    return _if_enough(difference_interval(counts), len(counts))


def _accepted_per_step(sequence: engine_sequence.Sequence) -> Counted:
    return sequence.stats.num_accepted_draft_tokens, sequence.stats.num_steps


def _if_enough(interval: Interval | DifferenceInterval, number: int) -> dict[str, float | None]:
    """Return the mean with low and high, which are None for fewer than MIN_ROUNDS."""
    if number < MIN_ROUNDS:
        return {"mean": interval.mean, "low": None, "high": None}
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}
