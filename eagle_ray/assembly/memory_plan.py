"""Capacity: how many sequences an engine runs at once, and how many tokens its KV cache holds.

    capacity = plan_capacity("auto", "auto", lengths, memory)
    str(capacity)                                       # "256 slots, 412,000 KV tokens"

On a GPU `auto` gives the cache what is left of MEMORY_SHARE of the card after the weights, one pass's tensors, which
`profile_pass` measures as vLLM does, the CUDA graphs, and what `EngineSizes` counts besides: the contexts that prompt
chunks gather, copies of logits, features and drafts. There are as many slots, up to MAX_SLOTS, as sequences of
USUAL_TOKENS fit. On a CPU `auto` is CPU_SLOTS slots, and a cache in which each finds room for a sequence of the
guaranteed length, or one sequence of CPU_SEQUENCE_TOKENS.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eagle_ray.attention.metadata import MAX_SCORES
from eagle_ray.attention.prefill_metadata import CHAIN_ROWS, MAX_GATHERED
from eagle_ray.core.errors import EngineError
from eagle_ray.core.slot_limits import CPU_SLOTS, MAX_SLOTS, Auto
from eagle_ray.drafters.draft_buffers import DraftShape
from eagle_ray.drafters.pair_drafter import QUEUE_WINDOW
from eagle_ray.kv.block_manager import BLOCK_SIZE
from eagle_ray.models.loader import CausalLM
from eagle_ray.models.target import PrefillBatch, TargetModel
from eagle_ray.sampling.sampler import SLICE_ROWS

MEMORY_SHARE = 0.9  # of a card; the rest is for the driver, libraries' workspaces and fragments
CPU_SEQUENCE_TOKENS = 32_768  # of one sequence, for which a CPU's cache has room if the target was made for as many
USUAL_TOKENS = 1024  # of a sequence, prompt and output, for which each slot finds room
GRAPH_BYTES = 70 * (10 << 20)  # of the executables of 70 graphs and some more; 0 to 8 MiB each for an 8B on an H200
PREFILL_TOKENS = {"cpu": 512, "cuda": 4096}  # prompt tokens per step; on a CPU twice as many are hardly faster
SERVE_PREFILL_TOKENS = {"cpu": 512, "cuda": 1024}  # of an endpoint: running streams wait for them
LOGIT_ROWS = 1024  # of the largest pass that decodes
SLICE_LOGIT_BYTES = 24  # of a logit of SLICE_ROWS: copies of log-probabilities in a graph's pool, and of controls
SCORE_BYTES = 10  # of each of MAX_SCORES: the score, in fp32 and as a probability
PROFILE_PROMPTS = 8


@dataclass(frozen=True, slots=True)
class SequenceLengths:
    """Tokens of sequences, prompt and output.

    Attributes:
        max_model_len: of the longest sequence.
        tree_columns: positions that a step needs besides.
        guaranteed: of a sequence that every engine takes, whatever its cache holds; None is max_model_len.
    """

    max_model_len: int
    tree_columns: int
    guaranteed: int | None = None

    @property
    def full(self) -> int:
        """Return the positions of a slot that can hold any sequence, in whole blocks."""
        return self._positions(self.max_model_len)

    @property
    def usual(self) -> int:
        """Return the positions that a slot needs for a sequence of USUAL_TOKENS, in whole blocks."""
        return self._positions(USUAL_TOKENS)

    @property
    def of_guaranteed(self) -> int:
        """Return the positions that a slot needs for a sequence of the guaranteed length, in whole blocks."""
        return self._positions(self.guaranteed or self.max_model_len)

    def cpu_tokens(self, slots: int) -> int | None:
        """Return the KV tokens of this many slots on a CPU; None if each slot can be full."""
        tokens = max(slots * self.of_guaranteed, self._positions(CPU_SEQUENCE_TOKENS))
        return None if tokens >= slots * self.full else tokens

    def that_fit(self, kv_tokens: int | None) -> int:
        """Return max_model_len, cut to what a cache of kv_tokens holds, but not below the guaranteed length."""
        if kv_tokens is None:
            return self.max_model_len
        held = kv_tokens // BLOCK_SIZE * BLOCK_SIZE - self.tree_columns
        return min(self.max_model_len, max(held, self.guaranteed or self.max_model_len))

    def _positions(self, tokens: int) -> int:
        return -(-(min(self.max_model_len, tokens) + self.tree_columns) // BLOCK_SIZE) * BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a card and of what an engine puts there.

    Attributes:
        total, free: of the card, when the weights are loaded.
        of_pass: tensors of the largest pass, without a context.
        per_token: what each token of the cache takes.
        per_slot: what else each slot takes.
        temporary: what passes need at times in addition to of_pass.
    """

    total: int
    free: int
    of_pass: int
    per_token: int
    per_slot: int = 0
    temporary: int = 0

    @property
    def for_slots(self) -> int:
        """Return the bytes that slots and their KV cache may take."""
        used, passes = self.total - self.free, 2 * self.of_pass  # graphs keep a pass's tensors too
        return int(MEMORY_SHARE * self.total) - used - passes - self.temporary - GRAPH_BYTES


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """The numbers of a target and its drafters on which an engine's memory depends, weights and passes left out.

    Attributes:
        itemsize: bytes of a number.
        vocab_size, hidden_size: of the target.
        layer_kv: numbers in the keys and values of one token in one layer of the target.
        kv: the same in all layers of target and drafters.
        feature: numbers of a token's feature.
        num_drafters: those that queue features.
        drafts: of one sequence; None if nothing is drafted.
        logits_per_slot: bytes of the logits that each slot adds to a pass.
        explicit_scores: whether attention's scores may be tensors, as without Triton's kernels.
    """

    itemsize: int
    vocab_size: int
    hidden_size: int
    layer_kv: int
    kv: int
    feature: int
    num_drafters: int = 0
    drafts: DraftShape | None = None
    logits_per_slot: int = 0
    explicit_scores: bool = False

    @property
    def per_token(self) -> int:
        """Return the bytes of keys and values, and of the feature that each block keeps of its last token."""
        return self.itemsize * (self.kv + -(-self.feature // BLOCK_SIZE))

    @property
    def per_slot(self) -> int:
        """Return the bytes of queued features, of a draft and of logits."""
        queued = QUEUE_WINDOW * self.feature * self.itemsize
        drafted = 0 if self.drafts is None else self.drafts.num_bytes(self.hidden_size, self.itemsize)
        return self.num_drafters * (queued + drafted) + self.logits_per_slot

    def temporary(self, max_model_len: int) -> int:
        """Return the bytes of gathered contexts, of copied logits and of scores."""
        longer = PREFILL_TOKENS["cuda"] // (CHAIN_ROWS + 1)  # chunks of a step that are too long for a chain
        gathered = min(MAX_GATHERED, longer * max_model_len) * self.layer_kv * self.itemsize
        copied = SLICE_ROWS * self.vocab_size * SLICE_LOGIT_BYTES
        return gathered + copied + (MAX_SCORES * SCORE_BYTES if self.explicit_scores else 0)

    def memory(self, total: int, free: int, of_pass: int, max_model_len: int) -> DeviceMemory:
        """Return the memory of a card; total, free and of_pass are DeviceMemory's."""
        return DeviceMemory(total, free, of_pass, self.per_token, self.per_slot, self.temporary(max_model_len))


@dataclass(frozen=True, slots=True)
class Capacity:
    """kv_tokens: of all slots together, in whole blocks; None lets each slot be full."""

    slots: int
    kv_tokens: int | None

    def __str__(self) -> str:
        tokens = "room for full sequences" if self.kv_tokens is None else f"{self.kv_tokens:,} KV tokens"
        return f"{self.slots} slot{'' if self.slots == 1 else 's'}, {tokens}"


def plan_capacity(
    slots: int | Auto, kv_tokens: int | Auto | None, lengths: SequenceLengths, memory: DeviceMemory | None
) -> Capacity:
    """Return the capacity for these settings, which are kept where they are not auto.

    Args:
        memory: of a GPU; None on a CPU.

    Raises:
        EngineError: not even one sequence fits.
    """
    if memory is None:
        slots = CPU_SLOTS if slots == "auto" else slots
        return Capacity(slots, lengths.cpu_tokens(slots) if kv_tokens == "auto" else kv_tokens)
    if slots == "auto":
        slots = _num_slots(kv_tokens, lengths, memory)
    if kv_tokens != "auto":
        return Capacity(slots, kv_tokens)
    room = (memory.for_slots - slots * memory.per_slot) // memory.per_token // BLOCK_SIZE * BLOCK_SIZE
    if room < min(lengths.usual, lengths.full):
        raise EngineError(_too_small(lengths, memory))
    return Capacity(slots, min(room, slots * lengths.full))


def _num_slots(kv_tokens: int | Auto | None, lengths: SequenceLengths, memory: DeviceMemory) -> int:
    if kv_tokens == "auto":
        each = lengths.usual * memory.per_token + memory.per_slot
        return max(min(memory.for_slots // each, MAX_SLOTS), 1)
    if kv_tokens is None:
        return max(min(memory.for_slots // (lengths.full * memory.per_token + memory.per_slot), MAX_SLOTS), 1)
    return max(min(kv_tokens // lengths.usual, MAX_SLOTS), 1)


def _too_small(lengths: SequenceLengths, memory: DeviceMemory) -> str:
    used, left = (memory.total - memory.free) / 1e9, max(memory.for_slots, 0) / 1e9
    needed = lengths.usual * memory.per_token / 1e9
    return (
        f"the GPU has {memory.total / 1e9:.0f} GB, of which weights take {used:.1f} GB; {left:.1f} GB are left for "
        f"keys and values, and one sequence takes {needed:.1f} GB: set execution.gpus_per_actor to more, "
        "model.max_model_len or execution.slots to less, or take a smaller or a quantised model"
    )


def profile_pass(model: CausalLM, feature_layers: tuple[int, ...] | None, num_tokens: int) -> int:
    """Measure the bytes of tensors of a pass over num_tokens prompt tokens and of LOGIT_ROWS rows of logits."""
    each = max(num_tokens // PROFILE_PROMPTS, 1)
    target = TargetModel(model, PROFILE_PROMPTS, each + 1, feature_layers=feature_layers)
    slots = list(range(PROFILE_PROMPTS))
    for slot in slots:
        target.cache.blocks.reserve(slot, each)
    prompts = PrefillBatch.of(slots, [[0] * each for _ in slots], target.device)
    torch.cuda.reset_peak_memory_stats(target.device)
    before = torch.cuda.memory_allocated(target.device)
    with torch.inference_mode():
        hidden = target.prefill(prompts).hidden
        target.logits(hidden[:LOGIT_ROWS]).argmax(-1)
    return torch.cuda.max_memory_allocated(target.device) - before
