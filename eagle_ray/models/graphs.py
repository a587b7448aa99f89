"""CudaGraphRunner: passes of fixed shapes, captured once each and replayed, so that a step on a GPU is a few launches.

    graphs = CudaGraphRunner.of(target)
    engine = Engine(target, drafter, planner, ..., graphs=graphs)
    graphs.summary                       # "31 graphs in 9.4 s, 212 MiB; 5120 replays"

The keys are few, at most MAX_AHEAD for up to 512 slots: at 256 there are 19 plain passes by batch
size, 38 passes over trees by rows and trees, and 40 parts of drafts, by rows or by sequences and
width. `graph_warmup` captures all of them before the first request; on an H200 a capture takes 0.02
to 0.1 s once its kernels are compiled. Any other key is captured at its first use, after two
warm-up runs on a side stream, all of them on padding alone, so a capture leaves nothing in the KV
cache. Captures of one pool may reuse the memory of earlier captures' intermediates. So each kind of
pass, key[0], has a pool of its own: when a pass is replayed, no result of the same kind is still in
use, while a draft's results are used until its tree is verified.

On a CPU nothing can be captured: the function is called again on the same input tensors, and its
results are copied into those of the first call. So errors in padding, buckets or the lifetime of
results show on a CPU too.

If a kernel cannot be compiled while a pass is captured, Triton's kernels are turned off and the
pass is captured once more on the portable path. If that fails, or CUDA refuses, this pass runs
eagerly and all others are still captured: torch's product of some MoE layers, for example, copies
to the host on some GPUs, but a draft head does not. Either is logged once. After MAX_FAILED_CAPTURES in a
row no other pass of its kind is captured, and those that are go on.
"""

from __future__ import annotations

import logging
import math
import operator
import sys
import time
from bisect import bisect_left
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eagle_ray.attention.triton_attention import uses_triton
from eagle_ray.core.errors import OUT_OF_MEMORY, first_line_of
from eagle_ray.core.sampling_batch import ALL_KINDS, Kind, PaddedInput
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.kernels.availability import is_triton_error, turn_off
from eagle_ray.models.target import TargetModel
from eagle_ray.tree.expand import DraftPlan

log = logging.getLogger("eagle_ray")

GRAPHS = "EAGLE_RAY_GRAPHS"  # off or on
MAX_AHEAD = 100  # graphs of an engine of up to 512 slots that are captured before the first request
ROW_SIZES = (8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)  # rows of a pass over trees
LARGE_ROWS = 512  # past the last of them, rows are padded to a multiple of this
LARGEST_PASS_ROWS_PER_TREE = 4  # rows for each tree in the largest pass, where there are many trees
# Trees of a pass; attention tiles are chosen for rows spread evenly over them.
TREE_SIZES = (
    1,
    4,
    16,
    64,
    256,
)
CAPTURED_WIDTHS = (1, 2, 4)  # widths of levels that are captured besides the widest, for drafts of
NARROW_FROM = 16  # sequences, padding included: below, a level takes about as long for any width
NARROW_LEVEL = 2  # the widest level of the finer sizes: large batches have narrow ones
SIZE_MULTIPLE = 16  # sizes above 64 are multiples of it
# With more slots, sizes past 64 lie further apart, so that there are no more graphs.
FINE_SLOTS = 256
# Captures of a kind of pass that may fail in a row before no more are tried; out of memory is not
# counted.
MAX_FAILED_CAPTURES = 3
MAX_GRAPHS = 64  # besides those captured ahead; the one that was not used for longest is dropped
# Runs before a recording: what libraries choose or compile at first must not be recorded.
WARM_UPS = 2
MIN_CONTEXT = {"cpu": 64, "cuda": 1024}
# A GPU's kernels leave early what a context does not have; a CPU reads it.
CONTEXT_GROWTH = {
    "cpu": 2,
    "cuda": 4,
}
POISON = 0x7F  # in every byte: large integers, and floats that no result would hold
MIB = 2**20


