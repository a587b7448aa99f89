"""verify_step: the device's part of a step, from the allocation of rows to the record that is copied to the host.

    rerank -> pack -> target pass -> sample -> accept -> commit -> drafter.extend -> record

The function runs eagerly on the step's own shapes, or is replayed as a graph on padded ones (`Verifier`). It does not
sync with the host. It changes the KV caches and the drafter's queue in place.

If a sequence of the batch has controls, its tokens are sampled from logits that the host adjusts by the paths of its
tree (`controlled_sampling`). Then the step is replayed in two halves, up to the target's pass and from its samples on,
and those tokens are an input of the second. They depend on the tokens of the step before, which the first half does
not: `Verifier.start` launches what it can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.core.decode_batch import DecodeBatch, DecodeSlots
from eagle_ray.core.graph_protocol import GraphRunner, PaddedInput
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.engine.controlled_sampling import ControlledRows
from eagle_ray.engine.step_output import step_record
from eagle_ray.engine.top_logprobs import log_probs_at
from eagle_ray.kernels.availability import retry_portable
from eagle_ray.methods.drafter import Draft, Drafter, VerifyOutput, idle_batch
from eagle_ray.models.target import PrefillBatch, PrefillOutput, TargetModel
from eagle_ray.planner.planner import Allocation
from eagle_ray.requests.parameters import MAX_TOP_LOGPROBS, SamplingParams
from eagle_ray.sampling.sampler import sample
from eagle_ray.tree.accept import VerifyResult, accept_path
from eagle_ray.tree.draft_tree import DraftTree, VerifyRows


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of a verify step.

    Attributes:
        num_nodes: nodes per tree, root included.
        num_rows: rows of the pass.
        max_depth: a bound on the nodes' depths; 0 if only roots are verified.
        logprobs: whether the record has log-probabilities.
        num_tops: how many of the likeliest tokens are recorded.
    """

    num_nodes: int
    num_rows: int
    max_depth: int
    logprobs: bool
    num_tops: int


@dataclass(frozen=True, slots=True)
class VerifyStepOutput:
    """Results of a verify step. record: see step_record. tops: ids and log-probabilities along each accepted path."""

    result: VerifyResult
    record: Int[Tensor, "B X"]
    tops: tuple[Int[Tensor, "B D1 K"], Float[Tensor, "B D1 K"]] | None
    prompted: PrefillOutput | None = None


@dataclass(frozen=True, slots=True)
class TargetPass:
    """A step after the target's pass.

    Attributes:
        at, sampling: of the batch, padded if the pass was replayed.
        logits, features: the target's, of each row.
        prompted: the output for prompt chunks of the same pass.
    """

    at: DecodeSlots
    sampling: SamplingBatch
    tree: DraftTree
    rows: VerifyRows
    logits: Float[Tensor, "R V"]
    features: Float[Tensor, "R H"]
    prompted: PrefillOutput | None


HalfPass = tuple[tuple, Callable[..., TargetPass], list[PaddedInput]]
"""Key, function and inputs of a step's pass up to the target's logits."""


@dataclass(frozen=True, slots=True)
class StartedPass:
    """A launched verify step. finish: launches what is left of it, once the tokens of the step before are committed."""

    shape: StepShape
    finish: Callable[[], VerifyStepOutput]


def verify_step(
    target: TargetModel,
    drafter: Drafter,
    batch: DecodeSlots,
    sampling: SamplingBatch,
    tree: DraftTree,
    keep: Bool[Tensor, "B N"],
    shape: StepShape,
    mark: Callable[[], None] = lambda: None,
    prompts: PrefillBatch | None = None,
    sizes: list[int] | None = None,
    controlled: ControlledRows | None = None,
) -> VerifyStepOutput:
    """Verify the kept nodes and commit the accepted paths.

    Args:
        mark: called right before and right after the target's pass.
        prompts: prompt chunks to compute in the same pass.
        sizes: kept nodes of each tree, if the host knows them.
        controlled: the rows of sequences with controls, if there are any.
    """
    passed = target_pass(target, batch, sampling, tree, keep, shape, mark, prompts, sizes)
    adjusted = None if controlled is None else controlled.picks(passed.logits, passed.sampling, passed.rows)
    return accept_and_commit(target, drafter, passed, shape, adjusted)


