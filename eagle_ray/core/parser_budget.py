"""ParserBudget limits the parser time of one output; ParserCost estimates the memory that a
grammar's outputs add to it.

A short grammar can be cheap to compile and slow to follow, and all sequences of a batch wait for
each mask. llguidance limits a single mask by its items (`grammar.MAX_PARSER_ITEMS`). These limits
are the same on every run. The time of an item depends on the grammar, though: 10,000 items take 1
ms in one and 200 ms in another. So an output also has a budget of time, which only outputs far
slower than real ones exceed.

    budget = ParserBudget(vocab_size=49_152)
    budget.spend(0.012)      # CPU seconds for a committed token or for the mask after it
    budget.earn(1)           # a token was committed
    budget.is_spent          # the output must fail
    budget.is_slow           # nothing is drafted for it: each node of a draft tree takes a mask

The time is the CPU time of the engine's thread, so a busy machine does not count. No token depends
on it: an output has the tokens of plain decoding, or fails.
"""

from __future__ import annotations

BURST_S = 0.05  # that an output may take before its first token
TOKEN_S = 0.001  # more for each token
# And for each token of the vocabulary: free text takes 0.1 ms with 1,500, and 4 ms with 48,000.
TOKEN_S_PER_ENTRY = 2e-7
NUM_TREE_TOKENS = 8
USUAL_S = 0.001  # for a mask: the lexer has its states already
BYTES_PER_SLOW_S = 128 << 20  # that new lexer states take: 70 to 90 MB a second were measured


class ParserBudget:
    """The parser time of one output.

    Attributes:
        is_slow: whether the last token and the mask after it took longer than the average allowed,
            or the masks of the last draft tree took as long as NUM_TREE_TOKENS tokens.
    """

    def __init__(self, vocab_size: int):
        self._token_s = TOKEN_S + TOKEN_S_PER_ENTRY * vocab_size
        self._left_s = BURST_S
        self._last_s = 0.0
        self._tree_s = 0.0

    @property
    def is_spent(self) -> bool:
        return self._left_s < 0

    @property
    def is_slow(self) -> bool:
        return self._last_s > self._token_s or self._tree_s > NUM_TREE_TOKENS * self._token_s

    def earn(self, num_tokens: int) -> None:
        """Add the allowed time for newly committed tokens. Unused time accumulates only up to BURST_S."""
        self._left_s = min(BURST_S, self._left_s + num_tokens * self._token_s)
        self._last_s = 0.0

    def spend(self, seconds: float) -> None:
        self._left_s -= seconds
        self._last_s += seconds

    def observe_tree(self, seconds: float) -> None:
        """Record the time of a step's masks, which is not charged, since drafts are not output."""
        self._tree_s = seconds


class ParserCost:
    """Memory that outputs have added to a compiled grammar, whose lexer all copies of a parser share."""

    def __init__(self) -> None:
        self._slow_s = 0.0

    @property
    def num_bytes(self) -> int:
        """Return an estimate of the memory in bytes: a mask that takes long has created lexer states."""
        return int(self._slow_s * BYTES_PER_SLOW_S)

    def add(self, seconds: float, num_masks: int) -> None:
        self._slow_s += max(0.0, seconds - num_masks * USUAL_S)
