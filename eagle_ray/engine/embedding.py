"""EmbeddingEngine: an engine that pools the states of prompts into embeddings and generates no tokens.

    engine.add(Sequence("a", ids, SamplingSettings(), pooling=PoolingState(dimensions=1024)))
    while engine.has_work:
        for sequence in engine.step():
            print(sequence.pooling.vector)

Slots, KV blocks, chunks of long prompts and the prefix cache are those of the other engine; nothing
is drafted, no logits are computed and no token is sampled.
"""

from __future__ import annotations

import time

from jaxtyping import Float
from torch import Tensor

from eagle_ray.core.counters import AcceptanceStats
from eagle_ray.core.decode_batch import PromptChunk
from eagle_ray.core.errors import RequestError
from eagle_ray.core.sequence import Sequence, SequenceStatus, check_token_range
from eagle_ray.core.tree_bounds import NO_TREE
from eagle_ray.engine.engine import Engine
from eagle_ray.kernels.availability import retry_portable
from eagle_ray.methods.drafter import NullDrafter
from eagle_ray.models.pooling import Pooler
from eagle_ray.models.target import PromptBatch, TargetModel
from eagle_ray.planner.planner import UniformPlanner


class EmbeddingEngine(Engine):
    """An engine that computes the embeddings of prompts.

    Args:
        max_model_len: maximum tokens of a prompt, special tokens included.
        prefill_tokens: maximum prompt tokens per step.
    """

    def __init__(
        self, target: TargetModel, pooler: Pooler, max_model_len: int, prefill_tokens: int
    ):
        super().__init__(
            target, NullDrafter(), UniformPlanner(NO_TREE), max_model_len, NO_TREE, prefill_tokens
        )
        self.pooler = pooler

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, which must have a `pooling`. Raises as Engine.add does."""
        if sequence.arrived_at is not None:
            raise ValueError(f"sequence {sequence.request_id!r} was already added. Make a new one.")
        assert sequence.pooling is not None, "the engine computes embeddings"
        self._check(sequence)
        sequence.pooling.needs_all_rows = self.pooler.is_mean
        sequence.stats = AcceptanceStats.empty(0)
        self.scheduler.add(sequence)
        sequence.arrived_at = time.monotonic()

    def _check(self, sequence: Sequence) -> None:
        num_tokens = len(sequence.prompt_ids)
        if not num_tokens:
            raise RequestError("prompt_empty", "the prompt has no tokens: give at least one")
        if num_tokens > self.max_model_len:
            raise RequestError(
                "prompt_too_long",
                f"the prompt has {num_tokens} tokens: shorten it to at most {self.max_model_len} "
                "(model.max_model_len), or raise model.max_model_len and execution.kv_tokens",
            )
        check_token_range(sequence, self.target.vocab_size)

    def _step(self) -> list[Sequence]:
        self.is_intact = False
        started = time.monotonic()
        chunks = self.scheduler.chunks()
        if chunks:
            self._compute(chunks)
        finished = self._retire()
        self.counters.busy_s += time.monotonic() - started
        self.is_intact = True
        return finished

    def _compute(self, chunks: list[PromptChunk]) -> None:
        """Run one pass over the chunks; sequences whose prompts end in it are finished."""
        now = time.monotonic()
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.admitted_at = sequence.admitted_at or now
            sequence.target_forwards += 1
            self.counters.num_prefill_tokens += chunk.num_tokens
            self.counters.num_reused_tokens += chunk.num_reused

        slots = [chunk.sequence.slot for chunk in chunks]
        parts = [chunk.sequence.prompt_ids[chunk.start : chunk.end] for chunk in chunks]
        starts = [chunk.start for chunk in chunks]
        prompts = PromptBatch.of(slots, parts, self.target.device, starts)
        hidden = retry_portable(lambda: self.target.encode(prompts))
        for chunk, rows in zip(chunks, hidden.split(prompts.lengths), strict=True):
            self._pool(chunk, rows)
        self.counters.num_prefill_passes += 1
        self.counters.prefill_s += time.monotonic() - now

    def _pool(self, chunk: PromptChunk, rows: Float[Tensor, "n H"]) -> None:
        sequence = chunk.sequence
        state = sequence.pooling
        assert state is not None
        self.pooler.add(state, chunk.start, rows)
        if not chunk.is_last:
            return
        state.vector = self.pooler.finish(state, len(sequence.prompt_ids), rows[-1])
        if not state.vector.isfinite().all():
            sequence.error = RequestError(
                "not_finite",
                "the embedding holds a number that is not finite. Set model.dtype to float32",
            )
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = "stop"
        sequence.first_token_at = sequence.finished_at = time.monotonic()
        if sequence.listener is not None:
            sequence.listener()
