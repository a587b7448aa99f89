"""Engine: continuous batching over slots; each step drafts, verifies and commits one tree per running sequence.

    engine.add(Sequence("a", [1, 17, 4], SamplingParams(max_tokens=8)))
    while engine.has_work:
        for sequence in engine.step():
            print(sequence.request_id, sequence.output_ids)

Plain decoding is the same loop with a drafter that offers nothing.

While the device verifies, the host counts what came of the step before, and the device learns while the host reads what
came of this one. The next step is not launched before that is read: who goes on, the blocks of those who do, which
pairs the head must catch up and how many rows to verify depend on it, and a planner that is a step behind would pay
for its probes twice. Only what they must not wait for is done between two steps. Does not know text, files or Ray.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from eagle_ray.drafting.drafter import Draft, Drafter
from eagle_ray.drafting.eagle import EagleDrafter
from eagle_ray.engine.graphs import Graphs
from eagle_ray.engine.host_copy import HostCopy
from eagle_ray.engine.logprobs import ranked, record_outputs
from eagle_ray.engine.planner import Outcome, Planner
from eagle_ray.engine.prefill import Prefiller
from eagle_ray.engine.scheduler import Batch, Chunk, Scheduler
from eagle_ray.engine.sequence import Sequence, check_fits
from eagle_ray.engine.step_record import StepRecord
from eagle_ray.engine.stopwatch import Stopwatch
from eagle_ray.engine.verify_step import StepShape, TreeSizes, Verifier
from eagle_ray.models.target import Target
from eagle_ray.speculative.plan import Plan
from eagle_ray.speculative.stats import AcceptanceStats


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
    graphs: through which steps are replayed; then `extend` of the drafter must be capturable, as it is of an
    EagleDrafter, whose drafts are replayed too, and of a NoDrafter. trees: the largest, for which those are made.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        planner: Planner,
        max_model_len: int,
        num_spec_tokens: int,
        prefill_tokens: int = 512,
        graphs: Graphs | None = None,
        trees: TreeSizes | None = None,
    ):
        self.target, self.drafter, self.planner = target, drafter, planner
        self.max_model_len, self.num_spec_tokens = max_model_len, num_spec_tokens
        blocks = target.cache.blocks
        self.scheduler = Scheduler(blocks, prefill_tokens, blocks.capacity - max_model_len, target.device)
        self.prefiller = Prefiller(target, drafter)
        self.graphs = graphs
        self.verifier = Verifier(target, graphs, num_spec_tokens, trees)
        if isinstance(drafter, EagleDrafter):
            drafter.replay = graphs
        self.counters = EngineCounters(target.cache.num_slots)
        self._uncounted: dict[Sequence, StepRecord] = {}  # of the last step

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
        for sequence in finished:
            self._count_step(sequence)
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
        """Plan, draft, allocate, verify, learn, append; see verify_step for what verifying is."""
        watch, recorded = Stopwatch(self.target.device), self._num_recorded
        plan = self.planner.plan(batch).among(batch.spacious)
        draft = Draft.of_roots(batch.roots)
        if plan.drafts:
            draft = self.drafter.draft(batch.at, batch.roots, plan, batch.sampling, batch.sequences)
        watch.mark()
        allocation = self.planner.allocate(draft, plan, batch)
        shape, verdict = self.verifier.run(self.drafter, batch, draft, allocation, watch.mark)
        copy = HostCopy(verdict.record[: len(batch)], *(verdict.tops or ()))
        watch.mark()
        self.drafter.learn(verdict.result)
        for sequence in list(self._uncounted):
            self._count_step(sequence)
        arrived = copy.read()
        watch.arrived()
        num_accepted = self._take(batch, plan, draft, shape, *arrived)
        sizes = (len(batch), batch.num_cached, len(draft.levels), draft.num_caught_up, shape.num_rows)
        is_first = self._num_recorded > recorded
        self._learn(Outcome(plan, *sizes, num_accepted, num_prompt_tokens, watch.read(), is_first))

    def _take(
        self,
        batch: Batch,
        plan: Plan,
        draft: Draft,
        shape: StepShape,
        record: list[list[int]],
        top_ids: list | None = None,
        top_values: list | None = None,
    ) -> int:
        """What follows from the step's copy for each sequence; drafts accepted in all."""
        members = set(range(len(batch)) if plan.members is None else plan.members)
        num_accepted = 0
        for i, (sequence, row) in enumerate(zip(batch.sequences, record, strict=True)):
            step = StepRecord.of(row, shape.max_depth)
            sequence.target_forwards += 1
            sequence.draft_forwards += draft.num_passes if i in members else 0
            self._uncounted[sequence] = step
            if sequence.listener is not None:  # who may look at the statistics at once
                self._count_step(sequence)
            num_accepted += len(step.tokens) - 1
            tops = ranked(top_ids[i], top_values[i])[: len(step.tokens)] if top_ids else []
            record_outputs(sequence, step.logprobs, tops)
            self._append(sequence, step.tokens)
        return num_accepted

    def _count_step(self, sequence: Sequence) -> None:
        """Its last step into its statistics, unless that was done."""
        if (step := self._uncounted.pop(sequence, None)) is not None:
            step.count(sequence.stats)

    @property
    def _num_recorded(self) -> int:
        return 0 if self.graphs is None else self.graphs.num_captured

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
