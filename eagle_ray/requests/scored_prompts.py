"""Tokenize a context with each of its continuations, and split the ids where the context's tokens end.

    prompt_ids, scores = scored_prompt("The capital is ", None, ["Paris", "Rome"], tokenizer, True, True)

Scoring follows lm-eval. Spaces at the end of the context move to the continuations, and every token
after the context's tokens is scored. One case differs: if a token spans the boundary, the context
ends before that token, and the token belongs to the continuation. lm-eval would score ids that do
not occur in the text. The context then has fewer tokens than the prompt alone. If no token of it is
left, the context keeps all of its tokens and the continuation is tokenized by itself.

A context without any token becomes the tokenizer's BOS token, or else its end-of-sequence token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from eagle_ray.core.continuations import Continuation, ContinuationScores, num_common
from eagle_ray.core.errors import RequestError
from eagle_ray.text.continued_text import ContinuedText
from eagle_ray.text.tokenizer import Tokenizer

TextOrIds = str | list[int]
# A text in front of a continuation that is tokenized by itself, so that no tokenizer takes it for
# the beginning of a text, before which some put a space.
IN_FRONT = "\n"


def scored_prompt(
    text: str | None,
    prompt_ids: list[int],
    continuations: Sequence[TextOrIds],
    tokenizer: Tokenizer,
    adds_special: bool,
    moves_spaces: bool,
) -> tuple[list[int], ContinuationScores]:
    """Return the token ids that all contexts share, and the continuations after them. Raises RequestError.

    Args:
        text: prompt as the model reads it; None if the request gave token ids.
        prompt_ids: token ids of the prompt. Continuations of ids are appended to them unchanged.
        continuations: texts or token ids to score.
        tokenizer: tokenizer of the target.
        adds_special: whether the tokenizer adds its special tokens to the text.
        moves_spaces: whether spaces at the end of the prompt move to continuations that are texts.
    """
    context = text or ""
    spaces = ""
    if moves_spaces:
        context = context.rstrip()
        spaces = (text or "")[len(context) :]
    context_ids = prompt_ids
    if spaces:
        context_ids = tokenizer.encode(context, add_special_tokens=adds_special)
    # A context without tokens begins with the prefix.
    front = [] if context_ids else [prefix_id(tokenizer)]
    context_ids = front + context_ids

    # What stands before ids: as many tokens of the context as the prompt begins with, and its rest.
    num_before, before = _behind_context(context_ids, front + prompt_ids, spaces, tokenizer)
    if not any(continuation and isinstance(continuation, str) for continuation in continuations):
        context_ids = context_ids[:num_before] + before
        num_before, before = len(context_ids), []

    behind = _texts_behind(continuations, text, context, spaces, tokenizer)
    own_ids = context_ids[len(front) :]
    continued = ContinuedText(tokenizer, context, own_ids, adds_special)
    texts = zip(behind, continued.behind(behind), strict=True)

    # Each continuation's ids behind the tokens that it has of the context, and how many these are.
    # Ids from the beginning of the text would be the context again for each of them.
    parts: list[tuple[int, Continuation]] = []
    for continuation in continuations:
        size = num_bytes(continuation, tokenizer)
        if not continuation:
            parts.append((len(context_ids), Continuation([], num_bytes=size)))
            continue
        if isinstance(continuation, list):
            parts.append((num_before, Continuation(before + continuation, len(before), size)))
            continue
        written, (num_shared, ids) = next(texts)
        num_shared += len(front)
        if not num_shared:
            num_shared, ids = len(context_ids), ids_within_text(written, tokenizer)
        parts.append((num_shared, Continuation(ids, num_bytes=size)))
    return _behind_shared(context_ids, parts)


def _texts_behind(
    continuations: Sequence[TextOrIds],
    text: str | None,
    context: str,
    spaces: str,
    tokenizer: Tokenizer,
) -> list[str]:
    """Return the text after the context, for each continuation that is a text. Raises RequestError."""
    behind = []
    for i, continuation in enumerate(continuations):
        if not continuation or isinstance(continuation, list):
            continue
        if text is None:
            raise RequestError(
                "bad_continuations",
                f"continuations[{i}]: a text cannot follow prompt_token_ids. Give token ids, or the prompt as a text",
            )
        behind.append(spaces + continuation)
        with errors_behind_prompt("continuations", i):
            tokenizer.check_length(context + behind[-1])
    return behind


def _behind_context(
    context_ids: list[int], whole: list[int], behind: str, tokenizer: Tokenizer
) -> tuple[int, list[int]]:
    """Return how many tokens of the context a whole text begins with, and the ids after them.

    If the whole text begins with no token of the context, the text after the context is tokenized
    by itself. The ids before a continuation then depend on the prompt alone.

    Args:
        context_ids: token ids of the context.
        whole: token ids of the whole text.
        behind: text after the context.
        tokenizer: tokenizer of the target.
    """
    num_shared = num_common(context_ids, whole)
    if num_shared:
        return num_shared, whole[num_shared:]
    return len(context_ids), ids_within_text(behind, tokenizer)


def _behind_shared(
    context_ids: list[int], parts: list[tuple[int, Continuation]]
) -> tuple[list[int], ContinuationScores]:
    """Return the context tokens that all continuations share, and the continuations after them."""
    num_prompt = min(num_shared for num_shared, _ in parts)
    behind = []
    for num_shared, part in parts:
        ids = context_ids[num_prompt:num_shared] + part.token_ids
        num_context = num_shared - num_prompt + part.num_context
        behind.append(Continuation(ids, num_context, part.num_bytes))
    return context_ids[:num_prompt], ContinuationScores(behind)


def scored_choices(
    text: str | None,
    prompt_ids: list[int],
    choices: Sequence[str],
    tokenizer: Tokenizer,
    adds_special: bool,
) -> ContinuationScores:
    """Return the choices after a prompt that is generated from, too, and so keeps all of its tokens.

    A choice that does not begin at a token boundary of the joined text is tokenized by itself.
    """
    behind = []
    for i, choice in enumerate(choices):
        ids = []
        with errors_behind_prompt("choice", i):
            if text is not None:
                whole = tokenizer.encode(text + choice, add_special_tokens=adds_special)
                if whole[: len(prompt_ids)] == prompt_ids:
                    ids = whole[len(prompt_ids) :]
            if not ids:
                ids = ids_within_text(choice, tokenizer)
        behind.append(Continuation(ids, num_bytes=num_bytes(choice, tokenizer)))
    return ContinuationScores(behind)


@contextmanager
def errors_behind_prompt(name: str, index: int) -> Iterator[None]:
    """Name the text in a RequestError that concerns the prompt and this text together.

    Args:
        name: name of the parameter.
        index: index of the text in the parameter's list.
    """
    try:
        yield
    except RequestError as error:
        place = f"{name}[{index}]"
        raise RequestError(error.code, f"{place}: with it, {error}", name) from None


def ids_within_text(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids that a text has within a longer text, where no tokenizer puts a space before it."""
    front = tokenizer.encode(IN_FRONT, add_special_tokens=False)
    whole = tokenizer.encode(IN_FRONT + text, add_special_tokens=False)
    if whole[: len(front)] == front:
        return whole[len(front) :]
    return tokenizer.encode(text, add_special_tokens=False)


def num_bytes(continuation: TextOrIds, tokenizer: Tokenizer) -> int | None:
    """Return the size of a continuation's text in UTF-8 bytes; None for ids without a tokenizer."""
    if isinstance(continuation, str):
        return len(continuation.encode())
    if not tokenizer.has_text:
        return None
    return len(tokenizer.decode_with_special(continuation).encode())


def prefix_id(tokenizer: Tokenizer) -> int:
    """Return the token id that precedes a text without context: BOS, or else end-of-sequence.

    Raises RequestError if the tokenizer has neither.
    """
    for role in ("bos", "eos"):
        token = tokenizer.special_id(role)
        if token is not None:
            return token
    if tokenizer.eos_ids:
        return min(tokenizer.eos_ids)
    raise RequestError(
        "no_context",
        "the context has no tokens and the tokenizer no BOS or EOS to begin with: give a longer prompt",
    )
