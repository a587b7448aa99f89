"""Attention's special cases, against the plain formula."""

import pytest
import torch

from eagle_ray.attention import metadata
from eagle_ray.attention.metadata import AttentionParams, causal_attention, masked_attention


@pytest.mark.parametrize("num_nodes", [1, 2, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_bf16_attention_is_fp32_attention_within_rounding(num_nodes, masked):
    """One row on its own takes another road."""
    torch.manual_seed(0)
    query, keys, values = torch.randn(3, 4, num_nodes, 16), torch.randn(3, 4, 20, 16), torch.randn(3, 4, 20, 16)
    mask = torch.zeros(3, 1, num_nodes, 20)
    mask[1, ..., 5:] = torch.finfo(torch.bfloat16).min
    mask = mask if masked else None
    scores = query @ keys.transpose(2, 3) / 4 + (0 if mask is None else mask)
    exact = scores.softmax(-1) @ values
    narrow = [None if x is None else x.bfloat16() for x in (query, keys, values, mask)]
    out = masked_attention(*narrow, AttentionParams(0, scaling=0.25))
    assert out.shape == exact.shape
    assert (out - exact).abs().max() < 2e-2


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("num_rows", [40, 23])
@pytest.mark.parametrize("softcap, sinks", [(None, False), (5.0, False), (None, True)])
def test_scores_of_a_prompt_are_made_for_few_rows_at_a_time(num_rows, softcap, sinks, window, monkeypatch):
    torch.manual_seed(0)
    query, keys, values = torch.randn(1, 4, num_rows, 8), torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8)
    attention = AttentionParams(0, 0.3, window, softcap, torch.randn(4) if sinks else None)
    whole, sizes, masked = causal_attention(query, keys, values, attention), [], metadata.masked_attention
    monkeypatch.setattr(metadata, "MAX_SCORES", 4 * 40 * 6)
    monkeypatch.setattr(
        metadata, "masked_attention", lambda q, k, *x: sizes.append(2 * q.shape[2] * k.shape[2]) or masked(q, k, *x)
    )
    torch.testing.assert_close(causal_attention(query, keys, values, attention), whole)
    assert max(sizes, default=0) <= 4 * 40 * 6
