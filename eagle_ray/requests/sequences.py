"""Turn a request row into engine sequences, one per sample: prompt ids, sampling parameters and seeds.

A row's columns may override sampling. Seeds depend only on the run's seed, the row's id and the sample index, so
neither order nor batching nor resuming changes what is sampled.

    sequences_of(row, config, tokenizer)      # [Sequence(request_id='q1', prompt_ids=[1, 17, 4], ...)]
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from eagle_ray.config import JobConfig, SamplingConfig
from eagle_ray.core.errors import RequestError
from eagle_ray.core.sequence import Sequence
from eagle_ray.requests.chat_rows import chat_options_of, is_chat
from eagle_ray.requests.messages import template_messages
from eagle_ray.requests.row_location import location_text
from eagle_ray.requests.rows import num_samples
from eagle_ray.requests.sampling_values import (
    CONTROL_NAMES,
    GRAMMAR_NAMES,
    TEXT_NAMES,
    answer_grammar,
    controls_of,
    merged_values,
    text_options,
)
from eagle_ray.sampling.controls import Controls
from eagle_ray.sampling.grammar import GrammarSpec
from eagle_ray.sampling.sampler import SamplingParams, sample_seed
from eagle_ray.text.chat_options import ChatOptions
from eagle_ray.text.tokenizer import TextOptions, Tokenizer

# The sampling columns that are fields of SamplingParams; n and stop are not, and the seed is made for each sample.
SAMPLING_COLUMNS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "ignore_eos",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
)
MAX_SAMPLES = 1024  # of a row: sampling.n is at most this
# Sampling columns without an output column of their own: `sampling_controls` has those that are not at their defaults.
OTHER_COLUMNS = tuple(dict.fromkeys((*CONTROL_NAMES, *TEXT_NAMES, *GRAMMAR_NAMES)))
CATEGORY = "category"  # a carried column: rows of a category are expected to have outputs of similar length
RequestRow = dict[str, Any]  # one row of schema.REQUEST, passthrough columns included


def sequences_of(
    row: RequestRow, config: JobConfig, tokenizer: Tokenizer | None, n: int | None = None
) -> list[Sequence]:
    """Return the row's first n samples (None: all), in order. Raises RequestError if the row cannot be answered.

    text: the target's tokenizer; without one, only prompt_token_ids without `stop` and `bad_words` can be answered.
    """
    return _sequences(row, config, tokenizer, range(num_samples(row, config) if n is None else n))


def sequence_of(row: RequestRow, config: JobConfig, tokenizer: Tokenizer | None, sample_index: int) -> Sequence:
    """Return one sample of the row. Raises as sequences_of does."""
    [sequence] = _sequences(row, config, tokenizer, [sample_index])
    return sequence


def turn_request(row: RequestRow, answers: list[str | None]) -> RequestRow:
    """Return the request of the next turn of a conversation. answers: those of all earlier turns."""
    return row | {"turn_index": len(answers), "answers": answers}


def turn_index_of(row: RequestRow) -> int:
    """Return the turn of a request that turn_request made; 0 for any other."""
    return row.get("turn_index", 0)


def _sequences(
    row: RequestRow, config: JobConfig, tokenizer: Tokenizer | None, samples: Iterable[int]
) -> list[Sequence]:
    if row["error_code"] is not None:
        raise RequestError(row["error_code"], row["error_message"])
    chat_options = chat_options_of(row, config)
    prompt_ids, stops = prompt_ids_of(row, tokenizer, chat_options), stop_strings(row, config)
    values = sampling_values(row, config)
    controls, options = controls_of(values, tokenizer), text_options(values)
    grammar = answer_grammar(values, chat_options if is_chat(row) else None, tokenizer, prompt_ids)
    return [
        Sequence(
            request_id=f"{row['request_id']}/{j}",
            prompt_ids=prompt_ids,
            sampling=_sampling_params(values, controls, grammar, seed_of(row, config.seed, j)),
            category=str(row.get(CATEGORY)),
            stop_check=_require_tokenizer(tokenizer, "stop").stop_check(stops, options) if stops else None,
        )
        for j in samples
    ]


def message_of(row: RequestRow, error: RequestError) -> str:
    """Return the row's error message after its location; errors of the reader have the location already."""
    return str(error) if row["error_code"] else f"{location_text(row)}: {error}"


