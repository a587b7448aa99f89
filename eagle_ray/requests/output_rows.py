"""Turn finished sequences into output rows with the columns of ``schema.output_schema``.

Rows are dictionaries; absent columns are null.

    rows.of(request, sequences)      # [{'request_id': 'q1', 'sample_index': 0, 'status': 'ok', 'text': 'Paris.', ...}]
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from eagle_ray.config import JobConfig
from eagle_ray.core.acceptance_stats import CONFIDENCE_UNIT, ConfidenceCounts
from eagle_ray.core.errors import RequestError
from eagle_ray.core.sequence import Sequence, TopLogprobs
from eagle_ray.requests.chat_rows import answer_columns, answer_of_row
from eagle_ray.requests.rows import num_samples, num_turns
from eagle_ray.requests.sequences import (
    RequestRow,
    controls_json,
    message_of,
    messages_of,
    prompt_text_of,
    stop_strings,
    text_options_of,
    turn_index_of,
    turn_request,
)
from eagle_ray.text.tokenizer import Tokenizer

IDENTITY = ("request_id", "row_index", "source_file")


@dataclass(frozen=True, slots=True)
class OutputRows:
    """What the rows of one worker share. Passthrough columns are not among their columns.

    Attributes:
        constants: columns that are equal in all its rows, such as run_id.
        clock_offset: seconds from the engine's monotonic clock to Unix time.
    """

    config: JobConfig
    text: Tokenizer | None
    constants: dict[str, Any]
    clock_offset: float

    def of(self, request: RequestRow, sequences: list[Sequence]) -> list[RequestRow]:
        """Return one row per finished sample of the request, or of one turn of a conversation."""
        prompt = prompt_text_of(request, self.config, self.text) if self.config.output.store_prompt else None
        shared = self._shared(request) | {"status": "ok", "prompt": prompt, "stop": stop_strings(request, self.config)}
        shared["sampling_controls"] = controls_json(request, self.config)
        return [
            shared
            | {"sample_index": j, "text": self._text(request, sequence)}
            | self._structured(request, sequence)
            | self._tokens(sequence)
            | self._answer(request, sequence)
            | _sampled(sequence)
            | _acceptance(sequence)
            | self._per_step(sequence)
            | self._times(sequence)
            for j, sequence in enumerate(sequences)
        ]

    def of_error(self, request: RequestRow, error: RequestError) -> list[RequestRow]:
        """Return one error row per requested sample and turn, so that a bad row's id is done as well."""
        return [
            self.of_turn_error(turn_request(request, [None] * turn), j, error)
            for j in range(num_samples(request, self.config))
            for turn in range(num_turns(request))
        ]

    def of_turn_error(self, request: RequestRow, sample_index: int, error: RequestError) -> RequestRow:
        """Return the error row of one sample of the request, or of one turn of a conversation."""
        prompt = request["prompt"] if self.config.output.store_prompt else None
        told = {"error_code": error.code, "error_message": message_of(request, error)}
        return self._shared(request) | {"status": "error", "prompt": prompt, "sample_index": sample_index} | told

    def _shared(self, request: RequestRow) -> RequestRow:
        messages = messages_of(request) if self.config.output.store_prompt else None
        identity = {name: request[name] for name in IDENTITY} | {"turn_index": turn_index_of(request)}
        return self.constants | identity | {"messages": messages}

    def _text(self, request: RequestRow, sequence: Sequence) -> str | None:
        if self.text is None:
            return None
        stops, options = stop_strings(request, self.config), text_options_of(request, self.config)
        return self.text.final_text(sequence.output_ids, stops, options)

    def _structured(self, request: RequestRow, sequence: Sequence) -> RequestRow:
        spec, state = sequence.sampling.grammar, sequence.grammar
        if spec is None or state is None:
            return {}
        is_cut = sequence.finish_reason == "stop" and not state.has_end
        is_cut = is_cut and not text_options_of(request, self.config).include_stop
        return {
            "structured": spec.kind,
            "structured_outcome": "complete" if state.is_complete and not is_cut else "truncated",
        }

    def _answer(self, request: RequestRow, sequence: Sequence) -> RequestRow:
        """Return the parts of the text, and the finish reason tool_calls if it has such calls."""
        stops, options = stop_strings(request, self.config), text_options_of(request, self.config)
        answer = answer_of_row(request, self.config, self.text, sequence, stops, options)
        columns = answer_columns(answer, self.text, f"{sequence.request_id}/{turn_index_of(request)}")
        if answer is not None:
            columns["finish_reason"] = answer.finish_reason(sequence.finish_reason)
        return columns

    def _tokens(self, sequence: Sequence) -> RequestRow:
        logprobs = sequence.output_logprobs if sequence.sampling.logprobs else None
        return {
            "finish_reason": sequence.finish_reason,
            "output_token_ids": sequence.output_ids if self.config.output.store_token_ids else None,
            "token_logprobs": logprobs,
            "cumulative_logprob": None if logprobs is None else sum(logprobs),
            "token_top_logprobs": _tops(sequence.output_tops) if sequence.sampling.top_logprobs else None,
            **_prompt_logprobs(sequence),
            "prompt_tokens": len(sequence.prompt_ids),
            "completion_tokens": len(sequence.output_ids),
        }

    def _per_step(self, sequence: Sequence) -> RequestRow:
        if self.config.speculative.stats != "detailed":
            return {}
        stats = sequence.stats
        return {"per_step_budget": stats.per_step_budget, "per_step_accepted": stats.per_step_accepted}

    def _times(self, sequence: Sequence) -> RequestRow:
        """Return durations from the engine's timestamps; started_at is when the engine admitted the request."""
        arrived, admitted = sequence.arrived_at, sequence.admitted_at
        first_token, finished = sequence.first_token_at, sequence.finished_at
        return {
            "queue_s": admitted - arrived,
            "prefill_s": first_token - admitted,
            "decode_s": finished - first_token,
            "ttft_s": first_token - arrived,
            "e2e_s": finished - arrived,
            "started_at": self._utc(arrived),
            "finished_at": self._utc(finished),
        }

    def _utc(self, seconds: float) -> datetime:
        return datetime.fromtimestamp(seconds + self.clock_offset, timezone.utc)


