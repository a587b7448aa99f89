"""ContinuedText: tokenize many texts that share a beginning, without tokenizing all of the beginning each time.

    continued = ContinuedText(tokenizer, context, context_ids, adds_special=True)
    list(continued.behind([" Rome", " Paris"]))    # [(6, [1482]), (6, [7089])]: tokens of the context, the ids behind

`behind` gives the ids that tokenizing each whole text would give. If the tokenizer is known to
split at words (`word_cuts`), a text is tokenized from a space near the context's end on, behind a
letter that stands for the omitted text. For each context it is checked that this gives the
context's own ids; if not, texts are tokenized whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eagle_ray.core.continuations import num_common
from eagle_ray.text.tokenizer import Tokenizer
from eagle_ray.text.word_cuts import last_word_space

STAND_IN = "a"  # for the text before a cut: a letter, so that a word ends there
BATCH_TEXTS = 1024  # tokenized together
# Characters of a context times texts from which on a cut is looked for. Tokenizing them takes 0.3 s, and reading the
# vocabulary of 49,152 entries, which is done once, 0.1 s.
MIN_CHARS_SAVED = 1_000_000


@dataclass(frozen=True, slots=True)
class Cut:
    """The position in the context from which texts are tokenized.

    Attributes:
        text: stand-in for the omitted text, followed by the context from the cut on.
        num_stand_in: number of ids of the stand-in, with special tokens before it.
        num_front: number of ids of the context before the cut.
        behind: ids of the context from the cut on.
    """

    text: str
    num_stand_in: int
    num_front: int
    behind: list[int]


class ContinuedText:
    """A context, and the token ids of texts that may follow it."""

    def __init__(
        self, tokenizer: Tokenizer, context: str, context_ids: list[int], adds_special: bool
    ):
        """Take over a context.

        Args:
            context_ids: ids of the context, as the tokenizer gives them.
            adds_special: the texts get the special tokens that the tokenizer adds.
        """
        self._tokenizer = tokenizer
        self._context = context
        self._context_ids = context_ids
        self._adds_special = adds_special

    def behind(self, texts: Sequence[str]) -> Iterator[tuple[int, list[int]]]:
        """Yield for each text: how many of the context's ids the whole text begins with, and its further ids."""
        is_much = len(self._context) * len(texts) >= MIN_CHARS_SAVED
        cut = self.find_cut() if is_much else None
        for start in range(0, len(texts), BATCH_TEXTS):
            batch = texts[start : start + BATCH_TEXTS]
            if cut is None:
                for ids in self._encode(self._context, batch):
                    yield _split(self._context_ids, ids)
                continue
            for ids in self._encode(cut.text, batch):
                num_shared, rest = _split(cut.behind, ids[cut.num_stand_in :])
                yield cut.num_front + num_shared, rest

    def find_cut(self) -> Cut | None:
        """Return the last possible cut with enough text behind it; None if there is none, or if it
        gives other ids than the context's."""
        margin = self._tokenizer.cut_margin
        place = None if margin is None else last_word_space(self._context, margin)
        if place is None:
            return None
        text = STAND_IN + self._context[place:]
        [ids] = self._encode(text, [""])
        num_stand_in = self._tokenizer.num_tokens_within(text, len(STAND_IN), self._adds_special)
        behind = ids[num_stand_in:]
        num_front = len(self._context_ids) - len(behind)
        if num_front < 1 or self._context_ids[num_front:] != behind:
            return None
        return Cut(text, num_stand_in, num_front, behind)

    def _encode(self, front: str, texts: Sequence[str]) -> list[list[int]]:
        return self._tokenizer.encode_batch([front + text for text in texts], self._adds_special)


def _split(context_ids: list[int], ids: list[int]) -> tuple[int, list[int]]:
    num_shared = num_common(context_ids, ids)
    return num_shared, ids[num_shared:]
