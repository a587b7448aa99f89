"""Quantised weights of checkpoints, against the values of slow readers."""

import pytest
import torch

from eagle_ray.models.quantized_linear import Fp8Weight, QuantizedWeight


def weight(order: torch.Tensor | None = None) -> QuantizedWeight:
    codes = torch.arange(24, dtype=torch.uint8).reshape(3, 8) % 16
    scale = torch.tensor([[1.0, 100.0]]).repeat(3, 1)
    return QuantizedWeight(codes, scale, torch.zeros(3, 2), 4, order)


def test_an_order_says_which_input_each_code_belongs_to():
    order = torch.tensor([3, 1, 0, 2, 7, 6, 5, 4])
    inputs = torch.arange(8.0)
    found = weight(order)
    torch.testing.assert_close(found.dequantize() @ inputs, weight().dequantize() @ inputs[order])
    assert torch.equal(found.rows(torch.tensor([2, 0])).dequantize(), found.dequantize()[[2, 0]])
    assert torch.equal(QuantizedWeight.cat([found, found]).dequantize(), torch.cat([found.dequantize()] * 2))


def test_weights_of_different_orders_are_not_joined():
    with pytest.raises(ValueError, match="different orders"):
        QuantizedWeight.cat([weight(), weight(torch.arange(8))])


def test_an_fp8_weight_is_scaled_by_output_or_as_a_whole():
    values = torch.tensor([[1.0, -2.0], [0.5, 448.0]]).to(torch.float8_e4m3fn)
    assert Fp8Weight(values, torch.tensor([[2.0], [4.0]])).dequantize().tolist() == [[2.0, -4.0], [2.0, 1792.0]]
    assert Fp8Weight(values, torch.tensor([[2.0]])).dequantize().tolist() == [[2.0, -4.0], [1.0, 896.0]]
