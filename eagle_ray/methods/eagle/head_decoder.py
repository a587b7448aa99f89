"""Run draft heads over packed rows: EAGLE's and Llama-shaped draft models on our own layers, others by their module.

forward = head_forward(head)
hidden = forward(embeddings, features, positions, layout)      # [R, H], one row per pair
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from eagle_ray.attention.metadata import AttentionMetadata
from eagle_ray.methods.draft_model.checkpoint import DraftModel
from eagle_ray.methods.eagle.heads import Eagle3Head, EagleHead
from eagle_ray.models.decoder import Angles, Decoder, Layer, is_llama_layer, normed_sum, ops_for

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
def _(head: DraftModel) -> HeadForward:
    """An independent causal LM, which reads the embeddings alone."""
    decoder = Decoder.of(head.model)
    if decoder is None:
        return head_forward.dispatch(object)(head)
    return lambda embeddings, features, positions, layout: decoder.run(embeddings, positions, layout)[0]


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
