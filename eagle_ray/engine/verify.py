"""verify_step: the device's part of a step, from the allocation of rows to the record that is copied to the host.

    rerank -> pack -> target pass -> sample -> accept -> commit -> drafter.extend -> record

The function runs eagerly on the step's own shapes, or is replayed as a graph on padded ones
(`ReplayedSteps`). It does not sync with the host. It changes the KV caches and the drafter's queue
in place.

If a sequence of the batch has controls, its tokens are sampled from logits that the host adjusts by
the paths of its tree (`controlled_sequences`). Then the step is replayed in two halves: up to the
target's pass, and from sampling on, with the host's tokens as an input. Only the second half
depends on the previous step's tokens, so `Verifier.start` launches the first half early.
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
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.engine.controlled_sequences import ControlledRows
from eagle_ray.engine.step import StepShape, log_probs_at, step_record
from eagle_ray.kernels.availability import retry_portable
from eagle_ray.methods.drafter import Draft, Drafter, VerifyOutput, idle_batch
from eagle_ray.models.graphs import GRAPHS, CudaGraphRunner
from eagle_ray.models.supported_models import reads_longest_position
from eagle_ray.models.target import PromptBatch, TargetModel, TargetOutput
from eagle_ray.planner.planner import Allocation
from eagle_ray.requests.parameters import MAX_TOP_LOGPROBS
from eagle_ray.sampling.sampler import sample
from eagle_ray.tree.accepted_path import accept_path
from eagle_ray.tree.draft_tree import DraftTree, VerifyResult, VerifyRows


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """The inputs of one verify pass.

    Attributes:
        at: slots and lengths of the batch.
        sampling: sampling parameters of the batch.
        tree: the candidates.
        keep: true for a node that is verified.
        sizes: number of kept nodes of each tree, if the host knows it.
        prompts: prompt chunks to compute in the same pass, if any.
    """

    at: DecodeSlots
    sampling: SamplingBatch
    tree: DraftTree
    keep: Bool[Tensor, "B N"]
    shape: StepShape
    sizes: list[int] | None = None
    prompts: PromptBatch | None = None

    @classmethod
    def of(
        cls, batch: DecodeBatch, draft: Draft, allocation: Allocation, prompts: PromptBatch | None
    ) -> VerifyStep:
        """Return the step that verifies the allocated nodes of a draft."""
        sampling = batch.sampling
        shape = StepShape(
            allocation.num_nodes,
            allocation.num_rows,
            draft.depth,
            sampling.logprobs,
            sampling.num_tops,
        )
        return cls(
            batch.at, sampling, draft.tree, allocation.keep, shape, allocation.sizes, prompts
        )


@dataclass(frozen=True, slots=True)
class VerifyStepOutput:
    """Results of a verify step.

    Attributes:
        result: accepted paths and their tokens.
        record: the step's results as one tensor for the host; see `step_record`.
        tops: ids and log-probabilities of the likeliest tokens along each accepted path.
        prompted: output for prompt chunks in the pass.
    """

    result: VerifyResult
    record: Int[Tensor, "B X"]
    tops: tuple[Int[Tensor, "B D1 K"], Float[Tensor, "B D1 K"]] | None
    prompted: TargetOutput | None = None


@dataclass(frozen=True, slots=True)
class TargetPass:
    """Results of the target's pass, from which the rest of the step samples and commits.

    Attributes:
        at: slots and lengths of the batch, padded if the pass was replayed.
        sampling: sampling parameters of the batch, padded likewise.
        logits: logits of the target for each row; None if no part of the step needs them.
        likeliest: argmax of the logits if these are None.
        is_finite: whether each row's hidden state is finite; None if logits say it.
        features: hidden states that the draft reads, for each row.
        prompted: output for prompt chunks in this pass.
    """

    at: DecodeSlots
    sampling: SamplingBatch
    tree: DraftTree
    rows: VerifyRows
    logits: Float[Tensor, "R V"] | None
    features: Float[Tensor, "R H"]
    prompted: TargetOutput | None
    likeliest: Int[Tensor, " R"] | None = None
    is_finite: Bool[Tensor, " R"] | None = None


class FixedPass(NamedTuple):
    """A pass over inputs of fixed shapes, which a graph runner can capture and replay.

    Attributes:
        key: kind and sizes of the pass.
        function: computes the pass on padded inputs and returns an object with the results.
    """

    key: tuple
    function: Callable[..., Any]
    inputs: list[PaddedInput]

    def then(self, kind: str, finish: Callable[[Any], Any]) -> FixedPass:
        """Return a pass of another kind that runs this one and then `finish` on its results."""

        def whole(*tensors: Tensor) -> Any:
            return finish(self.function(*tensors))

        return FixedPass((kind, *self.key), whole, self.inputs)

    @property
    def padding(self) -> FixedPass:
        """Return this pass with inputs that are all padding, for its capture."""
        inputs = []
        for each in self.inputs:
            empty = each.tensor[:0]
            inputs.append(replace(each, tensor=empty, is_fixed=False))
        return self._replace(inputs=inputs)


@dataclass(frozen=True, slots=True)
class StartedPass:
    """A launched verify step, or its first half.

    Attributes:
        shape: shape of the step.
        finish: launches the rest of the step, once the tokens of the previous step are committed.
    """

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
        mark: callback right before and right after the target's pass, for timing.
        controlled: rows of sequences with controls, if there are any.
    """
    needs_logits = _needs_logits(step) or controlled is not None or drafter.reads_logits
    passed = target_pass(target, step, mark, needs_logits)
    adjusted = None
    if controlled is not None:
        assert passed.logits is not None, "rows with controls need them"
        adjusted = controlled.picks(passed.logits, passed.sampling, passed.rows)
    return accept_and_commit(target, drafter, passed, step.shape, adjusted)


