"""By hand, what no library sends: broken bodies, uploads that stop, stray values, and who leaves in any phase."""

import asyncio
import gzip
import json

import pytest

from eagle_ray.requests.openai_bodies import ChatRequest, CompletionRequest
from eagle_ray.serve.http import request_body
from eagle_ray.serve.http.http_answers import ApiError, event
from eagle_ray.serve.http.request_body import MAX_CONTAINERS, MAX_VALUES, check_containers, parse
from tests.support.serving import exchange, get, post, request

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = [{"role": "user", "content": "Hi"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ENDLESS = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True}


def send(app, body, path=TEXT, method="POST", **headers):
    return asyncio.run(request(app, method, path, body, headers))


def refusal_message(answer, status, code, param=None):
    error = answer.json["error"]
    assert (answer.status, error["code"], error["param"]) == (status, code, param)
    assert error.keys() == {"message", "type", "param", "code"} and error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "a", "metadata": {"a": 1, "a": 2}}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "metadata": {"a": -Infinity}}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\xe4"}',
        b'\xef\xbb\xbf{"prompt": "a"}',
        '{"prompt": "a"}'.encode("utf-16"),
        b'{"prompt": ' + b"[" * 40_000 + b"]" * 40_000 + b"}",
        b'{"prompt": "a\nb"}',
        b'{"prompt": "a"} {}',
        b"prompt=a",
        b"null",
        b"",
    ],
)
def test_what_is_no_json_is_refused(app, body):
    refusal_message(send(app, body), 400, "bad_json")


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}", "bad_value", "temperature"),
        (b'{"prompt": "a", "temperature": 1e999}', "bad_value", "temperature"),
        (b'{"prompt": "a", "temperature": 1e308}', "bad_value", "temperature"),
        (b'{"prompt": "a", "n": 100000}', "bad_value", "n"),
        (b'{"prompt": "a", "seed": 18446744073709551616}', "bad_value", "seed"),
        (b'{"prompt": "a", "stop": [' + b'"x",' * 999 + b'"x"]}', "bad_value", "stop"),
        (b'{"prompt": "a", "stop": ["b", "' + b"x" * 1025 + b'"]}', "bad_value", "stop"),
        (
            b'{"prompt": "a", "bad_words": [' + b'"' + b"x" * 70_000 + b'"]}',
            "invalid_sampling",
            "bad_words",
        ),
        (b'{"prompt": "a", "regex": "' + b"x" * 70_000 + b'"}', "bad_grammar", "regex"),
        (b'{"prompt": [-1]}', "bad_value", "prompt"),
        (b'{"prompt": "\\ud800"}', "bad_value", "prompt"),
        (b'{"prompt": "a", "user": "\\ud800"}', "bad_value", "user"),
        (b'{"prompt": "a", "metadata": {"\\udfff": 1}}', "bad_value", "metadata"),
        (b'{"prompt": "a", "\\ud800": 1}', "bad_json", None),
        (b'{"prompt": "a", "model": "\\ud800"}', "bad_value", "model"),
        (b'{"prompt": "a", "use_beam_search": 0}', "unsupported_parameter", "use_beam_search"),
        (b'{"prompt": "a", "frequency_penalty": false}', "bad_value", "frequency_penalty"),
        (b'{"prompt": "a", "logit_bias": {"1e9": 1}}', "bad_value", "logit_bias"),
        (b'{"prompt": "a", "logit_bias": {"5": 1e999}}', "bad_value", "logit_bias"),
        (b'{"prompt": "a", "logit_bias": {"99999": 1}}', "invalid_sampling", "logit_bias"),
        (b'{"prompt": "a", "allowed_token_ids": [99999]}', "invalid_sampling", "allowed_token_ids"),
        (b'{"prompt": "a", "max_tokens": 9, "min_tokens": 10}', "bad_value", "min_tokens"),
        (b'{"prompt": "a", "min_tokens": 1000}', "invalid_sampling", "min_tokens"),
        (
            b'{"prompt": "a", "stream": true, "stream_options": {"nonsense": 1}}',
            "bad_value",
            "stream_options.nonsense",
        ),
        (
            b'{"prompt": "a", "stream": true, "stream_options": {"include_obfuscation": 0}}',
            "bad_value",
            "stream_options.include_obfuscation",
        ),
    ],
)
def test_a_value_nobody_should_send_is_refused_by_its_parameter(app, body, code, param):
    refusal_message(send(app, body), 400, code, param)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (
            {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
            "messages[1].tool_calls[0].function",
        ),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "messages[1].tool_calls"),
        ({"role": "assistant", "content": None}, "messages[1].content"),
        (
            {"role": "assistant", "content": "", "function_call": {"name": "f"}},
            "messages[1].function_call",
        ),
        ({"role": "assistant", "content": "", "audio": {"id": "1"}}, "messages[1].audio"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[1].content[0]",
        ),
        ({"role": "robot", "content": ""}, "messages[1].role"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"content": "a"}, "messages[1].role"),
        ("a", "messages[1]"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_a_message_that_is_no_text_is_refused_by_its_place(app, message, param, path):
    error = asyncio.run(post(app, path, {"messages": [*HI, message]})).json["error"]
    assert error["param"] == param and error["code"] in ("bad_value", "unsupported_parameter")


HALF = r'"\ud83d"'
DEEP = "[" * 5000


@pytest.mark.parametrize(
    ("extra", "param", "says"),
    [
        ({"json_schema": DEEP}, "json_schema", "json_schema: "),
        ({"json_schema": "[" * 201 + "]" * 201}, "json_schema", "200 deep"),
        ({"structured_outputs": {"json": DEEP}}, "json_schema", "json_schema: "),
        ({"response_format": DEEP}, "response_format", "response_format: "),
        ({"json_schema": '{"a": 1, "a": 2}'}, "json_schema", "key 'a' is given more than once"),
        ({"json_schema": f'{{"title": {HALF}}}'}, "json_schema", "title: half a surrogate"),
    ],
)
def test_a_json_text_in_a_body_is_read_as_strictly(app, extra, param, says):
    error = asyncio.run(post(app, CHAT, {"messages": HI} | extra)).json["error"]
    assert (error["param"], error["code"]) == (param, "bad_value") and says in error["message"]


def test_lone_surrogate_in_call_arguments_is_refused_by_its_path(app):
    call = CALL | {"function": {"name": "f", "arguments": f'{{"a": {HALF}}}'}}
    asked = {"messages": [*HI, {"role": "assistant", "tool_calls": [call]}]}
    refusal_message(
        asyncio.run(post(app, CHAT, asked)),
        400,
        "bad_value",
        "messages[1].tool_calls[0].function.arguments",
    )
    item = {"type": "function_call", "call_id": "c", **call["function"]}
    asked = {"input": [{"role": "user", "content": "Hi"}, item], "text": {"format": DEEP}}
    refusal_message(
        asyncio.run(post(app, RESPONSES, asked)), 400, "bad_value", "input[1].arguments"
    )
    refusal_message(
        asyncio.run(post(app, RESPONSES, asked | {"input": "Hi"})), 400, "bad_value", "text.format"
    )


def test_half_a_surrogate_pair_does_not_reach_the_chat_template(app):
    refusal_message(
        send(app, b'{"messages": [{"role": "user", "content": "a", "name": "\\ud800"}]}', CHAT),
        400,
        "bad_value",
        "messages",
    )


def test_what_changes_nothing_is_taken(app):
    harmless = {
        "user": "me",
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "tool_choice": "auto",
    }
    harmless |= {
        "logit_bias": {},
        "tools": [],
        "frequency_penalty": 0.0,
        "response_format": {"type": "text"},
    }
    body = {"messages": [HI[0] | {"tool_calls": None, "name": "me"}], "max_tokens": 2} | harmless
    assert asyncio.run(post(app, CHAT, body)).status == 200


def test_bad_lists_of_a_million_are_refused_at_their_first_fault():
    """Not each of them: that took 19 s of everybody's time."""
    for body in ({"prompt": [-1] * 1_000_000}, {"prompt": [{}] * 100_000}):
        with pytest.raises(ApiError) as found:
            parse(CompletionRequest, json.dumps(body).encode())
        assert found.value.param == "prompt" and len(str(found.value)) < 400
    with pytest.raises(ApiError) as found:
        parse(ChatRequest, json.dumps({"messages": [{}] * 100_000}).encode())
    assert found.value.param == "messages[0].role"


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_only_json_is_read(app, kind):
    refusal_message(
        send(app, b'{"prompt": "a"}', **{"Content-Type": kind}), 415, "bad_content_type"
    )
    for charset in ("utf-16", "latin-1", '"UTF-32"'):
        kind = {"Content-Type": f"application/json; charset={charset}"}
        refusal_message(send(app, b'{"prompt": "a"}', **kind), 415, "bad_content_type")
    for json_kind in (
        "application/json",
        'application/json; charset="UTF-8"',
        "Application/JSON; charset=utf-8",
        "application/vnd.api+json",
    ):
        assert (
            send(app, b'{"prompt": "a", "max_tokens": 1}', **{"Content-Type": json_kind}).status
            == 200
        )


def test_a_packed_body_is_refused(app):
    for body in (
        b'{"prompt": "a", "max_tokens": 1}',
        gzip.compress(b'{"prompt": "a", "max_tokens": 1}'),
    ):
        for encoding in ("gzip", "deflate, gzip", "br"):
            refusal_message(
                send(app, body, **{"Content-Encoding": encoding}), 415, "bad_content_encoding"
            )
    assert (
        send(app, b'{"prompt": "a", "max_tokens": 1}', **{"Content-Encoding": "identity"}).status
        == 200
    )


@pytest.mark.parametrize(
    "host", ["evil.example:8000", "evil.example", "localhost.evil.example", "10.0.0.5", "", "gpu"]
)
def test_request_for_another_host_is_refused_without_keys(app, host):
    """The page and the endpoint are of one origin to a browser, so it asks nobody."""
    page = {"Host": host, "Origin": f"http://{host}", "Content-Type": "application/json"}
    refusal_message(send(app, b'{"prompt": "a", "max_tokens": 1}', **page), 403, "other_host")
    assert asyncio.run(get(app, "/v1/models", {"Host": host})).status == 403
    assert asyncio.run(get(app, "/health", {"Host": host})).status == 200


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:80", "localhost.:80", "127.0.0.1:8000", "[::1]:8000", "127.1.2.3"],
)
def test_without_keys_this_machines_names_are_taken(app, host):
    assert asyncio.run(get(app, "/v1/models", {"Host": host})).status == 200