def target_pass(
    target: TargetModel,
    batch: DecodeSlots,
    sampling: SamplingBatch,
    tree: DraftTree,
    keep: Bool[Tensor, "B N"],
    shape: StepShape,
    mark: Callable[[], None] = lambda: None,
    prompts: PrefillBatch | None = None,
    sizes: list[int] | None = None,
) -> TargetPass:
    """Run the target over the kept nodes; see verify_step."""
    tree = tree.rerank(keep, shape.num_nodes)
    rows = tree.pack(batch.lengths, shape.num_rows, sizes)
    mark()
    prompted = None
    if prompts is None:
        logits, features = target.verify(tree, rows, batch, shape.max_depth)
    else:
        logits, features, prompted = target.forward_mixed(tree, rows, batch, shape.max_depth, prompts)
    mark()
    return TargetPass(batch, sampling, tree, rows, logits, features, prompted)


def accept_and_commit(
    target: TargetModel,
    drafter: Drafter,
    passed: TargetPass,
    shape: StepShape,
    adjusted: Int[Tensor, " R"] | None = None,
) -> VerifyStepOutput:
    """Sample after every row and commit the accepted paths. Log-probabilities are of the target's own logits, without
    controls, as vLLM's are by default.

    Args:
        adjusted: see ControlledRows.picks.
    """
    tree, rows, logits = passed.tree, passed.rows, passed.logits
    seq, positions = rows.seq.clamp(min=0), rows.positions + 1
    picks = sample(logits, passed.sampling, seq, positions)
    if adjusted is not None:
        picks = torch.where(adjusted >= 0, adjusted, picks)
    result = accept_path(tree, rows, picks, shape.max_depth)
    target.commit(passed.at, result)
    drafter.extend(passed.at, VerifyOutput(tree, rows, logits, passed.features, result))
    logprobs, tops = None, None
    if shape.logprobs:
        path_rows = rows.row_of.gather(1, result.accepted_nodes.clamp(min=0))
        logprobs, likeliest = log_probs_at(logits, path_rows.flatten(), result.tokens.flatten(), shape.num_tops)
        logprobs = logprobs.view_as(path_rows)
        if likeliest is not None:
            ids, log_probs = (x.view(*path_rows.shape, -1) for x in likeliest)
            tops = ids, log_probs
    return VerifyStepOutput(result, step_record(tree, result, shape.max_depth, logprobs), tops, passed.prompted)


