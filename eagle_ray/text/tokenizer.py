"""Tokenizer: text to ids and back, chat templates, and where a stop string ends an output.

>>> import eagle_ray
>>> tokenizer = Tokenizer.load(Path(eagle_ray.__file__).parent / "assets/tiny/target")
>>> tokenizer.decode(tokenizer.encode("Hello there"))
'Hello there'
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from eagle_ray.core.errors import EngineError, RequestError, one_line
from eagle_ray.storage.model_files import check_files, eos_ids_of, is_lfs_pointer
from eagle_ray.text.chat_format import TOOL_PARSERS, ChatFormat
from eagle_ray.text.chat_options import NO_OPTIONS, ChatOptions
from eagle_ray.text.chat_templates import NAMES, template_path
from eagle_ray.text.incremental_parser import num_begun
from eagle_ray.text.reasoning_parser import CLOSE
from eagle_ray.text.template_messages import unread_arguments

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
BYTE_ORDER_MARK = "\ufeff"  # that some editors write at the beginning of a file
REPLACEMENT_CHAR = "\ufffd"  # how a decoder shows bytes that are no whole character (yet)
MAX_CHARS_PER_TOKEN = 8  # a longer text, per available token, is checked by its beginning first
PROMPT_END_TOKENS = 16  # tokens at the end of a prompt that tell whether it opens the answer's reasoning
MAX_TOKENS_LOST_AT_CUT = 64  # tokens that the beginning of a text may have more than within the whole text


class ChatTemplateError(EngineError):
    """The file that model.chat_template names cannot be read, or is not Jinja."""


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How output ids become text.

    Attributes:
        stop_token_ids: tokens that end an output. The one that did is not part of the text.
        min_tokens: output tokens whose text contains no end: stop strings count from the next token on.
        skip_special_tokens: leave special tokens out of the text.
        include_stop: keep the stop string, EOS or stop token that ended the output.
    """

    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    skip_special_tokens: bool = True
    include_stop: bool = False


DEFAULT_TEXT = TextOptions()


