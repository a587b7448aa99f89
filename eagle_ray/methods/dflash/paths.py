"""Path heads: what a block's logits gain from the tokens drafted before them (DSpark, Domino, DFlash2).

A block predicts each position without the tokens in between. A path head adds to a position's
logits what the parent of a node says: a *latent* of a few numbers for each node, and a matrix from
latents to logits. So nodes of one level have children of their own, and a level costs a small
product, no pass over layers.

    logits(child c of node n) = block(c) + matrix[c] . latent(n)

    head       latent of a node with token x, row h, state s                        matrix
    vanilla    w1[x]                                                                w2
    gated      sigmoid(gate_proj [h, w1[x]]) * w1[x]                                w2
    rnn        tanh(o), where g, c, o = joint_proj [s, w1[x], h]                    w2      s' = g s + (1 - g) tanh c
    Domino     silu(embed_proj.0 [h, s'])                                           embed_proj.2    s' = GRU(x, s)
    selector   predecessor_codebook[x] * hidden_projection h                        successor_codebook

g is a sigmoid. h is the row that predicts the children. A selector chooses among the best
selector_top_k tokens of the block's row alone. A state is 0 before the root. Domino's latents are 0
at the first pure_draft_prefix_len levels.

    latents, state = path.step(embed, tokens, hidden, state, level)
    logits = path.scores(block_logits, latents)

Module names are the published key names; methods/dflash/README.md names the sources.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

MARKOV_TYPES = ("vanilla", "gated", "rnn")
UNCHOSEN = 60.0  # nats below the best choice of a selector: no probability, and finite for what learns from logits
Embed = Callable[[Int[Tensor, "..."]], Float[Tensor, "*rows H"]]


@dataclass(frozen=True, slots=True)
class PathShape:
    """Kind and sizes of a DFlash head's path head, from the published keys; a size of 0 means that the part is absent.

    Attributes:
        has_confidence: the head estimates the log-odds that a child of a node is accepted, by a
            linear map of its row; with confidence_with_markov also of w1[x].
    """

    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    has_confidence: bool = False
    confidence_with_markov: bool = False
    gru_hidden_dim: int = 0
    emb_dim: int = 0
    pure_draft_prefix_len: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0


NO_PATH = PathShape()


class PathHead(ABC):
    """Computes a latent for each node, and its contribution to the logits of the node's children.

    Attributes:
        state_size: size of the recurrent state that children receive from a node; 0 is none.
    """

    state_size = 0

    @abstractmethod
    def step(
        self,
        embed: Embed,
        tokens: Int[Tensor, "B F"],
        hidden: Float[Tensor, "B 1 H"],
        state: Float[Tensor, "B F S"],
        level: int,
    ) -> tuple[Float[Tensor, "B F R"], Float[Tensor, "B F S"]]:
        """Return the latents and the new recurrent states of F nodes of one level.

        Args:
            embed: returns token embeddings.
            tokens: tokens of the nodes.
            hidden: output of the block's row that predicts their children.
            state: states of their parents.
            level: level of the nodes; the root's is 0.
        """

    @abstractmethod
    def project(self, latents: Float[Tensor, "*rows R"]) -> Float[Tensor, "*rows Dv"]:
        """Return what latents add to the logits."""

    def scores(
        self, logits: Float[Tensor, "*rows Dv"], latents: Float[Tensor, "*others R"]
    ) -> Float[Tensor, "*others Dv"]:
        """Return the logits of the children of nodes with these latents: the block's logits plus the latents' part.

        Args:
            logits: logits of the block.
        """
        return logits + self.project(latents)


class MarkovHead(nn.Module, PathHead):
    """DSpark's head: a transition of low rank between neighbouring tokens.

    Args:
        vocab_size: tokens of the target.
        drafted: number of tokens that can be drafted, the size of the logits.
    """

    def __init__(self, shape: PathShape, vocab_size: int, drafted: int, hidden_size: int):
        super().__init__()
        rank = shape.markov_rank
        self._kind = shape.markov_head_type
        self.state_size = rank if self._kind == "rnn" else 0
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        if self._kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        if self._kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def step(
        self,
        embed: Embed,
        tokens: Int[Tensor, "B F"],
        hidden: Float[Tensor, "B 1 H"],
        state: Float[Tensor, "B F S"],
        level: int,
    ) -> tuple[Float[Tensor, "B F R"], Float[Tensor, "B F S"]]:
        previous = self.markov_w1(tokens)
        row = hidden.expand(*tokens.shape, -1)
        if self._kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([row, previous], -1)))
            return gate * previous, state
        if self._kind == "rnn":
            joint = self.joint_proj(torch.cat([state, previous, row], -1))
            gate, candidate, output = joint.chunk(3, -1)
            gate = torch.sigmoid(gate)
            next_state = gate * state + (1 - gate) * torch.tanh(candidate)
            return torch.tanh(output), next_state
        return previous, state

    def project(self, latents: Float[Tensor, "*rows R"]) -> Float[Tensor, "*rows Dv"]:
        return self.markov_w2(latents)


class PrefixGru(nn.Module):
    """One GRU layer without biases whose parameters have torch's names and order: reset, update and candidate gates."""

    def __init__(self, input_size: int, size: int):
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.zeros(3 * size, input_size))
        self.weight_hh_l0 = nn.Parameter(torch.zeros(3 * size, size))

    def forward(
        self, inputs: Float[Tensor, "*rows H"], state: Float[Tensor, "*rows S"]
    ) -> Float[Tensor, "*rows S"]:
        """Return the states after these inputs."""
        reset_in, update_in, new_in = F.linear(inputs, self.weight_ih_l0).chunk(3, -1)
        reset_by, update_by, new_by = F.linear(state, self.weight_hh_l0).chunk(3, -1)
        reset = torch.sigmoid(reset_in + reset_by)
        update = torch.sigmoid(update_in + update_by)
        candidate = torch.tanh(new_in + reset * new_by)
        return (1 - update) * candidate + update * state


