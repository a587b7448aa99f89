"""The pocket world: a seeded grammar of six tasks that stands in for the world's text. All of it is written here.

The categories stand for the six tasks of the EAGLE-2 paper. A conversation is **held out** when the hash of its first
user message says so; training never sees such a message, whatever the seed, and the bundled prompts are made of them.
Knows nothing of tokens or models.
"""

import zlib
from collections.abc import Callable, Iterator

from jobs.tiny_pair.corpus import chat, code, instruction, math, qa, summarization
from jobs.tiny_pair.corpus.grammar import Conversation, TemplateSampler, Turn

__all__ = [
    "CATEGORIES",
    "REFINING_MIX",
    "TRAINING_MIX",
    "Conversation",
    "Mix",
    "Turn",
    "held_out_conversations",
    "is_held_out",
    "training_conversations",
]

CATEGORIES: dict[str, Callable[[TemplateSampler], Conversation]] = {
    "chat": chat.conversation,
    "code": code.conversation,
    "math": math.conversation,
    "instruction": instruction.conversation,
    "summarization": summarization.conversation,
    "qa": qa.conversation,
}
Mix = tuple[tuple[Callable[[TemplateSampler], Conversation], float], ...]
TRAINING_MIX: Mix = (
    (chat.conversation, 0.16),
    (code.conversation, 0.17),
    (math.conversation, 0.20),
    (instruction.conversation, 0.16),
    (summarization.conversation, 0.11),
    (qa.conversation, 0.11),
    (math.drill, 0.09),
)
REFINING_MIX: Mix = (  # more of what is hard: sums, copying names from the news, facts that are told only once
    (chat.conversation, 0.07),
    (code.conversation, 0.07),
    (math.conversation, 0.12),
    (instruction.conversation, 0.14),
    (summarization.conversation, 0.13),
    (qa.conversation, 0.17),
    (math.drill, 0.15),
    (summarization.drill, 0.15),
)
HELD_OUT_ONE_IN = 50
MOST_IN_VAIN = 20_000  # conversations in a row that are none of the wanted: there are no more of these


def is_held_out(first_message: str) -> bool:
    """Whether a conversation that begins with this user message is kept from training."""
    return zlib.crc32(first_message.encode()) % HELD_OUT_ONE_IN == 0


def training_conversations(seed: int, mix: Mix = TRAINING_MIX) -> Iterator[Conversation]:
    """An endless stream, mixed over all categories and the drills, without the held-out ones."""
    chooser = TemplateSampler(seed)
    writers, weights = zip(*mix, strict=True)
    while True:
        conversation = chooser.weighted(writers, weights)(chooser)
        if not is_held_out(conversation[0].content):
            yield conversation


def held_out_conversations(category: str, count: int, seed: int) -> list[Conversation]:
    """`count` held-out conversations of one category, no two with the same first message.

    Raises ValueError where the category has fewer: qa has 49.
    """
    chooser = TemplateSampler(seed)
    found: dict[str, Conversation] = {}
    in_vain = 0
    while len(found) < count:
        conversation = CATEGORIES[category](chooser)
        first, in_vain = conversation[0].content, in_vain + 1
        if is_held_out(first) and first not in found:
            found[first], in_vain = conversation, 0
        if in_vain == MOST_IN_VAIN:
            raise ValueError(f"category {category!r} has {len(found)} held-out conversations, not {count}")
    return list(found.values())
