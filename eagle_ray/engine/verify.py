"""verify_step: the device's part of a step, from the allocation of rows to the record that is copied to the host.

    rerank -> pack -> target pass -> sample -> accept -> commit -> drafter.extend -> record

The function runs eagerly on the step's own shapes, or is replayed as a graph on padded ones (`ReplayedSteps`). It does
not sync with the host. It changes the KV caches and the drafter's queue in place.

If a sequence of the batch has controls, its tokens are sampled from logits that the host adjusts by the paths of its
tree (`controlled_sequences`). Then the step is replayed in two halves, up to the target's pass and from its samples on,
and those tokens are an input of the second. They depend on the tokens of the step before, which the first half does
not: `Verifier.start` launches what it can.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.attention.triton_attention import why_no_triton
from eagle_ray.core.decode_batch import DecodeBatch, DecodeSlots
from eagle_ray.core.sampling_batch import PaddedInput, SamplingBatch
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.engine.controlled_sequences import ControlledRows
from eagle_ray.engine.step import StepShape, log_probs_at, step_record
from eagle_ray.kernels.availability import retry_portable
from eagle_ray.methods.drafter import Draft, Drafter, VerifyOutput, idle_batch
from eagle_ray.models.graphs import GRAPHS, CudaGraphRunner
from eagle_ray.models.supported_models import max_exact_position
from eagle_ray.models.target import PromptBatch, TargetModel, TargetOutput
from eagle_ray.planner.planner import Allocation
from eagle_ray.requests.parameters import MAX_TOP_LOGPROBS, SamplingParams
from eagle_ray.sampling.sampler import sample
from eagle_ray.tree.draft_tree import DraftTree, VerifyResult, VerifyRows, accept_path


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """What one step verifies.

    Attributes:
        at: slots and lengths of the batch.
        sampling: sampling parameters of the batch.
        tree: the candidates.
        keep: true for a node that is verified.
        sizes: kept nodes of each tree, if the host knows them.
        prompts: prompt chunks to compute in the same pass.
    """

    at: DecodeSlots
    sampling: SamplingBatch
    tree: DraftTree
    keep: Bool[Tensor, "B N"]
    shape: StepShape
    sizes: list[int] | None = None
    prompts: PromptBatch | None = None

    @classmethod
    def of(cls, batch: DecodeBatch, draft: Draft, allocation: Allocation, prompts: PromptBatch | None) -> VerifyStep:
        """Return the step that verifies the allocated nodes of a draft."""
        sampling = batch.sampling
        shape = StepShape(allocation.num_nodes, allocation.num_rows, draft.depth, sampling.logprobs, sampling.num_tops)
        return cls(batch.at, sampling, draft.tree, allocation.keep, shape, allocation.sizes, prompts)


@dataclass(frozen=True, slots=True)
class VerifyStepOutput:
    """Results of a verify step. record: see step_record. tops: ids and log-probabilities along each accepted path."""

    result: VerifyResult
    record: Int[Tensor, "B X"]
    tops: tuple[Int[Tensor, "B D1 K"], Float[Tensor, "B D1 K"]] | None
    prompted: TargetOutput | None = None


@dataclass(frozen=True, slots=True)
class TargetPass:
    """A step after the target's pass.

    Attributes:
        at: slots and lengths of the batch, padded if the pass was replayed.
        sampling: sampling parameters of the batch, padded likewise.
        logits: logits of the target for each row.
        features: hidden states that the draft reads, for each row.
        prompted: output for the prompt chunks of this pass.
    """

    at: DecodeSlots
    sampling: SamplingBatch
    tree: DraftTree
    rows: VerifyRows
    logits: Float[Tensor, "R V"]
    features: Float[Tensor, "R H"]
    prompted: TargetOutput | None


class FixedPass(NamedTuple):
    """A pass of fixed shapes, which a graph runner replays.

    Attributes:
        key: its kind and its sizes.
        function: function of the padded inputs; returns whatever holds the results.
    """

    key: tuple
    function: Callable[..., Any]
    inputs: list[PaddedInput]

    def then(self, kind: str, finish: Callable[[Any], Any]) -> FixedPass:
        """Return the pass of this kind that goes on from this one's results with `finish`."""

        def whole(*tensors: Tensor) -> Any:
            return finish(self.function(*tensors))

        return FixedPass((kind, *self.key), whole, self.inputs)

    @property
    def padding(self) -> FixedPass:
        """Return the pass over padding alone."""
        inputs = [replace(each, tensor=each.tensor[:0], is_fixed=False) for each in self.inputs]
        return self._replace(inputs=inputs)


