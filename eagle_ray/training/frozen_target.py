"""FrozenTarget: the target's parts that training of a head needs: embeddings, logits over a draft vocabulary, features.

    target = FrozenTarget.of(causal_lm, token_ids)
    target.logits(hidden)                # differentiable with respect to hidden, [*, Dv]

    source = ComputedFeatures(causal_lm, feature_layers=(2, 15, 27), max_length=2048)
    batch = source.read(PackedBatch.of(documents, indices))
    batch.features, batch.hidden, batch.greedy_ids

The engine's packed kernels have no gradient, so FrozenTarget has the rows of the lm_head as a plain
matrix. The pass for features is the engine's own prefill: packed documents, without padding, in the
target's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle_ray.models.loader import CausalLM, input_embedding
from eagle_ray.models.supported_models import logits_postprocessor
from eagle_ray.models.target import PromptBatch, TargetModel
from eagle_ray.training.packing import PackedBatch

PASS_TOKENS = 2048  # tokens of one pass of the target, enough for efficient matrix products
MAX_DOCUMENTS = 64  # documents of one pass
ROWS_OF_LOGITS = 512  # rows whose logits over the whole vocabulary are in memory at a time
UNKNOWN = -1  # greedy id of a row whose prediction no loss reads


@dataclass(frozen=True, slots=True)
class FrozenTarget:
    """The target's embedding and the rows of its lm_head that belong to the draft vocabulary.

    Attributes:
        embedding: function from token ids to the embeddings that a head reads.
        lm_head: rows of the draft vocabulary.
        bias: bias of these rows, or None.
        token_ids: the target's id of each row.
        draft_ids: row of each of the target's tokens; -1 for tokens outside the draft vocabulary.
        postprocess: function that the model family applies to logits.
    """

    embedding: Callable[[Int[Tensor, " R"]], Float[Tensor, "R H"]]
    lm_head: Float[Tensor, "Dv H"]
    bias: Float[Tensor, " Dv"] | None
    token_ids: Int[Tensor, " Dv"]
    draft_ids: Int[Tensor, " V"]
    postprocess: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, causal_lm: CausalLM, token_ids: Sequence[int] | None = None) -> FrozenTarget:
        """Take these parts from a loaded target.

        Args:
            token_ids: the draft vocabulary; None is every token.
        """
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
        """Return whether the draft vocabulary is the whole vocabulary."""
        return len(self.token_ids) == self.vocab_size

    def embed(self, ids: Int[Tensor, " R"]) -> Float[Tensor, "R H"]:
        with torch.no_grad():
            return self.embedding(ids).float()

    def logits(self, hidden: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows Dv"]:
        """Return the logits over the draft vocabulary, in fp32."""
        logits = hidden.to(self.lm_head.dtype) @ self.lm_head.T
        if self.bias is not None:
            logits = logits + self.bias
        return self.postprocess(logits.float())

    @torch.no_grad()
    def probabilities(self, hidden: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows Dv"]:
        """Return the target's distribution, restricted to the draft vocabulary."""
        return self.logits(hidden).softmax(-1)


@torch.no_grad()
def lm_head_weight(
    causal_lm: CausalLM, hidden_size: int
) -> tuple[Float[Tensor, "V H"], Float[Tensor, " V"] | None]:
    """Return the lm_head's weight and bias, whatever layout its layer keeps them in.

    The outputs for the identity matrix are the weights exactly, since every product but one is
    zero.
    """
    lm_head = causal_lm.get_output_embeddings()
    like = input_embedding(causal_lm).weight
    zeros = torch.zeros(1, hidden_size, dtype=like.dtype, device=like.device)
    bias = lm_head(zeros)[0]
    has_bias = bool(bias.any())
    if not has_bias and type(lm_head) is nn.Linear and lm_head.weight.dtype == like.dtype:
        return lm_head.weight.detach(), None
    weight = lm_head(torch.eye(hidden_size, dtype=like.dtype, device=like.device)) - bias
    return weight.T.contiguous(), bias if has_bias else None


