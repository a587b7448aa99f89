"""Layers of EAGLE heads: a Llama layer with what published heads add, and EAGLE-3's, which reads the embedding too.

    HeadAttention   LlamaAttention, with RMSNorms of queries and keys before they are rotated (q_norm,
                    k_norm, as in Qwen3), a sliding window, and rotary embeddings of a part of each head
    HeadLayer    a LlamaDecoderLayer with that attention: EAGLE-1's layer, and further layers of EAGLE-3
    Eagle3Layer     queries, keys and values of the normed embedding concatenated with the normed feature

Partial rotary embeddings rotate the first r of a head's d elements, and pair i with i + r/2. Our
kernels pair i with i + d/2 of the whole head. So the elements of queries and keys are reordered when
a head is read (`order_of_rotary`), which leaves their products as they are. Elements that are not
rotated have frequency 0, so that every kernel computes such heads as it does others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from eagle_ray.attention.metadata import AttentionMetadata, attention_function

BY_HEADS = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias")
HEAD_NORMS = ("q_norm.weight", "k_norm.weight")


class HeadAttention(LlamaAttention):
    """Attention of a draft head's layer: LlamaAttention with optional windows, query and key norms, and an output bias.

    Read of the config, each absent by default:

        layer_windows: attention window of each layer, None without one.
        has_qk_norms: the layer has q_norm and k_norm.
        has_output_bias: o_proj has a bias.
    """

    def __init__(self, config: LlamaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        windows = getattr(config, "layer_windows", None)
        self.sliding_window: int | None = None if windows is None else windows[layer_idx]
        has_norms = getattr(config, "has_qk_norms", False)
        self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps) if has_norms else None
        self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps) if has_norms else None
        inputs = self.o_proj.in_features
        has_bias = getattr(config, "has_output_bias", False)
        self.o_proj = nn.Linear(inputs, config.hidden_size, bias=has_bias)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Float[Tensor, "B T I"],
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any | None = None,
        rows: AttentionMetadata | None = None,
        **_: Any,
    ) -> tuple[Float[Tensor, "B T H"], None]:
        """Return the attention's output, without the residual."""
        assert position_embeddings is not None, "heads get the angles of their positions"
        query = self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        key = self.k_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        value = self.v_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            query = self.q_norm(query)
            key = self.k_norm(key)

        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        out, _weights = attention_function(
            cast(Any, self),
            query,
            key,
            value,
            None,
            scaling=self.scaling,
            rows=rows,
            sliding_window=self.sliding_window,
        )
        return self.o_proj(out.flatten(2)), None


class HeadLayer(LlamaDecoderLayer):
    """A Llama layer with HeadAttention."""

    def __init__(self, config: LlamaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.self_attn = HeadAttention(config, layer_idx)


class Eagle3Layer(nn.Module):
    """A Llama layer whose queries, keys and values read the normed embedding concatenated with the normed feature.

    The residual is the feature, or the normed feature if the config has `norm_before_residual`
    (speculators' heads).
    """

    def __init__(self, config: LlamaConfig, layer_idx: int = 0):
        super().__init__()
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = HeadAttention(config, layer_idx)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(
                2 * narrow.in_features, narrow.out_features, bias=narrow.bias is not None
            )
            setattr(self.self_attn, name, wide)
        self.norm_before_residual = getattr(config, "norm_before_residual", False)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self,
        embeddings: Float[Tensor, "B T H"],
        hidden: Float[Tensor, "B T H"],
        rotary: tuple[Float[Tensor, "B T d"], Float[Tensor, "B T d"]],
        rows: AttentionMetadata | None,
    ) -> Float[Tensor, "B T H"]:
        normed = self.hidden_norm(hidden)
        both = torch.cat([self.input_layernorm(embeddings), normed], -1)
        residual = normed if self.norm_before_residual else hidden
        hidden = residual + self.self_attn(both, position_embeddings=rotary, rows=rows)[0]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class _Rotary(LlamaRotaryEmbedding):
    """Rotary embedding with frequencies in fp32, as in transformers' targets: in bf16 angles err by
    half a radian at 500.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Rotary:
        exact = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None:
                self._buffers[name] = buffer.to(moved.device)
        return self


def exact_rotary(config: PretrainedConfig) -> LlamaRotaryEmbedding:
    """Return the rotary embedding with real tables even on the meta device, since no file contains them.

    Elements of a head past the config's `rotary_dim`, if it has one, have frequency 0.
    """
    own = cast(LlamaConfig, config)  # it reads what Qwen3Config has, too
    rotary_dim = getattr(config, "rotary_dim", None)
    with torch.device("cpu"):
        if rotary_dim is None:
            return _Rotary(own)
        narrow = copy.copy(own)
        narrow.head_dim = rotary_dim
        rotary = _Rotary(narrow)
        still = torch.zeros((own.head_dim - rotary_dim) // 2)
        rotary.inv_freq = nn.Buffer(torch.cat([rotary.inv_freq, still]), persistent=False)
        return rotary


def order_of_rotary(head_dim: int, rotary_dim: int) -> list[int]:
    """Return the permutation of a head's elements under which kernels that rotate (i, i + d/2)
    rotate its first rotary_dim."""
    half = rotary_dim // 2
    middle = rotary_dim + (head_dim - rotary_dim) // 2
    parts = (
        range(half),
        range(rotary_dim, middle),
        range(half, rotary_dim),
        range(middle, head_dim),
    )
    return [index for part in parts for index in part]


def with_partial_rotary(
    tensors: Mapping[str, Tensor], config: PretrainedConfig
) -> dict[str, Tensor]:
    """Return a draft head's tensors with the elements of each query and key in `order_of_rotary`.

    Args:
        config: the head's config; without `rotary_dim` the tensors stay as they are.
    """
    rotary_dim = getattr(config, "rotary_dim", None)
    if rotary_dim is None:
        return dict(tensors)
    head_dim = config.head_dim
    order = torch.tensor(order_of_rotary(head_dim, rotary_dim))
    moved = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(BY_HEADS):
            moved[name] = tensor.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)
        elif name.endswith(HEAD_NORMS):
            moved[name] = tensor[order]
    return moved
