"""LookedUp: what the host looked up after the tokens that it knows, on the device, and its merge with a model's tree.

A step that is launched ahead follows tokens that only the device knows. So the host looks up
deeper, after the last token that it has read, and the device moves the root along the tokens
committed since then:

    last token read   9 -- 7 -- 5 -- 2         committed since: 7        root   7 -- 5 -- 2
                       \\    \\                                                    \\
                        3    4                                                      4

    lookups = AheadLookups(parts, num_slots, max_depth, device)
    lookups.extend(batch, result)                                  # in each verify pass
    looked_up = lookups.look_up(batch, texts, plan, sampling)      # one copy to the device
    merged = lookups.merge(looked_up, tree, batch, max_depth, has_model=True)

If the tokens committed since then were not looked up, nothing is left. All shapes are fixed and
nothing waits for the device. A node of the model's tree and a looked-up one are the same if the
codes of their paths are: sums of the tokens, multiplied by a number for each depth, modulo 2**64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.device import copy_to_device
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.core.seeds import as_int64, mix64
from eagle_ray.methods.combine.calibration import EnsembleCalibration
from eagle_ray.methods.drafter import TokenSequence
from eagle_ray.methods.lookup.drafter import LookupDrafter
from eagle_ray.tree.draft_tree import DraftTree, VerifyResult
from eagle_ray.tree.expand import DraftPlan
from eagle_ray.tree.tree_merge import Merged, conditional_log_probs

MAX_LEVELS = 128  # levels of a looked-up tree
# Nodes of each part and sequence: a chain through a step in flight and its draft, and some others.
LOOKUP_NODES = 24


class AheadLookups:
    """Lookups for steps that are launched before the host knows the tokens of the step in flight.

    Each lookup starts after the last token that the host has read of a sequence.

    Args:
        parts: drafters that look up.
        num_slots: number of slots of the engine.
        max_depth: maximum depth of any draft.
        device: where the steps run.
    """

    def __init__(
        self,
        parts: Sequence[LookupDrafter],
        num_slots: int,
        max_depth: int,
        device: torch.device,
    ):
        self._parts = parts
        self._max_depth = max_depth
        self._device = device
        self._as_they_are = EnsembleCalibration(1, len(parts))
        _factors(device)  # made now: a step must not wait for them
        shape = (num_slots + 1, max_depth + 1)
        self._last_tokens = torch.zeros(shape, dtype=torch.int64, device=device)

    def extend(self, batch: DecodeSlots, result: VerifyResult) -> None:
        """Record on the device the tokens that a step committed; the host may not have read them yet."""
        tokens = result.tokens
        num_tokens = tokens.shape[1]
        first_tokens = self._last_tokens[:, :num_tokens]
        first_tokens.index_copy_(0, batch.slots, tokens)

    def look_up(
        self,
        batch: DecodeSlots,
        texts: Sequence[TokenSequence],
        plan: DraftPlan,
        sampling: SamplingBatch,
    ) -> LookedUp | None:
        """Look up continuations for the plan's members. Return None if none has any."""
        batch_size = len(texts)
        members = list(range(batch_size))
        if plan.members is not None:
            members = list(plan.members)
        num_members = len(members)
        slots = [batch.host_slots[i] for i in members]
        member_texts = [texts[i] for i in members]
        ends = None
        if sampling.end_ids:
            end_ids = sorted(sampling.end_ids)
            ends = torch.tensor([end_ids])
            ends = ends.repeat(num_members, 1)

        # A step in flight may commit as much as its draft, and this draft follows it.
        depth = self._max_depth + 1 + plan.max_depth
        trees = []
        has_nodes = False
        for part in self._parts:
            tree = part.look_up(slots, member_texts, depth, LOOKUP_NODES, ends)
            is_node = tree.valid[:, 1:]
            has_nodes |= bool(is_node.any())
            trees.append(tree)
        if not has_nodes:
            return None

        # One tree a sequence, with the probabilities that the indices give.
        kinds = torch.zeros(num_members, dtype=torch.int64)
        blended = self._as_they_are.merge(trees, depth, kinds)
        tree = blended.tree
        log_probs = blended.log_probs

        # Sequences that the plan leaves out have trees without nodes.
        if plan.members is not None:
            index = torch.tensor(members)
            roots = torch.zeros(batch_size, dtype=torch.int64)
            tree = tree.spread(index, roots)
            shape = (batch_size, *log_probs.shape[1:])
            nothing = log_probs.new_full(shape, -torch.inf)
            log_probs = nothing.index_copy(0, index, log_probs)

        num_known = [text.num_tokens for text in texts]
        num_nodes = len(trees) * LOOKUP_NODES
        return LookedUp.of(tree, log_probs, num_known, num_nodes, depth, self._device)

    def merge(
        self,
        looked_up: LookedUp,
        tree: DraftTree,
        batch: DecodeSlots,
        max_depth: int,
        has_model: bool,
    ) -> Merged:
        """Return a tree on the batch's roots with the looked-up nodes that are below these roots."""
        num_tokens = batch.lengths + 1
        num_since = num_tokens - looked_up.num_known
        since = self._last_tokens.index_select(0, batch.slots)

        # If a sequence has no step in flight, only its root is new.
        step = torch.arange(since.shape[1], device=since.device)
        last_step = num_since[:, None] - 1
        is_root = step == last_step
        roots = tree.tokens[:, :1]
        since = torch.where(is_root, roots, since)
        return looked_up.merge(tree, since, num_since, max_depth, has_model)


