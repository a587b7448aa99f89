"""What clients may send, and what each wrong thing is told."""

import json

import pytest

from eagle_ray.core.errors import RequestError
from eagle_ray.requests.openai_bodies import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from eagle_ray.requests.parameters import MAX_DETOKENIZED
from eagle_ray.serve.http.http_answers import ApiError
from eagle_ray.serve.http.request_body import parse
from eagle_ray.serve.openapi import openapi
from eagle_ray.text.strict_json import JsonError
from eagle_ray.text.structured import MAX_TEXT_CHARS, schema_text

HI = [{"role": "user", "content": "Hi"}]


def refusal_of(kind, body):
    with pytest.raises(ApiError) as found:
        parse(kind, body if isinstance(body, bytes) else json.dumps(body).encode())
    return found.value


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 2.5}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": "much"}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"the": 1}}, "logit_bias.the"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": ["no", ""]}, "bad_words"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"model": 7}, "model"),
    ],
)
@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_a_wrong_value_is_refused_by_its_parameter(kind, extra, param):
    prompt = {"messages": HI} if kind is ChatRequest else {"prompt": "Hi"}
    error = refusal_of(kind, prompt | extra)
    assert (error.status, error.param, error.code) == (400, param, "bad_value")
    assert error.body()["error"]["type"] == "invalid_request_error" and param.partition("[")[
        0
    ] in str(error)


@pytest.mark.parametrize("name", ["top_k", "max_tokens"])
def test_a_limit_that_a_number_exceeds_is_named(name):
    error = refusal_of(ChatRequest, {"messages": HI, name: 10**12})
    assert "or more, at most 2147483647, got 1000000000000" in str(error)


@pytest.mark.parametrize(
    "extra",
    [
        {"tools": [{"type": "function"}]},
        {"length_penalty": 0.5},
        {"prompt_logprobs": 1},
        {"structured_outputs": {"structural_tag": "a"}},
        {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
        {"guided_json": {}},
        {"nonsense": 1},
        {"best_of": 3},
        {"suffix": "x"},
    ],
)
def test_what_is_not_built_is_refused_by_name_and_never_ignored(extra):
    [name] = extra
    error = refusal_of(CompletionRequest, {"prompt": "Hi"} | extra)
    assert (error.status, error.param, error.code) == (400, name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("given", "name", "read"),
    [
        (
            {"json": {"type": "object"}, "regex": None, "disable_any_whitespace": False},
            "json_schema",
            '{"type": "object"}',
        ),
        ({"json_object": True}, "json_object", True),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["a", "b"]}, "choice", ["a", "b"]),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
    ],
)
def test_vllms_spelling_of_structured_outputs_is_read(given, name, read):
    request = parse(
        CompletionRequest, json.dumps({"prompt": "Hi", "structured_outputs": given}).encode()
    )
    assert getattr(request, name) == read and not request.others


def test_vllms_spelling_is_refused_with_our_keys():
    error = refusal_of(
        CompletionRequest, {"prompt": "Hi", "structured_outputs": {"structural_tag": "a"}}
    )
    assert "give one of json, json_object, regex, choice and grammar" in str(error)
    assert "use regex" in str(refusal_of(CompletionRequest, {"prompt": "Hi", "guided_regex": "a"}))
    both = {"prompt": "Hi", "structured_outputs": {"regex": "a"}, "choice": ["b"]}
    assert "both say what the output must be" in str(refusal_of(CompletionRequest, both))
    twice = {"prompt": "Hi", "structured_outputs": {"regex": "a"}, "regex": "b"}
    assert refusal_of(CompletionRequest, twice).param == "structured_outputs"
    wrong = {"prompt": "Hi", "structured_outputs": {"choice": "b"}}
    assert refusal_of(CompletionRequest, wrong).param == "choice"


def test_controls_are_read():
    controls = {
        "presence_penalty": 0.5,
        "frequency_penalty": -1,
        "repetition_penalty": 1.2,
        "logit_bias": {"5": -100, "17": 2.5},
        "allowed_token_ids": [5, 6],
        "bad_words": ["no"],
        "min_tokens": 3,
        "stop_token_ids": [7],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    request = parse(CompletionRequest, json.dumps({"prompt": "Hi"} | controls).encode())
    assert {name: getattr(request, name) for name in controls} == controls | {
        "logit_bias": {5: -100, 17: 2.5}
    }


def test_what_asks_for_nothing_is_taken():
    nothing = {
        "tools": None,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "user": "me",
        "best_of": 1,
        "stop": None,
    }
    request = parse(
        CompletionRequest,
        json.dumps({"prompt": "Hi", "top_k": -1, "seed": 2**64 - 1} | nothing).encode(),
    )
    assert request.stop is None and request.tops is None


@pytest.mark.parametrize(
    "prompt", [None, [], [[]], 5, ["a", 5], [[1], "a"], [1, -2], {"a": 1}, "\ud800"]
)
def test_what_is_no_prompt_is_refused(prompt):
    error = refusal_of(CompletionRequest, {"prompt": prompt})
    assert error.status == 400 and error.param.startswith("prompt")


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]])],
)
def test_a_prompt_has_four_forms(prompt, prompts):
    assert parse(CompletionRequest, json.dumps({"prompt": prompt}).encode()).prompts == prompts


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "Hi",
        [{"role": "robot", "content": "Hi"}],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": 5}],
    ],
)
def test_what_are_no_messages_is_refused(messages):
    error = refusal_of(ChatRequest, {"messages": messages})
    assert error.status == 400 and error.param.startswith("messages")


