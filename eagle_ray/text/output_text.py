"""Decode an output incrementally, and find where stop strings end it.

A stop string may end within a token, and a character may take several tokens, so an output's text
is found by decoding windows of its ids:

    stop_check     after each step: how many ids to keep, once a stop string is complete
    decode_stream  while it runs: the whole characters that no stop string can take back
    final_text     once it has ended: the text before its end

If an answer's reasoning is split off, stop strings and stop tokens within the reasoning do not
count. The answer begins behind the marker that closes the reasoning, and the newlines there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from eagle_ray.text.answer import num_begun
from eagle_ray.text.chat_format import THINK_CLOSE, THINK_OPEN, ReasoningStart

WINDOW_IDS = 8  # tokens before the first one of an answer: its text may depend on them
REPLACEMENT_CHAR = "\ufffd"  # how a decoder shows bytes that are no whole character (yet)


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Options of how output ids become text, and where the text ends.

    Attributes:
        stop_token_ids: tokens that end an output. They are not part of the text.
        min_tokens: number of first output tokens in which stop strings do not count.
        skip_special_tokens: whether to leave special tokens out of the text.
        include_stop: whether to keep the stop string, EOS or stop token that ended the output.
        stop_in_reasoning: whether stop strings and stop tokens count in reasoning, too.
        reasoning: beginning of the output (none, inside or optional reasoning), if stop strings do
            not count in reasoning that is split off.
    """

    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    skip_special_tokens: bool = True
    include_stop: bool = False
    stop_in_reasoning: bool = False
    reasoning: ReasoningStart = "none"


DEFAULT_TEXT = TextOptions()


class Detokenizer(Protocol):
    """Protocol of the part of `Tokenizer` that decodes an output and finds its end."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids, without special tokens by default."""

    def with_markers(self) -> Detokenizer:
        """Return a detokenizer whose texts keep the markers around reasoning, which are otherwise special tokens."""

    def stop_searches(self, stops: Sequence[str]) -> list[StopSearch]:
        """Return the texts in which stop strings are searched."""

    def final_text(
        self, output_ids: Sequence[int], stops: Sequence[str], options: TextOptions = DEFAULT_TEXT
    ) -> str:
        """Return an output's text up to its end."""


@dataclass(frozen=True, slots=True)
class AnswerStart:
    """The position in an output where its answer begins, after any reasoning.

    Attributes:
        num_ids: number of output ids up to the end of the closing marker.
        num_chars: number of characters that the last of these ids has behind the marker.
    """

    num_ids: int = 0
    num_chars: int = 0

    def num_before(self, text: Detokenizer, ids: Sequence[int], options: TextOptions) -> int:
        """Return how many characters of the ids' text precede the answer, including newlines behind the marker."""
        if not self.num_ids:
            return 0
        before = len(text.decode(ids[: self.num_ids], options.skip_special_tokens)) - self.num_chars
        shown = text.decode(ids, options.skip_special_tokens)
        return len(shown) - len(shown[max(0, before) :].lstrip("\n"))


WHOLE_OUTPUT = AnswerStart()


