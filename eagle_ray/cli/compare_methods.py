"""Compare draft methods on the user's prompts: ``eagle-ray compare`` without runs, jobs/evaluate.py.

    print(evaluation_text(evaluate(config, ["eagle1", "eagle2"], [0.0, 1.0], batch=1, per_task=None)))
    # T = 0: speed-up over plain decoding, tau
    # method   chat        code  ...

Rows, tokenizer and sampling are the job's; everything runs here, in this process. Needs no Ray and
writes nothing.
"""

from __future__ import annotations

import logging
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from eagle_ray import __version__
from eagle_ray.assembly.draft_choice import with_chosen_draft
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.hub import check_models, load_tokenizer, model_limits
from eagle_ray.assembly.load_models import load_target
from eagle_ray.batch.driver.input_plan import plan_input, requests_of
from eagle_ray.batch.driver.status import GROUP_BY
from eagle_ray.config import JobConfig
from eagle_ray.core import sequence as engine_sequence
from eagle_ray.core.errors import ConfigError, RequestError
from eagle_ray.core.sequence import check_length
from eagle_ray.evaluation.draft_methods import (
    PLAIN_NAME,
    PUBLISHED,
    DraftMethod,
    default_names,
    load_method_weights,
    parse_methods,
)
from eagle_ray.evaluation.method_comparison import (
    MIN_ROUNDS,
    BenchmarkPrompt,
    Equivalence,
    compare,
    figures,
    rounds,
)
from eagle_ray.evaluation.timing import Round
from eagle_ray.models.loader import CausalLM
from eagle_ray.requests.request import Request
from eagle_ray.requests.sequences import sequences_of
from eagle_ray.text.tokenizer import Tokenizer

log = logging.getLogger("eagle_ray")
OUTPUT_END = -1  # end mark of an output, so that a beginning of another output differs from it
NO_TASK = "(none)"


def evaluate(
    config: JobConfig,
    names: Sequence[str] | None,
    temperatures: Sequence[float],
    batch: int,
    per_task: int | None,
) -> dict[str, Any]:
    """Compare draft methods on the job's rows, and return all results as JSON.

    Raises ConfigError for unusable names, rows or models.

    Args:
        names: names of methods; None is all that the configured pair allows.
        batch: number of sequences decoded together.
        per_task: maximum prompts per task.
    """
    config = with_chosen_draft(config)
    ways = parse_methods(
        default_names(config.speculative) if names is None else names,
        config.model,
        config.speculative,
    )
    return evaluate_ways(config, ways, temperatures, batch, per_task)


def evaluate_ways(
    config: JobConfig,
    ways: Sequence[DraftMethod],
    temperatures: Sequence[float],
    batch: int,
    per_task: int | None,
) -> dict[str, Any]:
    """Compare these methods with plain decoding, which comes first in the results. Raises as evaluate does."""
    for way in ways:
        check_models(way.model(config.model), way.speculative)
    questions = list(_questions(config, per_task))
    if not questions:
        raise ConfigError("input.path: no row can be answered")
    log.info("loading %s", config.model.target)
    max_model_len = _longest(questions)
    causal_lm = load_target(config.model, EngineArgs(batch, kv_tokens=batch * max_model_len))
    weights = load_method_weights(ways, config.model, causal_lm)
    turns: dict[float, list[Round]] = {}
    # Other engines for each: some drafters remember what was answered before.
    for temperature in temperatures:
        engines = {
            way.name: way.engine(causal_lm, weights[way.name], batch, max_model_len) for way in ways
        }
        turns[temperature] = list(
            _with_log(rounds(engines, questions, temperature), temperature, len(ways))
        )
    return _metadata(config, ways, batch, causal_lm) | {
        "cells": list(_cells(turns, ways, causal_lm))
    }


def use_threads(threads: int | None) -> None:
    """Set the CPU threads of this process; None is torch's default."""
    if threads is not None:
        torch.set_num_threads(threads)


def _questions(config: JobConfig, per_task: int | None) -> Iterator[BenchmarkPrompt]:
    """Yield the valid rows in order, and log the others."""
    text = load_tokenizer(config.model)
    limits = model_limits(config.model)
    count: Counter[str] = Counter()
    for request in requests_of(plan_input(config)):
        task = str(request.carried.get(GROUP_BY) or NO_TASK)
        ask = partial(_sequence_of, request, config, text)
        if per_task is not None and count[task] == per_task:
            continue
        try:
            check_length(ask(), limits.max_model_len, limits.vocab_size)
        except RequestError as error:
            log.warning("left out: %s", request.error_text(error))
            continue
        count[task] += 1
        yield BenchmarkPrompt(task, ask)


def _sequence_of(
    request: Request, config: JobConfig, text: Tokenizer | None
) -> engine_sequence.Sequence:
    [sequence] = sequences_of(request, config, text, n=1)
    return sequence


def _longest(questions: Sequence[BenchmarkPrompt]) -> int:
    """Return the tokens of the longest prompt with its output: the size of the engines' caches."""
    sequences = [question.ask() for question in questions]
    return max(len(sequence.prompt_ids) + sequence.sampling.token_limit for sequence in sequences)


def _with_log(turns: Iterator[Round], temperature: float, num_ways: int) -> Iterator[Round]:
    """Log a line for every task that begins."""
    last = None
    for turn in turns:
        if turn.group != last:
            last = turn.group
            log.info("T = %g, %s: %d methods answer", temperature, turn.group, num_ways)
        yield turn


def _cells(
    turns: Mapping[float, Sequence[Round]], ways: Sequence[DraftMethod], causal_lm: CausalLM
) -> Iterator[dict[str, Any]]:
    """Yield the numbers for each temperature, method and task, and for all tasks (task None)."""
    names = {way.name for way in ways}
    identity = partial(_identity, causal_lm)
    for temperature, here in turns.items():
        tasks = [*dict.fromkeys(turn.group for turn in here), None]
        for way in ways:
            others = names - {way.name, PLAIN_NAME}
            references = (name for name in (way.reference, PUBLISHED) if name in others)
            reference = next(references, None)
            for task in tasks:
                of_task = [turn for turn in here if task in (turn.group, None)]
                numbers = figures(of_task, way.name, PLAIN_NAME, reference, identity)
                yield {"temperature": temperature, "method": way.name, "task": task} | numbers


def _identity(
    causal_lm: CausalLM,
    answers: Sequence[engine_sequence.Sequence],
    plain: Sequence[engine_sequence.Sequence],
) -> Equivalence:
    """Compare whole outputs, sampled or greedy."""
    return compare(
        causal_lm,
        [s.prompt_ids for s in plain],
        [[*s.output_ids, OUTPUT_END] for s in answers],
        [[*s.output_ids, OUTPUT_END] for s in plain],
        [s.sampling for s in plain],
    )


def _metadata(
    config: JobConfig, ways: Sequence[DraftMethod], batch: int, causal_lm: CausalLM
) -> dict[str, Any]:
    on_gpu = causal_lm.device.type == "cuda"
    return {
        "eagle_ray": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "dtype": str(causal_lm.dtype).removeprefix("torch."),
        "target": config.model.target,
        "batch": batch,
        "interval_takes": MIN_ROUNDS * batch,  # questions
        "input": config.input.path,
        "methods": {way.name: way.as_json() for way in ways},
    }
