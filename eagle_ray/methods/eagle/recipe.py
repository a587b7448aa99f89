"""Training of EAGLE heads: EagleRecipe on the target's features, Eagle3Recipe on the target's distributions.

EAGLE-1/2 predict the target's next feature, and through its lm_head the next token (arXiv
2401.15077, section 3).

For position i the head reads the embedding of token i+1 and the target's feature i. Its output is
compared with feature i+1:

    loss = feature_weight * SmoothL1(output, feature)
         + token_weight * CE(softmax(lm_head(feature)), lm_head(output))

A position counts only if its predicted token, i+2, is in an answer. Uniform noise on the features
that the head reads imitates its own errors when it drafts. With a draft vocabulary, the cross-entropy
is over its rows of the lm_head, and only where the target's preferred token is among them.

With several passes the head also reads its own outputs, as it does when it drafts (HASS, arXiv
2408.15766): in pass s it reads the embedding of token i+1+s and its output of the pass before, and
predicts feature i+1+s. Pass s weighs decay^s.

EAGLE-3 is trained on its own outputs alone (training-time test, arXiv 2503.01840, section 3.2). In
pass s, pair t predicts token t+2+s. There is no feature loss:

    loss = sum over s of decay^s * CE(target's distribution, head's logits)

Both distributions are over the draft vocabulary. A position counts if its token is an answer's and
the target's preferred token is in the draft vocabulary.

The three features are inputs of layers, before any norm, and a few of their numbers may be hundreds
of times larger than the others. So fc is trained on features that are divided by about their root
mean square, number by number, and `save` folds the factors into its weight: the published layout
has no such norm. A head to start from is unfolded first.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from eagle_ray.config.head_training import TrainConfig, num_passes
from eagle_ray.core.errors import ConfigError
from eagle_ray.methods.eagle.checkpoint import head_config, load_head
from eagle_ray.methods.eagle.draft_vocab import HEAD_FILE, head_vocab, write_draft_vocab
from eagle_ray.methods.eagle.heads import MIN_TARGET_LAYERS, Eagle3Head, EagleHead
from eagle_ray.methods.head_files import (
    KEYS_FROM_TARGET,
    PUBLISHED_ROPE_THETA,
    read_config,
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
from eagle_ray.training.unrolled_attention import UnrolledAttention

OPTIONAL_OF_TARGET = (
    "num_key_value_heads",
    "head_dim",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
ARCHITECTURE = "EagleLlamaForCausalLM"  # vLLM's name; no bias in fc, which vLLM's loader refuses
ARCHITECTURE_3 = "LlamaForCausalLMEagle3"  # SGLang's and vLLM's name, with draft_vocab_size
PUBLISHED_DRAFT_VOCAB = 32_000  # tokens of published EAGLE-3 heads
# The published noise is for documents of 512 tokens and shrinks with longer ones.
NOISE_LENGTH = 512
# Root mean square of the embedding's share in the first output of fc; that of features is about 1.
EMBEDDING_SCALE = 0.5


@dataclass(frozen=True, slots=True)
class EagleLoss:
    """Weights of the loss, and its passes.

    Attributes:
        noise: width of the uniform noise, for documents of NOISE_LENGTH tokens.
        decay: weight of each pass relative to the one before.
    """

    feature_weight: float = 1.0
    token_weight: float = 0.1
    noise: float = 0.2
    num_passes: int = 1
    decay: float = 0.8


class EagleRecipe(HeadRecipe):
    """Trains an EagleHead.

    Args:
        raw_config: the head's config.json.
        dtype: dtype in which matrix products are computed.
        start: head to train further; None draws a new one.
    """

    trains_further = True
    head: EagleHead

    def __init__(
        self,
        target: FrozenTarget,
        raw_config: dict[str, Any],
        loss: EagleLoss,
        dtype: torch.dtype,
        start: EagleHead | None = None,
    ):
        bias = raw_config.get("bias", True)
        self.head = (
            start or EagleHead(head_config(raw_config), bias=bias, own_embedding=False)
        ).to(target.device)
        self._target = target
        self._raw_config = raw_config
        self.loss = loss
        self._dtype = dtype
        self.num_counts = 2 * loss.num_passes
        self.names = ("loss", "feature_loss", "token_loss", *agreement_names(loss.num_passes))
        if start is None:
            initialize_eagle(self.head, target)

    @classmethod
    def start_from(cls, path: Path, target: Any) -> StartHead:
        head = load_head(path, target)
        if not isinstance(head, EagleHead):
            raise ConfigError(f"{path} is another kind of head than head.method: eagle2")
        head.embed_tokens = None
        return StartHead(head, read_config(path), head_vocab(path, target.vocab_size))

    @classmethod
    def make(
        cls,
        config: TrainConfig,
        target_config: Any,
        target: FrozenTarget,
        feature_scale: Float[Tensor, " F"] | None,
        dtype: torch.dtype,
        start: StartHead | None,
    ) -> EagleRecipe:
        loss = EagleLoss(
            config.loss.feature,
            config.loss.token,
            config.loss.noise,
            num_passes(config),
            config.loss.decay,
        )
        if start is not None:
            return cls(target, start.raw_config, loss, dtype, start.head)
        return cls(target, head_json(ARCHITECTURE, config, target_config), loss, dtype)

    def counts(self, batch: FeatureBatch) -> Float[Tensor, " C"]:
        """Return the positions of each pass's feature loss and token loss."""
        counts: list[int] = []
        for s in range(self.loss.num_passes):
            counted, known = self._counted(batch, s)
            counts.append(int(counted.sum()))
            counts.append(int((counted & known).sum()))
        return torch.tensor(counts, dtype=torch.float64)

    def losses(self, batch: FeatureBatch, counts: Float[Tensor, " C"], seed: int) -> Losses:
        device = batch.packed.ids.device
        total = torch.zeros((), device=device)
        sums: dict[str, float] = {}
        with autocast(device, self._dtype):
            features = batch.features[batch.packed.pairs.rows].float() + self._noise(batch, seed)
            outputs = unroll(self.head, self._target, batch, features, self.loss.num_passes)
            for s, output in enumerate(outputs):
                loss, parts = self._pass_loss(batch, output, s, counts[2 * s : 2 * s + 2])
                total = total + self.loss.decay**s * loss
                sums = parts | sums  # the losses that are reported are the first pass's
        return Losses(total, sums | {"loss": float(total.detach())})

    def _pass_loss(
        self,
        batch: FeatureBatch,
        output: Float[Tensor, "P H"],
        unrolled: int,
        counts: Float[Tensor, " 2"],
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of one pass, and the values to report.

        Args:
            unrolled: number of the pass.
            counts: positions of both losses in the whole step.
        """
        counted, known = self._counted(batch, unrolled)
        output = output[counted]
        known = known[counted]
        wanted_rows = batch.packed.pairs.rows_after(1 + unrolled)[counted]
        wanted = batch.hidden[wanted_rows]
        logits = self._target.logits(output)
        probabilities = self._target.probabilities(wanted)

        distance = F.smooth_l1_loss(output.float(), wanted.float(), reduction="none")
        feature_loss = mean_over(distance.mean(-1).sum(), counts[0])
        cross_entropy = F.cross_entropy(logits[known], probabilities[known], reduction="sum")
        token_loss = mean_over(cross_entropy, counts[1])
        loss = self.loss.feature_weight * feature_loss + self.loss.token_weight * token_loss

        agreement = self._target.token_ids[logits.argmax(-1)] == batch.greedy_ids[wanted_rows]
        parts = {
            "feature_loss": float(feature_loss.detach()),
            "token_loss": float(token_loss.detach()),
            f"agreement_{unrolled + 1}": float(agreement.sum()) / max(1.0, float(counts[0])),
        }
        return loss, parts

    def save(self, path: Path) -> None:
        save_head(self.head, self._raw_config, path)
        if not self._target.covers_all:
            write_draft_vocab(path / HEAD_FILE, self._target.token_ids.tolist())

    def _counted(
        self, batch: FeatureBatch, unrolled: int
    ) -> tuple[Bool[Tensor, " P"], Bool[Tensor, " P"]]:
        """Return which pairs count in a pass, and where the target's preferred token is in the draft vocabulary."""
        pairs = batch.packed.pairs
        greedy_ids = batch.greedy_ids[pairs.rows_after(1 + unrolled)]
        return pairs.predicts_answer(2 + unrolled), self._target.draft_ids[greedy_ids] >= 0

    def _noise(self, batch: FeatureBatch, seed: int) -> Float[Tensor, "P H"]:
        """Return uniform noise for the features of a shard's P pairs. Its range is inverse to a document's length."""
        pairs = batch.packed.pairs
        generator = torch.Generator().manual_seed(seed)
        noise = torch.rand(len(pairs.rows), batch.hidden.shape[1], generator=generator) - 0.5
        widths = [self.loss.noise * NOISE_LENGTH / (length + 1) for length in pairs.lengths]
        width = torch.repeat_interleave(torch.tensor(widths), torch.tensor(pairs.lengths))
        return (noise * width[:, None]).to(batch.hidden.device)


def initialize_eagle(head: EagleHead, target: FrozenTarget) -> None:
    """Draw the weights; fc starts as a copy of the feature, plus a random projection of the embedding.

    The copy is a fair first guess. The projection is scaled up, since embeddings are many times
    smaller than features.
    """
    initialize_linears(head)
    hidden_size = head.config.hidden_size
    with torch.no_grad():
        step = max(1, target.vocab_size // 4096)
        sample = torch.arange(0, target.vocab_size, step, device=target.device)
        embedding_norm = target.embed(sample).norm(dim=1).mean()
        head.fc.weight[:, :hidden_size].normal_(std=float(EMBEDDING_SCALE / embedding_norm))
        head.fc.weight[:, hidden_size:].copy_(torch.eye(hidden_size))
        if head.fc.bias is not None:
            head.fc.bias.zero_()


@dataclass(frozen=True, slots=True)
class UnrolledLoss:
    """Settings of EAGLE-3's loss.

    Attributes:
        num_passes: unrolled passes of the head.
        decay: weight of each pass relative to the one before.
    """

    num_passes: int = 7
    decay: float = 0.8


class Eagle3Recipe(HeadRecipe):
    """Trains an Eagle3Head over the target's draft vocabulary.

    Args:
        raw_config: the head's config.json.
        feature_scale: factor by which each element of the target's concatenated features is
            multiplied (see `feature_scale`).
        dtype: dtype of matrix products.
        start: head to train further; None draws a new one.
    """

    scales_features = True
    trains_further = True
    head: Eagle3Head

    def __init__(
        self,
        target: FrozenTarget,
        raw_config: dict[str, Any],
        feature_scale: Float[Tensor, " F"],
        loss: UnrolledLoss,
        dtype: torch.dtype,
        start: Eagle3Head | None = None,
    ):
        new = Eagle3Head(
            head_config(raw_config),
            draft_vocab_size=len(target.token_ids),
            feature_size=len(feature_scale),
            own_embedding=False,
        )
        self.head = (start or new).to(target.device)
        self.feature_scale = feature_scale.to(target.device)
        self._target = target
        self._raw_config = raw_config
        self.loss = loss
        self._dtype = dtype
        self.num_counts = loss.num_passes
        self.names = ("loss", "token_loss", *agreement_names(loss.num_passes))
        if start is None:
            initialize_eagle3(self.head, target)
        else:  # a published head has its factors in fc
            self._scale_inputs(self.head, 1 / self.feature_scale)

    @classmethod
    def draft_vocab_size(cls, config: TrainConfig, vocab_size: int) -> int:
        return min(config.head.draft_vocab_size or PUBLISHED_DRAFT_VOCAB, vocab_size)

    @classmethod
    def feature_layers(cls, config: TrainConfig, num_layers: int) -> tuple[int, ...]:
        if num_layers < MIN_TARGET_LAYERS:
            raise ConfigError(
                f"head.method: eagle3 reads a target of {MIN_TARGET_LAYERS} layers or more, and {config.model.target} "
                f"has {num_layers}. Use eagle2"
            )
        return 2, num_layers // 2, num_layers - 3

    @classmethod
    def start_from(cls, path: Path, target: Any) -> StartHead:
        head = load_head(path, target)
        if not isinstance(head, Eagle3Head):
            raise ConfigError(f"{path} is another kind of head than head.method: eagle3")
        _check_trainable(path, head)
        head.embed_tokens = None
        token_ids = None if head.token_ids is None else head.token_ids.tolist()
        return StartHead(head, read_config(path), token_ids)

    @classmethod
    def make(
        cls,
        config: TrainConfig,
        target_config: Any,
        target: FrozenTarget,
        feature_scale: Float[Tensor, " F"] | None,
        dtype: torch.dtype,
        start: StartHead | None,
    ) -> Eagle3Recipe:
        raw = (
            head_json(ARCHITECTURE_3, config, target_config) if start is None else start.raw_config
        )
        assert feature_scale is not None
        return cls(
            target,
            raw | {"draft_vocab_size": len(target.token_ids)},
            feature_scale,
            UnrolledLoss(num_passes(config), config.loss.decay),
            dtype,
            start=None if start is None else start.head,
        )

    def counts(self, batch: FeatureBatch) -> Float[Tensor, " S"]:
        """Return the positions of each pass's loss."""
        counts = [int(self._counted(batch, s).sum()) for s in range(self.loss.num_passes)]
        return torch.tensor(counts, dtype=torch.float64)

    def losses(self, batch: FeatureBatch, counts: Float[Tensor, " S"], seed: int) -> Losses:
        pairs = batch.packed.pairs
        device = batch.packed.ids.device
        total = torch.zeros((), device=device)
        sums: dict[str, float] = {"loss": 0.0, "token_loss": 0.0}
        with autocast(device, self._dtype):
            features = batch.features[pairs.rows].float() * self.feature_scale
            projected = self.head.project_features(features)
            outputs = unroll(self.head, self._target, batch, projected, self.loss.num_passes)
            for s, output in enumerate(outputs):
                counted = self._counted(batch, s)
                logits = self.head.logits(output[counted], self._target.logits).float()

                # What the target says where the predicted token was chosen.
                wanted_rows = pairs.rows_after(1 + s)[counted]
                probabilities = self._target.probabilities(batch.hidden[wanted_rows])
                loss = mean_over(F.cross_entropy(logits, probabilities, reduction="sum"), counts[s])
                total = total + self.loss.decay**s * loss

                drafted = self._target.token_ids[logits.argmax(-1)]
                agreement = drafted == batch.greedy_ids[wanted_rows]
                sums[f"agreement_{s + 1}"] = float(agreement.sum()) / max(1.0, float(counts[s]))
                if s == 0:
                    sums["token_loss"] += float(loss.detach())
        return Losses(total, sums | {"loss": float(total.detach())})

    def save(self, path: Path) -> None:
        head = copy.deepcopy(self.head)
        self._scale_inputs(head, self.feature_scale)
        if self._target.covers_all:  # vLLM refuses maps between equal vocabularies
            head.register_buffer("d2t", head.d2t, persistent=False)
            head.register_buffer("t2d", head.t2d, persistent=False)
        save_head(head, self._raw_config, path)

    @staticmethod
    def _scale_inputs(head: Eagle3Head, factors: Float[Tensor, " F"]) -> None:
        with torch.no_grad():
            head.fc.weight.mul_(factors)

    def _counted(self, batch: FeatureBatch, unrolled: int) -> Bool[Tensor, " P"]:
        """Return which pairs count in a pass: the target prefers a token there that can be drafted."""
        pairs = batch.packed.pairs
        greedy_ids = batch.greedy_ids[pairs.rows_after(1 + unrolled)]
        is_drafted = self._target.draft_ids[greedy_ids] >= 0
        return pairs.predicts_answer(2 + unrolled) & is_drafted


def _check_trainable(path: Path, head: Eagle3Head) -> None:
    """Raise ConfigError for a head whose layers training does not unroll, or would save in another order."""
    config = head.config
    is_plain = not any(getattr(config, "layer_windows", None) or ())
    is_plain = is_plain and getattr(config, "rotary_dim", None) is None
    if not is_plain or head.layers or head.lm_head is None or head.method != "eagle3":
        raise ConfigError(
            f"{path}: heads with windows, partial rotation, several layers, masks or the target's lm_head are not "
            "trained further; start from an EAGLE-3 head of one plain layer, or from none"
        )


def initialize_eagle3(head: Eagle3Head, target: FrozenTarget) -> None:
    """Draw the weights; fc starts as the last of the three features, and the lm_head as the target's rows."""
    initialize_linears(head)
    offsets = target.token_ids - torch.arange(len(target.token_ids), device=target.device)
    with torch.no_grad():
        head.d2t.copy_(offsets)
        head.t2d.copy_(target.draft_ids >= 0)
        assert head.lm_head is not None, "a new head has one"
        if target.lm_head.shape == head.lm_head.weight.shape:
            head.lm_head.weight.copy_(target.lm_head)
        hidden_size, feature_size = head.fc.weight.shape
        if feature_size % hidden_size == 0:
            head.fc.weight.mul_(0.1)
            head.fc.weight[:, -hidden_size:].add_(torch.eye(hidden_size, device=target.device))


def unroll(
    head: EagleHead | Eagle3Head,
    target: FrozenTarget,
    batch: FeatureBatch,
    hidden: Float[Tensor, "P H"],
    num_passes: int,
) -> Iterator[Float[Tensor, "P H"]]:
    """Yield the head's output of each pass for all P pairs.

    In pass s, pair t reads the embedding of token t+1+s and, from the second pass on, the head's
    output of the pass before, as it does when it drafts.

    Args:
        hidden: features that the first pass reads.
    """
    pairs = batch.packed.pairs
    ids = batch.packed.ids
    attention = UnrolledAttention(pairs.lengths, ids.device)
    for s in range(num_passes):
        embeddings = target.embed(ids[pairs.rows_after(1 + s)])
        positions = pairs.positions[None] + s
        hidden = head(embeddings[None], hidden[None], positions, attention)[0]
        yield hidden


def head_json(architecture: str, config: TrainConfig, target: Any) -> dict[str, Any]:
    """Return the config.json of a new EAGLE head.

    Args:
        target: the target's config.
    """
    values = {key: getattr(target, key) for key in KEYS_FROM_TARGET}
    for key in OPTIONAL_OF_TARGET:
        value = getattr(target, key, None)
        if value is not None:
            values[key] = value
    return {
        "architectures": [architecture],
        "model_type": "llama",
        **values,
        "intermediate_size": config.head.intermediate_size or target.intermediate_size,
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "attention_bias": False,
        "bias": False,
        "mlp_bias": False,
        "rope_theta": PUBLISHED_ROPE_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": PUBLISHED_ROPE_THETA},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
