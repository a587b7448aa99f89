"""Compile grammars that constrain outputs (JSON schemas, regular expressions, choices, Lark) to token masks.

    compiler = GrammarCompiler(read_tokenizer, vocab_size, eos_ids)
    state = compiler.start(GrammarSpec("json_schema", '{"type": "object", ...}'))
    masks = state.tree_masks(tokens, parents)             # a mask for each node of a draft tree, by its path
    state.commit(accepted_tokens)

A mask has one bit per token. llguidance does the parsing
(https://github.com/guidance-ai/llguidance): a state is advanced along a path and rolled back, so a
tree costs one step per node. `grammar_state.py` has the states. This module compiles grammars and
may be called from several threads. It imports llguidance with the first grammar, so that an engine
without grammars runs where the library is missing.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from eagle_ray.core.errors import RequestError
from eagle_ray.core.grammar_spec import GRAMMAR_KINDS, GrammarSpec
from eagle_ray.core.grammar_state import GrammarState, Matcher, RecentTokens, first_line
from eagle_ray.core.json_text import dump_json
from eagle_ray.core.parser_budget import ParserCost
from eagle_ray.text.structured import check_schema

# A grammar may take this long to compile, its conversion included; another 10 s for a free compiler.
COMPILE_TIMEOUT_S = 10.0
MAX_COMPILING = 4  # compilations that run together, those past their time limit included
MAX_GRAMMARS = 64  # compiled grammars; a job often has one for all rows
MAX_GRAMMAR_BYTES = 256 << 20  # bytes of all of them, by estimate
BYTES_PER_CHAR = 200  # bytes per character of a compiled grammar's source
# Limits of llguidance's parser, in each mask but for the states: those of one grammar take up to
# 100 MB. Its own limits are 50,000, 200,000 and 250,000: masks of a second. A schema of 450
# optional properties takes 7,000 items.
MAX_PARSER_ITEMS = 10_000
MAX_LEXER_FUEL = 50_000
MAX_LEXER_STATES = 50_000
# Characters of what an output must be. Real ones are far smaller; at these bounds a compilation
# takes seconds.
MAX_GRAMMAR_CHARS = {
    "json_schema": 1 << 17,
    "regex": 1 << 16,
    "choice": 1 << 18,  # all texts together, as JSON
    "grammar": 1 << 16,
    "tools": 1 << 17,  # the grammar of their calls, with the tools' schemas
}
# Their conversion to Lark's syntax takes time with the square of their number.
MAX_GBNF_RULES = 1000
ANY_OBJECT = '{"type": "object"}'
GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
# Stack of a compiling thread: rules that lead to one another take 4 KB a rule; touched as it is used.
STACK_BYTES = 256 << 20
# Between the parts of a JSON text: nothing, a space, or a line break with an indent. Without a
# bound, embedded:tiny wrote white space to its last token in the first object that a schema asked
# of it.
JSON_OPTIONS: Any = {"whitespace_pattern": r"[ ]?|\n[ ]{0,16}"}


@dataclass(frozen=True, slots=True)
class _CachedGrammar:
    """A grammar in the cache, compiled or being compiled, with the parser time left for its outputs."""

    num_chars: int
    compiled: Future[Matcher] = field(default_factory=Future)
    recent: RecentTokens = field(default_factory=RecentTokens)
    cost: ParserCost = field(default_factory=ParserCost)

    @property
    def num_bytes(self) -> int:
        """Return an estimate of its memory in bytes."""
        return self.num_chars * BYTES_PER_CHAR + self.recent.num_bytes + self.cost.num_bytes


class GrammarCompiler:
    """Compiles grammars for one tokenizer and caches the most recent results, failures included.

    Args:
        read_tokenizer: returns the text of the tokenizer's tokenizer.json; called for the first
            grammar.
        vocab_size: vocabulary size of the target's logits.
        eos_ids: tokens that end an output; they are allowed where it may end.

    Attributes:
        has_time_limit: whether a compilation stops after COMPILE_TIMEOUT_S. A follower has no
            limit, since its leader has compiled the grammar in time.
    """

    def __init__(self, read_tokenizer: Callable[[], str], vocab_size: int, eos_ids: Iterable[int]):
        self._eos_ids = sorted(eos_ids)
        self._read_tokenizer = read_tokenizer
        self._made: Any = None
        self._vocab_size = vocab_size
        self._cached: OrderedDict[tuple[str, str], _CachedGrammar] = OrderedDict()
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(MAX_COMPILING)
        self.has_time_limit = True

    def start(self, spec: GrammarSpec) -> GrammarState:
        """Return the state before the first token of an output.

        Raises RequestError with code bad_grammar if the source is not a grammar of its kind, is too
        large, or is not compiled within COMPILE_TIMEOUT_S; grammar_queue_full if others take that
        long.
        """
        key = spec.name, spec.source
        with self._lock:
            known = self._cached.pop(key, None)
            cached = _CachedGrammar(len(spec.source)) if known is None else known
            self._cached[key] = cached
            self._make_room()
        if known is None:
            self._compile(spec, cached.compiled)
        try:
            return GrammarState(
                cached.compiled.result(),
                self._vocab_size,
                self._eos_ids,
                spec.after,
                cached.recent,
                spec.name,
                cached.cost,
                on_limit=partial(self._evict, key, cached),
            )
        except RequestError as error:
            if error.code == "grammar_queue_full":
                self._evict(key, cached)
            # A new one, since threads share the one that the future holds.
            raise RequestError(error.code, str(error)) from None

    @property
    def num_bytes(self) -> int:
        """Return an estimate of the cached grammars' memory in bytes."""
        return sum(cached.num_bytes for cached in self._cached.values())

    def _make_room(self) -> None:
        """Evict the least recently used grammars, but never the newest one."""
        while len(self._cached) > 1:
            if len(self._cached) <= MAX_GRAMMARS and self.num_bytes <= MAX_GRAMMAR_BYTES:
                return
            self._cached.popitem(last=False)

    def knows(self, spec: GrammarSpec) -> bool:
        """Return whether the grammar is compiled or being compiled."""
        with self._lock:
            return (spec.name, spec.source) in self._cached

    def prepare(self, spec: GrammarSpec) -> None:
        """Start compiling a grammar for later, in a thread, unless MAX_COMPILING compilations are running."""
        if not self._free.acquire(blocking=False):
            return
        try:
            start_thread(partial(self._prepare, spec))
        except RuntimeError:  # no memory for another thread: `start` raises it, if it is still so
            self._free.release()

    def _prepare(self, spec: GrammarSpec) -> None:
        try:
            with suppress(RequestError):  # `start` raises it
                self.start(spec)
        finally:
            self._free.release()

    def _evict(self, key: tuple[str, str], cached: _CachedGrammar) -> None:
        """Let the next request compile the grammar again."""
        with self._lock:
            if self._cached.get(key) is cached:
                del self._cached[key]

    def _compile(self, spec: GrammarSpec, future: Future[Matcher]) -> None:
        try:
            future.set_result(self.compile_matcher(spec))
        except RequestError as error:
            future.set_exception(error)
        except BaseException as error:
            future.set_exception(error)
            raise

    def _tokenizer(self) -> Any:
        """Return the tokenizer as the parser reads it, an LLTokenizer. Raises RequestError if it cannot."""
        if not self._eos_ids:
            raise RequestError(
                "no_tokenizer", "the target has no end-of-sequence token, which a grammar needs"
            )
        with self._lock:
            if self._made is None:
                from llguidance import LLTokenizer

                try:
                    text = self._read_tokenizer()
                    self._made = LLTokenizer(
                        text, n_vocab=self._vocab_size, eos_token=self._eos_ids
                    )
                except ValueError as error:
                    reason = first_line(str(error))
                    raise RequestError(
                        "no_tokenizer", f"grammars cannot read the target's tokenizer: {reason}"
                    ) from None
            return self._made

    def compile_matcher(self, spec: GrammarSpec) -> Matcher:
        """Compile a grammar in a thread of its own: a compilation cannot be interrupted, but need not be waited for."""
        _check_size(spec)
        tokenizer = self._tokenizer()
        timeout_s = COMPILE_TIMEOUT_S if self.has_time_limit else None
        if self.has_time_limit and not self._free.acquire(timeout=timeout_s):
            message = f"{spec.name}: {MAX_COMPILING} other grammars are being compiled. Try again"
            raise RequestError("grammar_queue_full", message)
        made: Future[Matcher] = Future()

        def compile_source() -> None:
            try:
                made.set_result(matcher_of(spec, tokenizer))
            except BaseException as error:
                made.set_exception(error)
            finally:
                self._release()

        try:
            start_thread(compile_source)
        except BaseException:
            self._release()
            raise
        try:
            return made.result(timeout_s)
        except TimeoutError:
            message = f"{spec.name}: not compiled within {COMPILE_TIMEOUT_S:g} s: simplify it"
            raise RequestError("bad_grammar", message) from None

    def _release(self) -> None:
        if self.has_time_limit:
            self._free.release()