class AnswerFinder:
    """Finds where the answer begins in one growing output. Each token is decoded once."""

    def __init__(self, text: Detokenizer, options: TextOptions):
        self._reasoning = options.reasoning
        self._marked = _GrowingText(text.with_markers(), options, [THINK_CLOSE])
        # It is None once the beginning of the output is certain.
        self._beginning: str | None = "" if options.reasoning == "optional" else None
        self._num_read = 0
        self._start = WHOLE_OUTPUT if options.reasoning == "none" else None

    def find(self, output_ids: Sequence[int], is_whole: bool = False) -> AnswerStart | None:
        """Return where the answer begins, or None if that is not certain yet, or if all is reasoning.

        Args:
            is_whole: whether the output has ended, so that the beginning of a marker counts as
                answer.
        """
        while self._start is None and self._num_read < len(output_ids):
            self._num_read += 1
            self._start = self._start_at(output_ids[self._num_read - 1])
        if (
            self._start is None
            and is_whole
            and self._beginning is not None
            and not self._has_marker
        ):
            return WHOLE_OUTPUT
        return self._start

    def is_undecided_after(self, ids: Sequence[int]) -> bool:
        """Read further ids. Return whether they may still be the beginning of a marker that opens reasoning."""
        for token in ids:
            self._num_read += 1
            self._start = self._start or self._start_at(token)
        return self._start is None and self._beginning is not None

    @property
    def _has_marker(self) -> bool:
        return (self._beginning or "").lstrip().startswith(THINK_OPEN)

    def _start_at(self, token: int) -> AnswerStart | None:
        """Read the next token. Return the answer's start if the output's reasoning ends in it, or if it has none."""
        before = self._marked.tail
        piece = self._marked.grow([token])
        if self._beginning is not None:
            self._beginning += piece
            if THINK_OPEN.startswith(self._beginning.lstrip()):
                return None
            if not self._has_marker:
                return WHOLE_OUTPUT
            self._beginning = None
        _, close, after = (before + piece).partition(THINK_CLOSE)
        return AnswerStart(self._num_read, len(after)) if close else None


@dataclass(frozen=True, slots=True)
class StopPlace:
    """A stop string found in an output's text, from character `start` to `end`."""

    search: StopSearch
    ids: Sequence[int]
    text: str
    start: int
    end: int
    options: TextOptions

    def order(self) -> tuple[int, int, bool]:
        """Return a sort key by which the stop string that ends first comes first, whether or not
        its text shows special tokens."""
        num_left = len(self.text) - self.end  # comparable if both end in one token
        return (
            self.search.num_ids(self.ids, self.end, self.options),
            -num_left,
            not self.search.names_special,
        )

    def text_to(self, own: Detokenizer, special_ids: Collection[int]) -> str:
        """Return an output's text before the stop string, or with it if the options include it.

        Args:
            own: decodes the output. If the options skip special tokens, it leaves special_ids out,
                except shown markers.
        """
        includes_stop = self.options.include_stop
        skip = self.options.skip_special_tokens
        if self.search.text is own:
            end = self.end if includes_stop else self.start
            return self.text[:end]

        # The stop string was searched in another text, so its start is found by tokens.
        num_ids = self.search.num_ids(self.ids, self.start + 1, self.options)
        first_of_stop = self.ids[num_ids - 1]  # the token in which the stop string begins
        if skip and first_of_stop in special_ids:
            num_ids -= 1
        ids = self.ids[:num_ids]
        text = own.decode(ids, skip)
        searched = self.search.text.decode(ids, skip)

        # Characters of these tokens that belong to the stop string.
        num_inside = max(0, len(searched) - self.start)
        before = text[: max(0, len(text) - num_inside)]
        if not includes_stop:
            return before
        return before + self.text[len(searched) - num_inside : self.end]


@dataclass(frozen=True, slots=True)
class StopSearch:
    """Stop strings, and the tokenizer whose texts they are searched in.

    Attributes:
        names_special: whether the stop strings contain special tokens, so that the searched texts
            show them.
    """

    text: Detokenizer
    stops: Sequence[str]
    names_special: bool

    def first_in(
        self, ids: Sequence[int], options: TextOptions, answer: AnswerStart | None = WHOLE_OUTPUT
    ) -> StopPlace | None:
        """Return the stop string that ends first in the text of ids, past the text of the first min_tokens.

        Args:
            answer: start of the answer, before which stop strings do not count; None if there is
                none.
        """
        if answer is None:
            return None
        text = self.text.decode(ids, options.skip_special_tokens)
        num_endless = 0
        num_before = answer.num_before(self.text, ids, options)
        if options.min_tokens:
            num_endless = self._num_chars(ids[: options.min_tokens], options)
        ends = [
            place
            for stop in self.stops
            if (place := _end_of_stop(text, stop, num_endless, num_before))
        ]
        end, start = min(ends, default=(0, 0))
        return StopPlace(self, ids, text, start, end, options) if ends else None

    def num_ids(self, ids: Sequence[int], num_chars: int, options: TextOptions) -> int:
        """Return how many of the ids are needed for a text of at least num_chars characters."""
        return bisect_left(
            range(len(ids)), num_chars, key=lambda n: self._num_chars(ids[:n], options), lo=1
        )

    def _num_chars(self, ids: Sequence[int], options: TextOptions) -> int:
        """Return the whole characters in the text of ids."""
        return len(self.text.decode(ids, options.skip_special_tokens).rstrip(REPLACEMENT_CHAR))


