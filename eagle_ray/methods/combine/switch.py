"""SwitchDrafter: one of several drafters at a time, for a trial of which is the fastest.

    switch = SwitchDrafter({"eagle3": eagle, "suffix": suffix, "none": NullDrafter()})
    switch.use("suffix")        # drafts from the next step on
    switch.keep("eagle3")       # for good: the others read nothing more

Until one is kept, all of them read the prompts and the accepted paths, so each can draft for every sequence at any
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor
from transformers import PretrainedConfig

from eagle_ray.config import SpeculativeConfig
from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.errors import EngineError
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.methods.drafter import Draft, Drafter, LoadedDraft, NullDrafter, TokenSequence, VerifyOutput
from eagle_ray.methods.method import METHODS
from eagle_ray.models.graphs import CudaGraphRunner
from eagle_ray.models.target import PromptBatch, TargetModel
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.accept import VerifyResult
from eagle_ray.tree.draft_plan import DraftPlan


class SwitchDrafter:
    """drafters: by method; the first one drafts first. Where passes are recorded, the memory of those that are not kept
    stays allocated, since recorded passes write into it.
    """

    def __init__(self, drafters: Mapping[str, Drafter]):
        self._drafters = dict(drafters)
        self._current = next(iter(self._drafters.values()))
        self._reading = list(self._drafters.values())
        self._is_replayed = False
        self.supports_graphs = all(drafter.supports_graphs for drafter in self._reading)

    @property
    def methods(self) -> list[str]:
        """Return the methods to choose from, in order."""
        return list(self._drafters)

    def use(self, method: str) -> None:
        """Draft with this method from now on."""
        self._current = self._drafters[method]

    def keep(self, method: str) -> None:
        """Draft with this method for good. The other drafters cannot be used again, and are freed if they can be."""
        self.use(method)
        for drafter in self._reading:
            if drafter is not self._current:
                drafter.reset_learning()  # an index may be large
        self._reading = [self._current]
        if not self._is_replayed:
            self._drafters = {method: self._current}

    @property
    def prefill_passes(self) -> int:
        return sum(drafter.prefill_passes for drafter in self._reading)

    @property
    def cost_key(self) -> dict[str, Any]:
        """Return the cost key of the drafter in use."""
        return self._current.cost_key

    def use_graphs(self, runner: CudaGraphRunner | None, max_depth: int = 0) -> None:
        self._is_replayed = runner is not None
        for drafter in self._drafters.values():
            drafter.use_graphs(runner, max_depth)

    def recordings(self, top_k: int, max_length: int, params: SamplingParams) -> Iterator[Callable[[], None]]:
        return chain.from_iterable(drafter.recordings(top_k, max_length, params) for drafter in self._reading)

    def attach_prefix(
        self,
        slots: list[int],
        firsts: list[int],
        columns: list[int],
        tokens: Int[Tensor, " B"],
        features: Float[Tensor, "B H"],
    ) -> None:
        for drafter in self._reading:
            drafter.attach_prefix(slots, firsts, columns, tokens, features)

    def prefill(self, prompts: PromptBatch, next_tokens: Int[Tensor, " R"], features: Float[Tensor, "R H"]) -> None:
        for drafter in self._reading:
            drafter.prefill(prompts, next_tokens, features)

    def prefill_deferred(
        self, prompts: PromptBatch, next_tokens: Int[Tensor, " R"], features: Float[Tensor, "R H"]
    ) -> None:
        for drafter in self._reading:
            drafter.prefill_deferred(prompts, next_tokens, features)

    def draft(
        self,
        batch: DecodeSlots,
        roots: Int[Tensor, " B"],
        plan: DraftPlan,
        sampling: SamplingBatch,
        texts: Sequence[TokenSequence],
    ) -> Draft:
        return self._current.draft(batch, roots, plan, sampling, texts)

    def draft_async(
        self, at: DecodeSlots, roots: Int[Tensor, " B"], plan: DraftPlan, sampling: SamplingBatch
    ) -> Draft | None:
        return self._current.draft_async(at, roots, plan, sampling)

    def mark_consumed(self, slots: list[int], lengths: list[int]) -> int:
        return self._current.mark_consumed(slots, lengths)

    def extend(self, batch: DecodeSlots, verified: VerifyOutput) -> None:
        for drafter in self._reading:
            drafter.extend(batch, verified)

    def on_verified(self, result: VerifyResult) -> None:
        self._current.on_verified(result)

    def reset_learning(self) -> None:
        for drafter in self._reading:
            drafter.reset_learning()


def check(path: Path, target: PretrainedConfig) -> LoadedDraft:
    """Return the draft in a directory without its weights, of whichever kind. Raises EngineError with every reason."""
    reasons = []
    for method in METHODS.values():
        if method.is_candidate and method.draft is not None:
            try:
                return method.check_draft(path, target)
            except EngineError as error:
                reasons.append(f"as {method.draft}: {error}")
    raise EngineError(f"{path} is no draft that a method can read. {'. '.join(reasons)}")


def load(path: Path, target: PretrainedConfig) -> LoadedDraft:
    """Return the draft in a directory, of whichever kind. Raises EngineError."""
    return METHODS[check(path, target).method].load_draft(path, target)


def make_drafter(speculative: SpeculativeConfig, target: TargetModel, weights: LoadedDraft | None) -> SwitchDrafter:
    """Return a drafter of each method that auto can choose from here.

    On a GPU a drafter that steps cannot be replayed with is left out: all others would be slow for its sake.
    """
    free = [method.name for method in METHODS.values() if method.is_candidate and method.draft is None]
    names = free if weights is None else [weights.method, *free]
    drafters = {name: METHODS[name].make_drafter(speculative, target, weights) for name in names}
    on_cpu = target.device.type == "cpu"
    return SwitchDrafter({name: drafter for name, drafter in drafters.items() if on_cpu or drafter.supports_graphs})


def make_null_drafter(speculative: SpeculativeConfig, target: TargetModel, weights: None) -> NullDrafter:
    return NullDrafter()
