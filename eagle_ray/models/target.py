"""TargetModel: a causal LM that runs packed rows of many sequences, trees included, over our own KV cache.

The modules are transformers'; the attention function, the KV cache and the row metadata are ours. One pass takes
rows packed as [1, R].
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from eagle_ray.attention.backend import mixed_metadata, prefill_metadata, tree_metadata
from eagle_ray.attention.metadata import AttentionMetadata
from eagle_ray.attention.triton_attention import uses_triton
from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.device import copy_to_device, to_device
from eagle_ray.kernels import cpu_ops
from eagle_ray.kv.block_manager import BLOCK_SIZE, BlockManager
from eagle_ray.kv.kv_cache import KVCache
from eagle_ray.models.decoder import Decoder
from eagle_ray.models.loader import decoder_layers, eos_ids, input_embedding
from eagle_ray.models.packed_linear import slice_rows
from eagle_ray.models.quantized_linear import holds_quantized
from eagle_ray.models.runtime import pin_cuda_numerics
from eagle_ray.models.supported_models import LogitsOf, check_config, logits_postprocessor, max_exact_position, probe
from eagle_ray.tree.draft_tree import DraftTree, VerifyResult, VerifyRows


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Chunks of B prompts for one pass, concatenated in R rows.

    Attributes:
        starts, lengths: position of each chunk's first token, and its number of tokens.
        tokens, positions: tokens and positions of every row.
        last: row of each chunk's last token.
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
        """Return a batch of the given tokens of each prompt; without starts, from position 0."""
        starts, lengths = starts or [0] * len(slots), [len(ids) for ids in chunks]
        positions = [torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)]
        return cls(
            slots=slots,
            starts=starts,
            lengths=lengths,
            tokens=to_device([i for ids in chunks for i in ids], device),
            positions=copy_to_device(torch.cat(positions), device),
            last=to_device([end - 1 for end in accumulate(lengths)], device),
        )


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """Output of one pass.

    Attributes:
        logits: after each row of a tree, or after the last token of each chunk of a prompt.
        hidden: states of each row before the lm_head.
        features: features of each row, as a drafter reads them.
    """

    logits: Float[Tensor, "L V"]
    hidden: Float[Tensor, "R H"]
    features: Float[Tensor, "R F"]


class TargetModel:
    """The target model and its KVCache of num_slots slots.

    Args:
        capacity: positions of a slot, tree rows included.
        kv_tokens: positions that all slots together may use, rounded down to whole blocks; None lets each be full.
        feature_layers: layers whose concatenated inputs are a row's feature; None is the last layer's normed output,
            which the lm_head reads.
        kv_dtype: in which the cache stores keys and values; None is cache_dtype's.
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
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self._feature_layers = feature_layers
        self.feature_size = config.hidden_size * len(feature_layers or [0])
        self.eos_ids = eos_ids(model)
        self._lm_head = model.get_output_embeddings()
        self._finished = logits_postprocessor(config)
        self._last_position = (max_exact_position(config) or sys.maxsize) - 1
        weight = self.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype
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

    def routers(self) -> dict[int, int]:
        """Return a checksum of the router of each layer with experts, as far as our own forward runs them."""
        return {} if self._decoder is None else self._decoder.routers()

    def prefill(self, prompts: PromptBatch) -> TargetOutput:
        """Run the chunks and fill their slots."""
        hidden, features = self._run(prompts.tokens, prompts.positions, self._prompt_layout(prompts))
        return TargetOutput(self.logits(hidden[prompts.last]), hidden, features)

    def verify(self, tree: DraftTree, rows: VerifyRows, batch: DecodeSlots, max_depth: int) -> TargetOutput:
        """Run one pass over the packed rows of B trees.

        Row (b, i) is written at position lengths[b] + i; `commit` moves the accepted rows.
        """
        layout = self._tree_layout(tree, rows, batch, max_depth)
        hidden, features = self._run(rows.tokens, rows.positions, layout)
        return TargetOutput(self.logits(hidden), hidden, features)

    def forward_mixed(
        self, tree: DraftTree, rows: VerifyRows, batch: DecodeSlots, max_depth: int, prompts: PromptBatch
    ) -> tuple[TargetOutput, TargetOutput]:
        """Run `verify` and `prefill` in one pass, so the weights are read once. Their slots must differ."""
        num_rows = len(rows.tokens)
        layout = mixed_metadata(self._tree_layout(tree, rows, batch, max_depth), self._prompt_layout(prompts), num_rows)
        tokens, positions = torch.cat([rows.tokens, prompts.tokens]), torch.cat([rows.positions, prompts.positions])
        hidden, features = self._run(tokens, positions, layout)
        mine, theirs = hidden[:num_rows], hidden[num_rows:]
        logits = self.logits(torch.cat([mine, theirs[prompts.last]]))
        trees = TargetOutput(logits[:num_rows], mine, features[:num_rows])
        return trees, TargetOutput(logits[num_rows:], theirs, features[num_rows:])

    def commit(self, batch: DecodeSlots, result: VerifyResult) -> None:
        """Keep the accepted path of each tree and discard the other rows."""
        self.cache.commit(batch, result)

    def logits(self, hidden: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows V"]:
        """Apply the lm_head and the logits processing in the model's config."""
        return self._finished(self._lm_head(hidden))

    def logits_over(self, token_ids: Int[Tensor, " D"]) -> LogitsOf:
        """Return `logits` for these tokens only, from a copy of their rows of the lm_head. Raises EngineError."""
        lm_head = slice_rows(self._lm_head, token_ids)
        return lambda hidden: self._finished(lm_head(hidden))

    def _run(
        self, tokens: Int[Tensor, " R"], positions: Int[Tensor, " R"], layout: AttentionMetadata
    ) -> tuple[Float[Tensor, "R H"], Float[Tensor, "R F"]]:
        """Return the hidden states before the lm_head, and the features."""
        positions = positions.clamp(max=self._last_position)
        if self._decoder is not None:
            return self._decoder(tokens, positions, layout)
        with self._tapped() as taps:
            arguments = {"position_ids": positions[None], "use_cache": False, "rows": layout}
            out = self.model.base_model(input_ids=tokens[None], **arguments)
        hidden = out.last_hidden_state[0]
        return hidden, torch.cat([tap[0] for tap in taps], -1) if taps else hidden

    @contextmanager
    def _tapped(self) -> Iterator[list[Float[Tensor, "1 R H"]]]:
        """Capture the inputs of feature_layers during a pass, in order."""
        taps: list[Tensor] = []

        def tap(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            taps.append((args[0] if args else kwargs["hidden_states"]).to(self.device))

        layers = decoder_layers(self.model) if self._feature_layers else ()
        hooks = [layers[i].register_forward_pre_hook(tap, with_kwargs=True) for i in self._feature_layers or ()]
        try:
            yield taps
        finally:
            for hook in hooks:
                hook.remove()

    def _prompt_layout(self, prompts: PromptBatch) -> AttentionMetadata:
        return prefill_metadata(self.cache, prompts.slots, [0] * len(prompts.slots), prompts.starts, prompts.lengths)

    def _tree_layout(self, tree: DraftTree, rows: VerifyRows, batch: DecodeSlots, max_depth: int) -> AttentionMetadata:
        seq = rows.seq.clamp(min=0)
        positions = torch.where(rows.seq >= 0, batch.lengths[seq] + rows.node, self.cache.blocks.null_position)
        return tree_metadata(
            self.cache,
            batch,
            slot_mapping=self.cache.slot_mapping(batch.slots[seq], positions),
            ancestors=tree.ancestor_words(max_depth) if uses_triton(self.cache) else tree.ancestors(max_depth),
            depths=tree.depths,
            position_depths=tree.depths,
            row_of=None if rows.is_rectangle else rows.row_of,
            unpack=None if rows.is_rectangle else seq * tree.num_nodes + rows.node,
            seq=None if max_depth == 0 and rows.is_rectangle else rows.seq,  # in roots alone there is no padding
            sizes=None if rows.is_rectangle else rows.sizes,
        )


def cache_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of keys and values: that of activations, and bf16 with quantised weights on a CPU.

    There, reading an fp32 cache would soon take longer than reading the weights.
    """
    weight = input_embedding(model).weight
    is_wide = holds_quantized(model) and cpu_ops.available(weight.device, weight.dtype)
    return torch.bfloat16 if is_wide else weight.dtype
