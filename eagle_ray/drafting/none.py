"""NoDrafter: offers nothing, so that every step is one of plain decoding. Drafters that run no model build on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.drafting.drafter import Draft, Text, Verified
from eagle_ray.models.kv_cache import BatchSlots
from eagle_ray.models.target import Prompts
from eagle_ray.speculative.plan import Plan
from eagle_ray.speculative.sampling import BatchSampling
from eagle_ray.speculative.verify import VerifyResult


class NoDrafter:
    """Trees of a root each; the baseline in every benchmark and the oracle in every test."""

    prefill_passes = 0
    shape: ClassVar[dict[str, Any]] = {}

    def resume(
        self,
        slots: list[int],
        firsts: list[int],
        columns: list[int],
        tokens: Int[Tensor, " B"],
        features: Float[Tensor, "B H"],
    ) -> None:
        pass

    def prefill(self, prompts: Prompts, next_tokens: Int[Tensor, " R"], features: Float[Tensor, "R H"]) -> None:
        self.observe(prompts, next_tokens, features)

    def observe(self, prompts: Prompts, next_tokens: Int[Tensor, " R"], features: Float[Tensor, "R H"]) -> None:
        pass

    def draft(
        self, batch: BatchSlots, roots: Int[Tensor, " B"], plan: Plan, sampling: BatchSampling, texts: Sequence[Text]
    ) -> Draft:
        return Draft.of_roots(roots)

    def forget(self) -> None:
        pass

    def extend(self, batch: BatchSlots, verified: Verified) -> None:
        pass

    def learn(self, result: VerifyResult) -> None:
        pass
