"""Draft heads: transformer layers over (next token, target feature) pairs, in both published generations.

    hidden = head(embeddings, head.project_features(features), positions)      # one pair per position
    logits = head.logits(hidden, target.logits)                      # over token_ids, or the whole vocabulary
    hidden = head(embeddings_of_children, hidden, positions + 1)     # the head's own output replaces the feature

    EagleHead    EAGLE-1 and 2: the target's last feature, the target's lm_head (EAGLE-1, section 3)
    Eagle3Head   EAGLE-3: the inputs of layers 2, n / 2 and n - 3 of the target's n layers, unless its config names
                 others; its own lm_head over a draft vocabulary (EAGLE-3, section 3)
                 EAGLE-3.1: norms before fc, and a normed output, as the config's switches say (arXiv 2605.09992)
                 Further layers read the output of the layer before, and the embedding again if they are Eagle3Layers

Module names are the published key names. `head_forward` runs a head over packed rows: EAGLE's on
our own layers, others by their module.

    forward = head_forward(head)
    hidden = forward(embeddings, features, positions, layout)      # [R, H], one row per pair
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from eagle_ray.attention.metadata import ATTENTION_NAME, AttentionMetadata, Rotary
from eagle_ray.methods.eagle.layers import Eagle3Layer, HeadLayer, exact_rotary
from eagle_ray.models.decoder import Angles, Layer, is_llama_layer, normed_sum, ops_for
from eagle_ray.models.supported_models import KVSpec, LogitsOf, head_dims

NUM_FEATURES = 3  # that an EAGLE-3 head reads if its config names no layers
# With fewer layers in a target, EAGLE-3's three features would not be of different ones.
MIN_TARGET_LAYERS = 7


@runtime_checkable
class DraftHead(Protocol):
    """Protocol of a draft head.

    Attributes:
        config: the head's own shape.
        embed_tokens: the head's own token embedding; None if it uses the target's.
        token_ids: the target's id of each token that the head can draft; None is the whole
            vocabulary.
        first_position: index of the token that is at rope position 0: 1 if the head pairs each
            token with the feature before it, 0 if it reads tokens alone.
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
        """Return the target's layers whose concatenated inputs are the head's feature; None is the
        last hidden state."""

    def project_features(self, features: Float[Tensor, "*rows F"]) -> Float[Tensor, "*rows H"]:
        """Return the target's features projected to the width of the head's own outputs."""

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

    def logits(
        self, hidden: Float[Tensor, "*rows H"], target_logits: LogitsOf
    ) -> Float[Tensor, "*rows Dv"]:
        """Return the logits of the token after each output of the head."""


