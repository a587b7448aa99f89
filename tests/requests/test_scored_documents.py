"""Windows over a document: each token is scored once, with as much before it as the model reads."""

import pytest

from eagle_ray.assembly.hub import download
from eagle_ray.core.errors import RequestError
from eagle_ray.requests import scored_documents
from eagle_ray.requests.scored_documents import Window, scored_document, windows
from eagle_ray.text.null_tokenizer import NullTokenizer
from eagle_ray.text.tokenizer import MAX_DOCUMENT_CHARS, Tokenizer

SIZES = [
    (n, length, stride)
    for n in (1, 2, 5, 6, 7, 12, 40)
    for length in (1, 5, 11)
    for stride in (1, 3, 11)
]


@pytest.fixture(scope="module")
def text() -> Tokenizer:
    return Tokenizer.load(download("embedded:tiny", "target"))


@pytest.mark.parametrize(("num_tokens", "length", "stride"), SIZES)
def test_each_token_is_scored_once_with_all_that_fits_before_it(num_tokens, length, stride):
    """Of a window's tokens the model reads all but the last: as many as its length, where there are as many."""
    stride = min(stride, length)
    found = list(windows(num_tokens, length, stride))
    scored = [i for window in found for i in range(window.first, window.end)]
    assert scored == list(range(1, num_tokens))
    for window in found:
        assert window.start < window.first and window.end - window.start - 1 <= length
        assert window.start == 0 or window.end - window.start - 1 == length
    assert all(window.end - window.first == stride for window in found[1:-1])


@pytest.mark.parametrize("context", [1, 2, 4])
def test_they_are_lm_evals(context):
    """What lm-eval 0.4.13 gives for ten tokens behind its prefix, written out."""
    stride = 4 - context + 1
    expected = {
        1: [Window(0, 1, 5), Window(4, 5, 9), Window(6, 9, 11)],
        2: [Window(0, 1, 5), Window(3, 5, 8), Window(6, 8, 11)],
        4: [Window(0, 1, 5), *(Window(i, i + 4, i + 5) for i in range(1, 7))],
    }
    assert list(windows(11, 4, stride)) == expected[context]


def test_a_document_begins_with_bos_once(text):
    bos = text.special_id("bos")
    for ids in ([7, 8, 9], [bos, 7, 8, 9]):
        [(context, scores)] = scored_document(ids, text, None, None)
        assert context == [bos] and scores.continuations[0].token_ids == [7, 8, 9]
    [(context, scores)] = scored_document([7, 8, 9], NullTokenizer(), 8, 8)
    assert context == [7] and scores.continuations[0].token_ids == [8, 9]
    [(context, scores)] = scored_document([bos], text, 8, None)
    assert context == [bos] and scores.results()[0].score == 0.0


def test_the_default_stride_is_half_of_the_length(text):
    parts = scored_document([7] * 20, text, 8, None)
    assert [len(scores.continuations[0].token_ids) for _, scores in parts] == [8, 4, 4, 4]
    assert [len(context) for context, _ in parts] == [1, 5, 5, 5]


def test_too_much_is_refused_by_name(text, monkeypatch):
    with pytest.raises(
        RequestError, match=r"score_stride: must be at most 8 \(model.max_model_len\), got 9"
    ):
        scored_document([7] * 20, text, 8, 9)
    monkeypatch.setattr(scored_documents, "MAX_WINDOW_TOKENS", 100)
    with pytest.raises(RequestError, match="has 13 windows of 8, together more than 100 tokens"):
        scored_document([7] * 20, text, 8, 1)
    assert len(scored_document([7] * 20, text, 8, 8)) == 3
    with pytest.raises(RequestError, match=f"divide it into parts of at most {MAX_DOCUMENT_CHARS}"):
        text.encode_document("a" * (MAX_DOCUMENT_CHARS + 1))