@dataclass(frozen=True, slots=True)
class PassSizes:
    """The sizes of captured passes, from which a planner knows how many rows a plan really costs.

    Attributes:
        rows: returns the rows of the captured pass over trees that serves a number of rows.
        batch: returns the rows of the captured plain pass that serves a batch size.
        pairs: returns the rows of the captured pass that reads up to this many pending pairs of a
            draft; None if it has as many rows as there are pairs.
        level_rows: returns the rows of the captured pass that drafts a further level, for a number
            of sequences and a width.
        max_rows: returns the maximum rows of a pass over trees of a number of sequences.
    """

    rows: Callable[[int], int] = int
    batch: Callable[[int], int] = int
    pairs: Callable[[int], int] | None = None
    level_rows: Callable[[int, int], int] = operator.mul
    max_rows: Callable[[int], int] = lambda num_sequences: sys.maxsize


@dataclass(frozen=True, slots=True)
class SizeRule:
    """The sizes that passes of a kind are padded to: given ones up to 64, then a geometric series.

    Attributes:
        small: sizes up to 64, ascending.
        growth: minimum factor between two sizes above 64.
        coarse_growth: that factor for engines with more than FINE_SLOTS slots.
    """

    small: tuple[int, ...]
    growth: float
    coarse_growth: float

    def sizes(self, largest: int, is_coarse: bool) -> list[int]:
        """Return the sizes up to `largest`, which is always the last. Sizes above 64 are multiples of 16."""
        sizes = [size for size in self.small if size < largest]
        growth = self.coarse_growth if is_coarse else self.growth
        while (
            sizes
            and sizes[-1] >= self.small[-1]
            and (size := _multiple(sizes[-1] * growth)) < largest
        ):
            sizes.append(size)
        return [*sizes, largest]


# Sequences of a plain pass: all multiples of 16 up to 256.
PLAIN_SIZES = SizeRule((1, 2, 4, 8, 16, 32, 64), 17 / 16, 6 / 5)
# Sequences of a draft's levels up to NARROW_LEVEL wide.
FEW_ROWS = SizeRule((1, 4, 16, 64), 1.4, 2.0)
MANY_ROWS = SizeRule((1, 4, 16, 32, 64), 2.0, 4.0)  # sequences of a draft's wider levels
PAIR_SIZES = SizeRule((8, 32, 64), 2.0, 2.0)  # pairs that a draft begins by reading