_stack_lock = threading.Lock()


def start_thread(work: Callable[[], None]) -> None:
    """Start a thread with a large stack: llguidance recurses over the rules, and a full stack ends the process."""
    with _stack_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=work, name="eagle-ray-grammar", daemon=True).start()
        finally:
            threading.stack_size(before)


def _check_size(spec: GrammarSpec) -> None:
    """Raise RequestError for a source that would take minutes or gigabytes to compile."""
    max_chars = MAX_GRAMMAR_CHARS.get(spec.name, 0)
    if len(spec.source) > max_chars:
        message = f"must be at most {max_chars} characters, got {len(spec.source)}. Shorten it"
        raise RequestError("bad_grammar", f"{spec.name}: {message}")


def matcher_of(spec: GrammarSpec, tokenizer: Any) -> Matcher:
    """Compile a grammar to a matcher. Raises RequestError that names the parameter."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        step_max_items=MAX_PARSER_ITEMS,
        step_lexer_fuel=MAX_LEXER_FUEL,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, grammar_source(spec), log_level=0, limits=limits)
    if matcher.is_error():
        raise RequestError("bad_grammar", f"{spec.name}: {first_line(matcher.get_error())}")
    return matcher


def grammar_source(spec: GrammarSpec) -> str:
    """Convert a grammar to llguidance's own form. Raises RequestError that names the parameter."""
    from llguidance import LLMatcher

    try:
        if spec.kind in ("json_schema", "json_object"):
            schema = _schema(spec.source) if spec.kind == "json_schema" else ANY_OBJECT
            check_schema(json.loads(schema))
            return LLMatcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS)
        if spec.kind == "regex":
            return LLMatcher.grammar_from_regex(spec.source)
        if spec.kind == "choice":
            choices = " | ".join(dump_json(choice) for choice in _choices(spec.source))
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        if spec.kind == "grammar":
            return LLMatcher.grammar_from_lark(_lark(spec.source))
    except ValueError as error:
        raise RequestError("bad_grammar", f"{spec.name}: {first_line(str(error))}") from None
    raise RequestError("bad_grammar", f"{spec.name}: must be one of {', '.join(GRAMMAR_KINDS)}")


