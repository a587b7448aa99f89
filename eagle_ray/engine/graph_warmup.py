"""Capture CUDA graphs before the first request instead of while serving.

    graphs = graphs_for(target, drafter)             # None if steps are not replayed
    capture(engine)                                  # a planner that may choose any plan within the engine's bounds
    capture_fixed(engine)                            # a planner with one plan

`capture` records every pass that such a planner can ask for, on padding alone: plain passes of
every batch size, passes over trees of every number of trees and rows, and the parts of drafts of
every size and width. With Triton's kernels that is one graph each; without them, one for each
context bound and for greedy and for sampled sequences. `capture_fixed` runs steps with the planner
itself and records the passes that read pending pairs, for any number of pairs. Passes that
CAPTURE_S leaves no time for, and those that return log-probabilities, are captured at their first
use.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from functools import partial

from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.errors import ConfigError
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.engine.calibrate import (
    SHORT_OUTPUT,
    SHORT_PROMPT,
    CalibrationRun,
    CalibrationSetting,
    ScriptedPlanner,
    calibration_mode,
)
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.verify import unsupported_reason
from eagle_ray.methods.drafter import Draft, Drafter
from eagle_ray.models.graphs import GRAPHS, CudaGraphRunner
from eagle_ray.models.target import TargetModel
from eagle_ray.parallel.lockstep import ALONE, Lockstep
from eagle_ray.planner.planner import Allocation, Planner
from eagle_ray.tree.expand import DraftPlan

log = logging.getLogger("eagle_ray")

CAPTURE_S = 60.0  # seconds of a start-up that may go into recording
LOG_EVERY_S = 5.0  # seconds between two lines of progress
TEMPERATURES = 0.0, 1.0


def graphs_for(target: TargetModel, drafter: Drafter) -> CudaGraphRunner | None:
    """Return the graph runner, or None if steps are not replayed: on a GPU where possible, or as
    EAGLE_RAY_GRAPHS=off or on says.

    On a CPU `on` runs padded passes of fixed shapes without being faster, for tests.
    """
    setting = os.environ.get(GRAPHS)
    if setting not in (None, "off", "on"):
        raise ConfigError(f"{GRAPHS}: {setting!r} is neither 'off' nor 'on'")
    if setting is None and target.device.type != "cuda":
        return None
    if (reason := unsupported_reason(target, drafter)) is not None:
        level = logging.WARNING if target.device.type == "cuda" else logging.INFO
        log.log(level, "steps are not replayed as CUDA graphs: %s", reason)
        return None
    return CudaGraphRunner.of(target)


def capture(engine: Engine) -> None:
    """Capture all passes that an idle engine may need, for any plan within its bounds.

    The drafter learns nothing from it, since it drafts on padding.
    """
    engine.lockstep.tell("capture")
    graphs = _graphs(engine)
    _run(graphs, list(_passes(engine, graphs)), engine.lockstep)
    engine.drafter.reset_learning()


def capture_fixed(engine: Engine) -> None:
    """Capture the steps of an engine with a fixed planner: plain decoding, uniform or static.

    The engine is left idle and its counters unchanged.
    """
    graphs = _graphs(engine)
    with calibration_mode(engine, ProxyPlanner(engine.planner)) as bench:
        steps = list(_steps(engine, graphs, bench))
        engine.lockstep.tell("keep_graphs", True)
        _run(graphs, [partial(_take, bench, steps, i) for i in range(len(steps))])
        engine.lockstep.tell("keep_graphs", False)
        capture_pairs(engine)


def capture_pairs(engine: Engine) -> None:
    """Capture, on every rank, the passes that read pending pairs, for any number of pairs."""
    engine.lockstep.tell("capture_pairs")
    graphs = _graphs(engine)
    parts = [part for bound in graphs.contexts for part in engine.drafter.pair_recordings(bound)]
    _run(graphs, parts, engine.lockstep)


class ProxyPlanner(ScriptedPlanner):
    """A ScriptedPlanner that asks another planner, one with a fixed plan, for every plan."""

    def __init__(self, planner: Planner) -> None:
        super().__init__()
        self._always = planner

    def plan(self, batch: DecodeBatch) -> DraftPlan:
        return self._always.plan(batch)

    def allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        return self._always.allocate(draft, plan, batch)


def _graphs(engine: Engine) -> CudaGraphRunner:
    assert engine.graphs is not None, "an engine without graphs records nothing"
    return engine.graphs


def _passes(engine: Engine, graphs: CudaGraphRunner) -> Iterator[Callable[[], None]]:
    """Yield a function for each pass that captures it.

    Short contexts come first. The largest pass of a kind comes first, so that later ones fit into
    its memory. Passes over trees also learn from drafts, so they follow those that allocate the
    drafts' buffers.
    """
    replayed = engine.verifier.replayed
    drafter = engine.drafter
    plain = graphs.sizes(graphs.batch_size, graphs.num_slots)
    trees = graphs.tree_passes(engine.bounds.max_nodes)
    for bound in graphs.contexts:
        yield from drafter.pair_recordings(bound)
        for params in _params(graphs):
            for size in plain:
                yield partial(replayed.record_plain, drafter, size, bound, params)
            yield from drafter.recordings(engine.bounds.top_k, bound, params)
            for num_trees, num_rows in trees:
                yield partial(replayed.record_trees, drafter, num_trees, num_rows, bound, params)


def _params(graphs: CudaGraphRunner) -> list[SamplingSettings]:
    """Return sampling parameters of each kind that a pass is recorded for in advance."""
    by_kind = {}
    for temperature in TEMPERATURES:
        kind = graphs.sampling_kind((temperature > 0, False, False, False))
        by_kind[kind] = SamplingSettings(temperature=temperature)
    return list(by_kind.values())


def _run(
    graphs: CudaGraphRunner, parts: list[Callable[[], None]], lockstep: Lockstep = ALONE
) -> None:
    """Run the parts until CAPTURE_S are over, with a line of progress every LOG_EVERY_S.

    Args:
        lockstep: lockstep of the ranks that run the parts; ALONE if the leader alone calls this.
    """
    started = time.monotonic()
    logged = started
    for i, part in enumerate(parts):
        now = time.monotonic()
        is_over = now - started > CAPTURE_S
        if lockstep.agree("capture time", partial(bool, is_over)):
            log.info("recording ahead ends after %d of %d passes", i, len(parts))
            break
        if now - logged > LOG_EVERY_S:
            log.info("recording ahead: %d of %d passes, %s", i, len(parts), graphs.summary)
            logged = now
        with graphs.keeping():
            part()
    log.info("recorded ahead in %.1f s: %s", time.monotonic() - started, graphs.summary)


Step = tuple[int, float, int]
"""Prompt length, temperature and batch size."""


def _take(bench: CalibrationRun, steps: list[Step], i: int) -> None:
    """Take step i; sequences of another length or temperature are new ones."""
    length, temperature, batch_size = steps[i]
    if i and (length, temperature) != steps[i - 1][:2]:
        bench.clear()
    bench.temperature = temperature
    bench.run_step(CalibrationSetting(batch_size, 1, 0, 0), length)


def _steps(engine: Engine, graphs: CudaGraphRunner, bench: CalibrationRun) -> Iterator[Step]:
    """Yield a step for every batch size: all with short prompts, then with longer contexts."""
    for length in [SHORT_PROMPT, *(bound + 1 for bound in graphs.contexts[:-1])]:
        if length > SHORT_PROMPT and length + SHORT_OUTPUT > engine.max_model_len:
            break
        for params in _params(graphs):
            max_sequences = bench.max_concurrent(length)
            for batch_size in _batch_sizes(graphs, engine.bounds.num_nodes, max_sequences):
                yield length, params.temperature, batch_size


def _batch_sizes(graphs: CudaGraphRunner, num_nodes: int, max_sequences: int) -> list[int]:
    """Return a batch size for each set of passes that trees of num_nodes nodes ask for, the largest first."""
    largest_by_passes = {}
    for n in range(1, max_sequences + 1):
        draft_sizes = [graphs.draft_size(n, width) for width in (1, num_nodes)]
        passes = (graphs.batch_size(n), *draft_sizes, *_tree_pass(graphs, n, num_nodes))
        largest_by_passes[passes] = n
    return sorted(largest_by_passes.values(), reverse=True)


def _tree_pass(graphs: CudaGraphRunner, num_sequences: int, num_nodes: int) -> tuple[int, int]:
    """Return trees and rows of the pass over full trees of this many sequences."""
    num_rows = graphs.num_rows(num_sequences * num_nodes)
    return graphs.num_trees(num_sequences, num_rows), num_rows