def test_a_page_of_strangers_cannot_ask_by_naming_no_kind(app):
    """Browsers send a body without a type to any machine unasked, but say where the page is from."""
    body = b'{"prompt": "a", "max_tokens": 1}'
    stranger = {"Origin": "http://evil.example"}
    refusal_message(send(app, body, **stranger, **{"Content-Type": ""}), 415, "bad_content_type")
    assert send(app, body, **{"Content-Type": ""}).status == 200
    assert send(app, body, **stranger, **{"Content-Type": "application/json"}).status == 200


@pytest.mark.parametrize(
    "body", [{"model": "a" * 50_000}, {"a" * 50_000: 1}, {"stream_options": {"a" * 50_000: 1}}]
)
def test_what_is_refused_is_not_sent_back_by_the_kilobyte(app, body):
    answer = asyncio.run(post(app, TEXT, {"prompt": "a"} | body))
    assert answer.status in (400, 404) and len(json.dumps(answer.json)) < 2500


def test_objects_and_lists_are_counted_before_they_are_made():
    """Brackets in a text do not count."""
    objects, text = b"{}," * (MAX_CONTAINERS + 1), rb"\"[[{\\" * MAX_CONTAINERS
    with pytest.raises(ApiError, match="objects and lists") as found:
        check_containers(b'{"prompt": [' + objects + b"{}]}")
    assert found.value.code == "too_many_values"
    check_containers(b'{"prompt": "' + text + b'"}')