def _end_of_stop(
    text: str, stop: str, num_endless: int, num_before: int = 0
) -> tuple[int, int] | None:
    """Return end and start of the first stop string that ends past the first num_endless characters, or None.

    Args:
        num_before: characters in which it cannot begin.
    """
    start = text.find(stop, max(num_before, num_endless - len(stop) + 1))
    return None if start < 0 else (start + len(stop), start)


class StopCheck:
    """Finds stop strings in one growing output, and stop tokens if they count from its answer on."""

    def __init__(
        self, text: Detokenizer, stops: Sequence[str], options: TextOptions = DEFAULT_TEXT
    ):
        self._answer = AnswerFinder(text, options)
        self._searches = [
            _GrowingSearch(search, options)
            for search in (text.stop_searches(stops) if stops else ())
        ]
        self._stop_ids = options.stop_token_ids if options.reasoning != "none" else frozenset()

    def __call__(self, output_ids: list[int]) -> int | None:
        """Return how many ids to keep, up to and including the first that completes a stop string, or None to continue.

        Args:
            output_ids: everything generated so far; a call may bring several new ids.
        """
        start = self._answer.find(output_ids)
        if start is None:
            return None
        ends = [search.num_ids(output_ids, start) for search in self._searches]
        if self._stop_ids:
            tokens = enumerate(output_ids[start.num_ids :], start.num_ids + 1)
            ends.append(next((end for end, token in tokens if token in self._stop_ids), None))
        return min((end for end in ends if end is not None), default=None)


class _GrowingSearch:
    """A search in one growing output. Each token is decoded once, in a window of its neighbours.

    A window, because a token's text may depend on the tokens before it, and a character may span
    several tokens.
    """

    def __init__(self, search: StopSearch, options: TextOptions):
        self._text = search.text
        self._stops = search.stops
        self._options = options
        self._window = 0  # ids before it are not decoded again
        self._read = 0  # ids before it are in _tail, or too old for any stop string
        self._seen = 0
        self._tail = ""
        self._num_endless = 0  # characters after _tail, of the first min_tokens tokens: no stop string may end in them
        self._skips_newlines = False  # they follow the marker that closed the reasoning

    def num_ids(self, output_ids: list[int], answer: AnswerStart = WHOLE_OUTPUT) -> int | None:
        """Return how many ids to keep, as StopCheck does for its searches together.

        Args:
            answer: start of the answer, before which stop strings do not count; equal in all calls.
        """
        if self._seen < answer.num_ids and self._begins_with_stop(output_ids, answer):
            return answer.num_ids
        for end in range(self._seen + 1, len(output_ids) + 1):
            if self._completes(output_ids, end):
                return end
            self._seen = end
        return None

    def _begins_with_stop(self, ids: list[int], answer: AnswerStart) -> bool:
        """Go on behind the reasoning. Return whether a stop string is complete in the token that closes it."""
        self._seen = self._read = answer.num_ids
        self._window = max(0, answer.num_ids - WINDOW_IDS)
        text = self._text.decode(ids[self._window : self._read], self._options.skip_special_tokens)
        self._tail = text[len(text) - answer.num_chars :].lstrip("\n")
        self._skips_newlines = not self._tail
        return answer.num_ids > self._options.min_tokens and any(
            stop in self._tail for stop in self._stops
        )

    def _completes(self, ids: list[int], end: int) -> bool:
        skip = self._options.skip_special_tokens
        old = self._text.decode(ids[self._window : self._read], skip)
        new = self._text.decode(ids[self._window : end], skip)
        whole = new.rstrip(REPLACEMENT_CHAR)  # without a character whose bytes are incomplete
        text = self._tail + whole[len(old) :]
        if self._skips_newlines:
            text = text.lstrip("\n")

        if end <= self._options.min_tokens:
            self._num_endless = len(text) - len(self._tail)
        else:
            first = len(self._tail) + self._num_endless
            if any(_end_of_stop(text, stop, first) for stop in self._stops):
                return True

        # The window moves on where the text ends with a whole character.
        if len(whole) == len(new) > len(old):
            self._window = self._read
            self._read = end
            longest_stop = max(map(len, self._stops))
            self._tail = text[-longest_stop:]
            self._num_endless = 0
            self._skips_newlines = self._skips_newlines and not text
        return False