def _needs_logits(step: VerifyStep) -> bool:
    """Return whether the step reads more of the logits than the argmax of each row."""
    return step.sampling.any_sampled or step.shape.logprobs or step.prompts is not None


def target_pass(
    target: TargetModel,
    step: VerifyStep,
    mark: Callable[[], None] = lambda: None,
    needs_logits: bool = True,
) -> TargetPass:
    """Run the target over the kept nodes; see verify_step."""
    at = step.at
    shape = step.shape
    tree = step.tree.rerank(step.keep, shape.num_nodes)
    rows = tree.pack(at.lengths, shape.num_rows, step.sizes)

    mark()
    logits: Tensor | None = None
    likeliest: Tensor | None = None
    is_finite: Tensor | None = None
    prompted = None
    if step.prompts is not None:
        output, prompted = target.forward_mixed(tree, rows, at, shape.max_depth, step.prompts)
        logits = output.logits
        features = output.features
    elif needs_logits or not target.finds_likeliest:
        output = target.verify(tree, rows, at, shape.max_depth)
        logits = output.logits
        features = output.features
    else:
        passed = target.verify_likeliest(tree, rows, at, shape.max_depth)
        likeliest = passed.tokens
        features = passed.features
        is_finite = passed.is_finite
    mark()
    return TargetPass(
        at=at,
        sampling=step.sampling,
        tree=tree,
        rows=rows,
        logits=logits,
        features=features,
        prompted=prompted,
        likeliest=likeliest,
        is_finite=is_finite,
    )


def accept_and_commit(
    target: TargetModel,
    drafter: Drafter,
    passed: TargetPass,
    shape: StepShape,
    adjusted: Int[Tensor, " R"] | None = None,
) -> VerifyStepOutput:
    """Sample after every row and commit the accepted paths.

    Log-probabilities come from the target's own logits, without controls, as vLLM's do by default.
    A NaN is the highest logit of its row, so the logit of the row's token is finite if all are.

    Args:
        adjusted: tokens of rows with controls, from ControlledRows.picks.
    """
    tree = passed.tree
    rows = passed.rows
    logits = passed.logits

    picks = passed.likeliest
    if picks is None:
        assert logits is not None, "a pass has one or the other"
        # Padded rows belong to no sequence; they sample as the first one, and no path reads them.
        picks = sample(logits, passed.sampling, rows.seq.clamp(min=0), rows.positions + 1)
    is_finite = passed.is_finite
    if is_finite is None:
        assert logits is not None, "a pass has one or the other"
        is_finite = logits.gather(1, picks[:, None])[:, 0].isfinite()
    if adjusted is not None:
        picks = torch.where(adjusted >= 0, adjusted, picks)

    result = accept_path(tree, rows, picks, shape.max_depth)
    target.commit(passed.at, result)
    drafter.extend(passed.at, VerifyOutput(tree, rows, logits, passed.features, result))

    logprobs = None
    tops = None
    if shape.logprobs:
        assert logits is not None, "log-probabilities need them"
        logprobs, tops = _path_log_probs(rows, logits, result, shape.num_tops)
    path_rows = rows.row_of.gather(1, result.accepted_nodes.clamp(min=0))
    record = step_record(tree, result, shape.max_depth, logprobs, is_finite[path_rows])
    return VerifyStepOutput(result, record, tops, passed.prompted)


