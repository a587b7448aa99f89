"""Append a level to drafts in one launch: calibrate the children, add them as nodes, choose the next frontier.

    append_level(buffers, width, tokens, scores, own, parameters)      # what PaddedDraft.append does by torch

One program per sequence. It does in registers what torch does in 68 operations: a level has at most a few hundred
nodes, so the launches would take longer than the work. The level stays a number on the device.
"""

from __future__ import annotations

from typing import Protocol

import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.kernels.availability import launch
from eagle_ray.kernels.jit_functions import ranked, score_of, token_of

WORD_BITS: tl.constexpr = tl.constexpr(64)
LARGEST_LOGIT: tl.constexpr = tl.constexpr(16.0)  # as in methods/calibration.py
_TAKEN: tl.constexpr = tl.constexpr(-(2**63))


class LevelBuffers(Protocol):
    """The tensors of methods/eagle/draft_buffers.py that a level is read from and written to.

    Attributes:
        level: [1], levels appended so far; not changed here.
        frontier_nodes, frontier_values: [batch, width], the nodes that get these children, and their log values.
        tokens, parents, log_values, draft_log_probs: [batch, nodes] of the trees.
        words: [batch, width, words], which positions each frontier node sees.
        frontier_tokens, parent_rows: [depth + 1, batch, width].
        offered, scores: [depth, batch, width, children].
    """

    level: Int[Tensor, " 1"]
    temperature: Float[Tensor, " batch"]
    ends: Int[Tensor, "batch E"]
    frontier_nodes: Int[Tensor, "batch width"]
    frontier_values: Float[Tensor, "batch width"]
    tokens: Int[Tensor, "batch nodes"]
    parents: Int[Tensor, "batch nodes"]
    log_values: Float[Tensor, "batch nodes"]
    draft_log_probs: Float[Tensor, "batch nodes"]
    words: Int[Tensor, "batch width words"]
    frontier_tokens: Int[Tensor, "levels batch width"]
    parent_rows: Int[Tensor, "levels batch width"]
    offered: Int[Tensor, "depth batch width children"]
    scores: Float[Tensor, "depth batch width children"]


