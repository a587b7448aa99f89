"""Append a level to drafts in one launch: calibrate the children, add them as nodes, choose the next frontier.

    append_level(buffers, width, tokens, scores, own, parameters)      # PaddedDraft.append in torch
    update_fit(buffers, fit, picks, num_accepted, depth)               # DraftBuffers.update_calibration

`append_level` runs one program per sequence. It does in registers what torch does in 68 operations:
a level has at most a few hundred nodes, so the launches would take longer than the work. The
level's number stays on the device.

`update_fit` takes two launches in place of about 80: a program per level and kind of row sums over
the sequences, and one program takes the Newton steps from level to level.
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
SUMMED_ROWS = 16  # sequences that a program reads at once
# Sums over the samples of a level and kind: 3 of a gradient, 5 of Fisher information, their number.
NUM_SUMS = 9
PARAMETERS: tl.constexpr = tl.constexpr(3)
_TAKEN: tl.constexpr = tl.constexpr(-(2**63))


class LevelBuffers(Protocol):
    """The tensors of methods/eagle/draft_buffers.py that a level is read from and written to.

    Attributes:
        level: [1], levels appended so far; not changed here.
        frontier_nodes, frontier_values: [batch, width], the parents of the new children, and their
            log values.
        tokens, parents, log_values, draft_log_probs: [batch, nodes] of the trees.
        words: [batch, width, words], which positions each frontier node sees.
        frontier_tokens, parent_rows: [depth + 1, batch, width].
        offered, scores: [depth, batch, width, children].
        num_offered: [depth], nodes of each level that have children there.
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
    num_offered: Int[Tensor, " depth"]


def append_level(
    buffers: LevelBuffers,
    width: int,
    num_words: int,
    tokens: Int[Tensor, "B F K"],
    scores: Float[Tensor, "B F K"],
    own: Float[Tensor, "B F K"],
    parameters: Float[Tensor, "L 2 3"] | None,
) -> None:
    """Append the children of each sequence's frontier to its tree, and choose the next frontier.

    Args:
        width: nodes of the next frontier.
        num_words: words of a frontier node's mask.
        parameters: parameters of the calibration, by level and kind of row; None uses the scores as
            they are.
    """
    batch, num, children = tokens.shape
    at = buffers
    launch(_append_level, (batch,))(
        at.level,
        tokens.contiguous(),
        scores.contiguous(),
        own.contiguous(),
        parameters,
        0 if parameters is None else len(parameters),
        at.temperature,
        at.ends,
        at.frontier_nodes,
        at.frontier_values,
        at.tokens,
        at.parents,
        at.log_values,
        at.draft_log_probs,
        at.words,
        at.frontier_tokens,
        at.parent_rows,
        at.offered,
        at.scores,
        at.num_offered,
        at.tokens.shape[1],
        at.offered.shape[1],
        at.offered.shape[2],
        at.words.shape[2],
        NUM=num,
        CHILDREN=children,
        WIDTH=width,
        WORDS=num_words,
        ENDS=at.ends.shape[1],
        NODES=triton.next_power_of_2(num * children),
        NEXT=triton.next_power_of_2(width),
        num_warps=1,
    )


class KernelFit(Protocol):
    """The tensors of methods/calibration.py's OnlineFit, with two sets of three parameters a level.

    Attributes:
        memory: number of later samples after which a sample's weight has fallen to 1 / e.
    """

    parameters: Float[Tensor, "L 2 3"]
    information: Float[Tensor, "L 2 3 3"]
    low: Float[Tensor, " 3"]
    high: Float[Tensor, " 3"]
    precision: float
    memory: float
    largest_step: float


