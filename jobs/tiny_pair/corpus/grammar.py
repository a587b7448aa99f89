"""The words and dice of the corpus: conversations, and a `Chooser` that fills templates from a seed.

A template holds alternatives and slots: `"[Hi|Hello] {name}, {animal!a} [eats|likes] {food}."` picks one alternative of
each bracket (brackets nest, an empty alternative is fine) and then fills the slots. `{x!a}` puts an article before the
value, `{x!c}` gives it a capital, `{x!A}` does both. This file knows no facts and no categories.
"""

import random
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Option = TypeVar("Option")

INNERMOST_BRACKET = re.compile(r"\[([^\[\]]*)\]")


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation; `role` is "user" or "assistant"."""

    role: str
    content: str


Conversation = tuple[Turn, ...]


def exchange(question: str, answer: str) -> Conversation:
    """The shortest conversation: a question and its answer."""
    return (Turn("user", question), Turn("assistant", answer))


def with_article(noun: str) -> str:
    return ("an " if noun[0] in "aeio" else "a ") + noun


def capitalized(text: str) -> str:
    return text[0].upper() + text[1:]


class SlotFormatter(string.Formatter):
    """`str.format` with three more conversions: `!a` article, `!c` capital, `!A` article with a capital."""

    def convert_field(self, value, conversion):
        if conversion == "a":
            return with_article(value)
        if conversion == "c":
            return capitalized(value)
        if conversion == "A":
            return capitalized(with_article(value))
        return super().convert_field(value, conversion)


class TemplateSampler:
    """Every random decision of the corpus. The same seed and the same calls give the same text."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.formatter = SlotFormatter()

    def number(self, low: int, high: int) -> int:
        """A uniform integer, both ends included."""
        return self.random.randrange(low, high + 1)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def choose(self, options: Sequence[Option]) -> Option:
        return options[self.random.randrange(len(options))]

    def weighted(self, options: Sequence[Option], weights: Sequence[float]) -> Option:
        return self.random.choices(options, weights)[0]

    def some(self, options: Sequence[Option], count: int) -> list[Option]:
        """`count` different options in random order, or all of them where there are fewer."""
        shuffled = list(options)
        self.random.shuffle(shuffled)
        return shuffled[:count]

    def render(self, template: str, **slots: object) -> str:
        """One reading of a template, whose outermost bracket may be left out. KeyError names a slot not given."""
        template = f"[{template}]"
        while bracket := INNERMOST_BRACKET.search(template):
            choice = self.choose(bracket.group(1).split("|"))
            template = template[: bracket.start()] + choice + template[bracket.end() :]
        return self.formatter.format(template, **slots)


def numbered(lines: Sequence[str]) -> str:
    """The lines as a numbered list, one per row, starting at 1."""
    return "\n".join(f"{index}. {line}" for index, line in enumerate(lines, start=1))
