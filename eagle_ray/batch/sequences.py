"""Turn a request row into engine sequences, one per sample: prompt ids, sampling parameters and seeds.

A row's columns may override sampling. Seeds depend only on the run's seed, the row's id and the sample index, so
neither order nor batching nor resuming changes what is sampled.

    >>> sequences_of(row, config, tokenizer)
    [Sequence(request_id='q1', prompt_ids=[1, 17, 4], ...)]
"""

from __future__ import annotations

import hashlib
from typing import Any

from eagle_ray.batch.expected_rows import num_samples
from eagle_ray.batch.input.messages import template_messages
from eagle_ray.batch.input.row_location import location_text
from eagle_ray.config import JobConfig
from eagle_ray.core.sequence import Sequence
from eagle_ray.errors import RequestError
from eagle_ray.sampling.sampler import SamplingParams, sample_seed
from eagle_ray.tokenizer import Tokenizer

# The sampling columns that are fields of SamplingParams; n and stop are not, and the seed is made for each sample.
SAMPLING_COLUMNS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "ignore_eos", "logprobs")
RequestRow = dict[str, Any]  # one row of schema.REQUEST, passthrough columns included


def sequences_of(
    row: RequestRow, config: JobConfig, tokenizer: Tokenizer | None, n: int | None = None
) -> list[Sequence]:
    """Return the row's first n samples (None: all), in order. Raises RequestError if the row cannot be answered.

    text: the target's tokenizer; without one, only prompt_token_ids without `stop` can be answered.
    """
    if row["error_code"] is not None:
        raise RequestError(row["error_code"], row["error_message"])
    prompt_ids, stops = prompt_ids_of(row, tokenizer), stop_strings(row, config)
    return [
        Sequence(
            request_id=f"{row['request_id']}/{j}",
            prompt_ids=prompt_ids,
            sampling=_sampling_params(row, config, seed_of(row, config.seed, j)),
            stop_check=_require_tokenizer(tokenizer, "stop").stop_check(stops) if stops else None,
        )
        for j in range(num_samples(row, config) if n is None else n)
    ]


def message_of(row: RequestRow, error: RequestError) -> str:
    """Return the row's error message after its location; errors of the reader have the location already."""
    return str(error) if row["error_code"] else f"{location_text(row)}: {error}"


def stop_strings(row: RequestRow, config: JobConfig) -> list[str]:
    return config.sampling.stop if row["stop"] is None else row["stop"]


def prompt_ids_of(row: RequestRow, tokenizer: Tokenizer | None) -> list[int]:
    if row["prompt_token_ids"] is not None:
        return row["prompt_token_ids"]
    if row["messages"] is not None:
        return _require_tokenizer(tokenizer, "messages").encode_chat(template_messages(row["messages"]))
    return _require_tokenizer(tokenizer, "prompt").encode(row["prompt"])


def prompt_text_of(row: RequestRow, tokenizer: Tokenizer | None) -> str | None:
    """Return the prompt as the model reads it: messages through the chat template; None for token ids."""
    if row["messages"] is not None and tokenizer is not None:
        return tokenizer.render_chat(template_messages(row["messages"]))
    return row["prompt"]


def seed_of(row: RequestRow, run_seed: int, sample_index: int) -> int:
    """Return the key of one sample's noise: the row's own seed, or one made from the run's seed and the row's id."""
    if row["seed"] is not None:
        return sample_seed(row["seed"], sample_index)
    key = f"{run_seed}\x1f{row['request_id']}\x1f{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def _sampling_params(row: RequestRow, config: JobConfig, seed: int) -> SamplingParams:
    overrides = {name: row[name] for name in SAMPLING_COLUMNS if row[name] is not None}
    defaults = config.sampling.model_dump(include=set(SamplingParams.__dataclass_fields__))
    try:
        return SamplingParams(**defaults | overrides, seed=seed)
    except ValueError as error:
        raise RequestError("invalid_sampling", str(error)) from None


def _require_tokenizer(tokenizer: Tokenizer | None, column: str) -> Tokenizer:
    if tokenizer is None:
        raise RequestError("no_tokenizer", f"the target has no tokenizer, so {column!r} cannot be used: give token ids")
    return tokenizer
