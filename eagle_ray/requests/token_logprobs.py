"""Log-probabilities of tokens: one value, and its forms in OpenAI's bodies, in Python's outputs and in rows.

>>> chat_form(token_logprobs([17], [-0.1], [[(17, -0.1)]]), spell={17: "Paris"}.get)[0]["token"]
'Paris'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's API documents this value for very unlikely tokens
REPLACEMENT_CHAR = "\ufffd"  # in the text of a token that is only a part of a character

Spell = Callable[[int], str]
"""Function that returns the text of one token id."""
RankedTokens = list[tuple[int, float]]
"""Token ids and their log-probabilities, the likeliest first."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token.

    Attributes:
        logprob: None if nothing precedes the token.
        top: the likeliest tokens at its position, if requested.
    """

    token: int
    logprob: float | None
    top: RankedTokens


def token_logprobs(
    ids: list[int], logprobs: Iterable[float | None], tops: list[RankedTokens] | None
) -> list[TokenLogprob]:
    """tops: None, or empty, if no likeliest tokens were recorded."""
    recorded = tops or [[]] * len(ids)
    return [TokenLogprob(*values) for values in zip(ids, logprobs, recorded, strict=True)]


def chat_form(tokens: Iterable[TokenLogprob], spell: Spell) -> list[dict[str, Any]]:
    return [
        _chat_token(token.token, token.logprob, spell)
        | {"top_logprobs": [_chat_token(*top, spell) for top in token.top]}
        for token in tokens
    ]


def _chat_token(token: int, logprob: float | None, spell: Spell) -> dict[str, Any]:
    """bytes is null for a token that is only a part of a character."""
    text = spell(token)
    data = None if REPLACEMENT_CHAR in text else list(text.encode())
    return {"token": text, "logprob": _finite(logprob), "bytes": data}


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, MIN_LOGPROB)


def completion_form(tokens: list[TokenLogprob], spell: Spell, has_tops: bool, offset: int = 0) -> dict[str, Any]:
    """offset: characters before the first token."""
    texts = [spell(token.token) for token in tokens]
    offsets = [offset]
    for text in texts:
        offsets.append(offsets[-1] + len(text))
    return {
        "tokens": texts,
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [_by_text(token, spell) for token in tokens] if has_tops else None,
        "text_offset": offsets[:-1],
    }


def _by_text(token: TokenLogprob, spell: Spell) -> dict[str, float] | None:
    """Return the likeliest tokens and, as OpenAI does, the token itself, by text; None if nothing precedes it.

    Of tokens with equal texts the likeliest is kept.
    """
    if token.logprob is None:
        return None
    ranked = [(other, max(logprob, MIN_LOGPROB)) for other, logprob in (*token.top, (token.token, token.logprob))]
    by_text: dict[str, float] = {}
    for other, logprob in sorted(ranked, key=lambda pair: -pair[1]):
        by_text.setdefault(spell(other), logprob)
    return by_text


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token under the unprocessed logits.

    Attributes:
        rank: 1 for the likeliest token; None if it is not among the recorded ones.
        decoded_token: its text; None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = list[dict[int, Logprob] | None]
"""For each token, the log-probabilities by token id: its own, and those of the likeliest tokens."""


def python_form(tokens: Iterable[TokenLogprob], spell: Spell | None, num_tops: int) -> Logprobs:
    """Return the log-probabilities of the tokens and of the num_tops likeliest at each position, likeliest first."""
    return [None if token.logprob is None else _by_id(token, token.logprob, spell, num_tops) for token in tokens]


def _by_id(token: TokenLogprob, logprob: float, spell: Spell | None, num_tops: int) -> dict[int, Logprob]:
    ranks = {other: rank for rank, (other, _) in enumerate(token.top, 1)}
    shown = dict(token.top[:num_tops])
    shown.setdefault(token.token, logprob)
    return {
        other: Logprob(value, ranks.get(other), None if spell is None else spell(other))
        for other, value in shown.items()
    }


def row_form(tops: Iterable[RankedTokens]) -> list[list[dict[str, Any]]]:
    """Return the likeliest tokens as a column of an output row has them."""
    return [[{"token_id": token, "logprob": logprob} for token, logprob in top] for top in tops]


def row_logprobs(row: dict[str, Any]) -> list[TokenLogprob] | None:
    """Return the log-probabilities of an output row, or None if it has none."""
    ids, logprobs, tops = row["output_token_ids"], row["token_logprobs"], row.get("token_top_logprobs")
    if ids is None or logprobs is None:
        return None
    ranked = [[(top["token_id"], top["logprob"]) for top in column] for column in tops or ()]
    return token_logprobs(ids, logprobs, ranked)
