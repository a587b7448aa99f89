"""Turn finished sequences into output rows with the columns of ``row_schema.output_schema``.

A row is a dictionary. A column that it lacks is null.

    rows.of(request, sequences)      # [{'request_id': 'q1', 'sample_index': 0, 'status': 'ok', 'text': 'Paris.', ...}]
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone

from eagle_ray.core.counters import CONFIDENCE_UNIT, ConfidenceCounts
from eagle_ray.core.json_text import dump_json
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.core.sequence import Sequence
from eagle_ray.requests.answers import FinishedAnswer, row_form
from eagle_ray.requests.request import Request
from eagle_ray.requests.request_rows import OutputRow, RequestRows, controls_json, sampling_columns
from eagle_ray.requests.row_settings import RowSettings
from eagle_ray.requests.score_columns import continuations_column, score_columns
from eagle_ray.requests.scored_documents import document_columns, document_ids
from eagle_ray.requests.sequence_answers import AnswerReader
from eagle_ray.requests.sequences import text_options
from eagle_ray.text.null_tokenizer import NullTokenizer
from eagle_ray.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class OutputRows(RequestRows):
    """Builds the output rows of finished sequences.

    Attributes:
        text: tokenizer of the target; None if it has none.
        clock_offset: seconds to add to the engine's monotonic clock for Unix time.
    """

    text: Tokenizer | None
    clock_offset: float

    def of(self, request: Request, sequences: list[Sequence]) -> list[OutputRow]:
        """Return one row per finished sample of a request, or of one turn of a conversation.

        Args:
            request: request, at the turn that was answered.
            sequences: finished sequences of the request: its samples, or the windows of a scored
                document.
        """
        config = self.config
        prompt = sequences[0].prompt_text if config.output.store_prompt else None
        sampling = request.sampling_params(config)
        shared = self.shared(request) | {"status": "ok", "prompt": prompt, "stop": sampling.stop}
        shared["sampling_controls"] = controls_json(sampling)
        reader = answer_reader(request, config, self.text)
        if sampling.score_text:
            return [shared | self._document(reader, sequences)]
        return [
            shared
            | self._answer(
                reader.finished(sequence, j, f"{sequence.request_id}/{request.turn_index}")
            )
            | _structured(sequence, reader)
            | self._tokens(sequence)
            | _sampled(sequence)
            | _acceptance(sequence)
            | self._per_step(sequence)
            | self._scored(sequence, sampling)
            | self._times(sequence)
            for j, sequence in enumerate(sequences)
        ]

    def _answer(self, answer: FinishedAnswer) -> OutputRow:
        """Return the columns of an answer. Columns of its parts are null if no parser read the text."""
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
            "token_top_logprobs": row_form(sequence.output_tops)
            if sequence.sampling.num_top_logprobs
            else None,
            **_prompt_logprobs(sequence, self.config.output.store_prompt),
            "prompt_tokens": len(sequence.prompt_ids),
            "completion_tokens": len(sequence.output_ids),
        }

    def _scored(self, sequence: Sequence, sampling: SamplingSettings) -> OutputRow:
        """Return the score columns. A row that generates nothing gets null as its text."""
        scores = sequence.scoring
        if scores is None:
            return {}
        row: OutputRow = {} if sequence.generates else {"text": None, "content": None}
        if sampling.continuations is not None or sampling.choice is not None:
            row |= score_columns(scores)
            row |= continuations_column(sampling, self.config.output.store_prompt)
        return row

    def _document(self, reader: AnswerReader, windows: list[Sequence]) -> OutputRow:
        """Return the columns of a document that was scored in windows: its scores, and null as its text."""
        first = windows[0]
        return (
            self._answer(reader.finished(first, 0, first.request_id))
            | self._tokens(first)
            | _sampled(first)
            | {"text": None, "content": None}
            | document_columns(windows, self.text)
            | {"prompt_tokens": len(document_ids(windows))}
            | {"target_forwards": sum(window.target_forwards for window in windows)}
            | self._times_of_windows(windows)
        )

    def _times_of_windows(self, windows: list[Sequence]) -> OutputRow:
        """Return the times of a document, from the first window's arrival to the last window's end."""
        times = [self._times(window) for window in windows]
        began = min(each["started_at"] for each in times)
        ended = max(each["finished_at"] for each in times)
        queue_s = min(each["queue_s"] for each in times)
        e2e_s = (ended - began).total_seconds()
        own = {"queue_s": queue_s, "prefill_s": e2e_s - queue_s, "e2e_s": e2e_s}
        return times[0] | own | {"started_at": began, "finished_at": ended}

    def _per_step(self, sequence: Sequence) -> OutputRow:
        if not sequence.generates or self.config.speculative.stats != "detailed":
            return {}
        stats = sequence.stats
        return {
            "per_step_budget": stats.per_step_budget,
            "per_step_accepted": stats.per_step_accepted,
        }

    def _times(self, sequence: Sequence) -> OutputRow:
        """Return the times of a sequence, from the engine's timestamps.

        started_at is the time at which the request arrived. If a row is only scored, all of its
        passes count as prefill.
        """
        arrived, admitted = sequence.arrived_at, sequence.admitted_at
        first_token, finished = sequence.first_token_at, sequence.finished_at
        assert (
            arrived is not None
            and admitted is not None
            and first_token is not None
            and finished is not None
        )
        ends = first_token if sequence.generates else finished
        return {
            "queue_s": admitted - arrived,
            "prefill_s": ends - admitted,
            "decode_s": finished - first_token if sequence.generates else None,
            "ttft_s": first_token - arrived if sequence.generates else None,
            "e2e_s": finished - arrived,
            "started_at": self._utc(arrived),
            "finished_at": self._utc(finished),
        }

    def _utc(self, seconds: float) -> datetime:
        return datetime.fromtimestamp(seconds + self.clock_offset, timezone.utc)


def answer_reader(
    request: Request, config: RowSettings, tokenizer: Tokenizer | None
) -> AnswerReader:
    """Return the reader that turns the request's output ids into answers."""
    sampling = request.sampling_params(config)
    options = request.chat_options(config) if request.is_chat and tokenizer is not None else None
    text = (tokenizer or NullTokenizer()).for_chat(options)
    return AnswerReader(text, sampling.stop, text_options(sampling), options)


