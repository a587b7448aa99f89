"""JobWork: a job's work independent of the hardware: prompt lengths, output lengths, acceptance of drafts.

    work = JobWork.of(config, plan)
    work.rows_at(step, slots=64)      # the sample's rows, with the seconds that each holds a slot

It is measured if ``_estimate.json`` exists for this configuration (`eagle-ray validate
--estimate`). Otherwise outputs are assumed to have their maximum length, without drafts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from eagle_ray.batch.driver.input_plan import InputPlan, requests_of
from eagle_ray.cli.checked_rows import checked_row, seen_target
from eagle_ray.cli.estimate import SampledRow
from eagle_ray.config import JobConfig, config_hash
from eagle_ray.config.records import EstimateRecord
from eagle_ray.core.errors import ConfigError
from eagle_ray.planner.budget_planner import acceptance_model
from eagle_ray.planner.calibrated_acceptance import CalibratedAcceptance
from eagle_ray.planner.steady_step import FullBatch, SteadyStep
from eagle_ray.runs.layout import ESTIMATE, output_of, read_derived_record

NUM_PROMPTS = 64  # rows whose prompts are looked at where nothing was measured
NO_DRAFTS = "none"
MEASURE = "`eagle-ray validate --estimate` measures them, on any machine that runs the pair"


@dataclass(frozen=True, slots=True)
class JobWork:
    """Lengths and acceptance of a job's rows, measured on a sample or assumed.

    Attributes:
        rows: a sample of rows, without seconds.
        num_rows: rows of the input.
        acceptance: acceptance of drafts; None to assume plain decoding.
        are_lengths_measured: whether outputs were decoded, rather than assumed to have their limit.
        has_drafts: whether the job's method drafts.
    """

    rows: Sequence[SampledRow]
    num_rows: int
    acceptance: CalibratedAcceptance | None
    are_lengths_measured: bool
    has_drafts: bool

    @classmethod
    def of(cls, config: JobConfig, plan: InputPlan) -> JobWork:
        """Return the work of a job. Raises ConfigError if no row can be answered, or no length has a limit."""
        estimate = read_derived_record(
            output_of(config) / ESTIMATE, EstimateRecord, "it is left out"
        )
        has_drafts = config.speculative.merged_methods != NO_DRAFTS
        is_known = (
            estimate is not None
            and estimate["config_hash"] == config_hash(config)
            and estimate.get("lengths") is not None
            and estimate.get("prompt_tokens") is not None
        )
        if estimate is None or not is_known:
            return cls(_longest_rows(config, plan), plan.num_rows, None, False, has_drafts)
        pairs = zip(estimate["lengths"], estimate["prompt_tokens"], strict=True)
        rows = [SampledRow([], lengths, prompt_tokens) for lengths, prompt_tokens in pairs]
        acceptance = _acceptance_of(estimate.get("acceptance"), config) if has_drafts else None
        return cls(rows, plan.num_rows, acceptance, True, has_drafts)

    @property
    def is_measured(self) -> bool:
        """Return whether lengths and, if the job drafts, acceptance are measured."""
        return self.are_lengths_measured and (self.acceptance is not None or not self.has_drafts)

    @property
    def mean_length(self) -> float:
        """Return the mean tokens of an output."""
        return statistics.fmean(length for row in self.rows for length in row.lengths)

    @property
    def mean_positions(self) -> float:
        """Return the mean number of tokens of a finished sequence, prompt and output."""
        ends = [row.prompt_tokens + length for row in self.rows for length in row.lengths]
        return statistics.fmean(ends)

    @property
    def mean_prompt(self) -> float:
        """Return the mean number of tokens of a prompt."""
        return statistics.fmean(row.prompt_tokens for row in self.rows)

    def outputs(self, workers: int) -> int:
        """Return how many outputs each of several workers makes."""
        per_row = statistics.fmean(len(row.lengths) for row in self.rows)
        return max(1, math.ceil(self.num_rows * per_row / workers))

    def full_batch(self, slots: int) -> FullBatch:
        """Return a batch with all slots in use. Long rows are in it for longer, and on average half
        of a row is done."""
        tokens = cached = 0.0
        for row in self.rows:
            for length in row.lengths:
                tokens += length
                cached += length * (row.prompt_tokens + length / 2)
        return FullBatch(slots, round(slots * cached / max(tokens, 1.0)))

    def rows_at(self, step: SteadyStep, slots: int) -> list[SampledRow]:
        """Return the rows with the seconds that each output occupies one of the slots.

        Prompts of all slots are computed in the passes that decode, so each slot waits for all of
        them.
        """
        token_s = step.seconds / step.tau
        rows = []
        for row in self.rows:
            prompt_s = slots * row.prompt_tokens * step.prompt_token_s
            slot_s = [length * token_s + prompt_s for length in row.lengths]
            rows.append(SampledRow(slot_s, row.lengths, row.prompt_tokens))
        return rows

    def lines(self) -> list[str]:
        """Return report lines on whether lengths and acceptance were measured or assumed."""
        kinds = "measured" if self.are_lengths_measured else "planned"
        source = f"by {len(self.rows)} rows in {ESTIMATE}"
        if not self.are_lengths_measured:
            source = f"each output has the tokens that it may have. {MEASURE}"
        lengths = (
            f"rows     {kinds}: {self.num_rows:,} with {self.mean_prompt:,.0f} prompt and "
            f"{self.mean_length:,.0f} output tokens in the mean, {source}"
        )
        if not self.has_drafts:
            drafts = "drafts   none"
        elif self.acceptance is None:
            drafts = f"drafts   left out, since their acceptance was not measured. {MEASURE}"
        else:
            drafts = f"drafts   measured: their acceptance in {ESTIMATE}"
        return [lengths, drafts]


def _longest_rows(config: JobConfig, plan: InputPlan) -> list[SampledRow]:
    """Return some rows with their prompts, whose outputs have as many tokens as they may."""
    seen = seen_target(config)
    rows = []
    for request in islice(requests_of(plan), NUM_PROMPTS):
        row = checked_row(request, config, seen)
        limit = request.sampling.get("max_tokens") or config.sampling.max_tokens
        samples = request.sampling.get("n") or config.sampling.n
        if row.error is not None:
            continue
        if limit is None:
            raise ConfigError(
                f"sampling.max_tokens: null, and no length is known. Set it, or: {MEASURE}"
            )
        rows.append(SampledRow([], [limit] * samples, len(row.prompt_ids)))
    if not rows:
        raise ConfigError(
            f"none of the first {NUM_PROMPTS} rows can be answered: eagle-ray validate says why"
        )
    return rows


def _acceptance_of(state: dict[str, Any] | None, config: JobConfig) -> CalibratedAcceptance | None:
    """Return the acceptance of an estimate's drafts; None if nothing was drafted, or with other bounds."""
    if state is None:
        return None
    acceptance = CalibratedAcceptance(acceptance_model(config.speculative.tree_bounds))
    try:
        acceptance.load_state({name: torch.tensor(values) for name, values in state.items()})
    except (ValueError, KeyError, TypeError):
        return None
    return acceptance