def _tops(tops: list[TopLogprobs]) -> list[list[dict[str, Any]]]:
    return [[{"token_id": token, "logprob": logprob} for token, logprob in top] for top in tops]


def _prompt_logprobs(sequence: Sequence) -> RequestRow:
    """Return the prompt's log-probabilities, if requested; before its first token stands nothing."""
    sampling = sequence.sampling
    if not sampling.prompt_logprobs:
        return {}
    return {
        "prompt_token_logprobs": sequence.prompt_logprobs,
        "prompt_top_logprobs": _tops(sequence.prompt_tops) if sampling.top_logprobs else None,
    }


def _sampled(sequence: Sequence) -> RequestRow:
    """Return the sampling parameters used: max_tokens limited by the model's length, and this sample's seed."""
    sampling = sequence.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": sequence.max_tokens,
        "ignore_eos": sampling.ignore_eos,
        "seed": sampling.seed,
    }


def _acceptance(sequence: Sequence) -> RequestRow:
    stats = sequence.stats
    return {
        "num_spec_steps": stats.num_steps,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
        "num_spec_tokens": stats.num_spec_tokens,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "acceptance_histogram": stats.histogram,
        "num_plain_steps": stats.num_plain_steps,
        "num_discarded_tokens": stats.num_discarded_tokens,
        "target_forwards": sequence.target_forwards,
        "draft_forwards": sequence.draft_forwards,
        "proposed_by_depth": stats.proposed_by_depth,
        "accepted_by_depth": stats.accepted_by_depth,
        **_confidences("confidence", stats.drafted),
        **_confidences("calibrated", stats.calibrated),
    }


def _confidences(name: str, counts: ConfidenceCounts) -> RequestRow:
    return {
        f"{name}_nodes": counts.nodes,
        f"{name}_accepted": counts.accepted,
        f"{name}_expected": [units * CONFIDENCE_UNIT for units in counts.expected],
    }
