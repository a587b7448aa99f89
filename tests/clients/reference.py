"""What a task's scores must be, from the target's own logits: python reference.py FOLDER TARGET_DIRECTORY.

Writes the task's documents (docs.jsonl) and, by transformers' own forward over the target, the
log-probability of each choice, whether it is the greedy one, and each greedy answer
(expected.json). Knows nothing of servers, engines or lm-eval.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Peru": "Lima",
}
CAPITALS |= {
    "Norway": "Oslo",
    "Greece": "Athens",
    "Austria": "Vienna",
    "Kenya": "Nairobi",
    "Cuba": "Havana",
}
CAPITALS |= {
    "Poland": "Warsaw",
    "Ireland": "Dublin",
    "Portugal": "Lisbon",
    "Hungary": "Budapest",
    "Chile": "Santiago",
}
MOST_TOKENS = 24
UNTIL = "."


def documents() -> list[dict[str, Any]]:
    """Four choices each; which is right goes round."""
    names = list(CAPITALS)
    found = []
    for i, country in enumerate(names):
        others = [CAPITALS[names[(i + step) % len(names)]] for step in (1, 5, 9)]
        choices = [*others[: i % 4], CAPITALS[country], *others[i % 4 :]]
        found.append(
            {"question": f"The capital of {country} is", "choices": choices, "answer": i % 4}
        )
    return found


@torch.inference_mode()
def of_choice(model: Any, tokenizer: Any, question: str, choice: str) -> tuple[float, bool]:
    """The sum of the choice's log-probabilities behind the question, and whether each is the likeliest token."""
    context = tokenizer.encode(question, add_special_tokens=False)
    ids = tokenizer.encode(f"{question} {choice}", add_special_tokens=False)
    logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)[len(context) - 1 : -1]
    tokens = torch.tensor(ids[len(context) :])
    return float(logprobs.gather(1, tokens[:, None]).sum()), bool(
        (logprobs.argmax(-1) == tokens).all()
    )


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, question: str) -> str:
    """Greedy, one forward of everything for each token; up to the stop string."""
    ids = tokenizer.encode(question, add_special_tokens=False)
    start = len(ids)
    while len(ids) - start < MOST_TOKENS and UNTIL not in tokenizer.decode(ids[start:]):
        token = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        if token == model.generation_config.eos_token_id:
            break
        ids.append(token)
    return str(tokenizer.decode(ids[start:], skip_special_tokens=True)).partition(UNTIL)[0]


def main(folder: Path, target: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    docs = documents()
    expected = [
        {
            "choices": [
                of_choice(model, tokenizer, doc["question"], choice) for choice in doc["choices"]
            ],
            "answer": answer(model, tokenizer, doc["question"]),
        }
        for doc in docs
    ]
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (folder / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
