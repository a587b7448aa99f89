"""Run Llama-shaped decoder layers over packed rows: our own forward for llama, mistral, qwen2 and qwen3, and
for mixtral, olmoe, qwen2_moe and qwen3_moe, whose MLP is in experts.py.

    decoder = Decoder.of(model, feature_layers)             # None for a model that transformers has to run
    hidden, features = decoder(tokens, positions, layout)   # rows of many sequences, [R, H] throughout

A layer is four matrix products and three small operations between them:

    normed = RMSNorm(hidden)               add_rms_norm, which adds the layer before first
    qkv    = normed @ W_qkv                one product for queries, keys and values
    out    = attend(rotate(qkv))           the layout writes keys and values to the cache and attends
    normed = RMSNorm(hidden += out @ W_o)
    hidden += (SiLU(gate) * up) @ W_down   where gate and up are one product too

Weights are those of the transformers modules: merged projections share their memory (`packed_linear`), so the module
tree stays what it was and serves as the oracle. The draft heads run on the same layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaModel,
    LlamaRotaryEmbedding,
)

from eagle_ray.attention.cpu_attention import CpuMetadata
from eagle_ray.attention.metadata import AttentionMetadata, AttentionShape, Rotary
from eagle_ray.kernels import cpu_ops, layer_ops
from eagle_ray.kernels.availability import use_triton
from eagle_ray.kernels.fp8 import ScaledRows
from eagle_ray.models.experts import Experts, is_moe_block, shared_expert_of
from eagle_ray.models.loader import decoder_layers
from eagle_ray.models.packed_linear import Projection, is_projection, merge_linears
from eagle_ray.models.quantized_decoder import QuantizedLayer, QuantizedLayers
from eagle_ray.models.quantized_linear import QuantizedLinear

CAUSAL_LMS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
MOE_CAUSAL_LMS = ("MixtralForCausalLM", "OlmoeForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
CONFIG_WINDOWS = ("MistralAttention", "MixtralAttention")  # whose window is in the config alone
ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
Rows = Tensor | ScaledRows  # what a projection reads


@runtime_checkable
class Norm(Protocol):
    """An RMSNorm module of transformers."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def variance_epsilon(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of one layer, between its norm and the residual.

    Attributes:
        row_norms: norms of all queries of a row, and of all its keys, as in OLMoE; empty if heads do (`shape`).
    """

    qkv: Projection
    output: Projection
    shape: AttentionShape
    row_norms: Sequence[Norm] = ()

    @classmethod
    def of(cls, module: nn.Module) -> Attention:
        """Build from a LlamaAttention, or from one that differs only in window, biases, or query and key norms."""
        attention = cast(LlamaAttention, module)
        window = getattr(module, "sliding_window", None)
        if type(module).__name__ in CONFIG_WINDOWS:
            window = getattr(attention.config, "sliding_window", None)
        norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
        row_norms: list[Norm] = [norm for norm in norms if norm is not None]
        if any(len(norm.weight) > attention.head_dim for norm in row_norms):
            norms = [None, None]
        else:
            row_norms = []
        heads = attention.config.num_attention_heads
        shape = AttentionShape(
            layer=attention.layer_idx,
            heads=heads,
            kv_heads=attention.config.num_key_value_heads or heads,
            head_dim=attention.head_dim,
            scaling=attention.scaling,
            window=window,
            q_norm=None if norms[0] is None else norms[0].weight,
            k_norm=None if norms[1] is None else norms[1].weight,
            norm_eps=0.0 if norms[0] is None else norms[0].variance_epsilon,
        )
        qkv = merge_linears([attention.q_proj, attention.k_proj, attention.v_proj])
        return cls(qkv, attention.o_proj, shape, row_norms)

    def __call__(self, normed: Rows, rotary: Rotary, layout: AttentionMetadata) -> Float[Tensor, "R H"]:
        qkv = self.qkv(normed)
        begin = 0
        for norm in self.row_norms:
            end = begin + len(norm.weight)
            qkv[:, begin:end] = normed_sum(layer_ops, qkv[:, begin:end].contiguous(), None, norm)
            begin = end
        return self.output(layout.attend_projected(qkv, rotary, self.shape))


@dataclass(frozen=True, slots=True)
class Mlp:
    """The gated MLP of one layer, between its norm and the residual. activation: silu_mul, as `down` reads it."""

    gate_up: Projection
    down: Projection
    activation: Callable[[Tensor], Rows]

    @classmethod
    def of(cls, module: nn.Module, ops: ModuleType) -> Mlp:
        """Build from a LlamaMLP, or from a module of the same parts."""
        mlp = cast(LlamaMLP, module)
        activation = layer_ops.silu_mul_fp8 if reads_fp8(mlp.down_proj) else ops.silu_mul
        return cls(merge_linears([mlp.gate_proj, mlp.up_proj]), mlp.down_proj, activation)

    @property
    def reader(self) -> Projection:
        """Return the projection that reads the norm."""
        return self.gate_up

    def __call__(self, normed: Rows) -> Float[Tensor, "R H"]:
        return self.down(self.activation(self.gate_up(normed)))


def mlp_of(module: nn.Module, ops: ModuleType) -> Mlp | Experts:
    """Build from the MLP of a decoder layer, dense or a mixture of experts."""
    if not is_moe_block(module):
        return Mlp.of(module, ops)
    shared = shared_expert_of(module)
    return Experts.of(module, ops, None if shared is None else Mlp.of(shared, ops))


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. input_norm is None in EAGLE-1's heads, which do not normalize their input."""

    attention: Attention
    mlp: Mlp | Experts
    input_norm: Norm | None
    post_norm: Norm
    ops: ModuleType

    @classmethod
    def of(cls, module: nn.Module, ops: ModuleType) -> Layer:
        """Build from a LlamaDecoderLayer, or from a layer of the same parts."""
        layer = cast(LlamaDecoderLayer, module)
        input_norm = layer.input_layernorm
        return cls(
            attention=Attention.of(layer.self_attn),
            mlp=mlp_of(layer.mlp, ops),
            input_norm=None if isinstance(input_norm, nn.Identity) else input_norm,
            post_norm=layer.post_attention_layernorm,
            ops=ops,
        )

    def normed_input(self, hidden: Float[Tensor, "R H"], delta: Float[Tensor, "R H"] | None) -> Rows:
        """Add delta to hidden in place and return the sum as the layer reads it."""
        if self.input_norm is None:
            return hidden if delta is None else hidden.add_(delta)
        return self._normed_sum(hidden, delta, self.input_norm, self.attention.qkv)

    def __call__(
        self, hidden: Float[Tensor, "R H"], normed: Rows, rotary: Rotary, layout: AttentionMetadata
    ) -> Float[Tensor, "R H"]:
        """Add the attention to hidden in place, and return the MLP's output."""
        out = self.attention(normed, rotary, layout)
        return self.mlp(self._normed_sum(hidden, out, self.post_norm, self.mlp.reader))

    def _normed_sum(
        self, hidden: Float[Tensor, "R H"], delta: Float[Tensor, "R H"] | None, norm: Norm, reader: Projection
    ) -> Rows:
        """Add delta to hidden in place and return the norm of the sum, as the projection `reader` reads it."""
        if reads_fp8(reader):
            return layer_ops.add_rms_norm_fp8(hidden, delta, norm.weight, norm.variance_epsilon)
        return normed_sum(self.ops, hidden, delta, norm)


