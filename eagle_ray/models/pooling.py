"""Pooler: turn the hidden states of a prompt into its embedding, as sentence-transformers' modules do.

    pooler = Pooler.of(read_embedder(directory))
    pooler.add(state, start=0, hidden=chunk)         # for each chunk of the prompt, in order
    pooler.finish(state, last=chunk[-1])             # state.vector is there

A mean sums in one order, however the prompt is cut into chunks: rows are added one after the other
within blocks of POSITIONS_PER_BLOCK positions, which begin at multiples of it, and then the blocks
are added. So the bits of an embedding depend on neither the batch nor the chunks. For that reason
the projections are computed for one vector at a time, in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle_ray.core.errors import EngineError, one_line
from eagle_ray.core.pooling_state import PoolingState
from eagle_ray.storage.embedder_files import TANH, DenseFiles, EmbedderFiles

POSITIONS_PER_BLOCK = 32  # positions whose states are added before the blocks are


@dataclass(frozen=True, slots=True)
class Dense:
    """A projection of the pooled vector, and its activation."""

    weight: Float[Tensor, "out in"]
    bias: Float[Tensor, " out"] | None
    has_tanh: bool

    def __call__(self, vector: Float[Tensor, " in"]) -> Float[Tensor, " out"]:
        out = F.linear(vector[None], self.weight, self.bias)[0]
        return torch.tanh(out) if self.has_tanh else out


@dataclass(frozen=True, slots=True)
class Pooler:
    """Computes embeddings as the target's sentence-transformers files say.

    Attributes:
        dense: projections of the pooled vector, on the host.
    """

    files: EmbedderFiles
    dense: tuple[Dense, ...] = ()

    @classmethod
    def of(cls, files: EmbedderFiles) -> Pooler:
        """Build a pooler, with the weights of its projections. Raises EngineError."""
        return cls(files, tuple(load_dense(part) for part in files.dense))

    @property
    def is_mean(self) -> bool:
        return self.files.pooling == "mean"

    def add(self, state: PoolingState, start: int, hidden: Float[Tensor, "n H"]) -> None:
        """Add the hidden states of a prompt's next chunk to its state.

        Args:
            start: position of the chunk's first token.
        """
        if not self.is_mean:
            return
        rows = hidden.float()
        num_left_out = min(max(state.first - start, 0), len(rows))
        if num_left_out:
            rows = torch.cat([torch.zeros_like(rows[:num_left_out]), rows[num_left_out:]])
        if state.rest is not None:
            rows = torch.cat([state.rest, rows])

        num_whole = len(rows) // POSITIONS_PER_BLOCK * POSITIONS_PER_BLOCK
        state.rest = rows[num_whole:].clone()
        if not num_whole:
            return
        blocks = rows[:num_whole].view(-1, POSITIONS_PER_BLOCK, rows.shape[1])
        sums = blocks[:, 0].clone()
        for i in range(1, POSITIONS_PER_BLOCK):
            sums += blocks[:, i]
        for block in sums:
            state.blocks = block.clone() if state.blocks is None else state.blocks + block

    def finish(
        self, state: PoolingState, num_tokens: int, last: Float[Tensor, " H"]
    ) -> Float[Tensor, " D"]:
        """Return the embedding of a prompt whose chunks were all added, on the host.

        Args:
            num_tokens: tokens of the prompt.
            last: hidden state of its last token.
        """
        pooled = self._mean(state, num_tokens) if self.is_mean else last.float()
        vector = pooled.cpu()
        for dense in self.dense:
            vector = dense(vector)
        vector = vector[: state.dimensions]
        if self.files.normalizes:
            vector = F.normalize(vector, dim=0)
        state.blocks = state.rest = None
        return vector.clone()

    def _mean(self, state: PoolingState, num_tokens: int) -> Float[Tensor, " H"]:
        assert state.rest is not None, "the chunks were added"
        total = state.blocks
        for row in state.rest:
            total = row if total is None else total + row
        assert total is not None, "a prompt has a token"
        return total / max(num_tokens - state.first, 1)


def load_dense(part: DenseFiles) -> Dense:
    """Read one projection with its weights, in fp32. Raises EngineError naming the file."""
    file = next(
        (part.directory / name for name in DENSE_WEIGHTS if (part.directory / name).is_file()), None
    )
    if file is None:
        raise EngineError(
            f"{part.directory}: neither {' nor '.join(DENSE_WEIGHTS)} is there. Download the model again"
        )
    try:
        is_safe = file.suffix == ".safetensors"
        tensors = load_file(file) if is_safe else torch.load(file, "cpu", weights_only=True)
        weight = tensors["linear.weight"].float()
        bias = tensors["linear.bias"].float() if part.has_bias else None
    except (OSError, RuntimeError, KeyError, SafetensorError) as error:
        raise EngineError(
            f"{file} cannot be read: {one_line(error)}. Download the model again"
        ) from error
    _check_dense(file, part, weight, bias)
    return Dense(weight, bias, part.activation == TANH)


DENSE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def _check_dense(file: Path, part: DenseFiles, weight: Tensor, bias: Tensor | None) -> None:
    wanted = (part.out_features, part.in_features)
    if tuple(weight.shape) != wanted or (bias is not None and tuple(bias.shape) != wanted[:1]):
        raise EngineError(
            f"{file}: linear.weight is {tuple(weight.shape)}, and its config wants {wanted}. Download the model again"
        )
    if not all(tensor.isfinite().all() for tensor in (weight, bias) if tensor is not None):
        raise EngineError(f"{file}: holds a number that is not finite. Download the model again")
