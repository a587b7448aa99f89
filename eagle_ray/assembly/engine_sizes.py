"""The requested sizes of an engine (EngineArgs), and the numbers that its memory depends on besides weights.

args = EngineArgs(slots=4, max_model_len=8192, kv_tokens=None)
lengths = SequenceLengths.of(speculative, vocab_size, args.max_model_len, args.guaranteed)
sizes = EngineSizes.of(target_config, drafts, speculative, itemsize=2, on_gpu=True)
lengths.full * sizes.per_token          # bytes of a slot that can hold any sequence
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from eagle_ray.assembly.worker_plan import PREFILL_TOKENS, Auto, usual_slots
from eagle_ray.attention.metadata import MAX_SCORES
from eagle_ray.attention.prefill_metadata import CHAIN_ROWS, MAX_GATHERED
from eagle_ray.config import SpeculativeConfig
from eagle_ray.config.job import EnginesConfig
from eagle_ray.kernels.fp8 import FP8
from eagle_ray.kernels.tree_metadata import Reading, possible_readings, unsupported_heads
from eagle_ray.kv.block_manager import BLOCK_SIZE
from eagle_ray.methods.combine.drafter import kv_numbers, layers_read, slot_bytes
from eagle_ray.methods.drafter import LoadedDraft
from eagle_ray.methods.method import plans_alone
from eagle_ray.models.graphs import pass_rows
from eagle_ray.models.supported_models import head_dims, kv_elements_per_token
from eagle_ray.sampling.sampler import SLICE_ROWS

# Tokens of one sequence, for which a CPU's cache has room if the target takes them.
CPU_SEQUENCE_TOKENS = 32_768
USUAL_TOKENS = 1024  # tokens of a sequence for which each slot has room
# Bytes for each logit besides itself: an fp32 copy, and one more where they are sampled.
CPU_LOGIT_BYTES = 8
COPIES_OF_LOGITS = 3  # on a GPU, of a pass with trees of a fixed size: its own, the graphs' pool and a temporary one
# Bytes for each logit of SLICE_ROWS: copies of log-probabilities in a graph's pool, and of
# controls.
SLICE_LOGIT_BYTES = 24
# Bytes for each logit behind which continuations are scored: its fp32 copy and log-probability.
SCORE_LOGIT_BYTES = 8
SCORE_BYTES = 10  # bytes of each of MAX_SCORES: the score, in fp32 and as a probability
# Pools of memory in which graphs of the target attend: plain passes, and those over trees.
TARGET_POOLS = 2
DRAFT_POOLS = 2  # more of them if there are drafts: pairs and further levels


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of a sequence.

    Attributes:
        max_model_len: tokens of prompt and output together.
        guaranteed: sequence length that an engine accepts even if its KV cache is small; at most
            max_model_len.
    """

    max_model_len: int
    vocab_size: int
    guaranteed: int

    def longest(self, kv_tokens: int | Auto | None) -> int:
        """Return the length of the longest sequence: the guaranteed one if every slot must be able
        to be full, else max_model_len."""
        return self.guaranteed if kv_tokens is None else self.max_model_len

    def lengths(
        self, speculative: SpeculativeConfig, kv_tokens: int | Auto | None
    ) -> SequenceLengths:
        """Return the sequence lengths that an engine must have memory for, given execution.kv_tokens."""
        return SequenceLengths.of(
            speculative, self.vocab_size, self.longest(kv_tokens), self.guaranteed
        )


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """Sizes and devices of an engine. Its models and its method are given separately.

    Attributes:
        slots: sequences that run at once.
        max_model_len: maximum tokens of a sequence, prompt and output; None is the target's own
            limit.
        kv_tokens: KV tokens of all slots together; None lets every slot be full, and auto fills the
            memory.
        guaranteed: lower limit when max_model_len is reduced because the cache has no room for it;
            None forbids reducing it.
        prefill_tokens: maximum prompt tokens per step, as one number or by type of device.
        kv_dtype: dtype of the target's KV cache; auto is that of the weights.
        num_gpus: number of GPUs that the target is spread over; below 1, the engine's share of one
            GPU.
        tensor_parallel: number of ranks that share every layer; auto is one per GPU if there are
            several and the target can be split.
        owns_process: whether nothing else runs in this process, so that it may exit if a rank of
            the engine ends.
        has_lm_head: whether logits are computed; if not, the target's checkpoint may lack an
            lm_head.
    """

    slots: int | Auto = "auto"
    max_model_len: int | None = None
    kv_tokens: int | Auto | None = "auto"
    guaranteed: int | None = None
    prefill_tokens: int | Mapping[str, int] = field(default_factory=lambda: PREFILL_TOKENS)
    num_gpus: float = 1
    kv_dtype: str = "auto"
    tensor_parallel: int | Auto = 1
    owns_process: bool = False
    has_lm_head: bool = True

    @classmethod
    def of_worker(
        cls, engines: EnginesConfig, num_gpus: float, owns_process: bool = False
    ) -> EngineArgs:
        """Return the arguments of a worker's engine.

        Args:
            num_gpus: GPUs of the worker; 0 on CPUs.
            owns_process: see Attributes.
        """
        prefill_tokens = (
            engines.AUTO_PREFILL_TOKENS
            if engines.prefill_tokens == "auto"
            else engines.prefill_tokens
        )
        return cls(
            slots=engines.slots,
            kv_tokens=engines.kv_tokens,
            prefill_tokens=prefill_tokens,
            num_gpus=num_gpus or 1,
            kv_dtype=engines.kv_dtype,
            tensor_parallel=engines.tensor_parallel,
            owns_process=owns_process,
        )

    @property
    def stored_kv(self) -> torch.dtype | None:
        """Return the dtype in which the target's KV cache stores numbers; None is that of the weights."""
        return FP8 if self.kv_dtype == "fp8" else None

    @property
    def gpu_share(self) -> float:
        """Return the share of its first GPU's memory that the engine may take."""
        return min(self.num_gpus, 1)

    def within(self, limits: ModelLimits) -> EngineArgs:
        """Return the arguments with unset lengths taken from the target's limits."""
        if self.max_model_len is not None:
            return self
        return replace(
            self, max_model_len=limits.longest(self.kv_tokens), guaranteed=limits.guaranteed
        )

    def prefill_tokens_on(self, device: str) -> int:
        """Return the maximum prompt tokens per step on a type of device."""
        return (
            self.prefill_tokens
            if isinstance(self.prefill_tokens, int)
            else self.prefill_tokens[device]
        )


