"""TargetModel: a causal LM that runs packed rows of many sequences, trees included, over our own KV cache.

The modules are transformers'; the attention function, the KV cache and the row metadata are ours.
One pass takes rows packed as [1, R].
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from eagle_ray.attention.backend import mixed_metadata, prefill_metadata, rows_metadata
from eagle_ray.attention.metadata import AttentionMetadata
from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.device import copy_to_device, to_device
from eagle_ray.families import layers_of
from eagle_ray.kernels import cpu_ops
from eagle_ray.kv.block_manager import BLOCK_SIZE, BlockManager
from eagle_ray.kv.kv_cache import KVCache
from eagle_ray.models.decoder import Decoder
from eagle_ray.models.loader import decoder_layers, eos_ids, input_embedding
from eagle_ray.models.packed_linear import slice_rows
from eagle_ray.models.quantized_linear import QuantizedLinear, holds_quantized
from eagle_ray.models.runtime import pin_cuda_numerics
from eagle_ray.models.supported_models import (
    check_config,
    keeps_logits,
    logits_postprocessor,
    max_exact_position,
    probe,
)
from eagle_ray.tree.draft_tree import DraftTree, VerifyResult, VerifyRows


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Chunks of B prompts for one pass, concatenated in R rows.

    Attributes:
        starts, lengths: position of each chunk's first token, and its number of tokens.
        tokens, positions: tokens and positions of every row.
        last: index of the row of each chunk's last token.
    """

    slots: list[int]
    starts: list[int]
    lengths: list[int]
    tokens: Int[Tensor, " R"]
    positions: Int[Tensor, " R"]
    last: Int[Tensor, " B"]

    @classmethod
    def of(
        cls,
        slots: list[int],
        chunks: list[list[int]],
        device: torch.device | str = "cpu",
        starts: list[int] | None = None,
    ) -> PromptBatch:
        """Build a batch of the given tokens of each prompt, from position `starts` on; without
        starts, from position 0."""
        starts = starts or [0] * len(slots)
        lengths = [len(ids) for ids in chunks]
        positions = [
            torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)
        ]
        return cls(
            slots=slots,
            starts=starts,
            lengths=lengths,
            tokens=to_device([i for ids in chunks for i in ids], device),
            positions=copy_to_device(torch.cat(positions), device),
            last=to_device([end - 1 for end in accumulate(lengths)], device),
        )


@dataclass(frozen=True, slots=True)
class PackedTrees:
    """Draft trees packed into rows, as input of TargetModel.verify. Their contexts are in their slots."""

    tree: DraftTree
    rows: VerifyRows
    batch: DecodeSlots
    max_depth: int


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """Output of one pass.

    Attributes:
        logits: logits after each row of a tree, or after the last token of each prompt chunk.
        hidden: hidden state of each row before the lm_head.
        features: features of each row, as a drafter reads them.
    """

    logits: Float[Tensor, "L V"]
    hidden: Float[Tensor, "R H"]
    features: Float[Tensor, "R F"]


@dataclass(frozen=True, slots=True)
class LikeliestOutput:
    """Output of one pass that computed only the argmax of the logits.

    Attributes:
        tokens: argmax of the logits after each row.
        features: features of each row, as a drafter reads them.
        is_finite: whether the hidden state of each row is finite.
    """

    tokens: Int[Tensor, " R"]
    features: Float[Tensor, "R F"]
    is_finite: Bool[Tensor, " R"]


