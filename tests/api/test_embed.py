"""LLM(task="embed").embed against transformers and sentence-transformers, and what it refuses."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle_ray import LLM, ConfigError, RequestError
from tests.support.embedders import PROMPTS, TEXTS, quantised_copies, reference, write_embedder

IDENTITY = "torch.nn.modules.linear.Identity"
TANH = "torch.nn.modules.activation.Tanh"
CASES = {
    "qwen3": {},
    "mean": {"pooling": "mean"},
    "mean without prompt": {"pooling": "mean", "include_prompt": False},
    "mistral with lm_head": {"model_type": "mistral", "is_base": False, "normalizes": False},
    "qwen2, BOS": {"model_type": "qwen2", "head_dim": None, "ends_with_eos": False},
    "dense": {"dense": (48, IDENTITY)},
    "dense with tanh": {"dense": (48, TANH), "normalizes": False},
    "cut": {"max_seq_length": 40},
    "default prompt": {"default_prompt_name": "query"},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedder(tmp_path_factory.mktemp("target") / "t")


@pytest.fixture(scope="module")
def llm(target: Path) -> Iterator[LLM]:
    with LLM(target, task="embed", dtype="float32") as llm:
        yield llm


@pytest.mark.parametrize("case", CASES)
def test_equal_to_transformers_with_the_modules_written_out(tmp_path: Path, case: str) -> None:
    values = CASES[case]
    path = write_embedder(tmp_path / "t", **values)
    with LLM(path, task="embed", dtype="float32") as llm:
        for name in (None, "query"):
            prompt = PROMPTS[name or values.get("default_prompt_name") or "document"]
            for dimensions in (None, 32):
                outputs = llm.embed(TEXTS, prompt_name=name, dimensions=dimensions)
                got = torch.tensor([output.outputs.embedding for output in outputs])
                max_tokens = values.get("max_seq_length", 512)
                want = torch.stack(
                    [reference(path, text, prompt, dimensions, max_tokens) for text in TEXTS]
                )
                torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
                assert len(np.unique(got.numpy(), axis=0)) == len(TEXTS)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("sentence_transformers") is None,
    reason="sentence-transformers is no dependency of the tests: put it on PYTHONPATH",
)
@pytest.mark.parametrize("case", [*CASES, "no modules", "no modules, causal"])
def test_equal_to_sentence_transformers(tmp_path: Path, case: str) -> None:
    from sentence_transformers import SentenceTransformer

    others = {
        "no modules": {"pooling": None},
        "no modules, causal": {"pooling": None, "is_base": False},
    }
    values = CASES.get(case) or others.get(case, {})
    path = write_embedder(tmp_path / "t", **values)
    normalizes = values.get("pooling", "") is not None and values.get("normalizes", True)
    theirs = SentenceTransformer(str(path), device="cpu").float()
    with LLM(path, task="embed", dtype="float32") as llm:
        for name in (None, "document", "query")[
            : 3 if values.get("pooling", "") is not None else 2
        ]:
            for dimensions in (None, 32):
                want = theirs.encode(
                    TEXTS,
                    prompt_name=name,
                    truncate_dim=dimensions,
                    normalize_embeddings=normalizes,
                )
                got = [
                    output.embedding
                    for output in llm.embed(TEXTS, prompt_name=name, dimensions=dimensions)
                ]
                np.testing.assert_allclose(np.stack(got), want, atol=1e-5)


def test_prompts_in_every_form(llm: LLM, target: Path) -> None:
    text, ids, named, table = llm.embed(
        [
            "hello",
            [5, 6, 7],
            {"prompt": "hello", "prompt_name": "query"},
            {"id": "x", "prompt": "a"},
        ]
    )
    assert text.prompt == "hello" and table.request_id == "x"
    first = int(text.request_id)  # prompts of one LLM are counted on
    assert [ids.request_id, named.request_id] == [str(first + 1), str(first + 2)]
    assert ids.prompt is None and ids.prompt_token_ids == [5, 6, 7]
    torch.testing.assert_close(
        torch.tensor(ids.embedding), reference(target, [5, 6, 7]), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        torch.tensor(named.embedding),
        reference(target, "hello", PROMPTS["query"]),
        atol=1e-5,
        rtol=0,
    )
    assert not np.array_equal(text.embedding, named.embedding)
    assert text.embedding.dtype == np.float32 and text.prompt_token_ids[-1] == 1  # EOS
    assert abs(np.linalg.norm(text.embedding) - 1) < 1e-6


def test_a_bad_prompt_is_an_error_of_its_own(llm: LLM) -> None:
    bad = {
        "write a prompt": "",
        "at most 512": [3] * 513,
        "token id 330 is not in": [330],
        "no prompt 'x'. Its prompts: document, query": {"prompt": "a", "prompt_name": "x"},
        "prompt_name must be a text": {"prompt": "a", "prompt_name": 3},
        "temperature: it is for generated text": {"prompt": "a", "temperature": 0.5},
        "an embedding is that of one text": {"messages": [{"role": "user", "content": "a"}]},
    }
    good, *outputs = llm.embed(["hello", *bad.values()])
    assert good.error is None
    for words, output in zip(bad, outputs, strict=True):
        assert output.outputs is None and words in str(output.error)
    with pytest.raises(RequestError, match="dimensions: must be at most 64"):
        llm.embed("hello", dimensions=65, raise_errors=True)
    [output] = llm.embed("hello", dimensions=0)
    assert "dimensions: must be an integer, 1 or more" in str(output.error)


def test_a_long_text_is_cut_as_its_beginning(llm: LLM) -> None:
    long, beginning = llm.embed(["hello there " * 40_000, "hello there " * 2_000])
    assert len(long.prompt_token_ids) == 512 and long.prompt_token_ids[-1] == 1
    assert np.array_equal(long.embedding, beginning.embedding)


def test_max_model_len_cuts_texts(target: Path) -> None:
    with LLM(target, task="embed", dtype="float32", max_model_len=16) as llm:
        [output] = llm.embed("hello there " * 10)
        assert len(output.prompt_token_ids) == 16
        want = reference(target, "hello there " * 10, max_tokens=16)
        torch.testing.assert_close(torch.tensor(output.embedding), want, atol=1e-5, rtol=0)


def test_each_task_has_its_own_calls(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="task is embed, so call embed"):
        llm.generate("hello")
    with (
        LLM("embedded:tiny", method="none") as generating,
        pytest.raises(ConfigError, match='Give the LLM task="embed"'),
    ):
        generating.embed("hello")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"draft": "embedded:tiny"}, "model.draft: it is for generated text, and task is embed"),
        ({"method": "suffix"}, "speculative.method: it is for generated text"),
        ({"chat_template": "none"}, "model.chat_template: it is for generated text"),
        ({"tensor_parallel": 2}, "tensor_parallel: 2, and embeddings are computed in one process"),
        ({"task": "classify"}, "task: must be generate or embed"),
    ],
)
def test_refuses_keys_of_generated_text(target: Path, settings: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(target, **{"task": "embed"} | settings)


def test_refuses_an_encoder_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert", "hidden_size": 8}')
    with pytest.raises(
        ConfigError, match=r"model_type 'bert' reads .* Use text-embeddings-inference"
    ):
        LLM(tmp_path, task="embed")
    assert os.listdir(tmp_path) == ["config.json"]


def test_a_quantised_target_of_the_base_class(tmp_path: Path) -> None:
    """Its tensors have no prefix; the oracle has the weights that the codes stand for."""
    plain = write_embedder(tmp_path / "plain")
    quantised, dequantised = quantised_copies(plain, tmp_path)
    with LLM(quantised, task="embed", dtype="float32") as llm:
        vectors = [output.embedding for output in llm.embed(TEXTS)]
    for text, vector in zip(TEXTS, vectors, strict=True):
        torch.testing.assert_close(
            torch.tensor(vector), reference(dequantised, text), atol=1e-5, rtol=0
        )
