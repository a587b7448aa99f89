"""Read an endpoint's response: into columns of an output row, or into a Failed that says whether a retry may help.

read_answer(200, {"choices": [...], "usage": {...}})     # Answered(columns={"text": "Paris.", ...}, usage=...)
read_answer(429, {"error": {"code": "insufficient_quota"}})     # raises Failed("insufficient_quota", ...)
"""

from __future__ import annotations

import email.utils
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eagle_ray.config.engine_section import PriceConfig
from eagle_ray.core.errors import shortened
from eagle_ray.core.json_text import dump_json
from eagle_ray.requests.answers import TokenUsage

Json = dict[str, Any]
# Kinds of failures that may pass, by the key of engine.attempts that counts them.
LIMITED = "limited"
FAILED = "failed"
INVALID = "invalid"
# Kinds that end a row.
CONTEXT_TOO_LONG = "context_too_long"
BAD_REQUEST = "bad_request"
CONTENT_FILTERED = "content_filtered"
REFUSAL = "refused"
INVALID_FORM = "invalid_form"
ENDPOINT_FAILED = "endpoint_failed"
# Kinds that stop the job, and what to do about them.
BAD_KEY = "bad_key"
NO_QUOTA = "insufficient_quota"
UNKNOWN_MODEL = "unknown_model"
GONE = "endpoint_gone"
CAP = "max_dollars"
STOPS = {
    BAD_KEY: "Check engine.api_key_env or engine.api_key_file",
    NO_QUOTA: "Add credit to the account",
    UNKNOWN_MODEL: "Check engine.model and engine.base_url",
    GONE: "Check that the endpoint runs",
    CAP: "Set engine.max_dollars to more",
}
MAX_TEXT = 300  # characters of an endpoint's own words
_TOO_LONG = re.compile(
    r"context.{0,20}length|maximum context|too (long|many tokens)|context_length_exceeded"
    r"|exceed\w* .{0,40}(context|max_model_len|tokens)|longer than the maximum",
    re.IGNORECASE,
)
_FILTERED = re.compile(r"content.?(filter|policy)|moderation|ResponsibleAI", re.IGNORECASE)
_QUOTA = re.compile(
    r"insufficient.?(quota|credits|funds|balance)|billing|payment required|exceeded your current quota",
    re.IGNORECASE,
)
_NO_MODEL = re.compile(
    r"model.{0,80}(not (found|exist)|does ?n.t exist|unknown)|model_not_found|no such model", re.I
)
_LIMIT = re.compile(r"rate.?limit|too many requests|overloaded|throttl|capacity", re.IGNORECASE)
_WAIT_FORM = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:([\d.]+)s)?(?:([\d.]+)ms)?")


class Failed(Exception):
    """An attempt at a request that gave no answer.

    Attributes:
        kind: LIMITED, FAILED or INVALID if another attempt may succeed; else the kind of the final
            error.
        retry_after_s: seconds that the endpoint asks to wait, if it does.
        usage: tokens that were generated nevertheless.
        may_be_paid: whether the request was sent without a response, so that its cost is unknown.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        retry_after_s: float | None = None,
        usage: TokenUsage | None = None,
        columns: Mapping[str, Any] | None = None,
        may_be_paid: bool = False,
    ):
        super().__init__(message)
        self.kind = kind
        self.retry_after_s = retry_after_s
        self.usage = usage
        self.columns = dict(columns or {})
        self.may_be_paid = may_be_paid


@dataclass(frozen=True, slots=True)
class Answered:
    """A good answer: the columns of its output row, and its usage, which is None if the endpoint does not report it."""

    columns: dict[str, Any]
    usage: TokenUsage | None


def read_answer(status: int, content: bytes, headers: Mapping[str, str], now: float) -> Answered:
    """Return the answer of a response. Raises Failed.

    Args:
        now: current Unix time, to interpret a date in Retry-After.
    """
    body = good_body(status, content, headers, now, lambda body: _choice_of(body) is not None)
    return _answered(body)


def good_body(
    status: int,
    content: bytes,
    headers: Mapping[str, str],
    now: float,
    is_answer: Callable[[Json], bool],
) -> Json:
    """Return the body of a successful response. Raises Failed for any other response.

    Args:
        is_answer: returns whether a body without an error is an answer.
    """
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        body = None
    wait = retry_after(headers, now)
    if status != 200:
        raise _failure_of(status, _words(body, content), wait)
    if not isinstance(body, dict):
        raise Failed(FAILED, f"the answer is not JSON: {_shown(content)}")
    if body.get("error"):
        raise _failure_of(_status_of(body), _words(body, content), wait)
    if not is_answer(body):
        raise Failed(FAILED, f"the answer has nothing of what was asked for: {_shown(content)}")
    return body


def token_usage(body: Json) -> TokenUsage | None:
    """Return the token counts of a response; None if it reports none."""
    return TokenUsage.of_body(body) if isinstance(body.get("usage"), dict) else None


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Return the seconds of Retry-After, which has a number or a date; None if missing or unreadable."""
    text = headers.get("retry-after-ms")
    if text is not None and (milliseconds := _number(text)) is not None:
        return milliseconds / 1000
    text = headers.get("retry-after")
    if text is None:
        return None
    if (seconds := _number(text)) is not None:
        return max(0.0, seconds)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - now)
    except (TypeError, ValueError):
        return None


