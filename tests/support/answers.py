"""Answers of a few requests through every entry point, in what clients read of them.

Left out is what differs from one run to the next: ids, times, and how much drafts and caches
helped.

    >>> answers_at("chat", entry_points)["greedy"]["choices"][0]["message"]["content"]         # doctest: +SKIP
    'The capital of France is Paris.'
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from eagle_ray import SamplingParams
from tests.support.entry_points import CHAT_OPTIONS, OUTPUT_FIELDS, URLS, EntryPoints, RequestResult

Json = dict[str, Any]
QUESTION = "What is the capital of France?"
TEXT = "<|user|>Where do people speak French?<|end|><|assistant|>"
CONVERSATION = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is the capital of Spain?"},
    {"role": "assistant", "content": "Madrid."},
    {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
]
CLOSED = {"additionalProperties": False}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
} | CLOSED
PARAMETERS = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]} | CLOSED
ADD = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
# In the words of a row. Each is a question in messages, or in a prompt where its entry point has no
# messages.
REQUESTS: dict[str, Json] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "min_p": 0.01, "n": 3},
    "logprobs": {"logprobs": True, "top_logprobs": 2, "max_tokens": 4},
    "prompt logprobs": {
        "logprobs": True,
        "prompt_logprobs": True,
        "top_logprobs": 1,
        "max_tokens": 2,
    },
    "stop": {"stop": [" is"]},
    "stop kept": {"stop": [" is"], "include_stop_str_in_output": True},
    "special tokens": {"ignore_eos": True, "skip_special_tokens": False, "max_tokens": 32},
    "stop token": {"stop_token_ids": [281], "min_tokens": 12, "max_tokens": 20, "ignore_eos": True},
    "adjusted": {
        "temperature": 0.7,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "bad_words": ["Paris"],
        "logit_bias": {"473": -5},
    },
    "allowed": {"allowed_token_ids": [45, 88, 281, 322], "max_tokens": 4},
    "schema": {"json_schema": SCHEMA},
    "object": {"json_object": True, "max_tokens": 8},
    "regex": {"regex": "[A-Z][a-z]{3,9}"},
    "choice": {"choice": ["Rome", "Paris"]},
    "grammar": {"grammar": 'start: "It is " ("Rome" | "Paris")'},
    "format": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": SCHEMA},
        }
    },
    "tool": {"tools": [ADD], "tool_choice": "required", "max_tokens": 80},
    "tools": {"tools": [ADD]},
    "conversation": {"messages": CONVERSATION},
    "refused": {"top_p": 5},
}
TURNS = {"messages": None, "turns": ["Hello!", QUESTION], "n": 2, "temperature": 0.5}
ROWS: dict[str, Json] = REQUESTS | {
    "prompt": {"messages": None, "prompt": TEXT},
    "token ids": {"messages": None, "prompt_token_ids": [5, 6, 7]},
}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
CHATS: dict[str, Json] = {
    name: changes for name, changes in REQUESTS.items() if name != "prompt logprobs"
} | {
    "token ids": {"return_token_ids": True},
    "streamed": STREAMED | {"n": 2, "temperature": 0.8},
    "streamed logprobs": STREAMED | REQUESTS["logprobs"],
    "streamed tool": STREAMED | REQUESTS["tool"],
}
ONLY_CHAT = ("tools", "messages", "response_format")
COMPLETIONS: dict[str, Json] = {
    name: changes
    for name, changes in REQUESTS.items()
    if not {*changes} & {*ONLY_CHAT, "prompt_logprobs", "logprobs"}
} | {
    "format": REQUESTS["format"],
    "logprobs": {"logprobs": 2, "max_tokens": 4},
    "echo": {"echo": True, "logprobs": 1, "max_tokens": 2, "n": 2},
    "only echo": {"echo": True, "max_tokens": 0},
    "several": {"prompt": [TEXT, QUESTION]},
    "token ids": {"return_token_ids": True},
    "streamed": STREAMED | {"n": 2, "temperature": 0.8},
    "streamed echo": STREAMED | {"echo": True, "logprobs": 1, "max_tokens": 2},
}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
TEXT_FORMAT = {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA}}
FLAT_TOOL = {"type": "function", **ADD["function"]}
RESPONSES: dict[str, Json] = {
    name: changes
    for name, changes in REQUESTS.items()
    if not {*changes} & {*ONLY_CHAT, "prompt_logprobs", "logprobs", "n"}
} | {
    "logprobs": LOGPROBS | {"max_tokens": 4},
    "format": {"text": TEXT_FORMAT},
    "tool": {"tools": [FLAT_TOOL], "tool_choice": "required", "max_tokens": 80},
    "conversation": {
        "instructions": "Be short.",
        "input": [*CONVERSATION[1:3], {"role": "user", "content": QUESTION}],
    },
    "labels": {
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "top_p": 0.9,
        "parallel_tool_calls": False,
    },
    "streamed": {"stream": True},
    "streamed tool": {
        "stream": True,
        "tools": [FLAT_TOOL],
        "tool_choice": "required",
        "max_tokens": 80,
    },
}
BODIES = {"chat": CHATS, "completions": COMPLETIONS, "responses": RESPONSES}
PLAIN: Json = {"max_tokens": 20, "seed": 7}
ASKED: dict[str, Json] = {
    "row": {"messages": [{"role": "user", "content": QUESTION}]},
    "chat": {"messages": [{"role": "user", "content": QUESTION}]},
    "completions": {"prompt": TEXT},
    "responses": {"input": QUESTION},
}
OF_A_RUN = {
    "request_id",
    "row_index",
    "source_file",
    "run_id",
    "attempt",
    "prompt_tokens",
    "sample_index",
}
OF_A_REQUEST = {
    "id",
    "call_id",
    "item_id",
    "custom_id",
    "request_id",
    "created",
    "created_at",
    "completed_at",
}
OF_A_REQUEST |= {"system_fingerprint", "metrics", "cached_tokens", "cache_write_tokens"}
NUM_DECIMALS = 3  # of log-probabilities


def answers_at(entry_point: str, entry_points: EntryPoints) -> Json:
    """Return the answers of an entry point by the names of their requests."""
    return _rounded(ENTRY_POINTS[entry_point](entry_points))


def _rows(entry_points: EntryPoints) -> Json:
    lines = [
        _encoded({"id": name} | ASKED["row"] | PLAIN | changes) for name, changes in ROWS.items()
    ]
    turns = _encoded({"id": "turns"} | PLAIN | TURNS)
    answers = [
        *entry_points.rows(lines),
        *entry_points.rows([turns], **{"input.columns.turns": "turns"}),
    ]
    names = [field.name for field in OUTPUT_FIELDS]
    shown = [name for name in names[: names.index("target_model")] if name not in OF_A_RUN]
    return {
        name: [
            {column: _cell(row, column) for column in shown if row[column] is not None}
            for row in answered.body
        ]
        for name, answered in zip([*ROWS, "turns"], answers, strict=True)
    }


def _cell(row: Json, column: str) -> Any:
    return _settled(json.loads(row[column])) if column == "tool_calls" else row[column]


def _batch_lines(entry_points: EntryPoints) -> Json:
    """Return the lines that a run's rows are exported as; a line cannot ask for a stream, nor for an echo."""
    found: Json = {}
    for kind, url in URLS.items():
        lines = {
            name: _body(kind, changes)
            for name, changes in BODIES[kind].items()
            if _fits_a_line(changes)
        }
        read = [
            _encoded({"custom_id": name, "method": "POST", "url": url, "body": lines[name]})
            for name in lines
        ]
        for name, answered in zip(
            lines, entry_points.rows(read, "openai_batch", each=False), strict=True
        ):
            found[f"{kind}: {name}"] = _settled(entry_points.exported(answered.body, url))
    return found


