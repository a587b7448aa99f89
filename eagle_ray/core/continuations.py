"""Score continuations of a prompt: a trie of their tokens, and the log-probabilities that passes over it give.

    scores = ContinuationScores([Continuation([5, 7, 9]), Continuation([5, 8])])

          0 the prompt's end      rows of the target's pass: node 1 alone; its logits score nodes 2 and 4,
          |                       as those of the prompt's last row score node 1
          1 token 5
         / \\
        2 7 4 8                   nodes are numbered depth first
        |
        3 9

A node with children is a row of one pass: its logits score the children. A leaf needs no row. If
the rows do not fit one pass, there are several: a run of nodes without branches is computed like a
chunk of a prompt, and its keys and values stay in the cache; what branches behind it follows as
trees. No row depends on how the rows are divided.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

ROOT = 0  # the node of the prompt's last token


@dataclass(frozen=True, slots=True)
class Continuation:
    """One continuation of a sequence's prompt.

    Attributes:
        token_ids: tokens after the sequence's prompt.
        num_context: number of first tokens that are context and not scored.
        num_bytes: bytes of its text in UTF-8; None if unknown.
    """

    token_ids: list[int]
    num_context: int = 0
    num_bytes: int | None = None

    @property
    def num_scored(self) -> int:
        return len(self.token_ids) - self.num_context


@dataclass(frozen=True, slots=True)
class ScorePass:
    """Rows of one pass that belong to one trie.

    Attributes:
        base: node whose path is in the KV cache before the pass.
        nodes: nodes to compute, parents before their children; the first are children of the base.
        is_run: whether each node is the child of the one before it. Then their keys and values stay
            in the cache.
    """

    base: int
    nodes: list[int]
    is_run: bool


class TokenTrie:
    """The trie of token sequences, nodes numbered depth first; node 0 is the prompt's end.

    Attributes:
        tokens: token of each node; -1 for the root.
        parents: parent of each node; -1 for the root.
        depths: tokens from the prompt's end to each node, its own included.
        ends: last node of each sequence, in the order given.
        children: children of each node that has any.
    """

    def __init__(self, paths: list[list[int]]):
        self.tokens: list[int] = [-1]
        self.parents: list[int] = [-1]
        self.depths: list[int] = [0]
        self.ends: list[int] = [ROOT] * len(paths)
        self.children: dict[int, list[int]] = {}

        # Sorted paths have their common prefixes side by side, so nodes come depth first.
        branch = [ROOT]
        previous: list[int] = []
        for i in sorted(range(len(paths)), key=paths.__getitem__):
            path = paths[i]
            del branch[num_common(previous, path) + 1 :]
            for token in path[len(branch) - 1 :]:
                branch.append(self._add(branch[-1], token, len(branch)))
            self.ends[i] = branch[-1]
            previous = path

    def _add(self, parent: int, token: int, depth: int) -> int:
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(depth)
        self.children.setdefault(parent, []).append(node)
        return node

    @property
    def num_rows(self) -> int:
        """Return the number of nodes that need a row in a pass: those with children, except the root."""
        return len(self.children) - (ROOT in self.children)

    @property
    def max_depth(self) -> int:
        return max(self.depths)

    @property
    def leaves(self) -> list[int]:
        """Return the nodes without children, except the root."""
        return [node for node in range(1, len(self.tokens)) if node not in self.children]

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root's child to a node."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def passes(self, max_rows: int, max_tree: int) -> Iterator[ScorePass]:
        """Yield the trie's rows as passes. Each pass depends only on earlier ones, which are in the KV cache by then.

        Args:
            max_rows: maximum rows of a pass that is a run.
            max_tree: maximum rows of a pass of trees.
        """
        rows = sorted(node for node in self.children if node != ROOT)
        place = {node: i for i, node in enumerate(rows)}
        sizes = self._subtree_rows(rows)
        inner: dict[int, list[int]] = {}
        for node in rows:
            inner.setdefault(self.parents[node], []).append(node)

        # Subtrees too large for one part, the next one last; the paths to all of them are cached.
        waiting = [ROOT]
        while waiting:
            base = waiting.pop()
            if base != ROOT:
                run = self._run_from(base, inner)
                before = self.parents[base]
                for start in range(0, len(run), max_rows):
                    part = run[start : start + max_rows]
                    yield ScorePass(before, part, is_run=True)
                    before = part[-1]
                base = before

            large = []
            group: list[int] = []
            for child in inner.get(base, []):
                size = sizes[child]
                if size > max_tree:
                    large.append(child)
                    continue
                if len(group) + size > max_tree:
                    yield self._group(base, group)
                    group = []
                first = place[child]
                group += rows[first : first + size]  # a subtree's nodes follow one another
            if group:
                yield self._group(base, group)
            waiting += reversed(large)

    def _subtree_rows(self, rows: list[int]) -> dict[int, int]:
        """Return the rows of each row's subtree, itself included."""
        sizes = dict.fromkeys(rows, 1)
        for node in reversed(rows):
            parent = self.parents[node]
            if parent != ROOT:
                sizes[parent] += sizes[node]
        return sizes

    def _run_from(self, node: int, inner: dict[int, list[int]]) -> list[int]:
        """Return the rows from a node down to the first with other than one row among its children."""
        run = [node]
        while len(below := inner.get(run[-1], [])) == 1:
            run += below
        return run

    def _group(self, base: int, nodes: list[int]) -> ScorePass:
        expected = [base, *nodes[:-1]]
        is_run = all(self.parents[n] == e for n, e in zip(nodes, expected, strict=True))
        return ScorePass(base, nodes, is_run)