def test_values_are_counted_before_they_are_made():
    """Commas in a text do not count. A model's own length has room for a prompt of ids."""
    ids = b'{"prompt": [' + b"5," * MAX_VALUES + b"5, 5]}"
    with pytest.raises(ApiError, match="values") as found:
        check_containers(ids)
    assert found.value.code == "too_many_values"
    check_containers(ids, max_model_len=MAX_VALUES)
    check_containers(b'{"prompt": "' + b"," * (2 * MAX_VALUES) + b'"}')


def test_a_body_that_says_it_is_too_large_is_not_read(app):
    refusal_message(send(app, b"{", **{"Content-Length": str(100 << 20)}), 413, "body_too_large")


@pytest.mark.parametrize(
    ("method", "path"),
    [("PUT", TEXT), ("OPTIONS", CHAT), ("DELETE", "/health"), ("GET", "/tokenize")],
)
def test_a_wrong_method_is_told_the_right_ones(app, method, path):
    answer = send(app, b"", path, method)
    refusal_message(answer, 405, "no_route")
    assert answer.headers["allow"]


@pytest.mark.parametrize(
    "path",
    ["/v1/completions/", "/v1", "/v1/models/", "//v1/models", "/v1/completions/x", "/é", "/\x00"],
)
def test_there_is_nothing_beside_the_routes(app, path):
    answer = asyncio.run(get(app, path))
    assert answer.status == 404 and answer.json["error"]["code"] in ("no_route", "model_not_found")


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/health"), ("GET", "/v1/responses/x"), ("GET", "/v1/files")]
)
def test_a_query_that_is_no_text_is_not_our_fault(app, method, path):
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"a=\x80%ff",
    }
    asyncio.run(app(scope | {"headers": [], "root_path": "", "scheme": "http"}, receive, send))
    assert (
        sent[0]["status"] in (404, 405)
        and json.loads(sent[1]["body"])["error"]["code"] != "internal_error"
    )