@dataclass(frozen=True, slots=True)
class SequenceLengths:
    """The lengths of sequences for which memory is planned, in tokens of prompt and output.

    Attributes:
        max_model_len: maximum length of the longest sequence.
        tree_columns: further positions that a step over a draft tree writes.
        guaranteed: length that the engine accepts even if its cache is small; None is
            max_model_len.
    """

    max_model_len: int
    tree_columns: int
    guaranteed: int | None = None

    @classmethod
    def of(
        cls,
        speculative: SpeculativeConfig,
        vocab_size: int,
        max_model_len: int,
        guaranteed: int | None = None,
    ) -> SequenceLengths:
        """Return the lengths, with the positions that the method's draft trees need."""
        if speculative.merged_methods == "none":
            return cls(max_model_len, 1, guaranteed)
        bounds = replace(speculative.tree_bounds, top_k=min(speculative.top_k, vocab_size))
        return cls(max_model_len, bounds.num_positions, guaranteed)

    @property
    def full(self) -> int:
        """Return the positions of a slot that can hold the longest sequence, in whole blocks."""
        return self._positions(self.max_model_len)

    @property
    def usual(self) -> int:
        """Return the positions that a slot needs for a sequence of USUAL_TOKENS, in whole blocks."""
        return self._positions(USUAL_TOKENS)

    @property
    def of_guaranteed(self) -> int:
        """Return the positions that a slot needs for a sequence of the guaranteed length, in whole blocks."""
        return self._positions(self.guaranteed or self.max_model_len)

    def on_cpu(self, slots: int | Auto, kv_tokens: int | Auto | None) -> tuple[int, int | None]:
        """Return the slots and KV tokens of a CPU engine for these settings; KV tokens of None are
        enough for full slots."""
        slots = usual_slots(slots, on_gpu=False)
        if kv_tokens != "auto":
            return slots, kv_tokens
        tokens = max(slots * self.of_guaranteed, self._positions(CPU_SEQUENCE_TOKENS))
        return slots, None if tokens >= slots * self.full else tokens

    def that_fit(self, kv_tokens: int | None) -> int:
        """Return max_model_len, reduced to what a cache of kv_tokens holds, but not below the guaranteed length."""
        if kv_tokens is None:
            return self.max_model_len
        fitting = kv_tokens // BLOCK_SIZE * BLOCK_SIZE - self.tree_columns
        return min(self.max_model_len, max(fitting, self.guaranteed or self.max_model_len))

    def _positions(self, tokens: int) -> int:
        return -(-(min(self.max_model_len, tokens) + self.tree_columns) // BLOCK_SIZE) * BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """Sizes of a target and its drafters that determine an engine's memory, apart from weights and passes.

    Attributes:
        itemsize: bytes of an element of the activations.
        vocab_size: vocabulary size of the target.
        layer_kv: bytes per token that a layer of the target gathers of its keys and values, copies
            included.
        kv_per_token: bytes per token in the KV caches of target and drafters.
        feature: number of elements of a token's feature.
        drafts: bytes that drafters reserve per slot.
        logit_rows: rows of logits that each slot adds to a pass; 0 on a GPU if a budget for all
            slots bounds them.
        logit_bytes: bytes of a logit and its copies.
        explicit_scores: whether attention may write its scores to a tensor, as it does without
            Triton's kernels.
        readings: ways in which Triton's attention may split the largest pass, which is eager; empty
            if it does not run.
        graph_pools: number of CUDA graph pools whose passes attend, each with memory of its own.
    """

    itemsize: int
    vocab_size: int
    layer_kv: int
    kv_per_token: int
    feature: int
    drafts: int = 0
    logit_rows: int = 0
    logit_bytes: int = 0
    explicit_scores: bool = False
    readings: tuple[Reading, ...] = ()
    graph_pools: int = 0

    @classmethod
    def of(
        cls,
        shape: Any,
        parts: Sequence[LoadedDraft],
        speculative: SpeculativeConfig,
        itemsize: int,
        on_gpu: bool,
        explicit_scores: bool = False,
        stored_kv: torch.dtype | None = None,
    ) -> EngineSizes:
        """Compute the sizes from the configs of target and drafts.

        Args:
            shape: the target's config.
            parts: drafts, loaded or from check_drafts.
            itemsize: bytes of a number of the models.
            stored_kv: dtype of the target's cache; None is the models' dtype.
        """
        method = speculative.merged_methods
        vocab_size = shape.vocab_size
        kv_numbers_of_layer = kv_elements_per_token(shape)
        kv_itemsize = itemsize if stored_kv is None else stored_kv.itemsize
        # It is gathered, then converted.
        gathered = itemsize if kv_itemsize == itemsize else itemsize + kv_itemsize
        hidden_size = shape.hidden_size
        num_layers = shape.num_hidden_layers
        feature = hidden_size * len(layers_read(parts, num_layers) or [0])
        bounds = replace(speculative.tree_bounds, top_k=min(speculative.top_k, vocab_size))
        tree_rows = 1 if method == "none" else 1 + speculative.max_nodes
        is_fixed = method != "none" and (speculative.budget != "global" or plans_alone(method))
        return cls(
            itemsize=itemsize,
            vocab_size=vocab_size,
            layer_kv=gathered * kv_numbers_of_layer,
            kv_per_token=kv_itemsize * num_layers * kv_numbers_of_layer
            + itemsize * kv_numbers(parts),
            feature=feature,
            drafts=slot_bytes(parts, feature, hidden_size, bounds, itemsize),
            logit_rows=tree_rows if is_fixed or not on_gpu else 0,
            logit_bytes=COPIES_OF_LOGITS * itemsize if on_gpu else itemsize + CPU_LOGIT_BYTES,
            explicit_scores=explicit_scores,
            readings=_readings(shape, itemsize) if on_gpu and not explicit_scores else (),
            graph_pools=TARGET_POOLS + (DRAFT_POOLS if parts else 0),
        )

    @property
    def feature_per_token(self) -> int:
        """Return the bytes per cached token of stored features: each block keeps the feature of its last token."""
        return self.itemsize * -(-self.feature // BLOCK_SIZE)

    @property
    def per_slot(self) -> int:
        """Return the bytes per slot of queued features, a draft and logits."""
        return self.drafts + self.logit_rows * self.vocab_size * self.logit_bytes

    @property
    def scores(self) -> int:
        """Return the bytes of a slice of logits and its log-probabilities, when continuations are scored."""
        return SLICE_ROWS * self.vocab_size * (self.itemsize + SCORE_LOGIT_BYTES)

    def temporary(self, max_model_len: int) -> int:
        """Return the bytes of a pass's temporary tensors: gathered contexts, copied logits, attention scores."""
        # Chunks of a step that are too long for a chain.
        longer = PREFILL_TOKENS["cuda"] // (CHAIN_ROWS + 1)
        gathered = min(MAX_GATHERED, longer * max_model_len) * self.layer_kv
        copied = SLICE_ROWS * self.vocab_size * SLICE_LOGIT_BYTES
        return gathered + copied + (MAX_SCORES * SCORE_BYTES if self.explicit_scores else 0)

    def sums(self, lengths: SequenceLengths, slots: int) -> int:
        """Return the bytes of attention's partial sums (flash decoding): of eager passes, and in all pools of graphs.

        A replayed pass has at most the rows of one tree per slot, an eager one those of prompts.
        """
        num_rows = pass_rows(slots * lengths.tree_columns)
        replayed = [replace(each, num_rows=min(num_rows, each.num_rows)) for each in self.readings]
        return _max_sums(self.readings, lengths) + self.graph_pools * _max_sums(replayed, lengths)


def _max_sums(readings: Sequence[Reading], lengths: SequenceLengths) -> int:
    """Return the most bytes of sums of a launch that reads in one of these ways."""
    trees = max(lengths.tree_columns, CHAIN_ROWS)
    return max((each.max_sum_bytes(trees, lengths.full) for each in readings), default=0)


def _readings(shape: Any, itemsize: int) -> tuple[Reading, ...]:
    """Return how a target's layers may read in the largest pass; none if the kernels do not support its heads."""
    key_dim, value_dim = head_dims(shape)
    dtype = torch.float32 if itemsize == torch.float32.itemsize else torch.bfloat16
    if unsupported_heads(dtype, key_dim, value_dim) is not None:
        return ()
    kv_heads = kv_elements_per_token(shape) // (key_dim + value_dim)
    heads = shape.num_attention_heads, kv_heads, key_dim, value_dim
    return tuple(possible_readings(PREFILL_TOKENS["cuda"], *heads, dtype, torch.device("cuda")))
