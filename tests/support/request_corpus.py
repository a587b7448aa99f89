"""Requests that are wrong in one way each, and their neighbours that are not: what each entry point makes of them.

    >>> CORPUS["sampling"].cases[0].changes
    {'temperature': -0.1}

A case changes a plain request of each entry point. `outcomes` gives every case to every entry point
of its group.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle_ray import LLM, SamplingParams
from eagle_ray.requests.parameters import SAMPLING
from tests.support.entry_points import (
    CHAT_OPTIONS,
    URLS,
    EntryPoints,
    RequestResult,
    engine_values,
    json_line,
    shorten,
)

Json = dict[str, Any]
REQUESTS_FILE = Path(__file__).with_name("requests.txt")
MAX_OUTCOME_CHARS = 400  # of one refusal
DEEP = 250  # lists in each other, more than are read
HALF = "cut \ud83d"  # half a surrogate pair
HI = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = "<|user|>What is the capital of France?<|end|><|assistant|>"
LIMITS = {"max_tokens": 2, "seed": 1}
SCORED = ("continuations", "score_text")
BASES: dict[str, Json] = {
    "row": {"id": "r", "prompt": PROMPT, **LIMITS},
    "prompt": {"prompt": PROMPT, **LIMITS},
    "python": {},
    "config": {},
    "chat": {"messages": HI, **LIMITS},
    "completions": {"prompt": PROMPT, **LIMITS},
    "responses": {"input": PROMPT, "max_output_tokens": 2, "seed": 1},
    "tokenize": {"messages": HI},
}
BATCH = ("batch chat", "batch completions", "batch responses")
HTTP = ("chat", "completions", "responses")
PYTHON = ("prompt", "python")
ALL = ("row", *PYTHON, "config", *BATCH, *HTTP, "line chat")
REQUESTS = tuple(entry_point for entry_point in ALL if entry_point != "config")
CHATS = ("row", *PYTHON, "config", "batch chat", "batch responses", "chat", "responses")
MESSAGES = ("row", *PYTHON, "batch chat", "chat", "line chat", "tokenize")
PROMPTS = ("row", *PYTHON, "batch completions", "completions", "tokenize")


@dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
        changes: what it has besides a plain request, or in place of it.
        raw: JSON text of further keys, for what no dictionary can hold.
    """

    changes: Json
    raw: str = ""

    @property
    def name(self) -> str:
        return json_line(self.changes) if not self.raw else f"raw {json_line(self.raw)[1:-1]}"

    @property
    def is_scored(self) -> bool:
        """Whether nothing is generated, so that a request may not have LIMITS."""
        return any(map(self.changes.get, SCORED))

    def request(self, base: Json) -> Json:
        limits = (*LIMITS, "max_output_tokens") if self.is_scored else ()
        return {name: base[name] for name in base if name not in limits} | self.changes

    def body(self, base: Json) -> bytes:
        text = json.dumps(self.request(base))
        return (f"{text[:-1]}, {self.raw}}}" if self.raw else text).encode()


@dataclass(frozen=True)
class Group:
    """Cases, and the entry points that each of them goes through. is_chat: the plain row is one of messages."""

    entry_points: tuple[str, ...]
    cases: tuple[Case, ...]
    is_chat: bool = False


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def read_cases(section: str) -> tuple[Case, ...]:
    """Return the cases of a section of requests.txt."""
    text = REQUESTS_FILE.read_text().partition(f"[{section}]\n")[2].partition("\n[")[0]
    found: list[Case] = []
    for line in text.strip().replace("\n    ", " ").splitlines():
        name, _, values = line.partition(": ")
        for value in map(_expanded, json.loads(f"[{values}]")):
            found.append(Case(value if name == "several" else {name: value}))
    return tuple(found)


def _expanded(value: Any) -> Any:
    """Return a value with what requests.txt writes in short."""
    if value == "@deep":
        return nested(DEEP)
    if value == "@deep text":
        return json.dumps(nested(DEEP))
    if isinstance(value, str) and (repeated := re.fullmatch(r"@(\d+) (.)", value)):
        return int(repeated[1]) * repeated[2]
    if (
        isinstance(value, list)
        and value
        and isinstance(value[0], str)
        and re.fullmatch(r"@\d+", value[0])
    ):
        return int(value[0][1:]) * [_expanded(value[1])]
    if isinstance(value, list):
        return [_expanded(one) for one in value]
    return (
        {_expanded(k): _expanded(v) for k, v in value.items()} if isinstance(value, dict) else value
    )