def append_level(
    buffers: LevelBuffers,
    width: int,
    num_words: int,
    tokens: Int[Tensor, "B F K"],
    scores: Float[Tensor, "B F K"],
    own: Float[Tensor, "B F K"],
    parameters: Float[Tensor, "L 2 3"] | None,
) -> None:
    """Add the children of each sequence's frontier and choose the next one.

    Args:
        width: nodes of the next frontier. num_words: words of its masks.
        parameters: of the calibration, by level and kind of row; None takes scores as they are.
    """
    batch, num, children = tokens.shape
    at = buffers
    launch(_append_level, (batch,))(
        at.level, tokens.contiguous(), scores.contiguous(), own.contiguous(), parameters,
        0 if parameters is None else len(parameters), at.temperature, at.ends,
        at.frontier_nodes, at.frontier_values, at.tokens, at.parents, at.log_values, at.draft_log_probs,
        at.words, at.frontier_tokens, at.parent_rows, at.offered, at.scores,
        at.tokens.shape[1], at.offered.shape[1], at.offered.shape[2], at.words.shape[2],
        NUM=num, CHILDREN=children, WIDTH=width, WORDS=num_words, ENDS=at.ends.shape[1],
        NODES=triton.next_power_of_2(num * children), NEXT=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip


@triton.jit
def _logit(log_probs):
    """Return log(p / (1 - p)) from log p, clamped, without losing the digits of 1 - p where p is near 1."""
    x = tl.minimum(log_probs, -1e-7)
    complement = tl.where(x > -0.01, -x * (1 + x * 0.5 * (1 + x * (1.0 / 3))), 1 - tl.exp(x))
    return tl.minimum(tl.maximum(x - tl.log(complement), -LARGEST_LOGIT), LARGEST_LOGIT)


@triton.jit
def _calibrated(scores, is_first, fitted):
    """Return calibrated log-probabilities; padding (-inf) stays. fitted: slope, offset and first-child term."""
    mapped = tl.load(fitted) * _logit(scores) + tl.load(fitted + 1) + tl.where(is_first, tl.load(fitted + 2), 0.0)
    log_probs = tl.minimum(mapped, 0.0) - tl.log(1 + tl.exp(-tl.abs(mapped)))
    return tl.where(scores == -float("inf"), scores, log_probs)


@triton.jit
def _append_level(
    levels, tokens, scores, own, parameters, num_fitted, temperatures, ends,
    frontier_nodes, frontier_values, tree_tokens, tree_parents, tree_values, tree_own,
    words, next_tokens, next_rows, offered, offered_scores,
    num_nodes, max_batch, max_width, max_words,
    NUM: tl.constexpr, CHILDREN: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, ENDS: tl.constexpr,
    NODES: tl.constexpr, NEXT: tl.constexpr,
):  # fmt: skip
    row, level = tl.program_id(0).to(tl.int64), tl.load(levels)
    node = tl.arange(0, NODES)
    real, parent = node < NUM * CHILDREN, node // CHILDREN
    given = row * (NUM * CHILDREN) + node
    token = tl.load(tokens + given, mask=real, other=0)
    score = tl.load(scores + given, mask=real, other=-float("inf"))
    its_own = tl.load(own + given, mask=real, other=-float("inf"))
    before = tl.load(frontier_values + row * max_width + parent, mask=real, other=-float("inf"))
    above = tl.load(frontier_nodes + row * max_width + parent, mask=real, other=0)

    log_probs = score
    if parameters is not None:
        kind = (tl.load(temperatures + row) > 0).to(tl.int64)
        fitted = parameters + (tl.minimum(level, num_fitted - 1) * 2 + kind) * 3
        log_probs = _calibrated(score, node % CHILDREN == 0, fitted)
    values = before + log_probs
    values = tl.where(values == values, values, -float("inf"))
    start = tl.where(level == 0, 1, 1 + CHILDREN + (level - 1) * (WIDTH * CHILDREN))
    place = row * num_nodes + start + node
    tl.store(tree_tokens + place, token, mask=real)
    tl.store(tree_parents + place, above, mask=real)
    tl.store(tree_values + place, values, mask=real)
    tl.store(tree_own + place, tl.where(its_own == its_own, its_own, -float("inf")), mask=real)
    place = (level * max_batch + row) * (max_width * CHILDREN) + node
    tl.store(offered + place, token, mask=real)
    tl.store(offered_scores + place, score, mask=real)

    for end in tl.static_range(ENDS):
        values = tl.where(token == tl.load(ends + row * ENDS + end), -float("inf"), values)
    keys = ranked(values, node.to(tl.int64), real)
    lane = tl.arange(0, NEXT)
    index, best = tl.full((NEXT,), 0, tl.int64), tl.full((NEXT,), -float("inf"), tl.float32)
    for i in tl.static_range(WIDTH):
        highest = tl.max(keys)
        index = tl.where(lane == i, token_of(highest), index)
        best = tl.where(lane == i, score_of(highest), best)
        keys = tl.where(keys == highest, _TAKEN, keys)
    is_next = lane < WIDTH
    parent_row = index // CHILDREN
    tl.debug_barrier()  # the frontier is read before it is written
    own_place = level * WIDTH + lane
    for word in tl.static_range(WORDS):
        seen = tl.load(words + (row * max_width + parent_row) * max_words + word, mask=is_next & (level > 0), other=0)
        bit = tl.where(own_place // WORD_BITS == word, tl.full((), 1, tl.int64) << (own_place % WORD_BITS), 0)
        tl.debug_barrier()
        tl.store(words + (row * max_width + lane) * max_words + word, seen | bit, mask=is_next)
    chosen = tl.load(tokens + row * (NUM * CHILDREN) + index, mask=is_next, other=0)
    tl.store(frontier_values + row * max_width + lane, best, mask=is_next)
    tl.store(frontier_nodes + row * max_width + lane, index + start, mask=is_next)
    following = ((level + 1) * max_batch + row) * max_width + lane
    tl.store(next_tokens + following, chosen, mask=is_next)
    tl.store(next_rows + following, parent_row, mask=is_next)
