"""Feature by drafter: what every way to draft is held to, and the page that says so.

    features()                  # each parameter of a request, in the table's order, then what an engine does besides
    claim_of(feature, method)   # "exact": outputs are plain decoding's; "refused"; "eager"; "untested"
    matrix_page()               # eagle_ray/methods/FEATURES.md, written by python -m jobs.reference_tables

The rows come from the tables of parameters and the columns from METHODS. So a new parameter without
an example is an untested one, and a new method is a drafter; tests/engine/test_feature_matrix.py
runs every example with every method.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from eagle_ray.methods.method import AUTO, METHODS
from eagle_ray.requests.parameters import CHAT, SAMPLING

Row = Mapping[str, Any]
EXACT, EAGER, REFUSED, UNTESTED = "exact", "eager", "refused", "untested"
MEANING = {
    EAGER: "no step is replayed as a CUDA graph, because the drafter works on the host",
    REFUSED: "an error before anything runs, in the words below",
    UNTESTED: "not tested",
}
PLAIN = "none"
PRE_EMPTION, REPLAYED = "pre-emption", "replayed steps"
# Drafters whose steps are not replayed as CUDA graphs, because they work on the host.
EAGER_METHODS = frozenset(["medusa", "hydra", "recycling", "lookahead"])
KINDS = {
    "dflash": ("DSpark", "DFlash2", "Domino")
}  # of heads that a method reads besides its own, columns each

_SCHEMA = {
    "type": "object",
    "properties": {"x": {"enum": [1, 27]}},
    "required": ["x"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA, "strict": True}}
_CHAT = {"messages": [{"role": "user", "content": "2 + 3?"}]}
_THINKING, _NOT_THINKING = (
    {"chat_template_kwargs": {"enable_thinking": value}} for value in (True, False)
)
_CALLING = {**_CHAT, **_NOT_THINKING, "tools": [_TOOL], "tool_choice": "required", "max_tokens": 48}
_SAMPLED = {"temperature": 1.0}
_ENDING = {"logit_bias": {"2": 5.0}}  # the end of the sequence is likely
# Rows of a job that use a parameter. What a row leaves open is tried in several ways: prompt,
# temperature and seed.
EXAMPLES: Mapping[str, Row] = {
    "temperature": {"temperature": 0.7},
    "top_p": {**_SAMPLED, "top_p": 0.7},
    "top_k": {**_SAMPLED, "top_k": 4},
    "min_p": {**_SAMPLED, "min_p": 0.3},
    "max_tokens": {"max_tokens": 3},
    "stop": {"stop": ["{d", "k"]},
    "n": {**_SAMPLED, "n": 3},
    "seed": {**_SAMPLED, "seed": 7},
    "ignore_eos": {"ignore_eos": True, **_ENDING},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 3},
    "prompt_logprobs": {"logprobs": True, "prompt_logprobs": True},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0, "logit_bias": {"5": 9.0, "9": 9.0}},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "logit_bias": {"logit_bias": {"5": 6.0, "9": -100.0, "17": 4.0}},
    "allowed_token_ids": {"allowed_token_ids": [*range(2, 40)]},
    "bad_words": {"bad_words": ["d", "C", "EO", "7", "name"]},
    "min_tokens": {"min_tokens": 9, **_ENDING},
    "thinking_budget": {**_CHAT, **_THINKING, "thinking_budget": 4},
    "stop_token_ids": {"stop_token_ids": [5, 87]},
    "include_stop_str_in_output": {"include_stop_str_in_output": True, "stop": ["{d", "k"]},
    "stop_in_reasoning": {**_CHAT, **_THINKING, "stop_in_reasoning": True, "stop": [*"aeinorstu"]},
    "skip_special_tokens": {"skip_special_tokens": False, "logit_bias": {"1": 5.0}},
    "json_schema": {"json_schema": _SCHEMA},
    "json_object": {"json_object": True},
    "regex": {"regex": "[a-n]{3}(12)+x?"},
    "choice": {"choice": ["name", "na12", "ab"]},
    "continuations": {"continuations": [[7, 9], [7, 11, 2], [5]], "max_tokens": 0},
    "score_text": {"score_text": True, "max_tokens": 0},
    "score_stride": {"score_text": True, "score_stride": 5, "max_tokens": 0},
    "grammar": {"grammar": 'start: pair ("," pair)*\npair: /[a-d]{1,3}/ ":" /[1-9][0-9]?/'},
    "response_format": {"response_format": {"type": "json_object"}},
    "tools": {**_CHAT, **_NOT_THINKING, "tools": [_TOOL]},
    "tool_choice": _CALLING,
    "parallel_tool_calls": {**_CALLING, "parallel_tool_calls": False, "logit_bias": {"55": 30.0}},
    "chat_template_kwargs": {**_CHAT, **_THINKING},
}
# What an engine does to sequences, whatever they ask.
CONDITIONS: Mapping[str, str] = {
    "mixed batch": "Greedy and sampled sequences, with and without controls and grammars, share a step.",
    "prefix reuse": "A prompt begins with blocks that the prefix cache holds.",
    "chunked prompts": "A prompt is read in several steps, next to sequences that decode.",
    PRE_EMPTION: "A sequence loses its blocks in the middle, and comes back.",
    "aborts": "Sequences are taken out in the middle, and others take their slots.",
    "empty drafts": "A plan drafts for some sequences, of any width and depth, or for none.",
    REPLAYED: "Steps run as CUDA graphs, launched before the step before is read; the rows above hold there, too.",
}
# Combinations that no drafter changes: they are refused with any, in these words.
CONTRADICTIONS: Mapping[str, tuple[Row, str]] = {
    "ignore_eos with a grammar": (
        {"ignore_eos": True, "regex": "[a-c]+"},
        "ignore_eos must be false with regex, whose end ends the output",
    ),
    "thinking_budget without messages": (
        {"prompt": "ab", "thinking_budget": 4},
        "thinking_budget: only with messages. Leave it out of requests with other prompts",
    ),
    "tools and a grammar": (
        {**_CHAT, "tools": [_TOOL], "tool_choice": "required", "regex": "[a-c]+"},
        "regex: the tools of the request say what the answer must be already. Leave one out",
    ),
}


@dataclass(frozen=True, slots=True)
class Feature:
    """A row of the page.

    Attributes:
        name: of a parameter, a condition of the engine or a contradiction.
        example: a row of a job that uses it; None for what an engine does, and for a parameter
            without one.
        refusal: the error of a contradiction.
    """

    name: str
    about: str
    example: Row | None = None
    refusal: str | None = None


def features() -> Iterator[Feature]:
    """Yield the rows: every parameter of a request, what an engine does to sequences, and what is refused."""
    for name, parameter in {**SAMPLING, **CHAT}.items():
        yield Feature(name, parameter.about, EXAMPLES.get(name))
    for name, about in CONDITIONS.items():
        yield Feature(name, about)
    for name, (example, refusal) in CONTRADICTIONS.items():
        yield Feature(name, f"Refused: {refusal}.", example, refusal)


def methods() -> list[str]:
    """Return the columns: all sources of drafts in one tree, which is the default, and every method that drafts."""
    names = [AUTO, *(name for name in METHODS if name != PLAIN)]
    return [
        column
        for name in names
        for column in (name, *(f"{name}, {kind}" for kind in KINDS.get(name, ())))
    ]


def claim_of(feature: Feature, method: str) -> str:
    """Return what the page says of a feature with a method."""
    if feature.refusal is not None:
        return REFUSED
    if feature.name in CONDITIONS:
        return EAGER if feature.name == REPLAYED and method in EAGER_METHODS else EXACT
    return UNTESTED if feature.example is None else EXACT


def matrix_page() -> str:
    """Return the page: what holds of every feature with every drafter, and the exceptions."""
    drafters = ", ".join(map(_column_title, methods()))
    abouts = [_about_row(feature) for feature in features()]
    parts = [
        "# Features and drafters",
        "Made by `python -m jobs.reference_tables`; `tests/engine/test_feature_matrix.py` runs every feature with "
        f"every drafter. Drafters are values of `speculative.method`: {drafters}. `auto`, the default, is all sources "
        "of drafts in one tree.",
        "With each of them, answers are those of plain decoding in the same engine, token for token, their text and "
        "their log-probabilities (within 1e-4) included. Steps run eager and, where the method has them, replayed. The "
        "exceptions:",
        "\n".join(["| feature | drafters | |", "|---|---|---|", *_exceptions()]),
        "## Features",
        "The examples are rows of a job; token ids are those of the test's tokenizer.",
        "\n".join(["| feature | | example |", "|---|---|---|", *abouts]),
    ]
    return "\n\n".join(parts) + "\n"


def _exceptions() -> Iterator[str]:
    """Yield a table row for each feature and each claim but EXACT."""
    names = methods()
    for feature in features():
        claims = {name: claim_of(feature, name) for name in names}
        for claim in dict.fromkeys(claims.values()):
            if claim != EXACT:
                found = [_column_title(name) for name in names if claims[name] == claim]
                drafters = "all" if len(found) == len(names) else ", ".join(found)
                yield f"| {_title(feature)} | {drafters} | {MEANING[claim]} |"


def _about_row(feature: Feature) -> str:
    example = "" if feature.example is None else f"`{json.dumps(feature.example)}`"
    cells = [_title(feature), feature.about, example]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _column_title(column: str) -> str:
    method, _, kind = column.partition(", ")
    return f"`{method}` {kind}".strip()


def _title(feature: Feature) -> str:
    return f"`{feature.name}`" if feature.name in SAMPLING or feature.name in CHAT else feature.name
