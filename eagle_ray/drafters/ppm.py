"""From how often tokens have followed contexts of falling length to the likeliest next tokens.

The longest context is believed with m / (m + 1), m its number of tokens, and shares that by its counts; what it leaves
is for the next shorter one, and so on, as in prediction by partial matching (Cleary and Witten 1984). The belief is a
plain start: drafters are calibrated by what the target picks.

    >>> blended([(3, {7: 1}), (1, {7: 3, 9: 1})], width=2)
    [(7, 0.84375), (9, 0.03125)]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Children = list[tuple[int, float]]  # tokens and their probabilities, the likeliest first


def interpolate(contexts: Iterable[tuple[int, Mapping[int, int]]], width: int) -> Children:
    """The `width` likeliest next tokens; their probabilities sum to less than 1.

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
