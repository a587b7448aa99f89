"""DFlash: each answer's tokens are predicted in blocks behind an anchor token (arXiv 2602.06036, section 4).

    text      t0 t1 t2 t3 t4 t5 t6 t7        anchor t2, block of 4: one row of the head for each of t2 .. t5
    block           t2  m  m  m              the context is the features of t0 and t1
    predicted          t3 t4 t5

The loss of a row is the cross-entropy with the target's distribution of its token
(vllm-project/speculators losses/utils.py at c05b95b3; JetSpec's forward divergence, arXiv
2606.18394), the k-th after the anchor weighted by exp(-(k - 1) / gamma). Anchors are spread over
the answers: one of every `anchor_every` tokens, at another offset in each document.

With head.markov_rank the head has DSpark's Markov head (methods/dflash/paths.py): a row's logits
also depend on the true token before the predicted one, and its modules learn by the same loss. Its
w2 starts at 0, so the head begins as DFlash's.

With a draft vocabulary the head has an lm_head of its own over it, which starts as the target's
rows and is trained, as an EAGLE-3 head's is. Both distributions are then over these tokens, and a
position counts if the target's preferred token is one of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from eagle_ray.config.head_training import TrainConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.methods.dflash.checkpoint import block_of, layer_config, spread_layers
from eagle_ray.methods.dflash.heads import DFlashHead
from eagle_ray.methods.head_files import (
    KEYS_FROM_TARGET,
    PUBLISHED_ROPE_THETA,
    SPECULATORS,
    save_head,
)
from eagle_ray.training.frozen_target import FeatureBatch, FrozenTarget
from eagle_ray.training.head_recipe import (
    HeadRecipe,
    Losses,
    StartHead,
    agreement_names,
    autocast,
    initialize_linears,
    mean_over,
)
from eagle_ray.training.packing import PackedBatch

# Blocks that attend in one call: its mask has this times the block's rows, squared.
ANCHORS_PER_PASS = 64


@dataclass(frozen=True, slots=True)
class BlockLoss:
    """Which blocks a document gives to the loss, and the weights of their positions.

    Attributes:
        gamma: positions over which the weight falls by a factor of e.
        anchor_every: answer tokens per anchor.
    """

    gamma: float = 4.0
    anchor_every: int = 4


@dataclass(frozen=True, slots=True)
class Blocks:
    """The training blocks of one document in a packed batch.

    Attributes:
        begin: first row of the document.
        length: rows of the document.
        anchors: position of each block's first token, counted in the document.
    """

    begin: int
    length: int
    anchors: Int[Tensor, " A"]


class DFlashRecipe(HeadRecipe):
    """Trains a DFlash head that reads the target's embedding, and its lm_head unless it has a draft vocabulary.

    Args:
        head: the head to train. It has its own lm_head if the draft vocabulary is not every token.
        raw_config: the head's config.json.
        feature_scale: factor by which each element of the target's concatenated features is
            multiplied.
        dtype: dtype of matrix products.
    """

    scales_features = True
    head: DFlashHead

    def __init__(
        self,
        target: FrozenTarget,
        head: DFlashHead,
        raw_config: dict[str, Any],
        feature_scale: Float[Tensor, " F"],
        loss: BlockLoss,
        dtype: torch.dtype,
    ):
        self.head = head.to(target.device)
        self.feature_scale = feature_scale.to(target.device)
        self._target = target
        self._raw_config = raw_config
        self.loss = loss
        self._dtype = dtype
        self._block = head.block
        self.num_counts = self._block.num_levels
        self.names = ("loss", "token_loss", *agreement_names(self.num_counts))
        initialize_dflash(self.head, target)

    @classmethod
    def draft_vocab_size(cls, config: TrainConfig, vocab_size: int) -> int:
        size = min(config.head.draft_vocab_size or vocab_size, vocab_size)
        if config.head.markov_rank and config.head.causal_head:
            raise ConfigError(
                "head.causal_head: DSpark's layouts have no causal heads. Set head.markov_rank to 0"
            )
        if size < vocab_size and config.head.causal_head:
            raise ConfigError(
                "head.causal_head: speculators' layout, in which a dflash head with a draft vocabulary is written, has "
                "no causal heads. Leave out head.draft_vocab_size"
            )
        return size

    @classmethod
    def feature_layers(cls, config: TrainConfig, num_layers: int) -> tuple[int, ...]:
        return tuple(i + 1 for i in outputs_read(config, num_layers))

    @classmethod
    def make(
        cls,
        config: TrainConfig,
        target_config: Any,
        target: FrozenTarget,
        feature_scale: Float[Tensor, " F"] | None,
        dtype: torch.dtype,
        start: StartHead | None,
    ) -> DFlashRecipe:
        size = None if target.covers_all else len(target.token_ids)
        raw = dflash_json(config, target_config, size)
        head = DFlashHead(layer_config(raw), block_of(raw, target_config), draft_vocab_size=size)
        assert feature_scale is not None
        loss = BlockLoss(config.loss.gamma, config.loss.anchor_every)
        return cls(target, head, raw, feature_scale, loss, dtype)

    def counts(self, batch: FeatureBatch) -> Float[Tensor, " L"]:
        """Return the predicted tokens at each distance from an anchor."""
        counts = torch.zeros(self.num_counts, dtype=torch.float64)
        for blocks in blocks_of(batch.packed, self.loss.anchor_every):
            counts += self._counted(batch, blocks).sum(0).cpu()
        return counts

    def losses(self, batch: FeatureBatch, counts: Float[Tensor, " L"], seed: int) -> Losses:
        ids = batch.packed.ids
        by_level = torch.zeros(self.num_counts, device=ids.device)
        agreed = torch.zeros(self.num_counts, device=ids.device)
        with autocast(ids.device, self._dtype):
            for blocks in blocks_of(batch.packed, self.loss.anchor_every):
                rows = slice(blocks.begin, blocks.begin + blocks.length)
                features = batch.features[rows].float() * self.feature_scale
                context = self.head.project_features(features)
                for anchors in blocks.anchors.split(ANCHORS_PER_PASS):
                    part = Blocks(blocks.begin, blocks.length, anchors)
                    level, losses, agreement = self._predictions(batch, part, context)
                    by_level = by_level.index_add(0, level, losses)
                    agreed.index_add_(0, level, agreement.float())

        # The mean of each level, weighed the less the deeper it is.
        means = [mean_over(total, count) for total, count in zip(by_level, counts, strict=True)]
        weighted = [exp(-k / self.loss.gamma) * mean for k, mean in enumerate(means)]
        total = torch.stack(weighted).sum()
        sums = {"loss": float(total.detach()), "token_loss": float(means[0].detach())}
        for k, name in enumerate(agreement_names(self.num_counts)):
            sums[name] = float(agreed[k]) / max(1.0, float(counts[k]))
        return Losses(total, sums)

    def _predictions(
        self, batch: FeatureBatch, blocks: Blocks, context: Float[Tensor, "T H"]
    ) -> tuple[Int[Tensor, " P"], Float[Tensor, " P"], Bool[Tensor, " P"]]:
        """Return the level, the loss and the agreement with the target of each counted prediction."""
        counted = self._counted(batch, blocks)
        ids = batch.packed.ids[blocks.begin : blocks.begin + blocks.length]
        logits = self._logits(ids, context, blocks.anchors)[counted].float()

        # What the target says at the row before each predicted token.
        target_rows = self._predicted_rows(blocks)[counted] - 1
        wanted = self._target.probabilities(batch.hidden[target_rows])
        losses = F.cross_entropy(logits, wanted, reduction="none")
        drafted = self._target.token_ids[logits.argmax(-1)]
        level = counted.nonzero()[:, 1]
        return level, losses, drafted == batch.greedy_ids[target_rows]

    def matrices(self) -> list[nn.Parameter]:
        """Return the parameters that Muon updates: matrices without a row per token."""
        by_token = set()
        for name, parameter in self.head.named_parameters():
            if name.startswith("markov_head.markov_w"):
                by_token.add(id(parameter))
        return [parameter for parameter in super().matrices() if id(parameter) not in by_token]

    def save(self, path: Path) -> None:
        """Write the published layout. DeepSpec's repeats the target's embedding and lm_head."""
        head = copy.deepcopy(self.head)
        with torch.no_grad():
            head.fc.weight.mul_(self.feature_scale)
        repeated = {}
        if self._block.path.markov_rank and head.lm_head is None:
            every = torch.arange(self._target.vocab_size, device=self._target.device)
            repeated = {
                "embed_tokens.weight": self._target.embed(every),
                "lm_head.weight": self._target.lm_head,
            }
        save_head(head, self._raw_config, path, repeated=repeated)

    def _predicted_rows(self, blocks: Blocks) -> Int[Tensor, "A L"]:
        """Return the row of the token that each level of each block predicts; it may be past the document."""
        distance = torch.arange(1, self.num_counts + 1, device=blocks.anchors.device)
        return blocks.begin + blocks.anchors[:, None] + distance

    def _counted(self, batch: FeatureBatch, blocks: Blocks) -> Bool[Tensor, "A L"]:
        """Return whether the predicted token exists, belongs to an answer and can be drafted.

        It can if the token that the target prefers there is in the draft vocabulary.
        """
        end = blocks.begin + blocks.length
        rows = self._predicted_rows(blocks)
        inside = rows.clamp(max=end - 1)
        is_drafted = self._target.draft_ids[batch.greedy_ids[inside - 1]] >= 0
        return (rows < end) & batch.packed.is_answer[inside] & is_drafted

    def _logits(
        self, ids: Int[Tensor, " T"], context: Float[Tensor, "T H"], anchors: Int[Tensor, " A"]
    ) -> Float[Tensor, "A L V"]:
        """Run blocks behind these anchors of one document."""
        num_levels = self.num_counts
        num_rows = self._block.num_rows(num_levels)
        num_blocks = len(anchors)
        device = ids.device

        # A block is its anchor's token and then mask tokens.
        offset = torch.arange(num_rows, device=device)
        tokens = torch.where(offset == 0, ids[anchors][:, None], self._block.mask_token_id)
        positions = anchors[:, None] + offset

        # All blocks in one pass: a row sees its own block, and the document before its anchor.
        block = torch.arange(num_blocks, device=device).repeat_interleave(num_rows)
        place = torch.arange(len(ids), device=device)
        hidden = self.head(
            block=self._target.embed(tokens).flatten(0, 1)[None],
            context=context[None],
            positions=positions.flatten()[None],
            context_positions=place[None],
            visible=(place < anchors[block][:, None])[None],
            same_block=block[:, None] == block,
        )[0]
        hidden = hidden.view(num_blocks, num_rows, -1)[:, num_rows - num_levels :]
        logits = self.head.block_logits(hidden, self._target.logits)
        if self.head.path is None:
            return logits

        # With a path the true token before each predicted one is known.
        before = anchors[:, None] + torch.arange(num_levels, device=device)
        true_tokens = ids[before.clamp(max=len(ids) - 1)]
        return self.head.path.scores(logits, self._latents(true_tokens, hidden))

    def _latents(
        self, tokens: Int[Tensor, "A L"], hidden: Float[Tensor, "A L H"]
    ) -> Float[Tensor, "A L R"]:
        """Return the latents of true paths, from the token before each predicted one."""
        path = self.head.path
        assert path is not None
        latents = []
        state = hidden.new_zeros(len(tokens), 1, path.state_size)
        for level in range(tokens.shape[1]):
            row = slice(level, level + 1)
            latent, state = path.step(
                self._target.embed, tokens[:, row], hidden[:, row], state, level
            )
            latents.append(latent)
        return torch.cat(latents, 1)


def blocks_of(packed: PackedBatch, anchor_every: int) -> Iterator[Blocks]:
    """Yield the training blocks of each document; documents without an anchor are skipped.

    An anchor is a position whose next token belongs to an answer. Every `anchor_every`-th position
    can be one, at an offset that differs between documents.
    """
    begin = 0
    for index, length in zip(packed.indices, packed.lengths, strict=True):
        # Positions from 0 in the document whose next token is an answer's.
        is_answer = packed.is_answer[begin + 1 : begin + length]
        positions = is_answer.nonzero()[:, 0]
        is_chosen = positions % anchor_every == index % anchor_every
        anchors = positions[(positions >= 1) & is_chosen]
        if len(anchors):
            yield Blocks(begin, length, anchors)
        begin += length


def initialize_dflash(head: DFlashHead, target: FrozenTarget) -> None:
    """Initialize a new head: layers as the identity, fc as a copy of the last feature, an lm_head as the target's rows.

    The last norm starts as the number that gives a random direction logits of about 1. Rows of a
    tied lm_head may be long: with ones, SmolLM2's first loss is 84 nats a token.
    """
    initialize_linears(head)
    with torch.no_grad():
        mean_square = target.lm_head.float().square().sum(1).mean()
        head.norm.weight.fill_(float(mean_square.clamp(min=1e-12).rsqrt()))

        # The target's lm_head, and the maps of speculators' layout between both vocabularies.
        if head.lm_head is not None:
            head.lm_head.weight.copy_(target.lm_head)
            draft_ids = torch.arange(len(target.token_ids), device=target.device)
            head.d2t.copy_(target.token_ids - draft_ids)
            head.t2d.copy_(target.draft_ids >= 0)
        if head.block.path.markov_rank:
            head.markov_head.markov_w2.weight.zero_()

        # Layers add little at first, and fc passes the last of the features on.
        for layer in head.decoder_layers:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
        hidden_size = head.fc.weight.shape[0]
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, -hidden_size:].add_(torch.eye(hidden_size, device=head.fc.weight.device))


def outputs_read(config: TrainConfig, num_layers: int) -> list[int]:
    """Return the layers whose outputs a DFlash head reads.

    They are head.target_layer_ids, or the published choice, or all of a target of few layers.
    """
    if num_layers < 2:
        raise ConfigError(
            f"head.method: dflash reads the outputs of layers before the last one, and {config.model.target} has one"
        )
    named = config.head.target_layer_ids
    if named:
        if len({*named}) < len(named) or max(named) > num_layers - 2:
            raise ConfigError(
                f"head.target_layer_ids: must be different layers of the target, 0 to {num_layers - 2} (its last "
                f"layer's output is normed), got {named}"
            )
        return named
    spread = spread_layers(num_layers, config.head.num_layers)
    is_fit = len({*spread}) == len(spread) and min(spread) >= 0 and max(spread) < num_layers - 1
    return spread if is_fit else list(range(num_layers - 1))


def dflash_json(
    config: TrainConfig, target: Any, draft_vocab_size: int | None = None
) -> dict[str, Any]:
    """Return the config.json of a DFlash head: z-lab's layout, or speculators' with a draft vocabulary.

    With a Markov head it is DeepSpec's, or speculators' for dspark. Raises ConfigError.

    Args:
        target: the target's config.
    """
    layers = _dflash_layers(config, target)
    outputs = outputs_read(config, target.num_hidden_layers)
    own = {"block_size": config.head.block_size, "tie_word_embeddings": False, "dtype": "bfloat16"}
    mask = {"mask_token_id": _mask_token(config, target)}
    markov = _markov_keys(config)
    if draft_vocab_size is not None:
        return {
            "architectures": ["DSparkSpeculator" if markov else "DFlashSpeculator"],
            SPECULATORS: "dspark" if markov else "dflash",
            "transformer_layer_config": layers,
            "draft_vocab_size": draft_vocab_size,
            "aux_hidden_state_layer_ids": [i + 1 for i in outputs],
            **({"sample_from_anchor": False} if markov else {}),
            **mask,
            **markov,
            **own,
        }
    if markov:
        ids = {"num_target_layers": target.num_hidden_layers, "target_layer_ids": outputs}
        return {"architectures": ["Qwen3DSparkModel"], **layers, **ids, **mask, **markov, **own}
    causal = {"causal_head": True} if config.head.causal_head else {}
    return {
        "architectures": ["DFlashDraftModel"],
        **layers,
        "num_target_layers": target.num_hidden_layers,
        "dflash_config": {**mask, "target_layer_ids": outputs, **causal},
        **own,
    }


def _markov_keys(config: TrainConfig) -> dict[str, Any]:
    """Return the config keys of DSpark's Markov head, or none without one."""
    if not config.head.markov_rank:
        return {}
    return {
        "markov_rank": config.head.markov_rank,
        "markov_head_type": config.head.markov_head_type,
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    }


