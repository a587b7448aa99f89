"""Split a draft head over ranks if that pays: each rank's slices, and the collectives of a pass.

    part = split_head(head, ranks)                          # on the meta device; None: it stays whole on every rank
    tensors = read_tensors(path, part=part)                 # this rank's slices alone
    head = part.joined(head)                                # once they are in it: computes with the other ranks

    weight                                       split as                           collectives of a pass
    q, k, v, gate and up projection of a layer   a target's: rows                   none
    output and down projection of a layer        a target's: inputs                 2 sums a layer
    the head's own lm_head                       rows, by draft vocabulary          1 gathering
    fc, embeddings, norms, what reads a path     not at all                         none

A head without an lm_head of its own reads the target's, whose logits are gathered whether the head
is split or not. `fc` is not split: its outputs are the residual stream, which every rank has whole,
so they would have to be gathered. On four H100 that would save 65 us of the 900 us of a level of
EAGLE-2's head for a 70B, and 100 us of an EAGLE-3's draft.

Sums have the same bits on all ranks, so features, logits and scores do, too: all ranks draft the
same trees.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from eagle_ray.parallel.rank_group import RankGroup
from eagle_ray.parallel.shard import (
    BY_INPUTS,
    LM_HEAD,
    GatheredHead,
    Part,
    ReducedLinear,
    Shard,
    fitting_sizes,
    kv_heads_of,
    shard_config,
)

log = logging.getLogger("eagle_ray")

# Seconds of a collective, by device: over NVLink, and with gloo between two processes on a CPU
# (0.14 ms for 2 kB, 0.62 ms for 160 kB, 2026-11-28). Weights that a rank reads in a second: an H100
# in bf16, and a CPU with 20 GB/s in fp32.
COLLECTIVE_S = {"cuda": 10e-6, "cpu": 300e-6}
WEIGHTS_PER_S = {"cuda": 1.35e12, "cpu": 5e9}
SHARDED_PROJECTION = re.compile(r"(^|\.)(self_attn|mlp)\.[a-z]+_proj\.(weight|bias)$")


@dataclass(frozen=True, slots=True)
class DraftPart:
    """One rank's part of a draft head.

    Attributes:
        ranks: ranks that share the head.
        shard: position of this rank among them; its vocab_size is that of the head's own lm_head,
            if it has one.
        num_left_out: number of weights of the head that this rank does not have.
    """

    ranks: RankGroup
    shard: Shard
    num_left_out: int

    @classmethod
    def of(cls, head: nn.Module, ranks: RankGroup) -> DraftPart:
        """Compute a rank's part of a whole head."""
        kv_heads = kv_heads_of(cast(Any, head).config)
        shard = Shard(ranks.rank, ranks.size, _num_drafted(head) or 1, kv_heads)
        num_left_out = 0
        for name, parameter in head.named_parameters():
            part = _numbers_of(shard, name, parameter.shape)
            if part is not None:
                num_left_out += parameter.numel() - _part_shape(parameter.shape, part).numel()
        return cls(ranks, shard, num_left_out)

    def part_of(self, name: str, shape: Sequence[int]) -> Part | None:
        """Return this rank's part of a tensor, or None for all of it.

        Args:
            name: name of the tensor in checkpoints or modules.
        """
        return _numbers_of(self.shard, name, shape)

    def joined(self, head: nn.Module) -> nn.Module:
        """Wrap a head that has this rank's weights, so that it computes together with the other ranks."""
        for module in list(head.modules()):
            for name in BY_INPUTS:
                linear = getattr(module, name, None)
                if not isinstance(linear, nn.Linear):
                    continue
                if linear.bias is not None and not self.shard.adds_bias(f"{name}.bias"):
                    nn.init.zeros_(linear.bias)
                setattr(module, name, ReducedLinear(linear, self.ranks))
        if _num_drafted(head) is not None:
            lm_head = cast(nn.Module, head.lm_head)
            head.lm_head = GatheredHead(lm_head, self.ranks, self.shard, self.shard.vocab_size)
        return head


def split_head(head: Any, ranks: RankGroup) -> DraftPart | None:
    """Reduce a whole head on the meta device to this rank's part.

    Returns None if the head stays whole; the log says why.

    Args:
        head: any draft, as methods check it.
    """
    if log_whole(head, ranks):
        return None

    part = DraftPart.of(head, ranks)
    whole = head.config
    own = shard_config(whole, ranks.size)
    for module in head.modules():
        if getattr(module, "config", None) is whole:
            module.config = own
    for name, parameter in list(head.named_parameters()):
        numbers = part.part_of(name, parameter.shape)
        if numbers is not None:
            _resize(head, name, _part_shape(parameter.shape, numbers))
    return part


def log_whole(head: Any, ranks: RankGroup) -> bool:
    """Return whether each rank has the whole draft. If so, log the reason."""
    reason = why_whole(head, ranks)
    if reason is not None:
        log.info("the draft head is whole on each of the %d ranks: %s", ranks.size, reason)
    return reason is not None


def leave_out(drafts: Sequence[Any], num_ranks: int, device: str) -> int:
    """Reduce drafts on the meta device to one rank's parts. Return how many weights that leaves out."""
    num_left_out = 0
    for draft in drafts:
        part = split_head(draft, RankGroup(0, num_ranks, "", device))
        if part is not None:
            num_left_out += part.num_left_out
    return num_left_out


def why_whole(head: Any, ranks: RankGroup) -> str | None:
    """Return why each rank keeps the whole of a head, or None if the ranks share it.

    They share it if the collectives of a pass take less time than reading the weights that a rank
    leaves out.
    """
    if not hasattr(head, "config"):
        return "layers of EAGLE's and DFlash's heads are split, and no others"
    fitting = fitting_sizes(head.config)
    if ranks.size not in fitting:
        numbers = ", ".join(str(size) for size in fitting)
        return f"its heads and the width of its MLP can be divided by {numbers}"
    kind = ranks.device.type
    saved_s = DraftPart.of(head, ranks).num_left_out / WEIGHTS_PER_S[kind]
    num_collectives = _num_collectives(head)
    if saved_s > num_collectives * COLLECTIVE_S[kind]:
        return None
    return (
        f"sharing it would save {saved_s * 1e6:.0f} us of reading for {num_collectives} collectives"
    )


def _num_collectives(head: nn.Module) -> int:
    """Return the collectives of a pass over a shared head."""
    num_layers = sum(hasattr(module, "self_attn") for module in head.modules())
    return 2 * num_layers + (_num_drafted(head) is not None)


def _num_drafted(head: nn.Module) -> int | None:
    """Return the tokens of a head's own lm_head, or None if it has none."""
    lm_head: Any = getattr(head, "lm_head", None)
    return None if lm_head is None else lm_head.out_features


def _numbers_of(shard: Shard, name: str, shape: Sequence[int]) -> Part | None:
    is_split = name == LM_HEAD or SHARDED_PROJECTION.search(name) is not None
    return shard.part_of(name, shape) if is_split else None


def _part_shape(shape: Sequence[int], part: Part) -> torch.Size:
    own = list(shape)
    own[part.dim] = part.size + part.padding
    return torch.Size(own)


def _resize(head: nn.Module, name: str, shape: torch.Size) -> None:
    """Give a parameter on the meta device another shape."""
    path, _, kind = name.rpartition(".")
    linear: Any = head.get_submodule(path)
    setattr(linear, kind, nn.Parameter(getattr(linear, kind).new_empty(shape)))
    if kind == "weight":
        linear.out_features, linear.in_features = shape
