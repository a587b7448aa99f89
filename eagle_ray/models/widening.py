"""Widening: a small Llama and its EAGLE-1/2 head inside any larger Llama shape, without changing what they compute.

    model, head = widen_pair(small_model, small_head, BENCH)      # the small pair's tokens at the large shape's cost

It shows real acceptance and real time in one run where no real weights can be had (ENGINE.md, section 7). With the
small residual width d, the large one D, and head dims h and E:

- residual dims 0 .. d-1 are the small model's, dim d is a constant, the rest stay exactly 0;
- RMSNorm's mean is over D instead of d: its weights are scaled by sqrt(d/D), and its eps becomes the constant
  dimension's square, d * eps;
- rotary pair i of a head stands at pair i * E/h, whose frequency is the same; queries are scaled by sqrt(E/h);
- every further layer adds nothing, because its norms give it zeros;
- further vocabulary rows get a large negative logit from the constant dimension, in target and head alike.

A weight is random wherever the number it multiplies is exactly 0, so that no kernel can profit from zero weights.
Does not know trees, engines or files.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from eagle_ray.errors import EngineError
from eagle_ray.models.heads import EagleHead

NO_EPS = 1e-20  # the constant dimension stands in for it
IMPOSSIBLE = -(2.0**15)  # of a padded token's logit, times a constant; fits every dtype


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's shape; the head's one layer is of the same shape. vocab_size: rows of embedding and lm_head."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int


# 230M parameters, a gigabyte in fp32: far past any cache. A draft pass reads 9.8 % of what a target pass reads, lm_head
# included; with an 8B Llama and its head it is 10.3 %.
BENCH = Shape(
    hidden_size=1024,
    num_layers=16,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    intermediate_size=3584,
    vocab_size=6144,
)


def widen_pair(
    model: LlamaForCausalLM,
    head: EagleHead,
    shape: Shape,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[LlamaForCausalLM, EagleHead]:
    """Both at the larger shape, ready for a Target and an EagleDrafter.

    device: where the small pair lies already. seed: of the inert random weights. Raises EngineError where the shape is
    too small or the small pair has what this does not widen.
    """
    devices = [] if torch.device(device).type == "cpu" else None
    with torch.random.fork_rng(devices), torch.device(device), torch.no_grad():
        torch.manual_seed(seed)
        wide = _widen_target(model, shape, dtype).to(dtype)
        wide_head = _widen_head(head, model.config.rms_norm_eps, shape).to(dtype)
    return wide.eval().requires_grad_(False), wide_head.eval().requires_grad_(False)


def _widen_target(model: LlamaForCausalLM, shape: Shape, dtype: torch.dtype) -> LlamaForCausalLM:
    config, places = model.config, _Places.of(model.config, shape)
    if config.num_hidden_layers > shape.num_layers or config.vocab_size > shape.vocab_size:
        raise EngineError(f"{config.num_hidden_layers} layers and {config.vocab_size} tokens do not fit into {shape}")
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
    wide.model.norm.weight.zero_()
    _widen_norm(wide.model.norm, model.model.norm)
    wide.model.norm.weight[places.width] = 1 / constant
    places.read_residual(wide.lm_head, model.lm_head.weight, torch.arange(config.vocab_size))
    wide.lm_head.weight[config.vocab_size :, places.width] = IMPOSSIBLE
    return wide


def _widen_head(head: EagleHead, target_eps: float, shape: Shape) -> EagleHead:
    config, places = head.config, _Places.of(head.config, shape)
    own = head.embed_tokens is not None
    wide = EagleHead(_config(config, shape, 1), bias=head.fc.bias is not None, own_embedding=own)
    width, wide_width = places.width, shape.hidden_size
    given = _constant(width, target_eps)
    if own:
        _widen_embedding(wide.embed_tokens, head.embed_tokens, given)
    halves = torch.cat([torch.arange(width), wide_width + torch.arange(width)])
    live = torch.cat([torch.arange(width + 1), wide_width + torch.arange(width + 1)])
    _place(wide.fc, head.fc.weight, torch.arange(width), halves, live)
    wide.fc.weight[width, width] = _constant(width, config.rms_norm_eps) / given
    if head.fc.bias is not None:
        wide.fc.bias.zero_()
        wide.fc.bias[:width] = head.fc.bias
    wide.layers[0].post_attention_layernorm.weight.zero_()
    _widen_layer(wide.layers[0], head.layers[0], places)
    return wide


def _config(small: LlamaConfig, shape: Shape, num_layers: int) -> LlamaConfig:
    if small.attention_bias or small.mlp_bias or small.rope_parameters["rope_type"] != "default":
        raise EngineError("only Llamas without biases and with plain rotary embeddings are widened")
    return LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        hidden_act=small.hidden_act,
        rms_norm_eps=NO_EPS,
        rope_parameters=dict(small.rope_parameters),
        max_position_embeddings=small.max_position_embeddings,
        tie_word_embeddings=False,
        bos_token_id=small.bos_token_id,
        eos_token_id=small.eos_token_id,
        pad_token_id=small.pad_token_id,
    )


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the small model's numbers stand in the large one.

    width: the small residual width, and the index of the constant dimension. intermediate: units of the small MLP.
    queries, keys, values: rows of the large projections. copied: the small row that each large key and value row holds.
    outputs: o_proj's columns; live_outputs: those of all query heads that read a used key/value head. scale: of the
    queries.
    """

    width: int
    intermediate: int
    queries: Int[Tensor, " Q"]
    keys: Int[Tensor, " K"]
    values: Int[Tensor, " K"]
    copied: Int[Tensor, " K"]
    outputs: Int[Tensor, " Q"]
    live_outputs: Int[Tensor, " O"]
    scale: float

    @classmethod
    def of(cls, config: LlamaConfig, shape: Shape) -> _Places:
        """Query heads keep their key/value head; where the large model has fewer per group, key heads are copied."""
        dim, kv_heads = config.head_dim, config.num_key_value_heads
        groups, wide_groups = config.num_attention_heads // kv_heads, shape.num_heads // shape.num_kv_heads
        copies = math.ceil(groups / wide_groups)
        fits = config.hidden_size < shape.hidden_size and config.intermediate_size <= shape.intermediate_size
        if not fits or kv_heads * copies > shape.num_kv_heads or shape.head_dim % dim:
            raise EngineError(f"a Llama of {config.hidden_size} dims and {kv_heads} kv heads does not fit into {shape}")
        query_heads = [
            (kv * copies + i // wide_groups) * wide_groups + i % wide_groups
            for kv in range(kv_heads)
            for i in range(groups)
        ]
        key_heads = list(range(kv_heads * copies))
        plain = torch.arange(dim)
        pairs = torch.arange(dim // 2) * (shape.head_dim // dim)
        rotary = torch.cat([pairs, shape.head_dim // 2 + pairs])
        return cls(
            width=config.hidden_size,
            intermediate=config.intermediate_size,
            queries=_in_heads(query_heads, shape.head_dim, rotary),
            keys=_in_heads(key_heads, shape.head_dim, rotary),
            values=_in_heads(key_heads, shape.head_dim, plain),
            copied=_in_heads([kv // copies for kv in key_heads], dim, plain),
            outputs=_in_heads(query_heads, shape.head_dim, plain),
            live_outputs=_in_heads(list(range(len(key_heads) * wide_groups)), shape.head_dim, plain),
            scale=math.sqrt(shape.head_dim / dim),
        )

    def read_residual(self, wide: nn.Linear, weight: Tensor, rows: Int[Tensor, " N"]) -> None:
        """A projection from the residual stream, whose dims up to the constant are live."""
        _place(wide, weight, rows, torch.arange(self.width), torch.arange(self.width + 1))

    def write_residual(
        self, wide: nn.Linear, weight: Tensor, columns: Int[Tensor, " M"], live: Int[Tensor, " L"]
    ) -> None:
        """A projection to the residual stream."""
        _place(wide, weight, torch.arange(self.width), columns, live)


def _widen_layer(wide: LlamaDecoderLayer, small: LlamaDecoderLayer, places: _Places) -> None:
    """Everything of a layer but its input norm, which heads lack."""
    units = torch.arange(places.intermediate)
    attention, mlp = small.self_attn, small.mlp
    places.read_residual(wide.self_attn.q_proj, attention.q_proj.weight * places.scale, places.queries)
    places.read_residual(wide.self_attn.k_proj, attention.k_proj.weight[places.copied], places.keys)
    places.read_residual(wide.self_attn.v_proj, attention.v_proj.weight[places.copied], places.values)
    places.write_residual(wide.self_attn.o_proj, attention.o_proj.weight, places.outputs, places.live_outputs)
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


def _place(
    wide: nn.Linear,
    weight: Float[Tensor, "N M"],
    rows: Int[Tensor, " N"],
    columns: Int[Tensor, " M"],
    live: Int[Tensor, " L"],
) -> None:
    """weight at (rows, columns) and zeros in the rest of the columns whose input is ever anything but 0."""
    wide.weight[:, live] = 0
    wide.weight[rows[:, None], columns] = weight.to(wide.weight)


def _constant(width: int, eps: float) -> float:
    """Its square, in the sum of squares over all dims, is what eps was in their mean over `width` dims."""
    if not eps:
        raise EngineError("a model without rms_norm_eps leaves no constant dimension to widen it by")
    return math.sqrt(width * eps)


def _in_heads(heads: list[int], head_dim: int, dims: Int[Tensor, " D"]) -> Int[Tensor, " HD"]:
    """Rows of `dims` within each of `heads`, head by head."""
    return torch.cat([head * head_dim + dims for head in heads])
