"""LookupDrafter: propose continuations of earlier occurrences of the current suffix, on the host; no model runs.

An index makes one reader per sequence, which reads its tokens as they are committed. A reader's
cursor is at the end of the text; it returns the likeliest next tokens and moves over one of them:

    reader = index.reader()
    reader.read([5, 9, 7, 5, 9])
    cursor = reader.cursor()
    cursor.children(width=2)             # [(7, 0.6)]
    cursor.after(7).children(width=2)    # continuations of 5 9 7

Trees are grown best first (best_first.py). The target's samples are taken from the committed texts
at a later draft, so a step does not sync with the device.

An index scores next tokens from counts after contexts of falling length (prediction by partial
matching). The longest context has weight m / (m + 1), where m is its number of tokens, divided by
its counts. The rest of the probability goes to the next shorter context, and so on (Cleary and
Witten 1984):

    >>> interpolate([(3, {7: 1}), (1, {7: 3, 9: 1})], width=2)
    [(7, 0.84375), (9, 0.03125)]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.methods.calibration import WARMUP_STEPS, Calibration
from eagle_ray.methods.drafter import Draft, NullDrafter, TokenSequence
from eagle_ray.methods.lookup.best_first import (
    Children,
    Cursor,
    GrownTrees,
    GrowthRequest,
    Texts,
    grow_trees,
)
from eagle_ray.methods.lookup.native_index import native_index
from eagle_ray.methods.method import DraftSettings, parts_of
from eagle_ray.models.target import TargetModel
from eagle_ray.tree.draft_tree import DraftTree
from eagle_ray.tree.expand import DraftPlan

LONGEST_NGRAM = 4  # tokens of a context
MIN_LEFT = 1 / 16  # probability that longer contexts leave to shorter ones, or these are not asked
CALIBRATION_INTERVAL = 32  # steps between updates after the warm-up
MAX_STATE_TOKENS = 500_000  # tokens of the texts in a drafter's state: 2 MB
# For each n-gram the tokens that followed it, and how often.
Counts = dict[tuple[int, ...], dict[int, int]]


@runtime_checkable
class Reader(Protocol):
    """An index's view of one sequence, whose tokens it reads in order from the first one on."""

    def read(self, token_ids: list[int]) -> None:
        """Read further tokens."""

    def cursor(self) -> Cursor:
        """Return the cursor after the last token read."""


@runtime_checkable
class LookupIndex(Protocol):
    """Protocol of an index of continuations, with one reader for each sequence."""

    @property
    def cost_key(self) -> dict[str, Any]:
        """Return everything that the cost of a lookup depends on, as JSON."""

    def reader(self) -> Any:
        """Return the reader of a new sequence."""

    def read(self, readers: Sequence[Any], news: Sequence[list[int]]) -> None:
        """Read further tokens of each reader's sequence."""

    def grow(
        self, readers: Sequence[Any], roots: Sequence[int], request: GrowthRequest
    ) -> GrownTrees:
        """Return a tree of continuations after the tokens that each reader has read.

        Args:
            roots: the last token of each sequence.
        """

    def reset(self) -> None:
        """Discard the indexed texts. Earlier readers must not be used again."""

    def lookup_hits(self) -> tuple[int, int] | None:
        """Return the tokens read so far, and how many of them a lookup would have predicted. None if not counted."""

    def texts(self) -> Texts | None:
        """Return the texts indexed for all sequences together, the oldest first; None if sequences share none."""


def newest_texts(texts: Texts, max_tokens: int) -> dict[str, Tensor]:
    """Return the newest texts that together have at most this many tokens; no text is cut."""
    lengths, tokens = texts
    num_texts = int((lengths.flip(0).cumsum(0) <= max_tokens).sum())
    newest = lengths[len(lengths) - num_texts :]
    num_tokens = int(newest.sum())
    return {"lengths": newest, "tokens": tokens[len(tokens) - num_tokens :]}


def checked_texts(state: Mapping[str, Tensor], vocab_size: int | None) -> list[list[int]]:
    """Return the texts in a saved state. Raises ValueError if they are damaged or from another vocabulary."""
    lengths = state.get("lengths")
    tokens = state.get("tokens")
    if lengths is None or tokens is None:
        raise ValueError("it holds no texts")
    if lengths.dtype != torch.int64 or tokens.dtype != torch.int32:
        raise ValueError("it holds no texts")
    if lengths.dim() != 1 or tokens.dim() != 1 or _num_tokens(lengths) != len(tokens):
        raise ValueError("the lengths of its texts do not fit their tokens")
    if len(tokens):
        is_above = vocab_size is not None and int(tokens.max()) >= vocab_size
        if is_above or int(tokens.min()) < 0:
            raise ValueError(f"it holds token ids outside of the vocabulary of {vocab_size}")
    return [text.tolist() for text in tokens.split(lengths.tolist())]