@dataclass(frozen=True, slots=True)
class StartedPass:
    """A launched verify step. finish: launches what is left of it, once the tokens of the step before are committed."""

    shape: StepShape
    finish: Callable[[], VerifyStepOutput]


def verify_step(
    target: TargetModel,
    drafter: Drafter,
    step: VerifyStep,
    mark: Callable[[], None] = lambda: None,
    controlled: ControlledRows | None = None,
) -> VerifyStepOutput:
    """Verify the kept nodes and commit the accepted paths.

    Args:
        mark: called right before and right after the target's pass.
        controlled: the rows of sequences with controls, if there are any.
    """
    passed = target_pass(target, step, mark)
    adjusted = None if controlled is None else controlled.picks(passed.logits, passed.sampling, passed.rows)
    return accept_and_commit(target, drafter, passed, step.shape, adjusted)


def target_pass(target: TargetModel, step: VerifyStep, mark: Callable[[], None] = lambda: None) -> TargetPass:
    """Run the target over the kept nodes; see verify_step."""
    shape = step.shape
    tree = step.tree.rerank(step.keep, shape.num_nodes)
    rows = tree.pack(step.at.lengths, shape.num_rows, step.sizes)
    mark()
    prompted = None
    if step.prompts is None:
        output = target.verify(tree, rows, step.at, shape.max_depth)
    else:
        output, prompted = target.forward_mixed(tree, rows, step.at, shape.max_depth, step.prompts)
    mark()
    return TargetPass(step.at, step.sampling, tree, rows, output.logits, output.features, prompted)


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

    def __init__(self, target: TargetModel, graphs: CudaGraphRunner | None, bounds: TreeBounds):
        self._target = target
        self._replayed = None if graphs is None else ReplayedSteps(target, graphs, bounds)

    @property
    def replayed(self) -> ReplayedSteps:
        """Return what is replayed. There must be a graph runner."""
        assert self._replayed is not None
        return self._replayed

    def start(
        self,
        drafter: Drafter,
        batch: DecodeBatch,
        draft: Draft,
        allocation: Allocation,
        mark: Callable[[], None],
        prompts: PromptBatch | None = None,
    ) -> StartedPass:
        """Launch one step, or its first half if steps are replayed and a sequence has controls.

        A replayed output is overwritten by the next step.

        Args:
            prompts: prompt chunks for the same pass; None if steps are replayed.
        """
        step = VerifyStep.of(batch, draft, allocation, prompts)
        controlled = ControlledRows.of(batch, step.tree, step.keep, step.shape.num_nodes)
        if self._replayed is not None and self._replayed.replays("verify" if controlled is None else "forward"):
            return self._replayed.start(drafter, step, mark, controlled)

        depth = min(step.shape.max_depth, step.shape.num_nodes - 1)  # no deeper than it has nodes
        step = replace(step, shape=replace(step.shape, max_depth=depth))
        output = retry_portable(lambda: verify_step(self._target, drafter, step, mark, controlled))
        return StartedPass(step.shape, lambda: output)


