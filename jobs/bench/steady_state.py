"""The engine's steady state without a GPU: python -m jobs.bench.steady_state --slots 16 64 256 --json FILE

An endless stream of random prompts runs on the embedded pair, with steps replayed in the order in
which a GPU's host launches them (`models/graphs.py` emulates that on a CPU). Outputs have lengths
uniform in --outputs and end there.

    share_ahead             steps launched before the one before them was read, of all steps
    prompt_passes_per_step  passes over prompts alone; each reads all weights
    slots_busy              sequences that got tokens in a step, of all slots; not the row of one that had finished
    host_ms_per_step        milliseconds of step() on a device that costs nothing

For the last one the engine runs once more, on *recorded* passes: each replay copies its inputs and
returns what its first run returned, and a prompt's pass returns tensors made before. All else that
the host does in a step runs, copies and eager operations included. --null-device does this part
alone. Garbage collection is off meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_ray.assembly.assemble import grammar_compiler
from eagle_ray.assembly.hub import download
from eagle_ray.core.sequence import Sequence
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.verify import VerifyStepOutput
from eagle_ray.methods.drafter import Drafter, NullDrafter
from eagle_ray.methods.eagle.checkpoint import load_head
from eagle_ray.methods.eagle.drafter import EagleDrafter
from eagle_ray.methods.pair_drafter import Spans
from eagle_ray.models.graphs import CudaGraphRunner, EagerGraph, InputBuffers, tensors_of
from eagle_ray.models.loader import load_causal_lm
from eagle_ray.models.packed_linear import pack_linears
from eagle_ray.models.target import PromptBatch, TargetModel, TargetOutput
from eagle_ray.planner.planner import UniformPlanner
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.text.tokenizer import Tokenizer

MAX_MODEL_LEN = 512
PREFILL_TOKENS = 4096  # a step, as on a GPU
LONG_STRING = {"type": "string", "minLength": 4 * MAX_MODEL_LEN}


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of the engine.

    Attributes:
        slots: sequences at once.
        outputs, prompts: fewest and most tokens.
        waiting: requests that wait per slot.
        schema_every: one request in this many has a JSON schema; 0 is none.
        num_windows: sequences per slot that finish while counting.
    """

    slots: int
    outputs: tuple[int, int] = (32, 200)
    prompts: tuple[int, int] = (8, 40)
    waiting: int = 2
    schema_every: int = 0
    num_windows: int = 3

    def requests(self, vocab_size: int, seed: int = 0) -> Iterator[Sequence]:
        """Yield sequences without end. The first of each slot are cut at random, as if all had begun at some time."""
        draw, i = random.Random(seed), 0
        while True:
            length = draw.randint(*self.outputs)
            if i < self.slots:
                length = draw.randint(1, length)
            prompt = [draw.randrange(3, vocab_size) for _ in range(draw.randint(*self.prompts))]
            has_schema = bool(self.schema_every) and i % self.schema_every == 0
            schema = LONG_STRING if has_schema else None
            params = SamplingParams(
                max_tokens=length, ignore_eos=not has_schema, seed=i, json_schema=schema
            )
            yield Sequence(str(i), prompt, params)
            i += 1


@dataclass(frozen=True, slots=True)
class SteadyState:
    """What a stream of requests made of an engine; see the module's text."""

    slots: int
    share_ahead: float | None
    prompt_passes_per_step: float | None
    slots_busy: float | None
    host_ms_per_step: float | None


class RecordedGraph:
    """A capture on a device that costs nothing: the function runs once, and its results stand for all later ones.

    Every tree of a verify pass gets the first one's results, since that one is no padding.
    """

    def __init__(self, function: Callable[..., Any], inputs: InputBuffers):
        self.inputs, self._function = inputs, function
        self._has_run, self._results = False, None

    def replay(self) -> Any:
        if not self._has_run:
            self._has_run, self._results = True, self._function(*self.inputs.tensors)
            if isinstance(self._results, VerifyStepOutput):
                for tensor in tensors_of([self._results.result, self._results.record]):
                    tensor.copy_(tensor[:1].clone().expand_as(tensor))
        return self._results


class RecordedGraphRunner(CudaGraphRunner):
    """Replays RecordedGraphs."""

    def try_capture(
        self, key: tuple[Hashable, ...], function: Callable[..., Any], inputs: InputBuffers
    ) -> EagerGraph | RecordedGraph:
        return RecordedGraph(function, inputs)


class RecordedTarget(TargetModel):
    """A target whose passes over prompts cost nothing."""

    _whole: TargetOutput | None = None

    def prefill(self, prompts: PromptBatch) -> TargetOutput:
        if self._whole is None:
            real = super().prefill(prompts)
            rows = [(PREFILL_TOKENS, x.shape[1]) for x in (real.logits, real.hidden, real.features)]
            self._whole = TargetOutput(*(real.logits.new_zeros(shape) for shape in rows))
        num_rows = len(prompts.tokens)
        whole = self._whole
        return TargetOutput(
            whole.logits[: len(prompts.slots)], whole.hidden[:num_rows], whole.features[:num_rows]
        )