def _fits_a_line(changes: Json) -> bool:
    return not {"stream", "echo", "return_token_ids"} & {*changes}


def _posted(kind: str, entry_points: EntryPoints) -> Json:
    requests = BODIES[kind]
    bodies = [_encoded(_body(kind, changes)) for changes in requests.values()]
    return {
        name: _http(answered)
        for name, answered in zip(requests, entry_points.http(kind, bodies), strict=True)
    }


def _body(kind: str, changes: Json) -> Json:
    body = ASKED[kind] | PLAIN | changes
    if kind == "responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    return body


def _encoded(value: Json) -> bytes:
    return json.dumps(value).encode()


def _http(answered: RequestResult) -> Any:
    if answered.refusal is not None:
        return answered.refusal
    return _events(answered.body) if isinstance(answered.body, str) else _settled(answered.body)


def _events(text: str) -> Json:
    """Return what a stream says, put together: how its text is cut depends on which drafts were accepted."""
    datas = [part.rpartition("data: ")[2] for part in text.split("\n\n") if part]
    events = [json.loads(data) for data in datas if data != "[DONE]"]
    if events[-1].get("type", "").startswith("response."):
        kinds = [event["type"] for event in events]
        return {"events": _distinct(kinds), "last": _settled(events[-1]["response"])}
    choices: Json = {}
    for event in events:
        for choice in event["choices"]:
            _add(choices.setdefault(str(choice["index"]), {}), choice.get("delta", choice), choice)
    shapes = sorted({json.dumps(_shape(event)) for event in events})
    usage = events[-1].get("usage")
    return {
        "ends": datas[-1],
        "usage": _settled(usage),
        "choices": choices,
        "shapes": [json.loads(one) for one in shapes],
    }