@dataclass(frozen=True, slots=True)
class LookedUp:
    """M looked-up nodes of each of B sequences, without roots, on the device.

    Attributes:
        num_known: tokens of each text when it was looked up.
        tokens: token of each node; 0 for padding.
        parents: index of each node's parent; -1 for children of the root, and for padding.
        depths: depth of each node below the last known token; 0 for padding.
        paths: tokens on the way from the last known token (left out) to each node, each plus 1; 0 past
            the node.
        log_probs: log-probabilities of each node given its parent, by drafter.
    """

    num_known: Int[Tensor, " B"]
    tokens: Int[Tensor, "B M"]
    parents: Int[Tensor, "B M"]
    depths: Int[Tensor, "B M"]
    paths: Int[Tensor, "B M P"]
    log_probs: Float[Tensor, "B M A"]

    @classmethod
    def of(
        cls,
        trees: DraftTree,
        log_probs: Float[Tensor, "B N A"],
        num_known: list[int],
        num_nodes: int,
        max_depth: int,
        device: torch.device,
    ) -> LookedUp:
        """Copy trees of the host to the device.

        Args:
            log_probs: log-probabilities of each node given its parent, by drafter; -inf if it lacks
                the node.
            num_nodes: M, at least the trees' valid nodes without their roots.
            max_depth: P, a bound on their depths.
        """
        batch = len(num_known)
        num_drafters = log_probs.shape[2]

        # The nodes without their roots, padded to num_nodes.
        count = min(trees.num_nodes - 1, num_nodes)
        drafted = slice(1, 1 + count)
        tokens = np.zeros((batch, num_nodes), dtype=np.int64)
        parents = np.zeros_like(tokens)
        depths = np.zeros_like(tokens)
        tokens[:, :count] = trees.tokens[:, drafted].numpy()
        parents[:, :count] = trees.parents[:, drafted].numpy() - 1
        depths[:, :count] = trees.depths[:, drafted].numpy()
        shape = (batch, num_nodes, num_drafters)
        own_log_probs = np.full(shape, -np.inf, dtype=np.float32)
        own_log_probs[:, :count] = log_probs[:, drafted].numpy()
        bits = own_log_probs.view(np.int32)
        bits = bits.astype(np.int64)
        paths = _paths(tokens, parents, depths, max_depth)

        # All of it in one copy, as integers.
        known = np.array(num_known)
        parts = [
            known[:, None],
            tokens,
            parents,
            depths,
            paths.reshape(batch, -1),
            bits.reshape(batch, -1),
        ]
        sizes = [part.shape[1] for part in parts]
        together = np.concatenate(parts, 1)
        packed = copy_to_device(torch.from_numpy(together), device)
        known_at, tokens_at, parents_at, depths_at, paths_at, bits_at = packed.split(sizes, 1)
        bits_at = bits_at.int()
        log_probs_at = bits_at.view(torch.float32)
        return cls(
            num_known=known_at[:, 0],
            tokens=tokens_at,
            parents=parents_at,
            depths=depths_at,
            paths=paths_at.unflatten(1, (num_nodes, max_depth)),
            log_probs=log_probs_at.view(batch, num_nodes, num_drafters),
        )

    def merge(
        self,
        tree: DraftTree,
        since: Int[Tensor, "B S"],
        num_since: Int[Tensor, " B"],
        max_depth: int,
        has_model: bool,
    ) -> Merged:
        """Return the tree with the looked-up nodes appended. Those that the tree already has become padding.

        The values of the appended nodes are still to be computed.

        Args:
            tree: a draft tree on the current roots.
            since: tokens after the last one that was known at the lookup. The first num_since are
                committed, and the last of these is the root.
            num_since: number of committed tokens since the lookup.
            max_depth: maximum depth of the result.
            has_model: the first drafter proposed the tree. If False, no drafter did: the tree has
                only roots.
        """
        num_first = tree.num_nodes
        count = self.tokens.shape[1]
        device = tree.tokens.device

        # Nodes below the root: the tokens since then lead to it, and levels are left.
        levels = self.depths - num_since[:, None]
        path_length = self.paths.shape[2]
        steps = torch.arange(path_length, device=device)
        steps = steps - num_since[:, None]
        num_shared = min(since.shape[1], path_length)
        path_tokens = self.paths[:, :, :num_shared]
        since_tokens = since[:, None, :num_shared] + 1
        agrees = path_tokens == since_tokens
        is_later = steps[:, None, :num_shared] >= 0
        follows_root = (agrees | is_later).all(2)
        is_below = follows_root & (levels > 0) & (levels <= max_depth)

        # Nodes of the tree with equal paths, by the codes of what is below the root.
        factors = _factors(device)
        depths = (steps + 1).clamp(min=0)
        own_factors = factors[depths]
        terms = self.paths * own_factors[:, None]
        codes = terms.sum(2)
        tree_codes = _codes(tree, factors, max_depth)
        has_code = codes[:, :, None] == tree_codes[:, None]
        is_same = has_code & is_below[:, :, None]
        is_known = is_same.any(2)
        is_new = is_below & ~is_known

        # The place of each looked-up node in the merged tree, and of its parent.
        own_place = torch.arange(num_first, num_first + count, device=device)
        tree_place = is_same.int().argmax(2)
        index = torch.where(is_known, tree_place, own_place)
        parents = self.parents.clamp(min=0)
        above = index.gather(1, parents)
        above = torch.where(levels == 1, 0, above)

        # The merged tree: the tree's nodes, then the new ones; the others of the looked-up nodes are padding.
        new_parents = torch.where(is_new, above, -1)
        new_depths = torch.where(is_new, levels, 0)
        best_log_probs = self.log_probs.amax(2)
        new_log_probs = torch.where(is_new, best_log_probs, -torch.inf)
        merged = DraftTree(
            tokens=torch.cat([tree.tokens, self.tokens], 1),
            parents=torch.cat([tree.parents, new_parents], 1),
            depths=torch.cat([tree.depths, new_depths], 1),
            log_values=pad(tree.log_values, (0, count), value=-torch.inf),
            draft_log_probs=torch.cat([tree.draft_log_probs, new_log_probs], 1),
            valid=torch.cat([tree.valid, is_new], 1),
        )

        # What each drafter says of each node; the model's own column comes first.
        num_nodes = num_first + count
        target = torch.where(is_below, index, num_nodes)
        log_probs = self._log_probs_at(target, num_nodes)
        if has_model:
            own = conditional_log_probs(tree)
            own = torch.where(tree.valid, own, -torch.inf)
            own = pad(own, (0, count), value=-torch.inf)
            log_probs = torch.cat([own[:, :, None], log_probs], 2)
        return Merged(merged, log_probs)

    def _log_probs_at(self, index: Int[Tensor, "B M"], num_nodes: int) -> Float[Tensor, "B N A"]:
        """Return the log-probabilities at these of N places, -inf elsewhere; index N is left out."""
        batch, _, num_drafters = self.log_probs.shape
        shape = (batch, num_nodes + 1, num_drafters)
        nothing = self.log_probs.new_full(shape, -torch.inf)
        index = index[:, :, None]
        index = index.expand_as(self.log_probs)
        placed = nothing.scatter(1, index, self.log_probs)
        return placed[:, :-1]


