"""Build the columns of output rows that depend on the request alone, and the rows of its errors.

These functions need neither torch nor a tokenizer, so rows of any engine are built with them.

    RequestRows(config, {"run_id": "5f0c"}).of_error(request, RequestError("timeout", "..."))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eagle_ray.core.errors import RequestError, without_values
from eagle_ray.core.json_text import dump_json
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.requests.parameters import ROW_PARAMETERS, SAMPLING, Group, names_in
from eagle_ray.requests.request import Request
from eagle_ray.requests.row_settings import RowSettings

OutputRow = dict[str, Any]
# Parameters without an output column of their own: `sampling_controls` has those that are not at
# their defaults.
OTHER_NAMES = (*names_in(Group.CONTROL), "stop_token_ids", *names_in(Group.TEXT, Group.FORM))


@dataclass(frozen=True, slots=True)
class RequestRows:
    """Builds the columns that do not depend on an engine. Carried columns are added elsewhere.

    Attributes:
        config: settings of the job.
        constants: columns with equal values in all rows of one worker, such as run_id.
    """

    config: RowSettings
    constants: dict[str, Any]

    def of_error(self, request: Request, error: RequestError) -> list[OutputRow]:
        """Return one error row per requested sample and turn. A request with an error then counts as answered."""
        return [
            self.of_turn_error(request.next_turn([None] * turn), j, error)
            for j in range(request.num_samples(self.config))
            for turn in range(request.num_turns)
        ]

    def of_turn_error(self, request: Request, sample_index: int, error: RequestError) -> OutputRow:
        """Return the error row of one sample of a request, or of one turn of a conversation.

        Args:
            request: request, at the turn that failed.
            sample_index: number of the sample, from 0.
            error: reason of the failure.
        """
        prompt = request.prompt if self.config.output.store_prompt else None
        # The reader's own errors quote nothing.
        if request.error is None and not self.config.output.store_prompt:
            error = without_values(error, ROW_PARAMETERS)
        failure = {"error_code": error.code, "error_message": request.error_text(error)}
        return (
            self.shared(request)
            | {"status": "error", "prompt": prompt, "sample_index": sample_index}
            | failure
        )

    def shared(self, request: Request) -> OutputRow:
        """Return the columns that successful rows and error rows of a request have in common."""
        return self.constants | {
            "request_id": request.id,
            "row_index": request.row_index,
            "source_file": request.source_file,
            "turn_index": request.turn_index,
            "messages": request.turn_messages if self.config.output.store_prompt else None,
        }


def sampling_columns(sampling: SamplingSettings) -> OutputRow:
    """Return the sampling parameters that have an output column of their own, except the seed."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_tokens,
        "ignore_eos": sampling.ignore_eos,
    }


def controls_json(sampling: SamplingSettings) -> str | None:
    """Return the parameters in OTHER_NAMES that differ from their defaults, as JSON; None if none differs."""
    values = {name: getattr(sampling, name) for name in OTHER_NAMES}
    own = {
        name: value
        for name, value in values.items()
        if value not in (None, "", SAMPLING[name].default)
    }
    return dump_json(own, ensure_ascii=False) if own else None
