"""SentencePiece tokenizers of GGUF files against sentencepiece itself and against transformers' own reading."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer as Backend
from transformers.integrations.gguf import convert_gguf_tokenizer

from eagle_ray.gguf.blocks import GGUFError
from eagle_ray.gguf.sentencepiece_bpe import merges_of
from eagle_ray.gguf.tokenizer_files import tokenizer_config, tokenizer_json
from eagle_ray.text.tokenizer import Tokenizer
from tests.support.sentencepiece_files import metadata_of_model, random_texts

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and then it runs away.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 23456))",
    "Zürich and São Paulo have 1,234 and 5,678 trams; 東京 has more.",
    "To be, or not to be: that is the question. <b>bold</b>",
]
SPACES = ["\u2581" * size for size in range(2, 32)]
NEWLINES = ["\n" * size for size in range(1, 12)]


@pytest.fixture(scope="module")
def models() -> dict[str, bytes]:
    """Models of a few hundred pieces, as Gemma's and as Llama's are made."""
    return {
        "gemma3": trained(add_dummy_prefix=False, user_defined_symbols=[*NEWLINES, *SPACES, "<b>"]),
        "llama": trained(add_dummy_prefix=True, user_defined_symbols=["<b>"]),
    }


def trained(**settings: Any) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 20),
        model_writer=model,
        model_type="bpe",
        vocab_size=500,
        byte_fallback=True,
        character_coverage=0.98,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **settings,
    )
    return model.getvalue()


@pytest.mark.parametrize("architecture", ["gemma3", "llama"])
def test_texts_are_split_as_sentencepiece_does(models, architecture):
    own = sentencepiece.SentencePieceProcessor(model_proto=models[architecture])
    metadata = metadata_of_model(models[architecture], architecture)
    found = Backend.from_str(json.dumps(tokenizer_json(metadata)))
    for text in ["", *SENTENCES, *random_texts(SENTENCES, 400)]:
        if architecture == "llama" and ("<b>" in text or text.startswith("\n")):
            continue  # sentencepiece puts a space before a text alone
        ids = found.encode(text, add_special_tokens=False).ids
        assert ids == own.encode(text), repr(text)
        assert found.encode(text).ids == [own.bos_id(), *ids]
        assert found.decode(ids) == text


@pytest.mark.parametrize("architecture", ["gemma", "gemma2", "gemma3", "phi3"])
def test_texts_are_split_as_transformers_reads_such_files(models, architecture):
    kind = "llama" if architecture == "phi3" else "gemma3"
    metadata = metadata_of_model(models[kind], architecture)
    names = {"token_type": "token_type", "tokens": "tokens", "scores": "scores"}
    given = {name: metadata[f"tokenizer.ggml.{key}"] for key, name in names.items()}
    own, _ = convert_gguf_tokenizer(architecture, given | {"tokenizer_type": "llama"})
    written = tokenizer_json(metadata)
    found = Backend.from_str(json.dumps(written))
    assert written["model"]["merges"] == json.loads(own.to_str())["model"]["merges"]
    for text in ["", *SENTENCES, *random_texts(SENTENCES, 400)]:
        expected = own.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special_tokens=False).ids == expected, repr(text)


def test_a_space_stands_before_a_text_and_behind_a_special_token(models):
    """As llama.cpp and the tokenizer.json of Llama 2 have it."""
    metadata = metadata_of_model(models["llama"], "llama")
    found = Backend.from_str(json.dumps(tokenizer_json(metadata)))
    tokens = found.encode("dog<s>dog", add_special_tokens=False).tokens
    assert "".join(tokens) == "\u2581dog<s>\u2581dog"
    plain = tokenizer_json(metadata | {"tokenizer.ggml.add_space_prefix": False})
    assert "".join(Backend.from_str(json.dumps(plain)).encode("dog").tokens) == "<s>dog"


def test_phi_3_special_tokens_take_the_white_space_behind_them(models):
    metadata = metadata_of_model(models["llama"], "phi3")
    added = {token["content"]: token for token in tokenizer_json(metadata)["added_tokens"]}
    assert added["</s>"]["rstrip"] and not added["<s>"]["rstrip"] and not added["<b>"]["rstrip"]
    llama = tokenizer_json(metadata | {"general.architecture": "llama"})
    assert not any(token["rstrip"] for token in llama["added_tokens"])


def test_the_best_pieces_are_merged_first():
    tokens = ["a", "b", "c", "bc", "ab", "abc"]
    assert merges_of(tokens, [0, 1, 2, 3, 4, 5]) == [
        ["b", "c"],
        ["a", "b"],
        ["ab", "c"],
        ["a", "bc"],
    ]


def test_a_target_reads_its_tokenizer(models, tmp_path):
    metadata = metadata_of_model(models["gemma3"], "gemma3")
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(metadata)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(metadata, 128)))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3_text"}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    ids = tokenizer.encode(SENTENCES[1])
    assert ids[0] == metadata["tokenizer.ggml.bos_token_id"]
    assert tokenizer.decode(ids) == SENTENCES[1]


def test_another_kind_of_tokenizer_is_named(models):
    metadata = metadata_of_model(models["llama"], "llama") | {"tokenizer.ggml.model": "t5"}
    with pytest.raises(GGUFError, match=r"tokenizer.ggml.model is 't5'. Known: 'gpt2' .* 'llama'"):
        tokenizer_json(metadata)


def test_random_texts_are_many_and_different():
    texts = random_texts(SENTENCES, 400)
    assert len(set(texts)) > 350