class ReplayedSteps:
    """Verify steps on padded shapes, each captured once; in two halves if a sequence has controls."""

    def __init__(self, target: TargetModel, graphs: CudaGraphRunner, bounds: TreeBounds):
        self._target, self._graphs, self._bounds = target, graphs, bounds
        self._half_results: dict[tuple, int] = {}  # of each first half, the id of its results

    def replays(self, kind: str) -> bool:
        """Return whether passes of this kind may be replayed."""
        return self._graphs.replays(kind)

    def start(
        self, drafter: Drafter, step: VerifyStep, mark: Callable[[], None], controlled: ControlledRows | None
    ) -> StartedPass:
        """Replay a step, or its first half."""
        assert step.prompts is None, "a replayed pass has no rows for prompts"
        mark()
        step = self._padded(step)
        shape = step.shape
        if controlled is None:
            output = self._graphs.run(*self._whole(drafter, step))
            mark()
            return StartedPass(shape, lambda: output)

        half = self._first_half(step)
        self._record_second_half(drafter, half, shape)
        passed = self._graphs.run(*half)
        mark()
        return StartedPass(shape, lambda: self._run_second_half(drafter, half, passed, shape, controlled))

    def record_plain(self, drafter: Drafter, batch_size: int, max_length: int, params: SamplingParams) -> None:
        """Record the plain pass that is replayed for this batch size, for lengths and sampling like these."""
        self._record(drafter, batch_size, StepShape(1, 0, 0, False, 0), max_length, params)

    def record_trees(
        self, drafter: Drafter, num_trees: int, num_rows: int, max_length: int, params: SamplingParams
    ) -> None:
        """Record the pass over trees that is replayed for these numbers, for lengths and sampling like these."""
        self._record(drafter, num_trees, StepShape(1, num_rows, self._bounds.max_depth, False, 0), max_length, params)

    def _record(
        self, drafter: Drafter, batch_size: int, shape: StepShape, max_length: int, params: SamplingParams
    ) -> None:
        batch = idle_batch(batch_size, self._target, max_length, params)
        tree = DraftTree.of_roots(batch.roots)
        step = self._padded(VerifyStep(batch.at, batch.sampling, tree, tree.valid, shape))
        self._graphs.record(*self._whole(drafter, step))

    def _padded(self, step: VerifyStep) -> VerifyStep:
        """Return the step in the next larger of the captured shapes; a plain step has rows for the batch only.

        All numbers of the likeliest tokens up to MAX_TOP_LOGPROBS share a shape.
        """
        graphs, shape = self._graphs, step.shape
        if shape.num_tops:
            shape = replace(shape, num_tops=max(shape.num_tops, MAX_TOP_LOGPROBS))
        if not shape.max_depth:
            return replace(step, shape=replace(shape, num_rows=graphs.batch_size(len(step.at.slots))))
        num_nodes = graphs.num_nodes(max(shape.num_nodes, self._bounds.num_nodes))
        num_rows = graphs.num_rows(shape.num_rows)
        shape = replace(shape, num_nodes=num_nodes, num_rows=num_rows, max_depth=self._bounds.max_depth)
        return replace(step, shape=shape)

    def _whole(self, drafter: Drafter, step: VerifyStep) -> FixedPass:
        """Return the pass from the trees to the record."""
        target, shape = self._target, step.shape
        whole = self._forward(step).then("verify", lambda passed: accept_and_commit(target, drafter, passed, shape))
        return whole._replace(key=(*whole.key, _extend_key(drafter, shape)))

    def _first_half(self, step: VerifyStep) -> FixedPass:
        """Return the pass up to the target's logits."""
        shape = replace(step.shape, logprobs=False, num_tops=0)  # of no use up to the logits

        def with_nodes(passed: TargetPass) -> TargetPass:
            node = passed.rows.node.clone()  # roots alone share one element, which a replay could not write
            return replace(passed, rows=replace(passed.rows, node=node))

        return self._forward(replace(step, shape=shape)).then("forward", with_nodes)

    def _second_half(
        self, drafter: Drafter, half: FixedPass, passed: TargetPass, shape: StepShape, adjusted: Int[Tensor, " R"]
    ) -> FixedPass:
        """Return the pass that goes on from these results of a first half."""
        target = self._target

        def finish(adjusted: Tensor) -> VerifyStepOutput:
            return accept_and_commit(target, drafter, passed, shape, adjusted)

        key = _second_key(half.key, shape, drafter, id(passed))
        return FixedPass(key, finish, [PaddedInput(adjusted, tuple(adjusted.shape), -1)])

    def _record_second_half(self, drafter: Drafter, half: FixedPass, shape: StepShape) -> None:
        """Record the pass that goes on from the results of this first half, on padding alone, if needed."""
        graphs = self._graphs
        last = self._half_results.get(half.key)
        if last is not None and graphs.has(half.key) and graphs.has(_second_key(half.key, shape, drafter, last)):
            return
        padding = half.padding
        if not graphs.record(*padding):
            return
        passed = graphs.run(*padding)
        self._half_results[half.key] = id(passed)
        none = torch.full((len(passed.logits),), -1, dtype=torch.int64, device=passed.logits.device)
        graphs.record(*self._second_half(drafter, half, passed, shape, none))

    def _run_second_half(
        self, drafter: Drafter, half: FixedPass, passed: TargetPass, shape: StepShape, controlled: ControlledRows
    ) -> VerifyStepOutput:
        """Sample and commit, by a replay if one was recorded for these results of the first half."""
        adjusted = controlled.picks(passed.logits, passed.sampling, passed.rows)
        if self._graphs.has(_second_key(half.key, shape, drafter, id(passed))):
            return self._graphs.run(*self._second_half(drafter, half, passed, shape, adjusted))
        return accept_and_commit(self._target, drafter, passed, shape, adjusted)

    def _forward(self, step: VerifyStep) -> FixedPass:
        """Return the target's pass for these rows. Its key has the sizes alone, not the kind."""
        shape, graphs = step.shape, self._graphs
        is_plain = not shape.max_depth
        size = shape.num_rows if is_plain else graphs.num_trees(len(step.at.slots), shape.num_rows)
        bound = graphs.context(step.at.max_length)
        num_candidates = 1 if is_plain else graphs.num_nodes(max(step.tree.num_nodes, self._bounds.num_candidates))
        target, kind = self._target, graphs.sampling_kind(step.sampling.kind)
        chosen = step.sampling.padded(size)
        split = len(chosen)

        def forward(slots: Tensor, lengths: Tensor, *tensors: Tensor) -> TargetPass:
            at = DecodeSlots.with_max_length(slots, lengths, bound)
            sampling = SamplingBatch.bound(kind, *tensors[:split])
            return target_pass(target, VerifyStep(at, sampling, *_trees(*tensors[split:]), shape))

        slots = PaddedInput(step.at.slots, (size,), target.cache.blocks.null_slot)
        roots = [PaddedInput(step.tree.tokens[:, 0], (size,))]
        trees = roots if is_plain else _padded(step.tree, step.keep, (size, num_candidates))
        inputs = [slots, PaddedInput(step.at.lengths, (size,)), *chosen, *trees]
        return FixedPass((size, num_candidates, bound, kind, shape), forward, inputs)