def feature_scale(features: Float[Tensor, "R F"]) -> Float[Tensor, " F"]:
    """Return factors, one per feature element, that give these features a root mean square of about 1.

    They are powers of two, so that they can be folded into a published head's fc and taken out
    without rounding.
    """
    mean_square = features.float().square().mean(0).clamp(min=1e-12)
    return mean_square.rsqrt().log2().round().exp2()


@dataclass(frozen=True, slots=True)
class FeatureBatch:
    """A packed batch with the target's outputs for it.

    Attributes:
        features: features that the head reads: the concatenated inputs of the feature layers, or
            `hidden` itself.
        hidden: last hidden states, which the target's lm_head reads.
        greedy_ids: the target's most probable token after each row; UNKNOWN for rows whose next
            token is not an answer's.
    """

    packed: PackedBatch
    features: Float[Tensor, "R F"]
    hidden: Float[Tensor, "R H"]
    greedy_ids: Int[Tensor, " R"]


class FeatureSource(Protocol):
    """Protocol of an object that reads or computes features."""

    def read(self, packed: PackedBatch) -> FeatureBatch:
        """Return the batch with the target's features."""


class ComputedFeatures:
    """Computes features by running the target.

    Args:
        feature_layers: layers whose inputs are concatenated; None is the last hidden state.
        max_length: maximum tokens of a document.
    """

    def __init__(
        self, causal_lm: CausalLM, feature_layers: tuple[int, ...] | None, max_length: int
    ):
        kv_tokens = max(PASS_TOKENS, max_length) + 64 * MAX_DOCUMENTS
        self._target = TargetModel(
            causal_lm, MAX_DOCUMENTS, max_length + 1, kv_tokens, feature_layers
        )
        self.shares_hidden = feature_layers is None
        self.feature_size = self._target.feature_size
        self.hidden_size = self._target.hidden_size
        self.dtype = self._target.dtype
        self.device = self._target.device

    def read(self, packed: PackedBatch) -> FeatureBatch:
        device = self._target.device
        with torch.inference_mode():
            parts = [self._run(documents) for documents in _passes(packed)]
            hidden = torch.cat([part[0] for part in parts])
            features = hidden if self.shares_hidden else torch.cat([part[1] for part in parts])
            greedy_ids = self._greedy_ids(hidden, packed.is_answer.to(device))
        hidden = hidden.clone()  # tensors of inference mode cannot be saved for a backward pass
        features = hidden if self.shares_hidden else features.clone()
        return FeatureBatch(packed, features, hidden, greedy_ids.clone())

    def _run(self, documents: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Return the hidden states and the features of one pass."""
        blocks = self._target.cache.blocks
        slots = list(range(len(documents)))
        for slot, ids in zip(slots, documents, strict=True):
            if not blocks.reserve(slot, len(ids)):
                raise RuntimeError(
                    f"the KV cache cannot hold a pass of {sum(map(len, documents))} tokens"
                )
        out = self._target.prefill(PromptBatch.of(slots, documents, self._target.device))
        for slot in slots:
            blocks.free(slot)
        return out.hidden, out.features

    def _greedy_ids(self, hidden: Float[Tensor, "R H"], is_answer: Tensor) -> Int[Tensor, " R"]:
        """Return the token that the target prefers after each row before an answer's token."""
        greedy_ids = torch.full((len(hidden),), UNKNOWN, device=hidden.device)
        rows = is_answer[1:].nonzero()[:, 0]
        for part in rows.split(ROWS_OF_LOGITS):
            greedy_ids[part] = self._target.logits(hidden[part]).argmax(-1)
        return greedy_ids


def _passes(packed: PackedBatch) -> Iterator[list[list[int]]]:
    """Yield the documents of each pass of the target, in order."""
    documents: list[list[int]] = []
    num_tokens = 0
    for ids in packed.ids.cpu().split(packed.lengths):
        if documents and (num_tokens + len(ids) > PASS_TOKENS or len(documents) == MAX_DOCUMENTS):
            yield documents
            documents = []
            num_tokens = 0
        documents.append(ids.tolist())
        num_tokens += len(ids)
    if documents:
        yield documents