FAULTS = tuple(
    Case({}, raw)
    for raw in (
        '"max_tokens": 1, "max_tokens": 2',
        '"metadata": {"a": "b", "a": "c"}',
        '"temperature": NaN',
        '"temperature": -Infinity',
        '"temperature": 1e999',
        '"user": ' + "9" * 5000,
        '"user": "\\ud83d"',
        '"\\ud83d": 1',
        '"user": ' + "[" * 250 + "]" * 250,
        '"user": "\t"',
        '"user": tru',
        '"": 1',
    )
)
CORPUS = {
    "sampling": Group(ALL, read_cases("sampling")),
    "structured": Group(ALL, read_cases("structured")),
    "chat_options": Group(CHATS, read_cases("chat_options"), is_chat=True),
    "messages": Group(MESSAGES, read_cases("messages"), is_chat=True),
    "prompts": Group(PROMPTS, read_cases("prompts")),
    "inputs": Group(("responses", "batch responses"), read_cases("inputs")),
    "unsupported": Group(REQUESTS, read_cases("unsupported")),
    "labels": Group(REQUESTS, read_cases("labels")),
    "json": Group(("row", "batch chat", *HTTP[:2], "line chat", "tokenize"), FAULTS),
}
LINE = {"custom_id": "a", "method": "POST", "url": URLS["chat"], "body": BASES["chat"]}
WRONG_LINES: tuple[Any, ...] = (
    *({name: value for name, value in LINE.items() if name != absent} for absent in LINE),
    *(LINE | {name: value} for name in LINE for value in (None, "", 5, [], {})),
    LINE | {"method": "GET"},
    LINE | {"url": "/v1/embeddings"},
    LINE | {"url": URLS["completions"]},
    LINE | {"other": 1},
    LINE | {"custom_id": "x" * 513},
    LINE | {"custom_id": HALF},
    [LINE],
)
LINES = (
    *(json.dumps(line).encode() for line in (LINE, *WRONG_LINES)),
    b'{"custom_id": "a", "custom_id": "b"}',
    b"no JSON",
    b"\xff\xfe",
    b'\xef\xbb\xbf{"custom_id": "a"}',
    b"null",
)


def python_calls() -> dict[str, Any]:
    """Return wrong calls of Python, and right ones with values of other libraries, by their text."""
    calls = (
        "SamplingParams('x')",
        "SamplingParams(temperature=np.float32(0.5), top_k=np.int64(5), stop=(' cap',), stop_token_ids={5})",
        "SamplingParams(max_tokens=torch.tensor(3), allowed_token_ids=np.array([5, 6]))",
        "SamplingParams(temperature=-1, top_p=5, typo=1)",
        "SamplingParams(logit_bias={5: 1, np.int64(6): 2})",
        "llm.generate(5)",
        "llm.generate(None)",
        "llm.generate([])",
        "llm.generate(b'Hi')",
        "llm.generate([b'Hi'])",
        "llm.generate(['Hi', 5])",
        "llm.generate(['Hi', None])",
        "llm.generate([[5, 6], 'Hi'])",
        "llm.generate({'prompt': 'Hi', 'multi_modal_data': {'image': 1}})",
        "llm.generate({'prompt': 'Hi', 'multi_modal_data': {}})",
        "llm.generate({'text': 'Hi'})",
        "llm.generate({5: 'Hi', 'prompt': 'Hi'})",
        "llm.generate('Hi', 5)",
        "llm.generate('Hi', {'max_tokens': 2})",
        "llm.generate('Hi', [SamplingParams(), SamplingParams()])",
        "llm.generate(['Hi', 'Ho'], [SamplingParams()])",
        "llm.generate({'prompt': 'Hi', 'top_p': 5}, raise_errors=True)",
        "llm.generate('Hi', typo=1)",
        "llm.chat('Hi')",
        "llm.chat(HI[0])",
        "llm.chat([HI, 5])",
        "llm.chat([HI, HI[0]])",
        "llm.chat(5)",
        "LLM('embedded:tiny', typo=1)",
        "LLM('embedded:tiny', slot=1)",
        "LLM('embedded:tiny', slots=0)",
        "LLM('embedded:tiny', seed='x')",
        "LLM('embedded:none')",
    )
    return {call: lambda llm, call=call: _evaluated(call, llm) for call in calls}


