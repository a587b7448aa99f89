"""Tokenizer: text to ids and back, and prompts by the chat template of a target.

    >>> import eagle_ray
    >>> tokenizer = Tokenizer.load(Path(eagle_ray.__file__).parent / "assets/tiny/target")
    >>> tokenizer.decode(tokenizer.encode("Hello there"))
    'Hello there'

`null_tokenizer.py` stands in for targets that have no tokenizer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from eagle_ray.core.errors import EngineError, RequestError, one_line
from eagle_ray.gguf.gguf_file import GGUFFile
from eagle_ray.gguf.token_roles import end_ids
from eagle_ray.storage.model_files import (
    GENERATION_CONFIG,
    check_files,
    eos_ids_of,
    gguf_in,
    read_object,
)
from eagle_ray.text.chat_format import (
    TEMPLATE_NAMES,
    THINK_CLOSE,
    TOOL_PARSERS,
    ChatFormat,
    reasoning_at,
    unread_arguments,
)
from eagle_ray.text.chat_options import NO_OPTIONS, ChatOptions
from eagle_ray.text.chat_template import TOOL_TEMPLATE, chosen_template, own_template, own_templates
from eagle_ray.text.output_text import (
    DEFAULT_TEXT,
    REPLACEMENT_CHAR,
    WHOLE_OUTPUT,
    AnswerFinder,
    AnswerStart,
    DecodeStream,
    StopCheck,
    StopPlace,
    StopSearch,
    TextOptions,
)
from eagle_ray.text.word_cuts import cut_margin

TEMPLATE_FILE = "chat_template.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
MAX_CHARS_PER_TOKEN = 8  # a longer text, per available token, is checked by its beginning first
# Tokens at the end of a prompt that tell whether it opens the answer's reasoning.
PROMPT_END_TOKENS = 16
# Names of bytes in a byte-level vocabulary.
_BYTE_OF_CHARACTER = {character: byte for byte, character in bytes_to_unicode().items()}
MAX_DOCUMENT_CHARS = 1 << 22  # of a text without a bound of tokens
# Tokens that the beginning of a text may have more than within the whole text.
MAX_TOKENS_LOST_AT_CUT = 64


class Tokenizer:
    """The tokenizer of one target, with its chat template. Built by `load`.

    Args:
        max_model_len: maximum tokens of a sequence; a prompt of far more is refused before it is
            encoded.
        chat_format: form of reasoning and tool calls in the target's answers.
    """

    # A tokenizer with the template of conversations with tools, if that is another one.
    _tool_tokenizer: Tokenizer | None = None

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None,
        eos_ids: frozenset[int],
        max_model_len: int | None = None,
        chat_format: ChatFormat | None = None,
    ):
        self.hf_tokenizer = tokenizer
        self.chat_format = chat_format or ChatFormat()
        self._with_markers: Tokenizer | None = None
        # Special tokens that a text leaves out; None is all of them.
        self._hidden_ids: frozenset[int] | None = None
        # The tokenizer in whose texts stop strings are searched, if not in this one's.
        self._searched: Tokenizer | None = None
        self._chat_template = chat_template
        self._eos_ids = eos_ids
        self.max_model_len = max_model_len
        self._byte_ids = _byte_ids(tokenizer)
        self._adds_bos = False
        bos = self.special_id("bos")
        # This settles the tokenizer's state, so that one thread may encode while another decodes.
        first = self.encode("")[:1]
        self._adds_bos = bos is not None and first == [bos]

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

        Raises EngineError if the tokenizer cannot be read, and ChatTemplateError if the file of a
        chat template cannot be.

        Args:
            chat_template: auto (the tokenizer's own: of several, tool_use with tools and default
                without), none, a name of chat_templates or of one of the tokenizer's own, or a
                Jinja file. tool_parser and reasoning_parser: auto (by the template), none, or a
                name.
        """
        directory = Path(path)
        if not any((directory / name).is_file() for name in TOKENIZER_FILES):
            return None
        tokenizer = _read_tokenizer(directory)
        template = chosen_template(tokenizer, directory, chat_template)
        chat_format = ChatFormat.of(template, tool_parser, reasoning_parser)
        eos_ids = eos_ids_of(directory, tokenizer.eos_token_id) | _ends_of_gguf(directory)
        loaded = cls(tokenizer, template, eos_ids, max_model_len, chat_format)
        if chat_template == "auto" and TOOL_TEMPLATE in own_templates(tokenizer):
            template = own_template(tokenizer, directory, TOOL_TEMPLATE)
            loaded._tool_tokenizer = loaded._with_template(
                template, ChatFormat.of(template, tool_parser, reasoning_parser)
            )
        return loaded

    def for_chat(self, options: ChatOptions | None) -> Tokenizer:
        """Return this tokenizer with the template and parsers for conversations with these options."""
        if options is None or not options.has_tools or self._tool_tokenizer is None:
            return self
        return self._tool_tokenizer

    def _with_template(self, template: str, chat_format: ChatFormat) -> Tokenizer:
        changed = copy.copy(self)
        changed._chat_template = template
        changed.chat_format = chat_format
        changed._with_markers = None
        return changed

    def with_markers(self) -> Tokenizer:
        """Return a tokenizer whose decoded texts keep the special tokens that answers' parsers look for."""
        if self._with_markers is None:
            shown = self.special_marker_ids().values()
            self._with_markers = self._showing(frozenset(shown))
        return self._with_markers

    def _showing(self, shown: frozenset[int]) -> Tokenizer:
        """Return this tokenizer with texts that keep these special tokens, too."""
        showing = copy.copy(self)
        hidden = frozenset(self._special_tokens) if self._hidden_ids is None else self._hidden_ids
        showing._hidden_ids = hidden - shown
        showing._searched = self._searched or self
        return showing

    def reasoning_end_id(self) -> int:
        """Return the token that ends an answer's reasoning. Raises RequestError if that takes several tokens."""
        ids = self.hf_tokenizer.encode(THINK_CLOSE, add_special_tokens=False)
        if len(ids) > 1:
            raise RequestError(
                "invalid_sampling",
                f"the target writes {THINK_CLOSE} with {len(ids)} tokens, so an output's form cannot begin after it. "
                "Set model.reasoning_parser to none",
            )
        return int(ids[0])

    def special_marker_ids(self) -> dict[str, int]:
        """Return the ids of answers' markers that are special tokens, or that a grammar treats as such.

        llguidance never reads an added token in angle brackets as text, whatever the tokenizer says
        of it. Qwen 3's <tool_call> and <think> are such tokens.
        """
        added = {
            id_: token.content for id_, token in self.hf_tokenizer.added_tokens_decoder.items()
        }
        in_brackets = {
            id_: token
            for id_, token in added.items()
            if token.startswith("<") and token.endswith(">")
        }
        tokens = in_brackets | self._special_tokens
        return {token: id_ for id_, token in tokens.items() if token in self.chat_format.markers}

    @cached_property
    def _special_tokens(self) -> dict[int, str]:
        """Return the tokens that a text leaves out by default, by their ids."""
        added = self.hf_tokenizer.added_tokens_decoder
        special = {id_: token.content for id_, token in added.items() if token.special}
        return special | dict(
            zip(
                self.hf_tokenizer.all_special_ids, self.hf_tokenizer.all_special_tokens, strict=True
            )
        )

    def encode(self, prompt: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of raw text, with the special tokens that the tokenizer adds. Raises
        RequestError if it is far too long.

        A text that begins with the BOS token itself, as a rendered chat does, gets no second one.
        Encoding a hundred megabytes takes gigabytes, which would kill the process, so a long text
        is first judged by its beginning.
        """
        self.check_length(prompt)
        return self._ids(prompt, add_special_tokens)

    def check_length(self, prompt: str) -> None:
        """Raise RequestError for a text that is far too long to encode."""
        if (
            self.max_model_len is not None
            and len(prompt) > MAX_CHARS_PER_TOKEN * self.max_model_len
        ):
            self._check_beginning(prompt, self.max_model_len)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Return the ids of each text as `encode` does, on several threads, without a check of lengths."""
        if not texts:
            return []
        encoded = self.hf_tokenizer(
            list(texts),
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        pairs = zip(texts, encoded, strict=True)
        return [self._without_second_bos(text, ids, add_special_tokens) for text, ids in pairs]

    @cached_property
    def cut_margin(self) -> int | None:
        """Return how many characters must follow a cut between words (see `word_cuts`); None if
        cuts are not possible."""
        try:
            return cut_margin(self.to_json())
        except ValueError:
            return None

    def num_tokens_within(self, text: str, num_chars: int, add_special_tokens: bool) -> int:
        """Return how many of a text's tokens end within its first characters, special tokens included."""
        encoded = self.hf_tokenizer(
            text, add_special_tokens=add_special_tokens, return_offsets_mapping=True, verbose=False
        )
        ends = [end for _, end in encoded["offset_mapping"]]
        return next((i for i, end in enumerate(ends) if end > num_chars), len(ends))

    def encode_document(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text that may exceed the model's length. Raises RequestError."""
        if len(text) > MAX_DOCUMENT_CHARS:
            raise RequestError(
                "prompt_too_long",
                f"the document has {len(text)} characters: divide it into parts of at most {MAX_DOCUMENT_CHARS}",
            )
        return self._ids(text, add_special_tokens)

    def _ids(self, prompt: str, add_special_tokens: bool) -> list[int]:
        ids = self.hf_tokenizer.encode(prompt, add_special_tokens=add_special_tokens, verbose=False)
        return self._without_second_bos(prompt, ids, add_special_tokens)

    def _without_second_bos(
        self, prompt: str, ids: list[int], add_special_tokens: bool
    ) -> list[int]:
        is_twice = add_special_tokens and self._adds_bos and ids[:1] == ids[1:2]
        return ids[1:] if is_twice and prompt.startswith(str(self.hf_tokenizer.bos_token)) else ids

    def _check_beginning(self, prompt: str, max_tokens: int) -> None:
        beginning = prompt[: MAX_CHARS_PER_TOKEN * max_tokens]
        if (
            len(self.hf_tokenizer.encode(beginning, add_special_tokens=False, verbose=False))
            > max_tokens + MAX_TOKENS_LOST_AT_CUT
        ):
            raise RequestError(
                "prompt_too_long",
                f"the prompt of {len(prompt)} characters has more tokens than there is room for: shorten it to fewer "
                f"than {max_tokens} (model.max_model_len is {max_tokens})",
            )

    @property
    def has_text(self) -> bool:
        """Return whether the tokenizer can decode ids to text."""
        return True

    @property
    def eos_ids(self) -> frozenset[int]:
        """Return the tokens that end an answer."""
        return self._eos_ids

    def info(self) -> dict[str, Any]:
        """Return the tokenizer's class, its special tokens by role and the chat template in use, as JSON."""
        special = {role: str(token) for role, token in self.hf_tokenizer.special_tokens_map.items()}
        return {
            "tokenizer_class": type(self.hf_tokenizer).__name__,
            **special,
            "chat_template": self._chat_template,
        }

    def to_json(self) -> str:
        """Return the tokenizer in the format of tokenizer.json. Raises ValueError if it has no such form."""
        backend = getattr(self.hf_tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"{type(self.hf_tokenizer).__name__} has no form as tokenizer.json")
        return str(backend.to_str())

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], options: ChatOptions = NO_OPTIONS
    ) -> list[int]:
        """Return the ids of a conversation as the template renders it, up to the answer. Raises RequestError."""
        return self.encode(self.render_chat(messages, options=options), add_special_tokens=False)

    def prompt_end(self, prompt_ids: Sequence[int]) -> str:
        """Return the text of the last ids of a prompt, special tokens included."""
        return self.decode_with_special(prompt_ids[-PROMPT_END_TOKENS:])

    def special_id(self, role: str) -> int | None:
        """Return the id of the special token for a role, such as "bos" or "eos", or None if there is none."""
        special_id: int | None = getattr(self.hf_tokenizer, f"{role}_token_id", None)
        return special_id

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: ChatOptions = NO_OPTIONS,
    ) -> str:
        """Render a conversation by the chat template, with special tokens as text. Raises RequestError.

        Args:
            add_generation_prompt: whether to end with the beginning of an answer.
            continue_final_message: whether to leave the last message open, to be continued.
            options: tools and further values for the template.
        """
        if (chosen := self.for_chat(options)) is not self:
            return chosen.render_chat(
                messages, add_generation_prompt, continue_final_message, options
            )
        if self._chat_template is None:
            raise RequestError(
                "no_chat_template",
                "messages need a chat template and the target has none: give a prompt, or set model.chat_template to "
                f"{', '.join(TEMPLATE_NAMES)} or a Jinja file",
            )
        self._check_tools(options)
        try:
            return str(
                self.hf_tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(options.tools) or None,
                    chat_template=self._chat_template,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    **options.template_kwargs,
                )
            )
        except Exception as error:
            # A template is a program: over one row's messages it may raise anything.
            reason = f"{type(error).__name__}: {error}"
            if (place := unread_arguments(messages)) is not None:
                reason = f"{reason}. {place} is not a JSON object: write one, such as {{}}"
            raise RequestError(
                "bad_messages", f"the chat template refuses these messages: {reason}"
            ) from error

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
        """Return the vocabulary's string of each id, such as "Ġthe", which may differ from its text."""
        return list(self.hf_tokenizer.convert_ids_to_tokens(list(ids)))

    def word_ids(self, word: str) -> list[list[int]]:
        """Return the ids of a word in two forms: at the beginning of a text, and after a space."""
        bare = word.lstrip() or word
        spellings = [
            self.hf_tokenizer.encode(text, add_special_tokens=False) for text in (bare, f" {bare}")
        ]
        return [ids for i, ids in enumerate(spellings) if ids and ids not in spellings[:i]]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids, without special tokens by default."""
        return self._decode(ids, skip_special_tokens)

    def decode_with_special(self, ids: Sequence[int]) -> str:
        """Return the text of ids with special tokens as text."""
        return self._decode(ids, skip_special_tokens=False)

    def token_text(self, token: int) -> str:
        """Return the text of one token, in which bytes that are no whole character become surrogates (PEP 383).

        So `text.encode(errors="surrogateescape")` gives the token's bytes; a character may take the
        bytes of several tokens.
        """
        text = self.decode_with_special([token])
        if REPLACEMENT_CHAR not in text:
            return text
        written = self._own_bytes(token)
        return text if written is None else written.decode(errors="surrogateescape")

    def _own_bytes(self, token: int) -> bytes | None:
        """Return the bytes that a token's entry in the vocabulary stands for; None if it stands for text."""
        if token in self._byte_ids:
            return bytes([self._byte_ids.index(token)])
        [entry] = self.token_strings([token])
        values = [_BYTE_OF_CHARACTER.get(character) for character in entry]
        if None in values:
            return None
        return bytes(value for value in values if value is not None)

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        if skip_special_tokens and self._hidden_ids is not None:
            ids = [token for token in ids if token not in self._hidden_ids]
            skip_special_tokens = False
        text = self._own_text(ids, skip_special_tokens)
        if REPLACEMENT_CHAR in text and self._byte_ids:
            shown = [
                token
                for token in ids
                if not (skip_special_tokens and token in self._special_tokens)
            ]
            text = self._own_text(self._with_whole_characters(shown), skip_special_tokens)
        return text

    def _own_text(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(
            self.hf_tokenizer.decode(
                list(ids),
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    def _with_whole_characters(self, ids: Sequence[int]) -> list[int]:
        """Return ids in which bytes that are no character stand as those of the replacement character.

        If one byte of a run of byte tokens is no character, the tokenizers library shows none of
        the run's characters.
        """
        values = {id_: byte for byte, id_ in enumerate(self._byte_ids)}
        written: list[int] = []
        for is_bytes, run in groupby(ids, values.__contains__):
            if is_bytes:
                characters = bytes(values[token] for token in run).decode(errors="replace")
                written += [self._byte_ids[byte] for byte in characters.encode()]
            else:
                written += run
        return written

    def stop_check(
        self, stops: Sequence[str], options: TextOptions = DEFAULT_TEXT
    ) -> StopCheck | None:
        """Return a new stop check for one output; None without stop strings, and without stop
        tokens that spare reasoning."""
        has_stop_ids = bool(options.stop_token_ids) and options.reasoning != "none"
        return StopCheck(self, stops, options) if stops or has_stop_ids else None

    def decode_stream(
        self, stops: Sequence[str], options: TextOptions = DEFAULT_TEXT
    ) -> DecodeStream:
        """Return a new incremental decoder for one output."""
        return DecodeStream(self, stops, options)

    def stop_searches(self, stops: Sequence[str]) -> list[StopSearch]:
        """Return the texts in which stop strings are searched: those that name special tokens in a text that has them.

        All others are searched in the output's own text, which may leave special tokens out. If
        this tokenizer shows the markers of an answer's parts, it is still the text without them, so
        that text and parts end in one place.
        """
        named = {
            id_
            for id_, token in self._special_tokens.items()
            if any(token in stop for stop in stops)
        }
        tokens = [self._special_tokens[id_] for id_ in named]
        naming = [stop for stop in stops if any(token in stop for token in tokens)]
        plain = [stop for stop in stops if stop not in naming]
        searched = self._searched or self
        searches = [StopSearch(searched, plain, names_special=False)] if plain else []
        if naming:
            searches.append(
                StopSearch(searched._showing(frozenset(named)), naming, names_special=True)
            )
        return searches

    def final_text(
        self, output_ids: Sequence[int], stops: Sequence[str], options: TextOptions = DEFAULT_TEXT
    ) -> str:
        """Return an output's text up to its end. The options say whether EOS, stop token or stop
        string are included."""
        answer: AnswerStart | None = WHOLE_OUTPUT
        if options.reasoning != "none" and (stops or options.stop_token_ids):
            answer = AnswerFinder(self, options).find(output_ids, is_whole=True)
        has_answer_token = answer is not None and len(output_ids) > answer.num_ids
        is_stopped = has_answer_token and output_ids[-1] in options.stop_token_ids
        is_ended = output_ids and (output_ids[-1] in self._eos_ids or is_stopped)
        ids = output_ids[:-1] if is_ended and not options.include_stop else output_ids
        ends = [
            place
            for search in self.stop_searches(
                stops
            )  # a stop string that names special tokens may end in the EOS itself
            if (
                place := search.first_in(
                    output_ids if search.names_special else ids, options, answer
                )
            )
            is not None
        ]
        if not ends:
            return self.decode(ids, options.skip_special_tokens)
        place = ends[0] if len(ends) == 1 else min(ends, key=StopPlace.order)
        return place.text_to(self, self._special_tokens)


def options_of_answer(
    options: TextOptions,
    chat_options: ChatOptions | None,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
) -> TextOptions:
    """Return the options with the beginning of the answer filled in, if stop strings do not count in reasoning.

    Args:
        chat_options: chat options of an answer to messages; None for other prompts, whose outputs
            have no reasoning.
    """
    parser = tokenizer.chat_format.reasoning_parser
    if chat_options is None or parser is None or options.stop_in_reasoning:
        return options
    return replace(options, reasoning=reasoning_at(parser, tokenizer.prompt_end(prompt_ids)))


def _read_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Return transformers' tokenizer of a directory. Raises EngineError."""
    try:
        check_files(directory)
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        if not tokenizer.chat_template:  # models of more than text have it in a file of their own
            tokenizer.chat_template = read_object(directory, TEMPLATE_FILE).get("chat_template")
        return tokenizer
    except EngineError as error:
        raise EngineError(f"the tokenizer in {directory} cannot be read: {error}") from error
    except Exception as error:  # the tokenizers library raises bare Exceptions
        names = [name for name in TOKENIZER_FILES if (directory / name).is_file()]
        raise EngineError(
            f"the tokenizer in {directory} cannot be read from {' and '.join(names)}: {one_line(error)}. Download it "
            "again if it is damaged, or install the versions of transformers and tokenizers that it needs"
        ) from error


def _ends_of_gguf(directory: Path) -> frozenset[int]:
    """Return the token ids that end an answer, from a target's GGUF file; none if a generation config has them."""
    file = None if (directory / GENERATION_CONFIG).is_file() else gguf_in(directory)
    metadata = {} if file is None else GGUFFile.open(file).metadata
    return frozenset(end_ids(metadata)) if "tokenizer.ggml.token_type" in metadata else frozenset()


def _byte_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that stand for one byte each, such as <0xE6>, by their bytes; none if there are not all."""
    vocabulary = tokenizer.get_vocab()
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    ids = [vocabulary[name] for name in names if name in vocabulary]
    are_bytes = len(ids) == len(names) and tokenizer.decode(ids[-1:]) == REPLACEMENT_CHAR
    return ids if are_bytes else []
