"""ReasoningParser: split a text into the reasoning that a model writes first and the content after it.

    >>> parser = ReasoningParser(starts_inside=False)
    >>> parser.feed("<think>\\nTwo and two.\\n</think>\\n\\nFour.") + parser.end()
    [ChatEvent(kind='reasoning', text='Two and two.', ...), ChatEvent(kind='content', text='Four.', ...)]

Newlines right before and after a marker belong to it. A text that ends within the reasoning has no content.
"""

from __future__ import annotations

from eagle_ray.text.chat_format import THINK_CLOSE, THINK_OPEN
from eagle_ray.text.incremental_parser import IncrementalParser, Step


class ReasoningParser(IncrementalParser):
    """starts_inside: the prompt ends with the opening marker, or the model writes none."""

    def __init__(self, starts_inside: bool):
        super().__init__()
        self._starts_inside = starts_inside

    def _parse(self) -> Step[None]:
        is_marked = yield from self._begins_with_marker()
        if is_marked or self._starts_inside:
            self._consume()
            self._drops_newlines = True
            if (yield from self._pass_until(THINK_CLOSE, "reasoning")):
                self._consume()
                self._drops_newlines = True
        while True:
            self._pass("content", len(self._text))
            yield

    def _begins_with_marker(self) -> Step[bool]:
        """Return whether the text begins with the marker, after white space. _pos is after it then."""
        start = yield from self._next_character()
        if start == THINK_OPEN[0] and (yield from self._skip(THINK_OPEN)):
            return True
        self._pos = 0
        return False
