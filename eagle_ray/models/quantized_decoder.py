"""Run all layers of a quantised Llama-shaped model on a CPU in one call, instead of nine calls a layer from Python.

    layers = QuantizedLayers([QuantizedLayer(...), ...], norm, eps)
    normed, features = layers(hidden, rotary, layout, feature_layers=[2, 15])

The bits are those of running layer by layer, since both use the same C++ functions
(kernels/quantized_layers.cpp).
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
from eagle_ray.kernels.cpu_ops import AttentionHeads, DecoderLayer, PassRows, SeenRows, address
from eagle_ray.kv.kv_cache import KVCache
from eagle_ray.models.quantized_linear import QuantizedLinear

LAYER_PROJECTIONS = ("qkv", "output", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """The weights of one decoder layer. Each norm is an RMSNorm's weight and epsilon."""

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
        """Return whether the C++ call supports this layer: in fp32, with inputs in their original order."""
        projections: list[QuantizedLinear] = [getattr(self, name) for name in LAYER_PROJECTIONS]
        return all(
            projection.dtype is torch.float32 and projection.order is None
            for projection in projections
        )


class QuantizedLayers:
    """The layers of a model, run in one call. All must be runnable and of one shape, except for their windows.

    Args:
        norm: weight and epsilon of the RMSNorm behind the last layer.
    """

    def __init__(self, layers: Sequence[QuantizedLayer], norm: Float[Tensor, " H"], eps: float):
        self.layers = list(layers)  # which own what the structures point to
        self._norm = norm
        self._eps = eps
        self._structures = (DecoderLayer * len(layers))(*map(_structure, layers))
        # What rows see through each window: all layers of a window point to one structure.
        self._seen = {layer.shape.window: SeenRows() for layer in layers}
        for layer, structure in zip(self.layers, self._structures, strict=True):
            structure.rows = ctypes.addressof(self._seen[layer.shape.window])
        self._heads = _heads(layers[0].shape)
        self._cache: KVCache | None = None

    def __call__(
        self,
        hidden: Float[Tensor, "R H"],
        rotary: Rotary,
        layout: CpuMetadata,
        feature_layers: Sequence[int] = (),
    ) -> tuple[Float[Tensor, "R H"], Float[Tensor, "R F"]]:
        """Run the layers over rows whose embeddings are overwritten by the sum of all layers.

        Returns the norm of the sum, and the inputs of feature_layers side by side.
        """
        self._point_to(layout.cache)
        lasting = [layout.seen(window) for window in self._seen]
        for structure, seen in zip(self._seen.values(), lasting, strict=True):
            ctypes.pointer(structure)[0] = seen.descriptor

        num_rows, hidden_size = hidden.shape
        tapped = list(dict.fromkeys(feature_layers))  # a shallow model's may be named twice
        features = hidden.new_empty(num_rows, hidden_size * len(tapped))
        for i, layer in enumerate(tapped):
            self._structures[layer].tap = features[:, i * hidden_size :].data_ptr()

        normed = torch.empty_like(hidden)
        tensors = (layout.slot_mapping, rotary.cosine, rotary.sine, hidden, normed, self._norm)
        assert all(tensor.is_contiguous() for tensor in tensors)
        pointers = (tensor.data_ptr() for tensor in tensors)
        rows = PassRows(num_rows, hidden_size, features.shape[1], *pointers, self._eps)
        cpu_ops.quantized_layers(self._structures, rows, self._heads)
        for layer in tapped:
            self._structures[layer].tap = None
        if len(tapped) < len(feature_layers):
            parts = features.split(hidden_size, 1)
            features = torch.cat([parts[tapped.index(layer)] for layer in feature_layers], 1)
        return normed, features

    def _point_to(self, cache: KVCache) -> None:
        if self._cache is cache:
            return
        for layer, structure in zip(self.layers, self._structures, strict=True):
            keys, values = cache.layer(layer.shape.layer)
            structure.keys = keys.data_ptr()
            structure.values = values.data_ptr()
            structure.has_bf16_cache = keys.dtype is torch.bfloat16
        self._cache = cache


def _structure(layer: QuantizedLayer) -> DecoderLayer:
    structure = DecoderLayer(
        input_eps=layer.input_eps, post_eps=layer.post_eps, head_eps=layer.shape.norm_eps
    )
    for name in LAYER_PROJECTIONS:
        projection: QuantizedLinear = getattr(layer, name)
        part = getattr(structure, name)
        part.weight = ctypes.addressof(projection.packed.descriptor)
        part.bias = address(projection.bias)
    norms: dict[str, Tensor | None] = {"input_norm": layer.input_norm, "post_norm": layer.post_norm}
    norms |= {"q_norm": layer.shape.q_norm, "k_norm": layer.shape.k_norm}
    for name, norm in norms.items():
        setattr(structure, name, address(norm))
    return structure


def _heads(shape: AttentionShape) -> AttentionHeads:
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return AttentionHeads(
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        key_dim=shape.head_dim,
        value_dim=shape.head_dim,
        row_stride=width,
        head_stride=shape.head_dim,
        scaling=shape.scaling,
    )
