"""BaselineComparison: the job's engine and a plain one over the same weights, slots and caches.

The speed-up is measured fairly: both engines decode the same rows in the same slots of one
otherwise idle worker, both warmed up, in turns of alternating order, so that a machine that slows
down slows both. The prefix cache is reset between turns. The drafting engine starts untrained, as
in a new worker, so its learning counts against it.

    comparison = BaselineComparison(config, WorkerPlan(threads=2))
    comparison.measure(rows)["speed_up"]
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from eagle_ray.assembly.assemble import plain_engine
from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.batch.worker.worker import build_engine_bundle
from eagle_ray.config import JobConfig
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.core.sequence import Sequence, new_controls
from eagle_ray.evaluation.timing import Timing, total
from eagle_ray.models.target import PromptBatch
from eagle_ray.report.comparison import id_of_turn
from eagle_ray.requests.request import Request
from eagle_ray.requests.sequences import sequence_of
from eagle_ray.sampling.adjustments import Adjustments
from eagle_ray.sampling.near_tie import NEAR_TIE, rounding_cause
from eagle_ray.sampling.noise import gumbel_noise
from eagle_ray.sampling.sampler import process

log = logging.getLogger("eagle_ray")
DRAFTED = "drafted"
PLAIN = "plain"
TURN_ROWS_PER_SLOT = 2  # rows of a turn for each slot: they keep the slots full for most of it


@dataclass(frozen=True, slots=True)
class ChosenRow:
    """A finished row to check: its request, its sample index, and its stored output ids, if the job stores them."""

    request: Request
    sample_index: int
    output_ids: list[int] | None


class BaselineComparison:
    """Loads the models once and runs a drafting engine and a plain one on them, in one process.

    With several GPUs the layers are split over them and run one after another. Raises as
    build_engine_bundle does.
    """

    def __init__(self, config: JobConfig, plan: WorkerPlan):
        bundle = build_engine_bundle(_in_one_process(config, plan), plan)
        self._config = config
        self._tokenizer = bundle.tokenizer
        self._target = bundle.engine.target
        self.draft_engine = bundle.engine
        self.plain_engine = plain_engine(bundle.engine)
        if config.execution.order == "auto":
            self.plain_engine.order_for_throughput()  # as build_engine_bundle does

    def measure(self, rows: list[ChosenRow]) -> dict[str, Any]:
        """Return output tokens per second over all slots, prompts included, with drafts and without.

        The entry "turns" has the tokens and seconds of each turn, with drafts and without.
        """
        timing = Timing({DRAFTED: self.draft_engine, PLAIN: self.plain_engine})
        num_slots = self.draft_engine.scheduler.num_slots
        size = TURN_ROWS_PER_SLOT * num_slots
        groups = [rows[start : start + size] for start in range(0, len(rows), size)]

        timing.warm_up(partial(self._sequences, groups[0]))
        turns = [timing.round(partial(self._sequences, group)) for group in groups]
        counted = []
        for turn in turns:
            a = turn.samples[DRAFTED]
            b = turn.samples[PLAIN]
            counted.append((a.num_tokens, a.seconds, b.num_tokens, b.seconds))

        drafted = total(turns, DRAFTED)
        plain = total(turns, PLAIN)
        return {
            "rows": len(rows),
            "slots": num_slots,
            "output_tokens": drafted.num_tokens,
            "tokens_per_s": drafted.tokens_per_second,
            "plain_tokens_per_s": plain.tokens_per_second,
            "speed_up": drafted.tokens_per_second / plain.tokens_per_second,
            "turns": counted,
        }

    def verify(self, rows: list[ChosenRow]) -> dict[str, Any]:
        """Decode rows without drafts. Return how many stored outputs are identical, and where the
        others first differ."""
        turn = Timing({PLAIN: self.plain_engine}).round(partial(self._sequences, rows))
        differing = []
        for row, sequence in zip(rows, turn.answers[PLAIN], strict=True):
            difference = self._first_difference(row, sequence)
            if difference is not None:
                differing.append(difference)
        num_identical = len(rows) - len(differing)
        return {"rows": len(rows), "identical": num_identical, "differing": differing}

    def _sequences(self, rows: list[ChosenRow], engine_name: str) -> list[Sequence]:
        return [self._sequence(row) for row in rows]

    def _sequence(self, row: ChosenRow) -> Sequence:
        return sequence_of(row.request, self._config, self._tokenizer, row.sample_index)

    def _first_difference(self, row: ChosenRow, plain: Sequence) -> dict[str, Any] | None:
        """Return the first token where the stored output differs from plain decoding, or None.

        The result has the row's key, the position, both tokens and:

            gap         by how much plain decoding preferred its own token, in logits, or in scores
                        with the noise of a sample
            near_tie    whether rounding alone explains the difference
            cause       how rounding explains it, as rounding_cause returns it
        """
        stored = row.output_ids
        expected = plain.output_ids
        assert stored is not None, "rows without their ids are not verified"
        if stored == expected:
            return None

        shorter = min(len(stored), len(expected))
        position = next((i for i in range(shorter) if stored[i] != expected[i]), shorter)
        token = stored[position] if position < len(stored) else None
        plain_token = expected[position] if position < len(expected) else None
        gap = None
        cause = None
        if token is not None and plain_token is not None:
            before = expected[:position]
            ids = plain.prompt_ids + before
            logits = self._controlled_logits(self._next_logits(ids), plain, before)
            scores = sampling_scores(logits, plain.sampling, len(ids))
            expected_score, stored_score = scores[[plain_token, token]].tolist()
            gap = expected_score - stored_score
            near_tie = NEAR_TIE[self._target.dtype]
            cause = rounding_cause(logits, plain.sampling, len(ids), plain_token, token, near_tie)
        return {
            "request_id": id_of_turn(str(row.request.id), row.request.turn_index),
            "sample_index": row.sample_index,
            "position": position,
            "token": token,
            "plain_token": plain_token,
            "gap": gap if gap is not None and math.isfinite(gap) else None,
            "near_tie": cause is not None,
            "cause": cause,
        }

    def _controlled_logits(
        self, logits: Float[Tensor, " V"], plain: Sequence, output_ids: list[int]
    ) -> Float[Tensor, " V"]:
        """Return the logits after the sequence's controls, for the token after output_ids."""
        before = plain.controls
        if before is None:
            return logits
        grammars = self.plain_engine.grammars
        spec = plain.grammar_spec
        grammar = None if grammars is None or spec is None else grammars.start(spec)
        state = new_controls(plain, before.ends, len(logits), grammar)
        state.sync(output_ids)
        adjusted = logits.to(torch.float32, copy=True)[None]
        Adjustments.of([(state, [[]])]).apply(adjusted)
        return adjusted[0]

    @torch.inference_mode()
    def _next_logits(self, ids: list[int]) -> Float[Tensor, " V"]:
        """Return the target's logits for the token after these ids."""
        blocks = self._target.cache.blocks
        device = self._target.device
        blocks.reserve(0, len(ids))
        logits = self._target.prefill(PromptBatch.of([0], [ids], device)).logits
        blocks.free(0)
        return logits[0].cpu()


def _in_one_process(config: JobConfig, plan: WorkerPlan) -> JobConfig:
    """Return the configuration of an engine without ranks. On several GPUs it has no CUDA graphs."""
    changes: dict[str, Any] = {"tensor_parallel": 1}
    if plan.num_gpus > 1:
        log.info(
            "rows are decoded again with the target's layers on %g GPUs in turn, without ranks",
            plan.num_gpus,
        )
        changes["require_kernels"] = False
    return config.model_copy(update={"execution": config.execution.model_copy(update=changes)})


def sampling_scores(
    logits: Float[Tensor, " V"], params: SamplingSettings, position: int
) -> Float[Tensor, " V"]:
    """Return the scores whose argmax is the sampled token at `position`: logits, or processed
    logits plus Gumbel noise."""
    if params.is_greedy:
        return logits.float()
    sampling = SamplingBatch.of([params])
    row = torch.tensor([0])
    noise = gumbel_noise(sampling.seed, torch.tensor([position]), torch.arange(len(logits)))
    return (process(logits[None], sampling, row) + noise)[0]
