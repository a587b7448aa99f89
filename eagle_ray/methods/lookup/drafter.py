"""LookupDrafter: propose continuations of earlier occurrences of the current suffix, on the host; no model runs.

An index makes one reader per sequence, which reads its tokens as they are committed. A reader's cursor is at the end
of the text; it returns the likeliest next tokens and moves over one of them:

    reader = index.reader()
    reader.read([5, 9, 7, 5, 9])
    cursor = reader.cursor()
    cursor.children(width=2)             # [(7, 0.6)]
    cursor.after(7).children(width=2)    # continuations of 5 9 7

Trees grow level by level, as a head's do. The target's samples are taken from the committed texts at the next draft,
so a step does not sync with the device.

An index scores next tokens from counts after contexts of falling length (prediction by partial matching). The longest
context has weight m / (m + 1), where m is its number of tokens, divided by its counts. The rest of the probability goes
to the next shorter context, and so on (Cleary and Witten 1984):

    >>> interpolate([(3, {7: 1}), (1, {7: 3, 9: 1})], width=2)
    [(7, 0.84375), (9, 0.03125)]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.methods.calibration import Calibration, Offers
from eagle_ray.methods.drafter import Draft, NullDrafter, TokenSequence
from eagle_ray.methods.method import DraftSettings
from eagle_ray.models.target import TargetModel
from eagle_ray.tree.expand import DraftPlan, Frontier, TreeBuilder

Children = list[tuple[int, float]]  # tokens and their probabilities, the likeliest first
LONGEST_NGRAM = 4  # tokens of a context
Counts = dict[tuple[int, ...], dict[int, int]]  # of each n-gram: the tokens that followed it, and how often


@runtime_checkable
class Cursor(Protocol):
    """A position in an index: the end of a text, or of a path drafted on it."""

    def children(self, width: int) -> Children:
        """Return at most `width` tokens with their probabilities, likeliest first; they sum to 1 at most."""

    def after(self, token: int) -> Cursor:
        """Return the cursor after one of the children."""


@runtime_checkable
class Reader(Protocol):
    """Reads one sequence from its first token on."""

    def read(self, token_ids: list[int]) -> None:
        """Read further tokens."""

    def cursor(self) -> Cursor:
        """Return the cursor after the last token read."""


@runtime_checkable
class LookupIndex(Protocol):
    """Protocol of an index of continuations."""

    @property
    def cost_key(self) -> dict[str, Any]:
        """Return what the cost of a look-up depends on, as JSON."""

    def reader(self) -> Reader:
        """Return the reader of a new sequence."""

    def reset(self) -> None:
        """Discard what was read; earlier readers are not used again."""


def interpolate(contexts: Iterable[tuple[int, Mapping[int, int]]], width: int) -> Children:
    """Return the `width` likeliest next tokens; their probabilities sum to less than 1.

    contexts: the length of each, longest first, and how often each token has followed it.
    """
    children: dict[int, float] = {}
    left = 1.0
    for length, follows in contexts:
        believed = left * length / (length + 1) / sum(follows.values())
        for token, count in follows.items():
            children[token] = children.get(token, 0.0) + believed * count
        left /= length + 1
    return sorted(children.items(), key=lambda child: -child[1])[:width]


@dataclass(slots=True)
class _SequenceState:
    """A sequence, and how far its reader has read it."""

    text: TokenSequence
    reader: Reader
    num_tokens: int = 0
    last: int = 0

    def catch_up(self) -> int:
        """Read the newly committed tokens and return their number."""
        news = self.text.token_ids[self.num_tokens :]
        self.reader.read(news)
        self.num_tokens, self.last = self.num_tokens + len(news), news[-1] if news else self.last
        return len(news)


class LookupDrafter(NullDrafter):
    """calibration: on the CPU, from the index's probabilities to the target's sampling rates.

    With graphs the target's passes are replayed, and a step is launched ahead only if it drafts nothing.
    """

    has_lookups = True

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
        """Give the `width` likeliest nodes of each level at most `plan.children` children each."""
        members = range(len(texts)) if plan.members is None else plan.members
        reads = self._register([batch.host_slots[i] for i in members], [texts[i] for i in members])
        num_read = sum(read.catch_up() for read in reads)
        self._update_calibration()
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

    def _register(self, slots: list[int], texts: list[TokenSequence]) -> list[_SequenceState]:
        """Register these sequences; sequences that left their slots are read to their ends first."""
        known = {id(read.text): read for read in self._reads.values()}
        for slot, text in zip(slots, texts, strict=True):
            if slot not in self._reads or self._reads[slot].text is not text:
                self._reads[slot] = known.get(id(text)) or _SequenceState(text, self.source.reader())
        for gone in known.keys() - {id(read.text) for read in self._reads.values()}:
            known[gone].catch_up()
        return [self._reads[slot] for slot in slots]

    def _grow(self, builder: TreeBuilder, plan: DraftPlan, cursors: list[list[Cursor | None]]) -> bool:
        """Grow levels until the plan is fulfilled or nothing follows; return whether nothing follows. None is padding's
        cursor.
        """
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

    def _update_calibration(self) -> None:
        """Update the calibration with the target's samples after the last draft, from the committed texts."""
        if not self._drafted:
            return
        later = [text.token_ids[num_tokens:] for text, num_tokens in self._drafted]
        longest = max(map(len, later))
        picks = torch.tensor([ids + [-1] * (longest - len(ids)) for ids in later]).view(len(later), longest)
        num_accepted = torch.tensor([len(ids) - 1 for ids in later])
        self._offers.update(picks, num_accepted)


