"""DFlashHead: a few Qwen3 layers that predict a whole block of tokens in one pass (arXiv 2602.06036).

    block     root  mask  mask  mask         queries, keys and values from embeddings of the block
    context   t0 t1 ... t[n-1]               keys and values from the target's features, at every layer

The features of the target's layers become one vector per token, ``hidden_norm(fc(features))``. Each
layer projects that vector to keys and values with its own k_proj and v_proj, normed and rotated at
the token's position ("KV injection"); a token's vector is the same for all layers and never
changes. Rows of the block attend to the context before the root and to the whole block, or, with
``causal``, to themselves and the rows before (JetSpec's head, arXiv 2606.18394). Row i of the block
is at the root's position + i and predicts the token there, so the root's own row predicts nothing;
with ``from_root`` row i predicts the token after it instead.

    hidden = head(block, head.project_features(features), positions, context_positions, visible)
    logits = head.block_logits(hidden, target.logits)

Heads of DSpark, Domino and DFlash2 add what a node says to the logits of its children
(methods/dflash/paths.py):

    latents, state = head.path.step(embed, tokens, hidden[:, :1], state, 0)
    logits = head.logits(cat([hidden, latents]), target.logits)

The layers of DFlash2 have a convolution over the rows of the block around each attention and each
MLP.

``forward`` is the slow, obvious form, which training runs and tests hold equal to BlockDecoder: the
form with a KV cache. Module names are the published key names (z-lab/dflash, dflash/model.py at
44947fb).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3RMSNorm

from eagle_ray.attention.metadata import ATTENTION_NAME, AttentionMetadata, AttentionShape, Rotary
from eagle_ray.kernels.layer_ops import rotated
from eagle_ray.kv.kv_cache import KVCache
from eagle_ray.methods.dflash.paths import (
    NO_PATH,
    CandidateSelector,
    ConfidenceHead,
    ConvShape,
    Domino,
    GroupedConv,
    MarkovHead,
    PathHead,
    PathShape,
    PrefixGru,
    convolutions,
)
from eagle_ray.methods.eagle.layers import exact_rotary
from eagle_ray.models.decoder import Angles, Layer, Norm, normed_sum, ops_for
from eagle_ray.models.packed_linear import slice_rows
from eagle_ray.models.supported_models import KVSpec, LogitsOf, head_dims

SLIDING = "sliding_attention"
FULL_ATTENTION = "full_attention"
LayoutOf = Callable[[bool], AttentionMetadata]


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What a DFlash head drafts.

    Attributes:
        size: rows of the block that the head was trained with, the root included.
        mask_token_id: the token whose embedding fills rows of unknown tokens.
        feature_layers: layers of the target whose concatenated inputs it reads.
        causal: for each layer, whether a row of the block attends to no later row.
        from_root: row i predicts the token after it, not the token in its place.
        path: the path head, which adds a node's contribution to the logits of its children.
        conv: convolution of DFlash2's layers; None in others.
    """

    size: int
    mask_token_id: int
    feature_layers: tuple[int, ...]
    causal: tuple[bool, ...]
    from_root: bool = False
    path: PathShape = NO_PATH
    conv: ConvShape | None = None

    @property
    def num_levels(self) -> int:
        """Return how many tokens one block drafts."""
        return self.size if self.from_root else self.size - 1

    def num_rows(self, num_levels: int) -> int:
        """Return the rows of a block that drafts num_levels tokens."""
        return num_levels if self.from_root else num_levels + 1


