"""Run decoder layers over packed rows: our own forward for the families whose record has a LayerForm.

    decoder = Decoder.of(model, feature_layers)             # None for a model that transformers has to run
    hidden, features = decoder(tokens, positions, layout)   # rows of many sequences, [R, H] throughout

A layer is four matrix products and three small operations between them:

    normed = RMSNorm(hidden)               add_rms_norm, which adds the layer before first
    qkv    = normed @ W_qkv                one product for queries, keys and values
    out    = attend(rotate(qkv))           the layout writes keys and values to the cache and attends
    normed = RMSNorm(hidden += out @ W_o)
    hidden += (SiLU(gate) * up) @ W_down   where gate and up are one product too

This is Llama's layer. A LayerForm (families.py) says where a family's layer differs: its norms
before and after attention and MLP, its activation, its rotary pairs. experts.py has mixtures of
experts. Gemma 3's layer:

    normed = RMSNorm(hidden)
    hidden += RMSNorm(attention(normed))
    normed = RMSNorm(hidden)
    hidden += RMSNorm((GELU(gate) * up) @ W_down)

Weights are those of the transformers modules: merged projections share their memory
(`packed_linear`), so the module tree stays what it was and serves as the oracle. The draft heads
run on the same layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaModel,
)

from eagle_ray.attention.cpu_attention import CpuMetadata
from eagle_ray.attention.metadata import AttentionMetadata, AttentionShape, Rotary
from eagle_ray.core.errors import EngineError
from eagle_ray.families import BY_CLASS, FAMILIES, LLAMA_LAYERS, LayerForm, layers_of
from eagle_ray.kernels import cpu_ops, layer_ops
from eagle_ray.kernels.availability import use_triton
from eagle_ray.kernels.fp8 import ScaledRows
from eagle_ray.models.experts import Experts, is_moe_block, shared_expert_of
from eagle_ray.models.loader import decoder_layers
from eagle_ray.models.packed_linear import Projection, is_projection, merge_linears
from eagle_ray.models.quantized_decoder import QuantizedLayer, QuantizedLayers
from eagle_ray.models.quantized_linear import QuantizedLinear
from eagle_ray.parallel.shard import SharedNorm

# Classes of attention whose window is in the config alone.
CONFIG_WINDOWS = {
    f"{family.prefix}Attention"
    for family in FAMILIES.values()
    if family.layer is not None and family.layer.has_config_window
}
# Functions of kernels.cpu_ops and layer_ops, by transformers' name of a gate's activation.
ACTIVATIONS = {"silu": "silu_mul", "swish": "silu_mul", "gelu_pytorch_tanh": "gelu_tanh_mul"}
Rows = Tensor | ScaledRows  # what a projection reads
STILL = "still"  # kind of the rotary angles of layers that rotate nothing


@runtime_checkable
class Norm(Protocol):
    """Protocol of an RMSNorm module of transformers."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def variance_epsilon(self) -> float: ...


@dataclass(frozen=True, slots=True)
class NarrowNorm:
    """Reads an RMSNorm module of transformers whose epsilon has another name."""

    weight: Float[Tensor, " W"]
    variance_epsilon: float


@dataclass(frozen=True, slots=True)
class WideNorm:
    """A norm that multiplies in fp32, or by weights plus a constant, as some families have it."""

    weight: Float[Tensor, " W"]
    variance_epsilon: float