def _add(known: Json, delta: Json, choice: Json) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            for call in value:
                known["arguments"] = known.get("arguments", "") + call["function"].get(
                    "arguments", ""
                )
                known["function"] = call["function"].get("name", known.get("function"))
        elif name in ("content", "text", "reasoning_content") and value is not None:
            known[name] = known.get(name, "") + value
    known["finish_reason"] = choice["finish_reason"]
    for name, values in (choice.get("logprobs") or {}).items():
        known.setdefault("logprobs", {}).setdefault(name, []).extend(values or [])


def _shape(value: Any) -> Any:
    """Return the keys of a chunk without its values."""
    if isinstance(value, dict):
        return {name: _shape(inner) for name, inner in value.items()}
    return [_shape(value[0])] if isinstance(value, list) and value else ""


def _distinct(values: list[str]) -> list[str]:
    """Return the values without those that equal the one before."""
    return [value for i, value in enumerate(values) if i == 0 or value != values[i - 1]]


def _called(entry_points: EntryPoints) -> Json:
    calls = [_call(changes) for changes in REQUESTS.values()]
    answers = entry_points.python(calls)
    return {name: _outputs(answered) for name, answered in zip(REQUESTS, answers, strict=True)}


def _call(changes: Json) -> Callable[[Any], Any]:
    def call(llm: Any) -> Any:
        values = PLAIN | changes
        options = {name: values.pop(name) for name in CHAT_OPTIONS if name in values}
        messages = values.pop("messages", ASKED["row"]["messages"])
        return llm.chat(messages, SamplingParams(**values), **options)

    return call


def _outputs(answered: RequestResult) -> Any:
    if answered.refusal is not None:
        return answered.refusal
    [output] = answered.body
    names = (
        "index",
        "text",
        "content",
        "reasoning_content",
        "tool_calls",
        "token_ids",
        "finish_reason",
    )
    names += ("cumulative_logprob", "logprobs")
    shown: Json = {"prompt": output.prompt, "prompt_logprobs": output.prompt_logprobs}
    shown["outputs"] = [{name: getattr(one, name) for name in names} for one in output.outputs]
    return _settled(shown)


def _settled(value: Any) -> Any:
    """Return a value without what is of one request alone, and with dictionaries for dataclasses."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {
            str(name): _settled(inner) for name, inner in value.items() if name not in OF_A_REQUEST
        }
    return [_settled(one) for one in value] if isinstance(value, list | tuple) else value


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, NUM_DECIMALS) + 0.0  # no -0.0
    if isinstance(value, Mapping):
        return {name: _rounded(inner) for name, inner in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value


ENTRY_POINTS: dict[str, Callable[[EntryPoints], Json]] = {
    "row": _rows,
    "batch": _batch_lines,
    "chat": lambda entry_points: _posted("chat", entry_points),
    "completions": lambda entry_points: _posted("completions", entry_points),
    "responses": lambda entry_points: _posted("responses", entry_points),
    "python": _called,
}