def _num_tokens(lengths: Int[Tensor, " T"]) -> int:
    """Return the sum of the lengths, or -1 if one of them is not positive."""
    counts = lengths.tolist()
    return sum(counts) if min(counts, default=1) > 0 else -1


class CursorIndex:
    """Base class of the indexes in Python, which grow trees through their readers' cursors."""

    def read(self, readers: Sequence[Reader], news: Sequence[list[int]]) -> None:
        for reader, token_ids in zip(readers, news, strict=True):
            if token_ids:
                reader.read(token_ids)

    def grow(
        self, readers: Sequence[Reader], roots: Sequence[int], request: GrowthRequest
    ) -> GrownTrees:
        return grow_trees([reader.cursor() for reader in readers], roots, request)

    def lookup_hits(self) -> tuple[int, int] | None:
        return None

    def texts(self) -> Texts | None:
        return None


def interpolate(contexts: Iterable[tuple[int, Mapping[int, int]]], width: int) -> Children:
    """Return the `width` likeliest next tokens, ties to the lower id; their probabilities sum to less than 1.

    Args:
        contexts: for each context, longest first, its length and how often each token has followed
            it.
    """
    children: dict[int, float] = {}
    left = 1.0
    for length, follows in contexts:
        if left < MIN_LEFT:
            break
        believed = left * length / (length + 1) / sum(follows.values())
        for token, count in follows.items():
            children[token] = children.get(token, 0.0) + believed * count
        left /= length + 1
    return sorted(children.items(), key=lambda child: (-child[1], child[0]))[:width]


@dataclass(slots=True)
class _SequenceState:
    """A sequence, and how far its reader has read it."""

    text: TokenSequence
    reader: Any
    num_tokens: int = 0
    last: int = 0


@dataclass(frozen=True, slots=True)
class _Drafted:
    """The trees of the last step, from which the calibration is updated once their sequences went on."""

    texts: list[TokenSequence]
    lengths: list[int]  # lengths of the texts then
    tree: DraftTree
    kinds: list[int]


