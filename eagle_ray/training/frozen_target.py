"""FrozenTarget: what training needs of the target, apart from features: embeddings and logits over a draft vocabulary.

    target = FrozenTarget.of(causal_lm, token_ids)
    target.logits(hidden)                # differentiable with respect to hidden, [*, Dv]

The engine's packed kernels have no gradient, so the rows of the lm_head are kept here as a plain matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle_ray.models.loader import CausalLM, input_embedding
from eagle_ray.models.supported_models import logits_postprocessor


@dataclass(frozen=True, slots=True)
class FrozenTarget:
    """The target's embedding and the rows of its lm_head that belong to the draft vocabulary.

    Attributes:
        embedding: from token ids to the embeddings that a head reads.
        lm_head: rows of the draft vocabulary.
        bias: of these rows, or None.
        token_ids: the target's id of each row.
        draft_ids: row of each of the target's tokens; -1 for tokens outside the draft vocabulary.
        postprocess: what the family does to logits.
    """

    embedding: Callable[[Int[Tensor, " R"]], Float[Tensor, "R H"]]
    lm_head: Float[Tensor, "Dv H"]
    bias: Float[Tensor, " Dv"] | None
    token_ids: Int[Tensor, " Dv"]
    draft_ids: Int[Tensor, " V"]
    postprocess: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, causal_lm: CausalLM, token_ids: Sequence[int] | None = None) -> FrozenTarget:
        """Return the parts of a loaded target. token_ids: the draft vocabulary; None is every token."""
        config = causal_lm.config.get_text_config(decoder=True)
        weight, bias = lm_head_weight(causal_lm, config.hidden_size)
        chosen = torch.arange(len(weight)) if token_ids is None else torch.tensor(list(token_ids))
        chosen = chosen.to(weight.device)
        draft_ids = torch.full((config.vocab_size,), -1, device=weight.device)
        draft_ids[chosen] = torch.arange(len(chosen), device=weight.device)
        return cls(
            embedding=input_embedding(causal_lm),
            lm_head=weight[chosen].clone(),
            bias=None if bias is None else bias[chosen].clone(),
            token_ids=chosen,
            draft_ids=draft_ids,
            postprocess=logits_postprocessor(config),
        )

    @property
    def device(self) -> torch.device:
        return self.lm_head.device

    @property
    def vocab_size(self) -> int:
        return len(self.draft_ids)

    @property
    def covers_all(self) -> bool:
        """Return whether the draft vocabulary is the target's."""
        return len(self.token_ids) == self.vocab_size

    def embed(self, ids: Int[Tensor, " R"]) -> Float[Tensor, "R H"]:
        with torch.no_grad():
            return self.embedding(ids).float()

    def logits(self, hidden: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows Dv"]:
        """Return the logits over the draft vocabulary, in fp32."""
        logits = hidden.to(self.lm_head.dtype) @ self.lm_head.T
        return self.postprocess((logits if self.bias is None else logits + self.bias).float())

    @torch.no_grad()
    def probabilities(self, hidden: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows Dv"]:
        """Return the target's distribution, restricted to the draft vocabulary."""
        return self.logits(hidden).softmax(-1)


@torch.no_grad()
def lm_head_weight(causal_lm: CausalLM, hidden_size: int) -> tuple[Float[Tensor, "V H"], Float[Tensor, " V"] | None]:
    """Return the lm_head's weight and bias, whatever layout its layer keeps them in.

    The outputs for the identity matrix are the weights exactly, since every product but one is zero.
    """
    lm_head, like = causal_lm.get_output_embeddings(), input_embedding(causal_lm).weight
    zeros = torch.zeros(1, hidden_size, dtype=like.dtype, device=like.device)
    bias = lm_head(zeros)[0]
    has_bias = bool(bias.any())
    if not has_bias and type(lm_head) is nn.Linear and lm_head.weight.dtype == like.dtype:
        return lm_head.weight.detach(), None
    weight = lm_head(torch.eye(hidden_size, dtype=like.dtype, device=like.device)) - bias
    return weight.T.contiguous(), bias if has_bias else None
