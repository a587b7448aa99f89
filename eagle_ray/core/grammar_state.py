"""GrammarState: an output's position in its grammar, and the token masks of its draft tree's nodes.

    state = compiler.start(GrammarSpec("choice", '["yes", "no"]'))
    state.sync(output_ids)                          # once a step: the tokens committed since
    masks = state.path_masks([[], [17], [17, 4]])   # [3, words]: a token mask for each path
    state.predicted_tokens(6)      # tokens that the grammar forces, or that followed before
    state.mark_dead_end([17, 4], error)             # no token is left there
    state.dead_end_in([17, 4, 9])                   # DeadEnd(2, error): the output goes past such a node

A state starts as a copy of a compiled matcher, follows the committed tokens, and visits a tree
depth first: one token consumed and rolled back per node. The masks are those of plain decoding: if
the parser meets a limit at one node, only an output that goes through that node fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Int32
from numpy.typing import NDArray
from torch import Tensor

from eagle_ray.core.errors import RequestError
from eagle_ray.core.parser_budget import ParserBudget, ParserCost

MAX_CONTEXT = 3  # tokens
MAX_GRAMMAR_CONTEXTS = 1 << 18  # kept for one grammar, some 40 MB
BYTES_PER_CONTEXT = 160
MAX_FORCED = 64  # allowed tokens where the next one is predicted: white space, punctuation, enums, not free text
TOKENS_PER_WORD = 32  # token t is bit t % 32 of word t // 32 of a token mask
Words = NDArray[np.int32]
_TOO_SLOW = "following it takes more parser time than an output has. Write it so that a text is read in one way only."


@runtime_checkable
class Matcher(Protocol):
    """Protocol of a parser at a position in its grammar, with the methods of llguidance's LLMatcher
    that are used here."""

    def deep_copy(self) -> Matcher: ...
    def is_accepting(self) -> bool: ...
    def is_stopped(self) -> bool: ...
    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...
    def compute_ff_tokens(self) -> list[int]: ...
    def try_consume_tokens(self, tokens: list[int]) -> int: ...
    def rollback(self, num_tokens: int) -> bool: ...
    def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None: ...


class PredictedToken(NamedTuple):
    """A token that is likely to come next.

    Attributes:
        is_forced: whether the grammar allows no other text.
    """

    token: int
    is_forced: bool


class DeadEnd(NamedTuple):
    """A position after which no token is allowed.

    Attributes:
        num_tokens: number of tokens of a path before it.
    """

    num_tokens: int
    error: RequestError


class RecentTokens:
    """The token that followed each context of up to MAX_CONTEXT tokens most recently, over all outputs of one grammar.

    Outputs of a schema repeat its skeleton: white space and punctuation that the grammar leaves
    open.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}

    @property
    def num_bytes(self) -> int:
        return len(self._next) * BYTES_PER_CONTEXT

    def add(self, token_ids: Sequence[int], first: int) -> None:
        """Record the tokens from index `first` on, each with the contexts before it."""
        if len(self._next) > MAX_GRAMMAR_CONTEXTS:
            self._next.clear()
        for i in range(max(first, 1), len(token_ids)):
            for length in range(1, min(i, MAX_CONTEXT) + 1):
                context = tuple(token_ids[i - length : i])
                self._next[context] = token_ids[i]

    def after(self, context: Sequence[int]) -> Iterator[int]:
        """Yield the tokens that followed the longest known context, then those after shorter ones."""
        for length in range(min(len(context), MAX_CONTEXT), 0, -1):
            token = self._next.get(tuple(context[-length:]))
            if token is not None:
                yield token


