"""DraftModel: an independent causal LM as a draft head, for speculative sampling (arXiv 2211.17192).

    draft = DraftModel(load_draft_model(path, target.config))
    features = draft.project_features(features)
    hidden = draft(embeddings, features, positions, rows)       # reads the tokens, not the features

It reads every token from the first one on, so position j of its cache holds token j. Any model that
transformers runs as a target can draft, whatever its shape, if both have the same vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from eagle_ray.attention.metadata import AttentionMetadata
from eagle_ray.core.errors import EngineError
from eagle_ray.families import layers_of
from eagle_ray.methods.eagle.heads import HeadForward, head_forward
from eagle_ray.methods.head_files import read_headers
from eagle_ray.models.decoder import Decoder
from eagle_ray.models.loader import input_embedding, load_causal_lm, read_model_config
from eagle_ray.models.supported_models import (
    KVSpec,
    LogitsOf,
    check_config,
    head_dims,
    kv_elements_per_token,
    logits_postprocessor,
    probe,
)
from eagle_ray.parallel.draft_shards import log_whole
from eagle_ray.parallel.rank_group import RankGroup
from eagle_ray.storage.model_files import gguf_in


class DraftModel(nn.Module):
    """A causal LM behind the DraftHead protocol. Raises EngineError for a model that does not run over our caches."""

    method = "draft_model"
    token_ids = None
    first_position = 0

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self._finished = logits_postprocessor(self.config)
        self.kv_spec = probe(
            model, partial(self.logits, target_logits=None), self.config.max_position_embeddings
        )

    @property
    def embed_tokens(self) -> nn.Embedding:
        return input_embedding(self.model)

    def feature_layers(self, num_layers: int) -> tuple[int, ...]:
        return ()

    def project_features(self, features: Float[Tensor, "*rows F"]) -> Float[Tensor, "*rows F"]:
        return features

    def forward(
        self,
        embeddings: Float[Tensor, "B T H"],
        features: Float[Tensor, "B T F"],
        positions: Int[Tensor, "B T"],
        rows: AttentionMetadata | None = None,
    ) -> Float[Tensor, "B T H"]:
        out = layers_of(self.model)(
            inputs_embeds=embeddings, position_ids=positions, use_cache=False, rows=rows
        )
        return out.last_hidden_state

    def logits(
        self, hidden: Float[Tensor, "*rows H"], target_logits: LogitsOf | None
    ) -> Float[Tensor, "*rows V"]:
        return self._finished(self.model.get_output_embeddings()(hidden))


@head_forward.register
def _(head: DraftModel) -> HeadForward:
    """An independent causal LM, which reads the embeddings alone."""
    decoder = Decoder.of(head.model)
    if decoder is None:
        return head_forward.dispatch(object)(head)
    return lambda embeddings, features, positions, layout: decoder.run(
        embeddings, positions, layout
    )[0]


@dataclass(frozen=True, slots=True)
class DraftModelShape:
    """Shape of a draft model whose weights are not loaded."""

    method = "draft_model"
    kv_spec: KVSpec

    def feature_layers(self, num_layers: int) -> tuple[int, ...]:
        return ()


def load_draft_model(
    path: Path, target: PretrainedConfig, ranks: RankGroup | None = None
) -> DraftModel:
    """Return the causal LM in `path`, in fp32. Raises EngineError if it cannot be read or lacks the
    target's vocabulary.

    Args:
        ranks: ranks of the target; each has all of the draft model.
    """
    shape = check_draft_model(path, target)
    if ranks is not None:
        log_whole(shape, ranks)
    return DraftModel(load_causal_lm(path, torch.float32, "cpu"))


def check_draft_model(path: Path, target: PretrainedConfig) -> DraftModelShape:
    """Return the draft model's shape from its config and its files' headers.

    Raises EngineError for an unknown family, a vocabulary that differs from the target's, and files
    that hold no model of that config.
    """
    config = read_model_config(path)
    check_config(config)
    if config.vocab_size != target.vocab_size:
        raise EngineError(
            f"{path}: the draft model's vocab_size is {config.vocab_size} and the target's is {target.vocab_size}: "
            "they have different tokens; choose a draft model of the target's family"
        )
    _check_embedding(path, config)
    dims = head_dims(config)
    return DraftModelShape(
        KVSpec(config.num_hidden_layers, kv_elements_per_token(config) // sum(dims), *dims)
    )


def _check_embedding(path: Path, config: PretrainedConfig) -> None:
    """Raise EngineError if the files have no embedding: heads have the config of a model, and not its tensors."""
    stored = read_headers(path)
    if stored is None and gguf_in(path) is None:
        raise EngineError(
            f"{path}: it has a config.json and no weights. Download the draft model again"
        )
    headers = stored or {}
    if "fc.weight" in headers:
        raise EngineError(f"{path}: it has fc.weight, so it is a draft head and no language model")
    shapes = [header.shape for header in headers.values()]
    if headers and not any(len(shape) == 2 and shape[0] >= config.vocab_size for shape in shapes):
        raise EngineError(
            f"{path}: no tensor is an embedding of its {config.vocab_size} tokens, so it is no model"
        )
