"""MemoryPlan: the bytes of one worker by use, and the slots and KV tokens that fit into the rest.

    plan = MemoryPlan.of(sizes, lengths, target_bytes, draft_bytes, pass_bytes, memory).sized("auto", "auto")
    plan.slots, plan.kv_tokens                  # 256, 412000
    plan.describe()                             # "a worker takes 71.2 GiB: target 15.0 GiB, draft ..."

`model_memory` uses this arithmetic for loaded models and for checkpoints. On a GPU `auto` gives the
KV cache the rest of MEMORY_SHARE of the card, or of the worker's share of it, after the weights,
one pass's tensors, the CUDA graphs, and the tensors that `EngineSizes` counts: contexts that prompt
chunks gather, partial sums of attention, copies of logits, features and drafts. The number of slots
is that of sequences of USUAL_TOKENS that fit, up to MAX_SLOTS. On a CPU `auto` is CPU_SLOTS slots,
and a cache with room for a sequence of the guaranteed length in each, or for one sequence of
CPU_SEQUENCE_TOKENS.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from eagle_ray.assembly.engine_sizes import EngineSizes, SequenceLengths
from eagle_ray.assembly.worker_plan import MAX_SLOTS, Auto
from eagle_ray.core.errors import EngineError
from eagle_ray.kv.block_manager import BLOCK_SIZE
from eagle_ray.models.graphs import MAX_AHEAD
from eagle_ray.report.text import counted, gib

MEMORY_SHARE = 0.9  # share of a card; the rest is for the driver, workspaces and fragments
GPU_SHARE = 0.9  # share of a GPU's free memory for layers; the rest is for a pass's tensors
# With several GPUs: the head's own cache and the trees' positions come on top of the target's.
KV_MARGIN = 1.2
# Executables of the 40 graphs for 16 slots; 0 to 8 MiB each for an 8B.
GRAPH_BYTES = 40 * (10 << 20)
# 64 slots have 60 graphs.
SLOT_GRAPH_BYTES = (MAX_AHEAD * (10 << 20) - GRAPH_BYTES) // MAX_SLOTS


# A token of a trie of continuations, with the arrays of its scores and the passes over it: 180 to 490 of
# tracemalloc's bytes for 10^5 continuations of two tokens, 400 of 25 and one of 4,000.
TRIE_NODE_BYTES = 500


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory that a worker is planned for.

    Attributes:
        total: bytes of the worker's first GPU, or of its share of a machine's memory.
        free: bytes that are free before the worker's models are loaded.
        others_room: bytes for layers of the target on the worker's other GPUs.
        on_gpu: whether this is a GPU's memory.
    """

    total: int
    free: int
    others_room: int = 0
    on_gpu: bool = True

    @classmethod
    def of_gpu(
        cls, device: torch.device, share: float, loaded: int, others_room: int = 0
    ) -> DeviceMemory:
        """Return the memory of an engine that has a share of a GPU and has loaded this many bytes of weights there.

        Engines with the GPU's other shares may or may not have allocated theirs already.
        """
        free, total = torch.cuda.mem_get_info(device)
        of_share = int(share * total)
        return cls(of_share, min(free + loaded, of_share), others_room)

    def of_rank(self, num_ranks: int) -> DeviceMemory:
        """Return the memory of one rank of a worker: a whole GPU, or a share of the machine's memory."""
        if num_ranks == 1:
            return self
        share = 1 if self.on_gpu else num_ranks
        return replace(self, total=self.total // share, free=self.free // share, others_room=0)

    @property
    def reserve(self) -> int:
        """Return the bytes of a card that plans leave unused."""
        return self.total - int(MEMORY_SHARE * self.total) if self.on_gpu else 0

    @property
    def room(self) -> int:
        """Return the bytes that the worker may use on this device, without its other GPUs."""
        return self.free - self.reserve


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The bytes that one worker needs, by use, and the slots and KV tokens that they allow.

    Attributes:
        lengths: lengths of the worker's sequences.
        target, draft: bytes of the weights.
        kv_per_token: bytes of keys and values per cached token.
        feature_per_token: bytes of stored features per cached token.
        per_slot: bytes of queued features, drafts and logits per slot.
        passes: bytes of the largest pass's tensors that do not depend on the slots.
        graphs, graphs_per_slot: bytes of CUDA graph executables, and further bytes per slot.
        scores: bytes of logits and log-probabilities of a pass that scores continuations.
        trie_per_slot: bytes of the trie of continuations of a sequence of the guaranteed length; 0
            on a GPU, since tries are in host memory.
        process: bytes of Python and its packages; 0 on a GPU's machine, or if unknown.
        memory: memory that the worker is planned for; None if unknown.
        slots: number of sequences that run at once.
        kv_tokens: KV tokens of all slots together, in whole blocks; None lets each slot be full.
        is_planned: whether the KV tokens were chosen by the available memory.
        sizes: sizes of an engine on a GPU, for attention's partial sums; None on a CPU.
    """

    lengths: SequenceLengths
    target: int
    draft: int
    kv_per_token: int
    feature_per_token: int = 0
    per_slot: int = 0
    passes: int = 0
    graphs: int = 0
    process: int = 0
    memory: DeviceMemory | None = None
    slots: int = 1
    kv_tokens: int | None = None
    is_planned: bool = False
    graphs_per_slot: int = 0
    sizes: EngineSizes | None = None
    scores: int = 0
    trie_per_slot: int = 0

    @classmethod
    def of(
        cls,
        sizes: EngineSizes,
        lengths: SequenceLengths,
        target: int,
        draft: int,
        of_pass: int | None,
        memory: DeviceMemory | None = None,
        process: int = 0,
    ) -> MemoryPlan:
        """Return the plan of a worker with one slot; `sized` adds the slots.

        Args:
            of_pass: bytes of a pass's tensors on a GPU; None on a CPU.
        """
        passes = graphs = graphs_per_slot = 0
        if of_pass is not None:
            # Graphs keep a pass's tensors too.
            passes = 2 * of_pass + sizes.temporary(lengths.max_model_len)
            graphs = GRAPH_BYTES
            graphs_per_slot = SLOT_GRAPH_BYTES
        kv = sizes.kv_per_token
        feature = sizes.feature_per_token
        parts = (kv, feature, sizes.per_slot, passes, graphs, process, memory)
        on_gpu = None if of_pass is None else sizes
        return cls(
            lengths,
            target,
            draft,
            *parts,
            graphs_per_slot=graphs_per_slot,
            sizes=on_gpu,
            scores=sizes.scores,
            trie_per_slot=0 if on_gpu else lengths.of_guaranteed * TRIE_NODE_BYTES,
        )

    def sized(self, slots: int | Auto, kv_tokens: int | Auto | None) -> MemoryPlan:
        """Return the plan with slots and KV tokens: the given numbers, or chosen ones where they are auto.

        Raises EngineError if they are auto and not even one sequence fits.
        """
        if self.memory is None or not self.memory.on_gpu:
            slots, kv_tokens = self.lengths.on_cpu(slots, kv_tokens)
            return replace(self, slots=slots, kv_tokens=kv_tokens, is_planned=False)
        if slots == "auto":
            slots = self._auto_slots(kv_tokens)
        plan = replace(self, slots=slots)
        if kv_tokens != "auto":
            return replace(plan, kv_tokens=kv_tokens, is_planned=False)
        tokens = plan.tokens_left_by(slots)
        if tokens < min(self.lengths.usual, self.lengths.full):
            raise EngineError(plan._too_small(self.memory))
        return replace(plan, kv_tokens=min(tokens, slots * self.lengths.full), is_planned=True)

    def _auto_slots(self, kv_tokens: int | Auto | None) -> int:
        """Return the most slots, up to MAX_SLOTS, that leave room for as many; 1 at least."""

        def lacks_room(slots: int) -> bool:
            return replace(self, slots=slots)._slots_that_fit(kv_tokens) < slots

        return max(bisect_left(range(1, MAX_SLOTS + 1), True, key=lacks_room), 1)

    def _slots_that_fit(self, kv_tokens: int | Auto | None) -> int:
        """Return how many slots fit next to what this plan's take in passes."""
        if isinstance(kv_tokens, int):
            return kv_tokens // self.lengths.usual
        length = self.lengths.full if kv_tokens is None else self.lengths.usual
        return self.for_slots // (length * self.per_token + self._bytes_of_slot)

    def tokens_left_by(self, slots: int) -> int:
        """Return the KV tokens, in whole blocks, that fit next to this many slots."""
        left = replace(self, slots=slots).for_slots - slots * self._bytes_of_slot
        return left // self.per_token // BLOCK_SIZE * BLOCK_SIZE

    def tokens_that_fit(self, slots: int) -> int:
        """Return the largest kv_tokens that a user could set together with this many slots; 0 if none fit."""
        return max(int(self.tokens_left_by(slots) / self.margin) - BLOCK_SIZE, 0)

    def with_slots(self, slots: int) -> MemoryPlan:
        """Return the plan with this many slots, each of which can hold a sequence of the guaranteed length."""
        return self.sized(slots, slots * self.lengths.of_guaranteed)

    def smallest(self, minimum: Callable[[Sequence[int]], list[int]]) -> MemoryPlan:
        """Return the plan with the minimum of slots and KV tokens over all ranks, which run equal sequences.

        Args:
            minimum: returns the minimum of a number over all ranks.
        """
        slots, kv_tokens = minimum([self.slots, self.kv_tokens or 0])
        return replace(self, slots=slots, kv_tokens=None if self.kv_tokens is None else kv_tokens)

    @property
    def per_token(self) -> int:
        """Return the bytes per cached token."""
        return self.kv_per_token + self.feature_per_token

    @property
    def elsewhere(self) -> int:
        """Return the bytes of the target's layers on the worker's other GPUs."""
        return 0 if self.memory is None else min(self.target, self.memory.others_room)

    @property
    def sums(self) -> int:
        """Return the bytes of attention's partial sums (flash decoding)."""
        return 0 if self.sizes is None else self.sizes.sums(self.lengths, self.slots)

    @property
    def for_slots(self) -> int:
        """Return the bytes that remain for slots and their KV cache."""
        room = 0 if self.memory is None else self.memory.room
        fixed = self.passes + self.scores + self.sums + self.graphs + self.process
        return room - (self.target - self.elsewhere) - self.draft - fixed

    @property
    def _bytes_of_slot(self) -> int:
        """Return the bytes of a slot, its part of the KV cache left out."""
        return self.per_slot + self.graphs_per_slot + self.trie_per_slot

    @property
    def all_scores(self) -> int:
        """Return the bytes for scoring continuations: the logits of a pass, and the tries of all slots."""
        return self.scores + self.slots * self.trie_per_slot

    @property
    def all_graphs(self) -> int:
        """Return the bytes of all executables of CUDA graphs."""
        return self.graphs + self.slots * self.graphs_per_slot

    @property
    def pool_tokens(self) -> int:
        """Return the tokens that the KV cache has memory for, with the block for padding."""
        tokens = self.slots * self.lengths.full if self.kv_tokens is None else self.kv_tokens
        return (1 + tokens // BLOCK_SIZE) * BLOCK_SIZE

    @property
    def pool(self) -> int:
        """Return the bytes of the KV cache."""
        return self.pool_tokens * self.kv_per_token

    @property
    def of_slots(self) -> int:
        """Return the bytes of all slots' features, drafts and logits."""
        return self.slots * self.per_slot + self.pool_tokens * self.feature_per_token

    @property
    def total(self) -> int:
        """Return the bytes that the worker needs in all."""
        fixed = self.passes + self.all_scores + self.sums + self.all_graphs + self.process
        return self.target + self.draft + self.pool + self.of_slots + fixed

    @property
    def fits(self) -> bool:
        """Return whether the worker fits into its memory."""
        if self.memory is None or self.is_planned:
            return True
        return self.total - self.elsewhere + (self.margin - 1) * self.pool <= self.memory.room

    @property
    def margin(self) -> float:
        """Return the safety factor on user-set KV tokens: above 1 if the target is spread over several GPUs."""
        return KV_MARGIN if self.memory is not None and self.memory.others_room else 1.0

    @property
    def capacity(self) -> str:
        """Return the slots and KV tokens as text."""
        tokens = (
            "room for full sequences" if self.kv_tokens is None else f"{self.kv_tokens:,} KV tokens"
        )
        return f"{counted(self.slots, 'slot')}, {tokens}"

    def describe(self, subject: str = "a worker") -> str:
        """Return the bytes by use as one line that begins with the subject, such as "a worker"."""
        length = self.lengths.guaranteed or self.lengths.max_model_len
        of_slot = f"{gib(self.lengths.of_guaranteed * self.kv_per_token)} a slot of {length} tokens"
        elsewhere = f" ({gib(self.elsewhere)} on other GPUs)" if self.elsewhere else ""
        uses = [
            (self.target, f"target {gib(self.target)}{elsewhere}"),
            (self.draft, f"draft {gib(self.draft)}"),
            (self.pool, f"keys and values {gib(self.pool)} ({self.capacity}; {of_slot})"),
            (self.of_slots, f"features, drafts and logits {gib(self.of_slots)}"),
            (self.passes, f"passes {gib(self.passes)}"),
            (self.all_scores, f"scores of continuations {gib(self.all_scores)}"),
            (self.sums, f"sums of attention {gib(self.sums)}"),
            (self.all_graphs, f"CUDA graphs {gib(self.all_graphs)}"),
            (self.process, f"Python and its packages {gib(self.process)}"),
        ]
        text = (
            f"{subject} takes {gib(self.total)}: {', '.join(text for size, text in uses if size)}"
        )
        reserve = 0 if self.memory is None else self.memory.reserve
        return f"{text}; {gib(reserve)} of the card stay free" if reserve else text

    def _too_small(self, memory: DeviceMemory) -> str:
        used = memory.total - memory.free + self.target - self.elsewhere + self.draft
        left = max(self.for_slots, 0) / 1e9
        needed = self.lengths.usual * self.per_token / 1e9
        return (
            f"the GPU has {memory.total / 1e9:.0f} GB, of which weights take {used / 1e9:.1f} GB; {left:.1f} GB are "
            f"left for keys and values, and one sequence takes {needed:.1f} GB: set execution.gpus_per_actor to more, "
            "model.max_model_len or execution.slots to less, or take a smaller or a quantised model"
        )
