"""lm-eval with an engine of this process: python lm_eval_in_process.py FOLDER TARGET [SITE_PACKAGES]

FOLDER holds what reference.py wrote; SITE_PACKAGES is where lm-eval is, if this environment lacks
it. Three tasks: by log-probabilities of choices, by generation, and by the log-probability of whole
texts in windows. Every number equals that of transformers' own forward, and those that lm-eval's hf
model gives.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import site
import sys
from pathlib import Path
from typing import Any

if len(sys.argv) > 3:
    site.addsitedir(sys.argv[3])  # behind this environment's own packages
sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from lm_eval_client import ANSWER, CHOICE, COMMON, TOLERANCE, compare
from transformers import AutoModelForCausalLM, AutoTokenizer

import eagle_ray.lm_eval  # noqa: F401  registers the model
from eagle_ray.assembly.hub import download

TEXT = """
task: capitals_text
output_type: loglikelihood_rolling
doc_to_target: "{{question}} {{choices[answer]}}, and {{question}} {{choices[0]}}."
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
"""
TASKS = {"choice": CHOICE, "answer": ANSWER, "text": TEXT}
SCORED_TASKS = ["capitals_choice", "capitals_text"]  # those of log-probabilities
WINDOW = 12  # tokens: the texts take several of them


def evaluate(folder: Path, target: str, tasks: list[str], **settings: Any) -> dict[str, Any]:
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(COMMON.format(folder=folder) + task)
    found = simple_evaluate(
        model="eagle_ray",
        model_args={"target": target, "draft": target, "dtype": "float32", **settings},
        tasks=tasks,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    assert found is not None
    return found


@torch.inference_mode()
def rolling(model: Any, tokenizer: Any, text: str, window: int) -> float:
    """The log-likelihood of a whole text in windows, by transformers."""
    ids = tokenizer.encode(text)
    prefix = (
        tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    )
    total = 0.0
    for pair in get_rolling_token_windows(
        token_list=ids, prefix_token=prefix, max_seq_len=window, context_len=1
    ):
        context, scored = make_disjoint_window(pair)
        logprobs = (
            model(torch.tensor([context + scored])).logits[0].log_softmax(-1)[len(context) - 1 : -1]
        )
        total += float(logprobs.gather(1, torch.tensor(scored)[:, None]).sum())
    return total


def check_texts(found: dict[str, Any], target: str, window: int) -> None:
    directory = str(download(target, "target"))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for sample in found["samples"]["capitals_text"]:
        [text] = sample["arguments"][0]
        expected = rolling(model, tokenizer, text, window)
        [[score]] = sample["resps"]
        assert math.isclose(score, expected, abs_tol=TOLERANCE), (text, score, expected)


def check_hf(found: dict[str, Any], folder: Path, target: str) -> None:
    """Compare log-probabilities with those of lm-eval's model of transformers, by the same tasks."""
    directory = str(download(target, "target"))
    expected = simple_evaluate(
        model="hf",
        model_args={"pretrained": directory, "dtype": "float32", "device": "cpu"},
        tasks=SCORED_TASKS,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        batch_size=4,
        bootstrap_iters=0,
    )
    assert expected is not None
    for task in SCORED_TASKS:
        samples = zip(found["samples"][task], expected["samples"][task], strict=True)
        for ours, theirs in samples:
            assert ours["doc_id"] == theirs["doc_id"]
            pairs = zip(numbers(ours["resps"]), numbers(theirs["resps"]), strict=True)
            for score, wanted in pairs:
                assert math.isclose(score, wanted, abs_tol=TOLERANCE), (task, score, wanted)


def numbers(responses: Any) -> list[float]:
    """Return the numbers in lm-eval's responses, in order; whether one is greedy is 0 or 1."""
    if isinstance(responses, list | tuple):
        return [number for part in responses for number in numbers(part)]
    return [float(responses)]


def main(folder: Path, target: str) -> None:
    logging.disable(logging.WARNING)
    expected = json.loads((folder / "expected.json").read_text())
    found = evaluate(
        folder, target, ["capitals_choice", "capitals_answer", "capitals_text"], slots=4
    )
    accuracy, exact = compare(found, expected)
    check_texts(found, target, 10_000)
    check_hf(found, folder, target)
    check_texts(
        evaluate(folder, target, ["capitals_text"], slots=4, max_model_len=WINDOW),
        target,
        WINDOW,
    )
    print(
        f"lm-eval {importlib.metadata.version('lm_eval')} in this process, {len(expected)} documents, whole texts too: "
        f"log-probabilities within {TOLERANCE:g} of transformers' and of lm-eval's hf model, "
        f"acc {accuracy:.3f} and exact_match {exact:.3f} equal"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