class Domino(PathHead):
    """Domino's head: a GRU over the drafted path, and a bottleneck to the logits. Its modules are the DFlash head's.

    Args:
        prefix_len: number of first levels whose logits it leaves unchanged.
    """

    def __init__(self, gru: PrefixGru, projection: nn.Sequential, prefix_len: int):
        self._gru = gru
        self._projection = projection
        self._prefix_len = prefix_len
        self.state_size = gru.weight_hh_l0.shape[1]

    def step(
        self,
        embed: Embed,
        tokens: Int[Tensor, "B F"],
        hidden: Float[Tensor, "B 1 H"],
        state: Float[Tensor, "B F S"],
        level: int,
    ) -> tuple[Float[Tensor, "B F R"], Float[Tensor, "B F S"]]:
        embedded = embed(tokens.flatten()).view(*tokens.shape, -1)
        state = self._gru(embedded, state)
        row = hidden.expand(*tokens.shape, -1)
        latents = F.silu(self._projection[0](torch.cat([row, state], -1)))
        if level < self._prefix_len:
            latents = torch.zeros_like(latents)
        return latents, state

    def project(self, latents: Float[Tensor, "*rows R"]) -> Float[Tensor, "*rows Dv"]:
        return self._projection[2](latents)


class CandidateSelector(nn.Module, PathHead):
    """DFlash2's head: rescores the block's best tokens by a low-rank product with the parent's
    token, gated by the row."""

    def __init__(self, shape: PathShape, vocab_size: int, hidden_size: int):
        super().__init__()
        rank = shape.selector_rank
        self._top_k = shape.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def step(
        self,
        embed: Embed,
        tokens: Int[Tensor, "B F"],
        hidden: Float[Tensor, "B 1 H"],
        state: Float[Tensor, "B F S"],
        level: int,
    ) -> tuple[Float[Tensor, "B F R"], Float[Tensor, "B F S"]]:
        predecessors = F.embedding(tokens, self.predecessor_codebook)
        return predecessors * self.hidden_projection(hidden), state

    def project(self, latents: Float[Tensor, "*rows R"]) -> Float[Tensor, "*rows Dv"]:
        return F.linear(latents, self.successor_codebook)

    def scores(
        self, logits: Float[Tensor, "*rows Dv"], latents: Float[Tensor, "*others R"]
    ) -> Float[Tensor, "*others Dv"]:
        """Return logits in which only the block's best tokens are candidates; all others are
        UNCHOSEN below the best."""
        unary, chosen = logits.topk(self._top_k, -1)
        successors = F.embedding(chosen, self.successor_codebook)
        scores = unary + (successors @ latents[..., None])[..., 0]
        chosen = chosen.expand(scores.shape)
        floor = scores.amax(-1, keepdim=True) - UNCHOSEN
        unchosen = floor.expand(*scores.shape[:-1], logits.shape[-1])
        return unchosen.scatter(-1, chosen, scores)


