"""Prompts for the embedded pair that its training never saw, 48 for each of six categories.

    {"id": "code-03", "category": "code", "messages": [{"role": "user", "content": "Write a Python
    function ..."}]}

A prompt ends with a user message. In every other chat an answer stands before it. 15 of them are
also bundled with the package (`eagle_ray/assets/prompts.jsonl`). The number of the head's training
steps was chosen by the bundled ones.
"""

import json
import random
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from eagle_ray.text.tokenizer import Tokenizer

HELD_OUT = Path(__file__).with_name("held_out_prompts.jsonl")


def prompt_rows(per_category: int, seed: int | None = None) -> Iterator[dict]:
    """Yield `per_category` rows for each category, in the categories' order.

    seed: of the choice among all rows of a category; None is the first ones.
    """
    chooser = random.Random(seed)
    for category, group in groupby(read_prompts(HELD_OUT), lambda row: row["category"]):
        rows = list(group)
        if per_category > len(rows):
            raise ValueError(f"category {category!r} has {len(rows)} prompts, not {per_category}")
        yield from rows[:per_category] if seed is None else chooser.sample(rows, per_category)


def shuffled_prompts(
    text: Tokenizer, per_category: int, seed: int | None = None
) -> list[list[int]]:
    """Return the rows as token ids, the categories by turns."""
    rows = [text.encode_chat(row["messages"]) for row in prompt_rows(per_category, seed)]
    return [ids for i in range(per_category) for ids in rows[i::per_category]]


def read_prompts(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
