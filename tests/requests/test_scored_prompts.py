"""Context and continuation as ids: together they are the ids of the whole text, whatever token spans the boundary."""

import copy
import random
import tracemalloc

import pytest

from eagle_ray.core.continuations import num_common
from eagle_ray.core.errors import RequestError
from eagle_ray.requests.scored_prompts import ids_within_text, scored_choices, scored_prompt
from eagle_ray.text.null_tokenizer import NullTokenizer
from tests.support.trained_tokenizers import trained


@pytest.fixture(scope="module", params=["byte_level", "llama3", "sentencepiece"])
def text(request):
    return trained(request.param)


def split(text, prompt, continuations, moves_spaces=True):
    ids = text.encode(prompt)
    return scored_prompt(prompt, ids, continuations, text, True, moves_spaces)


def context_and_scored(prompt_ids, continuation):
    """Return all ids before a continuation's scored ones, and these."""
    ids = prompt_ids + continuation.token_ids
    num_context = len(ids) - continuation.num_scored
    return ids[:num_context], ids[num_context:]


def lm_eval_pair(text, context, continuation):
    """Return what lm-eval's TemplateLM._encode_pair does, by its description."""
    num_spaces = len(context) - len(context.rstrip())
    if num_spaces:
        continuation = context[-num_spaces:] + continuation
        context = context[:-num_spaces]
    whole, context_ids = text.encode(context + continuation), text.encode(context)
    return context_ids, whole[len(context_ids) :]


@pytest.mark.parametrize("prompt", ["the cat sat on", "the cat sat on ", "hello there,  ", "a\n\n"])
def test_at_a_boundary_of_tokens_it_is_lm_evals_split(text, prompt):
    continuations = [" the mat", " how are you?", "\n\nb"]
    prompt_ids, scores = split(text, prompt, continuations)
    num_compared = 0
    for each, continuation in zip(scores.continuations, continuations, strict=True):
        context, behind = lm_eval_pair(text, prompt, continuation)
        if text.encode(prompt + continuation)[: len(context)] != context:
            continue  # a token spans the boundary
        num_compared += 1
        assert context_and_scored(prompt_ids, each) == (context, behind)
        assert each.num_bytes == len(continuation.encode())
    assert num_compared > 0


@pytest.mark.parametrize("seed", range(30))
def test_together_they_are_the_whole_text(text, seed):
    """Fuzz over bytes: letters in the middle of words, spaces, line ends, and characters of several bytes."""
    rng = random.Random(seed)
    characters = "theca tonms  \n,?é∑日🙂'1"
    draw = lambda n: "".join(rng.choice(characters) for _ in range(n))  # noqa: E731
    prompt = "x" + draw(rng.randint(0, 12))
    continuations = [draw(rng.randint(0, 6)) for _ in range(6)]
    prompt_ids, scores = split(text, prompt, continuations)
    for each, continuation in zip(scores.continuations, continuations, strict=True):
        if not continuation:
            assert each.num_scored == 0
            continue
        alone = text.encode(prompt.rstrip())
        context, scored = context_and_scored(prompt_ids, each)
        assert context and context == alone[: len(context)]
        assert scored
        whole = text.encode(prompt + continuation)
        if num_common(alone, whole):
            assert context + scored == whole
        else:  # a token spans the end of the context's only token
            behind = prompt[len(prompt.rstrip()) :] + continuation
            assert (context, scored) == (alone, ids_within_text(behind, text))
        own_ids, own_scores = split(text, prompt, [continuation])
        assert (context, scored) == context_and_scored(own_ids, own_scores.continuations[0])


@pytest.mark.parametrize("prompt", ["t", "t ", "", " ", "the cat "])
def test_continuations_do_not_depend_on_others(text, prompt):
    """A token spans the end of t, and no token of the context is left."""
    continuations = ["he", "!", [5, 6], "", " the"]
    prompt_ids, scores = split(text, prompt, continuations)
    for each, continuation in zip(scores.continuations, continuations, strict=True):
        if continuation:
            own_ids, own_scores = split(text, prompt, [continuation])
            found = context_and_scored(prompt_ids, each)
            assert found == context_and_scored(own_ids, own_scores.continuations[0])