class DFlashHead(nn.Module):
    """A DFlash head: its layers, and the norms before and after them.

    Args:
        config: config of the layers; hidden_size and vocab_size are the target's.
        draft_vocab_size: rows of the head's own lm_head; None uses the target's lm_head.
        own_embedding: the checkpoint has its own token embedding.
    """

    method = "dflash"
    first_position = 1
    d2t: Int[Tensor, " Dv"]
    t2d: Bool[Tensor, " V"]

    def __init__(
        self,
        config: Qwen3Config,
        block: BlockShape,
        *,
        draft_vocab_size: int | None = None,
        own_embedding: bool = False,
    ):
        super().__init__()
        config._attn_implementation = ATTENTION_NAME
        self.config = config
        self.block = block
        self.embed_tokens = (
            nn.Embedding(config.vocab_size, config.hidden_size) if own_embedding else None
        )
        self.fc = nn.Linear(
            len(block.feature_layers) * config.hidden_size, config.hidden_size, bias=False
        )
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = None
        self.rotary = exact_rotary(config)
        if draft_vocab_size is not None:
            self.lm_head = nn.Linear(config.hidden_size, draft_vocab_size, bias=False)
            self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.ones(config.vocab_size, dtype=torch.bool))
        self._make_path_head(draft_vocab_size or config.vocab_size)
        if block.conv is not None:
            for layer in self.layers:
                layer.attention_conv = GroupedConv(config.hidden_size, block.conv)
                layer.mlp_conv = GroupedConv(config.hidden_size, block.conv)

    def _make_path_head(self, num_drafted: int) -> None:
        """Make the modules of the path head, and of the confidence head, under their published names."""
        shape = self.block.path
        vocab_size = self.config.vocab_size
        hidden_size = self.config.hidden_size
        self.confidence_head = None
        if shape.has_confidence:
            self.confidence_head = ConfidenceHead(
                hidden_size + shape.confidence_with_markov * shape.markov_rank
            )
        if shape.markov_rank:
            self.markov_head = MarkovHead(shape, vocab_size, num_drafted, hidden_size)
        if shape.selector_rank:
            self.candidate_selector = CandidateSelector(shape, vocab_size, hidden_size)
        if shape.gru_hidden_dim:
            self.prefix_gru = PrefixGru(hidden_size, shape.gru_hidden_dim)
            inner = nn.Linear(hidden_size + shape.gru_hidden_dim, shape.emb_dim, bias=False)
            self.embed_proj = nn.Sequential(
                inner, nn.SiLU(), nn.Linear(shape.emb_dim, num_drafted, bias=False)
            )

    @property
    def path(self) -> PathHead | None:
        """Return the path head, which adds to the logits of a node's children; None if this head has none."""
        shape = self.block.path
        if shape.markov_rank:
            return self.markov_head
        if shape.selector_rank:
            return self.candidate_selector
        if shape.gru_hidden_dim:
            return Domino(self.prefix_gru, self.embed_proj, shape.pure_draft_prefix_len)
        return None

    @property
    def decoder_layers(self) -> Iterable[Qwen3DecoderLayer]:
        return cast(Iterable[Qwen3DecoderLayer], self.layers)

    @property
    def token_ids(self) -> Int[Tensor, " Dv"] | None:
        """Return the target's ids of drafted tokens (d2t holds offsets), or None if every token can be drafted."""
        if self.lm_head is None or len(self.d2t) == self.config.vocab_size:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @property
    def kv_spec(self) -> KVSpec:
        config = self.config
        kv_heads = config.num_key_value_heads or config.num_attention_heads
        return KVSpec(config.num_hidden_layers, kv_heads, *head_dims(config))

    def feature_layers(self, num_layers: int) -> tuple[int, ...]:
        return self.block.feature_layers

    def project_features(self, features: Float[Tensor, "*rows F"]) -> Float[Tensor, "*rows H"]:
        """Return the features' projection, from which every layer makes keys and values."""
        return self.hidden_norm(self.fc(features))

    def block_logits(
        self, hidden: Float[Tensor, "*rows H"], target_logits: LogitsOf
    ) -> Float[Tensor, "*rows Dv"]:
        """Return the logits of a block's rows, without a path head's contribution."""
        return target_logits(hidden) if self.lm_head is None else self.lm_head(hidden)

    def logits(
        self, features: Float[Tensor, "*rows I"], target_logits: LogitsOf
    ) -> Float[Tensor, "*rows Dv"]:
        """Return the logits of the children of nodes, with the path head's contribution.

        Args:
            features: concatenation of the block's row that predicts them and the node's latent.
        """
        size = self.config.hidden_size
        logits = self.block_logits(features[..., :size], target_logits)
        return logits if self.path is None else self.path.scores(logits, features[..., size:])

    def confidence(
        self, tokens: Int[Tensor, "B F"], hidden: Float[Tensor, "B 1 H"]
    ) -> Float[Tensor, "B F"] | None:
        """Return the log-odds that a child of each node is accepted; None if the head has no estimate of it."""
        if self.confidence_head is None:
            return None
        inputs = hidden.expand(*tokens.shape, -1)
        if self.block.path.confidence_with_markov:
            inputs = torch.cat([inputs, self.markov_head.markov_w1(tokens)], -1)
        return self.confidence_head(inputs)

    def forward(
        self,
        block: Float[Tensor, "B N H"],
        context: Float[Tensor, "B T H"],
        positions: Int[Tensor, "B N"],
        context_positions: Int[Tensor, "B T"],
        visible: Bool[Tensor, "B N T"],
        same_block: Bool[Tensor, "N N"] | None = None,
    ) -> Float[Tensor, "B N H"]:
        """Return the normed outputs of B blocks of N rows, without a cache.

        Args:
            block: embeddings of the root and of mask tokens.
            context: projected features.
            visible: mask of the context positions that each row attends to; sliding layers narrow
                it.
            same_block: mask of row pairs in one block, if the N rows are several blocks one after
                another. A head with convolutions takes one block.
        """
        if same_block is None:
            same_block = visible.new_ones(block.shape[1], block.shape[1])
        both = torch.cat([context_positions, positions], 1)
        rotary = self.rotary(block, both)
        block_rotary = self.rotary(block, positions)
        hidden = block
        for layer, is_causal in zip(self.decoder_layers, self.block.causal, strict=True):
            own = same_block.tril() if is_causal else same_block
            mask = _visible(visible, own, positions, both, layer.self_attn.sliding_window)
            attend = partial(
                _attend,
                layer.self_attn,
                context=context,
                block_rotary=block_rotary,
                rotary=rotary,
                mask=mask,
            )
            around_attention, around_mlp = convolutions(layer) or (None, None)
            hidden = hidden + _convolved(around_attention, attend, layer.input_layernorm(hidden))
            hidden = hidden + _convolved(
                around_mlp, layer.mlp, layer.post_attention_layernorm(hidden)
            )
        return self.norm(hidden)