def stop_strings(row: RequestRow, config: JobConfig) -> list[str]:
    return config.sampling.stop if row["stop"] is None else row["stop"]


def messages_of(row: RequestRow) -> str | None:
    """Return the row's messages as JSON: those of a conversation up to the user's turn. None for other prompts."""
    if row.get("user_turns") is None:
        return row["messages"]
    messages = []
    for turn, answer in zip(row["user_turns"], [*row.get("answers", []), None], strict=False):
        messages.append({"role": "user", "content": turn})
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
    return json.dumps(messages, ensure_ascii=False)


def sampling_values(row: RequestRow, config: JobConfig) -> dict[str, Any]:
    """Return the row's sampling values: the job's, overridden by the row's columns; without n, stop and seed."""
    names = (*SAMPLING_COLUMNS, *OTHER_COLUMNS)
    overrides = {name: row[name] for name in names if row[name] is not None}
    if "logit_bias" in overrides:
        overrides["logit_bias"] = dict(overrides["logit_bias"])
    return merged_values(config.sampling.model_dump(include=set(names)), overrides)


def text_options_of(row: RequestRow, config: JobConfig) -> TextOptions:
    """Return how the row's output ids become text."""
    return text_options(sampling_values(row, config))


def controls_json(row: RequestRow, config: JobConfig) -> str | None:
    """Return the row's values of OTHER_COLUMNS that are not at their defaults, as JSON; None if all are."""
    values = sampling_values(row, config)
    defaults = SamplingConfig()
    own = {name: values[name] for name in OTHER_COLUMNS if (values[name] or None) != (getattr(defaults, name) or None)}
    return json.dumps(own, ensure_ascii=False) if own else None


def prompt_ids_of(row: RequestRow, tokenizer: Tokenizer | None, options: ChatOptions) -> list[int]:
    if row["prompt_token_ids"] is not None:
        return row["prompt_token_ids"]
    if (messages := messages_of(row)) is not None:
        return _require_tokenizer(tokenizer, "messages").encode_chat(template_messages(messages), options)
    return _require_tokenizer(tokenizer, "prompt").encode(row["prompt"])


def prompt_text_of(row: RequestRow, config: JobConfig, tokenizer: Tokenizer | None) -> str | None:
    """Return the prompt as the model reads it: messages through the chat template; None for token ids."""
    if (messages := messages_of(row)) is not None and tokenizer is not None:
        return tokenizer.render_chat(template_messages(messages), options=chat_options_of(row, config))
    return row["prompt"]


def seed_of(row: RequestRow, run_seed: int, sample_index: int) -> int:
    """Return the key of one sample's noise: from the row's own seed, or from the run's seed and the row's id.

    Each turn of a conversation has a key of its own.
    """
    turn = turn_index_of(row)
    if row["seed"] is not None:
        return sample_seed(row["seed"], turn * MAX_SAMPLES + sample_index)
    key = f"{run_seed}\x1f{row['request_id']}\x1f{sample_index}{f'{chr(0x1F)}{turn}' if turn else ''}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def _sampling_params(
    values: dict[str, Any], controls: Controls | None, grammar: GrammarSpec | None, seed: int
) -> SamplingParams:
    for name in ("top_logprobs", "prompt_logprobs"):
        if values[name] and not values["logprobs"]:
            raise RequestError("invalid_sampling", f"{name}: only with logprobs. Set logprobs to true")
    own = {name: values[name] for name in SAMPLING_COLUMNS}
    try:
        stops = tuple(values["stop_token_ids"])
        return SamplingParams(**own, seed=seed, stop_token_ids=stops, controls=controls, grammar=grammar)
    except ValueError as error:
        raise RequestError("invalid_sampling", str(error)) from None


def _require_tokenizer(tokenizer: Tokenizer | None, column: str) -> Tokenizer:
    if tokenizer is None:
        raise RequestError("no_tokenizer", f"the target has no tokenizer, so {column!r} cannot be used: give token ids")
    return tokenizer
