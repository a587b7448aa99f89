"""Grammar: which tokens may follow, so that an output is the JSON, the text or the program that was asked for.

    compiler = GrammarCompiler(tokenizer_json, vocab_size, eos_ids)
    state = compiler.start(GrammarSpec("json_schema", '{"type": "object", ...}'))
    masks = state.tree_masks(tokens, parents)             # of every node of a draft tree, by that node's own path
    state.commit(accepted_tokens)

A mask has one bit per token. llguidance does the parsing (https://github.com/guidance-ai/llguidance): a state is
advanced along a path and rolled back, so a tree costs one step per node. Where the grammar leaves no choice, tokens are
forced: they can be drafted without a head.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from eagle_ray.errors import RequestError
from eagle_ray.sampling.control_state import WORD_BITS

KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")
COMPILE_TIMEOUT_S = 10.0
MAX_KEPT = 64  # compiled grammars; a job often has one for all rows
ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What an output must be.

    Attributes:
        kind: one of KINDS.
        source: a JSON schema, a regular expression, a JSON list of strings (choice), or a Lark grammar; "" for
            json_object.
    """

    kind: str
    source: str = ""


class GrammarCompiler:
    """Compiles grammars for one tokenizer and keeps the last ones.

    Args:
        tokenizer_json: the text of the tokenizer's tokenizer.json.
        vocab_size: of the target's logits.
        eos_ids: tokens that end an output; they are allowed where it may end.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_ids: Iterable[int]):
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=sorted(eos_ids))
        self._num_words = -(-vocab_size // WORD_BITS)
        self._kept: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()

    def start(self, spec: GrammarSpec) -> GrammarState:
        """Return the state before the first token of an output.

        Raises RequestError with code bad_grammar if the source is not a grammar of its kind, is too large, or is not
        compiled within COMPILE_TIMEOUT_S.
        """
        matcher = self._kept.pop(spec, None) or self._compiled(spec)
        self._kept[spec] = matcher
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return GrammarState(matcher.deep_copy(), self._num_words)

    def _compiled(self, spec: GrammarSpec) -> LLMatcher:
        """Compile in a thread of its own: a compilation cannot be interrupted, but it need not be waited for."""
        source, made = _source(spec), []
        limits = LLParserLimits()
        thread = threading.Thread(
            target=lambda: made.append(LLMatcher(self._tokenizer, source, log_level=0, limits=limits)), daemon=True
        )
        thread.start()
        thread.join(COMPILE_TIMEOUT_S)
        if not made:
            raise RequestError("bad_grammar", f"{spec.kind}: not compiled within {COMPILE_TIMEOUT_S:g} s: simplify it")
        [matcher] = made
        if matcher.is_error():
            raise RequestError("bad_grammar", f"{spec.kind}: {_first_line(matcher.get_error())}")
        return matcher


class GrammarState:
    """Where an output is in its grammar."""

    def __init__(self, matcher: LLMatcher, num_words: int):
        self._matcher, self._num_words = matcher, num_words

    @property
    def is_complete(self) -> bool:
        """Return whether the output could end here."""
        return bool(self._matcher.is_accepting())

    @property
    def has_ended(self) -> bool:
        """Return whether nothing but an end of the sequence may follow."""
        return bool(self._matcher.is_stopped())

    def commit(self, tokens: Sequence[int]) -> None:
        """Advance by tokens of the output. Raises RequestError with code grammar_limit past the parser's limits."""
        if self._matcher.try_consume_tokens(list(tokens)) < len(tokens):
            self._check()
            raise RequestError("grammar_limit", f"the grammar does not allow token {tokens[-1]} here")
        self._check()

    def forced_tokens(self) -> list[int]:
        """Return the tokens that must come next, as the tokenizer would write them."""
        return list(self._matcher.compute_ff_tokens())

    def tree_masks(self, tokens: Sequence[int], parents: Sequence[int]) -> NDArray[np.int32]:
        """Return [N, words]: bit t % 32 of word t // 32 is set if token t may follow the node.

        Nodes that the grammar does not allow, and those below them, are never picked; their masks allow everything.

        Args:
            tokens: of the tree's nodes, parents before their children; the root is committed already.
            parents: index of each node's parent; -1 for the root.
        """
        masks = np.full((len(tokens), self._num_words), -1, np.int32)
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        self._fill(masks, 0)
        stack = [(node, True) for node in reversed(children.get(0, []))]
        while stack:
            node, is_new = stack.pop()
            if not is_new:
                self._matcher.rollback(1)
            elif self._matcher.try_consume_tokens([tokens[node]]) == 1:
                self._fill(masks, node)
                stack.append((node, False))
                stack += [(child, True) for child in reversed(children.get(node, []))]
        self._check()
        return masks

    def _fill(self, masks: NDArray[np.int32], node: int) -> None:
        row = masks[node]
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError("grammar_limit", f"the grammar cannot go on: {_first_line(self._matcher.get_error())}")


def _source(spec: GrammarSpec) -> str:
    """Return what llguidance compiles. Raises RequestError naming the kind."""
    try:
        if spec.kind in ("json_schema", "json_object"):
            return LLMatcher.grammar_from_json_schema(spec.source if spec.kind == "json_schema" else ANY_OBJECT)
        if spec.kind == "regex":
            return LLMatcher.grammar_from_regex(spec.source)
        if spec.kind == "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(c) for c in _choices(spec.source)))
        if spec.kind == "grammar":
            return LLMatcher.grammar_from_lark(spec.source)
    except ValueError as error:
        raise RequestError("bad_grammar", f"{spec.kind}: {_first_line(str(error))}") from None
    raise RequestError("bad_grammar", f"{spec.kind}: must be one of {', '.join(KINDS)}")


def _choices(source: str) -> list[str]:
    choices = json.loads(source)
    if not (isinstance(choices, list) and choices and all(isinstance(c, str) and c for c in choices)):
        raise ValueError("must be a list of at least one string, none of them empty")
    return choices


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "not a grammar")