def _paths(
    tokens: Int[np.ndarray, "B M"],
    parents: Int[np.ndarray, "B M"],
    depths: Int[np.ndarray, "B M"],
    max_depth: int,
) -> Int[np.ndarray, "B M P"]:
    """Return LookedUp.paths, level by level."""
    batch, count = tokens.shape
    paths = np.zeros((batch * count, max_depth), dtype=np.int64)

    # Nodes of all sequences in one list, with the indices of their parents in it.
    first_of_row = count * np.arange(batch)
    above = parents + first_of_row[:, None]
    above = above.ravel()
    flat_depths = depths.ravel()
    flat_tokens = tokens.ravel() + 1
    for depth in range(1, max_depth + 1):
        nodes = np.flatnonzero(flat_depths == depth)
        if not len(nodes):
            break
        if depth > 1:
            nodes_above = above[nodes]
            paths[nodes] = paths[nodes_above]
        paths[nodes, depth - 1] = flat_tokens[nodes]
    return paths.reshape(batch, count, max_depth)


def _codes(tree: DraftTree, factors: Int[Tensor, " D1"], max_depth: int) -> Int[Tensor, "B N"]:
    """Return the codes of the paths to the nodes; 0 for roots and padding. By pointer doubling."""
    parents = tree.parents.clamp(min=0)
    own_factors = factors[tree.depths]
    codes = (tree.tokens + 1) * own_factors

    # After each turn a code is the sum over twice as many nodes of the path.
    distance = 1
    while distance < max_depth:
        codes_above = codes.gather(1, parents)
        codes = codes + codes_above
        parents = parents.gather(1, parents)
        distance *= 2
    return torch.where(tree.valid, codes, 0)


_FACTORS: dict[torch.device, Tensor] = {}


def _factors(device: torch.device) -> Int[Tensor, " D1"]:
    """Return an odd number for each depth, 0 for the root's, on the device."""
    if device not in _FACTORS:
        numbers = [0]
        for depth in range(1, MAX_LEVELS):
            odd = mix64(depth) | 1
            numbers.append(as_int64(odd))
        _FACTORS[device] = torch.tensor(numbers, device=device)
    return _FACTORS[device]