def limit_headers(headers: Mapping[str, str], now: float) -> tuple[float, float] | None:
    """Return from x-ratelimit headers how many requests may follow and the seconds until more may;
    None if not reported."""
    remaining = _number(headers.get("x-ratelimit-remaining-requests", ""))
    if remaining is None:
        remaining = _number(headers.get("x-ratelimit-remaining", ""))
    reset = headers.get("x-ratelimit-reset-requests", headers.get("x-ratelimit-reset", ""))
    seconds = duration_s(reset, now)
    return None if remaining is None or seconds is None else (remaining, seconds)


def duration_s(text: str, now: float) -> float | None:
    """Parse the seconds of a text such as 6m0s, 20ms, 1.5 or a Unix time in seconds or milliseconds."""
    if (number := _number(text)) is not None:
        if number > 1e11:
            number /= 1000
        return max(0.0, number - now) if number > 1e8 else number
    match = _WAIT_FORM.fullmatch(text)
    if not text or match is None:
        return None
    hours, minutes, seconds, milliseconds = (float(group or 0) for group in match.groups())
    return hours * 3600 + minutes * 60 + seconds + milliseconds / 1000


def dollars_of(usage: TokenUsage, price: PriceConfig) -> float:
    """Return the price of an attempt."""
    cached = price.input if price.cached is None else price.cached
    fresh = usage.prompt - usage.cached
    return (fresh * price.input + usage.cached * cached + usage.output * price.output) / 1e6


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _choice_of(body: Json) -> Json | None:
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return None
    choice: Json = choices[0]
    return None if choice.get("error") else choice


def _answered(body: Json) -> Answered:
    choice = _choice_of(body)
    assert choice is not None, "read_answer looks at it"
    usage = token_usage(body)
    columns = _text_columns(choice) | _token_columns(choice, body)
    columns |= {
        "served_model": body.get("model"),
        "system_fingerprint": body.get("system_fingerprint"),
        "provider_request_id": body.get("id"),
        **_acceptance(body),
    }
    if usage is not None:
        columns |= {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.output,
            "cached_prompt_tokens": usage.cached,
            "reasoning_tokens": usage.reasoning,
        }
    reason = columns["finish_reason"]
    if reason == "content_filter":
        raise Failed(CONTENT_FILTERED, "the endpoint filtered the answer", None, usage, columns)
    if columns["refusal"]:
        words = f"the model refused: {shortened(columns['refusal'], MAX_TEXT)}"
        raise Failed(REFUSAL, words, None, usage, columns)
    return Answered(columns, usage)


def _text_columns(choice: Json) -> Json:
    message = choice.get("message")
    reason = choice.get("finish_reason")
    if not isinstance(message, dict):
        text = choice.get("text")
        return {"text": text or "", "finish_reason": reason, "refusal": None}
    content = message.get("content")
    calls = message.get("tool_calls")
    return {
        "text": content or "",
        "content": content,
        "reasoning_content": message.get("reasoning_content") or message.get("reasoning"),
        "tool_calls": dump_json(calls, ensure_ascii=False) if calls else None,
        "finish_reason": reason,
        "refusal": message.get("refusal"),
    }


