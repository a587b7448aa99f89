"""lm-eval against a server: python lm_eval_client.py URL FOLDER MODEL, of which FOLDER holds what reference.py wrote.

Two local tasks over the same documents, one by log-probabilities of choices (echo), one by
generation; every number equals the reference's. Run in an environment that has `lm-eval[api]`;
knows nothing of eagle_ray.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
}

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

TOLERANCE = 1e-4
COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/docs.jsonl}}, cache_dir: {folder}/cache}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICE = """
task: capitals_choice
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
ANSWER = """
task: capitals_answer
output_type: generate_until
doc_to_target: " {{choices[answer]}}"
generation_kwargs: {until: ["."], max_gen_toks: 24, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""


def evaluate(url: str, folder: Path, model: str, **settings: Any) -> dict[str, Any]:
    for name, task in (("choice", CHOICE), ("answer", ANSWER)):
        (folder / f"{name}.yaml").write_text(COMMON.format(folder=folder) + task)
    found = simple_evaluate(
        model="local-completions",
        model_args={
            "model": model,
            "base_url": f"{url}/v1/completions",
            "max_retries": 1,
            **settings,
        },
        tasks=["capitals_choice", "capitals_answer"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    assert found is not None
    return found


def compare(found: dict[str, Any], expected: list[dict[str, Any]]) -> tuple[float, float]:
    """Number for number; returns both tasks' scores."""
    docs = [sample["doc"] for sample in found["samples"]["capitals_choice"]]
    for sample, wanted in zip(found["samples"]["capitals_choice"], expected, strict=True):
        for [[logprob, is_greedy]], (wanted_logprob, wanted_greedy) in zip(
            sample["resps"], wanted["choices"], strict=True
        ):
            assert math.isclose(float(logprob), wanted_logprob, abs_tol=TOLERANCE), (
                sample["doc"],
                logprob,
                wanted,
            )
            assert str(is_greedy) == str(wanted_greedy), (sample["doc"], wanted)
    for sample, wanted in zip(found["samples"]["capitals_answer"], expected, strict=True):
        assert sample["resps"] == [[wanted["answer"]]], (sample["resps"], wanted["answer"])

    def best(wanted: dict[str, Any], lengths: list[int]) -> int:
        scores = [
            logprob / length
            for (logprob, _), length in zip(wanted["choices"], lengths, strict=True)
        ]
        return scores.index(max(scores))

    pairs = list(zip(docs, expected, strict=True))
    right = [best(wanted, [1] * 4) == doc["answer"] for doc, wanted in pairs]
    normed = [
        best(wanted, [len(choice) for choice in doc["choices"]]) == doc["answer"]
        for doc, wanted in pairs
    ]
    exact = [wanted["answer"] == " " + doc["choices"][doc["answer"]] for doc, wanted in pairs]
    scores = found["results"]["capitals_choice"] | found["results"]["capitals_answer"]
    for name, hits in (("acc", right), ("acc_norm", normed), ("exact_match", exact)):
        assert scores[f"{name},none"] == sum(hits) / len(hits), (name, scores)
    return scores["acc,none"], scores["exact_match,none"]


def main(url: str, folder: Path, model: str) -> None:
    logging.disable(logging.WARNING)
    expected = json.loads((folder / "expected.json").read_text())
    ways: list[dict[str, Any]] = [
        {},
        {"batch_size": 4, "num_concurrent": 3},
        {"tokenized_requests": False},
    ]
    scores = {compare(evaluate(url, folder, model, **way), expected) for way in ways}
    [(accuracy, exact)] = scores
    print(
        f"lm-eval {importlib.metadata.version('lm_eval')}, remote tokenizer, {len(expected)} documents as ids, in "
        f"batches and as text: log-probabilities within {TOLERANCE:g} of the target's logits, acc {accuracy:.3f} and "
        f"exact_match {exact:.3f} equal to theirs"
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