def _extend_key(drafter: Drafter, shape: StepShape) -> tuple:
    """Return what a drafter learns in a recorded pass, which depends on its drafts so far; a plain pass has none."""
    return drafter.extend_key if shape.max_depth else ()


def _second_key(half_key: tuple, shape: StepShape, drafter: Drafter, results: int) -> tuple:
    """Return the key of the second half for the results with this id: it is recorded on these tensors themselves.

    As long as it can be replayed it holds them, so that no others have this id. Only the second half depends on the
    log-probabilities that the shape asks for.
    """
    return ("second half", *half_key[1:], shape.logprobs, shape.num_tops, _extend_key(drafter, shape), results)


def _padded(tree: DraftTree, keep: Bool[Tensor, "B N"], shape: tuple[int, int]) -> list[PaddedInput]:
    """Pad with trees and nodes that are not kept, not even their roots."""
    fills = (0, -1, 0, -torch.inf, -torch.inf, False)
    tensors = (PaddedInput(tensor, shape, fill) for tensor, fill in zip(tree.tensors, fills, strict=True))
    return [*tensors, PaddedInput(keep, shape, False)]


def _trees(first: Tensor, *others: Tensor) -> tuple[DraftTree, Bool[Tensor, "B N"]]:
    """Return trees and keep mask from the inputs of `_padded`, or from roots alone."""
    if not others:
        tree = DraftTree.of_roots(first)
        return tree, tree.valid
    *tensors, keep = others
    return DraftTree(first, *tensors), keep


def unsupported_reason(target: TargetModel, drafter: Drafter) -> str | None:
    """Return why passes of this target and drafter are not captured, or None."""
    if os.environ.get(GRAPHS) == "off":
        return f"{GRAPHS}=off"
    devices = {parameter.device for parameter in target.model.parameters()}
    if len(devices) > 1:
        return f"the target lies on {len(devices)} devices"
    if max_exact_position(target.model.config) is not None:
        return "the target's rotary embedding asks for the largest position of each pass"
    if not drafter.supports_graphs:
        return f"{type(drafter).__name__} works on the host"
    return None


def fallbacks(target: TargetModel, drafter: Drafter, graphs: CudaGraphRunner | None) -> dict[str, str]:
    """Return why Triton's kernels or CUDA graphs do not run, by "kernels" and "graphs".

    Empty if both run, and on a CPU, where neither is expected.
    """
    if target.device.type != "cuda":
        return {}
    no_graphs = unsupported_reason(target, drafter) if graphs is None else graphs.failure
    reasons = {"kernels": why_no_triton(target.cache), "graphs": no_graphs}
    return {name: reason for name, reason in reasons.items() if reason is not None}
