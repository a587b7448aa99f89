"""LookupDrafter: offers what has followed the same tokens before, read from texts on the host; no model runs.

A source hands out readers, one for each sequence, which read its tokens as they come; a reader hands out a cursor where
the text ends, which names the likeliest next tokens and moves on over one of them:

    reader = source.reader()
    reader.read([5, 9, 7, 5, 9])
    cursor = reader.cursor()
    cursor.children(width=2)             # [(7, 0.6)]
    cursor.after(7).children(width=2)    # what follows 5 9 7

The trees grow level by level as a head's do. What the target picked is learned from the texts themselves at the next
draft, so that a step asks nothing of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.drafters.calibration_feedback import Offers
from eagle_ray.drafters.drafter import Draft, TokenSequence
from eagle_ray.drafters.null import NullDrafter
from eagle_ray.drafters.ppm import Children
from eagle_ray.kv.kv_cache import DecodeSlots
from eagle_ray.sampling.calibration import Calibration
from eagle_ray.sampling.sampler import SamplingBatch
from eagle_ray.tree.draft_plan import DraftPlan
from eagle_ray.tree.expand import Frontier, TreeBuilder


@runtime_checkable
class Cursor(Protocol):
    """A place in what a source knows: the end of a text, or of a path drafted on it."""

    def children(self, width: int) -> Children:
        """At most `width` different tokens and their probabilities, which sum to 1 at most, the likeliest first."""

    def after(self, token: int) -> Cursor:
        """The place behind one of the children."""


@runtime_checkable
class Reader(Protocol):
    """One sequence, read from its first token on."""

    def read(self, token_ids: list[int]) -> None:
        """The tokens that follow those read before."""

    def cursor(self) -> Cursor:
        """Behind the last token read."""


@runtime_checkable
class LookupIndex(Protocol):
    """What has followed what."""

    @property
    def cost_key(self) -> dict[str, Any]:
        """What the cost of asking depends on, as JSON."""

    def reader(self) -> Reader:
        """For a new sequence."""

    def reset(self) -> None:
        """What was read of sequences; the readers so far are not used again."""


@dataclass(slots=True)
class _SequenceState:
    """A sequence as far as its reader has read it."""

    text: TokenSequence
    reader: Reader
    num_tokens: int = 0
    last: int = 0

    def catch_up(self) -> int:
        """Read what has been committed since; how many tokens that were."""
        news = self.text.token_ids[self.num_tokens :]
        self.reader.read(news)
        self.num_tokens, self.last = self.num_tokens + len(news), news[-1] if news else self.last
        return len(news)


class LookupDrafter(NullDrafter):
    """calibration: on the CPU; from the source's probabilities to how often the target picks such tokens."""

    supports_graphs = False

    def __init__(self, source: LookupIndex, calibration: Calibration | None = None):
        self.source, self._offers = source, Offers(calibration)
        self._reads: dict[int, _SequenceState] = {}  # by slot
        self._drafted: list[tuple[TokenSequence, int]] = []  # the members of the last draft, and their tokens then

    @property
    def cost_key(self) -> dict[str, Any]:
        return {"source": type(self.source).__name__} | self.source.cost_key

    def draft(
        self,
        batch: DecodeSlots,
        roots: Int[Tensor, " B"],
        plan: DraftPlan,
        sampling: SamplingBatch,
        texts: Sequence[TokenSequence],
    ) -> Draft:
        """The `width` likeliest nodes of each level get at most `plan.children` each."""
        members = range(len(texts)) if plan.members is None else plan.members
        reads = self._meet([batch.host_slots[i] for i in members], [texts[i] for i in members])
        num_read = sum(read.catch_up() for read in reads)
        self._learn()
        self._drafted = [(read.text, read.num_tokens) for read in reads]
        sampled = set(sampling.sampled)
        self._offers.begin(torch.tensor([int(i in sampled) for i in members]))
        ends = sampling.ends.cpu()[list(members)]
        builder = TreeBuilder(torch.tensor([read.last for read in reads]), plan.width, ends=ends)
        is_all = self._grow(builder, plan, [[read.reader.cursor()] for read in reads])
        if not builder.depth:
            return Draft(Draft.empty(roots).tree, [], 0, num_read, is_all)
        tree = builder.build()
        tree = tree.rerank(tree.valid, int(tree.valid.sum(1).max())).to(roots.device)
        if plan.members is not None:
            tree = tree.spread(torch.tensor(plan.members, device=roots.device), roots)
        return Draft(tree, [level.to(roots.device) for level in builder.levels], 0, num_read, is_all)

    def reset_learning(self) -> None:
        self._offers.reset()
        self.source.reset()
        self._reads, self._drafted = {}, []

    def _meet(self, slots: list[int], texts: list[TokenSequence]) -> list[_SequenceState]:
        """These sequences, which may have been in other slots before; of those whose slots they took, read the ends."""
        known = {id(read.text): read for read in self._reads.values()}
        for slot, text in zip(slots, texts, strict=True):
            if slot not in self._reads or self._reads[slot].text is not text:
                self._reads[slot] = known.get(id(text)) or _SequenceState(text, self.source.reader())
        for gone in known.keys() - {id(read.text) for read in self._reads.values()}:
            known[gone].catch_up()
        return [self._reads[slot] for slot in slots]

    def _grow(self, builder: TreeBuilder, plan: DraftPlan, cursors: list[list[Cursor | None]]) -> bool:
        """Levels until the plan has enough or nothing follows; whether it was the latter. None is padding's cursor."""
        frontier = None
        while builder.depth < plan.max_depth:
            if builder.depth:
                if plan.should_stop and plan.should_stop(builder):
                    return False
                frontier = builder.frontier()
                cursors = _moved(cursors, frontier)
            children = [[c.children(plan.children) if c else [] for c in row] for row in cursors]
            if not any(map(any, children)):
                return True
            tokens, log_probs = _padded(children, plan.children)
            builder.grow(self._offers.add(frontier, tokens, log_probs), tokens, log_probs)
        return False

    def _learn(self) -> None:
        """What the target picked after the last draft, as the texts have it by now."""
        if not self._drafted:
            return
        later = [text.token_ids[num_tokens:] for text, num_tokens in self._drafted]
        longest = max(map(len, later))
        picks = torch.tensor([ids + [-1] * (longest - len(ids)) for ids in later]).view(len(later), longest)
        num_accepted = torch.tensor([len(ids) - 1 for ids in later])
        self._offers.update(picks, num_accepted)


def _moved(cursors: list[list[Cursor | None]], frontier: Frontier) -> list[list[Cursor | None]]:
    """The cursors of a frontier's nodes, from those of the frontier before it."""
    nodes = torch.stack([frontier.tokens, frontier.parent_rows, frontier.log_values > -torch.inf], 2).tolist()
    return [
        [before[parent].after(token) if real else None for token, parent, real in row]
        for before, row in zip(cursors, nodes, strict=True)
    ]


def _padded(children: list[list[Children]], width: int) -> tuple[Int[Tensor, "M F K"], Float[Tensor, "M F K"]]:
    """Tokens and log-probabilities of all children, with padding up to `width` for each node."""
    rows = [[row + [(0, 0.0)] * (width - len(row)) for row in rows] for rows in children]
    both = torch.tensor(rows, dtype=torch.float64)
    return both[..., 0].long(), both[..., 1].log().float()
