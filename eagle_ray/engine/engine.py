"""Engine: continuous batching over slots; each step drafts, verifies and commits one tree per running sequence.

    engine.add(Sequence("a", [1, 17, 4], SamplingParams(max_tokens=8)))
    while engine.has_work:
        for sequence in engine.step():
            print(sequence.request_id, sequence.output_ids)

Plain decoding is the same loop with a drafter that offers nothing.

Where steps overlap the host launches the next one before it reads this one, from what the device alone knows yet:
where each sequence ends and with which token. So the device never waits while the host counts, plans and answers.

    device   | draft t | verify t | draft t+1 | verify t+1 | prompts | draft t+2 ...
    host     launch t ... launch t+1      | read t, count t, prompts | read t+1 ...

A sequence that finishes in step t is carried along in step t+1, in vain; new ones join in the first step that is not
launched ahead. Where nothing is replayed, prompts go through the target together with the rows of those who decode: its
weights are read once for both. Does not know text, files or Ray.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from eagle_ray.async_copy import DeviceToHost
from eagle_ray.core.decode_batch import DecodeBatch, PrefillChunk
from eagle_ray.core.sequence import Sequence, SequenceStatus, check_length
from eagle_ray.core.step_timer import StepTimer
from eagle_ray.drafters.drafter import Draft, Drafter
from eagle_ray.drafters.eagle import EagleDrafter
from eagle_ray.engine.counters import EngineCounters
from eagle_ray.engine.graphs import CudaGraphRunner
from eagle_ray.engine.pending_step import PendingStep
from eagle_ray.engine.prefill import PendingPrefill, Prefiller
from eagle_ray.engine.scheduler import Scheduler
from eagle_ray.engine.step_output import StepOutput
from eagle_ray.engine.top_logprobs import ranked, record_outputs
from eagle_ray.engine.verify import MaxTreeSizes, Verifier
from eagle_ray.models.target import PrefillBatch, PrefillOutput, TargetModel
from eagle_ray.planner.planner import Planner, StepOutcome
from eagle_ray.tree.acceptance_stats import AcceptanceStats
from eagle_ray.tree.draft_plan import DraftPlan


class Engine:
    """A target, a drafter and the sequences in flight.

    max_model_len: most tokens, prompt and output, of a sequence. num_spec_tokens: longest draft path that any plan
    allows (max_depth; 0 for plain decoding): the length of the acceptance statistics. prefill_tokens: most prompt
    tokens computed in one step, so that no prompt stalls those who decode (on a CPU twice as many are hardly faster).
    graphs: through which steps are replayed; then `extend` of the drafter must be capturable, as it is of an
    EagleDrafter, whose drafts are replayed too, and of a NullDrafter. trees: the largest, for which those are made.
    overlap: where there are graphs, launch a step before the one before it is read.

    mixes: whether prompts go through the target beside the rows of those who decode; only where there are no graphs.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        planner: Planner,
        max_model_len: int,
        num_spec_tokens: int,
        prefill_tokens: int = 512,
        graphs: CudaGraphRunner | None = None,
        trees: MaxTreeSizes | None = None,
        overlap: bool = True,
    ):
        self.target, self.drafter, self.planner = target, drafter, planner
        self.max_model_len, self.num_spec_tokens = max_model_len, num_spec_tokens
        blocks = target.cache.blocks
        tree_columns = blocks.capacity - max_model_len
        self.scheduler = Scheduler(blocks, prefill_tokens, tree_columns, target.device, target.eos_ids)
        self.prefiller = Prefiller(target, drafter)
        self.graphs, self.overlap, self.mixes = graphs, overlap, graphs is None
        self.verifier = Verifier(target, graphs, num_spec_tokens, trees)
        if isinstance(drafter, EagleDrafter):
            drafter.replay = graphs
        self.counters = EngineCounters(target.cache.num_slots)
        self._next: PendingStep | None = None  # launched ahead
        self._num_recorded = 0
        self._uncounted: dict[Sequence, StepOutput] = {}  # of the last step

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def _overlaps(self) -> bool:
        return self.overlap and self.graphs is not None

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """One speculative round for every running sequence; returns those that finished.

        Invariant: the last committed token is not in the KV cache yet; it is the root of the next tree. Whatever a
        step raises, of a stop_check or a listener too, leaves it half done: the engine is of no use after that.
        """
        started, num_before = time.monotonic(), self.counters.num_prefill_tokens
        flight, self._next = self._next, None
        prompted = None
        if flight is not None and flight.has_running:
            prompted = self._launch_prompts()
        else:
            flight, prompted = self._begin()
        if flight is not None:
            if self._overlaps and not (prompted and prompted.ends_any):
                self._next = self._launch_behind(flight)
                self.counters.num_ahead += self._next is not None
            self._take(flight, self.counters.num_prefill_tokens - num_before)
        self._take_prompts(prompted)
        finished = self.scheduler.retire()
        for sequence in finished:
            self._count_step(sequence)
        self._count(finished, time.monotonic() - started)
        return finished

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises RequestError for a prompt that the target cannot take, ValueError for who was here.

        A sequence is one request's way through one engine: asking once more takes a new one.
        """
        if sequence.arrived_at is not None:
            raise ValueError(f"sequence {sequence.request_id!r} was added before: make a new one of its prompt_ids")
        check_length(sequence, self.max_model_len, self.target.vocab_size)
        sequence.stats = AcceptanceStats.empty(self.num_spec_tokens)
        self.scheduler.add(sequence)
        sequence.arrived_at = time.monotonic()

    def abort(self, sequence: Sequence) -> None:
        """Forget a sequence; its slot is free for the next step."""
        self.scheduler.abort(sequence)

    def _begin(self) -> tuple[PendingStep | None, PendingPrefill | None]:
        """The launch of all that decode, if any do, and of this step's share of the prompts: beside them, else before.

        Whose prompt ends before them decodes with them.
        """
        self.scheduler.reserve_or_preempt()
        batch = self.scheduler.batch() if self.mixes else None
        if batch is not None:
            return self._start(batch, *self._chunks())
        self._take_prompts(self._launch_prompts())
        batch = self.scheduler.batch()
        return (None, None) if batch is None else self._start(batch, [], False)

    def _start(
        self, batch: DecodeBatch, chunks: list[PrefillChunk], drafting: bool
    ) -> tuple[PendingStep, PendingPrefill | None]:
        """chunks: of prompts, computed in the same pass of the target. drafting: as Prefiller.take has it."""
        prompts = self.prefiller.prompts(chunks) if chunks else None
        batch = replace(batch, num_prefill_rows=sum(chunk.num_tokens for chunk in chunks))
        watch, plan = StepTimer(self.target.device), self.planner.plan(batch).restrict_to(batch.can_draft)
        draft = Draft.empty(batch.roots)
        if plan.is_drafting:
            draft = self.drafter.draft(batch.at, batch.roots, plan, batch.sampling, batch.sequences)
        flight, passed = self._launch(batch, plan, draft, watch, prompts)
        if passed is None:
            return flight, None
        now = time.monotonic()
        prompted = self.prefiller.take(chunks, prompts, passed, drafting)
        seconds = time.monotonic() - now
        watch.leave_out(seconds)
        self.counters.prefill_s += seconds
        return flight, prompted

    def _launch_behind(self, flight: PendingStep) -> PendingStep | None:
        """The next step of the same sequences; None where it must wait until this one is read."""
        batch = self.scheduler.next_batch(flight.batch, flight.result, flight.max_new_tokens)
        if batch is None:
            return None
        watch, plan = StepTimer(self.target.device, flight.watch), self.planner.plan(batch)
        draft = Draft.empty(batch.roots)
        if plan.is_drafting:
            draft = self.drafter.draft_async(batch.at, batch.roots, plan, batch.sampling)
        return None if draft is None else self._launch(batch, plan, draft, watch)[0]

    def _launch(
        self, batch: DecodeBatch, plan: DraftPlan, draft: Draft, watch: StepTimer, prompts: PrefillBatch | None = None
    ) -> tuple[PendingStep, PrefillOutput | None]:
        """Allocate, verify, send what came of it and learn from it; see verify_step for what verifying is."""
        watch.mark()
        allocation = self.planner.allocate(draft, plan, batch)
        shape, verdict = self.verifier.run(self.drafter, batch, draft, allocation, watch.mark, prompts)
        copy = DeviceToHost(verdict.record[: len(batch)], *(verdict.tops or ()))
        watch.mark()
        self.drafter.on_verified(verdict.result)
        parts = batch, plan, draft, allocation, shape, verdict.result, copy, watch
        return PendingStep(self.planner, *parts, self._is_recorded()), verdict.prompted

    def _take(self, flight: PendingStep, num_prompt_tokens: int) -> None:
        """Read what came of a step: for each sequence, for the planner, and for the step behind it."""
        for sequence in list(self._uncounted):
            self._count_step(sequence)
        arrived = flight.copy.read()
        flight.watch.arrived()
        num_cached = sum(sequence.num_cached for sequence in flight.batch.sequences)
        num_accepted = self._hand_out(flight, *arrived)
        if self._next is not None:
            self._settle(self._next)
        seconds = flight.watch.read(followed=self._next is not None)
        self.counters.prefill_s += seconds.verify * flight.prefill_fraction
        outcome = flight.outcome(num_cached, num_accepted, num_prompt_tokens, seconds)
        self._count_outcome(outcome)
        flight.planner.observe(outcome)

    def _hand_out(
        self, flight: PendingStep, record: list[list[int]], top_ids: list | None = None, top_values: list | None = None
    ) -> int:
        """What follows from a step's copy for each sequence that still runs; accepted drafts, none past an end."""
        batch, plan, draft = flight.batch, flight.plan, flight.draft
        members = set(range(len(batch)) if plan.members is None else plan.members)
        num_accepted = 0
        for i, (sequence, row) in enumerate(zip(batch.sequences, record, strict=True)):
            step = StepOutput.of(row, flight.shape.max_depth)
            if (
                sequence.status is not SequenceStatus.RUNNING
            ):  # carried along: as good as any to tell whether values are right
                num_accepted += len(step.tokens) - 1
                continue
            self.counters.num_slot_steps += 1
            sequence.target_forwards += 1
            sequence.draft_forwards += draft.num_passes if i in members else 0
            self._uncounted[sequence] = step
            if sequence.listener is not None:  # who may look at the statistics at once
                self._count_step(sequence)
            tops = ranked(top_ids[i], top_values[i])[: len(step.tokens)] if top_ids else []
            record_outputs(sequence, step.logprobs, tops)
            num_accepted += self._append(sequence, step.tokens) - 1
        return num_accepted

    def _settle(self, flight: PendingStep) -> None:
        """Its sequences' lengths are known now."""
        if not flight.plan.is_drafting:
            return
        sequences = [s for s in flight.batch.sequences if s.status is SequenceStatus.RUNNING]
        num_pairs = self.drafter.settle([s.slot for s in sequences], [s.num_cached for s in sequences])
        flight.draft = replace(flight.draft, num_caught_up=num_pairs)

    def _launch_prompts(self) -> PendingPrefill | None:
        """This step's share of the prompts, in a pass of their own."""
        now = time.monotonic()
        chunks, drafting = self._chunks()
        if not chunks:
            return None
        prompted = self.prefiller.run(chunks, drafting)
        self.counters.prefill_s += time.monotonic() - now
        return prompted

    def _chunks(self) -> tuple[list[PrefillChunk], bool]:
        """This step's share of the prompts, of those admitted now too; and whether the drafter reads them at once."""
        now, chunks, drafting = time.monotonic(), self.scheduler.chunks(), self.planner.will_draft
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.admitted_at = sequence.admitted_at or now
            sequence.target_forwards += 1
            sequence.draft_forwards += self.drafter.prefill_passes if drafting else 0
            self.counters.num_prefill_tokens += chunk.num_tokens
            self.counters.num_reused_tokens += chunk.num_reused
        return chunks, drafting

    def _take_prompts(self, prompted: PendingPrefill | None) -> None:
        """The first token of each sequence whose prompt has ended."""
        if prompted is None:
            return
        now = time.monotonic()
        for first in prompted.read():
            first.sequence.first_token_at = time.monotonic()
            record_outputs(first.sequence, [first.logprob], [first.top])
            self._append(first.sequence, [first.token])
        self.counters.prefill_s += time.monotonic() - now

    def _count_step(self, sequence: Sequence) -> None:
        """Its last step into its statistics, unless that was done."""
        if (step := self._uncounted.pop(sequence, None)) is not None:
            step.count(sequence.stats)

    def _is_recorded(self) -> bool:
        """Whether something was since the last launch."""
        before, self._num_recorded = self._num_recorded, 0 if self.graphs is None else self.graphs.num_captured
        return self._num_recorded > before

    def _count_outcome(self, outcome: StepOutcome) -> None:
        self.counters.num_steps += 1
        self.counters.num_plain_steps += not outcome.depth
        self.counters.num_probes += outcome.plan.probe
        self.counters.num_verify_rows += outcome.num_rows

    def _append(self, sequence: Sequence, tokens: list[int]) -> int:
        """Commit them; how many are kept."""
        num_discarded = sequence.append(tokens, self.target.eos_ids)
        sequence.stats.num_discarded_tokens += num_discarded
        if sequence.finish_reason is not None:
            sequence.finished_at = time.monotonic()
        return len(tokens) - num_discarded

    def _count(self, finished: list[Sequence], seconds: float) -> None:
        self.counters.num_preemptions = self.scheduler.num_preemptions
        self.counters.num_output_tokens += sum(len(s.output_ids) for s in finished)
        self.counters.busy_s += seconds