class RecordedEagleDrafter(EagleDrafter):
    """A drafter that reads prompts at no cost."""

    def _read_spans(self, spans: Spans, tokens: Tensor, features: Tensor) -> None:
        pass


def make_engine(slots: int, tree: TreeBounds, is_recorded: bool = False) -> Engine:
    """Return an engine over the embedded pair, which admits sequences as a job does.

    Args:
        tree: of every draft; NO_TREE is plain decoding.
        is_recorded: passes cost nothing.
    """
    path = download("embedded:tiny", "target")
    causal_lm = load_causal_lm(path, torch.float32, "cpu")
    pack_linears(causal_lm)
    target = (RecordedTarget if is_recorded else TargetModel)(
        causal_lm, slots, MAX_MODEL_LEN + tree.num_positions
    )
    drafter: Drafter = NullDrafter()
    if tree.max_nodes:
        head = load_head(download("embedded:tiny", "draft"), causal_lm.config).eval()
        drafter = (RecordedEagleDrafter if is_recorded else EagleDrafter)(head, target)
    graphs = (RecordedGraphRunner if is_recorded else CudaGraphRunner)(
        "cpu", slots, target.cache.capacity, fused=True
    )
    engine = Engine(
        target, drafter, UniformPlanner(tree), MAX_MODEL_LEN, tree, PREFILL_TOKENS, graphs
    )
    engine.grammars = grammar_compiler(Tokenizer.load(path), target)
    engine.order_for_throughput()
    return engine


@torch.inference_mode()
def measure(engine: Engine, work: Workload) -> SteadyState:
    """Run the stream until num_windows sequences per slot have finished, after one per slot that does not count."""
    requests, unfinished = work.requests(engine.target.vocab_size), 0

    def run(num_sequences: int) -> float:
        """Return the seconds of the steps until this number of sequences have finished."""
        nonlocal unfinished
        num_finished, seconds = 0, 0.0
        while num_finished < num_sequences:
            while unfinished < (1 + work.waiting) * work.slots:
                engine.add(next(requests))
                unfinished += 1
            started = time.perf_counter()
            finished = len(engine.step())
            seconds += time.perf_counter() - started
            unfinished -= finished
            num_finished += finished
        return seconds

    run(work.slots)
    before = asdict(engine.counters)
    gc.collect()
    gc.disable()
    try:
        seconds = run(work.num_windows * work.slots)
    finally:
        gc.enable()
    counts = {
        name: value - before[name]
        for name, value in asdict(engine.counters).items()
        if name.startswith("num_")
    }
    steps = counts["num_steps"]
    return SteadyState(
        work.slots,
        counts["num_ahead"] / steps,
        counts["num_prefill_passes"] / steps,
        counts["num_slot_steps"] / (steps * work.slots),
        1000 * seconds / steps,
    )


def steady_state(work: Workload, tree: TreeBounds, null_device_only: bool = False) -> SteadyState:
    """Return the counts of an emulated run and the host's time of a recorded one, or the latter alone."""
    host_ms = measure(make_engine(work.slots, tree, is_recorded=True), work).host_ms_per_step
    if null_device_only:
        return SteadyState(work.slots, None, None, None, host_ms)
    counted = measure(make_engine(work.slots, tree), work)
    return SteadyState(
        work.slots, counted.share_ahead, counted.prompt_passes_per_step, counted.slots_busy, host_ms
    )


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    found = []
    print(
        "| slots | steps ahead | prompt passes a step | slots busy | host ms a step |\n|---|---|---|---|---|"
    )
    for slots in args.slots:
        work = Workload(
            slots,
            tuple(args.outputs),
            tuple(args.prompts),
            args.waiting,
            args.schema_every,
            args.sequences,
        )
        state = steady_state(work, TreeBounds(*args.tree), args.null_device)
        found.append(asdict(state))
        cells = [
            "-" if value is None else f"{value:.3f}" for value in list(asdict(state).values())[1:]
        ]
        print(f"| {slots} | " + " | ".join(cells) + " |", flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(found, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument(
        "--json", type=Path, help="file of the results, one object for each number of slots"
    )
    parser.add_argument(
        "--outputs",
        type=int,
        nargs=2,
        default=[32, 200],
        help="fewest and most tokens of an output",
    )
    parser.add_argument(
        "--prompts", type=int, nargs=2, default=[8, 40], help="fewest and most tokens of a prompt"
    )
    parser.add_argument("--waiting", type=int, default=2, help="requests that wait, per slot")
    parser.add_argument(
        "--tree",
        type=int,
        nargs=3,
        default=[0] * 3,
        help="nodes, depth and width; all 0 drafts nothing",
    )
    parser.add_argument(
        "--schema-every",
        type=int,
        default=0,
        help="one request in this many has a JSON schema; 0 is none",
    )
    parser.add_argument(
        "--sequences", type=int, default=3, help="sequences per slot that finish while counting"
    )
    parser.add_argument("--null-device", action="store_true", help="measure the host's time alone")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
