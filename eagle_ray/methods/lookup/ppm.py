"""Next-token probabilities from counts after contexts of falling length (prediction by partial matching).

The longest context has weight m / (m + 1), where m is its number of observed tokens, divided by its counts. The rest
of the probability goes to the next shorter context, and so on (Cleary and Witten 1984). Drafters calibrate the
result by the target's samples.

    >>> interpolate([(3, {7: 1}), (1, {7: 3, 9: 1})], width=2)
    [(7, 0.84375), (9, 0.03125)]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Children = list[tuple[int, float]]  # tokens and their probabilities, the likeliest first


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