def norm_of(module: nn.Module, name: str | None, form: LayerForm) -> Norm | None:
    """Return a norm submodule of a transformers module by its name, or None if the module has none."""
    norm: Any = None if name is None else getattr(module, name, None)
    if norm is None or isinstance(norm, nn.Identity):
        return None
    has_usual_name = hasattr(norm, "variance_epsilon")
    if has_usual_name and (isinstance(norm, SharedNorm) or not form.has_wide_norms):
        return norm
    eps = norm.variance_epsilon if has_usual_name else norm.eps
    weight = norm.weight.detach()
    if not form.has_wide_norms:
        return NarrowNorm(weight, eps)
    return WideNorm(weight.float() + form.norm_offset, eps)


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of one layer, without the norm before it and the residual after it.

    Attributes:
        row_norms: norms over all queries and all keys of a row, as in OLMoE; empty if each head is
            normed (`shape`) or nothing is.
        qkv_order: permutation of the product's columns for families whose rotary pairs are not (i,
            i + half); None without one.
    """

    qkv: Projection
    output: Projection
    shape: AttentionShape
    row_norms: Sequence[Norm] = ()
    qkv_order: Int[Tensor, " width"] | None = None

    @classmethod
    def of(
        cls,
        module: nn.Module,
        form: LayerForm = LLAMA_LAYERS,
        pairs: Int[Tensor, " head_dim"] | None = None,
    ) -> Attention:
        """Build from the attention of a layer of this form.

        Args:
            pairs: result of rotary_pairs.
        """
        attention = cast(LlamaAttention, module)
        norms = _head_norms(module, form)
        row_norms: list[Norm] = []
        if form.has_row_norms:
            row_norms = [norm for norm in norms if norm is not None]
            norms = [None, None]
        heads = attention.config.num_attention_heads
        kv_heads = attention.config.num_key_value_heads or heads
        head_norms = [None if norm is None else norm.weight for norm in norms]
        if pairs is not None:
            head_norms = [None if weight is None else weight[pairs] for weight in head_norms]
        shape = AttentionShape(
            layer=attention.layer_idx,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=attention.head_dim,
            scaling=attention.scaling,
            window=_window_of(attention, form),
            q_norm=head_norms[0],
            k_norm=head_norms[1],
            norm_eps=0.0 if norms[0] is None else norms[0].variance_epsilon,
            softcap=cast(Any, module).attn_logit_softcapping if form.has_softcap else None,
            sinks=cast(Any, module).sinks.detach() if form.has_sinks else None,
        )
        qkv = merge_linears([getattr(module, name) for name in form.qkv])
        qkv_order = None if pairs is None else _qkv_order(pairs, heads + kv_heads, kv_heads)
        return cls(qkv, attention.o_proj, shape, row_norms, qkv_order)

    def __call__(
        self, normed: Rows, rotary: Rotary, layout: AttentionMetadata
    ) -> Float[Tensor, "R H"]:
        qkv = self.qkv(normed)
        begin = 0
        for norm in self.row_norms:
            end = begin + len(norm.weight)
            rows = qkv[:, begin:end].contiguous()
            if isinstance(norm, SharedNorm):
                qkv[:, begin:end] = norm(rows)
            else:
                qkv[:, begin:end] = normed_sum(layer_ops, rows, None, norm)
            begin = end
        if self.qkv_order is not None:
            qkv = qkv.index_select(1, self.qkv_order)
        if rotary.query_scale is not None:
            width = self.shape.heads * self.shape.head_dim
            qkv[:, :width].mul_(rotary.query_scale[:, None])
        return self.output(layout.attend_projected(qkv, rotary, self.shape))


def _window_of(attention: nn.Module, form: LayerForm) -> int | None:
    """Return a layer's window, as of AttentionParams."""
    config: Any = attention.config
    if form.has_chunks:
        kind = config.layer_types[attention.layer_idx]
        chunk = config.attention_chunk_size
        return -chunk if kind == "chunked_attention" and chunk else None
    if type(attention).__name__ in CONFIG_WINDOWS:
        return getattr(config, "sliding_window", None)
    return getattr(attention, "sliding_window", None)


def _head_norms(module: nn.Module, form: LayerForm) -> list[Norm | None]:
    """Return the norms of a layer's queries and keys.

    A norm without weights says the same before a rotation as behind it: pairs keep their length.
    """
    if not form.has_unit_head_norm:
        return [norm_of(module, name, form) for name in ("q_norm", "k_norm")]
    norm: Any = getattr(module, "qk_norm", None)
    if norm is None:
        return [None, None]
    attention = cast(LlamaAttention, module)
    weight = attention.o_proj.weight  # of a packed layer it has no numbers
    ones = torch.ones(attention.head_dim, dtype=weight.dtype, device=weight.device)
    return [NarrowNorm(ones, norm.eps)] * 2