def _structured(sequence: Sequence, reader: AnswerReader) -> OutputRow:
    spec, state = sequence.grammar_spec, sequence.grammar
    if spec is None or state is None:
        return {}
    is_cut = (
        sequence.finish_reason == "stop"
        and not state.has_end
        and not reader.text_options.include_stop
    )
    return {
        "structured": spec.kind,
        "structured_outcome": "complete" if state.is_complete and not is_cut else "truncated",
    }


def _prompt_logprobs(sequence: Sequence, has_tokens: bool) -> OutputRow:
    """Return the prompt's log-probabilities if they were requested. Its first token has none.

    Args:
        sequence: finished sequence.
        has_tokens: whether the likeliest tokens are stored. They include the prompt's own tokens.
    """
    sampling = sequence.sampling
    if not sampling.wants_prompt_logprobs:
        return {}
    return {
        "prompt_token_logprobs": sequence.prompt_logprobs,
        "prompt_top_logprobs": row_form(sequence.prompt_tops)
        if sampling.num_top_logprobs and has_tokens
        else None,
    }


def _sampled(sequence: Sequence) -> OutputRow:
    """Return the sampling parameters as used: max_tokens within the model's length, and this sample's seed."""
    sampling = sequence.sampling
    own = {"max_tokens": sequence.max_tokens, "seed": sampling.seed}
    return sampling_columns(sampling) | own


def _acceptance(sequence: Sequence) -> OutputRow:
    """Return the acceptance columns. A row that generates nothing has only target_forwards."""
    stats = sequence.stats
    if not sequence.generates:
        return {"target_forwards": sequence.target_forwards}
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
