"""Compile the grammars of a job's input before it runs: each once, within a time limit.

    check = check_grammars(requests_of(plan), config, GrammarCompiler(tokenizer.to_json, vocab_size, eos_ids))
    check.lines()       # ["grammars 12 in 300 rows, all compile"]

A grammar is known by the columns that say what an output must be. Those of tools are compiled with the first rows only.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle_ray.config import JobConfig
from eagle_ray.core.errors import RequestError
from eagle_ray.requests.parameters import FORMS, SamplingParams, merged_values
from eagle_ray.requests.request import Request
from eagle_ray.sampling.grammar import GrammarCompiler, GrammarSpec

CHECK_TIMEOUT_S = 60.0  # of all grammars together; one may take as long as it may in the job
MOST_SHOWN = 20  # grammars that do not compile


@dataclass
class BadGrammar:
    """A grammar that does not compile. first: the location of the first row that has it. num_rows: that have it."""

    first: str
    field: str
    error: str
    num_rows: int = 1

    def __str__(self) -> str:
        others = "" if self.num_rows == 1 else f" ({self.num_rows} rows have it)"
        return f"{self.first}: {self.field}: {self.error}{others}"


@dataclass
class GrammarCheck:
    """What was found.

    Attributes:
        num_rows: rows with a grammar.
        num_compiled: distinct grammars that were tried.
        num_skipped: rows whose grammar was not tried, for time was up.
        bad: by the grammar's digest.
    """

    num_rows: int = 0
    num_compiled: int = 0
    num_skipped: int = 0
    bad: dict[bytes, BadGrammar] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return the lines of the report; none without grammars."""
        if not self.num_rows:
            return []
        verdict = f"{len(self.bad)} do not compile" if self.bad else "all compile"
        lines = [f"grammars {self.num_compiled} in {self.num_rows} rows, {verdict}"]
        shown = list(self.bad.values())[:MOST_SHOWN]
        lines += [f"         {bad}" for bad in shown]
        if len(self.bad) > len(shown):
            lines.append(f"         and {len(self.bad) - len(shown)} others")
        if self.num_skipped:
            limit = f"within {CHECK_TIMEOUT_S:g} s"
            lines.append(f"         those of {self.num_skipped} rows were not compiled {limit}: the job will")
        return lines


def check_grammars(requests: Iterable[Request], config: JobConfig, compiler: GrammarCompiler) -> GrammarCheck:
    """Compile every grammar that the job or its rows name, each once. Bad rows are left out."""
    check = GrammarCheck()
    tried: set[bytes] = set()
    defaults = config.sampling.model_dump(include=set(FORMS))
    deadline = time.monotonic() + CHECK_TIMEOUT_S
    for request in requests:
        own = {name: request.sampling[name] for name in FORMS if request.sampling.get(name)}
        if request.error is not None or not (own or any(defaults.values())):
            continue
        values = merged_values(defaults, {name: request.sampling.get(name) for name in FORMS})
        if (spec := GrammarSpec.of(SamplingParams.of_checked(values))) is None:  # {"type": "text"}
            continue
        check.num_rows += 1
        key = hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).digest()
        if key in tried:
            if key in check.bad:
                check.bad[key].num_rows += 1
        elif time.monotonic() > deadline:
            check.num_skipped += 1
        else:
            tried.add(key)
            check.num_compiled += 1
            try:
                compiler.start(spec)
            except RequestError as error:
                check.bad[key] = BadGrammar(request.location, _field_of(own, defaults), str(error))
    return check


def _field_of(own: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Return the column or the key that holds the grammar."""
    if own:
        return f"column {next(iter(own))!r}"
    return "sampling." + next(name for name in FORMS if defaults[name])
