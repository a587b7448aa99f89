"""Draft heads: one transformer layer over (next token, target feature) pairs, in both published generations.

    hidden = head(embeddings, head.project_features(features), positions)      # one pair per position
    logits = head.logits(hidden, target.logits)                      # over token_ids, or the whole vocabulary
    hidden = head(embeddings_of_children, hidden, positions + 1)     # the head's own output replaces the feature

    EagleHead    EAGLE-1 and 2: the target's last feature, the target's lm_head (EAGLE-1, section 3)
    Eagle3Head   EAGLE-3: three of the target's layers, its own lm_head over a draft vocabulary (EAGLE-3, section 3)
                 EAGLE-3.1: norms before fc, and a normed output, as the config's switches say (arXiv 2605.09992)

Module names are the published key names. `head_forward` runs a head over packed rows: EAGLE's on our own layers, others
by their module.

    forward = head_forward(head)
    hidden = forward(embeddings, features, positions, layout)      # [R, H], one row per pair
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from typing import Protocol, cast, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from eagle_ray.attention.metadata import ATTENTION, AttentionMetadata
from eagle_ray.models.decoder import Angles, Layer, is_llama_layer, normed_sum, ops_for
from eagle_ray.models.supported_models import KVSpec, LogitsOf, head_dims

NUM_FEATURES = 3  # that an EAGLE-3 head reads if its config names no layers
MIN_TARGET_LAYERS = 7  # of a target of EAGLE-3: with fewer the three features would not be of different layers


@runtime_checkable
class DraftHead(Protocol):
    """Protocol of a draft head.

    Attributes:
        config: the head's own shape.
        embed_tokens: None if the target's embedding is used.
        token_ids: the target's id of each token that the head can draft; None is the whole vocabulary.
        first_position: index of the first token that it reads at rope position 0: 1 if each token goes with the feature
            before it, 0 if it reads tokens alone.
    """

    config: PretrainedConfig
    first_position: int

    @property
    def embed_tokens(self) -> nn.Embedding | None: ...

    @property
    def token_ids(self) -> Int[Tensor, " Dv"] | None: ...

    @property
    def kv_spec(self) -> KVSpec:
        """Return the shape of the keys and values that it keeps per token."""

    def feature_layers(self, num_layers: int) -> tuple[int, ...] | None:
        """Return the layers of the target whose concatenated inputs are its feature; None is what the lm_head reads."""

    def project_features(self, features: Float[Tensor, "*rows F"]) -> Float[Tensor, "*rows H"]:
        """Return the target's features in the width of the head's own outputs."""

    def __call__(
        self,
        embeddings: Float[Tensor, "B T H"],
        features: Float[Tensor, "B T H"],
        positions: Int[Tensor, "B T"],
        rows: AttentionMetadata | None = None,
    ) -> Float[Tensor, "B T H"]:
        """Return the head's outputs, one per pair.

        Args:
            embeddings: embeddings of the token after each feature.
            positions: positions of the features.
            rows: attention metadata; None is plain causal attention over T.
        """

    def logits(self, hidden: Float[Tensor, "*rows H"], target_logits: LogitsOf) -> Float[Tensor, "*rows Dv"]:
        """Return the logits after each output."""


class EagleHead(nn.Module):
    """EAGLE-1 and 2: one decoder layer without input norm and without final norm.

    bias: fc has a bias. own_embedding: the checkpoint has its own token embedding.

    Attributes:
        draft_vocab: the tokens that it was published to offer, the most frequent first; None says nothing.
    """

    token_ids = None
    method = "eagle2"
    first_position = 1
    draft_vocab: list[int] | None = None

    def __init__(self, config: LlamaConfig, *, bias: bool, own_embedding: bool):
        super().__init__()
        config._attn_implementation = ATTENTION
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if own_embedding else None
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        layer = LlamaDecoderLayer(config, 0)
        layer.add_module("input_layernorm", nn.Identity())
        layer.self_attn.o_proj.register_parameter("bias", None)  # published heads have one on q, k and v at most
        self.layers = nn.ModuleList([layer])
        self.rotary = exact_rotary(config)

    @property
    def kv_spec(self) -> KVSpec:
        return _kv_spec(self.config)

    def feature_layers(self, num_layers: int) -> None:
        return None

    def project_features(self, features: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows H"]:
        return features

    def forward(
        self,
        embeddings: Float[Tensor, "B T H"],
        features: Float[Tensor, "B T H"],
        positions: Int[Tensor, "B T"],
        rows: AttentionMetadata | None = None,
    ) -> Float[Tensor, "B T H"]:
        hidden = self.fc(torch.cat([embeddings, features], -1))
        rotary = self.rotary(hidden, positions)
        return self.layers[0](hidden, position_ids=positions, position_embeddings=rotary, use_cache=False, rows=rows)

    def logits(self, hidden: Float[Tensor, "*rows H"], target_logits: LogitsOf) -> Float[Tensor, "*rows V"]:
        return target_logits(hidden)


class Eagle3Head(nn.Module):
    """EAGLE-3: the embedding enters through attention alone, and the residual stream is the feature.

    Switches of the config (EAGLE-3.1), each off if absent:
        norm_before_fc: input_norm, one RMSNorm over the concatenated features, comes before fc.
        fc_norm: one RMSNorm per feature comes before fc, after input_norm if both are on.
        norm_output: the output is normed, so the next draft step reads what the lm_head reads.

    Args:
        draft_vocab_size: tokens that can be drafted; config.vocab_size is the target's.
        feature_size: width of the target's concatenated features.
        own_embedding: the checkpoint has its own token embedding.
        feature_layers: layers of the target, if they are not the three published ones.
    """

    method = "eagle3"
    first_position = 1
    d2t: Int[Tensor, " Dv"]
    t2d: Bool[Tensor, " V"]

    def __init__(
        self,
        config: LlamaConfig,
        *,
        draft_vocab_size: int,
        feature_size: int,
        own_embedding: bool,
        feature_layers: tuple[int, ...] | None = None,
    ):
        super().__init__()
        config._attn_implementation = ATTENTION
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if own_embedding else None
        self.input_norm = _input_norm(config, feature_size)
        self.fc_norm = _fc_norm(config, feature_size, len(feature_layers or ()) or NUM_FEATURES)
        self.fc = nn.Linear(feature_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab_size, bias=False)
        self.rotary = exact_rotary(config)
        self.norm_output: bool = getattr(config, "norm_output", False)
        self._feature_layers = feature_layers
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.ones(config.vocab_size, dtype=torch.bool))

    @property
    def token_ids(self) -> Int[Tensor, " Dv"] | None:
        """Return the target's ids of drafted tokens (d2t holds offsets), or None if every token can be drafted."""
        if len(self.d2t) == self.config.vocab_size:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @property
    def kv_spec(self) -> KVSpec:
        return _kv_spec(self.config)

    def feature_layers(self, num_layers: int) -> tuple[int, ...]:
        return self._feature_layers or (2, num_layers // 2, num_layers - 3)

    def project_features(self, features: Float[Tensor, "*rows F"]) -> Float[Tensor, "*rows H"]:
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(features)

    def forward(
        self,
        embeddings: Float[Tensor, "B T H"],
        features: Float[Tensor, "B T H"],
        positions: Int[Tensor, "B T"],
        rows: AttentionMetadata | None = None,
    ) -> Float[Tensor, "B T H"]:
        hidden = self.midlayer(embeddings, features, self.rotary(features, positions), rows)
        return self.norm(hidden) if self.norm_output else hidden

    def logits(self, hidden: Float[Tensor, "*rows H"], target_logits: LogitsOf) -> Float[Tensor, "*rows Dv"]:
        return self.lm_head(hidden if self.norm_output else self.norm(hidden))


class Eagle3Layer(nn.Module):
    """A Llama layer whose queries, keys and values read the normed embedding concatenated with the normed feature.

    The residual is the feature, or the normed feature if the config has `norm_before_residual` (speculators' heads).
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(2 * narrow.in_features, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)
        self.self_attn.o_proj.register_parameter("bias", None)
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


def _input_norm(config: LlamaConfig, feature_size: int) -> LlamaRMSNorm | None:
    """Return the norm over all features together, if the config has one."""
    return LlamaRMSNorm(feature_size, eps=config.rms_norm_eps) if getattr(config, "norm_before_fc", False) else None


def _fc_norm(config: LlamaConfig, feature_size: int, num_features: int) -> nn.ModuleList | None:
    """Return one norm per feature, if the config has them."""
    if not getattr(config, "fc_norm", False):
        return None
    width = feature_size // num_features
    return nn.ModuleList(LlamaRMSNorm(width, eps=config.rms_norm_eps) for _ in range(num_features))


def _kv_spec(config: LlamaConfig) -> KVSpec:
    """Return the spec of one layer, whatever number of layers the config has."""
    return KVSpec(1, config.num_key_value_heads or config.num_attention_heads, *head_dims(config))


class _Rotary(LlamaRotaryEmbedding):
    """Rotary embedding with frequencies in fp32, as in transformers' targets: in bf16 angles err by half a radian at
    500.
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
    """Return the rotary embedding with real tables even on the meta device, since no file contains them."""
    with torch.device("cpu"):
        return _Rotary(cast(LlamaConfig, config))  # it reads what Qwen3Config has, too


HeadForward = Callable[
    [Float[Tensor, "R H"], Float[Tensor, "R H"], Int[Tensor, " R"], AttentionMetadata],
    Float[Tensor, "R H"],
]


@singledispatch
def head_forward(head: nn.Module) -> HeadForward:
    """Return the function that runs a head on R pairs: embeddings, reduced features, positions and their layout."""
    return lambda embeddings, features, positions, layout: head(
        embeddings[None], features[None], positions[None], layout
    )[0]


@head_forward.register
def _(head: EagleHead) -> HeadForward:
    """One layer without an input norm, over fc(embedding, feature)."""
    module = cast(LlamaDecoderLayer, head.layers[0])
    if not is_llama_layer(module):
        return head_forward.dispatch(object)(head)
    ops, angles = ops_for(module.post_attention_layernorm.weight), Angles(head.rotary)
    layer = Layer.of(module, ops)

    def run(embeddings: Tensor, features: Tensor, positions: Tensor, layout: AttentionMetadata) -> Tensor:
        hidden = head.fc(torch.cat([embeddings, features], -1))
        return hidden + layer(hidden, hidden, angles(positions), layout)

    return run


@head_forward.register
def _(head: Eagle3Head) -> HeadForward:
    """Attention over the normed embedding concatenated with the normed feature; the residual is the feature.

    The head's last norm comes here if it has norm_output, and otherwise in its logits.
    """
    module = head.midlayer
    if not is_llama_layer(module):
        return head_forward.dispatch(object)(head)
    ops, angles = ops_for(module.hidden_norm.weight), Angles(head.rotary)
    layer = Layer.of(module, ops)

    def run(embeddings: Tensor, features: Tensor, positions: Tensor, layout: AttentionMetadata) -> Tensor:
        hidden = features.clone()
        normed = normed_sum(ops, hidden, None, module.hidden_norm)
        both = torch.cat([normed_sum(ops, embeddings, None, module.input_layernorm), normed], -1)
        residual = normed if module.norm_before_residual else hidden
        delta = layer(residual, both, angles(positions), layout)
        return normed_sum(ops, residual, delta, head.norm) if head.norm_output else residual + delta

    return run
