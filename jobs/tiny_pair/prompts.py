"""The bundled prompts: held-out conversations of the six categories, as the rows of a JSONL file.

    {"id": "code-03", "category": "code", "messages": [{"role": "user", "content": "Write a Python function ..."}]}

A prompt ends with a user message. Of the chats, every other one is asked in the middle, after a first answer.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from eagle_ray.text.tokenizer import Tokenizer
from jobs.tiny_pair.corpus import CATEGORIES, Conversation, held_out_conversations


def asked_part(conversation: Conversation, index: int) -> Conversation:
    """The turns up to the question that the prompt asks."""
    return conversation[:3] if index % 2 and len(conversation) > 3 else conversation[:1]


def prompt_rows(per_category: int, seed: int) -> Iterator[dict]:
    """`per_category` rows for each category, in the categories' order."""
    for category in CATEGORIES:
        for index, conversation in enumerate(held_out_conversations(category, per_category, seed)):
            messages = [{"role": turn.role, "content": turn.content} for turn in asked_part(conversation, index)]
            yield {"id": f"{category}-{index:02d}", "category": category, "messages": messages}


def shuffled_prompts(text: Tokenizer, per_category: int, seed: int) -> list[list[int]]:
    """The same rows as token ids, the categories by turns."""
    rows = [text.encode_chat(row["messages"]) for row in prompt_rows(per_category, seed)]
    return [ids for i in range(per_category) for ids in rows[i::per_category]]


def write_prompts(path: Path, per_category: int, seed: int) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in prompt_rows(per_category, seed)))


def read_prompts(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