@dataclass(frozen=True, slots=True)
class Mlp:
    """The gated MLP of one layer, without the norm before it and the residual after it.

    Attributes:
        activation: function such as silu_mul that returns the input of `down`.
    """

    gate_up: Projection
    down: Projection
    activation: Callable[[Tensor], Rows]

    @classmethod
    def of(
        cls,
        module: nn.Module,
        ops: ModuleType,
        form: LayerForm = LLAMA_LAYERS,
        activation: str = "silu_mul",
    ) -> Mlp:
        """Build from a LlamaMLP, or from the MLP of a layer of this form.

        Args:
            activation: one of ACTIVATIONS.
        """
        mlp = cast(LlamaMLP, module)
        is_built = ops is not cpu_ops or cpu_ops.has_function(f"{activation}_float32")
        function = getattr(ops if is_built else layer_ops, activation)
        if activation == "silu_mul" and reads_fp8(mlp.down_proj):
            function = layer_ops.silu_mul_fp8
        gate_up = merge_linears([getattr(module, name) for name in form.gate_up])
        return cls(gate_up, mlp.down_proj, function)

    @property
    def reader(self) -> Projection:
        """Return the projection that reads the norm's output."""
        return self.gate_up

    def __call__(self, normed: Rows) -> Float[Tensor, "R H"]:
        return self.down(self.activation(self.gate_up(normed)))


@dataclass(frozen=True, slots=True)
class Block:
    """An MLP that runs transformers' own module, for mixtures of experts that Experts does not support."""

    block: nn.Module

    @property
    def reader(self) -> nn.Module:
        """Return the module that reads the norm's output."""
        return self.block

    def __call__(self, normed: Rows) -> Float[Tensor, "R H"]:
        assert isinstance(normed, Tensor), "a block of transformers reads no rows in FP8"
        out = self.block(normed[None])
        hidden: Tensor = out[0] if isinstance(out, tuple) else out  # and the router's scores
        return hidden[0]


