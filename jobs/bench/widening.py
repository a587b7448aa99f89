"""Widening: a small Llama and its EAGLE-1/2 head inside any larger Llama shape, without changing what they compute.

    model, head = widen_pair(small_model, small_head, BENCH)      # the small pair's tokens at the large shape's cost

It shows real acceptance and real time in one run where no real weights can be had. With the
small residual width d, the large one D, and head dims h and E:

- residual dims 0 .. d-1 are the small model's, dim d is a constant, the rest stay exactly 0;
- RMSNorm's mean is over D instead of d: its weights are scaled by sqrt(d/D), and its eps becomes the constant
  dimension's square, d * eps;
- rotary pair i of a head stands at pair i * E/h, whose frequency is the same; queries are scaled by sqrt(E/h), and
  have 1 over the residual's size in a pair that keys leave at 0: the anchor (`embedding_map.py`);
- every further layer adds nothing, because its norms give it zeros;
- further vocabulary rows get a large negative logit from the constant dimension, in target and head alike.

A weight is random wherever the number it multiplies is exactly 0, so that no kernel can profit from
zero weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from eagle_ray.core.errors import EngineError
from eagle_ray.methods.eagle.heads import EagleHead
from jobs.bench.embedding_map import EmbeddingMap, ModelShape, place

NO_EPS = 1e-20  # the constant dimension stands in for it
IMPOSSIBLE = -(2.0**15)  # of a padded token's logit, times a constant; fits every dtype

# 230M parameters, a gigabyte in fp32: far past any cache. A draft pass reads 9.8 % of what a target
# pass reads, lm_head included; with an 8B Llama and its head it is 10.3 %.
BENCH = ModelShape(
    hidden_size=1024,
    num_layers=16,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    intermediate_size=3584,
    vocab_size=6144,
)
LLAMA_1B = ModelShape(
    2048, 16, 32, 8, 64, 8192, 128256
)  # Llama-3.2-1B, but for an lm_head of its own
LLAMA_3B = ModelShape(2560, 32, 20, 4, 128, 8960, 128256)  # 3B in as many layers as an 8B has
LLAMA_8B = ModelShape(4096, 32, 32, 8, 128, 14336, 128256)  # Llama-3-8B


def widen_pair(
    model: LlamaForCausalLM,
    head: EagleHead,
    shape: ModelShape,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[LlamaForCausalLM, EagleHead]:
    """Both at the larger shape, ready for a Target and an EagleDrafter.

    device: where the small pair lies already. Weights are made there, in dtype, one matrix at a
    time. seed: of the inert random ones. Raises EngineError where the shape is too small or the
    small pair has what this does not widen.
    """
    with seeded(seed, device), typed(dtype), torch.device(device), torch.no_grad():
        wide = _widen_target(model, shape, dtype)
        wide_head = _widen_head(head, model.config.rms_norm_eps, shape)
    return wide.eval().requires_grad_(False), wide_head.eval().requires_grad_(False)


def _widen_target(
    model: LlamaForCausalLM, shape: ModelShape, dtype: torch.dtype
) -> LlamaForCausalLM:
    config, places = model.config, EmbeddingMap.of(model.config, shape)
    if config.num_hidden_layers > shape.num_layers or config.vocab_size > shape.vocab_size:
        raise EngineError(
            f"{config.num_hidden_layers} layers and {config.vocab_size} tokens do not fit into {shape}"
        )
    wide = LlamaForCausalLM._from_config(_config(config, shape, shape.num_layers), dtype=dtype)
    wide.generation_config = copy.deepcopy(model.generation_config)
    constant = _constant(config.hidden_size, config.rms_norm_eps)
    _widen_embedding(wide.model.embed_tokens, model.model.embed_tokens, constant)
    for layer in wide.model.layers:
        layer.input_layernorm.weight.zero_()
        layer.post_attention_layernorm.weight.zero_()
    for layer, small in zip(wide.model.layers, model.model.layers, strict=False):
        _widen_layer(layer, small, places)
        _widen_norm(layer.input_layernorm, small.input_layernorm)
        layer.input_layernorm.weight[places.width] = 1 / constant
        layer.self_attn.q_proj.weight[places.anchors, places.width] = 1
    wide.model.norm.weight.zero_()
    _widen_norm(wide.model.norm, model.model.norm)
    wide.model.norm.weight[places.width] = 1 / constant
    places.read_residual(wide.lm_head, model.lm_head.weight, torch.arange(config.vocab_size))
    wide.lm_head.weight[config.vocab_size :, places.width] = IMPOSSIBLE
    return wide


def _widen_head(head: EagleHead, target_eps: float, shape: ModelShape) -> EagleHead:
    config, places = head.config, EmbeddingMap.of(head.config, shape)
    own = head.embed_tokens is not None
    wide = EagleHead(_config(config, shape, 1), bias=head.fc.bias is not None, own_embedding=own)
    width, wide_width = places.width, shape.hidden_size
    given = _constant(width, target_eps)
    if own:
        _widen_embedding(wide.embed_tokens, head.embed_tokens, given)
    halves = torch.cat([torch.arange(width), wide_width + torch.arange(width)])
    live = torch.cat([torch.arange(width + 1), wide_width + torch.arange(width + 1)])
    place(wide.fc, head.fc.weight, torch.arange(width), halves, live)
    constant = _constant(width, config.rms_norm_eps)
    wide.fc.weight[width, width] = constant / given
    if head.fc.bias is not None:
        wide.fc.bias.zero_()
        wide.fc.bias[:width] = head.fc.bias
    wide.layers[0].post_attention_layernorm.weight.zero_()
    _widen_layer(wide.layers[0], head.layers[0], places)
    wide.layers[0].self_attn.q_proj.weight[places.anchors, width] = 1 / constant
    return wide


def _config(small: LlamaConfig, shape: ModelShape, num_layers: int) -> LlamaConfig:
    if small.attention_bias or small.mlp_bias or small.rope_parameters["rope_type"] != "default":
        raise EngineError("only Llamas without biases and with plain rotary embeddings are widened")
    return shape.llama_config(
        num_layers,
        hidden_act=small.hidden_act,
        rms_norm_eps=NO_EPS,
        rope_parameters=dict(small.rope_parameters),
        max_position_embeddings=small.max_position_embeddings,
        bos_token_id=small.bos_token_id,
        eos_token_id=small.eos_token_id,
        pad_token_id=small.pad_token_id,
    )


def _widen_layer(wide: LlamaDecoderLayer, small: LlamaDecoderLayer, places: EmbeddingMap) -> None:
    """Everything of a layer but its input norm, which heads lack."""
    units = torch.arange(places.intermediate)
    attention, mlp = small.self_attn, small.mlp
    places.read_residual(
        wide.self_attn.q_proj, attention.q_proj.weight * places.scale, places.queries
    )
    places.read_residual(wide.self_attn.k_proj, attention.k_proj.weight[places.copied], places.keys)
    places.read_residual(
        wide.self_attn.v_proj, attention.v_proj.weight[places.copied], places.values
    )
    places.write_residual(
        wide.self_attn.o_proj, attention.o_proj.weight, places.outputs, places.live_outputs
    )
    places.read_residual(wide.mlp.gate_proj, mlp.gate_proj.weight, units)
    places.read_residual(wide.mlp.up_proj, mlp.up_proj.weight, units)
    places.write_residual(wide.mlp.down_proj, mlp.down_proj.weight, units, units)
    _widen_norm(wide.post_attention_layernorm, small.post_attention_layernorm)


def _widen_norm(wide: nn.Module, small: nn.Module) -> None:
    width, wide_width = len(small.weight), len(wide.weight)
    wide.weight[:width] = small.weight * math.sqrt(width / wide_width)


def _widen_embedding(wide: nn.Embedding, small: nn.Embedding, constant: float) -> None:
    num_tokens, width = small.weight.shape
    wide.weight.zero_()
    wide.weight[:num_tokens, :width] = small.weight
    wide.weight[:, width] = constant


@contextmanager
def seeded(seed: int, device: torch.device | str) -> Iterator[None]:
    """What is drawn within leaves no trace in the generators."""
    with torch.random.fork_rng([] if torch.device(device).type == "cpu" else None):
        torch.manual_seed(seed)
        yield


@contextmanager
def typed(dtype: torch.dtype) -> Iterator[None]:
    """New modules within are made in dtype: never first in fp32."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


def _constant(width: int, eps: float) -> float:
    """Its square, in the sum of squares over all dims, is what eps was in their mean over `width` dims."""
    if not eps:
        raise EngineError(
            "a model without rms_norm_eps leaves no constant dimension to widen it by"
        )
    return math.sqrt(width * eps)