class LookupDrafter(NullDrafter):
    """Proposes continuations from an index. `plan.width` and `plan.should_stop` are not read: trees grow best first.

    With graphs, the target's passes are replayed, and a step is launched ahead only if it drafts
    nothing.

    Args:
        bounds: bounds of each sequence's tree; a plan may ask for fewer levels.
        calibration: on the CPU, from the index's probabilities to the target's sampling rates; None
            leaves them as they are.
        vocab_size: vocabulary size of the target; a state with other token ids is refused.
    """

    has_lookups = True

    def __init__(
        self,
        source: LookupIndex,
        bounds: TreeBounds,
        calibration: Calibration | None = None,
        vocab_size: int | None = None,
    ):
        self.source = source
        self.bounds = bounds
        self._vocab_size = vocab_size
        self._calibration = calibration
        self._reads: dict[int, _SequenceState] = {}  # by slot
        self._drafted: _Drafted | None = None
        self._num_taught = 0

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
        """Look up trees of at most plan.max_depth levels."""
        # Read what was committed since the last look-up.
        members = list(range(len(texts)) if plan.members is None else plan.members)
        slots = [batch.host_slots[i] for i in members]
        reads = self._register(slots, [texts[i] for i in members])
        num_read = self._catch_up(reads)
        self._update_calibration()

        # Grow the trees on the host.
        sampled = set(sampling.sampled)
        kinds = [int(i in sampled) for i in members]
        ends = sampling.ends if plan.members is None else sampling.ends[members]
        calibrated = None if self._calibration is None else self._calibration.fit.parameters
        bounds = TreeBounds(self.bounds.max_nodes, plan.max_depth, self.bounds.top_k)
        grown = self._grow(reads, GrowthRequest(bounds, ends.cpu(), calibrated, kinds))
        if not grown.levels:
            return Draft(Draft.empty(roots).tree, [], 0, num_read, is_exhausted=True)
        self._keep(reads, grown.tree, kinds)

        tree = grown.tree
        levels = grown.levels
        if roots.device.type != "cpu":
            tree = tree.to(roots.device)
            levels = [level.to(roots.device, non_blocking=True) for level in levels]
        if plan.members is not None:
            tree = tree.spread(torch.tensor(members, device=roots.device), roots)
        return Draft(tree, levels, 0, num_read, is_exhausted=True)

    def look_up(
        self,
        slots: Sequence[int],
        texts: Sequence[TokenSequence],
        max_depth: int,
        max_nodes: int,
        ends: Int[Tensor, "B E"] | None = None,
    ) -> DraftTree:
        """Return uncalibrated trees of these texts on the CPU, [B, 1 + max_nodes]; a root is the
        last token of its text.

        Args:
            slots: slot of each text in the batch, as in `draft`.
            ends: tokens that get no children; -1 is none.
        """
        reads = self._register(list(slots), list(texts))
        self._catch_up(reads)
        bounds = TreeBounds(max_nodes, max_depth, self.bounds.top_k)
        return self._grow(reads, GrowthRequest(bounds, ends, is_padded=True)).tree

    def lookup_hits(
        self, batch: DecodeSlots, texts: Sequence[TokenSequence]
    ) -> tuple[int, int] | None:
        if self.source.lookup_hits() is None:
            return None
        self._catch_up(self._register(batch.host_slots, list(texts)))
        return self.source.lookup_hits()

    def reset_learning(self) -> None:
        if self._calibration is not None:
            self._calibration.fit.reset()
        self.source.reset()
        self._reads = {}
        self._drafted = None
        self._num_taught = 0

    def state(self) -> dict[str, Tensor]:
        """Return the calibration, and the newest texts of the index if all sequences share one."""
        state = {} if self._calibration is None else self._calibration.fit.state()
        self._catch_up(list(self._reads.values()))
        texts = self.source.texts()
        return state if texts is None else state | newest_texts(texts, MAX_STATE_TOKENS)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        texts = [] if self.source.texts() is None else checked_texts(state, self._vocab_size)
        if self._calibration is not None:
            self._calibration.fit.load_state(state)
            self._num_taught = max(self._num_taught, WARMUP_STEPS)
        for text in texts:
            self.source.read([self.source.reader()], [text])

    def _grow(self, reads: list[_SequenceState], request: GrowthRequest) -> GrownTrees:
        readers = [read.reader for read in reads]
        roots = [read.last for read in reads]
        return self.source.grow(readers, roots, request)

    def _catch_up(self, reads: list[_SequenceState]) -> int:
        """Read the newly committed tokens and return their number."""
        news = [read.text.token_ids_from(read.num_tokens) for read in reads]
        self.source.read([read.reader for read in reads], news)
        num_read = 0
        for read, token_ids in zip(reads, news, strict=True):
            if token_ids:
                read.num_tokens += len(token_ids)
                read.last = token_ids[-1]
                num_read += len(token_ids)
        return num_read

    def _register(self, slots: list[int], texts: list[TokenSequence]) -> list[_SequenceState]:
        """Register sequences. Sequences that have left their slots are read to their ends first."""
        known = {id(read.text): read for read in self._reads.values()}
        has_changed = False
        for slot, text in zip(slots, texts, strict=True):
            read = self._reads.get(slot)
            if read is None or read.text is not text:
                has_changed = True
                # A sequence may have moved to another slot.
                self._reads[slot] = known.get(id(text)) or _SequenceState(
                    text, self.source.reader()
                )
        if has_changed:
            left = known.keys() - {id(read.text) for read in self._reads.values()}
            self._catch_up([known[gone] for gone in sorted(left)])
        return [self._reads[slot] for slot in slots]

    def _keep(self, reads: list[_SequenceState], tree: DraftTree, kinds: list[int]) -> None:
        """Keep a step's trees if the calibration is to learn from them."""
        self._num_taught += 1
        is_due = self._num_taught <= WARMUP_STEPS or self._num_taught % CALIBRATION_INTERVAL == 0
        if self._calibration is not None and is_due:
            texts = [read.text for read in reads]
            lengths = [read.num_tokens for read in reads]
            self._drafted = _Drafted(texts, lengths, tree, kinds)

    def _update_calibration(self) -> None:
        """Update the calibration with the target's tokens after the drafts that were kept, from the committed texts."""
        drafted = self._drafted
        self._drafted = None
        if drafted is None or self._calibration is None:
            return
        pairs = zip(drafted.texts, drafted.lengths, strict=True)
        later = [text.token_ids_from(length) for text, length in pairs]
        offered = offered_on_path(drafted.tree, later, len(self._calibration.fit.parameters))
        if offered is not None:
            self._calibration.update(torch.tensor(drafted.kinds), *offered)