def test_text_parts_are_joined_and_other_keys_go_to_the_template():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "user", "content": parts, "name": "me", "refusal": None}]}
    [message] = parse(ChatRequest, json.dumps(body).encode()).conversation
    assert message == {"role": "user", "content": "ab", "name": "me"}


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"Hi"', b"\xff\xfe", b"[" * 100_000, b'{"a":' + b"9" * 9999]
)
def test_a_body_that_is_no_object_is_refused(body):
    error = refusal_of(CompletionRequest, body)
    assert (error.status, error.code) == (400, "bad_json")


def test_parameters_that_contradict_each_other_are_refused():
    assert refusal_of(ChatRequest, {"messages": HI, "top_logprobs": 2}).param == "top_logprobs"
    assert (
        refusal_of(ChatRequest, {"messages": HI, "max_tokens": 2, "max_completion_tokens": 3}).code
        == "bad_value"
    )
    assert refusal_of(CompletionRequest, {"prompt": "a", "max_tokens": 0}).param == "max_tokens"
    assert (
        refusal_of(CompletionRequest, {"prompt": ["a"] * 100, "n": 20}).code == "too_many_choices"
    )
    assert refusal_of(TokenizeRequest, {"prompt": "a", "messages": HI}).code == "prompt_missing"
    assert refusal_of(DetokenizeRequest, {"tokens": "a"}).param == "tokens"


def test_every_reference_of_the_openapi_document_is_there():
    document = openapi("embedded:tiny", 1024)
    names = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert names <= document["components"]["schemas"].keys() and "ChatRequest" in names


NAMES = {f"x{i}": 1 for i in range(5000)}


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (ChatRequest, {"messages": HI, "tools": [0] * 5000}, "tools[0]"),
        (ResponsesRequest, {"input": "Hi", "tools": [0] * 5000}, "tools[0]"),
        (ResponsesRequest, {"input": "Hi", "include": [0] * 5000}, "include[0]"),
        (CompletionRequest, {"prompt": "Hi", "logit_bias": NAMES}, "logit_bias.x0"),
        (CompletionRequest, {"prompt": "Hi", "metadata": NAMES}, "metadata.x0"),
        (
            CompletionRequest,
            {"prompt": "Hi", "stream": True, "stream_options": NAMES},
            "stream_options.x0",
        ),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [NAMES]}]},
            "messages[0].content[0]",
        ),
        (DetokenizeRequest, {"tokens": [1], **NAMES}, "x0"),
    ],
)
def test_the_first_of_thousands_of_wrong_values_is_told(kind, body, param):
    """Each error costs memory and time."""
    assert refusal_of(kind, body).param == param


def test_every_pair_of_a_large_logit_bias_is_read():
    bias = {str(i): i / 100 for i in range(5000)}
    request = parse(CompletionRequest, json.dumps({"prompt": "Hi", "logit_bias": bias}).encode())
    assert request.logit_bias == {int(token): value for token, value in bias.items()}


def test_a_schema_is_written_no_further_than_its_limit():
    with pytest.raises(JsonError, match=str(MAX_TEXT_CHARS)):
        schema_text({"enum": [0.1] * MAX_TEXT_CHARS})


def test_too_long_format_is_named_as_its_client_writes_it():
    form = {"type": "json_schema", "name": "a", "schema": {"description": "a" * MAX_TEXT_CHARS}}
    request = parse(
        ResponsesRequest, json.dumps({"input": "Hi", "text": {"format": form}}).encode()
    )
    with pytest.raises(RequestError, match="has more than") as found:
        request.chat()
    assert found.value.param == "text.format"


def test_long_lists_are_refused_by_name():
    """Each entry costs time, in reading and at every place of a draft."""
    many = {
        DetokenizeRequest: ("tokens", {"tokens": [5] * (MAX_DETOKENIZED + 1)}),
        CompletionRequest: (
            "logit_bias",
            {"prompt": "a", "logit_bias": {str(i): 0 for i in range((1 << 16) + 1)}},
        ),
    }
    for kind, (name, body) in many.items():
        with pytest.raises(ApiError, match=f"^{name}: must be .*at most") as found:
            parse(kind, json.dumps(body).encode())
        assert found.value.param == name and len(str(found.value)) < 300