class CudaGraphRunner:
    """Captured passes by key.

    Args:
        num_slots, capacity: upper bounds on batch size and context length.
        fused: whether Triton's kernels run the passes. They read a context only to its end and
            decide per row how it is sampled, so one graph serves every context length and kind of
            sampling.

    Attributes:
        contexts: context lengths that passes are captured for, ascending.
        captured: number of captures by kind of pass, key[0].
        num_replayed: number of replays.
        seconds, bytes: time and device memory spent on captures.
        failures: reasons why captures failed, by key; these passes run eagerly.
        agrees: returns whether a condition holds on all ranks of the engine, given whether it holds
            on this one.
    """

    def __init__(
        self, device: torch.device | str, num_slots: int, capacity: int, fused: bool = False
    ):
        self._device = torch.device(device)
        self._num_slots = num_slots
        self._fused = fused
        self._sizes: dict[tuple[SizeRule, int], list[int]] = {}  # by rule and largest size
        self.contexts = [capacity] if fused else _contexts(self._device.type, capacity)
        # By last use.
        self._graphs: OrderedDict[tuple[Hashable, ...], EagerGraph | CudaGraph] = OrderedDict()
        # Else greedy and sampled passes too.
        self._max_graphs = MAX_GRAPHS * (1 if fused else 2 * len(self.contexts))
        self._permanent: set[Hashable] = set()  # never dropped
        self._is_keeping = False
        self._pools: dict[Hashable, CudaPool] = {}  # by kind of pass
        self.captured: Counter[Hashable] = Counter()
        self.num_replayed = self.bytes = 0
        self.seconds = 0.0
        self.failures: dict[tuple[Hashable, ...], str] = {}
        self.agrees: Callable[[bool], bool] = bool
        # Failures in a row by kind of pass, on any rank.
        self._refusals: Counter[Hashable] = Counter()
        self._lacked_memory = False  # when the last capture failed here

    @classmethod
    def of(cls, target: TargetModel) -> CudaGraphRunner:
        return cls(
            target.device, target.cache.num_slots, target.cache.capacity, uses_triton(target.cache)
        )

    def batch_size(self, num_sequences: int) -> int:
        """Return the batch size of the captured plain pass that serves this batch size."""
        return self._padded(num_sequences, PLAIN_SIZES, self._num_slots)

    def draft_size(self, num_sequences: int, width: int = 1) -> int:
        """Return for how many sequences the pass is captured that drafts a level of this width; the
        first level has width 1."""
        return self._padded(
            num_sequences, FEW_ROWS if width <= NARROW_LEVEL else MANY_ROWS, self._num_slots
        )

    def draft_width(self, width: int, num_children: int, num_sequences: int) -> int:
        """Return the captured width of draft levels that serves a plan of this width."""
        return next(
            (each for each in self.level_widths(num_children, num_sequences) if width <= each),
            num_children,
        )

    def level_widths(self, num_children: int, num_sequences: int) -> list[int]:
        """Return the widths of the levels that are captured for drafts of this many sequences, the widest last."""
        narrow = CAPTURED_WIDTHS if self.draft_size(num_sequences) >= NARROW_FROM else ()
        return [*(width for width in narrow if width < num_children), num_children]

    def level_rows(self, plan: DraftPlan, num_sequences: int) -> int:
        """Return the rows of the captured pass that drafts a further level of this plan."""
        width = self.draft_width(plan.width, plan.children, num_sequences)
        return self.draft_size(num_sequences, width) * width

    def level_passes(self, num_children: int) -> list[tuple[int, int]]:
        """Return sequences and width of every captured pass that drafts a further level, the largest first."""
        passes = {
            (self.draft_size(n, width), width)
            for n in range(1, self._num_slots + 1)
            for width in self.level_widths(num_children, n)
        }
        return sorted(passes, key=lambda each: (each[0] * each[1], each), reverse=True)

    def pair_rows(self, num_pairs: int, max_pairs: int) -> int:
        """Return the rows of the captured pass that reads up to this many pairs, at most max_pairs per slot."""
        return self._padded(num_pairs, PAIR_SIZES, self._num_slots * max_pairs)

    def _padded(self, size: int, rule: SizeRule, largest: int) -> int:
        """Return the size of the pass that is replayed for this one, which is at most `largest`."""
        if (rule, largest) not in self._sizes:
            self._sizes[rule, largest] = rule.sizes(largest, self._num_slots > FINE_SLOTS)
        sizes = self._sizes[rule, largest]
        return sizes[bisect_left(sizes, min(size, largest))]

    def num_rows(self, num_rows: int) -> int:
        return pass_rows(num_rows)

    def max_rows(self, num_sequences: int, max_nodes: int) -> int:
        """Return the rows of the largest pass over this many trees, each of at most max_nodes drafted nodes."""
        num_trees = min(_bucket(num_sequences, TREE_SIZES, TREE_SIZES[-1]), self._num_slots)
        wanted = num_sequences * (1 + max_nodes)
        return self.num_rows(
            min(wanted, max(ROW_SIZES[-1], LARGEST_PASS_ROWS_PER_TREE * num_trees))
        )

    def pass_sizes(self, bounds: TreeBounds) -> PassSizes:
        """Return the sizes of the captured passes, for a planner. Each drafted node has bounds.top_k children."""

        def level_rows(num_sequences: int, width: int) -> int:
            return self.level_rows(DraftPlan(2, width, num_children=bounds.top_k), num_sequences)

        pairs = partial(self.pair_rows, max_pairs=bounds.max_depth + 1)
        max_rows = partial(self.max_rows, max_nodes=bounds.max_nodes)
        return PassSizes(self.num_rows, self.batch_size, pairs, level_rows, max_rows)

    def sizes(self, padded: Callable[[int], int], largest: int) -> list[int]:
        """Return every size to which a padding function maps 1 to `largest`, the largest first."""
        return sorted({padded(n) for n in range(1, largest + 1)}, reverse=True)

    @property
    def num_slots(self) -> int:
        return self._num_slots

    def num_trees(self, num_sequences: int, num_rows: int) -> int:
        size = _bucket(num_sequences, TREE_SIZES, TREE_SIZES[-1]) if self._fused else num_rows
        return min(size, num_rows, self._num_slots)

    def tree_passes(self, max_nodes: int) -> list[tuple[int, int]]:
        """Return trees and rows of every pass over trees with at most max_nodes drafted nodes each,
        the largest first."""
        rows_of_all = self.sizes(self.num_rows, self.max_rows(self._num_slots, max_nodes))
        passes = {
            (self.num_trees(size, rows), rows)
            for size in range(1, self._num_slots + 1)
            for rows in rows_of_all
            if size < rows <= self.max_rows(size, max_nodes)
        }
        return sorted(passes, key=lambda each: each[::-1], reverse=True)

    def num_nodes(self, num_nodes: int) -> int:
        return 1 << (num_nodes - 1).bit_length()

    def context(self, longest: int) -> int:
        return next((bound for bound in self.contexts if bound >= longest), self.contexts[-1])

    def sampling_kind(self, kind: Kind) -> Kind:
        return ALL_KINDS if self._fused else kind

    @property
    def num_captured(self) -> int:
        return self.captured.total()

    def has(self, key: tuple[Hashable, ...]) -> bool:
        """Return whether a pass is captured. If so, it is kept at least until its next replay."""
        if key in self._graphs:
            self._graphs.move_to_end(key)
        return key in self._graphs

    def record(
        self, key: tuple[Hashable, ...], function: Callable[..., Any], inputs: Sequence[PaddedInput]
    ) -> bool:
        """Capture a pass unless it is captured already; return whether it can be replayed."""
        if not self.has(key) and self.may_capture(key):
            self._capture(key, function, InputBuffers(inputs))
        return key in self._graphs

    def run(
        self, key: tuple[Hashable, ...], function: Callable[..., Any], inputs: Sequence[PaddedInput]
    ) -> Any:
        """Replay a pass on these inputs, padded; it is captured first if needed.

        Results are in tensors of the padded shapes, valid until the next replay.
        """
        graph = self._graphs.get(key)
        if graph is not None:
            self.num_replayed += 1
            self._graphs.move_to_end(key)
            graph.inputs.fill(inputs)
            return graph.replay()
        buffers = InputBuffers(inputs)
        graph = self._capture(key, function, buffers) if self.may_capture(key) else None
        buffers.fill(inputs)
        return function(*buffers.tensors) if graph is None else graph.replay()

    def replays(self, kind: Hashable) -> bool:
        """Return whether passes of this kind, key[0], can be replayed: some are captured, or
        captures have not kept failing."""
        return self._refusals[kind] < MAX_FAILED_CAPTURES or any(
            key[0] == kind for key in self._graphs
        )

    @property
    def failure(self) -> str | None:
        """Return a text on which passes run eagerly because their capture failed, with the first
        reason; None if none do."""
        if not self.failures:
            return None
        counts = Counter(key[0] for key in self.failures)
        passes = [
            f"{count if self.replays(kind) else 'all'} {kind!r}" for kind, count in counts.items()
        ]
        return (
            f"capturing {' and '.join(passes)} passes failed ({next(iter(self.failures.values()))})"
        )

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep all passes captured in this context for good, since every job replays them."""
        self._is_keeping = True
        try:
            yield
        finally:
            self._is_keeping = False

    def _drop_one(self) -> None:
        """Drop the least recently used pass if there are too many, not counting those that are kept."""
        others = [key for key in self._graphs if key not in self._permanent]
        if len(others) >= self._max_graphs:
            del self._graphs[others[0]]

    @property
    def summary(self) -> str:
        """Return a line of text: number of captures, seconds, memory, replays."""
        made = f"{self.num_captured} graphs in {self.seconds:.1f} s, {self.bytes / MIB:.0f} MiB"
        return f"{made}; {self.num_replayed} replays"

    def _capture(
        self, key: tuple[Hashable, ...], function: Callable[..., Any], inputs: InputBuffers
    ) -> EagerGraph | CudaGraph | None:
        """Capture a pass, or return None if that fails."""
        started = time.monotonic()
        before = self.used_bytes()
        self._lacked_memory = False
        graph = self.try_capture(key, function, inputs)
        is_captured = self.agrees(graph is not None) if self.on_cuda else True
        if graph is None or not is_captured:
            self.failures.setdefault(key, "another rank could not")
            # Which says nothing of smaller passes.
            self._refusals[key[0]] += self.agrees(not self._lacked_memory)
            return None
        self._refusals[key[0]] = 0
        self._drop_one()  # only now: a pool without any graph takes no further capture
        self._graphs[key] = graph
        if self._is_keeping:
            self._permanent.add(key)
        seconds = time.monotonic() - started
        size = self.used_bytes() - before
        self.captured[key[0]] += 1
        self.seconds += seconds
        self.bytes += size
        log.info("recorded %s: %.2f s, %.1f MiB; %s", key, seconds, size / MIB, self.summary)
        return graph

    def try_capture(
        self, key: tuple[Hashable, ...], function: Callable[..., Any], inputs: InputBuffers
    ) -> EagerGraph | CudaGraph | None:
        """Capture a pass, on the portable path if Triton fails; return None if CUDA fails."""
        if not self.on_cuda:
            return EagerGraph(function, inputs)
        try:
            graph = CudaGraph(function, inputs, self.pool(key[0]))
        except Exception as error:
            if is_triton_error(error) and turn_off(error):
                return self.try_capture(key, function, inputs)
            self._note_failure(key, error)
            return None
        return graph

    def may_capture(self, key: tuple[Hashable, ...]) -> bool:
        return key not in self.failures and self._refusals[key[0]] < MAX_FAILED_CAPTURES

    def _note_failure(self, key: tuple[Hashable, ...], error: Exception) -> None:
        """Remember that a capture failed; log the first of each kind of pass."""
        is_first = all(other[0] != key[0] for other in self.failures)
        self.failures[key] = first_line_of(error)
        self._lacked_memory = bool(OUT_OF_MEMORY.search(f"{type(error).__name__}: {error}"))
        level = logging.WARNING if is_first else logging.INFO
        log.log(
            level,
            "no CUDA graph of %s, which runs eagerly: capturing it failed (%s)",
            key,
            self.failures[key],
        )

    @property
    def on_cuda(self) -> bool:
        return self._device.type == "cuda"

    def pool(self, kind: Hashable) -> CudaPool:
        if kind not in self._pools:
            self._pools[kind] = CudaPool()
        return self._pools[kind]

    def used_bytes(self) -> int:
        """Return the bytes in use on the device by any process, executables of graphs included; 0 on a CPU."""
        if not self.on_cuda:
            return 0
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


class InputBuffers:
    """The input tensors of one key, at a fixed address for every run."""

    def __init__(self, inputs: Sequence[PaddedInput]):
        self.tensors = [padded.tensor.new_full(padded.shape, padded.fill) for padded in inputs]
        self._given: list[Tensor | None] = [None] * len(inputs)
        # The corners that inputs are in.
        self._filled = [tuple(0 for _ in padded.shape) for padded in inputs]

    def fill(self, inputs: Sequence[PaddedInput]) -> None:
        """Copy the inputs to the beginning of each dimension of the buffers and pad the rest.

        Inputs of one dtype whose buffers have no gaps are copied together: on a GPU that is one
        launch.
        """
        corners: defaultdict[Hashable, list[Tensor]] = defaultdict(list)
        tensors: defaultdict[Hashable, list[Tensor]] = defaultdict(list)
        for i, (buffer, padded) in enumerate(zip(self.tensors, inputs, strict=True)):
            tensor = padded.tensor
            if self._given[i] is not tensor:
                corner = _padded_corner(buffer, padded, self._filled[i])
                group = (
                    tensor.dtype,
                    tensor.device,
                    corner.is_contiguous() and tensor.is_contiguous(),
                )
                corners[group].append(corner)
                tensors[group].append(tensor)
                self._filled[i] = tensor.shape
            self._given[i] = tensor if padded.is_fixed else None
        for key, destinations in corners.items():
            torch._foreach_copy_(destinations, tensors[key], non_blocking=True)


def _padded_corner(buffer: Tensor, padded: PaddedInput, filled: tuple[int, ...]) -> Tensor:
    """Return the corner of a buffer that takes an input.

    Args:
        filled: the corner that holds the input before it.
    """
    shape = padded.tensor.shape
    if any(size < before for size, before in zip(shape, filled, strict=True)):
        buffer.fill_(padded.fill)
    return buffer if buffer.shape == shape else buffer[tuple(slice(size) for size in shape)]


class EagerGraph:
    """The CPU's substitute for a CUDA graph: it calls the function again and copies its results to a fixed address.

    All other memory that the call returns is overwritten with POISON, because a real graph would
    not write it either.
    """

    def __init__(self, function: Callable[..., Any], inputs: InputBuffers):
        self.inputs = inputs
        self._function = function
        self._results = function(*inputs.tensors)

    def replay(self) -> Any:
        again = self._function(*self.inputs.tensors)
        for result, fresh in zip(tensors_of(self._results), tensors_of(again), strict=True):
            result.copy_(fresh)
        lasting = {
            _num_bytes(tensor) for tensor in (*self.inputs.tensors, *tensors_of(self._results))
        }
        for fresh in tensors_of(again):
            if _num_bytes(fresh) not in lasting:
                fresh.untyped_storage().fill_(POISON)  # type: ignore[attr-defined]  # torch's stub lacks it
        return self._results


def _num_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class CudaPool:
    """Memory shared by all captures of a kind, and the stream on which they are made."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()

    def end_failed_capture(self) -> None:
        """Detach the allocator from the pool, which torch does after a capture, but not after a failed one."""
        device = torch.cuda.current_device()
        with suppress(RuntimeError):  # the allocator has left it
            torch._C._cuda_endAllocateToPool(device, self.handle)
            torch._C._cuda_releasePool(device, self.handle)