def update_fit(
    buffers: LevelBuffers,
    fit: KernelFit,
    picks: Int[Tensor, "B D"],
    num_accepted: Int[Tensor, " B"],
    depth: int,
) -> None:
    """Update a fit from the target's tokens on the draft in the buffers.

    Args:
        picks: the target's tokens, of which the first num_accepted + 1 are known; -1 accepted is
            padding.
        depth: levels to learn from, at most those of the fit.
    """
    at = buffers
    batch, length = picks.shape
    num_fitted = len(fit.parameters)
    num_levels = len(at.num_offered)
    _, max_batch, width, children = at.offered.shape

    # The sums of one level and one kind of row are one program's work.
    sums = at.scores.new_empty(num_fitted, 2, NUM_SUMS)
    launch(_sum_samples, (num_fitted, 2))(
        sums,
        fit.parameters,
        at.num_offered,
        at.frontier_tokens,
        at.parent_rows,
        at.offered,
        at.scores,
        at.temperature,
        picks.contiguous(),
        num_accepted,
        batch,
        length,
        min(depth, num_fitted),
        max_batch,
        width,
        children,
        ROWS=SUMMED_ROWS,
        NODES=triton.next_power_of_2(width),
        CHILDREN=triton.next_power_of_2(children),
        SUMS=NUM_SUMS,
        num_warps=1,
    )

    # A level's step follows that of the level above, so one program takes all of one kind.
    launch(_take_steps, (2,))(
        sums,
        fit.parameters,
        fit.information,
        fit.low,
        fit.high,
        fit.precision,
        fit.memory,
        fit.largest_step,
        at.num_offered,
        num_accepted,
        batch,
        num_levels,
        num_fitted,
        ROWS=triton.next_power_of_2(batch),
        LEVELS=triton.next_power_of_2(num_levels),
        SUMS=NUM_SUMS,
        num_warps=1,
    )


@triton.jit
def _logit(log_probs):
    """Return log(p / (1 - p)) from log p, clamped, without losing the digits of 1 - p where p is near 1."""
    x = tl.minimum(log_probs, -1e-7)
    # Three terms of the series of 1 - exp(x), which cancels near 0.
    series = -x * (1 + x * 0.5 * (1 + x * (1.0 / 3)))
    complement = tl.where(x > -0.01, series, 1 - tl.exp(x))
    logit = x - tl.log(complement)
    return tl.minimum(tl.maximum(logit, -LARGEST_LOGIT), LARGEST_LOGIT)


@triton.jit
def _calibrated(scores, is_first, fitted):
    """Return calibrated log-probabilities; padding (-inf) stays.

    Args:
        fitted: slope, offset and first-child term.
    """
    slope = tl.load(fitted)
    offset = tl.load(fitted + 1)
    first = tl.load(fitted + 2)
    mapped = slope * _logit(scores) + offset + tl.where(is_first, first, 0.0)
    # The logarithm of the sigmoid, whose exponential cannot overflow.
    log_probs = tl.minimum(mapped, 0.0) - tl.log(1 + tl.exp(-tl.abs(mapped)))
    return tl.where(scores == -float("inf"), scores, log_probs)