class GrammarState:
    """The state of one output's parse.

    Args:
        compiled: matcher before its first token, which is copied and not changed.
        vocab_size: vocabulary size of the target's logits.
        eos_ids: tokens that end the output. They are not parsed, and nothing may follow them.
        after: token after which the grammar begins, as in GrammarSpec.
        recent: recent tokens of the grammar's outputs, to which this output adds its own.
        name: name of the request's parameter, for errors.
        cost: parser cost of the grammar's outputs, to which this output adds its own.
        on_limit: callback once the parser has met a limit. Copies share its lexer, so other outputs
            would meet it, too.

    Attributes:
        has_end: whether the output's last token is an end token.
        budget: budget of parser time; see `stop`.
    """

    def __init__(
        self,
        compiled: Matcher,
        vocab_size: int,
        eos_ids: Collection[int],
        after: int | None = None,
        recent: RecentTokens | None = None,
        name: str = "grammar",
        cost: ParserCost | None = None,
        on_limit: Callable[[], None] = lambda: None,
    ):
        self._compiled = compiled
        self._matcher = compiled.deep_copy()
        self._recent = recent or RecentTokens()
        self._name = name
        self._cost = cost or ParserCost()
        self._on_limit = on_limit
        self.budget = ParserBudget(vocab_size)
        self._stopped: RequestError | None = None
        self._num_recent = 0  # output ids that were added to it
        self._output_ids: Sequence[int] = ()
        self._ends = frozenset(eos_ids)
        self._after = after
        self._num_words = num_token_words(vocab_size)
        # The mask before the grammar has begun, where an output cannot end.
        self._free = ~pack_tokens(self._ends, vocab_size)
        self._begun = after is None
        self.has_end = False
        self._parsed: list[int] = []  # committed tokens since the grammar began
        self._num_output = 0
        self._dead_ends: dict[tuple[int, ...], RequestError] = {}

    @property
    def is_complete(self) -> bool:
        """Return whether the output may end here."""
        return self._begun and not self._dead_ends.get(()) and bool(self._matcher.is_accepting())

    @property
    def has_ended(self) -> bool:
        """Return whether only an end token may follow."""
        return self._begun and bool(self._matcher.is_stopped())

    def sync(self, output_ids: Sequence[int]) -> None:
        """Advance by the output ids that were committed since the last call, without an end token at their end."""
        new = list(output_ids[self._num_output :])
        if not new:
            return  # later notes stay valid
        self._num_output = len(output_ids)
        self._output_ids = output_ids
        self._dead_ends.clear()
        self.has_end = bool(output_ids) and output_ids[-1] in self._ends
        if self._stopped is not None:
            self._dead_ends[()] = self._stopped
            return

        self.budget.earn(len(new))
        if self.has_end:
            new.pop()
        started = time.thread_time()
        try:
            self.commit(new)
        except RequestError as error:
            self._dead_ends[()] = error
        self.budget.spend(time.thread_time() - started)

    def stop(self) -> None:
        """Fail the output at its next token, because its parser time is used up."""
        self._stopped = RequestError("grammar_limit", f"{self._name}: {_TOO_SLOW}")
        self._dead_ends[()] = self._stopped
        self._on_limit()

    def commit(self, tokens: Sequence[int]) -> None:
        """Advance by tokens of the output. Raises RequestError with code grammar_limit past the parser's limits."""
        tokens = self._begin(tokens)
        if self._matcher.try_consume_tokens(tokens) < len(tokens):
            self._check()
            raise RequestError(
                "grammar_limit", f"the grammar does not allow token {tokens[-1]} here"
            )
        self._check()
        self._parsed += tokens

    def forced_tokens(self) -> list[int]:
        """Return the next tokens where the grammar allows only one text, tokenized as usual."""
        return list(self._matcher.compute_ff_tokens()) if self._begun else []

    def predicted_tokens(self, limit: int) -> list[PredictedToken]:
        """Return the tokens that probably follow, at most `limit`; none where text is free.

        They are tokens that the grammar forces, and between them those that most recently followed
        the preceding tokens, in this output or an earlier one of the grammar. After a finished text
        the end token follows, if there is only one.
        """
        if not self._begun or self._dead_ends or self.has_end:
            return []
        self._recent.add(self._output_ids, self._num_recent)
        self._num_recent = len(self._output_ids)
        context = list(self._output_ids[-MAX_CONTEXT:])
        predicted: list[PredictedToken] = []
        while len(predicted) < limit and not self._matcher.is_stopped():
            tokens = self._consume_predicted(context, limit - len(predicted))
            if not tokens:
                break
            predicted += tokens
            context += [token for token, _ in tokens]

        # An end is predicted, but not consumed.
        num_consumed = len(predicted)
        if num_consumed < limit and self._matcher.is_stopped() and len(self._ends) == 1:
            predicted.append(PredictedToken(min(self._ends), True))
        if num_consumed:
            self._matcher.rollback(num_consumed)
        if self._matcher.is_error():
            self._restart()
            return []
        return predicted

    def _consume_predicted(self, context: Sequence[int], limit: int) -> list[PredictedToken]:
        """Consume and return the forced tokens, or else one that came after this context before."""
        forced = self.forced_tokens()[:limit]
        if forced:
            num_consumed = self._matcher.try_consume_tokens(forced)
            return [PredictedToken(token, True) for token in forced[:num_consumed]]

        mask = np.zeros(self._num_words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        num_allowed = int(np.bitwise_count(mask.view(np.uint32)).sum())
        if num_allowed > MAX_FORCED:
            return []
        for token in self._recent.after(context):
            if token not in self._ends and self._matcher.try_consume_tokens([token]) == 1:
                return [PredictedToken(token, False)]
        return []

    def path_masks(self, paths: Sequence[Sequence[int]]) -> Words:
        """Return [N, words], the mask after each path of a tree.

        Args:
            paths: parents before their children, [] first.
        """
        index_of = {tuple(path): i for i, path in enumerate(paths)}
        tokens = [path[-1] if path else 0 for path in paths]
        parents = [index_of[tuple(path[:-1])] if path else -1 for path in paths]
        return self.tree_masks(tokens, parents)

    def tree_masks(self, tokens: Sequence[int], parents: Sequence[int]) -> Words:
        """Return [N, words]: bit t % 32 of word t // 32 is set if token t may follow the node.

        Nodes that the grammar does not allow, end tokens, and all nodes below them are never
        sampled; their masks allow everything.

        Args:
            tokens: tokens of the tree's nodes, parents before their children; the root is committed
                already.
            parents: index of each node's parent; -1 for the root.
        """
        masks = np.full((len(tokens), self._num_words), -1, np.int32)
        if () not in self._dead_ends and not self._visit(tokens, parents, masks):
            self._visit_alone(tokens, parents, masks)
        return masks

    def allowed_nodes(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """Return whether the grammar allows each node and all its ancestors. Computes no masks.

        Args:
            tokens: as in tree_masks.
            parents: as in tree_masks.
        """
        allowed = [parent < 0 for parent in parents]
        for node, begun in self._walk(tokens, parents):
            is_end = node > 0 and tokens[node] in self._ends
            allowed[node] = not is_end or (begun and bool(self._matcher.is_accepting()))
        if self._matcher.is_error() and () not in self._dead_ends:
            self._restart()
        return allowed

    def mark_dead_end(self, path: Sequence[int], error: RequestError) -> None:
        """Mark a path after which no token is allowed: an output that takes it fails. Valid until the next sync."""
        self._dead_ends.setdefault(tuple(path), error)

    def dead_end_in(self, tokens: Sequence[int]) -> DeadEnd | None:
        """Return the first dead end that the output passes with these next tokens, or None if it passes none."""
        if not self._dead_ends:
            return None
        for num_tokens in range(len(tokens)):
            error = self._dead_ends.get(tuple(tokens[:num_tokens]))
            if error is not None:
                return DeadEnd(num_tokens, error)
        return None

    def _begin(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that are parsed, and note whether the grammar has begun."""
        self._begun, parsed = self._parsed_of(tokens)
        return parsed

    def _parsed_of(self, tokens: Sequence[int]) -> tuple[bool, list[int]]:
        """Return whether the grammar has begun after these next tokens, and which of them are parsed."""
        tokens = list(tokens)
        if self._begun:
            return True, tokens
        if self._after is None or self._after not in tokens:
            return False, []
        return True, tokens[tokens.index(self._after) + 1 :]

    def _walk(self, tokens: Sequence[int], parents: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """Visit the root and the nodes that the grammar allows, depth first, and every end below them.

        Yields each with whether the grammar has begun after it. The matcher has consumed the node
        then; of an end, which is not parsed, only the nodes before it.
        """
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)

        # Nodes to visit, each with whether the grammar has begun before it; -1 leaves a node again.
        yield 0, self._begun
        stack = [(node, self._begun) for node in reversed(children.get(0, []))]
        while stack:
            node, begun = stack.pop()
            if node < 0:
                self._matcher.rollback(1)
                continue
            if tokens[node] in self._ends:
                yield node, begun
                continue
            if begun:
                if self._matcher.try_consume_tokens([tokens[node]]) != 1:
                    continue
                stack.append((-1, True))
            begins = begun or tokens[node] == self._after
            yield node, begins
            stack += [(child, begins) for child in reversed(children.get(node, []))]

    def _visit(self, tokens: Sequence[int], parents: Sequence[int], masks: Words) -> bool:
        """Fill the masks of all nodes. Return False if the parser met a limit; its state is then the committed one."""
        started = time.thread_time()
        for node, begun in self._walk(tokens, parents):
            if node == 0 or tokens[node] not in self._ends:
                self._fill(masks, node, begun)
            if node == 0:
                self.budget.spend(time.thread_time() - started)
        tree_s = time.thread_time() - started
        self.budget.observe_tree(tree_s)
        self._cost.add(tree_s, len(tokens))
        if self._matcher.is_error():
            self._restart()
            return False
        return True

    def _visit_alone(self, tokens: Sequence[int], parents: Sequence[int], masks: Words) -> None:
        """Fill the masks node by node, each from the committed state; note the nodes at which the parser fails."""
        masks[:] = -1
        paths: list[list[int]] = []
        for node, parent in enumerate(parents):
            path = [] if parent < 0 else [*paths[parent], tokens[node]]
            paths.append(path)
            if self._ends.intersection(path) or self.dead_end_in(path) is not None:
                continue  # never picked, or the output fails before it: such a mask takes a tenth of a second

            begun, parsed = self._parsed_of(path)
            if not begun or self._matcher.try_consume_tokens(parsed) == len(parsed):
                self._fill(masks, node, begun)
            if self._matcher.is_error():
                masks[node] = -1
                self.mark_dead_end(path, self._limit_error())
                if not path:
                    return  # the output fails, whatever is drafted
            self._restart()

    def _fill(self, masks: Words, node: int, begun: bool) -> None:
        """Write the mask of a node, at which the matcher is."""
        row = masks[node]
        if begun:
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        else:
            row &= self._free

    def _restart(self) -> None:
        """Put the matcher back to the committed tokens: one that has met a limit cannot be used again."""
        self._matcher = self._compiled.deep_copy()
        self._matcher.try_consume_tokens(self._parsed)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise self._limit_error()

    def _limit_error(self) -> RequestError:
        """Return the error of a parser that has met a limit, and report it."""
        self._on_limit()
        reason = first_line(self._matcher.get_error())
        return RequestError("grammar_limit", f"the grammar cannot go on: {reason}")


def first_line(text: str) -> str:
    """Return the first meaningful line of an error message."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "not a grammar")


def num_token_words(vocab_size: int) -> int:
    """Return the number of 32-bit words in a token mask."""
    return -(-vocab_size // TOKENS_PER_WORD)


def pack_tokens(token_ids: Collection[int], vocab_size: int) -> Words:
    """Pack a set of tokens into a mask of words, [W]."""
    bits = np.zeros(num_token_words(vocab_size) * TOKENS_PER_WORD, dtype=bool)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def unpack_tokens(mask: Int32[Tensor, "M W"], vocab_size: int) -> Bool[Tensor, "M V"]:
    """Unpack masks of words into booleans, one per token."""
    shifts = torch.arange(TOKENS_PER_WORD, dtype=torch.int32, device=mask.device)
    bits = (mask[:, :, None] >> shifts) & 1
    return bits.bool().flatten(1)[:, :vocab_size]
