"""EagleHead: the draft head of EAGLE-1 and EAGLE-2, one Llama layer over (next token, target feature) pairs.

For position i it reads ``fc(concat[embed(token i+1), feature i])`` and predicts feature i+1, which the target's own
lm_head turns into logits for token i+2. One head serves both generations; only the tree differs (EAGLE-1, section 3).
Module names are the published key names. Does not know trees, caches or files.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from eagle_ray.models.attention import ATTENTION, Layout


class EagleHead(nn.Module):
    """One decoder layer without input norm and without final norm.

    config: the head's own shape. bias: whether fc has one. own_embedding: whether the checkpoint brings its token
    embedding; without one, `embed_tokens` is None and the target's is used.
    """

    def __init__(self, config: LlamaConfig, *, bias: bool, own_embedding: bool):
        super().__init__()
        config._attn_implementation = ATTENTION
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if own_embedding else None
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, 0)])
        self.layers[0].input_layernorm = nn.Identity()
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(
        self,
        embeddings: Float[Tensor, "B T H"],
        features: Float[Tensor, "B T H"],
        positions: Int[Tensor, "B T"],
        rows: Layout | None = None,
    ) -> Float[Tensor, "B T H"]:
        """Predicted features, one per pair.

        embeddings: of the token after each feature. positions: of the features. rows: how the pairs see the cache
        and each other; None is plain causal attention over T.
        """
        hidden = self.fc(torch.cat([embeddings, features], -1))
        rotary = self.rotary(hidden, positions)
        return self.layers[0](hidden, position_ids=positions, position_embeddings=rotary, use_cache=False, rows=rows)
