"""SuffixAutomaton: every run of tokens in several growing texts, and how often each token has followed it.

A state stands for the runs of tokens that end at the same places; `link` leads to the longest shorter run that ends at
more places (Blumer et al. 1985). A text grows by one token in constant time on average, and so do several by turns:

    automaton = SuffixAutomaton()
    state = ROOT
    for token in (5, 9, 7, 5, 9):
        state = automaton.append(state, token)
    automaton.follows(automaton.link[state])       # of the longest run that was there before, 5 9: {7: 1}
"""

from __future__ import annotations

ROOT = 0
MOST_COUNTED = 32  # states whose count one token raises: in a text that repeats one token there would be no end


class SuffixAutomaton:
    """States by number, the root first. longest: tokens of a state's longest run. link: -1 of the root."""

    def __init__(self) -> None:
        self.longest: list[int] = [0]
        self.link: list[int] = [-1]
        self.num_tokens = 0  # appended so far
        self._next: list[dict[int, int]] = [{}]
        self._counts: list[int] = [0]  # how often a state's runs have been read

    def append(self, state: int, token: int) -> int:
        """The state of a whole text, from that of all but its last token; ROOT is the empty text's."""
        self.num_tokens += 1
        known = self._next[state].get(token)
        if known is not None:
            grown = self._of_length(state, token, known)
        else:
            grown = self._new(self.longest[state] + 1, {})
            at = state
            while at >= 0 and token not in self._next[at]:
                self._next[at][token] = grown
                at = self.link[at]
            self.link[grown] = ROOT if at < 0 else self._of_length(at, token, self._next[at][token])
        self._count(grown)
        return grown

    def step(self, state: int, token: int) -> int | None:
        """Where one of the state's runs goes on with this token; None where none ever has."""
        return self._next[state].get(token)

    def follows(self, state: int) -> dict[int, int]:
        """The tokens that have followed the state's longest run, and how often."""
        return {token: max(self._counts[there], 1) for token, there in self._next[state].items()}

    def num_following(self, state: int) -> int:
        """How many different tokens have followed it."""
        return len(self._next[state])

    def _of_length(self, state: int, token: int, there: int) -> int:
        """The state of exactly state's longest run and the token; where `there` stands for longer runs too, split."""
        if self.longest[there] == self.longest[state] + 1:
            return there
        split = self._new(self.longest[state] + 1, dict(self._next[there]))
        self.link[split], self._counts[split] = self.link[there], self._counts[there]
        self.link[there] = split
        while state >= 0 and self._next[state].get(token) == there:
            self._next[state][token] = split
            state = self.link[state]
        return split

    def _new(self, longest: int, follows: dict[int, int]) -> int:
        self.longest.append(longest)
        self.link.append(ROOT)
        self._next.append(follows)
        self._counts.append(0)
        return len(self.longest) - 1

    def _count(self, state: int) -> None:
        """Its runs were read once more, and with them all shorter ones that end there."""
        for _ in range(MOST_COUNTED):
            if state == ROOT:
                return
            self._counts[state] += 1
            state = self.link[state]
