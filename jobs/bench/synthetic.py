"""A pair of random weights that decodes a known walk through its vocabulary, with a stated acceptance.

    model, head = synthetic_pair(LLAMA_8B, acceptance=(0.6, 0.15, 0.05), dtype=torch.bfloat16, device="cuda")
    successor(token, LLAMA_8B.vocab_size)       # what the target always picks after a token

The target's layers are random and add nothing, because their norms give them zeros; its lm_head gives each token's
embedding to that token's successor, by far the largest logit. The head passes on an embedding of its own: for every
token a mixture of a few tokens' embeddings, weighted so that its probabilities for their successors are the stated
ones, and with the token itself at the k-th place for just that share of the tokens. So whatever runs the pair, its
k-th child is the target's pick with the stated probability, independently from token to token, at the cost of the
shape's real pass; the head's attention output alone is multiplied by zeros. Knows no trees, engines or prompts.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle_ray.methods.eagle.heads import EagleHead
from jobs.bench.embedding_map import ModelShape
from jobs.bench.widening import seeded, typed

LOGIT = 40.0  # of the successor: that of any other token is a few in size
CHUNK = 8192  # rows of an embedding made at once


def synthetic_pair(
    shape: ModelShape,
    acceptance: tuple[float, ...],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[LlamaForCausalLM, EagleHead]:
    """acceptance: the chances that the target picks the head's first child, its second, ..., below 1 together."""
    with seeded(seed, device), typed(dtype), torch.device(device), torch.no_grad():
        model = LlamaForCausalLM._from_config(_config(shape, shape.num_layers), dtype=dtype)
        head = EagleHead(_config(shape, 1), bias=False, own_embedding=True)
        _silence(model, head)
        embedding, size = model.model.embed_tokens.weight, shape.vocab_size
        embedding.normal_()
        model.lm_head.weight[successor(torch.arange(size), size)] = embedding * (LOGIT / shape.hidden_size)
        model.model.norm.weight.fill_(1)
        for first in range(0, size, CHUNK):
            tokens = torch.arange(first, min(first + CHUNK, size))
            head.embed_tokens.weight[tokens] = _mixtures(tokens, embedding, acceptance)
    return model.eval().requires_grad_(False), head.eval().requires_grad_(False)


def successor(tokens: Int[Tensor, "*N"] | int, vocab_size: int) -> Int[Tensor, "*N"] | int:
    """A permutation of the vocabulary whose one walk visits all of it: steps by a number coprime to its size."""
    step = next(n for n in range(int(0.618 * vocab_size), vocab_size) if math.gcd(n, vocab_size) == 1)
    return (tokens + step) % vocab_size


def _silence(model: LlamaForCausalLM, head: EagleHead) -> None:
    """Nothing is added to a residual; the head's output is the embedding that it read."""
    for layer in model.model.layers:
        layer.input_layernorm.weight.zero_()
        layer.post_attention_layernorm.weight.zero_()
    head.layers[0].post_attention_layernorm.weight.zero_()
    head.layers[0].self_attn.o_proj.weight.zero_()
    width = head.config.hidden_size
    head.fc.weight.zero_()
    head.fc.weight[:, :width].fill_diagonal_(1)


def _mixtures(
    tokens: Int[Tensor, " N"], embedding: Float[Tensor, "V D"], acceptance: tuple[float, ...]
) -> Float[Tensor, "N D"]:
    """What the head reads of each token, in the target's own scale of logits."""
    size, places = len(embedding), len(acceptance)
    others = torch.randint(size, (len(tokens), places), device=tokens.device)
    bounds = torch.tensor(acceptance, device=tokens.device, dtype=torch.float32).cumsum(0)
    place = torch.bucketize(torch.rand(len(tokens), device=tokens.device, dtype=torch.float32), bounds)
    shown = torch.where(place[:, None] == torch.arange(places, device=tokens.device), tokens[:, None], others)
    rest = 1 - sum(acceptance)
    logits = [math.log(size * share / rest) for share in acceptance]  # the others' are about 0
    parts = (embedding[shown[:, k]].float() * (logit / LOGIT) for k, logit in enumerate(logits))
    return sum(parts).to(embedding.dtype)


def _config(shape: ModelShape, num_layers: int) -> LlamaConfig:
    return shape.llama_config(
        num_layers, max_position_embeddings=1 << 17, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