class Decoder:
    """The embedding, the layers and the last norm of a causal LM.

    Args:
        feature_layers: layers whose inputs, one after the other, are a row's feature; None for the output itself.
    """

    def __init__(self, model: PreTrainedModel, feature_layers: Sequence[int] | None = None):
        base = cast(LlamaModel, model.base_model)
        self._embed = base.embed_tokens
        self._ops = ops_for(base.embed_tokens.weight)
        self.layers = [Layer.of(module, self._ops) for module in base.layers]
        self._norm: Norm = base.norm
        self._angles = Angles(base.rotary_emb)
        self._feature_layers = feature_layers
        self.quantized = layers_in_one_call(self.layers)

    @classmethod
    def of(cls, model: PreTrainedModel, feature_layers: Sequence[int] | None = None) -> Decoder | None:
        """Return the model's decoder, or None if transformers has to run it."""
        return cls(model, feature_layers) if is_llama_shaped(model) else None

    def routers(self) -> dict[int, int]:
        """Return Experts.checksum of each layer that has experts."""
        return {i: layer.mlp.checksum() for i, layer in enumerate(self.layers) if isinstance(layer.mlp, Experts)}

    def __call__(
        self, tokens: Int[Tensor, " R"], positions: Int[Tensor, " R"], layout: AttentionMetadata
    ) -> tuple[Float[Tensor, "R H"], Float[Tensor, "R F"]]:
        """Return each row's hidden state before the lm_head, and its feature."""
        return self.run(self._embed(tokens), positions, layout)

    def run(
        self, hidden: Float[Tensor, "R H"], positions: Int[Tensor, " R"], layout: AttentionMetadata
    ) -> tuple[Float[Tensor, "R H"], Float[Tensor, "R F"]]:
        """Run the layers from the rows' embeddings, which are overwritten."""
        rotary = self._angles(positions)
        delta, taps = self._run_layers(hidden, rotary, layout)
        out = normed_sum(self._ops, hidden, delta, self._norm)
        features = out if self._feature_layers is None else torch.cat([taps[i] for i in self._feature_layers], -1)
        return out, features

    def _run_layers(
        self, hidden: Float[Tensor, "R H"], rotary: Rotary, layout: AttentionMetadata
    ) -> tuple[Float[Tensor, "R H"] | None, dict[int, Float[Tensor, "R H"]]]:
        """Return what the last layer adds to hidden, and the inputs of the feature layers."""
        if self.quantized is not None and isinstance(layout, CpuMetadata):
            return self.quantized(hidden, rotary, layout, self._feature_layers)
        delta: Float[Tensor, "R H"] | None = None
        taps: dict[int, Float[Tensor, "R H"]] = {}
        for i, layer in enumerate(self.layers):
            normed = layer.normed_input(hidden, delta)
            if self._feature_layers is not None and i in self._feature_layers:
                taps[i] = hidden.clone()
            delta = layer(hidden, normed, rotary, layout)
        return delta, taps