def _evaluated(call: str, llm: Any) -> Any:
    names = {
        "llm": llm,
        "LLM": LLM,
        "SamplingParams": SamplingParams,
        "HI": HI,
        "np": np,
        "torch": torch,
    }
    value = eval(call, names)
    return llm.chat(HI, value) if isinstance(value, SamplingParams) else value


def _line_name(line: bytes) -> str:
    text = line.decode("utf-8", "backslashreplace").replace(json.dumps(BASES["chat"]), "BODY")
    return shorten(text.encode("ascii", "backslashreplace").decode(), MAX_OUTCOME_CHARS)


def python_outcomes(entry_points: EntryPoints) -> dict[str, dict[str, str]]:
    """Return what each of python_calls ends in."""
    calls = python_calls()
    answers = entry_points.python(list(calls.values()))
    table: dict[str, dict[str, str]] = {}
    for call, answered in zip(calls, answers, strict=True):
        values = [
            engine_values(sequence) | {"seed": None} for sequence in answered.sequences
        ]  # a seed is of a prompt's id
        table[call] = {"python": _one_line(answered.refusal or f"ok {json_line(values)}")}
    return table


def outcomes(entry_points: EntryPoints, group: Group) -> dict[str, dict[str, str]]:
    """Return for each case what each entry point made of it. Entry points that made the same of it stand together."""
    found = {
        entry_point: _outcomes_at(entry_point, entry_points, group)
        for entry_point in group.entry_points
    }
    table: dict[str, dict[str, str]] = {}
    for i, case in enumerate(group.cases):
        by_outcome: dict[str, list[str]] = {}
        for entry_point in group.entry_points:
            if found[entry_point][i] is not None:
                by_outcome.setdefault(found[entry_point][i], []).append(entry_point)
        assert case.name not in table, case.name
        table[case.name] = {
            _joined(together, group): outcome for outcome, together in by_outcome.items()
        }
    return table


def _joined(entry_points: list[str], group: Group) -> str:
    """Return the names of entry points, with one name for all, for all of batch files and for all of HTTP."""
    if len(entry_points) == len(group.entry_points) > 1:
        return "all"
    for name, several in (("batch", BATCH), ("HTTP", (*HTTP, "line chat"))):
        if {*several} <= {*entry_points}:
            entry_points = [
                name if entry_point == several[0] else entry_point
                for entry_point in entry_points
                if entry_point not in several[1:]
            ]
    return ", ".join(entry_points)


def line_outcomes(entry_points: EntryPoints) -> dict[str, dict[str, str]]:
    """Return what a job and the endpoint make of each line of a batch file."""
    found = {
        "batch": entry_points.rows(LINES, "openai_batch"),
        "line": entry_points.batch_lines("chat", LINES),
    }
    return {
        _line_name(line): {
            entry_point: _one_line(answers[i].refusal or "ok")
            for entry_point, answers in found.items()
        }
        for i, line in enumerate(LINES)
    }


def _outcomes_at(entry_point: str, entry_points: EntryPoints, group: Group) -> list[str | None]:
    """Return the outcome of each case at one entry point; None where the entry point cannot be given such a request."""
    plain, *answers = _answers_at(entry_point, entry_points, [Case({}), *group.cases], group)
    assert plain is None or plain.refusal is None, f"{entry_point}: {plain}"
    return [
        None if answered is None else _outcome(answered, plain, case, entry_points)
        for case, answered in zip(group.cases, answers, strict=True)
    ]


