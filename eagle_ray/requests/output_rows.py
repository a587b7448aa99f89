"""Turn finished sequences into output rows with the columns of ``row_schema.output_schema``.

Rows are dictionaries; absent columns are null.

    rows.of(request, sequences)      # [{'request_id': 'q1', 'sample_index': 0, 'status': 'ok', 'text': 'Paris.', ...}]
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from eagle_ray.config import JobConfig
from eagle_ray.core.counters import CONFIDENCE_UNIT, ConfidenceCounts
from eagle_ray.core.errors import RequestError, without_values
from eagle_ray.core.json_text import dump_json
from eagle_ray.core.sequence import Sequence
from eagle_ray.requests.answers import FinishedAnswer, row_form
from eagle_ray.requests.parameters import ROW_PARAMETERS, SAMPLING, Group, SamplingParams, names_in
from eagle_ray.requests.request import Request
from eagle_ray.requests.sequence_answers import AnswerReader
from eagle_ray.requests.sequences import text_options
from eagle_ray.text.tokenizer import NullTokenizer, Tokenizer

OutputRow = dict[str, Any]
# Parameters without an output column of their own: `sampling_controls` has those that are not at their defaults.
OTHER_NAMES = (*names_in(Group.CONTROL), "stop_token_ids", *names_in(Group.TEXT, Group.FORM))


@dataclass(frozen=True, slots=True)
class OutputRows:
    """What the rows of one worker share. Carried columns are not among their columns.

    Attributes:
        constants: columns that are equal in all its rows, such as run_id.
        clock_offset: seconds from the engine's monotonic clock to Unix time.
    """

    config: JobConfig
    text: Tokenizer | None
    constants: dict[str, Any]
    clock_offset: float

    def of(self, request: Request, sequences: list[Sequence]) -> list[OutputRow]:
        """Return one row per finished sample of the request, or of one turn of a conversation."""
        config = self.config
        prompt = sequences[0].prompt_text if config.output.store_prompt else None
        sampling = request.sampling_params(config)
        shared = self._shared(request) | {"status": "ok", "prompt": prompt, "stop": sampling.stop}
        shared["sampling_controls"] = controls_json(sampling)
        reader = answer_reader(request, config, self.text)
        return [
            shared
            | self._answer(reader.finished(sequence, j, f"{sequence.request_id}/{request.turn_index}"))
            | _structured(sequence, reader)
            | self._tokens(sequence)
            | _sampled(sequence)
            | _acceptance(sequence)
            | self._per_step(sequence)
            | self._times(sequence)
            for j, sequence in enumerate(sequences)
        ]

    def of_error(self, request: Request, error: RequestError) -> list[OutputRow]:
        """Return one error row per requested sample and turn, so that a bad row's id is done as well."""
        return [
            self.of_turn_error(request.next_turn([None] * turn), j, error)
            for j in range(request.num_samples(self.config))
            for turn in range(request.num_turns)
        ]

    def of_turn_error(self, request: Request, sample_index: int, error: RequestError) -> OutputRow:
        """Return the error row of one sample of the request, or of one turn of a conversation."""
        prompt = request.prompt if self.config.output.store_prompt else None
        if request.error is None and not self.config.output.store_prompt:  # the reader's own errors quote nothing
            error = without_values(error, ROW_PARAMETERS)
        failure = {"error_code": error.code, "error_message": request.error_text(error)}
        return self._shared(request) | {"status": "error", "prompt": prompt, "sample_index": sample_index} | failure

    def _shared(self, request: Request) -> OutputRow:
        return self.constants | {
            "request_id": request.id,
            "row_index": request.row_index,
            "source_file": request.source_file,
            "turn_index": request.turn_index,
            "messages": request.turn_messages if self.config.output.store_prompt else None,
        }

    def _answer(self, answer: FinishedAnswer) -> OutputRow:
        """Return the columns of an answer; those of its parts are null if no parser read its text."""
        calls = answer.tool_calls
        return {
            "sample_index": answer.index,
            "text": None if self.text is None else answer.text,
            "content": answer.content,
            "reasoning_content": answer.reasoning,
            "tool_calls": dump_json(calls, ensure_ascii=False) if calls else None,
            "finish_reason": answer.finish_reason,
        }

    def _tokens(self, sequence: Sequence) -> OutputRow:
        logprobs = sequence.output_logprobs if sequence.sampling.wants_logprobs else None
        return {
            "output_token_ids": sequence.output_ids if self.config.output.store_token_ids else None,
            "token_logprobs": logprobs,
            "cumulative_logprob": None if logprobs is None else sum(logprobs),
            "token_top_logprobs": row_form(sequence.output_tops) if sequence.sampling.num_top_logprobs else None,
            **_prompt_logprobs(sequence, self.config.output.store_prompt),
            "prompt_tokens": len(sequence.prompt_ids),
            "completion_tokens": len(sequence.output_ids),
        }

    def _per_step(self, sequence: Sequence) -> OutputRow:
        if self.config.speculative.stats != "detailed":
            return {}
        stats = sequence.stats
        return {"per_step_budget": stats.per_step_budget, "per_step_accepted": stats.per_step_accepted}

    def _times(self, sequence: Sequence) -> OutputRow:
        """Return durations from the engine's timestamps; started_at is when the engine admitted the request."""
        arrived, admitted = sequence.arrived_at, sequence.admitted_at
        first_token, finished = sequence.first_token_at, sequence.finished_at
        assert arrived is not None and admitted is not None and first_token is not None and finished is not None
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


