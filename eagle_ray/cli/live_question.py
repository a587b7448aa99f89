"""LiveQuestion and AnswerPrinter: a question of the demo as a sequence, and its answer printed while it grows."""

from __future__ import annotations

from collections.abc import Callable

from eagle_ray.batch.driver.status import GROUP_BY
from eagle_ray.config import JobConfig
from eagle_ray.core import sequence as engine_sequence
from eagle_ray.requests.messages import template_messages
from eagle_ray.requests.request import Request
from eagle_ray.requests.sequences import sequences_of
from eagle_ray.text.tokenizer import Tokenizer

Write = Callable[[str], object]
SHOWN_CHARACTERS = 200  # characters of a question


class LiveQuestion:
    """A row of the demo's input: its category, its last message, and a function that makes a new sequence of it."""

    def __init__(self, request: Request, config: JobConfig, text: Tokenizer):
        self._request = request
        self._config = config
        self._text = text
        self.category = str(request.carried.get(GROUP_BY))
        assert request.messages is not None, "the demo's rows have messages"
        last_message = str(template_messages(request.messages)[-1]["content"])
        self.shown = (
            last_message
            if len(last_message) <= SHOWN_CHARACTERS
            else f"{last_message[:SHOWN_CHARACTERS]} ..."
        )

    def ask(self) -> engine_sequence.Sequence:
        return sequences_of(self._request, self._config, self._text, n=1)[0]


class AnswerPrinter:
    """Prints a sequence's text as it grows."""

    def __init__(self, sequence: engine_sequence.Sequence, text: Tokenizer, write: Write):
        self._sequence = sequence
        self._write = write
        self._stream = text.decode_stream([])
        self._num_written = 0

    def __call__(self) -> None:
        ids = self._sequence.output_ids
        if self._sequence.finish_reason is None:
            self._write(self._stream.grow(ids[self._num_written :]))
            self._num_written = len(ids)
        else:
            self._write(self._stream.end(ids))