def _path_log_probs(
    rows: VerifyRows, logits: Float[Tensor, "R V"], result: VerifyResult, num_tops: int
) -> tuple[Float[Tensor, "B D1"], tuple[Int[Tensor, "B D1 K"], Float[Tensor, "B D1 K"]] | None]:
    """Return the log-probabilities of the tokens along each accepted path, and the likeliest tokens there."""
    path_rows = rows.row_of.gather(1, result.accepted_nodes.clamp(min=0))
    flat_rows = path_rows.flatten()
    logprobs, likeliest = log_probs_at(logits, flat_rows, result.tokens.flatten(), num_tops)
    logprobs = logprobs.view_as(path_rows)
    if likeliest is None:
        return logprobs, None

    ids, log_probs = likeliest
    shape = (*path_rows.shape, -1)
    return logprobs, (ids.view(shape), log_probs.view(shape))


class Verifier:
    """Runs verify_step, through a graph runner if there is one.

    Args:
        bounds: bounds of the trees. Replayed passes are captured for the largest ones, so that
            their shape depends only on the numbers of sequences and rows.
    """

    def __init__(self, target: TargetModel, graphs: CudaGraphRunner | None, bounds: TreeBounds):
        self._target = target
        self._replayed = None if graphs is None else ReplayedSteps(target, graphs, bounds)

    @property
    def replayed(self) -> ReplayedSteps:
        """Return the ReplayedSteps. The engine must have a graph runner."""
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
        kind = "verify" if controlled is None else "forward"
        if self._replayed is not None and self._replayed.replays(kind):
            return self._replayed.start(drafter, step, mark, controlled)

        depth = min(step.shape.max_depth, step.shape.num_nodes - 1)  # no deeper than it has nodes
        shape = replace(step.shape, max_depth=depth)
        step = replace(step, shape=shape)
        output = retry_portable(lambda: verify_step(self._target, drafter, step, mark, controlled))
        return StartedPass(step.shape, lambda: output)


