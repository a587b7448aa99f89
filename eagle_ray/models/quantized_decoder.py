"""Run all layers of a quantised Llama-shaped model on a CPU in one call, instead of nine calls a layer from Python.

    layers = QuantizedLayers([QuantizedLayer(...), ...])
    delta, taps = layers(hidden, rotary, layout, feature_layers=[2, 15])

The same functions of the same library compute the same bits as layer by layer (kernels/quantized_layers.cpp).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from eagle_ray.attention.cpu_attention import CpuMetadata
from eagle_ray.attention.metadata import AttentionShape, Rotary
from eagle_ray.kernels import cpu_ops
from eagle_ray.kernels.cpu_ops import DecoderLayer, LayerScratch, address
from eagle_ray.kv.kv_cache import KVCache
from eagle_ray.models.quantized_linear import QuantizedLinear

PROJECTIONS = ("qkv", "output", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """The parts of one decoder layer. Norms are weights of RMSNorms, each with its epsilon."""

    qkv: QuantizedLinear
    output: QuantizedLinear
    gate_up: QuantizedLinear
    down: QuantizedLinear
    input_norm: Float[Tensor, " H"]
    input_eps: float
    post_norm: Float[Tensor, " H"]
    post_eps: float
    shape: AttentionShape

    @property
    def is_runnable(self) -> bool:
        """Return whether the call computes this layer: in fp32, with inputs in their own order."""
        projections: list[QuantizedLinear] = [getattr(self, name) for name in PROJECTIONS]
        return all(projection.dtype is torch.float32 and projection.order is None for projection in projections)


class QuantizedLayers:
    """The layers of a model, each with `is_runnable`, and of one shape but for their windows."""

    def __init__(self, layers: Sequence[QuantizedLayer]):
        self.layers = list(layers)  # which own what the structures point to
        self._structures = (DecoderLayer * len(layers))(*map(_structure, layers))
        self._cache: KVCache | None = None

    def __call__(
        self,
        hidden: Float[Tensor, "R H"],
        rotary: Rotary,
        layout: CpuMetadata,
        feature_layers: Sequence[int] | None = None,
    ) -> tuple[Float[Tensor, "R H"], dict[int, Float[Tensor, "R H"]]]:
        """Run the layers over rows whose embeddings are overwritten by the sum of all layers but the last.

        Returns what the last layer adds to it, and the inputs of feature_layers.
        """
        taps = {layer: torch.empty_like(hidden) for layer in feature_layers or ()}
        self._point_to(layout.cache)
        seen = [layout.seen(layer.shape.window) for layer in self.layers]
        for i, (structure, rows) in enumerate(zip(self._structures, seen, strict=True)):
            structure.rows = rows.descriptor_address
            structure.tap = address(taps.get(i))

        first = self.layers[0]
        shape = first.shape
        widths = {"normed": hidden.shape[1], "qkv": first.qkv.out_features, "attended": shape.heads * shape.head_dim}
        widths |= {"gate_up": first.gate_up.out_features, "activated": first.down.in_features}
        room = {name: hidden.new_empty(len(hidden), width) for name, width in widths.items()}
        delta = torch.empty_like(hidden)
        tensors = {"cells": layout.slot_mapping, "cosine": rotary.cosine, "sine": rotary.sine, "hidden": hidden}
        tensors |= room | {"delta": delta}
        assert all(tensor.is_contiguous() for tensor in tensors.values())
        scratch = LayerScratch(
            rows=len(hidden),
            hidden_size=hidden.shape[1],
            inner_size=widths["activated"],
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        )
        cpu_ops.quantized_layers(self._structures, scratch, shape.heads, shape.kv_heads, shape.head_dim, shape.scaling)
        return delta, taps

    def _point_to(self, cache: KVCache) -> None:
        if self._cache is cache:
            return
        for layer, structure in zip(self.layers, self._structures, strict=True):
            keys, values = cache.layer(layer.shape.layer)
            structure.keys, structure.values = keys.data_ptr(), values.data_ptr()
            structure.has_bf16_cache = keys.dtype is torch.bfloat16
        self._cache = cache


def _structure(layer: QuantizedLayer) -> DecoderLayer:
    structure = DecoderLayer(input_eps=layer.input_eps, post_eps=layer.post_eps, head_eps=layer.shape.norm_eps)
    for name in PROJECTIONS:
        projection: QuantizedLinear = getattr(layer, name)
        part = getattr(structure, name)
        part.weight, part.bias = ctypes.addressof(projection.packed.descriptor), address(projection.bias)
    norms: dict[str, Tensor | None] = {"input_norm": layer.input_norm, "post_norm": layer.post_norm}
    norms |= {"q_norm": layer.shape.q_norm, "k_norm": layer.shape.k_norm}
    for name, norm in norms.items():
        setattr(structure, name, address(norm))
    return structure
