"""Engine: continuous batching with speculative decoding. Each step drafts, verifies and commits for all sequences.

    engine.add(Sequence("a", [1, 17, 4], SamplingSettings(max_tokens=8)))
    while engine.has_work:
        for sequence in engine.step():
            print(sequence.request_id, sequence.output_ids)

Plain decoding is the same loop with a drafter that proposes nothing.

If steps overlap, the host launches step t+1 before it reads step t. It passes on what only the
device knows so far: how many tokens each sequence accepted and the last of them. The device does
not wait while the host counts and plans.

    device   | draft t | verify t | prompts | draft t+1 | verify t+1 | draft t+2 ...
    host     launch t ... prompts, launch t+1 | read t, count t | launch t+2 | read t+1 ...

A sequence that finishes in step t still occupies a row of step t+1; its result is discarded. If it
certainly finishes there, by its length, it has no row, and its slot takes a new sequence at once.
Sequences whose prompts are launched before step t+1 are part of it: their first tokens, too, are on
the device. If a sequence has controls, the last part of step t+1, from its samples on, is launched
once step t is read, while the target's pass runs. If steps are not replayed as CUDA graphs, prompt
chunks go through the target in the same pass as the decoding rows, so that its weights are read
once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from eagle_ray.attention.backend import num_gathered
from eagle_ray.core.counters import AcceptanceStats, EngineCounters
from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.device import DeviceToHost, StepTimer
from eagle_ray.core.errors import RequestError, one_line
from eagle_ray.core.sequence import (
    Sequence,
    SequenceStatus,
    TopLogprobs,
    check_length,
    start_controls,
)
from eagle_ray.core.tree_bounds import NO_TREE, TreeBounds
from eagle_ray.engine.controlled_sequences import GrammarChains, grammars_of, slow_and_spent
from eagle_ray.engine.prefill import Prefill, Prefiller
from eagle_ray.engine.scheduler import Scheduler
from eagle_ray.engine.step import (
    DecodeStep,
    DraftCheck,
    StepOutput,
    UnflushedStats,
    contain_any,
    paired,
    record_outputs,
)
from eagle_ray.engine.verify import Verifier, fallbacks
from eagle_ray.kernels import cpu_ops
from eagle_ray.methods.drafter import Draft, Drafter
from eagle_ray.models.graphs import CudaGraphRunner
from eagle_ray.models.target import TargetModel, TargetOutput
from eagle_ray.parallel.lockstep import ALONE, Lockstep
from eagle_ray.planner.planner import Allocation, Planner, StepOutcome, UniformPlanner
from eagle_ray.sampling.grammar import GrammarCompiler
from eagle_ray.tree.expand import PLAIN_PLAN, DraftPlan, PartialDraft

log = logging.getLogger("eagle_ray")
Answer = TypeVar("Answer")


class Engine:
    """Continuous batching with speculative decoding: a target, a drafter, a planner and the sequences in flight.

    Args:
        max_model_len: maximum tokens of a sequence, prompt and output.
        bounds: bounds of the draft trees of any plan; NO_TREE for plain decoding. Their depth is
            the length of the acceptance statistics, and graphs are recorded for the largest trees.
        prefill_tokens: maximum prompt tokens per step, so that long prompts do not stall decoding
            sequences. On a CPU twice as many are hardly faster.
        graphs: replays steps of fixed shapes; None runs every step as it is. The drafter must
            support it (`engine.verify.unsupported_reason`).
        grammars: compiles the grammars of sequences; None refuses them.
        overlap: launch a step before the previous one is read, if there are graphs.

    Attributes:
        lockstep: keeps the engines of all ranks in step with rank 0's.
        why_unordered_sums: reason why GPU ranks add their results by NCCL and not in the order of
            the ranks by symmetric memory; None if they do, or with one rank.
        drafts_grammars: tokens that grammars predict are drafted.
        uses_team: steps compute in the team of the process's threads (kernels/team.h).
        mixed_prefill: prompt chunks and decoding rows share a pass; only without graphs.
        is_intact: whether no step has raised. False during a step.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        planner: Planner,
        max_model_len: int,
        bounds: TreeBounds,
        prefill_tokens: int = 512,
        graphs: CudaGraphRunner | None = None,
        overlap: bool = True,
        grammars: GrammarCompiler | None = None,
    ):
        self.target = target
        self.drafter = drafter
        self.planner = planner
        # Keeps what the engine has learned, before it closes.
        self.on_close: Callable[[], None] | None = None
        self.head_check: DraftCheck | None = None  # counts the head's first drafts
        self.uses_team = False
        self.max_model_len = max_model_len
        self.bounds = bounds
        self.graphs = graphs
        self.overlap = overlap
        self.grammars = grammars
        self.lockstep: Lockstep = ALONE
        self.why_unordered_sums: str | None = None
        self._has_lookup_hits = False  # the planner let the drafter read on in the batch's texts
        self.drafts_grammars = True
        self.mixed_prefill = graphs is None
        self.is_intact = True
        blocks = target.cache.blocks
        tree_positions = blocks.capacity - max_model_len
        gathered = partial(num_gathered, target.cache)
        self.scheduler = Scheduler(
            blocks, prefill_tokens, tree_positions, target.device, target.eos_ids, gathered
        )
        self.prefiller = Prefiller(target, drafter, prefill_tokens)
        self.scorer = self.prefiller.scorer
        self.verifier = Verifier(target, graphs, bounds)
        self.counters = EngineCounters(target.cache.num_slots)
        drafter.use_graphs(graphs, bounds.max_depth)
        self._pending: DecodeStep | None = None  # launched ahead, not read yet
        # Sequences and plan of a step that was planned ahead, but not launched.
        self._postponed: tuple[list[Sequence], DraftPlan] | None = None
        self._must_rejoin = False  # a scored sequence decodes from the next step on
        self._num_recorded = 0
        self._unflushed = UnflushedStats(target.cache.num_slots, bounds.max_depth)

    @property
    def num_spec_tokens(self) -> int:
        """Return the tokens of the longest draft path that any plan allows; 0 for plain decoding."""
        return self.bounds.max_depth

    def running_lengths(self) -> list[tuple[str, int]]:
        """Return the category and the tokens so far of each sequence that holds a slot."""
        return [(s.category, len(s.output_ids)) for s in list(self.scheduler.running.values())]

    @property
    def fallbacks(self) -> dict[str, str]:
        """Return why parts of the fast path do not run on a CUDA device, by "kernels", "graphs" and "sums"."""
        reasons = fallbacks(self.target, self.drafter, self.graphs)
        if self.why_unordered_sums is not None:
            reasons["sums"] = self.why_unordered_sums
        return reasons

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[Sequence]:
        """Run one speculative step for every running sequence and return the sequences that finished or failed.

        Invariant: the last committed token is not in the KV cache; it is the root of the next draft
        tree. If a step raises, even from a stop_check or a listener, the engine is left in the
        middle of it and cannot be used again. Only an error of the planner is handled: see
        drop_planner.
        """
        with torch.inference_mode(), cpu_ops.team(self.uses_team):
            return self._step()

    def _step(self) -> list[Sequence]:
        self.is_intact = False
        self.lockstep.tell("step", self.overlap)
        started = time.monotonic()
        num_before = self.counters.num_prefill_tokens

        pending, prefill = self._launch()
        ahead = None
        if pending is not None:
            ahead = self._launch_ahead(pending, prefill)
            num_prompt_tokens = self.counters.num_prefill_tokens - num_before
            self._finish(pending, num_prompt_tokens, followed=ahead is not None)
        self.finish_prefill(prefill)
        if ahead is not None:
            self._pending = ahead()
            self._pending.sync_lengths(self.drafter)
        self._score()

        finished = self._retire()
        self.counters.busy_s += time.monotonic() - started
        self.is_intact = True
        return finished

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. A sequence can be added once; make a new one to decode its prompt again.

        Raises:
            RequestError: the target cannot take the prompt or the controls.
            ValueError: the sequence was already added.
        """
        if sequence.arrived_at is not None:
            raise ValueError(
                f"sequence {sequence.request_id!r} was already added. Make a new one of its prompt_ids."
            )
        check_length(sequence, self.max_model_len, self.target.vocab_size)
        self.compile_grammar(sequence)
        start_controls(sequence, self.target.eos_ids, self.target.vocab_size)
        sequence.stats = AcceptanceStats.empty(self.num_spec_tokens)
        self.scorer.plan(sequence, self.scheduler.score_room(sequence))
        self.scheduler.add(sequence)
        self.lockstep.add(sequence)
        sequence.arrived_at = time.monotonic()

    def close(self) -> None:
        """End the other ranks. The engine cannot be used again."""
        on_close, self.on_close = self.on_close, None
        try:
            if on_close is not None:
                on_close()
        finally:
            self.lockstep.close()

    def order_for_throughput(self) -> None:
        """From now on, admit sequences in an order and in groups that favour throughput over latency."""
        self.lockstep.tell("order_for_throughput")
        self.scheduler.order_for_throughput()
        if not self.mixed_prefill:
            self.scheduler.group_admissions()

    def compile_grammar(self, sequence: Sequence) -> None:
        """Compile the sequence's grammar in advance, if it has one that is not compiled yet. Any thread may call this.

        Raises RequestError naming the kind of a grammar that cannot be compiled.
        """
        spec = sequence.grammar_spec
        if spec is None or sequence.grammar is not None:
            return
        if self.grammars is None:
            raise RequestError(
                "no_tokenizer", f"{spec.name}: the target has no tokenizer that grammars can use"
            )
        if not self.grammars.knows(spec):
            self.lockstep.prepare(spec)
        sequence.grammar = self.grammars.start(spec)

    def abort(self, sequence: Sequence) -> None:
        """Remove a sequence; its slot is free for the next step."""
        self.lockstep.abort(sequence)
        self._unflushed.flush(sequence)
        self.scheduler.abort(sequence)

    # What the drafter has learned.

    def reset_learning(self) -> None:
        """Discard everything that the drafter has learned."""
        self.lockstep.tell("reset_learning")
        self.drafter.reset_learning()

    def learned_state(self) -> dict[str, Tensor]:
        """Return the drafter's learned state; see Drafter.state."""
        self.lockstep.tell("learned_state")
        return self.drafter.state()

    def load_learned(self, state: Mapping[str, Tensor]) -> None:
        """Restore the drafter's learned state. Raises ValueError as Drafter.load_state does."""
        self.lockstep.tell("load_learned", dict(state))
        self.drafter.load_state(state)

    def lookup_hits(self, batch: DecodeBatch) -> tuple[int, int] | None:
        """Return `Drafter.lookup_hits` of a batch's new text. The planner calls it from `plan`."""
        self._has_lookup_hits = True
        return self.drafter.lookup_hits(batch.at, batch.sequences)

    def drop_planner(self, error: Exception) -> None:
        """Decode plainly from now on because the planner failed. No sequence fails, since a planner
        does not affect outputs."""
        self.planner = UniformPlanner(NO_TREE)
        if self.counters.planner_error is None:
            self.counters.planner_error = f"{type(error).__name__}: {one_line(error)}"
            log.warning(
                "the planner failed (%s): nothing is drafted from now on, and outputs stay the same. Please report it.",
                self.counters.planner_error,
                exc_info=error,
            )

    # The planner's answers, or plain decoding's if it raises. Ranks agree on them.

    def _ask(self, ask: Callable[[], Answer], otherwise: Callable[[], Answer]) -> Answer:
        try:
            return ask()
        except Exception as error:  # a planner is arithmetic over measured numbers
            self.drop_planner(error)
            return otherwise()

    @property
    def _will_draft(self) -> bool:
        return self.lockstep.agree(
            "will_draft", lambda: self._ask(lambda: self.planner.will_draft, lambda: False)
        )

    def _plan(self, batch: DecodeBatch) -> DraftPlan:
        plan, stops, has_lookup_hits = self.lockstep.agree(
            "plan", lambda: self._own_plan(batch), _without_function
        )
        if has_lookup_hits and not self.lockstep.is_leader:
            # It raises here if it did on the leader.
            self._ask(lambda: self.lookup_hits(batch), lambda: None)
        if stops is None:
            return plan
        if self.lockstep.is_alone:
            return replace(plan, should_stop=stops)

        def agreed_stop(builder: PartialDraft) -> bool:
            return self.lockstep.agree("stop", lambda: stops(builder))

        return replace(plan, should_stop=agreed_stop, price_rule=None)

    def _own_plan(
        self, batch: DecodeBatch
    ) -> tuple[DraftPlan, Callable[[PartialDraft], bool] | None, bool]:
        """Return the planner's plan, a rule that may end its draft early, and whether lookups were indexed for it."""
        self._has_lookup_hits = False
        plan = self._ask(lambda: self.planner.plan(batch), lambda: PLAIN_PLAN)
        should_stop = plan.should_stop
        if should_stop is None:
            return plan, None, self._has_lookup_hits

        def safe_stop(builder: PartialDraft) -> bool:
            return self._ask(lambda: should_stop(builder), lambda: True)

        return plan, safe_stop, self._has_lookup_hits

    def _allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        def ask() -> Allocation:
            return self._ask(
                lambda: self.planner.allocate(draft, plan, batch),
                lambda: Allocation.uniform(draft, 1),
            )

        def unpack(packed: Any) -> Allocation:
            return Allocation.unpacked(packed, self.target.device)

        allocation = self.lockstep.agree("rows", ask, Allocation.packed, unpack)
        if allocation.num_nodes == 1:  # the roots, which all ranks know
            return allocation
        keep = self.lockstep.share(allocation.keep)
        return replace(allocation, keep=keep)

    def _observe(self, planner: Planner, outcome: StepOutcome) -> None:
        if self.lockstep.is_leader:
            self._ask(lambda: planner.observe(outcome), lambda: None)

    # Launch: what the device is given to do.

    def _launch(self) -> tuple[DecodeStep | None, Prefill | None]:
        """Return this step and its prompt chunks, both launched. The step may have been launched ahead."""
        pending = self._pending
        self._pending = None
        if pending is not None and pending.has_running:
            self.scheduler.release_ending(pending.batch)
            return pending, self.launch_prefill()

        if self.scheduler.reserve_or_preempt():
            self._unflushed.flush_all()  # a preempted sequence may return to another slot
        batch = self.scheduler.batch() if self.mixed_prefill else None
        if batch is not None:
            return self._launch_step(batch, self._next_prefill())

        # Sequences whose prompt ends here decode in this step.
        self.finish_prefill(self.launch_prefill())
        batch = self.scheduler.batch()
        if batch is None:
            return None, None
        return self._launch_step(batch, None)

    def _launch_step(
        self, batch: DecodeBatch, prefill: Prefill | None
    ) -> tuple[DecodeStep, Prefill | None]:
        """Launch a step, with prompt chunks in the same pass of the target."""
        if prefill is not None:
            batch = replace(batch, num_prefill_rows=prefill.num_rows)
        batch = self._without_slow_drafts(batch)
        timer = StepTimer(self.target.device)
        plan, draft = self._draft(batch)
        finish_verify = self._start_verify(batch, plan, draft, timer, prefill)
        step, output = finish_verify()
        if output is None or prefill is None:
            return step, None

        now = time.monotonic()
        self.prefiller.finish(prefill, output)
        seconds = time.monotonic() - now
        timer.leave_out(seconds)
        self.counters.prefill_s += seconds
        return step, prefill

    def _slow_parsers(self, batch: DecodeBatch) -> set[int]:
        """Return the indices of sequences whose grammars are slow to follow, after stopping those that are too slow.

        Ranks follow the leader's clock.
        """
        grammars = grammars_of(batch)
        if not grammars:
            return set()
        slow, spent = self.lockstep.agree("parsers", lambda: slow_and_spent(grammars))
        for i in spent:
            grammars[i].stop()
        return {*slow, *spent}

    def _without_slow_drafts(self, batch: DecodeBatch) -> DecodeBatch:
        """Return a batch in which nothing is drafted for slow grammars: each node of a tree would take a mask."""
        slow = self._slow_parsers(batch)
        if not slow:
            return batch
        can_draft = range(len(batch)) if batch.can_draft is None else batch.can_draft
        fast = tuple(i for i in can_draft if i not in slow)
        return replace(batch, can_draft=fast)

    def _next_plan(self, batch: DecodeBatch) -> DraftPlan:
        """Return the plan of these sequences that could not be launched ahead, or a new one."""
        postponed = self._postponed
        self._postponed = None
        if postponed is not None:
            sequences, plan = postponed
            if sequences == batch.sequences:
                return plan
        return self._plan(batch)

    def _draft(self, batch: DecodeBatch) -> tuple[DraftPlan, Draft]:
        """Return the plan and the draft of this step, with what grammars add to it."""
        plan = self._next_plan(batch).restrict_to(batch.can_draft)
        chains = GrammarChains.of(batch, self._max_chain) if self._max_chain else None
        if chains is not None:
            plan = chains.without_long(plan)

        draft = Draft.empty(batch.roots)
        if plan.is_drafting:
            draft = self.drafter.draft(batch.at, batch.roots, plan, batch.sampling, batch.sequences)
        if chains is not None:
            draft = chains.fit(draft, batch, plan)
        return plan, draft

    @property
    def _max_chain(self) -> int:
        """Return the most tokens that a grammar drafts: none if steps are replayed or on a GPU (`GrammarChains`)."""
        on_host = self.graphs is None and torch.device(self.target.device).type == "cpu"
        return self.bounds.depth if on_host and self.drafts_grammars else 0

    def _launch_ahead(
        self, pending: DecodeStep, prefill: Prefill | None
    ) -> Callable[[], DecodeStep] | None:
        """Launch the step after `pending` before `pending` is read. Return None if it must wait.

        Returns a function that launches the rest of the step, once `pending` and the prompts are
        read: if a sequence has controls, its tokens depend on theirs.
        """
        if not self.overlap or self.graphs is None or self._slow_parsers(pending.batch):
            return None
        if self._must_rejoin:
            self._must_rejoin = False
            return None

        # The batch: what `pending` leaves, and the prompts launched since.
        num_rows = pending.allocation.num_rows
        batch = self.scheduler.next_batch(
            pending.batch, pending.result, pending.max_new_tokens, num_rows
        )
        if batch is not None and prefill is not None:
            batch = self.scheduler.join(batch, prefill.ended, prefill.roots)
        if batch is None:
            return None

        # A timer starts where the one before it ends, unless prompts run in between.
        timer = StepTimer(self.target.device, pending.timer if prefill is None else None)
        plan = self._plan(batch)
        draft: Draft | None = Draft.empty(batch.roots)
        if plan.is_drafting:
            draft = self.drafter.draft_async(
                batch.at, batch.roots, plan, batch.sampling, batch.sequences
            )
        if draft is None:
            self._postponed = (batch.sequences, plan)  # a probe that was planned must run
            return None

        self.counters.num_ahead += 1
        finish = self._start_verify(batch, plan, draft, timer)
        if batch.controlled:
            return lambda: finish()[0]
        step, _ = finish()
        return lambda: step

    def _start_verify(
        self,
        batch: DecodeBatch,
        plan: DraftPlan,
        draft: Draft,
        timer: StepTimer,
        prefill: Prefill | None = None,
    ) -> Callable[[], tuple[DecodeStep, TargetOutput | None]]:
        """Allocate rows and launch the verify pass. Return a function that launches the rest of the step."""
        timer.mark()
        planner = self.planner  # `_allocate` may replace it by one that plans no drafts
        allocation = self._allocate(draft, plan, batch)
        prompts = None if prefill is None else prefill.batch
        started = self.verifier.start(self.drafter, batch, draft, allocation, timer.mark, prompts)

        def finish() -> tuple[DecodeStep, TargetOutput | None]:
            output = started.finish()
            tops = output.tops or ()
            copy = DeviceToHost(output.record[: len(batch)], *tops)
            timer.mark()
            self.drafter.on_verified(output.result)
            step = DecodeStep(
                planner=planner,
                batch=batch,
                plan=plan,
                draft=draft,
                allocation=allocation,
                shape=started.shape,
                result=output.result,
                copy=copy,
                timer=timer,
                is_first=self._has_recorded(),
                num_level_rows=self._level_rows(batch, plan),
            )
            if self.head_check is not None:
                step.checked_drafts = self.head_check.launched(batch, plan, draft, output.result)
            return step, output.prompted

        return finish

    def launch_prefill(self) -> Prefill | None:
        """Launch this step's prompt chunks as a separate pass."""
        now = time.monotonic()
        prefill = self._next_prefill()
        if prefill is None:
            return None
        self.prefiller.run(prefill)
        self.counters.num_prefill_passes += 1
        self.counters.prefill_s += time.monotonic() - now
        return prefill

    def _next_prefill(self) -> Prefill | None:
        """Return the pass over this step's prompt chunks, not launched yet, or None if there are none."""
        now = time.monotonic()
        chunks = self.scheduler.chunks()
        will_draft = self._will_draft
        if not chunks:
            return None
        # The drafter need not read prompts that are only scored.
        will_draft = will_draft and any(chunk.sequence.generates for chunk in chunks)

        for chunk in chunks:
            sequence = chunk.sequence
            sequence.admitted_at = sequence.admitted_at or now
            sequence.target_forwards += 1
            if will_draft:
                sequence.draft_forwards += self.drafter.prefill_passes
            self.counters.num_prefill_tokens += chunk.num_tokens
            self.counters.num_reused_tokens += chunk.num_reused
        return self.prefiller.prefill_of(chunks, will_draft)

    def _has_recorded(self) -> bool:
        """Return whether a graph was recorded since the last launch."""
        before = self._num_recorded
        self._num_recorded = 0 if self.graphs is None else self.graphs.num_captured
        return self._num_recorded > before

    def _level_rows(self, batch: DecodeBatch, plan: DraftPlan) -> int | None:
        """Return the rows of the replayed pass that drafts a further level; None if the draft is not replayed."""
        if self.graphs is None or plan.lookups_only or not plan.has_known_shape:
            return None
        return self.graphs.level_rows(plan, len(batch))

    # Finish: what the host does with the results.

    def _finish(self, pending: DecodeStep, num_prompt_tokens: int, followed: bool) -> None:
        """Read a step's results and pass them to its sequences and its planner.

        Args:
            followed: another step was launched after it.
        """
        output, tops = pending.read()
        self.lockstep.check(lambda: pending.checksum(output))
        num_accepted = self._commit(pending, output, tops)
        seconds = pending.timer.read(followed)
        self.counters.prefill_s += seconds.verify * pending.prefill_fraction
        accepted_each = output.num_accepted.tolist()
        outcome = pending.outcome(num_accepted, num_prompt_tokens, seconds, accepted_each)
        self._count_outcome(outcome)
        self._check_head(pending, output)
        self._observe(pending.planner, outcome)

    def _check_head(self, pending: DecodeStep, output: StepOutput) -> None:
        """Count the drafts of a step, and warn once if the head is hardly ever right."""
        drafts = pending.checked_drafts
        if self.head_check is None or drafts is None:
            return
        num_accepted = output.num_accepted[drafts.rows].tolist()
        warning = self.head_check.add(drafts.read(), num_accepted)
        if warning is not None:
            self.counters.draft_warning = warning
            log.warning("%s", warning)
        if warning is not None or self.head_check.is_over:
            self.head_check = None

    def _commit(self, pending: DecodeStep, output: StepOutput, tops: list[np.ndarray]) -> int:
        """Append each running sequence's tokens. Return the number of accepted drafts, without those past an end.

        Drafts of sequences that finished before count, since their acceptance still informs the
        planner.

        Args:
            tops: ids and log-probabilities of the likeliest tokens, if requested.
        """
        sequences = pending.batch.sequences
        running = [
            i for i, sequence in enumerate(sequences) if sequence.status is SequenceStatus.RUNNING
        ]
        self.counters.num_slot_steps += len(running)
        own_passes = pending.draft_passes[running]
        self._unflushed.add([sequences[i] for i in running], output, running, own_passes)

        num_accepted = int(output.num_accepted.sum())
        new_tokens = output.token_lists()
        has_end = contain_any(new_tokens, pending.batch.sampling.end_ids)
        failed = set(np.flatnonzero(~output.is_finite).tolist())
        for i in running:
            sequence = sequences[i]
            tokens = new_tokens[i]
            is_last = (
                i in failed
                or has_end[i]
                or len(sequence.output_ids) + len(tokens) >= sequence.max_tokens
            )

            # Most sequences need no check of their tokens; this loop is host time of every step.
            if not is_last and sequence.is_simple:
                sequence.output_ids += tokens
                self.counters.num_output_tokens += len(tokens)
                if sequence.listener is not None:
                    sequence.listener()
                continue

            if sequence.sampling.wants_logprobs:
                likeliest: list[TopLogprobs] = []
                if tops:
                    likeliest = paired(*(values[i].tolist() for values in tops))[: len(tokens)]
                logprobs = output.logprobs[i, : len(tokens)].tolist()
                record_outputs(sequence, logprobs, likeliest)
            num_appended = self._append(sequence, tokens)
            num_accepted -= max(len(tokens), 1) - max(num_appended, 1)
            if i in failed and sequence.status is SequenceStatus.RUNNING:
                self._fail(sequence)
        return num_accepted

    def finish_prefill(self, prefill: Prefill | None) -> None:
        """Append the first token of each sequence whose prompt has ended."""
        if prefill is None:
            return
        now = time.monotonic()
        tokens = list(prefill.read())
        self.lockstep.check(lambda: crc32(repr([token for _, token in tokens]).encode()))
        for sequence, token in tokens:
            if token is None:
                self._fail(sequence)
                continue
            is_scored = sequence.status is SequenceStatus.SCORING
            self._append(sequence, [token])
            if is_scored:
                sequence.status = SequenceStatus.SCORING  # also if it ends with this token
        self.counters.prefill_s += time.monotonic() - now

    def _score(self) -> None:
        """Run a pass over continuations, if there are any, and end or resume sequences whose scores are complete."""
        sequences = self.scheduler.scoring()
        if not sequences:
            return
        now = time.monotonic()
        for sequence in self.scorer.run(sequences):
            if not sequence.generates:
                sequence.finish_reason = "length"
            if sequence.finish_reason is None and sequence.error is None:
                sequence.status = SequenceStatus.RUNNING
                self._must_rejoin = True
                continue
            sequence.status = SequenceStatus.FINISHED
            sequence.finished_at = time.monotonic()
        self.counters.prefill_s += time.monotonic() - now

    def _fail(self, sequence: Sequence) -> None:
        """End a sequence for which the target computed no finite logits, with an error."""
        sequence.error = RequestError(
            "not_finite",
            "the target computes what is no number (NaN) or infinite. Set model.dtype to float32",
        )
        sequence.status = SequenceStatus.FINISHED
        sequence.finished_at = time.monotonic()

    def _append(self, sequence: Sequence, tokens: list[int]) -> int:
        """Commit tokens and return how many were kept. Tokens past the sequence's end are discarded."""
        num_discarded = sequence.append(tokens, self.target.eos_ids)
        sequence.stats.num_discarded_tokens += num_discarded
        is_finished = sequence.status is SequenceStatus.FINISHED
        if is_finished:
            sequence.finished_at = time.monotonic()
        num_appended = len(tokens) - num_discarded
        self.counters.num_output_tokens += num_appended
        if sequence.listener is not None and num_appended:
            if is_finished or sequence.has_live_stats:
                self._unflushed.flush(sequence)
            sequence.listener()
        return num_appended

    def _retire(self) -> list[Sequence]:
        """Free the slots of sequences that finished and return the sequences."""
        finished = self.scheduler.retire()
        self.lockstep.retire(finished)
        for sequence in finished:
            self._unflushed.flush(sequence)
        self.counters.num_preemptions = self.scheduler.num_preemptions
        return finished

    def _count_outcome(self, outcome: StepOutcome) -> None:
        self.counters.num_steps += 1
        self.counters.num_plain_steps += not outcome.depth
        self.counters.num_probes += outcome.plan.probe
        self.counters.num_verify_rows += outcome.num_rows


def _without_function(
    answer: tuple[DraftPlan, Callable[[PartialDraft], bool] | None, bool],
) -> tuple[DraftPlan, bool | None, bool]:
    """Return a plan as it is sent to other ranks: they learn from rank 0 where a draft stops."""
    plan, stops, has_lookup_hits = answer
    can_stop = None if stops is None else True
    return plan.without_stop(), can_stop, has_lookup_hits