class Verifier:
    """Runs verify_step, through a graph runner if there is one.

    Args:
        bounds: replayed passes are for the largest trees, so that their shape depends only on the numbers of
            sequences and rows.
    """

    def __init__(self, target: TargetModel, replay: GraphRunner | None, bounds: TreeBounds):
        self._target, self._replay, self._bounds = target, replay, bounds
        self._half_results: dict[tuple, int] = {}  # of each first half, the id of its results

    def start(
        self,
        drafter: Drafter,
        batch: DecodeBatch,
        draft: Draft,
        allocation: Allocation,
        mark: Callable[[], None],
        prompts: PrefillBatch | None = None,
    ) -> StartedPass:
        """Launch one step, or its first half if steps are replayed and a sequence has controls.

        A replayed output is overwritten by the next step.

        Args:
            prompts: prompt chunks for the same pass; None if steps are replayed.
        """
        shape = _shape(batch, draft, allocation)
        controlled = ControlledRows.of(batch, draft.tree, allocation.keep, shape.num_nodes)
        if self._replay is None or not self._replay.replays("verify" if controlled is None else "forward"):
            shape = replace(shape, max_depth=min(shape.max_depth, shape.num_nodes - 1))  # no deeper than it has nodes
            where = batch.at, batch.sampling, draft.tree, allocation.keep, shape
            rest = mark, prompts, allocation.sizes, controlled
            output = retry_portable(lambda: verify_step(self._target, drafter, *where, *rest))
            return StartedPass(shape, lambda: output)
        assert prompts is None, "a replayed pass has no rows for prompts"
        mark()
        shape = self._fixed(shape, len(batch), self._replay)
        parts = batch, draft.tree, allocation.keep, shape, self._replay
        if controlled is None:
            output = self._replay.run(*self._pass(drafter, *parts))
            mark()
            return StartedPass(shape, lambda: output)
        half = self._half_pass(*parts)
        self._record_second_half(drafter, half, shape, self._replay)
        passed = self._replay.run(*half)
        mark()
        return StartedPass(shape, lambda: self._run_second_half(drafter, half[0], passed, shape, controlled))

    def _record_second_half(self, drafter: Drafter, half: HalfPass, shape: StepShape, replay: GraphRunner) -> None:
        """Record the pass that goes on from the results of this first half, on padding alone, if needed."""
        key, run_half, inputs = half
        last = self._half_results.get(key)
        if last is not None and replay.has(key) and replay.has(_second_key(key, shape, last)):
            return
        padding = [replace(each, tensor=each.tensor[:0], is_fixed=False) for each in inputs]
        if not replay.record(key, run_half, padding):
            return
        passed = replay.run(key, run_half, padding)
        self._half_results[key] = id(passed)
        none = torch.full((len(passed.logits),), -1, dtype=torch.int64, device=passed.logits.device)
        replay.record(*self._second_half(drafter, key, passed, shape, none))

    def _run_second_half(
        self, drafter: Drafter, half_key: tuple, passed: TargetPass, shape: StepShape, controlled: ControlledRows
    ) -> VerifyStepOutput:
        """Sample and commit, by a replay if one was recorded for these results of the first half."""
        adjusted = controlled.picks(passed.logits, passed.sampling, passed.rows)
        if self._replay is not None and self._replay.has(_second_key(half_key, shape, id(passed))):
            return self._replay.run(*self._second_half(drafter, half_key, passed, shape, adjusted))
        return accept_and_commit(self._target, drafter, passed, shape, adjusted)

    def _second_half(
        self, drafter: Drafter, half_key: tuple, passed: TargetPass, shape: StepShape, adjusted: Int[Tensor, " R"]
    ) -> tuple[tuple, Callable[[Tensor], VerifyStepOutput], list[PaddedInput]]:
        """Return key, function and input of the pass that goes on from these results of a first half."""
        target = self._target

        def finish(adjusted: Tensor) -> VerifyStepOutput:
            return accept_and_commit(target, drafter, passed, shape, adjusted)

        return _second_key(half_key, shape, id(passed)), finish, [PaddedInput(adjusted, tuple(adjusted.shape), -1)]

    def record_plain(self, drafter: Drafter, batch_size: int, max_length: int, params: SamplingParams) -> None:
        """Record the plain pass that is replayed for this batch size, for lengths and sampling like these."""
        assert self._replay is not None
        shape = self._fixed(StepShape(1, 0, 0, False, 0), batch_size, self._replay)
        self._record(self._replay, drafter, batch_size, shape, max_length, params)

    def record_trees(
        self, drafter: Drafter, num_trees: int, num_rows: int, max_length: int, params: SamplingParams
    ) -> None:
        """Record the pass over trees that is replayed for these numbers, for lengths and sampling like these."""
        assert self._replay is not None
        shape = self._fixed(StepShape(1, num_rows, self._bounds.max_depth, False, 0), num_trees, self._replay)
        self._record(self._replay, drafter, num_trees, shape, max_length, params)

    def _record(
        self,
        replay: GraphRunner,
        drafter: Drafter,
        batch_size: int,
        shape: StepShape,
        max_length: int,
        params: SamplingParams,
    ) -> None:
        batch = idle_batch(batch_size, self._target, max_length, params)
        tree = DraftTree.of_roots(batch.roots)
        replay.record(*self._pass(drafter, batch, tree, tree.valid, shape, replay))

    def _fixed(self, shape: StepShape, batch_size: int, replay: GraphRunner) -> StepShape:
        """Return the next larger of the captured shapes; a plain step has rows for the batch only.

        All numbers of the likeliest tokens up to MAX_TOP_LOGPROBS share a shape.
        """
        if shape.num_tops:
            shape = replace(shape, num_tops=max(shape.num_tops, MAX_TOP_LOGPROBS))
        if not shape.max_depth:
            return replace(shape, num_rows=replay.batch_size(batch_size))
        num_nodes = replay.num_nodes(max(shape.num_nodes, self._bounds.num_nodes))
        num_rows = replay.num_rows(shape.num_rows)
        return replace(shape, num_nodes=num_nodes, num_rows=num_rows, max_depth=self._bounds.max_depth)

    def _pass(
        self,
        drafter: Drafter,
        batch: DecodeBatch,
        tree: DraftTree,
        keep: Bool[Tensor, "B N"],
        shape: StepShape,
        replay: GraphRunner,
    ) -> tuple[tuple, Callable[..., VerifyStepOutput], list[PaddedInput]]:
        """Return key, function and inputs of the pass for these rows whose longest sequence fits into the context."""
        sizes, forward, inputs = self._forward(batch, tree, keep, shape, replay)
        target = self._target

        def verify(*tensors: Tensor) -> VerifyStepOutput:
            return accept_and_commit(target, drafter, forward(*tensors), shape)

        return ("verify", *sizes), verify, inputs

    def _half_pass(
        self,
        batch: DecodeBatch,
        tree: DraftTree,
        keep: Bool[Tensor, "B N"],
        shape: StepShape,
        replay: GraphRunner,
    ) -> HalfPass:
        """Return key, function and inputs of the pass up to the target's logits."""
        shape = replace(shape, logprobs=False, num_tops=0)  # of no use up to the logits
        sizes, forward, inputs = self._forward(batch, tree, keep, shape, replay)

        def half(*tensors: Tensor) -> TargetPass:
            passed = forward(*tensors)
            own_node = passed.rows.node.clone()  # roots alone share one element, which a replay could not write
            return replace(passed, rows=replace(passed.rows, node=own_node))

        return ("forward", *sizes), half, inputs

    def _forward(
        self,
        batch: DecodeBatch,
        tree: DraftTree,
        keep: Bool[Tensor, "B N"],
        shape: StepShape,
        replay: GraphRunner,
    ) -> HalfPass:
        """Return the padded sizes, a function of padded inputs that runs the target, and the inputs."""
        is_plain = not shape.max_depth
        size = shape.num_rows if is_plain else replay.num_trees(len(batch), shape.num_rows)
        bound = replay.context(batch.at.max_length)
        num_candidates = 1 if is_plain else replay.num_nodes(max(tree.num_nodes, self._bounds.num_candidates))
        target, kind = self._target, replay.sampling_kind(batch.sampling.kind)
        chosen = batch.sampling.padded(size)
        split = len(chosen)

        def forward(slots: Tensor, lengths: Tensor, *tensors: Tensor) -> TargetPass:
            at = DecodeSlots.with_max_length(slots, lengths, bound)
            sampling = SamplingBatch.bound(kind, *tensors[:split])
            tree, keep = _trees(*tensors[split:])
            return target_pass(target, at, sampling, tree, keep, shape)

        slots = PaddedInput(batch.at.slots, (size,), target.cache.blocks.null_slot)
        trees = [PaddedInput(batch.roots, (size,))] if is_plain else _padded(tree, keep, (size, num_candidates))
        inputs = [slots, PaddedInput(batch.at.lengths, (size,)), *chosen, *trees]
        return (size, num_candidates, bound, kind, shape), forward, inputs