def mlp_of(
    module: nn.Module, ops: ModuleType, form: LayerForm = LLAMA_LAYERS, activation: str = "silu_mul"
) -> Mlp | Experts | Block:
    """Return the MLP of a decoder layer, dense or a mixture of experts. Arguments are those of Mlp.of."""
    if not form.gate_up:
        return Block(module)
    if not is_moe_block(module):
        return Mlp.of(module, ops, form, activation)
    shared = shared_expert_of(module)
    return Experts.of(module, ops, None if shared is None else Mlp.of(shared, ops))


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer.

    Attributes:
        input_norm: norm before attention; None in EAGLE-1's heads, which do not normalize their
            input.
        post_norm: norm before the MLP.
        attention_norm: norm of attention's output before it is added to the residual.
        output_norm: norm of the MLP's output before it is added to the residual.
        multiplier: factor of both outputs before they are added to the residual.
        layer_type: kind of the layer's rotary angles, if the family has several.
    """

    attention: Attention
    mlp: Mlp | Experts | Block
    input_norm: Norm | None
    post_norm: Norm | None
    ops: ModuleType
    attention_norm: Norm | None = None
    output_norm: Norm | None = None
    multiplier: float = 1.0
    layer_type: str | None = None

    @classmethod
    def of(
        cls,
        module: nn.Module,
        ops: ModuleType,
        form: LayerForm = LLAMA_LAYERS,
        pairs: Int[Tensor, " head_dim"] | None = None,
        layer_type: str | None = None,
    ) -> Layer:
        """Build from a LlamaDecoderLayer, or from a layer of this form.

        Args:
            pairs: result of rotary_pairs.
        """
        layer = cast(LlamaDecoderLayer, module)
        return cls(
            attention=Attention.of(layer.self_attn, form, pairs),
            mlp=mlp_of(getattr(layer, form.mlp), ops, form, ACTIVATIONS[_activation(layer, form)]),
            input_norm=norm_of(module, form.input_norm, form),
            post_norm=norm_of(module, form.mlp_norm, form),
            ops=ops,
            attention_norm=norm_of(module, form.attention_norm, form),
            output_norm=norm_of(module, form.output_norm, form),
            multiplier=getattr(module, "residual_multiplier", 1.0),
            layer_type=layer_type,
        )

    @property
    def is_llama_like(self) -> bool:
        """Return whether the layer has exactly Llama's parts, so that one fused call may compute it."""
        others = (self.attention_norm, self.output_norm, self.attention.qkv_order)
        shape = self.attention.shape
        is_usual = shape.softcap is None and shape.sinks is None and not self.attention.row_norms
        has_silu = isinstance(self.mlp, Mlp) and self.mlp.activation is self.ops.silu_mul
        norms = [self.input_norm, self.post_norm]
        has_narrow_norms = not any(norm is None or isinstance(norm, WideNorm) for norm in norms)
        return (
            all(other is None for other in others)
            and is_usual
            and has_silu
            and has_narrow_norms
            and self.multiplier == 1.0
        )

    def normed_input(
        self, hidden: Float[Tensor, "R H"], delta: Float[Tensor, "R H"] | None
    ) -> Rows:
        """Add delta to the residual stream (hidden) in place and return the layer's normed input."""
        if self.input_norm is None:
            return hidden if delta is None else hidden.add_(delta)
        return self._normed_sum(hidden, delta, self.input_norm, self.attention.qkv)

    def __call__(
        self, hidden: Float[Tensor, "R H"], normed: Rows, rotary: Rotary, layout: AttentionMetadata
    ) -> Float[Tensor, "R H"]:
        """Add the attention to hidden in place, and return the MLP's output."""
        out = self._added(self.attention(normed, rotary, layout), self.attention_norm)
        if self.post_norm is None:
            return self._added(self.mlp(hidden.add_(out)), self.output_norm)
        normed = self._normed_sum(hidden, out, self.post_norm, self.mlp.reader)
        return self._added(self.mlp(normed), self.output_norm)

    def _added(self, out: Float[Tensor, "R H"], norm: Norm | None) -> Float[Tensor, "R H"]:
        """Return the output of attention or MLP, normed if the layer has such a norm."""
        if norm is not None:
            out = normed_sum(self.ops, out, None, norm)
        return out if self.multiplier == 1.0 else out * self.multiplier

    def _normed_sum(
        self,
        hidden: Float[Tensor, "R H"],
        delta: Float[Tensor, "R H"] | None,
        norm: Norm,
        reader: Projection | nn.Module,
    ) -> Rows:
        """Add delta to hidden in place and return the norm of the sum, as the projection `reader` reads it."""
        if reads_fp8(reader):
            return layer_ops.add_rms_norm_fp8(hidden, delta, norm.weight, norm.variance_epsilon)
        return normed_sum(self.ops, hidden, delta, norm)


