"""Log-probabilities in the two forms that OpenAI's protocol has for them.

chat_logprobs([TokenLogprob(17, -0.1, [(17, -0.1)])], tokenizer)[0]["token"]      # 'Paris'
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eagle_ray.core.sequence import Sequence, TopLogprobs
from eagle_ray.serve.null_tokenizer import NullTokenizer
from eagle_ray.text.tokenizer import REPLACEMENT_CHAR, Tokenizer

MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's API documents this value for very unlikely tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token. logprob: None where nothing precedes it. top: the likeliest tokens there, as many as asked for."""

    token: int
    logprob: float | None
    top: TopLogprobs


def prompt_places(sequence: Sequence) -> list[TokenLogprob]:
    num_tops = sequence.sampling.top_logprobs
    tops = sequence.prompt_tops if num_tops else [[]] * len(sequence.prompt_ids)
    return [_place(*place) for place in zip(sequence.prompt_ids, sequence.prompt_logprobs, tops, strict=True)]


def output_places(sequence: Sequence, start: int, end: int) -> list[TokenLogprob]:
    """Return the log-probabilities of the output ids [start, end)."""
    ids, logprobs = sequence.output_ids[start:end], sequence.output_logprobs[start:end]
    tops = sequence.output_tops[start:end] if sequence.sampling.top_logprobs else [[]] * len(ids)
    return [_place(*place) for place in zip(ids, logprobs, tops, strict=True)]


def _place(token: int, logprob: float | None, top: TopLogprobs) -> TokenLogprob:
    finite_top = [(other, max(value, MIN_LOGPROB)) for other, value in top]
    return TokenLogprob(token, None if logprob is None else max(logprob, MIN_LOGPROB), finite_top)


def chat_logprobs(places: list[TokenLogprob], text: Tokenizer | NullTokenizer) -> list[dict[str, Any]]:
    return [
        _token(place.token, place.logprob, text)
        | {"top_logprobs": [_token(token, logprob, text) for token, logprob in place.top]}
        for place in places
    ]


def _token(token: int, logprob: float | None, text: Tokenizer | NullTokenizer) -> dict[str, Any]:
    """bytes is null for a token that is only a part of a character."""
    spelled = text.decode_with_special([token])
    return {
        "token": spelled,
        "logprob": logprob,
        "bytes": None if REPLACEMENT_CHAR in spelled else list(spelled.encode()),
    }


def text_logprobs(
    places: list[TokenLogprob], text: Tokenizer | NullTokenizer, has_tops: bool, offset: int = 0
) -> dict[str, Any]:
    """offset: characters before the first place. Of alternatives that are spelled alike the likeliest is shown."""
    tokens = [text.decode_with_special([place.token]) for place in places]
    offsets = [offset]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    tops = [_by_spelling(place, text) for place in places] if has_tops else None
    return {
        "tokens": tokens,
        "token_logprobs": [place.logprob for place in places],
        "top_logprobs": tops,
        "text_offset": offsets[:-1],
    }


def _by_spelling(place: TokenLogprob, text: Tokenizer | NullTokenizer) -> dict[str, float] | None:
    """Return the alternatives and, as OpenAI does, the token itself, by text; null for the first token."""
    if place.logprob is None:
        return None
    ranked = [*place.top, (place.token, place.logprob)]
    found: dict[str, float] = {}
    for token, logprob in sorted(ranked, key=lambda pair: -pair[1]):
        found.setdefault(text.decode_with_special([token]), logprob)
    return found
