"""Bounds of sampling parameters that the configuration, the HTTP endpoint and the engine share."""

from __future__ import annotations

# A token is chosen by logit / temperature + Gumbel noise in fp32. Noise reaches 23, where fp32 has steps of 2e-6, so
# that 100 keeps logits apart that differ by 2e-4. Far above it they round away and only noise is left.
MAX_TEMPERATURE = 100.0

MAX_PENALTY = 2.0  # of presence_penalty and frequency_penalty, either sign; OpenAI's bound
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0  # a factor of logits; 1 is off
MAX_LOGIT_BIAS = 100.0  # either sign; OpenAI's bound
MAX_TOP_LOGPROBS = 20  # alternatives per token; OpenAI's bound

# What an output must be: at most one of these keys is set.
STRUCTURED_KEYS = ("json_schema", "json_object", "regex", "choice", "grammar", "response_format")
