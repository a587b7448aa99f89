"""Time a grammar library over texts: python time_grammars.py LIBRARY CASES, of which LIBRARY is llguidance or xgrammar.

CASES is a JSON file: {"tokenizer": DIRECTORY, "vocab_size": N, "eos_ids": [...], "whitespace": REGEX, "cases":
[{"schema": ..., "token_ids": [...]}, ...]}. The worker prints a JSON object: versions and, of every case, microseconds
of CPU time: to compile the schema, and of every token, to fill the mask before it, to advance by it and to roll that
back, the first time that the grammar is used and a second time. A text is cut where its library refuses a token.
Needs the library, numpy and, for xgrammar, transformers.
"""

import importlib.metadata
import json
import sys
import time
from pathlib import Path

import numpy as np


class Llguidance:
    """Matchers of llguidance. Grammars allow white space as eagle_ray's do."""

    def __init__(self, settings):
        import llguidance

        self.library = llguidance
        text = (Path(settings["tokenizer"]) / "tokenizer.json").read_text()
        self.tokenizer = llguidance.LLTokenizer(text, n_vocab=settings["vocab_size"], eos_token=settings["eos_ids"])
        self.options = {"whitespace_pattern": settings["whitespace"]}
        self.mask = np.zeros(-(-settings["vocab_size"] // 32), np.int32)

    def compile(self, schema):
        matcher = self.library.LLMatcher
        compiled = matcher(self.tokenizer, matcher.grammar_from_json_schema(schema, defaults=self.options), log_level=0)
        if compiled.is_error():
            raise ValueError(compiled.get_error())
        return compiled

    def start(self, compiled):
        return compiled.deep_copy()

    def fill(self, matcher):
        matcher.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)

    def advance(self, matcher, token):
        return matcher.try_consume_tokens([token]) == 1

    def roll_back(self, matcher):
        matcher.rollback(1)


class Xgrammar:
    """Matchers of xgrammar with its own white space, as vLLM uses it, but with keys that a schema does not name."""

    def __init__(self, settings):
        import xgrammar
        from transformers import AutoTokenizer

        self.library = xgrammar
        tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"])
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=settings["vocab_size"], stop_token_ids=settings["eos_ids"]
        )
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        self.masks = xgrammar.allocate_token_bitmask(1, settings["vocab_size"])
        self.mask = self.masks[0].numpy()

    def compile(self, schema):
        return self.compiler.compile_json_schema(schema, strict_mode=False)

    def start(self, compiled):
        return self.library.GrammarMatcher(compiled)

    def fill(self, matcher):
        matcher.fill_next_token_bitmask(self.masks, 0)

    def advance(self, matcher, token):
        return matcher.accept_token(token)

    def roll_back(self, matcher):
        matcher.rollback(1)


LIBRARIES = {"llguidance": Llguidance, "xgrammar": Xgrammar}


def timed(do, *arguments):
    """Return what a call returns and the CPU time of this process that it took, in microseconds."""
    started = time.process_time_ns()
    result = do(*arguments)
    return result, (time.process_time_ns() - started) / 1e3


def follow(library, compiled, token_ids):
    """Return the times of one text, token by token."""
    matcher, start = timed(library.start, compiled)
    times = {"start": [start], "mask": [], "advance": [], "roll_back": [], "num_allowed": []}
    for token in token_ids:
        _, mask = timed(library.fill, matcher)
        num_allowed = int(np.bitwise_count(library.mask.view(np.uint32)).sum())
        is_allowed, advance = timed(library.advance, matcher, token)
        if not is_allowed:
            break
        _, roll_back = timed(library.roll_back, matcher)
        library.advance(matcher, token)
        for name, value in (("mask", mask), ("advance", advance), ("roll_back", roll_back)):
            times[name].append(value)
        times["num_allowed"].append(num_allowed)
    return times


def time_case(library, case):
    """Return the times of one schema and its text; with an error, if the library cannot compile it."""
    try:
        compiled, microseconds = timed(library.compile, json.dumps(case["schema"]))
    except Exception as error:  # whatever a library raises
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    first, again = (follow(library, compiled, case["token_ids"]) for _ in range(2))
    return {"compile": [microseconds], "first": first, "again": again}


def main(name, path):
    settings = json.loads(Path(path).read_text())
    library, microseconds = timed(LIBRARIES[name], settings)
    _, clock = timed(lambda: [timed(int) for _ in range(1000)])
    cases = [time_case(library, case) for case in settings["cases"]]
    version = importlib.metadata.version(name)
    print(json.dumps({"version": version, "tokenizer": microseconds, "clock": clock / 1000, "cases": cases}))


if __name__ == "__main__":
    main(*sys.argv[1:])
