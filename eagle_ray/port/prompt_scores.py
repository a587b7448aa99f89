"""Request and read log-probabilities of prompt tokens in each dialect, by one table.

PROMPT_SCORES["vllm"].body([1, 5, 7], 2)       # {"prompt": [1, 5, 7], "prompt_logprobs": 1, ...}
PROMPT_SCORES["vllm"].read(answer, [1, 5, 7], 2)      # [(-0.25, True), (-3.0, False)], of the last two tokens

Prompts are token ids, so scores do not depend on the server's tokenization. llama.cpp's server has
no row: it refuses `echo` and returns log-probabilities of output tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from eagle_ray.port.endpoint_answers import (
    BAD_REQUEST,
    Answered,
    Failed,
    Json,
    good_body,
    token_usage,
)
from eagle_ray.requests.answers import TokenUsage

# The log-probability of a token, and whether no other one is likelier in its place.
TokenScore = tuple[float, bool]
TEXT_PATH = "/completions"
GENERATE_PATH = "/generate"


@dataclass(frozen=True, slots=True)
class PromptScores:
    """How prompt log-probabilities are requested and read in one dialect.

    Attributes:
        path: path behind the base URL; with is_native, behind that URL without its /v1.
        body: returns the body's fields, given the prompt's ids and how many of the last ones are
            scored.
        read: returns these tokens' scores from an answer. Raises IndexError, KeyError, TypeError or
            ValueError if the answer has another form.
        is_answer: returns whether a body is an answer.
        usage: returns the token counts of an answer.
        facts: returns columns that identify the server, from an answer.
    """

    path: str
    body: Callable[[Sequence[int], int], Json]
    read: Callable[[Json, Sequence[int], int], list[TokenScore]]
    is_answer: Callable[[Json], bool]
    usage: Callable[[Json], TokenUsage | None]
    facts: Callable[[Json], Json]
    is_native: bool = False


def read_scores(
    form: PromptScores,
    ids: Sequence[int],
    num_scored: int,
    status: int,
    content: bytes,
    headers: Mapping[str, str],
    now: float,
) -> Answered:
    """Return the scores of a prompt's last tokens as columns `log_probs` and `likeliest`. Raises Failed."""
    body = good_body(status, content, headers, now, form.is_answer)
    usage = form.usage(body)
    try:
        scores = form.read(body, ids, num_scored)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        words = f"the answer has no log-probabilities of the prompt's last {num_scored} tokens"
        raise Failed(
            BAD_REQUEST, f"{words} ({type(error).__name__}: {error})", usage=usage
        ) from None
    columns = form.facts(body) | {
        "log_probs": [log_prob for log_prob, _ in scores],
        "likeliest": [is_likeliest for _, is_likeliest in scores],
    }
    if usage is not None:
        columns["cached_prompt_tokens"] = usage.cached
        columns["prompt_tokens"] = usage.prompt
        columns["completion_tokens"] = usage.output
    return Answered(columns, usage)


def _vllm_body(ids: Sequence[int], num_scored: int) -> Json:
    return {"prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1}


def _vllm_scores(body: Json, ids: Sequence[int], num_scored: int) -> list[TokenScore]:
    positions = body["choices"][0]["prompt_logprobs"]
    _check_number(len(positions), len(ids))
    scores = []
    for token, entry in zip(ids[-num_scored:], positions[-num_scored:], strict=True):
        values = {int(other): one["logprob"] for other, one in entry.items()}
        scores.append(_score(values[token], values.values()))
    return scores


def _echo_body(max_tokens: int, ids: Sequence[int], num_scored: int) -> Json:
    return {
        "prompt": list(ids),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "echo": True,
        "logprobs": 1,
    }


def _echoed_scores(
    max_tokens: int, body: Json, ids: Sequence[int], num_scored: int
) -> list[TokenScore]:
    """Return the scores of an answer that repeats its prompt, perhaps with an output token behind it."""
    logprobs = body["choices"][0]["logprobs"]
    values = logprobs["token_logprobs"]
    tops = logprobs["top_logprobs"]
    num_output = min(max_tokens, max(0, len(values) - len(ids)))
    _check_number(len(values) - num_output, len(ids))
    first = len(ids) - num_scored
    positions = zip(values[first : len(ids)], tops[first : len(ids)], strict=True)
    return [_score(value, top.values()) for value, top in positions]


def _sglang_body(ids: Sequence[int], num_scored: int) -> Json:
    """Return the native form, which computes log-probabilities from one token before the scored ones on."""
    return {
        "input_ids": list(ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": len(ids) - num_scored - 1,
        "top_logprobs_num": 1,
    }


def _sglang_scores(body: Json, ids: Sequence[int], num_scored: int) -> list[TokenScore]:
    meta = body["meta_info"]
    values = meta["input_token_logprobs"][-num_scored:]
    tops = meta["input_top_logprobs"][-num_scored:]
    scored = [token for _, token, *_ in values]
    if scored != list(ids[-num_scored:]):
        raise ValueError(f"they are of tokens {scored}")
    return [
        _score(value, [other for other, *_ in top])
        for (value, *_), top in zip(values, tops, strict=True)
    ]


def _score(value: Any, others: Any) -> TokenScore:
    log_prob = float(value)
    return log_prob, log_prob >= max(map(float, others))


def _check_number(actual: int, expected: int) -> None:
    if actual != expected:
        raise ValueError(f"it has {actual} of a prompt of {expected}")


def _has_choices(body: Json) -> bool:
    choices = body.get("choices")
    return isinstance(choices, list) and bool(choices) and isinstance(choices[0], dict)


def _facts(body: Json) -> Json:
    return {
        "served_model": body.get("model"),
        "system_fingerprint": body.get("system_fingerprint"),
        "provider_request_id": body.get("id"),
    }


def _sglang_usage(body: Json) -> TokenUsage | None:
    meta = body["meta_info"]
    if "prompt_tokens" not in meta:
        return None
    return TokenUsage(
        meta["prompt_tokens"], meta.get("completion_tokens") or 0, meta.get("cached_tokens") or 0
    )


def _echo(max_tokens: int) -> PromptScores:
    return PromptScores(
        TEXT_PATH,
        partial(_echo_body, max_tokens),
        partial(_echoed_scores, max_tokens),
        _has_choices,
        token_usage,
        _facts,
    )


PROMPT_SCORES: Mapping[str, PromptScores] = {
    "openai": _echo(1),
    "compatible": _echo(1),  # of which some generate at least one token
    "vllm": PromptScores(TEXT_PATH, _vllm_body, _vllm_scores, _has_choices, token_usage, _facts),
    "sglang": PromptScores(
        GENERATE_PATH,
        _sglang_body,
        _sglang_scores,
        lambda body: isinstance(body.get("meta_info"), dict),
        _sglang_usage,
        lambda body: {"provider_request_id": body["meta_info"].get("id")},
        is_native=True,
    ),
    "eagle_ray": _echo(0),
}