def _moved(cursors: list[list[Cursor | None]], frontier: Frontier) -> list[list[Cursor | None]]:
    """Return the cursors of a frontier's nodes, from those of the frontier before it."""
    nodes = torch.stack([frontier.tokens, frontier.parent_rows, frontier.log_values > -torch.inf], 2).tolist()
    return [
        [before[parent].after(token) if real else None for token, parent, real in row]
        for before, row in zip(cursors, nodes, strict=True)
    ]


def _padded(children: list[list[Children]], width: int) -> tuple[Int[Tensor, "M F K"], Float[Tensor, "M F K"]]:
    """Return tokens and log-probabilities of all children, padded to `width` per node."""
    rows = [[row + [(0, 0.0)] * (width - len(row)) for row in rows] for rows in children]
    both = torch.tensor(rows, dtype=torch.float64)
    return both[..., 0].long(), both[..., 1].log().float()


class NgramIndex:
    """Continuations of the last few tokens earlier in the same sequence (prompt lookup, Saxena 2023).

    Outputs often repeat their prompts, or themselves: names, code, quotations. Every n-gram of a sequence is counted
    with the token after it; if several tokens have followed, all are proposed. Sequences share nothing.
    """

    cost_key: ClassVar[dict[str, Any]] = {"longest": LONGEST_NGRAM}

    def reader(self) -> NgramReader:
        return NgramReader()

    def reset(self) -> None:
        pass


class NgramReader:
    """The n-grams of one sequence."""

    def __init__(self) -> None:
        self._counts: Counts = {}
        self._tail: tuple[int, ...] = ()

    def read(self, token_ids: list[int]) -> None:
        self._tail = count_ngrams(self._counts, self._tail, token_ids)

    def cursor(self) -> NgramCursor:
        return NgramCursor(self._counts, self._tail)


def count_ngrams(counts: Counts, tail: tuple[int, ...], token_ids: Iterable[int]) -> tuple[int, ...]:
    """Count the token after each n-gram that ends at the tail."""
    for token in token_ids:
        for start in range(len(tail)):
            follows = counts.setdefault(tail[start:], {})
            follows[token] = follows.get(token, 0) + 1
        tail = (*tail, token)[-LONGEST_NGRAM:]
    return tail


@dataclass(frozen=True, slots=True)
class NgramCursor:
    """counts: of the sequence. tail: its last tokens, drafted ones included."""

    counts: Counts
    tail: tuple[int, ...]

    def children(self, width: int) -> Children:
        contexts = (self.tail[start:] for start in range(len(self.tail)))
        return interpolate(((len(c), self.counts[c]) for c in contexts if c in self.counts), width)

    def after(self, token: int) -> NgramCursor:
        return NgramCursor(self.counts, (*self.tail, token)[-LONGEST_NGRAM:])


def make_drafter(speculative: DraftSettings, target: TargetModel, weights: None) -> LookupDrafter:
    return LookupDrafter(NgramIndex(), Calibration(speculative.max_depth))