@triton.jit
def _append_level(
    levels,  # [1]: levels so far
    tokens,  # this and the following two: [B, NUM, CHILDREN]
    scores,
    own,
    parameters,  # [num_fitted, 2, 3]; None takes scores as they are
    num_fitted,
    temperatures,
    ends,
    frontier_nodes,  # this and the following one: [batch, max_width]
    frontier_values,
    tree_tokens,  # this and the following three: [batch, num_nodes]
    tree_parents,
    tree_values,
    tree_own,
    words,  # [batch, max_width, max_words]
    next_tokens,  # this and the following one: [levels + 1, max_batch, max_width]
    next_rows,
    offered,  # this and the following one: [levels, max_batch, max_width, CHILDREN]
    offered_scores,
    num_offered,  # [levels]
    num_nodes,
    max_batch,
    max_width,
    max_words,
    NUM: tl.constexpr,
    CHILDREN: tl.constexpr,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    ENDS: tl.constexpr,
    NODES: tl.constexpr,
    NEXT: tl.constexpr,
):
    """Add the children of one sequence's frontier to its tree, and choose the next frontier."""
    row = tl.program_id(0).to(tl.int64)
    level = tl.load(levels)

    # Read the children, and the frontier node above each of them.
    node = tl.arange(0, NODES)
    real = node < NUM * CHILDREN
    parent = node // CHILDREN
    given = row * (NUM * CHILDREN) + node
    token = tl.load(tokens + given, mask=real, other=0)
    score = tl.load(scores + given, mask=real, other=-float("inf"))
    its_own = tl.load(own + given, mask=real, other=-float("inf"))
    before = tl.load(frontier_values + row * max_width + parent, mask=real, other=-float("inf"))
    above = tl.load(frontier_nodes + row * max_width + parent, mask=real, other=0)

    # Calibrate their scores: levels past the last fitted one use its parameters.
    log_probs = score
    if parameters is not None:
        kind = (tl.load(temperatures + row) > 0).to(tl.int64)
        fitted = parameters + (tl.minimum(level, num_fitted - 1) * 2 + kind) * 3
        log_probs = _calibrated(score, node % CHILDREN == 0, fitted)

    # NaN, as half precision may give, would outrank the root.
    values = before + log_probs
    values = tl.where(values == values, values, -float("inf"))
    its_own = tl.where(its_own == its_own, its_own, -float("inf"))

    # Append the children to the tree. The root and its children come before the levels of WIDTH.
    start = tl.where(level == 0, 1, 1 + CHILDREN + (level - 1) * (WIDTH * CHILDREN))
    place = row * num_nodes + start + node
    tl.store(tree_tokens + place, token, mask=real)
    tl.store(tree_parents + place, above, mask=real)
    tl.store(tree_values + place, values, mask=real)
    tl.store(tree_own + place, its_own, mask=real)

    # Keep what was offered, from which `update_fit` learns.
    place = (level * max_batch + row) * (max_width * CHILDREN) + node
    tl.store(offered + place, token, mask=real)
    tl.store(offered_scores + place, score, mask=real)
    tl.store(num_offered + level, NUM)  # by all programs, which write one number

    # A token that ends its sequence gets no children worth anything.
    for end in tl.static_range(ENDS):
        end_token = tl.load(ends + row * ENDS + end)
        values = tl.where(token == end_token, -float("inf"), values)

    # Choose the WIDTH best children, one after another.
    keys = ranked(values, node.to(tl.int64), real)
    lane = tl.arange(0, NEXT)
    index = tl.full((NEXT,), 0, tl.int64)
    best = tl.full((NEXT,), -float("inf"), tl.float32)
    for i in tl.static_range(WIDTH):
        highest = tl.max(keys)
        index = tl.where(lane == i, token_of(highest), index)
        best = tl.where(lane == i, score_of(highest), best)
        keys = tl.where(keys == highest, _TAKEN, keys)
    is_next = lane < WIDTH
    parent_row = index // CHILDREN
    tl.debug_barrier()  # the frontier is read before it is written

    # A chosen node sees what its parent sees, and itself.
    own_place = level * WIDTH + lane
    own_word = own_place // WORD_BITS
    own_bit = tl.full((), 1, tl.int64) << (own_place % WORD_BITS)
    parent_words = words + (row * max_width + parent_row) * max_words
    next_words = words + (row * max_width + lane) * max_words
    for word in tl.static_range(WORDS):
        seen = tl.load(parent_words + word, mask=is_next & (level > 0), other=0)
        bit = tl.where(own_word == word, own_bit, 0)
        tl.debug_barrier()  # a word of all parents is read before one of a node is written
        tl.store(next_words + word, seen | bit, mask=is_next)

    # Write the frontier, and the level's tokens and parents for the drafter's next pass.
    chosen = tl.load(tokens + row * (NUM * CHILDREN) + index, mask=is_next, other=0)
    tl.store(frontier_values + row * max_width + lane, best, mask=is_next)
    tl.store(frontier_nodes + row * max_width + lane, index + start, mask=is_next)
    following = ((level + 1) * max_batch + row) * max_width + lane
    tl.store(next_tokens + following, chosen, mask=is_next)
    tl.store(next_rows + following, parent_row, mask=is_next)


