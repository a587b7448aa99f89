"""NullDrafter: offers nothing, so that every step is one of plain decoding. Drafters that run no model build on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.drafters.drafter import Draft, TokenSequence, VerifyOutput
from eagle_ray.kv.kv_cache import DecodeSlots
from eagle_ray.models.target import PrefillBatch
from eagle_ray.sampling.sampler import SamplingBatch
from eagle_ray.tree.accept import VerifyResult
from eagle_ray.tree.draft_plan import DraftPlan


class NullDrafter:
    """Trees of a root each; the baseline in every benchmark and the oracle in every test."""

    prefill_passes = 0
    cost_key: ClassVar[dict[str, Any]] = {}

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

    def reset_learning(self) -> None:
        pass

    def extend(self, batch: DecodeSlots, verified: VerifyOutput) -> None:
        pass

    def on_verified(self, result: VerifyResult) -> None:
        pass