class Decoder:
    """The embedding, the layers and the last norm of a causal LM.

    Args:
        feature_layers: layers whose concatenated inputs are a row's feature; None takes the output
            itself.
    """

    def __init__(self, model: PreTrainedModel, feature_layers: Sequence[int] | None = None):
        base = cast(LlamaModel, layers_of(model))
        form = form_of(model)
        assert form is not None, "`of` asks before"
        self._embed = base.embed_tokens
        self._embedding_multiplier: float = getattr(base, "embedding_multiplier", 1.0)
        self._ops = ops_for(base.embed_tokens.weight)
        head_dim: int = cast(Any, base.layers[0]).self_attn.head_dim
        types = rotary_types(base.rotary_emb, model.config)
        pairs = rotary_pairs(head_dim, _frequencies(base.rotary_emb, types[0]), form)
        angles: dict[str | None, Angles | StillAngles] = {
            kind: Angles(base.rotary_emb, kind, head_dim) for kind in dict.fromkeys(types)
        }
        if form.has_still_layers:
            types = [
                kind if rotates else STILL
                for kind, rotates in zip(types, model.config.no_rope_layers, strict=False)
            ]
            angles[STILL] = StillAngles(model.config, head_dim)
        self.layers = [
            Layer.of(module, self._ops, form, pairs, layer_type)
            for module, layer_type in zip(base.layers, types, strict=True)
        ]
        self._norm = cast(Norm, norm_of(base, "norm", form))
        self._angles = {kind: angles[kind] for kind in dict.fromkeys(types)}
        self._feature_layers = feature_layers
        self.quantized = layers_in_one_call(self.layers, self._norm)

    @classmethod
    def of(
        cls, model: PreTrainedModel, feature_layers: Sequence[int] | None = None
    ) -> Decoder | None:
        """Return the model's decoder, or None if transformers has to run it."""
        if is_llama_shaped(model):
            return cls(model, feature_layers)
        family = BY_CLASS.get(type(model).__name__)
        if family is not None and family.why_own:
            raise EngineError(
                f"{family.model_type}: layers that are quantised by a library, or that lie on several GPUs, are run "
                f"by transformers' forward, and {family.why_own}. Use plain weights, and execution.gpus_per_actor: 1."
            )
        return None

    def routers(self) -> dict[int, int]:
        """Return a checksum of the router's logits for each MoE layer, by its index. Ranks compare them at start."""
        return {
            i: layer.mlp.checksum()
            for i, layer in enumerate(self.layers)
            if isinstance(layer.mlp, Experts)
        }

    def __call__(
        self, tokens: Int[Tensor, " R"], positions: Int[Tensor, " R"], layout: AttentionMetadata
    ) -> tuple[Float[Tensor, "R H"], Float[Tensor, "R F"]]:
        """Return each row's hidden state before the lm_head, and its feature."""
        return self.run(self._embed(tokens), positions, layout)

    def run(
        self, hidden: Float[Tensor, "R H"], positions: Int[Tensor, " R"], layout: AttentionMetadata
    ) -> tuple[Float[Tensor, "R H"], Float[Tensor, "R F"]]:
        """Run the layers from the rows' embeddings, which are overwritten."""
        if self._embedding_multiplier != 1.0:
            hidden = hidden.mul_(self._embedding_multiplier)
        rotary = {kind: angles(positions) for kind, angles in self._angles.items()}
        feature_layers = self._feature_layers
        if self.quantized is not None and isinstance(layout, CpuMetadata):
            [angles] = rotary.values()
            out, features = self.quantized(hidden, angles, layout, feature_layers or ())
            return out, out if feature_layers is None else features
        delta, taps = self._run_layers(hidden, rotary, layout)
        out = normed_sum(self._ops, hidden, delta, self._norm)
        if feature_layers is None:
            return out, out
        return out, torch.cat([taps[i] for i in feature_layers], -1)

    def _run_layers(
        self,
        hidden: Float[Tensor, "R H"],
        rotary: Mapping[str | None, Rotary],
        layout: AttentionMetadata,
    ) -> tuple[Float[Tensor, "R H"] | None, dict[int, Float[Tensor, "R H"]]]:
        """Run all layers. Return the last one's output, not yet added to hidden, and the feature layers' inputs.

        Args:
            rotary: cosines and sines by the layers' types.
        """
        delta: Float[Tensor, "R H"] | None = None
        taps: dict[int, Float[Tensor, "R H"]] = {}
        for i, layer in enumerate(self.layers):
            normed = layer.normed_input(hidden, delta)
            if self._feature_layers is not None and i in self._feature_layers:
                taps[i] = hidden.clone()
            delta = layer(hidden, normed, rotary[layer.layer_type], layout)
        return delta, taps


