"""MemoryPlan: the bytes of one worker by use, and the slots and KV tokens that fit into the rest.

    plan = MemoryPlan.of(sizes, lengths, target_bytes, draft_bytes, pass_bytes, memory).sized("auto", "auto")
    plan.slots, plan.kv_tokens                  # 256, 412000
    plan.describe()                             # "a worker takes 71.2 GiB: target 15.0 GiB, draft ..."

`model_memory` plans for the models that a start has loaded, and for checkpoints; both by this
arithmetic. On a GPU `auto` gives the cache what is left of MEMORY_SHARE of the card, or of the
worker's share of it, after the weights, one pass's tensors, the CUDA graphs, and what `EngineSizes`
counts besides: the contexts that prompt chunks gather, sums of attention, copies of logits,
features and drafts. There are as many slots, up to MAX_SLOTS, as sequences of USUAL_TOKENS fit. On
a CPU `auto` is CPU_SLOTS slots, and a cache in which each finds room for a sequence of the
guaranteed length, or one sequence of CPU_SEQUENCE_TOKENS.
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
    """The memory in which a worker is planned.

    Attributes:
        total: bytes of its first GPU, or its share of a machine's memory.
        free: bytes that are free before its models are loaded.
        others_room: bytes for layers of the target on its other GPUs.
        on_gpu: whether this is a GPU's.
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

        Engines with the other shares may have taken theirs, or not yet.
        """
        free, total = torch.cuda.mem_get_info(device)
        of_share = int(share * total)
        return cls(of_share, min(free + loaded, of_share), others_room)

    def of_rank(self, num_ranks: int) -> DeviceMemory:
        """Return the memory of one of a worker's ranks: a GPU of its own, or a share of the machine's."""
        if num_ranks == 1:
            return self
        share = 1 if self.on_gpu else num_ranks
        return replace(self, total=self.total // share, free=self.free // share, others_room=0)

    @property
    def reserve(self) -> int:
        """Return the bytes of a card that no worker plans with."""
        return self.total - int(MEMORY_SHARE * self.total) if self.on_gpu else 0

    @property
    def room(self) -> int:
        """Return the bytes that the worker may take, other GPUs left out."""
        return self.free - self.reserve


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of one worker by use.

    Attributes:
        lengths: lengths of its sequences.
        target, draft: weights.
        kv_per_token: keys and values of a token of the cache.
        feature_per_token: what else a token of the cache takes.
        per_slot: queued features, drafts and logits of a slot.
        passes: tensors of the largest pass that do not depend on slots.
        graphs, graphs_per_slot: executables of CUDA graphs, and how many more each slot needs.
        scores: logits and log-probabilities of a pass over continuations.
        trie_per_slot: trie of continuations of a slot whose sequence has the guaranteed length; 0
            on a GPU, whose memory holds none.
        process: Python and its packages; 0 on a GPU's machine, or if it is not known.
        memory: where all this is put; None if it is not known.
        slots: sequences that run at once.
        kv_tokens: KV tokens of all slots together, in whole blocks; None lets each slot be full.
        is_planned: the KV tokens were chosen by the memory that there is.
        sizes: sizes of an engine on a GPU, from which attention's sums follow; None if there are
            none.
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
        """Return the plan for one slot.

        Args:
            of_pass: bytes of a pass's tensors on a GPU; None on a CPU.
        """
        passes = graphs = graphs_per_slot = 0
        if of_pass is not None:
            # Graphs keep a pass's tensors too.
            passes = 2 * of_pass + sizes.temporary(lengths.max_model_len)
            graphs, graphs_per_slot = GRAPH_BYTES, SLOT_GRAPH_BYTES
        kv, feature = sizes.kv_per_token, sizes.feature_per_token
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
        """Return the plan for these settings, which are kept where they are not auto.

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
        """Return the KV tokens, in whole blocks, for which this many slots leave room."""
        left = replace(self, slots=slots).for_slots - slots * self._bytes_of_slot
        return left // self.per_token // BLOCK_SIZE * BLOCK_SIZE

    def tokens_that_fit(self, slots: int) -> int:
        """Return the most KV tokens with which this many slots fit if both are set; 0 if none do."""
        return max(int(self.tokens_left_by(slots) / self.margin) - BLOCK_SIZE, 0)

    def with_slots(self, slots: int) -> MemoryPlan:
        """Return the plan with this many slots, each of which can hold a sequence of the guaranteed length."""
        return self.sized(slots, slots * self.lengths.of_guaranteed)

    def smallest(self, minimum: Callable[[Sequence[int]], list[int]]) -> MemoryPlan:
        """Return the plan with the fewest slots and KV tokens of all ranks, which have the same sequences.

        Args:
            minimum: returns the smallest of all ranks' numbers.
        """
        slots, kv_tokens = minimum([self.slots, self.kv_tokens or 0])
        return replace(self, slots=slots, kv_tokens=None if self.kv_tokens is None else kv_tokens)

    @property
    def per_token(self) -> int:
        """Return the bytes of a token of the cache."""
        return self.kv_per_token + self.feature_per_token

    @property
    def elsewhere(self) -> int:
        """Return the bytes of the target's layers on the worker's other GPUs."""
        return 0 if self.memory is None else min(self.target, self.memory.others_room)

    @property
    def sums(self) -> int:
        """Return the bytes of attention's sums over parts of contexts."""
        return 0 if self.sizes is None else self.sizes.sums(self.lengths, self.slots)

    @property
    def for_slots(self) -> int:
        """Return the bytes that slots and their KV cache may take."""
        room = 0 if self.memory is None else self.memory.room
        fixed = self.passes + self.scores + self.sums + self.graphs + self.process
        return room - (self.target - self.elsewhere) - self.draft - fixed

    @property
    def _bytes_of_slot(self) -> int:
        """Return the bytes of a slot, its part of the KV cache left out."""
        return self.per_slot + self.graphs_per_slot + self.trie_per_slot

    @property
    def all_scores(self) -> int:
        """Return the bytes of a pass over continuations, and of all slots' tries."""
        return self.scores + self.slots * self.trie_per_slot

    @property
    def all_graphs(self) -> int:
        """Return the bytes of all executables of CUDA graphs."""
        return self.graphs + self.slots * self.graphs_per_slot

    @property
    def pool_tokens(self) -> int:
        """Return the tokens of the KV cache, a block for padding included."""
        tokens = self.slots * self.lengths.full if self.kv_tokens is None else self.kv_tokens
        return (1 + tokens // BLOCK_SIZE) * BLOCK_SIZE

    @property
    def pool(self) -> int:
        """Return the bytes of all keys and values."""
        return self.pool_tokens * self.kv_per_token

    @property
    def of_slots(self) -> int:
        """Return the bytes of features, drafts and logits."""
        return self.slots * self.per_slot + self.pool_tokens * self.feature_per_token

    @property
    def total(self) -> int:
        """Return all bytes of the worker."""
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
        """Return the factor by which the first of several GPUs reserves more for KV tokens that are set."""
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
        left, needed = max(self.for_slots, 0) / 1e9, self.lengths.usual * self.per_token / 1e9
        return (
            f"the GPU has {memory.total / 1e9:.0f} GB, of which weights take {used / 1e9:.1f} GB; {left:.1f} GB are "
            f"left for keys and values, and one sequence takes {needed:.1f} GB: set execution.gpus_per_actor to more, "
            "model.max_model_len or execution.slots to less, or take a smaller or a quantised model"
        )