def _convolved(
    conv: GroupedConv | None,
    part: Callable[[Float[Tensor, "B N H"]], Float[Tensor, "B N H"]],
    normed: Float[Tensor, "B N H"],
) -> Float[Tensor, "B N H"]:
    """Return the output of attention or MLP for blocks of rows, with the convolution around it if there is one."""
    if conv is None:
        return part(normed)
    rows, corrections = conv.prepare(normed)
    return conv.finish(part(rows), corrections)


def _visible(
    context: Bool[Tensor, "B N T"],
    own: Bool[Tensor, "N N"],
    positions: Int[Tensor, "B N"],
    both: Int[Tensor, "B M"],
    window: int | None,
) -> Bool[Tensor, "B N M"]:
    """Return which rows of the context and of its own block each row attends to."""
    visible = torch.cat([context, own.expand(len(context), -1, -1)], 2)
    if window is None:
        return visible
    return visible & (positions[:, :, None] - both[:, None] < window)


def _attend(
    module: Qwen3Attention,
    normed: Float[Tensor, "B N H"],
    context: Float[Tensor, "B T H"],
    block_rotary: tuple[Tensor, Tensor],
    rotary: tuple[Tensor, Tensor],
    mask: Bool[Tensor, "B N M"],
) -> Float[Tensor, "B N H"]:
    """Return the attention of a block over its context and itself."""
    inputs = torch.cat([context, normed], 1)
    query = module.q_norm(_heads(module.q_proj(normed), module.head_dim))
    key = module.k_norm(_heads(module.k_proj(inputs), module.head_dim))
    value = _heads(module.v_proj(inputs), module.head_dim)
    query = _rotated(query, block_rotary).to(value.dtype)
    key = _rotated(key, rotary).to(value.dtype)
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask[:, None],
        scale=module.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return module.o_proj(out.transpose(1, 2).flatten(2))


def _heads(projected: Float[Tensor, "B T width"], head_dim: int) -> Float[Tensor, "B heads T d"]:
    return projected.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def _rotated(
    x: Float[Tensor, "B heads T d"], rotary: tuple[Tensor, Tensor]
) -> Float[Tensor, "B heads T d"]:
    """Rotate pairs (i, i + d/2) of each head by the row's angles."""
    cosine, sine = (part[:, None] for part in rotary)
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


