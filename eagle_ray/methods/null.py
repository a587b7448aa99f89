"""NullDrafter: proposes nothing, so that every step is plain decoding. Drafters without a model inherit from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.methods.drafter import Draft, TokenSequence, VerifyOutput
from eagle_ray.models.graphs import CudaGraphRunner
from eagle_ray.models.target import PrefillBatch
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.accept import VerifyResult
from eagle_ray.tree.draft_plan import DraftPlan


class NullDrafter:
    """Return trees of a root each. Benchmarks use it as baseline and tests as oracle."""

    supports_graphs = True  # a subclass that drafts on the host sets False
    prefill_passes = 0

    @property
    def cost_key(self) -> dict[str, Any]:
        return {}

    def use_graphs(self, runner: CudaGraphRunner | None, max_depth: int = 0) -> None:
        pass

    def recordings(self, top_k: int, max_length: int, params: SamplingParams) -> Iterator[Callable[[], None]]:
        return iter(())

    def attach_prefix(
        self,
        slots: list[int],
        firsts: list[int],
        columns: list[int],
        tokens: Int[Tensor, " B"],
        features: Float[Tensor, "B H"],
    ) -> None:
        pass

    def prefill(self, prompts: PrefillBatch, next_tokens: Int[Tensor, " R"], features: Float[Tensor, "R H"]) -> None:
        self.prefill_deferred(prompts, next_tokens, features)

    def prefill_deferred(
        self, prompts: PrefillBatch, next_tokens: Int[Tensor, " R"], features: Float[Tensor, "R H"]
    ) -> None:
        pass

    def draft(
        self,
        batch: DecodeSlots,
        roots: Int[Tensor, " B"],
        plan: DraftPlan,
        sampling: SamplingBatch,
        texts: Sequence[TokenSequence],
    ) -> Draft:
        return Draft.empty(roots)

    def draft_async(
        self, at: DecodeSlots, roots: Int[Tensor, " B"], plan: DraftPlan, sampling: SamplingBatch
    ) -> Draft | None:
        return None

    def mark_consumed(self, slots: list[int], lengths: list[int]) -> int:
        return 0

    def reset_learning(self) -> None:
        pass

    def extend(self, batch: DecodeSlots, verified: VerifyOutput) -> None:
        pass

    def on_verified(self, result: VerifyResult) -> None:
        pass
