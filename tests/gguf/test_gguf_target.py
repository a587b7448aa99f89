"""Conversion of a toy Llama: its logits and its tokenizer after loading the directory as any other target."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eagle_ray.gguf.blocks import GGUFError
from eagle_ray.gguf.gguf_file import GGUFFile
from eagle_ray.gguf.gguf_target import (
    LLAMA3_ROPES,
    llama3_factors,
    target_config,
    unpermute,
    write_checkpoint,
)
from eagle_ray.models.loader import eos_ids, load_causal_lm
from eagle_ray.text.tokenizer import Tokenizer
from tests.support.gguf import F32, SlowReader, llama_logits, toy_metadata, toy_tensors, write_gguf


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "toy.gguf"
    write_gguf(path, toy_metadata(), toy_tensors(toy_metadata()))
    return path


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    write_checkpoint(GGUFFile.open(source), directory)
    return directory


def test_logits_equal_a_second_readers(source, converted):
    ids = [1, 70, 200, 45, 45, 3]
    vocab_ids = list(range(262))
    expected = llama_logits(SlowReader(source), ids, 2, vocab_ids)
    model = load_causal_lm(converted, torch.float32, "cpu")
    found = model(input_ids=torch.tensor([ids])).logits[0].numpy()
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_weights_are_fp16_and_run_in_bf16(converted):
    weights = load_file(converted / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {np.dtype(np.float16)}
    assert load_causal_lm(converted, "auto", "cpu").dtype is torch.bfloat16


def test_the_end_of_sequence_is_the_files(converted):
    assert eos_ids(load_causal_lm(converted, torch.float32, "cpu")) == {0, 2}, (
        "<|endoftext|> and the file's EOS"
    )


def test_an_lm_head_of_its_own_is_kept(tmp_path):
    metadata = toy_metadata()
    tensors = toy_tensors(metadata) | {"output.weight": (F32, np.full((262, 64), 0.5, np.float32))}
    write_gguf(tmp_path / "x.gguf", metadata, tensors)
    write_checkpoint(GGUFFile.open(tmp_path / "x.gguf"), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
    assert (load_file(tmp_path / "model.safetensors")["lm_head.weight"] == 0.5).all()


def test_rotary_pairs_become_halves():
    rows = np.arange(12, dtype=np.float32)[:, None]  # two heads of 6
    assert unpermute(rows, 2)[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"general.architecture": "gpt2"}, "general.architecture is 'gpt2'"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type is 'longrope'"),
        ({"llama.rope.scaling.type": "yarn"}, "the metadata lacks 'llama.rope.scaling.factor'"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count: only whole heads of 16"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length: values of another"),
        ({"llama.attention.no_such_key": 8}, "llama.attention.no_such_key is set"),
        ({"llama.expert_count": 8}, "llama.expert_count is set"),
        ({"split.count": 3}, "the file is one of 3 parts.*llama-gguf-split --merge"),
        ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window is set"),
        ({"llama.attention.head_count": 0}, "the metadata is broken: .*Download the file again"),
        ({"llama.attention.head_count": "four"}, "the metadata is broken"),
        (
            {"llama.attention.head_count_kv": 3},
            "tensor blk.0.attn_k.weight: has 32 rows, which are not 3 heads",
        ),
        ({"tokenizer.ggml.eos_token_id": 99999}, "the tokenizer's metadata is broken"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        (
            {"tokenizer.ggml.pre": "viking"},
            "tokenizer.ggml.pre is 'viking'.*Put the model's own config.json and tokenizer",
        ),
    ],
)
def test_what_is_no_plain_llama_is_refused(tmp_path, changes, says):
    metadata = toy_metadata(**changes)
    write_gguf(tmp_path / "x.gguf", metadata, toy_tensors(toy_metadata()))
    with pytest.raises(GGUFError, match=says):
        write_checkpoint(GGUFFile.open(tmp_path / "x.gguf"), tmp_path)


def test_what_is_missing_is_named(tmp_path):
    metadata = toy_metadata()
    tensors = toy_tensors(metadata)
    del tensors["blk.1.ffn_up.weight"]
    write_gguf(tmp_path / "x.gguf", metadata, tensors)
    with pytest.raises(GGUFError, match=r"blk\.1\.ffn_up\.weight"):
        write_checkpoint(GGUFFile.open(tmp_path / "x.gguf"), tmp_path)
    del metadata["llama.block_count"]
    write_gguf(tmp_path / "x.gguf", metadata, tensors)
    with pytest.raises(GGUFError, match=r"llama\.block_count"):
        target_config(GGUFFile.open(tmp_path / "x.gguf"))
    metadata = toy_metadata()
    del metadata["tokenizer.ggml.merges"]
    write_gguf(tmp_path / "x.gguf", metadata, toy_tensors(metadata))
    with pytest.raises(GGUFError, match=r"the metadata lacks 'tokenizer\.ggml\.merges'"):
        write_checkpoint(GGUFFile.open(tmp_path / "x.gguf"), tmp_path)


@pytest.mark.parametrize("rope", LLAMA3_ROPES, ids=lambda rope: str(rope["factor"]))
def test_llama3_rope_factors_are_recognized_and_others_refused(tmp_path, rope):
    metadata = toy_metadata(**{"llama.rope.freq_base": 500000.0})
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=128)
    config.rope_parameters = {"rope_theta": 500000.0, "rope_type": "llama3", **rope}
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-np.arange(0, 16, 2) / 16)
    factors = (plain / frequencies.double().numpy()).astype(np.float32)
    np.testing.assert_allclose(llama3_factors(16, 500000.0, **rope), factors, rtol=1e-6)
    write_gguf(
        tmp_path / "x.gguf", metadata, toy_tensors(metadata) | {"rope_freqs.weight": (F32, factors)}
    )
    assert (
        target_config(GGUFFile.open(tmp_path / "x.gguf"))["rope_parameters"]
        == config.rope_parameters
    )
    write_gguf(
        tmp_path / "x.gguf",
        metadata,
        toy_tensors(metadata) | {"rope_freqs.weight": (F32, factors * 1.01)},
    )
    with pytest.raises(
        GGUFError, match=r"tensor rope_freqs\.weight: .*Put the model's own config\.json"
    ):
        target_config(GGUFFile.open(tmp_path / "x.gguf"))


def test_a_tensor_of_another_model_is_named(tmp_path):
    metadata = toy_metadata()
    tensors = toy_tensors(metadata) | {"blk.1.attn_q.bias": (F32, np.zeros(64, np.float32))}
    write_gguf(tmp_path / "x.gguf", metadata, tensors)
    with pytest.raises(GGUFError, match=r"tensor blk\.1\.attn_q\.bias is part of no llama"):
        target_config(GGUFFile.open(tmp_path / "x.gguf"))


def test_a_value_beyond_fp16_is_refused(tmp_path):
    metadata = toy_metadata()
    tensors = toy_tensors(metadata) | {"output_norm.weight": (F32, np.full(64, 1e5, np.float32))}
    write_gguf(tmp_path / "x.gguf", metadata, tensors)
    with pytest.raises(GGUFError, match="fp16 cannot hold"):
        write_checkpoint(GGUFFile.open(tmp_path / "x.gguf"), tmp_path)


@pytest.mark.parametrize(
    "text", ["a b ab", "x\n\ty  z", "Zürich 東京 🙂", "<|im_start|>ab<|im_end|>", ""]
)
def test_texts_survive_the_tokenizer(converted, text):
    tokenizer = Tokenizer.load(converted)
    assert tokenizer.decode_with_special(tokenizer.encode(text)) == text


def test_merges_digits_and_special_tokens(converted):
    tokenizer = Tokenizer.load(converted)
    tokens = toy_metadata()["tokenizer.ggml.tokens"]
    assert [tokens[id] for id in tokenizer.encode("ab a 12")] == [
        "ab",
        "\u0120a",
        "\u0120",
        "1",
        "2",
    ]
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.decode([tokens.index("ab"), 2]) == "ab"
    assert tokenizer.encode_chat([{"role": "user", "content": "ab"}]) == [1, tokens.index("ab"), 2]