class Tokenizer:
    """The tokenizer of one target. Use `load` to build it.

    max_model_len: in tokens; a prompt of far more is refused before it is encoded.
    chat_format: how the target's answers hold reasoning and tool calls.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None,
        eos_ids: frozenset[int],
        max_model_len: int | None = None,
        chat_format: ChatFormat | None = None,
    ):
        self._tokenizer = tokenizer
        self.chat_format = chat_format or ChatFormat()
        self._with_markers: Tokenizer | None = None
        self._hidden_ids: frozenset[int] | None = None  # special tokens that a text leaves out; None is all of them
        self._chat_template = chat_template
        self._eos_ids = eos_ids
        self._max_model_len = max_model_len
        self.encode("")  # settles the tokenizer's state, so that one thread may encode while another decodes

    @classmethod
    def load(
        cls,
        path: str | Path,
        chat_template: str = "auto",
        max_model_len: int | None = None,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> Tokenizer | None:
        """Return the tokenizer of a local target directory, or None if it has none.

        chat_template: auto (the tokenizer's own), none, a name of chat_templates, or a Jinja file. tool_parser and
        reasoning_parser: auto (by the template), none, or a name. Raises EngineError if the tokenizer cannot be read,
        and ChatTemplateError if the file of a chat template cannot be.
        """
        directory = Path(path)
        if not any((directory / name).is_file() for name in TOKENIZER_FILES):
            return None
        tokenizer = _read_tokenizer(directory)
        template = _template(tokenizer, directory, chat_template)
        chat_format = ChatFormat.of(template, tool_parser, reasoning_parser)
        eos_ids = eos_ids_of(directory, tokenizer.eos_token_id)
        return cls(tokenizer, template, eos_ids, max_model_len, chat_format)

    def with_markers(self) -> Tokenizer:
        """Return this tokenizer with texts that keep the special tokens that the answers' parsers look for."""
        if self._with_markers is None:
            shown = self.special_marker_ids().values()
            self._with_markers = self._showing(frozenset(shown))
        return self._with_markers

    def _showing(self, shown: frozenset[int]) -> Tokenizer:
        """Return this tokenizer with texts that keep these special tokens, too."""
        showing = copy.copy(self)
        hidden = frozenset(self._special_tokens) if self._hidden_ids is None else self._hidden_ids
        showing._hidden_ids = hidden - shown
        return showing

    def reasoning_end_id(self) -> int:
        """Return the token that ends an answer's reasoning. Raises RequestError if it takes several."""
        ids = self._tokenizer.encode(CLOSE, add_special_tokens=False)
        if len(ids) > 1:
            message = (
                f"the target writes {CLOSE} with {len(ids)} tokens, so an output's form cannot begin after it. Set"
            )
            raise RequestError("invalid_sampling", f"{message} model.reasoning_parser to none")
        return int(ids[0])

    def special_marker_ids(self) -> dict[str, int]:
        """Return the ids of the answers' markers that are special tokens."""
        return {token: id_ for id_, token in self._special_tokens.items() if token in self.chat_format.markers}

    @cached_property
    def _special_tokens(self) -> dict[int, str]:
        """Return the tokens that a text leaves out by default, by their ids."""
        added = self._tokenizer.added_tokens_decoder
        special = {id_: token.content for id_, token in added.items() if token.special}
        return special | dict(zip(self._tokenizer.all_special_ids, self._tokenizer.all_special_tokens, strict=True))

    def encode(self, prompt: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of raw text, with the special tokens that the tokenizer adds. Raises RequestError if it is far
        too long.

        Encoding a hundred megabytes takes gigabytes, which would kill the process, so a long text is first judged by
        its beginning.
        """
        if self._max_model_len is not None and len(prompt) > MAX_CHARS_PER_TOKEN * self._max_model_len:
            self._check_beginning(prompt, self._max_model_len)
        return self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens, verbose=False)

    def _check_beginning(self, prompt: str, most: int) -> None:
        beginning = prompt[: MAX_CHARS_PER_TOKEN * most]
        if (
            len(self._tokenizer.encode(beginning, add_special_tokens=False, verbose=False))
            > most + MAX_TOKENS_LOST_AT_CUT
        ):
            raise RequestError(
                "prompt_too_long",
                f"the prompt of {len(prompt)} characters has more tokens than there is room for: shorten it to fewer "
                f"than {most} (model.max_model_len is {most})",
            )

    @property
    def eos_ids(self) -> frozenset[int]:
        """Return the tokens that end an answer."""
        return self._eos_ids

    def info(self) -> dict[str, Any]:
        """Return the tokenizer's class, its special tokens by role and the chat template in use, as JSON."""
        special = {role: str(token) for role, token in self._tokenizer.special_tokens_map.items()}
        return {"tokenizer_class": type(self._tokenizer).__name__, **special, "chat_template": self._chat_template}

    def to_json(self) -> str:
        """Return the text of its tokenizer.json. Raises ValueError if it has no such form."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"{type(self._tokenizer).__name__} has no form as tokenizer.json")
        return str(backend.to_str())

    def encode_chat(self, messages: Sequence[dict[str, Any]], options: ChatOptions = NO_OPTIONS) -> list[int]:
        """Return the ids of a conversation, exactly as the template writes it, up to the answer. Raises
        RequestError.
        """
        return self.encode(self.render_chat(messages, options=options), add_special_tokens=False)

    def prompt_end(self, prompt_ids: Sequence[int]) -> str:
        """Return the text of the last ids of a prompt, special tokens included."""
        return self.decode_with_special(prompt_ids[-PROMPT_END_TOKENS:])

    def special_id(self, role: str) -> int | None:
        """Return the id of the special token of a role, such as "bos" or "eos", or None if there is none."""
        found: int | None = getattr(self._tokenizer, f"{role}_token_id", None)
        return found

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: ChatOptions = NO_OPTIONS,
    ) -> str:
        """Return the text of a conversation, with special tokens as text. Raises RequestError.

        add_generation_prompt: end with the beginning of an answer. continue_final_message: leave the last one open.
        options: tools and further values for the template.
        """
        if self._chat_template is None:
            raise RequestError(
                "no_chat_template",
                "messages need a chat template and the target has none: give a prompt, or set model.chat_template to "
                f"{', '.join(NAMES)} or a Jinja file",
            )
        self._check_tools(options)
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(options.tools) or None,
                    chat_template=self._chat_template,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    **options.template_kwargs,
                )
            )
        except Exception as error:  # a template is a program: over one row's messages it may raise anything
            reason = f"{type(error).__name__}: {error}"
            if (place := unread_arguments(messages)) is not None:
                reason = f"{reason}. {place} is not a JSON object: write one, such as {{}}"
            raise RequestError("bad_messages", f"the chat template refuses these messages: {reason}") from error

    def _check_tools(self, options: ChatOptions) -> None:
        if options.has_tools and not self.chat_format.reads_tools:
            raise RequestError(
                "unsupported_parameter",
                "tools: the target's chat template does not read them. Leave tools out, or set model.chat_template to "
                "a Jinja file that does",
            )
        if options.has_tools and self.chat_format.tool_parser is None:
            raise RequestError(
                "unsupported_parameter",
                "tools: the chat template does not show in which form the target writes tool calls. Set "
                f"model.tool_parser to {' or '.join(TOOL_PARSERS)}",
            )

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's entry of each id, such as "Ġthe", which is not always its text."""
        return list(self._tokenizer.convert_ids_to_tokens(list(ids)))

    def word_ids(self, word: str) -> list[list[int]]:
        """Return the ids of a word as the tokenizer writes it at the beginning of a text and after a space."""
        bare = word.lstrip() or word
        found = [self._tokenizer.encode(text, add_special_tokens=False) for text in (bare, f" {bare}")]
        return [ids for i, ids in enumerate(found) if ids and ids not in found[:i]]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids, without special tokens by default."""
        return self._decode(ids, skip_special_tokens)

    def decode_with_special(self, ids: Sequence[int]) -> str:
        """Return the text of ids with special tokens as text."""
        return self._decode(ids, skip_special_tokens=False)

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        if skip_special_tokens and self._hidden_ids is not None:
            ids = [token for token in ids if token not in self._hidden_ids]
            skip_special_tokens = False
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def stop_check(self, stops: Sequence[str], options: TextOptions = DEFAULT_TEXT) -> StopCheck | None:
        """Return a new check for one output, or None if there are no stop strings."""
        return StopCheck(self, stops, options) if stops else None

    def decode_stream(self, stops: Sequence[str], options: TextOptions = DEFAULT_TEXT) -> DecodeStream:
        """Return a new incremental decoder for one output."""
        return DecodeStream(self, stops, options)

    def stop_searches(self, stops: Sequence[str]) -> list[StopSearch]:
        """Return the texts in which stop strings are searched: those that name special tokens in a text that has them.

        All others are searched in the output's own text, which may leave special tokens out.
        """
        named = {id_ for id_, token in self._special_tokens.items() if any(token in stop for stop in stops)}
        tokens = [self._special_tokens[id_] for id_ in named]
        naming = [stop for stop in stops if any(token in stop for token in tokens)]
        plain = [stop for stop in stops if stop not in naming]
        searches = [StopSearch(self, plain, names_special=False)] if plain else []
        return searches + ([StopSearch(self._showing(frozenset(named)), naming, names_special=True)] if naming else [])

    def final_text(self, output_ids: Sequence[int], stops: Sequence[str], options: TextOptions = DEFAULT_TEXT) -> str:
        """Return an output's text up to its end: EOS, a stop token or a stop string, which options may include."""
        is_ended = output_ids and (output_ids[-1] in self._eos_ids or output_ids[-1] in options.stop_token_ids)
        ids = output_ids[:-1] if is_ended and not options.include_stop else output_ids
        found = [
            place
            for search in self.stop_searches(stops)  # a stop string that names special tokens may end in the EOS itself
            if (place := search.first_in(output_ids if search.names_special else ids, options)) is not None
        ]
        if not found:
            return self.decode(ids, options.skip_special_tokens)
        return self._text_to(found[0] if len(found) == 1 else min(found, key=StopPlace.order), options)

    def _text_to(self, place: StopPlace, options: TextOptions) -> str:
        """Return an output's text before a stop string, or with it if options include it."""
        if not place.search.names_special:
            return place.text[: place.end if options.include_stop else place.start]
        num_ids = place.search.num_ids(place.ids, place.start + 1, options)
        begin, skip = place.ids[num_ids - 1], options.skip_special_tokens  # the token in which the stop string begins
        ids = place.ids[: num_ids - 1] if skip and begin in self._special_tokens else place.ids[:num_ids]
        own, shown = self.decode(ids, skip), place.search.text.decode(ids, skip)
        num_inside = max(0, len(shown) - place.start)
        before = own[: max(0, len(own) - num_inside)]
        return before + place.text[len(shown) - num_inside : place.end] if options.include_stop else before


@dataclass(frozen=True, slots=True)
class StopPlace:
    """A stop string in the text of ids: its characters from start to end."""

    search: StopSearch
    ids: Sequence[int]
    text: str
    start: int
    end: int
    options: TextOptions

    def order(self) -> tuple[int, int, bool]:
        """Return a key by which the place that ends first is the smallest, whichever tokens its text shows."""
        num_left = len(self.text) - self.end  # comparable if both end in one token
        return self.search.num_ids(self.ids, self.end, self.options), -num_left, not self.search.names_special


@dataclass(frozen=True, slots=True)
class StopSearch:
    """Stop strings, and the tokenizer that makes the texts in which they are searched.

    Attributes:
        names_special: whether the stop strings hold special tokens, which the texts then show.
    """

    text: Tokenizer
    stops: Sequence[str]
    names_special: bool

    def first_in(self, ids: Sequence[int], options: TextOptions) -> StopPlace | None:
        """Return the stop string that ends first in the text of ids, past the text of the first min_tokens."""
        text, num_endless = self.text.decode(ids, options.skip_special_tokens), 0
        if options.min_tokens:
            num_endless = self._num_chars(ids[: options.min_tokens], options)
        found = [place for stop in self.stops if (place := _end_of_stop(text, stop, num_endless))]
        end, start = min(found, default=(0, 0))
        return StopPlace(self, ids, text, start, end, options) if found else None

    def num_ids(self, ids: Sequence[int], num_chars: int, options: TextOptions) -> int:
        """Return how many of the ids have a text of at least num_chars characters."""
        return bisect_left(range(len(ids)), num_chars, key=lambda n: self._num_chars(ids[:n], options), lo=1)

    def _num_chars(self, ids: Sequence[int], options: TextOptions) -> int:
        """Return the whole characters in the text of ids."""
        return len(self.text.decode(ids, options.skip_special_tokens).rstrip(REPLACEMENT_CHAR))


def _end_of_stop(text: str, stop: str, num_endless: int) -> tuple[int, int] | None:
    """Return end and start of the first stop string that ends past the first num_endless characters, or None."""
    start = text.find(stop, max(0, num_endless - len(stop) + 1))
    return None if start < 0 else (start + len(stop), start)


class StopCheck:
    """Finds stop strings in one growing output."""

    def __init__(self, text: Tokenizer, stops: Sequence[str], options: TextOptions = DEFAULT_TEXT):
        self._searches = [_GrowingSearch(search, options) for search in text.stop_searches(stops)]

    def __call__(self, output_ids: list[int]) -> int | None:
        """Return how many ids to keep, up to and including the first that completes a stop string, or None to continue.

        output_ids: everything generated so far; a call may bring several new ids.
        """
        found = [search.num_kept(output_ids) for search in self._searches]
        return min((num_kept for num_kept in found if num_kept is not None), default=None)


class _GrowingSearch:
    """A search in one growing output. Each token is decoded once, in a window of its neighbours.

    A window, because a token's text may depend on the tokens before it, and a character may span several tokens.
    """

    def __init__(self, search: StopSearch, options: TextOptions):
        self._text, self._stops, self._options = search.text, search.stops, options
        self._window = 0  # ids before it are not decoded again
        self._read = 0  # ids before it are in _tail, or too old for any stop string
        self._seen = 0
        self._tail = ""
        self._num_endless = 0  # characters after _tail, of the first min_tokens tokens: no stop string may end in them

    def num_kept(self, output_ids: list[int]) -> int | None:
        """Return how many ids to keep, as StopCheck does for its searches together."""
        for end in range(self._seen + 1, len(output_ids) + 1):
            if self._completes(output_ids, end):
                return end
            self._seen = end
        return None

    def _completes(self, ids: list[int], end: int) -> bool:
        skip = self._options.skip_special_tokens
        old = self._text.decode(ids[self._window : self._read], skip)
        new = self._text.decode(ids[self._window : end], skip)
        whole = new.rstrip(REPLACEMENT_CHAR)
        text = self._tail + whole[len(old) :]
        if end <= self._options.min_tokens:
            self._num_endless = len(text) - len(self._tail)
        elif any(_end_of_stop(text, stop, len(self._tail) + self._num_endless) for stop in self._stops):
            return True
        if len(whole) == len(new) > len(old):
            self._window, self._read = self._read, end
            self._tail, self._num_endless = text[-max(map(len, self._stops)) :], 0
        return False


class DecodeStream:
    """One output's text piece by piece. The concatenated pieces are always a prefix of `final_text` of the whole
    output.

    No piece splits a character. Text that may be the beginning of a stop string is held back.
    """

    def __init__(self, text: Tokenizer, stops: Sequence[str], options: TextOptions = DEFAULT_TEXT):
        self._text, self._stops, self._options = text, stops, options
        self._own = _GrowingText(text, options, stops)
        self._searched = [
            (search.stops, _GrowingText(search.text, options, stops) if search.names_special else self._own)
            for search in text.stop_searches(stops)
        ]
        self._held = ""
        self._told = ""

    def grow(self, ids: Sequence[int]) -> str:
        """Return the text that is certain after these further ids, which do not end the output."""
        self._held += self._own.grow(ids)
        num_held = 0
        for stops, growing in self._searched:
            if growing is not self._own:
                growing.grow(ids)
            num_held = max(num_held, num_begun(growing.tail, stops))  # of another text, at least as many as of this one
        known = self._held[: max(0, len(self._held) - num_held)]
        self._held = self._held[len(known) :]
        self._told += known
        return known

    def end(self, output_ids: Sequence[int]) -> str:
        """Return the rest, once all ids of the output are known."""
        whole = self._text.final_text(output_ids, self._stops, self._options)
        return whole[len(self._told) :]


class _GrowingText:
    """The whole characters of one growing output. tail: the last of them, as many as the longest stop string has."""

    def __init__(self, text: Tokenizer, options: TextOptions, stops: Sequence[str]):
        self._text, self._skip = text, options.skip_special_tokens
        self._max_tail = max(map(len, stops), default=0)
        self._ids: list[int] = []
        self._window = 0  # as in _GrowingSearch
        self._read = 0
        self.tail = ""

    def grow(self, ids: Sequence[int]) -> str:
        """Return the text that these further ids complete."""
        self._ids += ids
        old = self._text.decode(self._ids[self._window : self._read], self._skip)
        new = self._text.decode(self._ids[self._window :], self._skip)
        if new.endswith(REPLACEMENT_CHAR) or len(new) <= len(old):
            return ""
        self._window, self._read = self._read, len(self._ids)
        piece = new[len(old) :]
        self.tail = (self.tail + piece)[-self._max_tail :] if self._max_tail else ""
        return piece


def _read_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Return transformers' tokenizer of a directory. Raises EngineError."""
    try:
        check_files(directory)
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except EngineError as error:
        raise EngineError(f"the tokenizer in {directory} cannot be read: {error}") from error
    except Exception as error:  # the tokenizers library raises bare Exceptions
        names = [name for name in TOKENIZER_FILES if (directory / name).is_file()]
        raise EngineError(
            f"the tokenizer in {directory} cannot be read from {' and '.join(names)}: {one_line(error)}. Download it "
            "again if it is damaged, or install the versions of transformers and tokenizers that it needs"
        ) from error


def _template(tokenizer: PreTrainedTokenizerBase, directory: Path, chosen: str) -> str | None:
    """Return the text of a chat template without a byte order mark, or None. Raises EngineError."""
    if chosen == "auto":
        return _own_template(tokenizer, directory) if tokenizer.chat_template else None
    return None if chosen == "none" else _file_template(tokenizer, template_path(chosen))


def _own_template(tokenizer: PreTrainedTokenizerBase, directory: Path) -> str:
    """Return the target's own chat template. Raises EngineError if it is not Jinja."""
    try:
        template = tokenizer.get_chat_template().removeprefix(BYTE_ORDER_MARK)
    except ValueError as error:  # several templates, and none is the default
        raise EngineError(f"the chat template in {directory} cannot be used: {one_line(error)}") from error
    if (fault := _syntax_error(tokenizer, template)) is not None:
        raise EngineError(f"the chat template in {directory} {fault}. Set model.chat_template to a Jinja file, or none")
    return template


def _file_template(tokenizer: PreTrainedTokenizerBase, file: Path) -> str:
    """Return the chat template in a file. Raises ChatTemplateError if it cannot be read or is not Jinja."""
    if is_lfs_pointer(file):
        raise ChatTemplateError(f"{file} is a Git LFS pointer, not the file itself. Run `git lfs pull` where it lies")
    try:
        template = file.read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ChatTemplateError(f"{file} cannot be read: {one_line(error)}. Name a Jinja file in UTF-8") from error
    if (fault := _syntax_error(tokenizer, template)) is not None:
        raise ChatTemplateError(f"{file} {fault}. Correct the file, or name another one")
    return template


def _syntax_error(tokenizer: PreTrainedTokenizerBase, template: str) -> str | None:
    """Return why a template is not Jinja, or None. Other errors depend on the messages."""
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], chat_template=template, tokenize=False)
    except TemplateSyntaxError as error:
        return f"is not a Jinja template: line {error.lineno}: {one_line(error)}"
    except Exception:
        return None
    return None