def answer_reader(request: Request, config: JobConfig, tokenizer: Tokenizer | None) -> AnswerReader:
    """Return what makes answers of the request's sequences."""
    sampling = request.sampling_params(config)
    options = request.chat_options(config) if request.is_chat and tokenizer is not None else None
    text = (tokenizer or NullTokenizer()).for_chat(options)
    return AnswerReader(text, sampling.stop, text_options(sampling), options)


def _structured(sequence: Sequence, reader: AnswerReader) -> OutputRow:
    spec, state = sequence.grammar_spec, sequence.grammar
    if spec is None or state is None:
        return {}
    is_cut = sequence.finish_reason == "stop" and not state.has_end and not reader.text_options.include_stop
    return {
        "structured": spec.kind,
        "structured_outcome": "complete" if state.is_complete and not is_cut else "truncated",
    }


def controls_json(sampling: SamplingParams) -> str | None:
    """Return the values of OTHER_NAMES that are not at their defaults, as JSON; None if all are."""
    values = {name: getattr(sampling, name) for name in OTHER_NAMES}
    own = {name: value for name, value in values.items() if value not in (None, "", SAMPLING[name].default)}
    return dump_json(own, ensure_ascii=False) if own else None


def _prompt_logprobs(sequence: Sequence, has_tokens: bool) -> OutputRow:
    """Return the prompt's log-probabilities, if requested; before its first token stands nothing.

    has_tokens: with the likeliest tokens, among which the prompt's own are.
    """
    sampling = sequence.sampling
    if not sampling.wants_prompt_logprobs:
        return {}
    return {
        "prompt_token_logprobs": sequence.prompt_logprobs,
        "prompt_top_logprobs": row_form(sequence.prompt_tops) if sampling.num_top_logprobs and has_tokens else None,
    }


def _sampled(sequence: Sequence) -> OutputRow:
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


def _acceptance(sequence: Sequence) -> OutputRow:
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


def _confidences(name: str, counts: ConfidenceCounts) -> OutputRow:
    return {
        f"{name}_nodes": counts.nodes,
        f"{name}_accepted": counts.accepted,
        f"{name}_expected": [units * CONFIDENCE_UNIT for units in counts.expected],
    }