def _second_key(half_key: tuple, shape: StepShape, results: int) -> tuple:
    """Return the key of the second half for the results with this id: it is recorded on these tensors themselves.

    As long as it can be replayed it holds them, so that no others have this id. Only the second half depends on the
    log-probabilities that the shape asks for.
    """
    return ("second half", *half_key[1:], shape.logprobs, shape.num_tops, results)


def _shape(batch: DecodeBatch, draft: Draft, allocation: Allocation) -> StepShape:
    sampling = batch.sampling
    return StepShape(allocation.num_nodes, allocation.num_rows, draft.depth, sampling.logprobs, sampling.num_tops)


def _padded(tree: DraftTree, keep: Bool[Tensor, "B N"], shape: tuple[int, int]) -> list[PaddedInput]:
    """Pad with trees and nodes that are not kept, not even their roots."""
    fills = (0, -1, 0, -torch.inf, -torch.inf, False)
    columns = (PaddedInput(column, shape, fill) for column, fill in zip(tree.tensors, fills, strict=True))
    return [*columns, PaddedInput(keep, shape, False)]


def _trees(first: Tensor, *others: Tensor) -> tuple[DraftTree, Bool[Tensor, "B N"]]:
    """Return trees and keep mask from the inputs of `_padded`, or from roots alone."""
    if not others:
        tree = DraftTree.of_roots(first)
        return tree, tree.valid
    *columns, keep = others
    return DraftTree(first, *columns), keep