def offered_on_path(
    tree: DraftTree, later: Sequence[list[int]], num_levels: int
) -> tuple[Float[Tensor, "L M K"], Bool[Tensor, "L M K"], Bool[Tensor, "L M"]] | None:
    """Return the proposals along the paths that texts took through their trees, for Calibration.update.

    Args:
        later: the tokens that followed each root.

    Returns:
        The log-probabilities of the children of each level's node, which of them has the next
        token, and whether the level was reached; None if nothing was proposed.
    """
    rows = [_offered(tree, m, tokens[:num_levels]) for m, tokens in enumerate(later)]
    depth = max(map(len, rows))
    if depth == 0:
        return None

    width = max(len(values) for row in rows for values, _ in row)
    log_probs = torch.full((depth, len(rows), width), -torch.inf)
    picked = torch.zeros(depth, len(rows), width, dtype=torch.bool)
    for m, row in enumerate(rows):
        for level, (values, index) in enumerate(row):
            log_probs[level, m, : len(values)] = torch.tensor(values)
            if index is not None:
                picked[level, m, index] = True
    return log_probs, picked, log_probs[..., 0] > -torch.inf


def _offered(tree: DraftTree, m: int, later: list[int]) -> list[tuple[list[float], int | None]]:
    """Return the log-probabilities of each level's children on one text's path, and the index of the next token."""
    tokens = tree.tokens[m].tolist()
    parents = tree.parents[m].tolist()
    log_probs = tree.draft_log_probs[m].tolist()
    node = 0
    levels = []
    for token in later:
        children = [i for i in range(node + 1, len(parents)) if parents[i] == node]
        if not children:
            break
        child_tokens = [tokens[child] for child in children]
        taken = child_tokens.index(token) if token in child_tokens else None
        levels.append(([log_probs[child] for child in children], taken))
        if taken is None:
            break
        node = children[taken]
    return levels


class NgramIndex(CursorIndex):
    """Continuations of n-grams that occurred earlier in their own sequence (prompt lookup, Saxena 2023).

    Outputs often repeat their prompts, or themselves: names, code, quotations. Every n-gram of a
    sequence is counted with the token after it; if several tokens have followed, all are proposed.
    Sequences share nothing.
    """

    cost_key: ClassVar[dict[str, Any]] = {"longest": LONGEST_NGRAM}

    def reader(self) -> NgramReader:
        return NgramReader()

    def reset(self) -> None:
        pass


class NgramReader:
    """Reads one sequence and counts its n-grams."""

    def __init__(self) -> None:
        self._counts: Counts = {}
        self._tail: tuple[int, ...] = ()

    def read(self, token_ids: list[int]) -> None:
        self._tail = count_ngrams(self._counts, self._tail, token_ids)

    def cursor(self) -> NgramCursor:
        return NgramCursor(self._counts, self._tail)


def count_ngrams(
    counts: Counts, tail: tuple[int, ...], token_ids: Iterable[int]
) -> tuple[int, ...]:
    """Count the token after each n-gram that ends at the tail."""
    for token in token_ids:
        for start in range(len(tail)):
            follows = counts.setdefault(tail[start:], {})
            follows[token] = follows.get(token, 0) + 1
        tail = (*tail, token)[-LONGEST_NGRAM:]
    return tail


@dataclass(frozen=True, slots=True)
class NgramCursor:
    """A position in the n-grams of a sequence.

    Attributes:
        counts: how often each token has followed each n-gram of the sequence.
        tail: last tokens of the text and the drafted path.
    """

    counts: Counts
    tail: tuple[int, ...]

    def children(self, width: int) -> Children:
        contexts = [self.tail[start:] for start in range(len(self.tail))]
        known = [(len(c), self.counts[c]) for c in contexts if c in self.counts]
        return interpolate(known, width)

    def after(self, token: int) -> NgramCursor:
        return NgramCursor(self.counts, (*self.tail, token)[-LONGEST_NGRAM:])


def make_drafter(speculative: DraftSettings, target: TargetModel, weights: None) -> LookupDrafter:
    return lookup_drafter(native_index("ngram") or NgramIndex(), speculative, target)


def lookup_drafter(
    source: LookupIndex, speculative: DraftSettings, target: TargetModel
) -> LookupDrafter:
    """Return the drafter over an index; without a calibration if its trees are merged, since the merge calibrates."""
    is_merged = len(parts_of(speculative.merged_methods)) > 1
    calibration = None if is_merged else Calibration(speculative.max_depth)
    return LookupDrafter(source, speculative.tree_bounds, calibration, target.vocab_size)
