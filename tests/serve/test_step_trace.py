"""How the tokens of a stream came: every token told once, with the step and depth that the engine's counts say."""

import asyncio
import json

import pytest

from eagle_ray.config import load_serve_config
from eagle_ray.core.counters import AcceptanceStats
from eagle_ray.requests.openai_bodies import ChatRequest, CompletionRequest
from eagle_ray.requests.sequence_answers import ChoiceChunks
from eagle_ray.serve.generation_request import prepare_generation
from eagle_ray.serve.http.request_body import parse
from tests.support.serving import CHAT, FRANCE, TEXT, post

ASKS = {"stream": True, "stream_options": {"include_steps": True, "include_usage": True}}


def steps_of(events, index=0):
    """One choice's steps, each token's text checked against its chunk's on the way."""
    found = []
    for choice in (choice for event in events if event != "[DONE]" for choice in event["choices"]):
        if choice["index"] != index or "steps" not in choice:
            continue
        told = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        assert (
            "".join(token["text"] for step in choice["steps"] for token in step["tokens"]) == told
        )
        found += choice["steps"]
    return found


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, FRANCE), (TEXT, {"prompt": "Once", "ignore_eos": True})]
)
def test_traced_steps_sum_to_usage_and_appear_only_on_request(app, path, body):
    body = body | {
        "n": 2,
        "temperature": 0.9,
        "seed": 4,
        "max_tokens": 40,
        "return_token_ids": True,
    }
    plain = asyncio.run(post(app, path, body)).json
    unasked = asyncio.run(post(app, path, body | {"stream": True})).events
    assert not any("steps" in choice for event in unasked[:-1] for choice in event["choices"])
    events = asyncio.run(post(app, path, body | ASKS)).events
    told = [steps_of(events, index) for index in (0, 1)]
    for choice, steps in zip(plain["choices"], told, strict=True):
        assert [token["id"] for step in steps for token in step["tokens"]] == choice["token_ids"]
        assert [step["step"] for step in steps] == list(range(len(steps)))
        for step in steps[:-1]:
            depths = [token["depth"] for token in step["tokens"]]
            assert depths == [*range(1, step["num_accepted_draft_tokens"] + 1), 0]
    spec = events[-2]["metrics"]["speculative_decoding"]
    passes = [step for steps in told for step in steps[1:]]
    assert len(passes) == spec["num_spec_steps"]
    for name in ("num_draft_tokens", "num_accepted_draft_tokens"):
        assert sum(step[name] for step in passes) == spec[name] > 0


def choice_of(service, kind, output, accepted, **extra):
    """A finished choice with the given output, as if its steps had accepted so many drafts each."""
    config = load_serve_config(None, env={}, overrides={"model.device": "cpu"})
    prompt = FRANCE if kind is ChatRequest else {"prompt": "Once"}
    asked = prepare_generation(
        parse(kind, json.dumps(prompt | ASKS | extra).encode()), config, service.text
    )
    [choice] = asked.choices
    sequence = choice.sequence
    sequence.stats = AcceptanceStats.empty(8)
    for number in accepted:
        sequence.stats.add_step(number, [1] * number + [0] * (8 - number))
    sequence.output_ids = service.text.encode(output, add_special_tokens=False)
    return asked, choice


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
@pytest.mark.parametrize("portion", [1, 2, 3, 7, 1000])
def test_a_late_reader_reads_the_same_and_no_character_is_split(service, kind, portion):
    """However many steps have come when the reader looks, and though an eagle has several tokens."""
    output = "naïve 🦅🐟 你好 <b>\n end"
    accepted = [3, 0, 5, 1, 8, 2, 0, 8, 8]
    asked, choice = choice_of(service, kind, output, accepted)
    ids = choice.sequence.output_ids
    expected = [(0, 0)]
    for step, number in enumerate(accepted, 1):
        expected += [(step, depth) for depth in (*range(1, number + 1), 0)]
    assert len(output.encode()) > len(ids) > len(output) and len(ids) < len(expected)

    chunks, events = ChoiceChunks(asked.answers, choice), []
    for count in [*range(portion, len(ids), portion), len(ids)]:
        choice.sequence.finish_reason = "length" if count == len(ids) else None
        events += [{"choices": chunk["choices"]} for chunk in chunks.until(count)]
    steps = steps_of(events)
    tokens = [(step["step"], token) for step in steps for token in step["tokens"]]
    assert [token["id"] for _, token in tokens] == ids
    assert [(step, token["depth"]) for step, token in tokens] == expected[: len(ids)]
    assert "".join(token["text"] for _, token in tokens) == output
    assert "\ufffd" not in json.dumps(events, ensure_ascii=False)


@pytest.mark.parametrize("stop", [["is Paris", "zzz"], ["Paris. "], ["a"]])
def test_possible_stop_text_is_sent_with_a_later_token_or_never(app, stop):
    body = FRANCE | {"stop": stop}
    content = asyncio.run(post(app, CHAT, body)).json["choices"][0]["message"]["content"]
    steps = steps_of(asyncio.run(post(app, CHAT, body | ASKS)).events)
    assert "".join(token["text"] for step in steps for token in step["tokens"]) == content