class EagleHead(nn.Module):
    """EAGLE-1 and 2: one decoder layer without input norm and without final norm.

    Args:
        bias: fc has a bias.
        own_embedding: the checkpoint has its own token embedding.
        own_lm_head: the checkpoint has its own lm_head, over all of the target's tokens.

    Attributes:
        draft_vocab: the draft vocabulary published with the head, the most frequent token first;
            None if there is none.
    """

    token_ids = None
    method = "eagle2"
    first_position = 1
    draft_vocab: list[int] | None = None

    def __init__(
        self, config: LlamaConfig, *, bias: bool, own_embedding: bool, own_lm_head: bool = False
    ):
        super().__init__()
        config._attn_implementation = ATTENTION_NAME
        self.config = config
        self.embed_tokens = (
            nn.Embedding(config.vocab_size, config.hidden_size) if own_embedding else None
        )
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        layer = HeadLayer(config, 0)
        layer.add_module("input_layernorm", nn.Identity())
        self.layers = nn.ModuleList([layer])
        self.lm_head = (
            nn.Linear(config.hidden_size, config.vocab_size, bias=False) if own_lm_head else None
        )
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
        return self.layers[0](
            hidden, position_ids=positions, position_embeddings=rotary, use_cache=False, rows=rows
        )

    def logits(
        self, hidden: Float[Tensor, "*rows H"], target_logits: LogitsOf
    ) -> Float[Tensor, "*rows V"]:
        return target_logits(hidden) if self.lm_head is None else self.lm_head(hidden)


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
        further_layers: for each layer after the first, whether it reads the embedding again
            (DeepSpec's heads) or the layer before alone (speculators').
        own_lm_head: the checkpoint has its own lm_head; otherwise the target's is used.
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
        further_layers: Sequence[bool] = (),
        own_lm_head: bool = True,
    ):
        super().__init__()
        config._attn_implementation = ATTENTION_NAME
        self.config = config
        self.embed_tokens = (
            nn.Embedding(config.vocab_size, config.hidden_size) if own_embedding else None
        )
        self.input_norm = _input_norm(config, feature_size)
        self.fc_norm = _fc_norm(config, feature_size, len(feature_layers or ()) or NUM_FEATURES)
        self.fc = nn.Linear(feature_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.layers = nn.ModuleDict(
            {
                str(i): (Eagle3Layer if reads_embedding else HeadLayer)(config, i)
                for i, reads_embedding in enumerate(further_layers, 1)
            }
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = (
            nn.Linear(config.hidden_size, draft_vocab_size, bias=False) if own_lm_head else None
        )
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
        return _kv_spec(self.config, 1 + len(self.layers))

    def feature_layers(self, num_layers: int) -> tuple[int, ...]:
        return self._feature_layers or (2, num_layers // 2, num_layers - 3)

    def project_features(self, features: Float[Tensor, "*rows F"]) -> Float[Tensor, "*rows H"]:
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1
            )
        return self.fc(features)

    def forward(
        self,
        embeddings: Float[Tensor, "B T H"],
        features: Float[Tensor, "B T H"],
        positions: Int[Tensor, "B T"],
        rows: AttentionMetadata | None = None,
    ) -> Float[Tensor, "B T H"]:
        rotary = self.rotary(features, positions)
        hidden = self.midlayer(embeddings, features, rotary, rows)
        for layer in self.layers.values():
            if isinstance(layer, Eagle3Layer):
                hidden = layer(embeddings, hidden, rotary, rows)
            else:
                hidden = layer(hidden, position_embeddings=rotary, use_cache=False, rows=rows)
        return self.norm(hidden) if self.norm_output else hidden

    def logits(
        self, hidden: Float[Tensor, "*rows H"], target_logits: LogitsOf
    ) -> Float[Tensor, "*rows Dv"]:
        normed = hidden if self.norm_output else self.norm(hidden)
        return target_logits(normed) if self.lm_head is None else self.lm_head(normed)


class PEagleHead(Eagle3Head):
    """P-EAGLE: an EAGLE-3 head that drafts all levels in one pass, with mask inputs for unknown tokens and features.

    Rows after the root's pair read the embedding of `mask_token_id` and, for a feature of the
    target, `mask_hidden`.

    Args:
        mask_shape: shape of mask_hidden. It has as many elements as the target's feature.
        sizes: as for Eagle3Head.
    """

    method = "peagle"

    def __init__(
        self, config: LlamaConfig, *, mask_token_id: int, mask_shape: tuple[int, ...], **sizes: Any
    ):
        super().__init__(config, **sizes)
        self.mask_token_id = mask_token_id
        self.mask_hidden = nn.Parameter(torch.zeros(mask_shape))


def _input_norm(config: LlamaConfig, feature_size: int) -> LlamaRMSNorm | None:
    """Return the norm over all features together, if the config has one."""
    if not getattr(config, "norm_before_fc", False):
        return None
    return LlamaRMSNorm(feature_size, eps=config.rms_norm_eps)


def _fc_norm(config: LlamaConfig, feature_size: int, num_features: int) -> nn.ModuleList | None:
    """Return one norm per feature, if the config has them."""
    if not getattr(config, "fc_norm", False):
        return None
    width = feature_size // num_features
    return nn.ModuleList(LlamaRMSNorm(width, eps=config.rms_norm_eps) for _ in range(num_features))


def _kv_spec(config: LlamaConfig, num_layers: int = 1) -> KVSpec:
    """Return the spec of `num_layers` layers, whatever number of layers the config has."""
    return KVSpec(
        num_layers, config.num_key_value_heads or config.num_attention_heads, *head_dims(config)
    )


HeadForward = Callable[
    [Float[Tensor, "R H"], Float[Tensor, "R H"], Int[Tensor, " R"], AttentionMetadata],
    Float[Tensor, "R H"],
]


@singledispatch
def head_forward(head: nn.Module) -> HeadForward:
    """Return a function that runs a head on R pairs, given embeddings, projected features,
    positions and their layout."""
    return lambda embeddings, features, positions, layout: head(
        embeddings[None], features[None], positions[None], layout
    )[0]


@head_forward.register
def _(head: EagleHead) -> HeadForward:
    """One layer without an input norm, over fc(embedding, feature)."""
    module = cast(HeadLayer, head.layers[0])
    if not is_llama_layer(module):
        return head_forward.dispatch(object)(head)
    ops = ops_for(module.post_attention_layernorm.weight)
    angles = Angles(head.rotary)
    layer = Layer.of(module, ops)

    def run(
        embeddings: Tensor, features: Tensor, positions: Tensor, layout: AttentionMetadata
    ) -> Tensor:
        hidden = head.fc(torch.cat([embeddings, features], -1))
        return hidden + layer(hidden, hidden, angles(positions), layout)

    return run


@head_forward.register
def _(head: Eagle3Head) -> HeadForward:
    """Attention over the normed embedding concatenated with the normed feature; the residual is the feature.

    The head's last norm comes here if it has norm_output, and otherwise in its logits.
    """
    modules = [head.midlayer, *head.layers.values()]
    if not all(is_llama_layer(module) for module in modules):
        return head_forward.dispatch(object)(head)
    ops = ops_for(head.midlayer.hidden_norm.weight)
    angles = Angles(head.rotary)
    layers = [_Pass(module, Layer.of(module, ops)) for module in modules]

    def run(
        embeddings: Tensor, features: Tensor, positions: Tensor, layout: AttentionMetadata
    ) -> Tensor:
        rotary = angles(positions)
        hidden = features.clone()
        delta = None
        for layer in layers:
            hidden, delta = layer(embeddings, hidden, delta, rotary, layout)
        assert delta is not None, "a head has a layer"
        return normed_sum(ops, hidden, delta, head.norm) if head.norm_output else hidden + delta

    return run


@dataclass(frozen=True, slots=True)
class _Pass:
    """One layer of an EAGLE-3 head over packed rows."""

    module: nn.Module
    layer: Layer

    def __call__(
        self,
        embeddings: Float[Tensor, "R H"],
        hidden: Float[Tensor, "R H"],
        delta: Float[Tensor, "R H"] | None,
        rotary: Rotary,
        layout: AttentionMetadata,
    ) -> tuple[Float[Tensor, "R H"], Float[Tensor, "R H"]]:
        """Add delta to hidden. Return the residual stream and what the layer's MLP adds to it."""
        module = self.module
        ops = self.layer.ops
        if not isinstance(module, Eagle3Layer):
            normed = self.layer.normed_input(hidden, delta)
            return hidden, self.layer(hidden, normed, rotary, layout)
        feature = normed_sum(ops, hidden, delta, module.hidden_norm)
        both = torch.cat([normed_sum(ops, embeddings, None, module.input_layernorm), feature], -1)
        residual = feature if module.norm_before_residual else hidden
        return residual, self.layer(residual, both, rotary, layout)