@triton.jit
def _sum_samples(
    sums,  # [levels, 2, SUMS]
    parameters,  # [levels, 2, 3]
    num_offered,  # [levels]
    frontier_tokens,  # this and the following one: [levels + 1, max_batch, max_width]
    parent_rows,
    offered,  # this and the following one: [levels, max_batch, max_width, num_children]
    offered_scores,
    temperatures,
    picks,  # [batch, length]
    num_accepted,
    batch,
    length,
    depth,
    max_batch,
    max_width,
    num_children,
    ROWS: tl.constexpr,
    NODES: tl.constexpr,
    CHILDREN: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Sum over the sequences whose path reaches a level: gradient, Fisher information and number of samples."""
    level = tl.program_id(0)
    kind = tl.program_id(1)
    fitted = parameters + (level * 2 + kind) * PARAMETERS
    slope = tl.load(fitted)
    offset = tl.load(fitted + 1)
    first = tl.load(fitted + 2)
    lane = tl.arange(0, NODES)[None, :]
    child = tl.arange(0, CHILDREN)[None, :]
    is_first = tl.where(child == 0, 1.0, 0.0)

    # The gradient by slope, offset and first-child term.
    none = tl.zeros((ROWS,), tl.float32)
    of_slope = none
    of_offset = none
    of_first = none

    # The Fisher information of their pairs, in which the first-child term's square is itself.
    xx = none
    x1 = none
    xf = none
    weight = none
    weight_first = none
    count = none

    is_offered = level < depth
    if is_offered:
        is_offered = tl.load(num_offered + level) > 0
    if is_offered:
        for begin in range(0, batch, ROWS):
            # The sequences of this kind whose accepted path is deep enough.
            row = (begin + tl.arange(0, ROWS)).to(tl.int64)
            real = row < batch
            temperature = tl.load(temperatures + row, mask=real, other=0.0)
            is_kind = (temperature > 0) == (kind == 1)
            accepted = tl.load(num_accepted + row, mask=real, other=-1)
            reached = real & is_kind & (accepted >= level)

            # Follow the sampled tokens from frontier to frontier; a path may leave them.
            node = tl.zeros((ROWS,), tl.int64)
            for above in range(0, level):
                sampled = tl.load(picks + row * length + above, mask=reached, other=-1)
                place = ((above + 1) * max_batch + row[:, None]) * max_width + lane
                seen = reached[:, None] & (lane < tl.load(num_offered + above + 1))
                token = tl.load(frontier_tokens + place, mask=seen, other=-2)
                parent = tl.load(parent_rows + place, mask=seen, other=-1)
                match = seen & (token == sampled[:, None]) & (parent == node[:, None])
                matched = tl.min(tl.where(match, lane, NODES), axis=1)
                reached = reached & (matched < NODES)
                node = tl.where(matched < NODES, matched, 0).to(tl.int64)

            # The children that were offered to the path's node at this level.
            sampled = tl.load(picks + row * length + level, mask=reached, other=-1)
            offered_row = (level * max_batch + row) * max_width + node
            place = offered_row[:, None] * num_children + child
            given = reached[:, None] & (child < num_children)
            token = tl.load(offered + place, mask=given, other=-2)
            score = tl.load(offered_scores + place, mask=given, other=-float("inf"))
            given = given & (score > -float("inf"))

            # Compare the predicted probability of each child with what the target sampled.
            x = _logit(score)
            predicted = 1 / (1 + tl.exp(-(slope * x + offset + first * is_first)))
            is_sampled = tl.where(token == sampled[:, None], 1.0, 0.0)
            missed = tl.where(given, is_sampled - predicted, 0.0)
            of_slope += tl.sum(missed * x, axis=1)
            of_offset += tl.sum(missed, axis=1)
            of_first += tl.sum(missed * is_first, axis=1)
            share = tl.where(given, predicted * (1 - predicted), 0.0)
            xx += tl.sum(share * x * x, axis=1)
            x1 += tl.sum(share * x, axis=1)
            xf += tl.sum(share * x * is_first, axis=1)
            weight += tl.sum(share, axis=1)
            weight_first += tl.sum(share * is_first, axis=1)
            count += tl.where(reached, 1.0, 0.0)

    # `_take_steps` reads them in this order.
    out = sums + (level * 2 + kind) * SUMS
    tl.store(out, tl.sum(of_slope))
    tl.store(out + 1, tl.sum(of_offset))
    tl.store(out + 2, tl.sum(of_first))
    tl.store(out + 3, tl.sum(xx))
    tl.store(out + 4, tl.sum(x1))
    tl.store(out + 5, tl.sum(xf))
    tl.store(out + 6, tl.sum(weight))
    tl.store(out + 7, tl.sum(weight_first))
    tl.store(out + 8, tl.sum(count))


@triton.jit
def _move(fitted, index, step, low, high, largest_step):
    """Move a parameter by a bounded step, within its range. A step of NaN is none."""
    bounded = tl.minimum(tl.maximum(step, -largest_step), largest_step)
    bounded = tl.where(step == step, bounded, 0.0)
    after = tl.load(fitted + index) + bounded
    after = tl.maximum(after, tl.load(low + index))
    after = tl.minimum(after, tl.load(high + index))
    tl.store(fitted + index, after)


@triton.jit
def _take_steps(
    sums,  # [num_fitted, 2, SUMS]
    parameters,  # [num_fitted, 2, 3]
    information,  # [num_fitted, 2, 3, 3]
    low,  # this and the following one: [3]
    high,
    precision,
    memory,
    largest_step,
    num_offered,  # [num_levels]
    num_accepted,  # [batch]
    batch,
    num_levels,
    num_fitted,
    ROWS: tl.constexpr,
    LEVELS: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Update an OnlineFit of three parameters by a Newton step, level by level, for one kind of row.

    A level's step is expected to be that of the level above, which counts as `precision`.
    """
    kind = tl.program_id(0)

    # The step of the level above, of slope, offset and first-child term.
    a = 0.0
    b = 0.0
    c = 0.0
    for level in range(0, num_fitted):
        given = sums + (level * 2 + kind) * SUMS
        known = information + (level * 2 + kind) * (PARAMETERS * PARAMETERS)

        # Let what is known decay by the number of samples, and add theirs.
        decay = tl.maximum(1 - tl.load(given + 8) / memory, 0.0)
        aa = tl.load(known) * decay + tl.load(given + 3)
        ab = tl.load(known + 1) * decay + tl.load(given + 4)
        ac = tl.load(known + 2) * decay + tl.load(given + 5)
        bb = tl.load(known + 4) * decay + tl.load(given + 6)
        bc = tl.load(known + 5) * decay + tl.load(given + 7)
        cc = tl.load(known + 8) * decay + tl.load(given + 7)
        tl.store(known, aa)
        tl.store(known + 1, ab)
        tl.store(known + 2, ac)
        tl.store(known + 3, ab)
        tl.store(known + 4, bb)
        tl.store(known + 5, bc)
        tl.store(known + 6, ac)
        tl.store(known + 7, bc)
        tl.store(known + 8, cc)

        # Factor information + precision by Cholesky.
        l_aa = tl.sqrt(aa + precision)
        l_ba = ab / l_aa
        l_ca = ac / l_aa
        l_bb = tl.sqrt(bb + precision - l_ba * l_ba)
        l_cb = (bc - l_ca * l_ba) / l_bb
        l_cc = tl.sqrt(cc + precision - l_ca * l_ca - l_cb * l_cb)

        # Solve for the step: forward, then backward.
        y_a = (tl.load(given) + precision * a) / l_aa
        y_b = (tl.load(given + 1) + precision * b - l_ba * y_a) / l_bb
        y_c = (tl.load(given + 2) + precision * c - l_ca * y_a - l_cb * y_b) / l_cc
        c = y_c / l_cc
        b = (y_b - l_cb * c) / l_bb
        a = (y_a - l_ba * b - l_ca * c) / l_aa

        fitted = parameters + (level * 2 + kind) * PARAMETERS
        _move(fitted, 0, a, low, high, largest_step)
        _move(fitted, 1, b, low, high, largest_step)
        _move(fitted, 2, c, low, high, largest_step)

    # The drafts are used up, unless all rows were padding.
    row = tl.arange(0, ROWS)
    accepted = tl.load(num_accepted + row, mask=row < batch, other=-1)
    newest = tl.max(accepted)
    each = tl.arange(0, LEVELS)
    tl.store(num_offered + each, 0, mask=(each < num_levels) & (newest >= 0))