def layers_in_one_call(layers: Sequence[Layer]) -> QuantizedLayers | None:
    """Return what runs the layers in one call, or None if one of them is not quantised for a CPU."""
    parts = [part for layer in layers if (part := _quantized_layer(layer)) is not None]
    return QuantizedLayers(parts) if len(parts) == len(layers) else None


def _quantized_layer(layer: Layer) -> QuantizedLayer | None:
    """Return the layer's parts if one call computes them."""
    if not isinstance(layer.mlp, Mlp):
        return None
    projections = [layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down]
    quantized = [projection for projection in projections if isinstance(projection, QuantizedLinear)]
    if len(quantized) < len(projections) or layer.input_norm is None or layer.ops is not cpu_ops:
        return None
    qkv, output, gate_up, down = quantized
    part = QuantizedLayer(
        qkv=qkv,
        output=output,
        gate_up=gate_up,
        down=down,
        input_norm=layer.input_norm.weight,
        input_eps=layer.input_norm.variance_epsilon,
        post_norm=layer.post_norm.weight,
        post_eps=layer.post_norm.variance_epsilon,
        shape=layer.attention.shape,
    )
    return part if part.is_runnable else None


class Angles:
    """Rotary angles of positions, from a rotary module of transformers with its scaled frequencies."""

    def __init__(self, module: nn.Module):
        rotary = cast(LlamaRotaryEmbedding, module)
        self._frequencies: Float[Tensor, " half"] = rotary.inv_freq.float()
        self._scale: float = rotary.attention_scaling

    def __call__(self, positions: Int[Tensor, " R"]) -> Rotary:
        angles = positions[:, None] * self._frequencies
        cosine, sine = angles.cos(), angles.sin()
        if self._scale != 1.0:
            cosine, sine = cosine * self._scale, sine * self._scale
        return Rotary(cosine, sine)


def normed_sum(
    ops: ModuleType, hidden: Float[Tensor, "R H"], delta: Float[Tensor, "R H"] | None, norm: Norm
) -> Float[Tensor, "R H"]:
    """Add delta to hidden in place and return the norm of the sum."""
    return ops.add_rms_norm(hidden, delta, norm.weight, norm.variance_epsilon)


def reads_fp8(projection: Projection | nn.Module) -> bool:
    """Return whether a projection reads ScaledRows, which the operation before it then returns."""
    return getattr(projection, "reads_fp8", False)


def ops_for(weight: Tensor) -> ModuleType:
    """Return the module that runs small operations on this device and dtype: kernels.cpu_ops or layer_ops."""
    is_cpp = cpu_ops.available(weight.device, weight.dtype) and not use_triton(weight.device)
    return cpu_ops if is_cpp else layer_ops


def is_llama_shaped(model: PreTrainedModel) -> bool:
    """Return whether Decoder computes what the model does: its family, projections of one dtype and device."""
    if type(model).__name__ not in CAUSAL_LMS + MOE_CAUSAL_LMS:
        return False
    kinds = {(parameter.device, parameter.dtype) for parameter in model.parameters()}
    return len(kinds) == 1 and all(is_llama_layer(layer) for layer in decoder_layers(model))


def is_llama_layer(module: nn.Module) -> bool:
    """Return whether Layer computes what this layer of a Llama-shaped model or head does."""
    layer = cast(LlamaDecoderLayer, module)
    projections = [getattr(layer.self_attn, name) for name in ATTENTION_PROJECTIONS]
    mlp = shared_expert_of(layer.mlp) if is_moe_block(layer.mlp) else layer.mlp
    projections += [] if mlp is None else [getattr(mlp, name) for name in MLP_PROJECTIONS]
    has_hooks = bool(layer._forward_pre_hooks or layer._forward_hooks)
    config = layer.self_attn.config
    is_usual = config.hidden_act in ("silu", "swish") and getattr(config, "clip_qkv", None) is None
    return is_usual and not has_hooks and all(is_projection(projection) for projection in projections)