def _schema(source: str) -> str:
    """Return a JSON schema as an object: true, which allows every JSON, is {}. Raises ValueError for false."""
    if source.strip() == "false":
        raise ValueError("false allows no output. Give a schema that some JSON fits")
    return "{}" if source.strip() == "true" else source


def _lark(source: str) -> str:
    """Return a grammar in Lark's syntax: as it is, or converted from GBNF, llama.cpp's EBNF, whose rules have "::=".

    Raises ValueError if that has none named root, or is none.
    """
    if not GBNF_RULE.search(source):
        return source
    if source.count("::=") > MAX_GBNF_RULES:
        raise ValueError(
            f"must have at most {MAX_GBNF_RULES} rules of GBNF, got more. Write it in Lark's syntax"
        )
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(source)
    except RecursionError:
        raise ValueError(
            "its brackets or rules stand too deep in each other for GBNF. Write fewer in each other"
        ) from None
    except Exception as error:  # any error of the converter
        raise ValueError(f"not GBNF: {error}") from None


def _choices(source: str) -> list[str]:
    """Return a list of texts. Raises ValueError if the source is none."""
    choices = json.loads(source)
    is_filled_list = isinstance(choices, list) and len(choices) > 0
    if not is_filled_list or not all(isinstance(c, str) and c for c in choices):
        raise ValueError("must be a list of at least one string, none of them empty")
    return choices