class CudaGraph:
    """One capture. Only its results keep their memory; the function keeps whatever else the capture reads."""

    def __init__(self, function: Callable[..., Any], inputs: InputBuffers, pool: CudaPool):
        self._function = function
        self.inputs = inputs
        self._graph = torch.cuda.CUDAGraph()
        here = torch.cuda.current_stream()
        pool.stream.wait_stream(here)
        with torch.cuda.stream(pool.stream):
            for _ in range(WARM_UPS):
                function(*inputs.tensors)
        here.wait_stream(pool.stream)
        recording = torch.cuda.graph(
            self._graph, pool=pool.handle, stream=pool.stream, capture_error_mode="thread_local"
        )
        try:
            # A failed capture leaves its own stream as the current one.
            with (
                torch.cuda.stream(here),
                recording,
            ):
                self._results = function(*inputs.tensors)
        except Exception:
            pool.end_failed_capture()
            raise

    def replay(self) -> Any:
        self._graph.replay()
        return self._results


def tensors_of(results: Any) -> Iterator[Tensor]:
    """Yield every tensor in a structure of dataclasses, lists and tuples, in order."""
    if isinstance(results, Tensor):
        yield results
    elif is_dataclass(results):
        for field in fields(results):
            yield from tensors_of(getattr(results, field.name))
    elif isinstance(results, list | tuple):
        for part in results:
            yield from tensors_of(part)


def _contexts(device: str, capacity: int) -> list[int]:
    bounds = [min(MIN_CONTEXT[device], capacity)]
    while bounds[-1] < capacity:
        bounds.append(min(bounds[-1] * CONTEXT_GROWTH[device], capacity))
    return bounds


def pass_rows(num_rows: int) -> int:
    """Return the rows of the captured pass over trees that serves this many rows."""
    return _bucket(num_rows, ROW_SIZES, LARGE_ROWS)


def _bucket(size: int, sizes: Sequence[int], step: int) -> int:
    """Return the next of these sizes, or the next multiple of the step past the last of them."""
    return (
        -(-size // step) * step
        if size > sizes[-1]
        else next(bucket for bucket in sizes if bucket >= size)
    )


def _multiple(size: float) -> int:
    """Return the next multiple of SIZE_MULTIPLE."""
    return math.ceil(size / SIZE_MULTIPLE) * SIZE_MULTIPLE
