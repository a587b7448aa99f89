"""Drafter: the protocol of everything that proposes candidate tokens.

    drafter.prefill(prompts, next_tokens, features)          # prompts, as the target reads them
    draft = drafter.draft(batch, roots, plan, sampling, sequences)
    drafter.extend(batch, verified)                          # what the target accepted
    drafter.on_verified(result)                              # learn from it for later drafts

A drafter keeps its own state of each slot's sequence. It never changes the output, only the number
of tokens per target pass. A step of plain decoding calls `extend` alone, which runs no model; the
next `draft` catches up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.core import sequence as engine_sequence
from eagle_ray.core.decode_batch import DecodeBatch, DecodeSlots
from eagle_ray.core.device import to_device
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.models.graphs import CudaGraphRunner
from eagle_ray.models.target import PromptBatch, TargetModel
from eagle_ray.tree.draft_tree import DraftTree, VerifyResult, VerifyRows
from eagle_ray.tree.expand import DraftPlan


@dataclass(frozen=True, slots=True)
class Draft:
    """Candidate trees of a batch. A tree without drafts has only its root.

    Attributes:
        levels: the candidates' log values by level, [M, F, K] for M members, F parents and K
            children; -inf is padding.
        num_passes: forward passes of the drafter's model.
        num_catch_up: committed (token, feature) pairs, or tokens, that the first pass read before
            it drafted.
        is_exhausted: the drafter has nothing more to propose, however deep the plan.
        extra_log_values: log values, by depth, of candidates that a narrower plan would also have,
            such as looked-up ones.
        caught_up_before: an extra pass read pending pairs first, because a replayed draft reads a
            bounded number of them.
        num_pair_rows: rows of the replayed pass that read pending pairs, padding included; None if
            it was not replayed.
        model_tree: the model's own candidates, if others were merged with them; None if `tree` is
            one drafter's.
    """

    tree: DraftTree
    levels: list[Float[Tensor, "M _ K"]]
    num_passes: int
    num_catch_up: int
    is_exhausted: bool = False
    extra_log_values: list[Float[Tensor, "M _"]] = field(default_factory=list)
    caught_up_before: bool = False
    num_pair_rows: int | None = None
    model_tree: DraftTree | None = None

    @classmethod
    def empty(cls, roots: Int[Tensor, " B"]) -> Draft:
        """Return a draft without candidates, whose trees are the roots alone: a step of plain decoding."""
        return cls(DraftTree.of_roots(roots), [], 0, 0)

    @property
    def depth(self) -> int:
        """Return the length of the longest draft path, known on the host."""
        return max(len(self.levels), len(self.extra_log_values))


@dataclass(frozen=True, slots=True)
class VerifyOutput:
    """Results of one verify pass of the target.

    Attributes:
        rows: the packed rows of `tree`.
        logits: the target's logits after each row; None in a step that needs none, unless the
            drafter reads them.
        features: the target's hidden states of each row, as the drafter reads them.
        result: the accepted paths.
    """

    tree: DraftTree
    rows: VerifyRows
    logits: Float[Tensor, "R V"] | None
    features: Float[Tensor, "R H"]
    result: VerifyResult


@runtime_checkable
class LoadedDraft(Protocol):
    """What `model.draft` names: a head or a draft model, with or without its weights.

    Attributes:
        method: method that drafts with it if the configuration names none, such as eagle3.
    """

    method: str

    def feature_layers(self, num_layers: int) -> tuple[int, ...] | None:
        """Return the layers of the target whose concatenated inputs it reads.

        None stands for the target's last hidden state, which the lm_head reads. An empty tuple is a
        draft that reads no features.
        """


@runtime_checkable
class TokenSequence(Protocol):
    """A sequence whose token ids a drafter may read."""

    @property
    def token_ids(self) -> list[int]:
        """Return the ids of prompt and output; the last one is the root."""

    @property
    def num_tokens(self) -> int:
        """Return the number of ids of prompt and output."""

    def token_ids_from(self, start: int) -> list[int]:
        """Return the tokens from a position on."""


@runtime_checkable
class Drafter(Protocol):
    """Proposes candidate trees with log values; the planner's budget chooses the nodes that are verified.

    A method that is not overridden does nothing and proposes nothing.

    Attributes:
        supports_graphs: `draft` and `extend` are a fixed sequence of device operations for given
            shapes, so that a graph runner can record and replay them.
        has_model: it drafts with a model, whose passes take time.
        has_lookups: it drafts what the host looks up in texts. With both, `plan.lookups_only`
            leaves out the model.
        reads_logits: `extend` reads the target's logits.
    """

    supports_graphs: bool
    has_model: bool = False
    has_lookups: bool = False
    reads_logits: bool = False

    def use_graphs(self, runner: CudaGraphRunner | None, max_depth: int = 0) -> None:
        """Replay drafts of known shape through the runner from now on; None runs each as it is.

        Args:
            max_depth: levels of the deepest draft.
        """
        return None

    def pair_recordings(self, max_length: int) -> Iterator[Callable[[], None]]:
        """Yield functions that record the passes over pending pairs, which run before any draft. See `recordings`."""
        return iter(())

    def recordings(
        self, top_k: int, max_length: int, params: SamplingSettings
    ) -> Iterator[Callable[[], None]]:
        """Yield functions that record each pass that replayed drafts can ask for, at lengths and sampling like these.

        Args:
            top_k: children per node.
        """
        return iter(())

    def attach_prefix(
        self,
        slots: list[int],
        firsts: list[int],
        lengths: list[int],
        tokens: Int[Tensor, " B"],
        features: Float[Tensor, "B H"],
    ) -> None:
        """Start sequences whose first lengths[b] positions come from the prefix cache, visible from firsts[b] on.

        Args:
            tokens: the token of position lengths[b], the first that is the sequence's own.
            features: the target's feature for the same pair.
        """
        return None

    def prefill(
        self, prompts: PromptBatch, next_tokens: Int[Tensor, " R"], features: Float[Tensor, "R H"]
    ) -> None:
        """Read chunks of prompts.

        Args:
            next_tokens: the token after each row.
            features: the target's feature of each row.
        """
        self.prefill_deferred(prompts, next_tokens, features)

    def prefill_deferred(
        self, prompts: PromptBatch, next_tokens: Int[Tensor, " R"], features: Float[Tensor, "R H"]
    ) -> None:
        """Queue what `prefill` would read, without running a model, in case drafting begins later."""
        return None

    def draft(
        self,
        batch: DecodeSlots,
        roots: Int[Tensor, " B"],
        plan: DraftPlan,
        sampling: SamplingBatch,
        texts: Sequence[TokenSequence],
    ) -> Draft:
        """Return candidate trees on the given roots, at most plan.max_depth deep.

        Args:
            plan: its max_depth is at least 1.
            texts: the batch's sequences, for drafters that read tokens.
        """
        return Draft.empty(roots)

    def draft_async(
        self,
        at: DecodeSlots,
        roots: Int[Tensor, " B"],
        plan: DraftPlan,
        sampling: SamplingBatch,
        texts: Sequence[TokenSequence],
    ) -> Draft | None:
        """Draft while the host knows only upper bounds of the lengths, or return None if that is not possible.

        The texts lack the tokens of the step in flight. If a model drafted, `mark_consumed` must be
        called once the lengths are known.
        """
        return None

    def mark_consumed(self, slots: list[int], lengths: list[int]) -> int:
        """Record that a draft has read all pairs up to these slots' roots. Return how many pairs that were."""
        return 0

    def lookup_hits(
        self, batch: DecodeSlots, texts: Sequence[TokenSequence]
    ) -> tuple[int, int] | None:
        """Index new text. Return the tokens read so far, and how many of them a lookup would have predicted.

        It costs about 1 us per token, so it tells cheaply when lookups may pay. None means that
        nothing is looked up.
        """
        return None

    def reset_learning(self) -> None:
        """Discard everything learned from the target's tokens, for example after calibration runs."""
        return None

    def state(self) -> dict[str, Tensor]:
        """Return the learned state, for a later process with the same models. It is on the CPU and bounded in size."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of another process. Raises ValueError if it does not fit."""
        return None

    def extend(self, batch: DecodeSlots, verified: VerifyOutput) -> None:
        """Add the accepted path of each tree to the slots' state. Runs no model."""
        return None

    @property
    def extend_key(self) -> tuple[Hashable, ...]:
        """Return what `extend` depends on besides its arguments. It becomes a part of a recording's key."""
        return ()

    def on_verified(self, result: VerifyResult) -> None:
        """Learn from a verify pass, after the copy of its results to the host has started."""
        return None

    @property
    def cost_key(self) -> dict[str, Any]:
        """Return what the drafter's step costs depend on, as JSON. The cost cache uses it as a key."""
        return {}

    @property
    def prefill_passes(self) -> int:
        """Return how many forward passes of the drafter's model one `prefill` runs."""
        return 0


class NullDrafter(Drafter):
    """Propose nothing, so that every step is plain decoding. Drafters without a model inherit from it."""

    supports_graphs = True  # a subclass that drafts on the host sets False


def idle_batch(
    batch_size: int, target: TargetModel, max_length: int, params: SamplingSettings
) -> DecodeBatch:
    """Return a batch of padding on which passes are recorded: empty sequences in the null slot.

    Their lengths are 0 on the device and at most max_length on the host.
    """
    slots = [target.cache.blocks.null_slot] * batch_size
    device = target.device
    sequences = [engine_sequence.Sequence("", [0], params) for _ in slots]
    sampling = SamplingBatch.of([params] * batch_size, device, target.eos_ids)
    at = DecodeSlots.of(slots, [0] * batch_size, device)
    zeros = to_device([0] * batch_size, device)
    at = replace(at, bound=max_length)
    return DecodeBatch(sequences, at, zeros, sampling, [1] * batch_size, zeros, None)