def test_head_is_get_without_a_body(app):
    assert send(app, b"", "/health", "HEAD").status == 200


async def upload(app, *parts, ends=False, breaks=None):
    """Send parts of a body and then nothing more, or leave; breaks: what the server's receive raises then."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages += [{"type": "http.disconnect"}] if ends else []
    sent = []

    async def receive():
        if messages:
            return messages.pop(0)
        if breaks is not None:
            raise breaks
        return await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": TEXT,
        "raw_path": TEXT.encode(),
        "query_string": b"",
    }
    await app(scope | {"headers": headers, "root_path": "", "scheme": "http"}, receive, send)
    return sent[0]["status"]


def test_an_upload_that_breaks_off_is_nobodys_error(app, service):
    errors = sum(
        value
        for name, value in service.snapshot().counters.items()
        if name.startswith("http_errors")
    )
    assert asyncio.run(upload(app, b'{"prompt": ', ends=True)) == 499
    assert asyncio.run(upload(app, b'{"prompt": ', breaks=RuntimeError("task cancelled"))) == 499
    assert (
        sum(
            value
            for name, value in service.snapshot().counters.items()
            if name.startswith("http_errors")
        )
        == errors
    )


def test_an_upload_that_stalls_is_not_waited_for(app, monkeypatch):
    monkeypatch.setattr(request_body, "ARRIVES_WITHIN_S", 0.05)
    assert asyncio.run(upload(app, b'{"prompt": ', ends=False)) == 408


def test_while_a_long_prompt_is_tokenized_others_are_answered(service, monkeypatch):
    """The others come second, with texts or ids, and are answered first."""
    from eagle_ray.serve.app import build_app

    serving = service.config.serving.model_copy(update={"max_body_bytes": 8 << 20})
    config, service.config = service.config, service.config.model_copy(update={"serving": serving})
    monkeypatch.setattr(
        service.text, "max_model_len", None
    )  # or it would be refused by its beginning
    app, order = build_app(service), []

    async def ask(name, path, body):
        order.append((name, (await post(app, path, body)).status))

    async def main():
        long = asyncio.ensure_future(ask("long", TEXT, {"prompt": "the quick brown fox " * 50_000}))
        await asyncio.sleep(0.05)
        await ask("ids", TEXT, {"prompt": [5, 6], "max_tokens": 1})
        await ask("text", TEXT, {"prompt": "short", "max_tokens": 1})
        await ask("chat", CHAT, {"messages": HI, "max_tokens": 1})
        await ask("tokens", "/tokenize", {"prompt": "short"})
        await long

    try:
        asyncio.run(main())
    finally:
        service.config = config
    assert order == [("ids", 200), ("text", 200), ("chat", 200), ("tokens", 200), ("long", 400)]


def test_a_full_queue_does_not_tokenize(app, service, monkeypatch):
    async def main():
        async with exchange(app, "POST", TEXT, json.dumps(ENDLESS | {"n": 16}).encode()):
            await wait_until(lambda: service.in_flight.sequences == 16)
            read = []
            monkeypatch.setattr(service.text, "encode", lambda prompt: read.append(prompt) or [5])
            return await post(app, TEXT, {"prompt": "a"}), read

    answer, read = asyncio.run(main())
    refusal_message(answer, 429, "queue_full")
    assert not read


def test_big_answers_are_made_beside_the_others(service, app, monkeypatch):
    """Log-probabilities by the thousand take seconds: the loop that all share is not what makes them."""
    import threading

    makers = []
    decode_token = service.text.decode_with_special
    monkeypatch.setattr(
        service.text,
        "decode_with_special",
        lambda ids: makers.append(threading.current_thread()) or decode_token(ids),
    )
    asyncio.run(post(app, TEXT, {"prompt": "Once", "max_tokens": 2, "logprobs": 3}))
    asyncio.run(post(app, "/detokenize", {"tokens": [5, 6]}))
    assert makers and threading.main_thread() not in makers


async def wait_until(condition):
    while not condition():
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode", "unread"])
def test_who_leaves_in_any_phase_is_gone_by_the_next_step(app, service, phase, stream):
    """A step after he left, the engine holds nothing of him: no slot, nobody waiting."""
    scheduler, engine = service.engine.inner.scheduler, service.engine
    long = {"prompt": [5] * 1900, "max_tokens": 90, "ignore_eos": True, "seed": 1}
    body = (long if phase == "prefill" else ENDLESS) | {"stream": stream}

    async def main():
        async with exchange(app, "POST", TEXT, json.dumps(ENDLESS | {"n": 4}).encode()):
            await wait_until(lambda: scheduler.num_running == 4)
            if phase == "queued":
                async with exchange(app, "POST", TEXT, json.dumps(body).encode()):
                    await wait_until(lambda: service.in_flight.sequences == 5)
                await wait_until(lambda: service.in_flight.sequences == 4)
        if phase != "queued":
            async with exchange(app, "POST", TEXT, json.dumps(body).encode()) as talk:
                if phase == "unread":
                    talk.reads.clear()
                await wait_until(lambda: service.in_flight.sequences == 1)
                if phase in ("decode", "unread"):
                    steps = engine.counters().num_steps
                    await wait_until(lambda: engine.counters().num_steps > steps + 2)
        left = engine.counters().num_steps
        await wait_until(lambda: not service.engine.inner.has_work)
        return engine.counters().num_steps - left

    assert (
        asyncio.run(main()) <= 2
        and service.in_flight.sequences == 0
        and not service.engine.step_loop.calls
    )


def test_an_event_has_no_line_ends_but_its_own():
    told = event({"text": "a\u2028b\u2029c\x85d\ne"})
    assert len(told.splitlines()) == 2 and json.loads(told[6:])["text"] == "a\u2028b\u2029c\x85d\ne"
