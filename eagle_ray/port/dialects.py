"""Translate request parameters into each server's dialect of OpenAI's protocol, by one table.

SPELLINGS has a row for each parameter of `requests/parameters.py`, with its spelling in each
dialect that supports it. A parameter with a value other than its default that the dialect does not
support is refused before anything is sent, never dropped.

    body_of(request, config, sampling, "vllm", seed=7)
    # ("/chat/completions", {"model": ..., "messages": [...], "max_tokens": 256, ...})
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eagle_ray.config import JobConfig
from eagle_ray.core.errors import RequestError
from eagle_ray.core.json_text import dump_json
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.port.prompt_scores import PROMPT_SCORES, TEXT_PATH
from eagle_ray.requests.messages import template_messages
from eagle_ray.requests.parameters import CHAT, SAMPLING
from eagle_ray.requests.request import Request

Body = dict[str, Any]
CHAT_PATH = "/chat/completions"
SEED_BITS = 31  # of a seed that is sent: every dialect takes these


@dataclass(frozen=True, slots=True)
class Spelling:
    """How one dialect expresses a parameter.

    Attributes:
        write: returns the body's fields for a value, given whether the body has messages.
    """

    write: Callable[[Any, bool], Body]


def _as(name: str) -> Spelling:
    """Return the spelling of a value as it is, under this name."""
    return Spelling(lambda value, is_chat: {name: value})


def _logprobs(value: Any, is_chat: bool) -> Body:
    """Return OpenAI's two forms: true with messages, and the number of alternatives with other prompts."""
    return {"logprobs": True} if is_chat else {"logprobs": 0}


def _token_keys(value: Mapping[int, float], is_chat: bool) -> Body:
    return {"logit_bias": {str(token): bias for token, bias in value.items()}}


