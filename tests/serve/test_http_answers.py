"""JSON in parts: equal to json.dumps, no part long, and the event loop goes on while megabytes are made."""

import asyncio
import json
import random
import threading

import pytest

from eagle_ray.serve.http import http_answers
from eagle_ray.serve.http.http_answers import event, json_body, json_parts
from eagle_ray.serve.http.request_body import parse
from tests.support.serving import get, post

TEXT = "/v1/completions"


def random_value(chance, depth):
    kinds = ["text", "number", "null", "object", "list", "numbers"][: 6 if depth else 3]
    match chance.choice(kinds):
        case "text":
            return "".join(chance.choices('aé"\\\n\u2028😀', k=chance.randint(0, 5)))
        case "number":
            return chance.choice([0, -1.5, 1e300, 2**70, True])
        case "null":
            return None
        case "object":
            return {f"{i}é": random_value(chance, depth - 1) for i in range(chance.randint(0, 3))}
        case "list":
            return [random_value(chance, depth - 1) for _ in range(chance.randint(0, 3))]
    return [chance.random() for _ in range(chance.choice([0, 1, 5000]))]


def test_it_is_what_json_dumps_makes():
    chance = random.Random(0)
    for _ in range(500):
        value = random_value(chance, 7)
        assert (
            json_body(value)
            == json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
        )


def logprobs_of(num_tokens):
    top = [{"token": f"t{i}", "logprob": -1.25, "bytes": [116, 48]} for i in range(20)]
    content = [
        {"token": "t0", "logprob": -0.5, "bytes": [116], "top_logprobs": top}
        for _ in range(num_tokens)
    ]
    return {
        "choices": [{"index": 0, "message": {"content": "x"}, "logprobs": {"content": content}}]
    }


@pytest.mark.parametrize(
    "choice", [{"text": "a\u2028b", "logprobs": None}, logprobs_of(50)["choices"][0], None]
)
def test_an_event_is_one_line_of_json(choice):
    body = {"type": "error"} if choice is None else {"choices": [choice, choice]}
    name, _, line = event(body).removesuffix("\n\n").partition("data: ")
    assert name == ("event: error\n" if choice is None else "")
    assert json.loads(line) == body and len(line.splitlines()) == 1 and ", " not in line


def test_no_part_of_a_long_answer_is_long():
    for value in (logprobs_of(5000), {"tokens": list(range(500_000))}):
        assert max(map(len, json_parts(value))) < 1 << 16


def test_the_event_loop_goes_on_while_megabytes_are_made():
    """The loop takes turns while a thread writes: one call of json.dumps would hold it up until the end."""
    value = logprobs_of(20_000)

    async def main():
        making, turns = asyncio.ensure_future(asyncio.to_thread(json_body, value)), 0
        while not making.done():
            await asyncio.sleep(0.001)
            turns += 1
        return turns

    assert asyncio.run(main()) >= 5


def test_long_answers_and_long_bodies_are_handled_in_a_thread(app, service, monkeypatch):
    """While the thread that writes a long answer is held up, others are answered; likewise with a long body."""
    release, writing, encode = threading.Event(), threading.Event(), http_answers.encode_json

    def held_up(value):
        if (
            threading.current_thread() is threading.main_thread()
            or "long" not in threading.current_thread().name
        ):
            return encode(value)
        writing.set()
        assert release.wait(120)
        return encode(value)

    monkeypatch.setattr(http_answers, "encode_json", held_up)
    monkeypatch.setattr("eagle_ray.serve.service.LARGE_BODY", 100)

    async def main():
        body = {
            "prompt": "Once upon a time",
            "max_tokens": 40,
            "ignore_eos": True,
            "logprobs": 5,
            "echo": True,
        }
        long = asyncio.ensure_future(post(app, TEXT, body))
        while not writing.is_set():
            await asyncio.sleep(0.002)
        try:
            short = await post(app, TEXT, {"prompt": "Once", "max_tokens": 1})
            health = await get(app, "/health")
            assert not long.done()
        finally:
            release.set()
        return (await long).status, short.status, health.status

    assert asyncio.run(main()) == (200, 200, 200)


def test_an_echo_with_log_probabilities_is_streamed_by_a_thread(app, service, monkeypatch):
    """Of a long prompt, not one alternative is spelled on the event loop."""
    makers, decode_token = [], service.text.decode_with_special
    monkeypatch.setattr("eagle_ray.serve.service.SHORT_CHUNK", 10)
    monkeypatch.setattr(
        service.text,
        "decode_with_special",
        lambda ids: makers.append(threading.current_thread()) or decode_token(ids),
    )
    body = {"prompt": [5] * 50, "max_tokens": 1, "logprobs": 3, "echo": True, "stream": True}
    answer = asyncio.run(post(app, TEXT, body))
    assert answer.status == 200 and makers and threading.main_thread() not in makers
    first, *_ = answer.events
    assert len(first["choices"][0]["logprobs"]["tokens"]) == 50


def test_a_long_body_is_parsed_in_a_thread(app, service, monkeypatch):
    makers = []

    def recorded(kind, body):
        makers.append(threading.current_thread())
        return parse(kind, body)

    monkeypatch.setattr("eagle_ray.serve.service.parse", recorded)
    assert asyncio.run(post(app, "/detokenize", {"tokens": [100] * 19_000})).status == 200
    assert makers and threading.main_thread() not in makers