class ConfidenceHead(nn.Module):
    """DSpark's estimate of acceptance: the log-odds that a child of a node is accepted."""

    def __init__(self, size: int):
        super().__init__()
        self.proj = nn.Linear(size, 1)

    def forward(self, inputs: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows"]:
        return self.proj(inputs)[..., 0]


@dataclass(frozen=True, slots=True)
class ConvShape:
    """Shape of a convolution over rows of a block.

    Attributes:
        taps: rows that an output reads, its own first.
        group_size: channels that share one correction.
    """

    taps: int
    group_size: int


class GroupedConv(nn.Module):
    """DFlash2's convolution over the rows of a block, around one part of a layer: `prepare` before, `finish` after it.

    An output row is the sum over taps t of kernel t times the row t before it; rows before the
    block are 0. A kernel is a learned number per channel, and a correction per group of channels,
    which `prepare` makes of its input for both.
    """

    def __init__(self, hidden_size: int, shape: ConvShape):
        super().__init__()
        self._group_size = shape.group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, shape.taps, hidden_size))
        self.kernel_projection = nn.Linear(
            hidden_size, 2 * shape.taps * (hidden_size // shape.group_size), bias=False
        )

    def prepare(
        self, rows: Float[Tensor, "B N H"]
    ) -> tuple[Float[Tensor, "B N H"], Float[Tensor, "B N taps groups"]]:
        """Convolve the input of an attention or MLP. Return it with the corrections that `finish` needs."""
        taps = self.base_kernel.shape[1]
        corrections = self.kernel_projection(rows).unflatten(-1, (2, taps, -1))
        before, after = corrections.unbind(-3)
        return self._convolved(rows, before, 0), after

    def finish(
        self, rows: Float[Tensor, "B N H"], corrections: Float[Tensor, "B N taps groups"]
    ) -> Float[Tensor, "B N H"]:
        """Convolve the output of the attention or MLP, with the corrections from `prepare`."""
        return self._convolved(rows, corrections, 1)

    def _convolved(
        self, rows: Float[Tensor, "B N H"], corrections: Float[Tensor, "B N taps groups"], side: int
    ) -> Float[Tensor, "B N H"]:
        kernels = self.base_kernel[side] + corrections.repeat_interleave(self._group_size, -1)
        result = torch.zeros_like(rows)
        for tap in range(kernels.shape[2]):
            earlier = F.pad(rows, (0, 0, tap, 0))[:, : rows.shape[1]]
            result = result + kernels[:, :, tap] * earlier
        return result


def convolutions(layer: nn.Module) -> tuple[GroupedConv, GroupedConv] | None:
    """Return the convolutions of a layer of a DFlash2 head, around attention and MLP; None if it has none."""
    if not hasattr(layer, "attention_conv"):
        return None
    return cast(GroupedConv, layer.attention_conv), cast(GroupedConv, layer.mlp_conv)
