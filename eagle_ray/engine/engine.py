"""Engine: continuous batching over slots; each step drafts, verifies and commits one tree per running sequence.

    engine.add(Sequence("a", [1, 17, 4], SamplingParams(max_tokens=8)))
    while engine.has_work:
        for sequence in engine.step():
            print(sequence.request_id, sequence.output_ids)

Plain decoding is the same loop with a drafter that offers nothing. Does not know text, files or Ray.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.drafting.drafter import Draft, Drafter, Verified
from eagle_ray.engine.logprobs import record_outputs, tops
from eagle_ray.engine.planner import Outcome, Planner
from eagle_ray.engine.prefill import Prefiller
from eagle_ray.engine.scheduler import Batch, Chunk, Scheduler
from eagle_ray.engine.sequence import Ranked, Sequence, check_fits
from eagle_ray.engine.step_record import StepRecord, step_record
from eagle_ray.engine.stopwatch import Stopwatch
from eagle_ray.models.target import Target
from eagle_ray.speculative.plan import Plan
from eagle_ray.speculative.sampling import log_probs_of, pick
from eagle_ray.speculative.stats import AcceptanceStats
from eagle_ray.speculative.tree import VerifyRows
from eagle_ray.speculative.verify import VerifyResult, accept_path


@dataclass(slots=True)
class EngineCounters:
    """What the engine has done since it was made. num_slot_steps: running sequences, summed over steps.

    num_plain_steps: steps in which nothing was drafted. num_probes: steps taken in order to learn.
    num_verify_rows: rows of all decode passes, padding included. busy_s: seconds spent inside step(); prefill_s of them
    on prompts.
    """

    num_slots: int
    num_steps: int = 0
    num_slot_steps: int = 0
    num_plain_steps: int = 0
    num_probes: int = 0
    num_verify_rows: int = 0
    num_output_tokens: int = 0
    num_prefill_tokens: int = 0
    num_reused_tokens: int = 0
    num_preemptions: int = 0
    busy_s: float = 0.0
    prefill_s: float = 0.0


class Engine:
    """A target, a drafter and the sequences in flight.

    max_model_len: most tokens, prompt and output, of a sequence. num_spec_tokens: longest draft path that any plan
    allows (max_depth; 0 for plain decoding): the length of the acceptance statistics. prefill_tokens: most prompt
    tokens computed in one step, so that no prompt stalls those who decode (on a CPU twice as many are hardly faster).
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        planner: Planner,
        max_model_len: int,
        num_spec_tokens: int,
        prefill_tokens: int = 512,
    ):
        self.target, self.drafter, self.planner = target, drafter, planner
        self.max_model_len, self.num_spec_tokens = max_model_len, num_spec_tokens
        blocks = target.cache.blocks
        self.scheduler = Scheduler(blocks, prefill_tokens, blocks.capacity - max_model_len, target.device)
        self.prefiller = Prefiller(target, drafter)
        self.counters = EngineCounters(target.cache.num_slots)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """One speculative round for every running sequence; returns those that finished.

        Invariant: the last committed token is not in the KV cache yet; it is the root of the next tree.
        """
        started = time.monotonic()
        self.scheduler.make_room()
        chunks = self.scheduler.chunks()
        self._prefill(chunks)
        batch = self.scheduler.batch()
        if batch is not None:
            self._decode(batch, sum(chunk.num_tokens for chunk in chunks))
        finished = self.scheduler.retire()
        self._count(batch, finished, time.monotonic() - started)
        return finished

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises RequestError for a prompt that the target cannot take."""
        check_fits(sequence, self.max_model_len, self.target.vocab_size)
        sequence.stats = AcceptanceStats.empty(self.num_spec_tokens)
        sequence.arrived_at = time.monotonic()
        self.scheduler.add(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Forget a sequence; its slot is free for the next step."""
        self.scheduler.abort(sequence)

    def _prefill(self, chunks: list[Chunk]) -> None:
        """This step's share of the prompts, and the first token of each sequence whose prompt ends in it."""
        if not chunks:
            return
        now, drafting = time.monotonic(), self.planner.drafting
        first_tokens = self.prefiller.run(chunks, drafting)
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.admitted_at = sequence.admitted_at or now
            sequence.target_forwards += 1
            sequence.draft_forwards += self.drafter.prefill_passes if drafting else 0
            self.counters.num_prefill_tokens += chunk.num_tokens
            self.counters.num_reused_tokens += chunk.num_reused
        for first in first_tokens:
            first.sequence.first_token_at = time.monotonic()
            record_outputs(first.sequence, [first.logprob], [first.top])
            self._append(first.sequence, [first.token])
        self.counters.prefill_s += time.monotonic() - now

    def _decode(self, batch: Batch, num_prompt_tokens: int) -> None:
        """Plan, draft, allocate, verify, accept, commit, extend, append."""
        watch = Stopwatch(self.target.device)
        plan = self.planner.plan(batch).among(batch.spacious)
        draft = Draft.of_roots(batch.roots)
        if plan.drafts:
            draft = self.drafter.draft(batch.at, batch.roots, plan, batch.sampling, batch.sequences)
        watch.mark()
        allocation = self.planner.allocate(draft, plan, batch)
        tree = draft.tree.rerank(allocation.keep, allocation.num_nodes)
        rows = tree.pack(batch.at.lengths, allocation.num_rows)
        watch.mark()
        logits, features = self.target.verify(tree, rows, batch.at, draft.depth)
        watch.mark()
        picks = pick(logits, batch.sampling, rows.seq.clamp(min=0), rows.positions + 1)
        result = accept_path(tree, rows, picks, draft.depth)
        self.target.commit(batch.at, result)
        self.drafter.extend(batch.at, Verified(tree, rows, logits, features, result))
        logprobs = self._path_logprobs(batch, rows, result, logits)
        ranked = self._path_tops(batch, rows, result, logits)
        num_accepted = self._take(batch, plan, draft, step_record(tree, result, draft.depth, logprobs), ranked)
        watch.mark()
        sizes = (len(batch), batch.num_cached, len(draft.levels), draft.num_caught_up, len(rows.tokens))
        self._learn(Outcome(plan, *sizes, num_accepted, num_prompt_tokens, watch.read()))

    def _path_logprobs(
        self, batch: Batch, rows: VerifyRows, result: VerifyResult, logits: Float[Tensor, "R V"]
    ) -> Float[Tensor, "B D1"] | None:
        if not any(s.sampling.logprobs for s in batch.sequences):
            return None
        path_rows = rows.row_of.gather(1, result.accepted_nodes.clamp(min=0))
        return log_probs_of(logits[path_rows.flatten()], result.tokens.flatten()).view_as(path_rows)

    def _path_tops(
        self, batch: Batch, rows: VerifyRows, result: VerifyResult, logits: Float[Tensor, "R V"]
    ) -> list[list[Ranked]]:
        """The likeliest tokens along each path; nothing where nobody asked."""
        most = max(s.sampling.top_logprobs for s in batch.sequences)
        if not most:
            return [[] for _ in batch.sequences]
        path_rows = rows.row_of.gather(1, result.accepted_nodes.clamp(min=0))
        flat, width = tops(logits[path_rows.flatten()], most), path_rows.shape[1]
        return [flat[i * width : (i + 1) * width] for i in range(len(batch))]

    def _take(
        self, batch: Batch, plan: Plan, draft: Draft, record: Int[Tensor, "B X"], ranked: list[list[Ranked]]
    ) -> int:
        """The step's copy to the host, and what follows from it for each sequence; drafts accepted in all."""
        members = set(range(len(batch)) if plan.members is None else plan.members)
        num_accepted = 0
        for i, (sequence, row) in enumerate(zip(batch.sequences, record.tolist(), strict=True)):
            step = StepRecord.of(row, draft.depth)
            sequence.target_forwards += 1
            sequence.draft_forwards += draft.num_passes if i in members else 0
            step.count(sequence.stats)
            num_accepted += len(step.tokens) - 1
            record_outputs(sequence, step.logprobs, ranked[i][: len(step.tokens)])
            self._append(sequence, step.tokens)
        return num_accepted

    def _learn(self, outcome: Outcome) -> None:
        self.counters.num_plain_steps += not outcome.depth
        self.counters.num_probes += outcome.plan.probe
        self.counters.num_verify_rows += outcome.num_rows
        self.planner.learn(outcome)

    def _append(self, sequence: Sequence, tokens: list[int]) -> None:
        sequence.stats.num_discarded_tokens += sequence.append(tokens, self.target.eos_ids)
        if sequence.finish_reason is not None:
            sequence.finished_at = time.monotonic()

    def _count(self, batch: Batch | None, finished: list[Sequence], seconds: float) -> None:
        self.counters.num_steps += batch is not None
        self.counters.num_slot_steps += len(batch) if batch is not None else 0
        self.counters.num_preemptions = self.scheduler.num_preemptions
        self.counters.num_output_tokens += sum(len(s.output_ids) for s in finished)
        self.counters.busy_s += seconds
