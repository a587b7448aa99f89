"""Every parameter of OpenAI's API, vLLM and SGLang is obeyed, refused by name, or asks for nothing; none is lost.

vLLM and SGLang are not installed: their names and defaults are written down here.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from eagle_ray.core.errors import RequestError
from eagle_ray.requests.batch_lines import parse_batch_line
from eagle_ray.requests.openai_bodies import TokenizeRequest
from eagle_ray.requests.parameters import Api
from eagle_ray.requests.refused import REFUSED, Refused, is_no_op, refused_at
from eagle_ray.serve.generation_request import prepare_generation
from eagle_ray.serve.http.http_answers import ApiError, api_error
from eagle_ray.serve.http.request_body import parse
from eagle_ray.serve.service import LINE_KINDS

openai = pytest.importorskip("openai")
from openai.types import completion_create_params, responses  # noqa: E402
from openai.types.chat import completion_create_params as chat_create_params  # noqa: E402

CHAT, TEXT, RESPONSES = LINE_KINDS
HI = [{"role": "user", "content": "Hi"}]
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "seed": 1},
    TEXT: {"prompt": "Hi", "seed": 1},
    RESPONSES: {"input": "Hi", "seed": 1},
}
OPENAI = {
    CHAT: chat_create_params.CompletionCreateParamsStreaming.__annotations__.keys()
    | chat_create_params.CompletionCreateParamsBase.__annotations__.keys(),
    TEXT: completion_create_params.CompletionCreateParamsStreaming.__annotations__.keys()
    | completion_create_params.CompletionCreateParamsBase.__annotations__.keys(),
    RESPONSES: responses.response_create_params.ResponseCreateParamsStreaming.__annotations__.keys()
    | responses.response_create_params.ResponseCreateParamsBase.__annotations__.keys(),
}
# The defaults of vLLM's and SGLang's requests: what a client sends that sends all of them.
SHARED_DEFAULTS: dict[str, Any] = {
    "cache_salt": None,
    "custom_logit_processor": None,
    "data_parallel_rank": None,
    "ebnf": "",
    "frequency_penalty": 0.0,
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "kv_transfer_params": {},
    "length_penalty": 1.0,
    "logit_bias": {},
    "lora_path": None,
    "min_p": 0.0,
    "min_tokens": 0,
    "n": 1,
    "no_stop_trim": False,
    "presence_penalty": 0.0,
    "priority": 0,
    "regex": None,
    "repetition_penalty": 1.0,
    "request_id": "",
    "return_cached_tokens_details": False,
    "return_hidden_states": False,
    "return_routed_experts": False,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "routed_experts_start_len": 0,
    "session_params": None,
    "skip_special_tokens": True,
    "stop_in_reasoning": False,
    "spaces_between_special_tokens": True,
    "stop": [],
    "stop_regex": [],
    "stop_token_ids": [],
    "stream": False,
    "stream_options": {},
    "structured_outputs": {},
    "thinking_token_budget": -1,
    "top_k": -1,
    "use_beam_search": False,
    "user": "",
    "vllm_xargs": {},
}
CHAT_DEFAULTS: dict[str, Any] = {
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "chat_template": None,
    "chat_template_kwargs": {},
    "continue_final_message": False,
    "documents": [],
    "echo": False,
    "include_reasoning": True,
    "logprobs": False,
    "media_io_kwargs": {},
    "mm_processor_kwargs": {},
    "parallel_tool_calls": True,
    "reasoning_effort": None,
    "return_meta_info": False,
    "return_prompt_text": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "tools": [],
    "top_logprobs": 0,
    "use_audio_in_video": False,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    CHAT: SHARED_DEFAULTS | CHAT_DEFAULTS,
    TEXT: SHARED_DEFAULTS
    | {"add_special_tokens": True, "best_of": 1, "echo": False, "suffix": "", "tools": []},
    RESPONSES: SHARED_DEFAULTS
    | {
        "background": False,
        "enable_response_messages": False,
        "include": [],
        "metadata": {},
        "parallel_tool_calls": True,
        "reasoning": {},
        "service_tier": "auto",
        "store": False,
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "truncation": "disabled",
    },
}
# Names of vLLM, SGLang and llama.cpp that have no default which a client could send.
OTHER_NAMES = (
    "allowed_token_ids",
    "bad_words",
    "custom_params",
    "detokenize",
    "early_stopping",
    "extra_key",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "input_ids",
    "json_schema",
    "logits_processors",
    "logprob_token_ids",
    "max_tokens",
    "n_probs",
    "previous_response_id",
    "prompt_logprobs",
    "repetition_detection",
    "rid",
    "seed",
    "session_id",
    "stream_interval",
    "structural_tag",
    "temperature",
    "top_p",
    "truncate_prompt_tokens",
    "truncation_side",
    "typo_of_a_parameter",
    "watermarking",
)
LOGPROBS = "message.output_text.logprobs"
TOOL = {"name": "f", "parameters": {"type": "object"}}
# A value of each built parameter that asks for something.
PROBES: dict[str, Any] = {
    "allowed_token_ids": [5],
    "bad_words": ["x"],
    "best_of": 2,
    "chat_template_kwargs": {"a": 1},
    "frequency_penalty": 1,
    "ignore_eos": True,
    "include": [LOGPROBS],
    "include_stop_str_in_output": True,
    "input": "Ho",
    "instructions": "x",
    "json_schema": {"type": "object"},
    "logit_bias": {"5": 1},
    "logprobs": True,
    "max_completion_tokens": 3,
    "max_output_tokens": 3,
    "max_tokens": 3,
    "messages": [{"role": "user", "content": "Ho"}],
    "metadata": {"a": "b"},
    "min_p": 0.5,
    "min_tokens": 2,
    "model": "other",
    "n": 2,
    "parallel_tool_calls": False,
    "presence_penalty": 1,
    "prompt": "Ho",
    "reasoning": {"effort": "low"},
    "regex": "a",
    "repetition_penalty": 1.5,
    "response_format": {"type": "json_object", "schema": {"type": "object"}},
    "return_token_ids": True,
    "seed": 2,
    "skip_special_tokens": False,
    "stop_in_reasoning": True,
    "stop": ["x"],
    "stop_token_ids": [5],
    "stream": True,
    "stream_options": {"include_usage": True},
    "structured_outputs": {"regex": "a"},
    "temperature": 0.5,
    "text": {"format": {"type": "json_object"}},
    "tool_choice": "none",
    "tools": [{"type": "function", "function": TOOL} | TOOL],
    "top_k": 3,
    "top_logprobs": 2,
    "thinking_budget": 5,
    "top_p": 0.5,
}
PROBES_BY_PATH = {CHAT: PROBES, TEXT: PROBES | {"logprobs": 2, "echo": True}, RESPONSES: PROBES}
COMPANIONS = {
    ("stream_options", CHAT): {"stream": True},
    ("stream_options", TEXT): {"stream": True},
    ("stream_options", RESPONSES): {"stream": True},
    ("top_logprobs", CHAT): {"logprobs": True},
    ("top_logprobs", RESPONSES): {"include": [LOGPROBS]},
}
UNBUILT = (7.5, "x", ["x"], {"x": 1}, True, False)
CASES = [
    (path, name)
    for path in LINE_KINDS
    for name in sorted({*OPENAI[path], *DEFAULTS[path], *OTHER_NAMES, *PROBES})
]


def outcome(service, path: str, body: dict[str, Any]) -> Any:
    """What the engine and the response are made of, or the parameter that a refusal names."""
    try:
        request = parse(LINE_KINDS[path], json.dumps(body).encode())
        chat = request.chat() if path == RESPONSES else request
        service.check_model(chat.model)
        asked = prepare_generation(chat, service.config, service.text)
    except (ApiError, RequestError) as error:
        refusal = api_error(error)
        assert refusal.status in (400, 404) and str(refusal).startswith(
            (str(refusal.param), "there is no model")
        )
        return refusal.param
    sequences = [
        (choice.sequence.prompt_ids, choice.sequence.sampling, choice.num_wanted)
        for choice in asked.choices
    ]
    shown = (
        request.stream,
        request.stream and request.stream_options,
        chat.return_token_ids,
        chat.tops,
        asked.echo,
    )
    metadata = request.metadata if path == RESPONSES else None
    reader, options = asked.answers.reader, dataclasses.astuple(asked.chat_options)
    return sequences, reader.stops, reader.text_options, options, shown, metadata or {}


def is_refused_by_name(found: Any, name: str) -> bool:
    return isinstance(found, str) and found.partition(".")[0].partition("[")[0] == name


def is_label(name: str) -> bool:
    return name in REFUSED and REFUSED[name].is_label


def own_values(path: str, name: str) -> tuple[Any, ...]:
    """The values of an unbuilt parameter that ask for nothing."""
    kind = LINE_KINDS[path]
    row = refused_at(kind.api).get(name)
    if name in kind.rows() or row is None:
        return ()
    return row.no_op_at(kind.api) + row.empties_at(kind.api)


@pytest.mark.parametrize(("path", "name"), CASES)
def test_a_parameter_is_obeyed_or_refused_or_asks_for_nothing(service, path, name):
    base = BASE[path] | COMPANIONS.get((name, path), {})
    plain = outcome(service, path, base)
    assert not isinstance(plain, str)
    assert name in base or outcome(service, path, base | {name: None}) == plain
    kind = LINE_KINDS[path]
    if name in kind.rows() or name == "structured_outputs":
        found = outcome(service, path, base | {name: PROBES_BY_PATH[path][name]})
        assert (is_label(name) and path != RESPONSES) or found != plain
        assert not isinstance(found, str) or is_refused_by_name(found, name)
        return
    for value in own_values(path, name):
        assert outcome(service, path, base | {name: value}) == plain, value
    for value in UNBUILT:
        if any(value == no_op and type(value) is type(no_op) for no_op in own_values(path, name)):
            continue
        found = outcome(service, path, base | {name: value})
        assert found == plain if is_label(name) else is_refused_by_name(found, name), value


@pytest.mark.parametrize("path", LINE_KINDS)
def test_client_that_sends_defaults_of_other_servers_is_answered(service, path):
    """temperature, top_p and top_k have defaults that are values of ours, too."""
    plain = outcome(service, path, BASE[path])
    assert outcome(service, path, BASE[path] | DEFAULTS[path]) == plain
    nulls = dict.fromkeys({*OPENAI[path], *DEFAULTS[path], *OTHER_NAMES} - BASE[path].keys())
    assert outcome(service, path, BASE[path] | nulls) == plain


@pytest.mark.parametrize(
    "name", ["tools", "chat_template", "chat_template_kwargs", "mm_processor_kwargs", "typo"]
)
def test_parameter_of_vllm_tokenize_is_refused_or_has_no_effect(name):
    def read(value):
        return parse(TokenizeRequest, json.dumps({"messages": HI, name: value}).encode())

    for value in (None,) if name == "typo" else (None, "", [], {}):
        assert read(value).messages
    for value in ("x", ["x"], {"x": 1}):
        with pytest.raises(ApiError) as refused:
            read(value)
        assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, name in CASES if path != RESPONSES]
)
def test_a_line_of_a_batch_file_has_the_same_parameters(path, name):
    def row_of(**changes):
        body = BASE[path] | COMPANIONS.get((name, path), {}) | changes
        line = {"custom_id": "a", "method": "POST", "url": path, "body": body}
        row = parse_batch_line(line)
        return str(row["prompt"]) if isinstance(row.get("prompt"), RequestError) else row

    if name == "stream_options":
        return  # of a stream, which a line cannot ask for
    plain = row_of()
    of_jobs = {"prompt_logprobs": True, "continuations": ["x"]}
    of_jobs |= {"score_text": True, "score_stride": 5}
    probe = of_jobs.get(name, PROBES_BY_PATH[path].get(name, 7.5))
    found = row_of(**{name: probe})
    is_refused = isinstance(found, str) and found.startswith(f"body.{name} ")
    is_same = is_no_op(name, probe, Api(path))
    assert is_refused or (
        found == plain if is_same else not isinstance(found, str) and found != plain
    )
    if is_refused and name != "typo_of_a_parameter":
        values = REFUSED.get(name, Refused(name)).no_op_at(Api(path))
        assert all(row_of(**{name: value}) == plain for value in values)


def test_metadata_is_a_label_of_texts(service):
    """OpenAI's API takes it with store alone; here it is taken, read and not kept."""
    for path in LINE_KINDS:
        assert outcome(service, path, BASE[path] | {"metadata": {"a": 1}}) == "metadata.a"
        assert (
            outcome(service, path, BASE[path] | {"metadata": {str(i): "" for i in range(17)}})
            == "metadata"
        )