def _dflash_layers(config: TrainConfig, target: Any) -> dict[str, Any]:
    """Return the shape of a DFlash head's layers, under the keys of a Qwen3 config."""
    heads = target.num_attention_heads
    rope = getattr(target, "rope_parameters", None) or {}
    return {
        "model_type": "qwen3",
        **{key: getattr(target, key) for key in KEYS_FROM_TARGET},
        "num_key_value_heads": getattr(target, "num_key_value_heads", None) or heads,
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // heads,
        "intermediate_size": config.head.intermediate_size or target.intermediate_size,
        "hidden_act": "silu",
        "num_hidden_layers": config.head.num_layers,
        "layer_types": ["full_attention"] * config.head.num_layers,
        "attention_bias": False,
        "rope_theta": rope.get("rope_theta", PUBLISHED_ROPE_THETA),
    }


def _mask_token(config: TrainConfig, target: Any) -> int:
    """Return head.mask_token, or the target's padding or end token. Raises ConfigError."""
    token = config.head.mask_token
    if token is not None and token >= target.vocab_size:
        raise ConfigError(
            f"head.mask_token: must be a token of the target, 0 to {target.vocab_size - 1}, got {token}"
        )
    if token is not None:
        return token
    if target.pad_token_id is not None:
        return target.pad_token_id
    ends = target.eos_token_id
    end = ends[0] if isinstance(ends, list) else ends
    if end is None:
        raise ConfigError(
            "head.mask_token: missing; the target has neither a padding nor an end token to take for it"
        )
    return end
