"""Bounds of sampling parameters that the configuration, the HTTP endpoint and the engine share."""

from __future__ import annotations

# A token is picked by logit / temperature + Gumbel noise, in fp32. Noise reaches about 22, where fp32 steps are 2e-6: at
# temperature 100 logits still count in steps of 2e-4, and a lead of 30 logits makes a token 1.35 times as probable.
# Far above it the logits round away, and what is left is noise over the whole vocabulary.
MAX_TEMPERATURE = 100.0