MESSAGES = {
    "developer": openai.types.chat.ChatCompletionDeveloperMessageParam,
    "system": openai.types.chat.ChatCompletionSystemMessageParam,
    "user": openai.types.chat.ChatCompletionUserMessageParam,
    "assistant": openai.types.chat.ChatCompletionAssistantMessageParam,
    "tool": openai.types.chat.ChatCompletionToolMessageParam,
}


@pytest.mark.parametrize(
    ("role", "name"), [(role, name) for role in MESSAGES for name in MESSAGES[role].__annotations__]
)
def test_a_key_of_a_message_is_for_the_template_or_refused(role, name):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    value = {"role": role, "content": "x", "tool_calls": [call]}.get(name, "x")
    try:
        request = parse(
            LINE_KINDS[CHAT],
            json.dumps({"messages": [{"role": role, "content": "a", name: value}]}).encode(),
        )
    except ApiError as error:
        assert str(error.param).startswith(f"messages[0].{name}")
    else:
        assert name in request.conversation[0]


PART = responses.ResponseInputTextParam.__annotations__
ITEMS: dict[str, tuple[dict[str, Any], Any]] = {
    "message": ({"role": "user", "content": "Hi"}, responses.ResponseOutputMessageParam),
    "function_call": (
        {"call_id": "1", "name": "f", "arguments": "{}"},
        responses.ResponseFunctionToolCallParam,
    ),
    "function_call_output": (
        {"call_id": "1", "output": "x"},
        responses.response_input_item_param.FunctionCallOutput,
    ),
    "reasoning": (
        {"content": [{"type": "reasoning_text", "text": "x"}]},
        responses.ResponseReasoningItemParam,
    ),
}
ITEM_LABELS = ("id", "status", "phase", "type", "summary")  # of an answer that is sent back


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in ITEMS for name in ITEMS[kind][1].__annotations__]
)
def test_a_key_of_an_input_item_is_read_or_a_label_or_refused(service, kind, name):
    item, _ = ITEMS[kind]
    if name in item or name in ITEM_LABELS:
        return
    base = BASE[RESPONSES]["input"]
    items = [{"role": "user", "content": base}, {"type": kind} | item]
    assert outcome(service, RESPONSES, {"input": [items[0], items[1] | {name: None}]}) is not None
    assert (
        outcome(service, RESPONSES, {"input": [items[0], items[1] | {name: "x"}]})
        == f"input[1].{name}"
    )


def test_a_key_of_a_part_or_a_tool_of_a_response_is_not_lost(service):
    part = {"type": "input_text", "text": "Hi", "prompt_cache_breakpoint": {"mode": "explicit"}}
    items = [{"role": "user", "content": [part]}]
    assert (
        outcome(service, RESPONSES, {"input": items})
        == "input[0].content[0].prompt_cache_breakpoint"
    )
    for name in responses.FunctionToolParam.__annotations__.keys() - {
        "type",
        "name",
        "parameters",
        "strict",
        "description",
    }:
        tool = {"type": "function", "name": "f"}
        assert (
            outcome(service, RESPONSES, BASE[RESPONSES] | {"tools": [tool | {name: "x"}]})
            == f"tools[0].{name}"
        )
        assert (
            outcome(service, RESPONSES, BASE[RESPONSES] | {"tools": [tool | {name: None}]})
            != f"tools[0].{name}"
        )
