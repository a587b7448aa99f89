"""Controls of requests: over HTTP they do what a batch row's do, streamed or not."""

from __future__ import annotations

import pytest

from tests.support.serving import CHAT, FRANCE, TEXT, ask, batch_rows, texts


def content(app, **extra: object) -> str:
    """Return the answer's text, after checking that a stream brings it too."""
    body = FRANCE | extra
    text = ask(app, CHAT, body).json["choices"][0]["message"]["content"]
    assert "".join(texts(ask(app, CHAT, body | {"stream": True}).events)) == text
    return text


def test_answers_are_the_batch_jobs(app, tmp_path):
    penalties = {"presence_penalty": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
    extras = [
        penalties,
        penalties | {"temperature": 0.9, "seed": 8, "logit_bias": {"30": 4.0}, "min_tokens": 9},
        {
            "bad_words": ["Paris", "the"],
            "stop": ["."],
            "include_stop_str_in_output": True,
            "min_tokens": 3,
        },
        {
            "allowed_token_ids": list(range(100, 300)),
            "stop_token_ids": [150],
            "skip_special_tokens": False,
        },
    ]
    asked = [(CHAT, FRANCE | extra) for extra in extras] + [
        (TEXT, {"prompt": "Once"} | extra) for extra in extras
    ]
    rows = batch_rows(tmp_path, [{"id": f"{i}", **body} for i, (_, body) in enumerate(asked)])
    for (path, body), row in zip(asked, rows, strict=True):
        choice = ask(app, path, body | {"return_token_ids": True}).json["choices"][0]
        assert choice["token_ids"] == row["output_token_ids"]
        assert (choice["message"]["content"] if path == CHAT else choice["text"]) == row["text"]
        assert texts(ask(app, path, body | {"stream": True}).events) == [row["text"]]


def test_words_and_biases_change_the_answer(app, service):
    plain = content(app)
    assert "Paris" in plain
    assert "Paris" not in content(app, bad_words=["Paris"])
    token = service.text.encode(" Paris", add_special_tokens=False)[0]
    assert content(app, logit_bias={str(token): -100}) != plain


def test_allowed_tokens_are_the_only_ones(app, service):
    ids = service.text.encode(" Paris is.", add_special_tokens=False)
    body = FRANCE | {
        "allowed_token_ids": ids,
        "return_token_ids": True,
        "min_tokens": 5,
        "max_tokens": 9,
    }
    found = ask(app, CHAT, body).json["choices"][0]["token_ids"]
    assert set(found) <= set(ids) and len(found) == 9


def test_penalties_are_a_batch_rows(app):
    plain = content(app, max_tokens=40)
    for extra in (
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 3.0},
    ):
        first = content(app, max_tokens=40, **extra)
        assert first == content(app, max_tokens=40, **extra) != plain


def test_min_tokens_puts_off_every_end(app, service):
    ids = ask(app, CHAT, FRANCE | {"return_token_ids": True}).json["choices"][0]["token_ids"]
    stop = {"stop_token_ids": [ids[2]], "return_token_ids": True, "max_tokens": 30}
    choice = ask(app, CHAT, FRANCE | stop | {"min_tokens": 12}).json["choices"][0]
    assert len(choice["token_ids"]) > 12 and ids[2] not in choice["token_ids"][:12]
    whole = content(app, stop=[])
    word = service.text.decode(ids[1:3])
    assert content(app, stop=[word]) == whole[: whole.index(word)]
    assert content(app, stop=[word], min_tokens=3).startswith(service.text.decode(ids[:3]))


@pytest.mark.parametrize("stop", ["Paris", " Pa"])
def test_the_stop_string_can_stay(app, stop):
    without = content(app, stop=[stop])
    assert content(app, stop=[stop], include_stop_str_in_output=True) == without + stop


def test_special_tokens_can_stay(app, service):
    [eos] = service.text.eos_ids
    body = {"skip_special_tokens": False, "include_stop_str_in_output": True, "max_tokens": 60}
    text = content(app, **body)
    assert text.endswith(service.text.decode_with_special([eos])) and text.startswith(
        content(app, max_tokens=60)
    )


def test_stop_string_may_name_a_special_token_absent_from_text(app, service):
    [eos] = service.text.eos_ids
    token, endless = service.text.decode_with_special([eos]), {"ignore_eos": True, "max_tokens": 60}
    before, found, _ = content(app, skip_special_tokens=False, **endless).partition(token)
    assert found and content(app, stop=[token], **endless) == before
    assert content(app, stop=["absent", before[-3:] + token], **endless) == before[:-3]
    assert content(app, stop=[token], include_stop_str_in_output=True, **endless) == before + token


def test_the_servers_own_settings_can_be_overridden(app):
    assert ask(app, TEXT, {"prompt": "a", "max_tokens": 3, "min_tokens": 4}).status == 400
