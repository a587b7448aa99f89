"""Attention's special cases, against the plain formula."""

import pytest
import torch

from eagle_ray.attention.metadata import AttentionParams, masked_attention


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