def _answers_at(
    entry_point: str, entry_points: EntryPoints, given: list[Case], group: Group
) -> list[RequestResult | None]:
    kind, _, endpoint = entry_point.partition(" ")
    base = _base(endpoint or kind, group)
    if kind == "config":
        return _configured(entry_points, given, group)
    if kind == "python":
        return list(entry_points.python([_call(case, group) for case in given]))
    if kind == "prompt":
        return list(
            entry_points.python(
                [lambda llm, case=case: llm.generate(case.request(base)) for case in given]
            )
        )
    bodies = [case.body(base) for case in given]
    if kind == "row":
        return list(entry_points.rows(bodies))
    if kind == "batch":
        return list(
            entry_points.rows(
                [_line(endpoint, body, i) for i, body in enumerate(bodies)], "openai_batch", False
            )
        )
    if kind == "line":
        return list(
            entry_points.batch_lines(endpoint, [_line(endpoint, body, 0) for body in bodies])
        )
    return list(entry_points.http(entry_point, bodies))


def _base(entry_point: str, group: Group) -> Json:
    base = BASES[entry_point]
    if group.is_chat and "prompt" in base:
        return {name: value for name, value in base.items() if name != "prompt"} | {"messages": HI}
    return {"prompt": PROMPT} if entry_point == "tokenize" and not group.is_chat else base


def _line(endpoint: str, body: bytes, number: int) -> bytes:
    head = json.dumps({"custom_id": f"c{number}", "method": "POST", "url": URLS[endpoint]})
    return head[:-1].encode() + b', "body": ' + body + b"}"


def _call(case: Case, group: Group) -> Any:
    """Return a call of an LLM with the case's changes as keyword arguments, where Python has them."""

    def call(llm: Any) -> Any:
        changes = dict(case.changes)
        options = {name: changes.pop(name) for name in CHAT_OPTIONS if name in changes}
        prompt, messages = changes.pop("prompt", PROMPT), changes.pop("messages", HI)
        params = SamplingParams(**({} if case.is_scored else LIMITS) | changes)
        if options or group.is_chat:
            return llm.chat(messages, params, **options)
        return llm.generate(prompt, params)

    return call


def _configured(
    entry_points: EntryPoints, given: list[Case], group: Group
) -> list[RequestResult | None]:
    """Set the keys of the configuration; None for a case of several keys."""
    section = "chat" if group.is_chat else "sampling"
    found: list[RequestResult | None] = []
    for case in given:
        if len(case.changes) != 1:
            found.append(RequestResult(body={}) if not case.changes else None)
            continue
        [(name, value)] = case.changes.items()
        [answered] = entry_points.configured([f"{section}.{name}={json.dumps(value)}"])
        if answered.refusal is None:
            own, default = (
                getattr(getattr(one, section), name, None)
                for one in (answered.body, entry_points.default_job)
            )
            answered.body = {} if own == default else {name: own}
        found.append(answered)
    return found


def _outcome(
    answered: RequestResult, plain: RequestResult, case: Case, entry_points: EntryPoints
) -> str:
    """Return the refusal, or `ok` and how the engine's request and the answer differ from those of a plain request."""
    if answered.refusal is not None:
        return _one_line(answered.refusal)
    if not plain.sequences:
        same = answered.body == plain.body
        return "ok" if same else f"ok {json_line(answered.body)}"
    if not answered.sequences:
        return "ok, but nothing was generated"
    own, usual = (_parts(one, entry_points) for one in (answered, plain))
    if case.is_scored or ("seed" in case.changes and case.changes["seed"] is None):
        own["seed"] = usual["seed"]  # a random one, or that of the row's id
    names = dict.fromkeys((*own, *usual))
    changed = {name: own.get(name) for name in names if own.get(name) != usual.get(name)}
    if len(changed) > 1:
        changed.pop("output", None)  # it follows from the others
    return f"ok {json_line(changed)}" if changed else "ok"


def _one_line(text: str) -> str:
    text = text.replace("\n", " | ").replace(
        f"Parameters: {', '.join(SAMPLING)}", "Parameters: ..."
    )
    return shorten(text, MAX_OUTCOME_CHARS)


def _parts(answered: RequestResult, entry_points: EntryPoints) -> Json:
    first = answered.sequences[0]
    parts = engine_values(first) | {"num_sequences": len(answered.sequences)}
    prompt = entry_points.prompt_text(first)
    parts["prompt"] = prompt if len(prompt) < 200 else f"{len(first.prompt_ids)} tokens"
    parts["output"] = entry_points.llm.tokenizer.decode_with_special(first.output_ids)
    if isinstance(answered.body, str):
        parts["stream"] = True
    return parts
