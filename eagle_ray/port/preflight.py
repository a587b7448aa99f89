"""Send one real row to an endpoint before a job, and report what its answer contains and lacks.

preflight(request, config, target)
# ["answer   12 output tokens of 3 prompt tokens, finish_reason stop", "returned usage, system_fingerprint", ...]
"""

from __future__ import annotations

import time
from typing import Any

import httpx2

from eagle_ray.config import JobConfig
from eagle_ray.config.engine_section import PriceConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.port.dialects import is_scored_by_prompt
from eagle_ray.port.endpoint_answers import Answered, Failed, dollars_of
from eagle_ray.port.http_request import HttpRequest, sample_request
from eagle_ray.port.http_target import Target
from eagle_ray.port.prices import describe_price
from eagle_ray.requests.request import Request

# What an answer may have, by a column that shows it.
PARTS = {
    "token ids": "output_token_ids",
    "log-probabilities": "token_logprobs",
    "reasoning": "reasoning_content",
    "tool calls": "tool_calls",
    "system_fingerprint": "system_fingerprint",
    "acceptance of drafts": "num_spec_steps",
}


def preflight(request: Request, config: JobConfig, target: Target) -> list[str]:
    """Send one row as the job would, and return report lines on its answer. Raises ConfigError if
    there is none, RequestError."""
    sent = first_request(request, config, target)
    if sent is None:
        return ["answer   none: every continuation of the first row is empty"]
    url = sent.url(target.urls[0])
    headers = {**target.key.headers, "content-type": "application/json"}
    try:
        response = httpx2.post(
            url, content=sent.content, headers=headers, timeout=config.engine.timeout_s
        )
        answered = sent.read(response.status_code, response.content, response.headers, time.time())
    except httpx2.HTTPError as error:
        words = target.key.hidden_in(f"{type(error).__name__}: {error}")
        raise ConfigError(f"engine.base_url: {url} does not answer ({words})") from None
    except Failed as failed:
        words = target.key.hidden_in(str(failed))
        raise ConfigError(
            f"engine: the first row was not answered ({failed.kind}: {words}). Correct that first"
        ) from None
    return _lines(answered, config, sent.body, target.price)


def first_request(request: Request, config: JobConfig, target: Target) -> HttpRequest | None:
    """Return the first request of a row; None for a row that is scored without any. Raises
    ConfigError, RequestError."""
    if not is_scored_by_prompt(request.sampling_params(config), target.dialect):
        return sample_request(request, config, target.dialect, index=0)
    from eagle_ray.port.scored_row import ScoredRow, tokenizer_of  # transformers

    row = ScoredRow.of(request, config, target, tokenizer_of(config, target))
    return next(map(row.request_of, row.parts), None)


def _lines(
    answered: Answered, config: JobConfig, body: dict[str, Any], price: PriceConfig | None
) -> list[str]:
    columns = answered.columns
    usage = answered.usage
    if usage is None:
        tokens = "no usage, so neither tokens nor dollars are known"
    else:
        tokens = f"{usage.output} output tokens after {usage.prompt} prompt tokens"
    cost = "" if usage is None or price is None else f", {dollars_of(usage, price):.6f} dollars"
    if "log_probs" in columns:
        number = len(columns["log_probs"])
        return [f"answer   log-probabilities of {number} tokens after {tokens}{cost}"]
    has = [name for name, column in PARTS.items() if columns.get(column) is not None]
    lacks = [name for name in PARTS if name not in has]
    lines = [
        f"answer   {tokens}, finish_reason {columns['finish_reason']}{cost}",
        f"has      {', '.join(has) or 'nothing but a text'}",
        f"lacks    {', '.join(lacks) or 'nothing'}",
    ]
    limit = body.get("max_tokens") or body.get("max_completion_tokens")
    if usage is not None and limit is not None and usage.output > limit:
        lines.append(f"warning  max_tokens {limit} was not heeded: set engine.dialect")
    if price is not None and config.engine.price == "auto":
        lines.append(f"price    {describe_price(config.engine, price)}")
    return lines