def layers_in_one_call(layers: Sequence[Layer], norm: Norm) -> QuantizedLayers | None:
    """Return a function that runs all layers and the last norm in one C++ call.

    None if a layer is not quantised for a CPU.
    """
    parts = [part for layer in layers if (part := _quantized_layer(layer)) is not None]
    has_one_rotary = len({layer.layer_type for layer in layers}) == 1
    if len(parts) < len(layers) or not has_one_rotary:
        return None
    return QuantizedLayers(parts, norm.weight, norm.variance_epsilon)


def _quantized_layer(layer: Layer) -> QuantizedLayer | None:
    """Return the layer's parts if one call computes them."""
    if not isinstance(layer.mlp, Mlp) or not layer.is_llama_like:
        return None
    assert layer.input_norm is not None and layer.post_norm is not None, "as Llama has"
    projections = [layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down]
    quantized = [
        projection for projection in projections if isinstance(projection, QuantizedLinear)
    ]
    if len(quantized) < len(projections) or layer.ops is not cpu_ops:
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
    """Rotary angles of positions, from a rotary module of transformers with its scaled frequencies.

    Args:
        layer_type: kind of layer whose frequencies are used; None if the module has one kind for
            all layers.
        head_dim: size of a head, if only a part of it may be rotated. Pairs past the module's
            frequencies are not rotated.
    """

    def __init__(self, module: nn.Module, layer_type: str | None = None, head_dim: int = 0):
        self._frequencies = _frequencies(module, layer_type).float()
        scaling = "attention_scaling" if layer_type is None else f"{layer_type}_attention_scaling"
        self._scale: float = getattr(module, scaling)
        self._num_still = max(head_dim // 2 - len(self._frequencies), 0)

    def __call__(self, positions: Int[Tensor, " R"]) -> Rotary:
        angles = positions[:, None] * self._frequencies
        cosine = angles.cos()
        sine = angles.sin()
        if self._scale != 1.0:
            cosine = cosine * self._scale
            sine = sine * self._scale
        if self._num_still:
            cosine = F.pad(cosine, (0, self._num_still), value=1.0)
            sine = F.pad(sine, (0, self._num_still))
        return Rotary(cosine, sine)


class StillAngles:
    """Rotary angles of Llama 4's layers without rotation: all 0, with query factors that grow with the position."""

    def __init__(self, config: PretrainedConfig, head_dim: int):
        self._half = head_dim // 2
        self._has_scale = bool(config.attn_temperature_tuning)
        self._floor_scale: float = config.floor_scale
        self._scale: float = config.attn_scale

    def __call__(self, positions: Int[Tensor, " R"]) -> Rotary:
        sine = torch.zeros(len(positions), self._half, device=positions.device)
        if not self._has_scale:
            return Rotary(sine + 1.0, sine)
        steps = torch.floor((positions.float() + 1.0) / self._floor_scale)
        return Rotary(sine + 1.0, sine, torch.log1p(steps) * self._scale + 1.0)


def rotary_types(module: nn.Module, config: PretrainedConfig) -> list[str | None]:
    """Return the kind of each layer's rotary angles; None if one kind serves all layers."""
    if hasattr(module, "inv_freq"):
        return [None] * config.num_hidden_layers
    return list(config.layer_types)


def _frequencies(module: nn.Module, layer_type: str | None) -> Float[Tensor, " half"]:
    return getattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq")


def rotary_pairs(
    head_dim: int, frequencies: Float[Tensor, " n"], form: LayerForm
) -> Int[Tensor, " head_dim"] | None:
    """Return the permutation of a head's elements that turns its rotary pairs into (i, i + half);
    None if they already are.

    Queries and keys that are permuted alike have the same products. Rotated pairs come first.
    """
    num_pairs = len(frequencies)
    half = head_dim // 2
    if num_pairs == half and not form.rotates_neighbours:
        return None
    pair = torch.arange(num_pairs)
    still = torch.arange(2 * num_pairs, head_dim).view(2, -1)
    first = pair
    second = pair + num_pairs
    if form.rotates_neighbours:
        first = 2 * pair
        second = 2 * pair + 1
    order = torch.cat([first, still[0], second, still[1]])
    return order.to(frequencies.device)


def _qkv_order(
    pairs: Int[Tensor, " head_dim"], num_rotated: int, num_values: int
) -> Int[Tensor, " width"]:
    """Return the columns of a merged projection whose first heads are in the order of `pairs`."""
    head_dim = len(pairs)
    heads = torch.arange(num_rotated, device=pairs.device)[:, None] * head_dim
    rotated = (heads + pairs).flatten()
    values = torch.arange(num_values * head_dim, device=pairs.device) + num_rotated * head_dim
    return torch.cat([rotated, values])


def normed_sum(
    ops: ModuleType, hidden: Float[Tensor, "R H"], delta: Float[Tensor, "R H"] | None, norm: Norm
) -> Float[Tensor, "R H"]:
    """Add delta to the residual stream (hidden) in place and return the norm of the sum."""
    if norm.weight.dtype is not hidden.dtype:
        ops = layer_ops  # the C++ has weights of the rows' dtype
    return ops.add_rms_norm(hidden, delta, norm.weight, norm.variance_epsilon)


def reads_fp8(projection: Projection | nn.Module) -> bool:
    """Return whether a projection takes FP8 inputs (ScaledRows), which the operation before it then produces."""
    return getattr(projection, "reads_fp8", False)


def ops_for(weight: Tensor) -> ModuleType:
    """Return the module with the small operations for this device and dtype: kernels.cpu_ops or layer_ops."""
    is_cpp = cpu_ops.available(weight.device, weight.dtype) and not use_triton(weight.device)
    return cpu_ops if is_cpp else layer_ops


def form_of(model: PreTrainedModel) -> LayerForm | None:
    """Return the LayerForm of a model's family, or None if our own forward does not run the family."""
    family = BY_CLASS.get(type(model).__name__)
    return None if family is None else family.layer


def is_llama_shaped(model: PreTrainedModel) -> bool:
    """Return whether Decoder can run the model: its family, and projections of one dtype and device."""
    form = form_of(model)
    if form is None:
        return False
    kinds = {
        (parameter.device, parameter.dtype)
        for name, parameter in model.named_parameters()
        if not (form.has_wide_norms and name.endswith("norm.weight"))  # in fp32 for a model in fp16
    }
    return len(kinds) == 1 and all(is_llama_layer(layer, form) for layer in decoder_layers(model))


def is_dense(model: PreTrainedModel) -> bool:
    """Return whether Decoder can run the model and the model has no mixture of experts."""
    family = BY_CLASS.get(type(model).__name__)
    return family is not None and family.is_dense and is_llama_shaped(model)


def is_llama_layer(module: nn.Module, form: LayerForm = LLAMA_LAYERS) -> bool:
    """Return whether Layer can run this layer of a model or a head."""
    layer = cast(LlamaDecoderLayer, module)
    projections = [getattr(layer.self_attn, name) for name in (*form.qkv, "o_proj")]
    mlp: nn.Module | None = getattr(layer, form.mlp)
    assert mlp is not None
    if is_moe_block(mlp):
        mlp = shared_expert_of(mlp)
    if mlp is not None and form.gate_up:
        projections += [getattr(mlp, name) for name in (*form.gate_up, "down_proj")]
    has_hooks = bool(layer._forward_pre_hooks or layer._forward_hooks)
    config = layer.self_attn.config
    is_usual = _activation(layer, form) in ACTIVATIONS and getattr(config, "clip_qkv", None) is None
    return (
        is_usual and not has_hooks and all(is_projection(projection) for projection in projections)
    )


def _activation(layer: nn.Module, form: LayerForm) -> str:
    return getattr(cast(Any, layer).self_attn.config, form.activation)
