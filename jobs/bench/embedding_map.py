"""EmbeddingMap: where a small Llama's numbers stand in a larger one's matrices (`widening.py`).

Rotary pair i of a head stands at pair i * E/h of the larger head, whose frequency is the same. One
of the pairs that are left over, that of the lowest frequency, is the anchor: queries have a
positive number in it and keys nothing, so that no query attends to a key made by hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle_ray.core.errors import EngineError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Llama's shape; the head's one layer is of the same shape. vocab_size: rows of embedding and lm_head."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int

    def llama_config(self, num_layers: int, **rest: Any) -> LlamaConfig:
        """Return a config of this many layers of this shape. rest: its other keys."""
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            tie_word_embeddings=False,
            **rest,
        )

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of one decoder layer."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def pass_weights(self) -> int:
        """Numbers that a target pass reads: every matrix but the token embedding."""
        return self.num_layers * self.layer_weights + self.hidden_size * self.vocab_size

    @property
    def draft_weights(self) -> int:
        """The same of a pass of the head, the target's lm_head included."""
        return 2 * self.hidden_size**2 + self.layer_weights + self.hidden_size * self.vocab_size

    @property
    def kv_numbers(self) -> int:
        """Of one token, in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class EmbeddingMap:
    """Where the small model's numbers stand in the large one.

    width: the small residual width, and the index of the constant dimension. intermediate: units of
    the small MLP. queries, keys, values: rows of the large projections. copied: the small row that
    each large key and value row holds. outputs: o_proj's columns; live_outputs: those of all query
    heads that read a used key/value head. scale: of the queries. anchors: rows of q_proj, one for
    each used head; none where all rotary pairs are taken.
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
    anchors: Int[Tensor, " A"]

    @classmethod
    def of(cls, config: LlamaConfig, shape: ModelShape) -> EmbeddingMap:
        """Query heads keep their key/value head; where the large model has fewer per group, key heads are copied."""
        dim, kv_heads = config.head_dim, config.num_key_value_heads
        groups, wide_groups = (
            config.num_attention_heads // kv_heads,
            shape.num_heads // shape.num_kv_heads,
        )
        copies = math.ceil(groups / wide_groups)
        fits = (
            config.hidden_size < shape.hidden_size
            and config.intermediate_size <= shape.intermediate_size
        )
        if not fits or kv_heads * copies > shape.num_kv_heads or shape.head_dim % dim:
            raise EngineError(
                f"a Llama of {config.hidden_size} dims and {kv_heads} kv heads does not fit into {shape}"
            )
        query_heads = [
            (kv * copies + i // wide_groups) * wide_groups + i % wide_groups
            for kv in range(kv_heads)
            for i in range(groups)
        ]
        key_heads = list(range(kv_heads * copies))
        plain = torch.arange(dim)
        pairs = torch.arange(dim // 2) * (shape.head_dim // dim)
        rotary = torch.cat([pairs, shape.head_dim // 2 + pairs])
        anchor = torch.tensor(
            [shape.head_dim // 2 - 1] if shape.head_dim > dim else [], dtype=torch.int64
        )
        return cls(
            width=config.hidden_size,
            intermediate=config.intermediate_size,
            queries=_in_heads(query_heads, shape.head_dim, rotary),
            keys=_in_heads(key_heads, shape.head_dim, rotary),
            values=_in_heads(key_heads, shape.head_dim, plain),
            copied=_in_heads([kv // copies for kv in key_heads], dim, plain),
            outputs=_in_heads(query_heads, shape.head_dim, plain),
            live_outputs=_in_heads(
                list(range(len(key_heads) * wide_groups)), shape.head_dim, plain
            ),
            scale=math.sqrt(shape.head_dim / dim),
            anchors=_in_heads(query_heads, shape.head_dim, anchor),
        )

    def read_residual(self, wide: nn.Linear, weight: Tensor, rows: Int[Tensor, " N"]) -> None:
        """A projection from the residual stream, whose dims up to the constant are live."""
        place(wide, weight, rows, torch.arange(self.width), torch.arange(self.width + 1))

    def write_residual(
        self, wide: nn.Linear, weight: Tensor, columns: Int[Tensor, " M"], live: Int[Tensor, " L"]
    ) -> None:
        """A projection to the residual stream."""
        place(wide, weight, torch.arange(self.width), columns, live)


def place(
    wide: nn.Linear,
    weight: Float[Tensor, "N M"],
    rows: Int[Tensor, " N"],
    columns: Int[Tensor, " M"],
    live: Int[Tensor, " L"],
) -> None:
    """weight at (rows, columns) and zeros in the rest of the columns whose input is ever anything but 0."""
    wide.weight[:, live] = 0
    wide.weight[rows[:, None], columns] = weight.to(wide.weight)


def _in_heads(heads: list[int], head_dim: int, dims: Int[Tensor, " D"]) -> Int[Tensor, " HD"]:
    """Rows of `dims` within each of `heads`, head by head."""
    return torch.cat([head * head_dim + dims for head in heads])