def _token_columns(choice: Json, body: Json) -> Json:
    columns: Json = {"output_token_ids": choice.get("token_ids")}
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return columns
    if isinstance(logprobs.get("content"), list):
        values = [each["logprob"] for each in logprobs["content"]]
        tops = [each.get("top_logprobs") or [] for each in logprobs["content"]]
        alternatives = [[(one["token"], one["logprob"]) for one in top] for top in tops]
    else:
        values = logprobs.get("token_logprobs") or []
        alternatives = [list((top or {}).items()) for top in logprobs.get("top_logprobs") or []]
    columns["token_logprobs"] = values
    columns["cumulative_logprob"] = sum(values)
    if any(alternatives) and all(_has_ids(top) for top in alternatives):
        columns["token_top_logprobs"] = [
            [{"token_id": int(token.partition(":")[2]), "logprob": value} for token, value in top]
            for top in alternatives
        ]
    return columns


def _has_ids(top: list[tuple[str, float]]) -> bool:
    """Return whether these tokens are ids in vLLM's form, such as token_id:17."""
    return all(token.startswith("token_id:") for token, _ in top)


ACCEPTANCE = (
    "num_spec_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "num_spec_tokens",
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "acceptance_histogram",
)


def _acceptance(body: Json) -> Json:
    """Return the columns of acceptance: vLLM's names are ours, and SGLang's are written as them."""
    metrics = body.get("metrics") or {}
    summary = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if isinstance(summary, dict):
        return {name: summary.get(name) for name in ACCEPTANCE}
    details = (body.get("sglext") or {}).get("spec_tokens_details")
    if not isinstance(details, dict) or not details.get("spec_verify_ct"):
        return {}
    steps = details["spec_verify_ct"]
    accepted = details.get("spec_num_correct_drafts") or 0
    proposed = details.get("spec_num_proposed_drafts") or 0
    return {
        "num_spec_steps": steps,
        "num_draft_tokens": proposed,
        "num_accepted_draft_tokens": accepted,
        "mean_acceptance_length": 1 + accepted / steps,
        "draft_acceptance_rate": accepted / proposed if proposed else None,
        "acceptance_histogram": details.get("histogram"),
    }


def _status_of(body: Json) -> int:
    """Return the status that an error in a body of status 200 stands for; 500 if it has none."""
    error = body["error"]
    code = error.get("code", error.get("status")) if isinstance(error, dict) else None
    if isinstance(code, str) and code.isdecimal():
        code = int(code)
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def _words(body: Any, content: bytes) -> str:
    """Return an error's own words and codes."""
    error = body.get("error", body) if isinstance(body, dict) else None
    if isinstance(error, str):
        return shortened(error, MAX_TEXT)
    if not isinstance(error, dict):
        return _shown(content)
    parts = [error.get("message"), error.get("detail"), error.get("code"), error.get("type")]
    words = ", ".join(str(part) for part in parts if part)
    return shortened(words or _shown(content), MAX_TEXT)


def _shown(content: bytes) -> str:
    return shortened(" ".join(content.decode("utf-8", "replace").split()), MAX_TEXT)


def _failure_of(status: int, words: str, wait: float | None) -> Failed:
    text = f"HTTP {status}: {words}"
    if status == 402 or (status in (403, 429) and _QUOTA.search(words)):
        return Failed(NO_QUOTA, text)
    if status in (401, 403):
        return Failed(BAD_KEY, text)
    if status == 429 or status == 529 or (status == 503 and wait is not None):
        return Failed(LIMITED, text, wait)
    if status in (500, 503) and _LIMIT.search(words):
        return Failed(LIMITED, text, wait)
    if status == 404 or (status == 400 and _NO_MODEL.search(words)):
        return Failed(UNKNOWN_MODEL, text)
    if status in (400, 413, 422):
        if _TOO_LONG.search(words):
            return Failed(CONTEXT_TOO_LONG, text)
        return Failed(CONTENT_FILTERED if _FILTERED.search(words) else BAD_REQUEST, text)
    if status in (405, 406, 410, 415, 451):
        return Failed(BAD_REQUEST, text)
    return Failed(FAILED, text, wait)