def _schema_format(value: str, is_chat: bool) -> Body:
    schema = json.loads(value) if isinstance(value, str) else value
    named = {"name": "output", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def _object_format(value: bool, is_chat: bool) -> Body:
    return {"response_format": {"type": "json_object"}}


def _given_format(value: str, is_chat: bool) -> Body:
    return {"response_format": json.loads(value) if isinstance(value, str) else value}


def _structured(name: str) -> Spelling:
    """Return vLLM's spelling of what an output must be."""
    return Spelling(lambda value, is_chat: {"structured_outputs": {name: value}})


def _choice_regex(value: list[str], is_chat: bool) -> Body:
    return {"regex": "(" + "|".join(map(re.escape, value)) + ")"}


def _choice_grammar(value: list[str], is_chat: bool) -> Body:
    return {"grammar": "root ::= " + " | ".join(map(dump_json, value))}


def _repeat_penalty(value: float, is_chat: bool) -> Body:
    """Return llama.cpp's spelling, over all tokens and not over the last 64."""
    return {"repeat_penalty": value, "repeat_last_n": -1}


def _top_ids(value: int, is_chat: bool) -> Body:
    """Return vLLM's spelling, with the alternatives as token ids."""
    name = "top_logprobs" if is_chat else "logprobs"
    return {name: value, "return_tokens_as_token_ids": True}


def _openai_length(value: int, is_chat: bool) -> Body:
    return {"max_completion_tokens" if is_chat else "max_tokens": value}


# A parameter that is said by which requests are sent, not by a field of one.
_UNSAID = Spelling(lambda value, is_chat: {})
Row = Mapping[str, Spelling]
_EVERY = ("openai", "compatible", "vllm", "sglang", "llama_server", "eagle_ray")
_SERVERS = ("vllm", "sglang", "llama_server", "eagle_ray")


def _row(*dialects: str, name: str | None = None, **others: Spelling) -> Row:
    """Return a row of the table in which these dialects use the name, and the others their own spelling."""
    spelled = {dialect: _as(name) for dialect in dialects} if name is not None else {}
    return {**spelled, **others}


def _all(spelling: Spelling, **others: Spelling) -> Row:
    return {**dict.fromkeys(_EVERY, spelling), **others}


SPELLINGS: Mapping[str, Row] = {
    "temperature": _row(*_EVERY, name="temperature"),
    "top_p": _row(*_EVERY, name="top_p"),
    "top_k": _row(*_SERVERS, name="top_k"),
    "min_p": _row(*_SERVERS, name="min_p"),
    "max_tokens": _all(_as("max_tokens"), openai=Spelling(_openai_length)),
    "stop": _row(*_EVERY, name="stop"),
    "n": _all(_UNSAID),  # each sample is a request of its own
    "seed": _row(*_EVERY, name="seed"),
    "ignore_eos": _row(*_SERVERS, name="ignore_eos"),
    "logprobs": _all(Spelling(_logprobs)),
    "top_logprobs": _row(vllm=Spelling(_top_ids)),
    "prompt_logprobs": {},
    "presence_penalty": _row(*_EVERY, name="presence_penalty"),
    "frequency_penalty": _row(*_EVERY, name="frequency_penalty"),
    "repetition_penalty": _row(
        "vllm",
        "sglang",
        "eagle_ray",
        name="repetition_penalty",
        llama_server=Spelling(_repeat_penalty),
    ),
    "logit_bias": _all(Spelling(_token_keys)),
    "allowed_token_ids": _row("vllm", "eagle_ray", name="allowed_token_ids"),
    "bad_words": _row("vllm", "eagle_ray", name="bad_words"),
    "min_tokens": _row("vllm", "sglang", "eagle_ray", name="min_tokens"),
    "thinking_budget": _row("eagle_ray", name="thinking_budget", vllm=_as("thinking_token_budget")),
    "stop_token_ids": _row("vllm", "sglang", "eagle_ray", name="stop_token_ids"),
    "include_stop_str_in_output": _row(
        "vllm", "eagle_ray", name="include_stop_str_in_output", sglang=_as("no_stop_trim")
    ),
    "stop_in_reasoning": _row("eagle_ray", name="stop_in_reasoning"),
    "skip_special_tokens": _row("vllm", "sglang", "eagle_ray", name="skip_special_tokens"),
    "json_schema": _all(Spelling(_schema_format)),
    "json_object": _all(Spelling(_object_format)),
    "regex": _row("sglang", "eagle_ray", name="regex", vllm=_structured("regex")),
    "choice": _row(
        "eagle_ray",
        name="choice",
        vllm=_structured("choice"),
        sglang=Spelling(_choice_regex),
        llama_server=Spelling(_choice_grammar),
    ),
    "grammar": _row("eagle_ray", "llama_server", name="grammar", vllm=_structured("grammar")),
    "response_format": _all(Spelling(_given_format)),
    # What is scored is sent as prompts of token ids.
    "continuations": dict.fromkeys(PROMPT_SCORES, _UNSAID),
    "score_text": dict.fromkeys(PROMPT_SCORES, _UNSAID),
    "score_stride": dict.fromkeys(PROMPT_SCORES, _UNSAID),
    "tools": _row(*_EVERY, name="tools"),
    "tool_choice": _row(*_EVERY, name="tool_choice"),
    "parallel_tool_calls": _row(*_EVERY, name="parallel_tool_calls"),
    "chat_template_kwargs": _row(*_SERVERS, name="chat_template_kwargs"),
}
# Parameters that are sent whatever their value: an endpoint's default may be another one.
_ALWAYS = ("temperature", "max_tokens")
# Fields that ask an engine for what rows have a column for, besides the text.
_EXTRAS: Mapping[str, Body] = {
    "vllm": {"return_token_ids": True},
    "eagle_ray": {"return_token_ids": True},
    "sglang": {"return_spec_tokens_details": True},
}


def can_say(name: str, dialect: str) -> bool:
    """Return whether a dialect supports a parameter."""
    return dialect in SPELLINGS[name]


def refusal_of(name: str, dialect: str) -> str:
    """Return the error text for a parameter that a dialect does not support."""
    able = ", ".join(each for each in _EVERY if each in SPELLINGS[name])
    where = f"engine.dialect {able} can say it" if able else "only our own engine has it"
    return f"{name}: {dialect} has no such parameter, and {where}. Leave it out"


def unsaid_settings(config: JobConfig, dialect: str) -> list[str]:
    """Return an error line for each configuration key that the dialect does not support."""
    lines = []
    for section, rows in (("sampling", SAMPLING), ("chat", CHAT)):
        values = getattr(config, section)
        for name, row in rows.items():
            value = getattr(values, name, row.default)
            if not _is_default(value, row.default) and not can_say(name, dialect):
                lines.append(f"{section}.{refusal_of(name, dialect)}")
    return lines


def is_scored_by_prompt(sampling: SamplingSettings, dialect: str) -> bool:
    """Return whether a row is scored by log-probabilities of prompt tokens, so that nothing is generated.

    Raises RequestError if the dialect does not return these.
    """
    if not sampling.is_scored:
        return False
    if sampling.wants_prompt_logprobs:
        name = "prompt_logprobs"
        raise RequestError("invalid_sampling", refusal_of(name, dialect), name)
    if dialect not in PROMPT_SCORES:
        able = ", ".join(PROMPT_SCORES)
        raise RequestError(
            "invalid_sampling",
            f"max_tokens: {dialect} tells no log-probabilities of a prompt, by which a row is scored, and "
            f"engine.dialect {able} can. Set it to 1 or more",
        )
    return True


def body_of(request: Request, config: JobConfig, dialect: str, seed: int) -> tuple[str, Body]:
    """Return path and body of the request for one sample. Raises RequestError for parameters that the dialect lacks.

    Args:
        seed: seed of this sample; unused for greedy samples.
    """
    sampling = request.sampling_params(config)
    is_chat = request.is_chat
    body: Body = {"model": config.engine.model, **_prompt_of(request)}
    values = {name: getattr(sampling, name) for name in SAMPLING}
    values["seed"] = None if sampling.is_greedy else seed & ((1 << SEED_BITS) - 1)
    for name, row in SAMPLING.items():
        if name in _ALWAYS or not _is_default(values[name], row.default):
            body |= _written(name, values[name], dialect, is_chat)
    body |= _chat_fields(request, config, dialect)
    body |= _EXTRAS.get(dialect, {})
    return (CHAT_PATH if is_chat else TEXT_PATH), body | config.engine.extra_body


def wanted_form(sampling: SamplingSettings) -> tuple[str, Any] | None:
    """Return the parameter of structured output that is set, and its value; None for free text."""
    for name in ("json_schema", "json_object", "regex", "choice"):
        value = getattr(sampling, name)
        if value:
            return name, value
    if not sampling.response_format:
        return None
    given = sampling.response_format
    wanted = json.loads(given) if isinstance(given, str) else given
    if wanted.get("type") == "json_schema":
        return "json_schema", wanted["json_schema"].get("schema", {})
    return ("json_object", True) if wanted.get("type") == "json_object" else None


def _prompt_of(request: Request) -> Body:
    if request.prompt_token_ids is not None:
        return {"prompt": request.prompt_token_ids}
    messages = request.turn_messages
    if messages is not None and not request.is_rendered:
        return {"messages": template_messages_of(messages)}
    return {"prompt": request.prompt}


def template_messages_of(messages: str) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form: contents are texts, and arguments of calls are JSON texts."""
    written = []
    for message in template_messages(messages):
        calls = message.get("tool_calls")
        if calls:
            message = message | {"tool_calls": [_wire_call(call) for call in calls]}
        written.append(message)
    return written


def _wire_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        function = function | {"arguments": dump_json(arguments or {}, ensure_ascii=False)}
    return call | {"function": function}


def _chat_fields(request: Request, config: JobConfig, dialect: str) -> Body:
    options = request.chat_options(config)  # raises for tools without messages
    if not request.is_chat:
        return {}
    fields: Body = {}
    if options.template_kwargs:
        kwargs = dict(options.template_kwargs)
        fields |= _written("chat_template_kwargs", kwargs, dialect, True)
    if not options.has_tools:
        return fields
    fields |= _written("tools", list(options.tools), dialect, True)
    choice: Any = options.tool_choice
    if options.named is not None:
        choice = {"type": "function", "function": {"name": options.named}}
    if choice != "auto":
        fields |= _written("tool_choice", choice, dialect, True)
    if not options.parallel_tool_calls:
        fields |= _written("parallel_tool_calls", False, dialect, True)
    return fields


def _written(name: str, value: Any, dialect: str, is_chat: bool) -> Body:
    if not can_say(name, dialect):
        raise RequestError("invalid_sampling", refusal_of(name, dialect), name)
    return {} if value is None else SPELLINGS[name][dialect].write(value, is_chat)


def _is_default(value: Any, default: Any) -> bool:
    return value == default or value in (None, "", [], {})