class ReplayedSteps:
    """Verify steps on padded shapes, each captured once and then replayed; in two halves if a sequence has controls."""

    def __init__(self, target: TargetModel, graphs: CudaGraphRunner, bounds: TreeBounds):
        self._target = target
        self._graphs = graphs
        self._bounds = bounds
        self._half_results: dict[tuple, int] = {}  # first half's key -> id of its results

    def replays(self, kind: str) -> bool:
        """Return whether passes of this kind may be replayed."""
        return self._graphs.replays(kind)

    def start(
        self,
        drafter: Drafter,
        step: VerifyStep,
        mark: Callable[[], None],
        controlled: ControlledRows | None,
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

        def finish() -> VerifyStepOutput:
            return self._run_second_half(drafter, half, passed, shape, controlled)

        return StartedPass(shape, finish)

    def record_plain(
        self, drafter: Drafter, batch_size: int, max_length: int, params: SamplingSettings
    ) -> None:
        """Record the plain pass that this batch size replays, with lengths and sampling like these."""
        shape = StepShape(1, 0, 0, False, 0)
        self._record(drafter, batch_size, shape, max_length, params)

    def record_trees(
        self,
        drafter: Drafter,
        num_trees: int,
        num_rows: int,
        max_length: int,
        params: SamplingSettings,
    ) -> None:
        """Record the pass over trees that these numbers of trees and rows replay, with lengths and
        sampling like these."""
        shape = StepShape(1, num_rows, self._bounds.max_depth, False, 0)
        self._record(drafter, num_trees, shape, max_length, params)

    def _record(
        self,
        drafter: Drafter,
        batch_size: int,
        shape: StepShape,
        max_length: int,
        params: SamplingSettings,
    ) -> None:
        batch = idle_batch(batch_size, self._target, max_length, params)
        tree = DraftTree.of_roots(batch.roots)
        step = self._padded(VerifyStep(batch.at, batch.sampling, tree, tree.valid, shape))
        self._graphs.record(*self._whole(drafter, step))

    def _padded(self, step: VerifyStep) -> VerifyStep:
        """Return the step padded to the next larger shape for which a graph can be captured.

        A plain step is padded to a batch size, and a step over trees in its nodes and rows. Steps
        with log-probabilities record MAX_TOP_LOGPROBS likeliest tokens, however many are requested.
        """
        graphs = self._graphs
        bounds = self._bounds
        shape = step.shape
        if shape.num_tops:
            shape = replace(shape, num_tops=max(shape.num_tops, MAX_TOP_LOGPROBS))
        if not shape.max_depth:
            num_rows = graphs.batch_size(len(step.at.slots))
            return replace(step, shape=replace(shape, num_rows=num_rows))

        num_nodes = graphs.num_nodes(max(shape.num_nodes, bounds.num_nodes))
        num_rows = graphs.num_rows(shape.num_rows)
        shape = replace(shape, num_nodes=num_nodes, num_rows=num_rows, max_depth=bounds.max_depth)
        return replace(step, shape=shape)

    def _whole(self, drafter: Drafter, step: VerifyStep) -> FixedPass:
        """Return the pass from the trees to the record."""
        target = self._target
        shape = step.shape

        def finish(passed: TargetPass) -> VerifyStepOutput:
            return accept_and_commit(target, drafter, passed, shape)

        whole = self._forward(step).then("verify", finish)
        return whole._replace(key=(*whole.key, _extend_key(drafter, shape)))

    def _first_half(self, step: VerifyStep) -> FixedPass:
        """Return the pass up to the target's logits."""
        # The graph ends at the logits, so log-probabilities must not be part of its key.
        shape = replace(step.shape, logprobs=False, num_tops=0)

        def with_nodes(passed: TargetPass) -> TargetPass:
            # Roots alone share one element, which a replay could not write.
            node = passed.rows.node.clone()
            return replace(passed, rows=replace(passed.rows, node=node))

        return self._forward(replace(step, shape=shape)).then("forward", with_nodes)

    def _second_half(
        self,
        drafter: Drafter,
        half: FixedPass,
        passed: TargetPass,
        shape: StepShape,
        adjusted: Int[Tensor, " R"],
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
        if last is not None and graphs.has(half.key):
            key = _second_key(half.key, shape, drafter, last)
            if graphs.has(key):
                return

        padding = half.padding
        if not graphs.record(*padding):
            return
        passed = graphs.run(*padding)
        self._half_results[half.key] = id(passed)
        logits = passed.logits
        assert logits is not None, "a recorded first half ends at the logits"
        none = torch.full((len(logits),), -1, dtype=torch.int64, device=logits.device)
        graphs.record(*self._second_half(drafter, half, passed, shape, none))

    def _run_second_half(
        self,
        drafter: Drafter,
        half: FixedPass,
        passed: TargetPass,
        shape: StepShape,
        controlled: ControlledRows,
    ) -> VerifyStepOutput:
        """Sample and commit, by a replay if one was recorded for these results of the first half."""
        assert passed.logits is not None, "a recorded first half ends at the logits"
        adjusted = controlled.picks(passed.logits, passed.sampling, passed.rows)
        if self._graphs.has(_second_key(half.key, shape, drafter, id(passed))):
            return self._graphs.run(*self._second_half(drafter, half, passed, shape, adjusted))
        return accept_and_commit(self._target, drafter, passed, shape, adjusted)

    def _forward(self, step: VerifyStep) -> FixedPass:
        """Return the target's pass for these rows. Its key has the sizes alone, not the kind."""
        target = self._target
        graphs = self._graphs
        shape = step.shape
        tree = step.tree
        at = step.at

        # A plain step pads its batch; a step over trees pads trees and the candidates of each.
        if shape.max_depth:
            size = graphs.num_trees(len(at.slots), shape.num_rows)
            num_candidates = graphs.num_nodes(max(tree.num_nodes, self._bounds.num_candidates))
            trees = _padded(tree, step.keep, (size, num_candidates))
        else:
            size = shape.num_rows
            num_candidates = 1
            trees = [PaddedInput(tree.tokens[:, 0], (size,))]

        bound = graphs.context(at.max_length)
        kind = graphs.sampling_kind(step.sampling.kind)
        chosen = step.sampling.padded(size)
        split = len(chosen)

        def forward(slots: Tensor, lengths: Tensor, *tensors: Tensor) -> TargetPass:
            padded_at = DecodeSlots.with_max_length(slots, lengths, bound)
            sampling = SamplingBatch.bound(kind, *tensors[:split])
            padded_tree, keep = _trees(*tensors[split:])
            return target_pass(target, VerifyStep(padded_at, sampling, padded_tree, keep, shape))

        slots = PaddedInput(at.slots, (size,), target.cache.blocks.null_slot)
        lengths = PaddedInput(at.lengths, (size,))
        inputs = [slots, lengths, *chosen, *trees]
        return FixedPass((size, num_candidates, bound, kind, shape), forward, inputs)


def _extend_key(drafter: Drafter, shape: StepShape) -> tuple:
    """Return the drafter's part of a pass's key, which depends on its drafts so far; a plain pass has none."""
    return drafter.extend_key if shape.max_depth else ()


def _second_key(half_key: tuple, shape: StepShape, drafter: Drafter, results: int) -> tuple:
    """Return the key of the second half that is recorded on the results with this id.

    The graph holds its results as long as it can be replayed, so no other object has their id. Only
    the second half depends on the log-probabilities that the shape asks for.
    """
    return (
        "second half",
        *half_key[1:],
        shape.logprobs,
        shape.num_tops,
        _extend_key(drafter, shape),
        results,
    )


def _padded(
    tree: DraftTree, keep: Bool[Tensor, "B N"], shape: tuple[int, int]
) -> list[PaddedInput]:
    """Pad a batch with trees and nodes that are not verified, not even their roots."""
    fills = (0, -1, 0, -torch.inf, -torch.inf, False)
    tensors = (
        PaddedInput(tensor, shape, fill) for tensor, fill in zip(tree.tensors, fills, strict=True)
    )
    return [*tensors, PaddedInput(keep, shape, False)]


def _trees(first: Tensor, *others: Tensor) -> tuple[DraftTree, Bool[Tensor, "B N"]]:
    """Return trees and keep mask from the inputs of `_padded`, or from roots alone."""
    if not others:
        tree = DraftTree.of_roots(first)
        return tree, tree.valid
    *tensors, keep = others
    return DraftTree(first, *tensors), keep


def unsupported_reason(target: TargetModel, drafter: Drafter) -> str | None:
    """Return why passes of this target and drafter cannot be captured in CUDA graphs, or None if they can."""
    if os.environ.get(GRAPHS) == "off":
        return f"{GRAPHS}=off"
    devices = {parameter.device for parameter in target.model.parameters()}
    if len(devices) > 1:
        return f"the target lies on {len(devices)} devices"
    if not target.has_own_forward and reads_longest_position(target.model.config):
        return "the target's rotary embedding asks for the largest position of each pass"
    if not drafter.supports_graphs:
        return f"{type(drafter).__name__} works on the host"
    return None


def fallbacks(
    target: TargetModel, drafter: Drafter, graphs: CudaGraphRunner | None
) -> dict[str, str]:
    """Return why Triton's kernels or CUDA graphs do not run on a GPU, by "kernels" and "graphs".

    Empty if both run, and on a CPU, where neither is expected.
    """
    if target.device.type != "cuda":
        return {}
    no_graphs = unsupported_reason(target, drafter) if graphs is None else graphs.failure
    reasons = {"kernels": why_no_triton(target.cache), "graphs": no_graphs}
    return {name: reason for name, reason in reasons.items() if reason is not None}