class BlockDecoder:
    """Runs a DFlash head over packed rows and a KV cache: `write_context` for new tokens, then `run` for blocks.

    Its layers run on the Llama kernels: they write a row's keys and values to the cache, then
    attend.
    """

    def __init__(self, head: DFlashHead):
        self._head = head
        self._ops = ops_for(head.norm.weight)
        self._layers = [Layer.of(module, self._ops) for module in head.layers]
        self._convolutions = [convolutions(module) for module in head.layers]
        self._context = [_key_value_part(layer) for layer in self._layers]
        self._angles = Angles(head.rotary)

    def write_context(
        self,
        cache: KVCache,
        slot_mapping: Int[Tensor, " R"],
        positions: Int[Tensor, " R"],
        features: Float[Tensor, "R F"],
    ) -> None:
        """Write the keys and values of R tokens with these features, in every layer. Runs no attention."""
        context = self._head.project_features(features)
        rotary = self._angles(positions)
        for layer, project in zip(self._layers, self._context, strict=True):
            shape = layer.attention.shape
            cache.write(shape.layer, slot_mapping, *_context_rows(project(context), rotary, shape))

    def run(
        self,
        hidden: Float[Tensor, "R H"],
        positions: Int[Tensor, " R"],
        layout_of: LayoutOf,
        num_rows: int,
    ) -> Float[Tensor, "R H"]:
        """Return the normed outputs of blocks whose embeddings are in `hidden`, which is overwritten.

        Args:
            layout_of: the rows' metadata, with causal blocks or not.
            num_rows: number of rows of each block.
        """
        delta = None
        rotary = self._angles(positions)
        parts = zip(self._layers, self._convolutions, self._head.block.causal, strict=True)
        for layer, convs, is_causal in parts:
            normed = layer.normed_input(hidden, delta)
            layout = layout_of(is_causal)
            if convs is None:
                delta = layer(hidden, normed, rotary, layout)
                continue
            attend = partial(layer.attention, rotary=rotary, layout=layout)
            out = _convolved_rows(convs[0], attend, cast(Tensor, normed), num_rows)
            normed = normed_sum(self._ops, hidden, out, cast(Norm, layer.post_norm))
            delta = _convolved_rows(convs[1], layer.mlp, normed, num_rows)
        return normed_sum(self._ops, hidden, delta, self._head.norm)


def _convolved_rows(
    conv: GroupedConv,
    part: Callable[[Float[Tensor, "R H"]], Float[Tensor, "R H"]],
    normed: Float[Tensor, "R H"],
    num_rows: int,
) -> Float[Tensor, "R H"]:
    """Compute `_convolved` for packed rows of several blocks."""

    def part_of_blocks(rows: Float[Tensor, "B N H"]) -> Float[Tensor, "B N H"]:
        return part(rows.flatten(0, 1)).view_as(rows)

    blocks = normed.view(-1, num_rows, normed.shape[1])
    return _convolved(conv, part_of_blocks, blocks).flatten(0, 1)


def _key_value_part(layer: Layer) -> nn.Module:
    """Return the key and value rows of a layer's merged projection: a copy, since queries are its larger part."""
    shape = layer.attention.shape
    begin = shape.heads * shape.head_dim
    size = 2 * shape.kv_heads * shape.head_dim
    return slice_rows(layer.attention.qkv, torch.arange(begin, begin + size))


def _context_rows(
    projected: Float[Tensor, "R width"], rotary: Rotary, shape: AttentionShape
) -> tuple[Float[Tensor, "kv_heads R d"], Float[Tensor, "kv_heads R d"]]:
    """Return one layer's keys, normed and rotated, and values of tokens that the target has read."""
    heads = projected.view(len(projected), 2, shape.kv_heads, shape.head_dim)
    keys, values = heads.unbind(1)
    if shape.k_norm is not None:
        keys = F.rms_norm(keys, shape.k_norm.shape, shape.k_norm, shape.norm_eps)
    keys = rotated(keys, rotary.cosine, rotary.sine)
    return keys.transpose(0, 1), values.transpose(0, 1)