def test_a_context_of_one_token_stays(text):
    whole, alone = text.encode("the"), text.encode("t")
    assert len(whole) == len(alone)  # a token spans the boundary
    prompt_ids, scores = split(text, "t", ["he", "!"])
    _, behind = context_and_scored(prompt_ids, scores.continuations[1])
    assert prompt_ids[0] != 1 and behind == text.encode("t!")[len(alone) :]


def test_many_continuations_do_not_keep_the_context_each():
    """4,000 of them behind 1,000 tokens: 32 MB of references if each had the context, too."""
    text = trained("byte_level")
    prompt = "the cat " * 500
    ids = text.encode(prompt)
    continuations = [[5, 6 + i % 50] for i in range(4000)]
    tracemalloc.start()
    scored_prompt(prompt, ids, continuations, text, True, True)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(ids) > 900 and most < 8 << 20


def test_a_token_that_spans_the_boundary_is_scored_whole(text):
    """The context ends before it; another continuation keeps the whole context."""
    sentence = "the cat sat on the mat"
    cuts = [
        (sentence[:end], sentence[end:])
        for end in range(1, len(sentence))
        if not sentence[end - 1].isspace()
        and num_common(text.encode(sentence), text.encode(sentence[:end]))
        < len(text.encode(sentence[:end]))
    ]
    assert cuts  # some of its tokens have several characters
    for prompt, rest in cuts:
        whole, alone = text.encode(sentence), text.encode(prompt)
        prompt_ids, scores = split(text, prompt, [rest, "!"])
        first, second = scores.continuations
        assert context_and_scored(prompt_ids, second)[0] == alone
        context, scored = context_and_scored(prompt_ids, first)
        if not num_common(alone, whole):
            assert context == alone and text.decode_with_special(scored) == rest
            continue
        assert context + scored == whole
        assert len(context) < len(alone) and len(scored) > len(whole) - len(alone)


def test_ids_are_appended_as_they_are(text):
    prompt_ids, scores = split(text, "the cat ", [[5, 6], [7]])
    assert prompt_ids == text.encode("the cat ")
    assert [each.token_ids for each in scores.continuations] == [[5, 6], [7]]
    assert scores.continuations[1].num_bytes == len(text.decode_with_special([7]).encode())


def test_what_a_template_wrote_keeps_its_spaces(text):
    prompt_ids, scores = split(text, "the cat\n", ["hello"], moves_spaces=False)
    whole, alone = text.encode("the cat\nhello"), text.encode("the cat\n")
    assert whole[: len(alone)] == alone  # no token spans the boundary
    assert prompt_ids == alone
    assert scores.continuations[0].token_ids == whole[len(alone) :]


def test_choices_leave_the_prompt_whole(text):
    ids = text.encode("cat sat on th")
    scores = scored_choices("cat sat on th", ids, ["e", "hello"], text, True)
    assert [text.decode_with_special(each.token_ids) for each in scores.continuations] == [
        "e",
        "hello",
    ]


def test_a_text_too_long_for_the_model_is_named(text):
    short = copy.copy(text)
    short.max_model_len = 64
    too_long = ["!", "the cat " * 500]
    with pytest.raises(
        RequestError, match=r"^continuations\[1\]: with it, the prompt of 4003 char"
    ):
        split(short, "the", too_long)
    with pytest.raises(RequestError, match=r"^choice\[1\]: with it, the prompt of 4003 characters"):
        scored_choices("the", text.encode("the"), too_long, short, True)


def test_texts_do_not_follow_ids(text):
    with pytest.raises(RequestError, match=r"continuations\[1\]: a text cannot follow"):
        scored_prompt(None, [5, 6], [[7], "x"], text, False, False)
    _, scores = scored_prompt(None, [5, 6], [[7], []], NullTokenizer(), False, False)
    assert [each.num_bytes for each in scores.continuations] == [None, None]