class DecodeStream:
    """One output's text piece by piece. The concatenated pieces are always a prefix of `final_text`
    of the whole output.

    No piece splits a character. Text that may be the beginning of a stop string is held back.
    """

    def __init__(
        self, text: Detokenizer, stops: Sequence[str], options: TextOptions = DEFAULT_TEXT
    ):
        self._text = text
        self._stops = stops
        self._options = options
        self._own = _GrowingText(text, options, stops)
        self._searched = [
            (
                search.stops,
                self._own if search.text is text else _GrowingText(search.text, options, stops),
            )
            for search in text.stop_searches(stops)
        ]
        self._pending = ""
        self._sent = ""
        self._answer = AnswerFinder(text, options)
        self._may_be_cut_at_start = bool(stops) and options.reasoning == "optional"

    def grow(self, ids: Sequence[int]) -> str:
        """Return the new text that is certain after these further ids, which must not end the output."""
        self._pending += self._own.grow(ids)
        num_pending = len(self._pending) if self._is_undecided(ids) else 0
        for stops, growing in self._searched:
            if growing is not self._own:
                growing.grow(ids)
            # The searched text may have more special tokens than the output's, or fewer. Characters
            # that only the output's text has are pending, too.
            num_begun_chars = num_begun(growing.tail, stops)
            if num_begun_chars:
                num_hidden = max(0, self._own.num_chars - growing.num_chars)
                num_pending = max(num_pending, num_begun_chars + num_hidden)
        num_known = max(0, len(self._pending) - num_pending)
        known = self._pending[:num_known]
        self._pending = self._pending[num_known:]
        self._sent += known
        return known

    def _is_undecided(self, ids: Sequence[int]) -> bool:
        """Return whether the text so far may be an answer, in which stop strings count, or go on with a marker."""
        if self._may_be_cut_at_start:
            self._may_be_cut_at_start = self._answer.is_undecided_after(ids)
        return self._may_be_cut_at_start

    def end(self, output_ids: Sequence[int]) -> str:
        """Return the rest, once all ids of the output are known."""
        whole = self._text.final_text(output_ids, self._stops, self._options)
        return whole[len(self._sent) :]


class _GrowingText:
    """The whole characters of one growing output.

    Attributes:
        tail: the last of them, as many as the longest stop string has.
    """

    def __init__(self, text: Detokenizer, options: TextOptions, stops: Sequence[str]):
        self._text = text
        self._skip = options.skip_special_tokens
        self._max_tail = max(map(len, stops), default=0)
        self._ids: list[int] = []
        self._window = 0  # see _GrowingSearch
        self._read = 0
        self.tail = ""
        self.num_chars = 0

    def grow(self, ids: Sequence[int]) -> str:
        """Return the text that these further ids complete."""
        self._ids += ids
        old = self._text.decode(self._ids[self._window : self._read], self._skip)
        new = self._text.decode(self._ids[self._window :], self._skip)
        if new.endswith(REPLACEMENT_CHAR) or len(new) <= len(old):
            return ""
        self._window = self._read
        self._read = len(self._ids)
        piece = new[len(old) :]
        self.num_chars += len(piece)
        self.tail = (self.tail + piece)[-self._max_tail :] if self._max_tail else ""
        return piece