@dataclass(frozen=True, slots=True)
class ScoredContinuation:
    """The score of one continuation.

    Attributes:
        score: sum of the log-probabilities of its tokens.
        num_tokens: number of scored tokens.
        num_bytes: bytes of its text in UTF-8; None if unknown.
        is_greedy: whether each of its tokens is the likeliest at its position.
    """

    score: float
    num_tokens: int
    num_bytes: int | None
    is_greedy: bool


@dataclass(slots=True, eq=False)
class ContinuationScores:
    """The scores so far of the continuations of one sequence's prompt.

    Attributes:
        source: name of the request parameter that holds the continuations, for messages.
        log_probs: log-probability of each node's token given its parent, fp32.
        likeliest: whether that token is the likeliest one there.
        num_verified: rows of the trie that were computed.
        last_turn: number of the engine's last pass with rows of this trie, or the last one before
            it joined; None before that.
    """

    continuations: list[Continuation]
    source: str = "continuations"
    trie: TokenTrie = field(init=False)
    log_probs: np.ndarray = field(init=False)
    likeliest: np.ndarray = field(init=False)
    num_verified: int = 0
    last_turn: int | None = None
    _passes: list[ScorePass] = field(default_factory=list, init=False)
    _next_pass: int = 0
    _is_root_scored: bool = False

    def __post_init__(self) -> None:
        self.trie = TokenTrie([each.token_ids for each in self.continuations])
        self.log_probs = np.zeros(len(self.trie.tokens), dtype=np.float32)
        self.likeliest = np.ones(len(self.trie.tokens), dtype=bool)

    @property
    def longest(self) -> int:
        """Return the tokens of the longest continuation."""
        return self.trie.max_depth

    @property
    def num_positions(self) -> int:
        """Return how many positions behind the prompt the passes write."""
        depths = self.trie.depths
        return max((depths[each.base] + len(each.nodes) for each in self._passes), default=0)

    @property
    def is_complete(self) -> bool:
        return self._is_root_scored and self._next_pass == len(self._passes)

    @property
    def has_nan(self) -> bool:
        """Return whether a log-probability that was recorded is NaN."""
        return bool(np.isnan(self.log_probs).any())

    @property
    def next_pass(self) -> ScorePass:
        """Return the next rows to compute. The prompt must be computed, and scores must be missing."""
        return self._passes[self._next_pass]

    def plan(self, room: int, max_rows: int, max_tree: int) -> None:
        """Divide the rows into passes that write at most `room` positions behind the prompt.

        Args:
            room: positions behind the prompt, at least the tokens of the longest continuation.
            max_rows: maximum rows of a pass.
            max_tree: maximum rows of a pass of trees.
        """
        self._passes = list(self.trie.passes(max_rows, min(max_tree, max(room, 1))))
        if self.num_positions > room:
            # A tree behind a long run may need more than there is; none is deeper than `longest`.
            smaller = min(max_tree, max(room - self.longest + 1, 1))
            self._passes = list(self.trie.passes(max_rows, smaller))
        self.restart()

    def restart(self) -> None:
        """Begin again, because the prompt's keys and values were dropped."""
        self._next_pass = 0
        self._is_root_scored = False
        self.num_verified = 0

    def children_of(self, nodes: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Return the children of some nodes as three lists: index of the parent among the nodes,
        token, and child node."""
        owners: list[int] = []
        children: list[int] = []
        for i, node in enumerate(nodes):
            below = self.trie.children.get(node, [])
            owners += [i] * len(below)
            children += below
        return owners, [self.trie.tokens[child] for child in children], children

    def record(
        self, nodes: list[int], children: list[int], log_probs: np.ndarray, likeliest: np.ndarray
    ) -> None:
        """Store the log-probabilities of all children of a pass's nodes, or of the root's children."""
        self.log_probs[children] = log_probs
        self.likeliest[children] = likeliest
        if nodes == [ROOT]:
            self._is_root_scored = True
        else:
            self._next_pass += 1
            self.num_verified += len(nodes)

    def record_path(self, leaf: int, log_probs: list[float], likeliest: list[bool]) -> None:
        """Store the log-probabilities of all tokens on the path from the prompt's end to a leaf."""
        nodes = self.trie.path(leaf)
        self.log_probs[nodes] = log_probs
        self.likeliest[nodes] = likeliest

    def results(self) -> list[ScoredContinuation]:
        """Return the score of each continuation, in order: the correctly rounded sum of its tokens'
        fp32 log-probabilities."""
        results = []
        for continuation, end in zip(self.continuations, self.trie.ends, strict=True):
            scored = self.trie.path(end)[continuation.num_context :]
            results.append(
                ScoredContinuation(
                    score=math.fsum(self.log_probs[scored].tolist()),
                    num_tokens=len(scored),
                    num_bytes=continuation.num_bytes,
                    is_greedy=bool(self.likeliest[scored].all()),
                )
            )
        return results

    def label_mass(self) -> float | None:
        """Return the probability that the next token begins one of the continuations, each first token counted once.

        None if no continuation has a scored token, or if their contexts differ.
        """
        firsts = set()
        for continuation, end in zip(self.continuations, self.trie.ends, strict=True):
            if continuation.num_scored:
                firsts.add(self.trie.path(end)[continuation.num_context])
        contexts = {self.trie.parents[first] for first in firsts}
        if len(contexts) != 1:
            return None
        log_probs = self.log_probs[sorted(firsts)].tolist()
        return math.fsum(math.exp(log_prob) for log_prob in log_probs)


def num_common(a: list[int], b: list[int]) -> int:
    """Return the length of the longest common prefix."""
    num_tokens = min(len(a), len(b))
    if a[:num_tokens] == b[:num_tokens]:
        return num_tokens
    return next(i for i in range(num_tokens) if a[i] != b[i])