@dataclass(frozen=True, slots=True)
class OfferedLogits:
    """Computes the target's logits of some tokens only, those that a draft head may offer.

    Attributes:
        lm_head: the linear layer over these tokens.
        finish: the logits processing in the model's config.
    """

    lm_head: nn.Module
    finish: Callable[[Tensor], Tensor]

    @property
    def linear(self) -> nn.Module | None:
        """Return the layer that computes these logits by itself, or None if the config processes its output."""
        return self.lm_head if keeps_logits(self.finish) else None

    def __call__(self, hidden: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows D"]:
        return self.finish(self.lm_head(hidden))


class TargetModel:
    """The target model and its KV cache of num_slots slots.

    Args:
        capacity: maximum positions of a slot, tree rows included.
        kv_tokens: positions that all slots together may use, rounded down to whole blocks; None is
            enough for full slots.
        feature_layers: layers whose concatenated inputs are a row's feature; None is the last
            layer's normed output, which the lm_head reads.
        kv_dtype: dtype of stored keys and values; None is the result of cache_dtype.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_slots: int,
        capacity: int,
        kv_tokens: int | None = None,
        feature_layers: tuple[int, ...] | None = None,
        kv_dtype: torch.dtype | None = None,
    ):
        config = model.config
        check_config(config)
        self.model = model.eval()
        self.embed_tokens = input_embedding(model)
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self._feature_layers = feature_layers
        self.feature_size = config.hidden_size * len(feature_layers or [0])
        self.eos_ids = eos_ids(model)
        self._lm_head = model.get_output_embeddings()
        self._finished = logits_postprocessor(config)
        self._argmax = _argmax_of(self.logits_over(None).linear)
        self._last_position = (max_exact_position(config) or sys.maxsize) - 1
        weight = self.embed_tokens.weight
        self.device = weight.device
        self.dtype = weight.dtype
        pin_cuda_numerics(self.device)
        kv_spec = probe(model, self.logits, capacity)
        self._decoder = Decoder.of(model, feature_layers)
        num_blocks = None if kv_tokens is None else kv_tokens // BLOCK_SIZE
        self.cache = KVCache(
            BlockManager(num_slots, capacity, num_blocks, weight.device),
            kv_spec.num_layers,
            kv_spec.num_kv_heads,
            kv_spec.key_dim,
            weight.dtype,
            weight.device,
            kv_spec.value_dim,
            kv_dtype or cache_dtype(model),
        )

    @property
    def has_own_forward(self) -> bool:
        """Return whether the layers are run by our own forward, not by transformers'."""
        return self._decoder is not None

    def routers(self) -> dict[int, int]:
        """Return a checksum of each router that our own forward runs, by layer."""
        return {} if self._decoder is None else self._decoder.routers()

    def prefill(self, prompts: PromptBatch) -> TargetOutput:
        """Run prompt chunks, which fills their slots, and return the output after each chunk's last token."""
        hidden, features = self._run(
            prompts.tokens, prompts.positions, self._prompt_layout(prompts)
        )
        return TargetOutput(self.logits(hidden[prompts.last]), hidden, features)

    def encode(self, prompts: PromptBatch) -> Float[Tensor, "R H"]:
        """Run prompt chunks, which fills their slots, and return the hidden states of all rows. No
        logits are computed."""
        hidden, _ = self._run(prompts.tokens, prompts.positions, self._prompt_layout(prompts))
        return hidden

    def verify(
        self, tree: DraftTree, rows: VerifyRows, batch: DecodeSlots, max_depth: int
    ) -> TargetOutput:
        """Run one pass over the packed rows of B trees.

        Row (b, i) is written at position lengths[b] + i; `commit` moves the accepted rows.
        """
        layout = rows_metadata(self.cache, batch, tree, rows, max_depth)
        hidden, features = self._run(rows.tokens, rows.positions, layout)
        return TargetOutput(self.logits(hidden), hidden, features)

    @property
    def finds_likeliest(self) -> bool:
        """Return whether `verify_likeliest` is supported: the lm_head can compute the argmax
        without writing its outputs."""
        return self._argmax is not None

    def verify_likeliest(
        self, tree: DraftTree, rows: VerifyRows, batch: DecodeSlots, max_depth: int
    ) -> LikeliestOutput:
        """Run `verify` for rows that need only the argmax of the logits."""
        assert self._argmax is not None, "see finds_likeliest"
        layout = rows_metadata(self.cache, batch, tree, rows, max_depth)
        hidden, features = self._run(rows.tokens, rows.positions, layout)
        is_finite = hidden.sum(-1).isfinite()
        return LikeliestOutput(self._argmax(hidden), features, is_finite)

    def forward_mixed(
        self,
        tree: DraftTree,
        rows: VerifyRows,
        batch: DecodeSlots,
        max_depth: int,
        prompts: PromptBatch,
    ) -> tuple[TargetOutput, TargetOutput]:
        """Run `verify` and `prefill` in one pass, so the weights are read once. Their slots must differ."""
        num_rows = len(rows.tokens)
        layout = mixed_metadata(
            rows_metadata(self.cache, batch, tree, rows, max_depth),
            self._prompt_layout(prompts),
            num_rows,
        )
        tokens = torch.cat([rows.tokens, prompts.tokens])
        positions = torch.cat([rows.positions, prompts.positions])
        hidden, features = self._run(tokens, positions, layout)
        mine = hidden[:num_rows]
        theirs = hidden[num_rows:]
        logits = self.logits(torch.cat([mine, theirs[prompts.last]]))
        trees = TargetOutput(logits[:num_rows], mine, features[:num_rows])
        return trees, TargetOutput(logits[num_rows:], theirs, features[num_rows:])

    def hidden_states(
        self, trees: PackedTrees | None, prompts: PromptBatch | None
    ) -> Float[Tensor, "R H"]:
        """Run the rows of trees, of chunks or of both in one pass, and return their states before the lm_head.

        The slots of trees and chunks differ. At least one of the two is given.
        """
        if trees is None:
            assert prompts is not None
            layout = self._prompt_layout(prompts)
            return self._run(prompts.tokens, prompts.positions, layout)[0]
        rows = trees.rows
        layout = rows_metadata(self.cache, trees.batch, trees.tree, rows, trees.max_depth)
        if prompts is None:
            return self._run(rows.tokens, rows.positions, layout)[0]
        layout = mixed_metadata(layout, self._prompt_layout(prompts), len(rows.tokens))
        tokens = torch.cat([rows.tokens, prompts.tokens])
        positions = torch.cat([rows.positions, prompts.positions])
        return self._run(tokens, positions, layout)[0]

    def commit(self, batch: DecodeSlots, result: VerifyResult) -> None:
        """Keep the accepted path of each tree and discard the other rows."""
        self.cache.commit(batch, result)

    def logits(self, hidden: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows V"]:
        """Apply the lm_head and the logits processing in the model's config."""
        return self._finished(self._lm_head(hidden))

    def logits_over(self, token_ids: Int[Tensor, " D"] | None) -> OfferedLogits:
        """Return a function like `logits` for these tokens only. None means all tokens. Raises EngineError."""
        lm_head = self._lm_head if token_ids is None else slice_rows(self._lm_head, token_ids)
        return OfferedLogits(lm_head, self._finished)

    def _run(
        self, tokens: Int[Tensor, " R"], positions: Int[Tensor, " R"], layout: AttentionMetadata
    ) -> tuple[Float[Tensor, "R H"], Float[Tensor, "R F"]]:
        """Return the hidden states before the lm_head, and the features."""
        positions = positions.clamp(max=self._last_position)
        if self._decoder is not None:
            return self._decoder(tokens, positions, layout)
        with self._tapped() as taps:
            arguments = {"position_ids": positions[None], "use_cache": False, "rows": layout}
            out = layers_of(self.model)(input_ids=tokens[None], **arguments)
        hidden = out.last_hidden_state[0]
        return hidden, torch.cat([tap[0] for tap in taps], -1) if taps else hidden

    @contextmanager
    def _tapped(self) -> Iterator[list[Float[Tensor, "1 R H"]]]:
        """Capture the inputs of feature_layers during a pass, in order."""
        taps: list[Tensor] = []

        def tap(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            taps.append((args[0] if args else kwargs["hidden_states"]).to(self.device))

        layers = decoder_layers(self.model) if self._feature_layers else ()
        hooks = [
            layers[i].register_forward_pre_hook(tap, with_kwargs=True)
            for i in self._feature_layers or ()
        ]
        try:
            yield taps
        finally:
            for hook in hooks:
                hook.remove()

    def _prompt_layout(self, prompts: PromptBatch) -> AttentionMetadata:
        return prefill_metadata(
            self.cache, prompts.slots, [0] * len(prompts.slots), prompts.starts, prompts.lengths
        )


def _argmax_of(lm_head: nn.Module | None) -> Callable[[Tensor], Tensor] | None:
    """Return a function that computes the argmax without writing logits, or None if the lm_head has none."""
    if isinstance(lm_head, QuantizedLinear) and lm_head.finds_highest:
        return lm_head.argmax
    return None


def cache_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of cached keys and values: that of activations, but bf16 with quantised weights on a CPU.

    There, reading an fp32 cache would soon take longer than reading the weights.
    """
    weight = input_embedding(model).weight
    is_wide = holds_quantized(model) and cpu_ops.available(weight.device, weight.dtype)
    return torch.bfloat16 if is_wide else weight.dtype
