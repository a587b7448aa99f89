"""The application over a real engine: answers, streams, refusals, and who leaves."""

import asyncio
import copy
import json

import pytest

from eagle_ray.config import ServeConfig
from eagle_ray.requests.openai_bodies import CompletionRequest
from eagle_ray.serve import openapi
from eagle_ray.serve.access import ApiKeys
from eagle_ray.serve.app import build_app
from eagle_ray.serve.endpoint_metrics import Snapshot, prometheus_text
from eagle_ray.serve.generation_request import prepare_generation
from eagle_ray.serve.service import Service
from tests.support.serving import (
    CHAT,
    FRANCE,
    TEXT,
    ask,
    batch_rows,
    exchange,
    get,
    parse_event,
    post,
    request,
    texts,
)

ENDLESS = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True}


def test_seeded_answers_are_the_batch_jobs(app, tmp_path):
    """Greedy and sampled, chats and texts, several samples, stop strings, all in flight together, streamed or not."""
    sampling = [
        {},
        {"temperature": 0.8, "seed": 5, "n": 3},
        {"temperature": 1.2, "top_p": 0.9, "seed": -7},
    ]
    sampling += [{"temperature": 0.8, "seed": 5, "n": 2, "stop": ["a", "s o"]}]
    asked = [(CHAT, FRANCE | extra) for extra in sampling] + [
        (TEXT, {"prompt": "Once"} | extra) for extra in sampling
    ]
    rows = batch_rows(tmp_path, [{"id": f"{i}", **body} for i, (_, body) in enumerate(asked)])

    async def all_at_once(more):
        return await asyncio.gather(*(post(app, path, body | more) for path, body in asked))

    plain = [answer.json for answer in asyncio.run(all_at_once({"return_token_ids": True}))]
    choices = [choice for body in plain for choice in body["choices"]]
    assert [c["token_ids"] for c in choices] == [row["output_token_ids"] for row in rows]
    assert [c["message"]["content"] if "message" in c else c["text"] for c in choices] == [
        r["text"] for r in rows
    ]
    assert [c["finish_reason"] for c in choices] == [row["finish_reason"] for row in rows]
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    for kind, logprobs in ((CHAT, True), (TEXT, 0)):
        mine = [{"logprobs": logprobs} | body for path, body in asked if path == kind]
        found = [c for body in mine for c in ask(app, kind, body).json["choices"]]
        told = [
            c["logprobs"].get("token_logprobs") or [p["logprob"] for p in c["logprobs"]["content"]]
            for c in found
        ]
        wanted = [
            row["token_logprobs"] for row in rows if (row["request_id"] < "4") == (kind == CHAT)
        ]
        assert [pytest.approx(part, abs=1e-4) for part in wanted] == told
    streams = asyncio.run(all_at_once({"stream": True}))
    told = [text for answer in streams for text in texts(answer.events)]
    assert told == [row["text"] for row in rows]


def without_cache(usage):
    """The usage but for what depends on earlier requests."""
    return usage | {"prompt_tokens_details": None}


def test_usage_says_what_the_cache_saved(app):
    body = {"prompt": list(range(7, 207)), "max_tokens": 2}
    cached = [
        ask(app, TEXT, body).json["usage"]["prompt_tokens_details"]["cached_tokens"]
        for _ in range(2)
    ]
    assert cached[0] == 0 < cached[1] < 200
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    for more in ({}, {"n": 3}, {"prompt": [body["prompt"], body["prompt"]]}):
        whole, streamed = (
            ask(app, TEXT, body | more).json["usage"],
            ask(app, TEXT, body | more | stream).events[-2]["usage"],
        )
        assert whole == streamed and whole["completion_tokens_details"] == {"reasoning_tokens": 0}
        assert (
            whole["prompt_tokens_details"]["cached_tokens"]
            == whole["prompt_tokens"] // 200 * cached[1]
        )


def test_usage_and_metrics_add_up(app):
    body = ask(app, CHAT, FRANCE | {"max_tokens": 30, "ignore_eos": True}).json
    usage, spec = body["usage"], body["metrics"]["speculative_decoding"]
    assert usage["completion_tokens"] == 30 and usage["total_tokens"] == 30 + usage["prompt_tokens"]
    assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"] > 0
    accepted = sum(j * count for j, count in enumerate(spec["acceptance_histogram"]))
    assert accepted == spec["num_accepted_draft_tokens"] and len(spec["acceptance_histogram"]) == 4
    assert spec["mean_acceptance_length"] == 1 + accepted / spec["num_spec_steps"] > 1
    assert spec["num_spec_tokens"] == 3 and spec["num_draft_tokens"] > accepted

    stream = {"stream": True, "max_tokens": 30, "ignore_eos": True}
    events = ask(app, CHAT, FRANCE | stream | {"stream_options": {"include_usage": True}}).events
    assert events[-2]["choices"] == [] and without_cache(events[-2]["usage"]) == without_cache(
        usage
    )
    assert events[-2]["metrics"]["speculative_decoding"] == spec
    assert all(event["usage"] is None for event in events[:-2])
    bare = ask(app, CHAT, FRANCE | stream).events
    assert bare[-2]["metrics"]["speculative_decoding"] == spec and "usage" not in bare[-2]


def test_stream_sends_the_first_token_alone_and_steps_one_by_one(app):
    ids = ask(app, TEXT, {"prompt": "Once", "max_tokens": 20, "return_token_ids": True}).json[
        "choices"
    ][0]["token_ids"]
    events = ask(
        app, TEXT, {"prompt": "Once", "max_tokens": 20, "return_token_ids": True, "stream": True}
    ).events
    steps = [event["choices"][0]["token_ids"] for event in events[:-1]]
    assert [token for step in steps for token in step] == ids
    assert len(steps[0]) == 1 and max(map(len, steps)) > 1


@pytest.mark.parametrize("stop", ["Paris", ["is Paris. T", "zzz", "is Pa"]])
def test_a_stop_string_and_what_may_become_one_is_never_told(app, stop):
    whole = ask(app, CHAT, FRANCE | {"stop": []}).json["choices"][0]["message"]["content"]
    choice = ask(app, CHAT, FRANCE | {"stop": stop}).json["choices"][0]
    stops = [stop] if isinstance(stop, str) else stop
    first = min(whole.find(stop) for stop in stops if stop in whole)
    assert choice["message"]["content"] == whole[:first] and choice["finish_reason"] == "stop"
    assert texts(ask(app, CHAT, FRANCE | {"stop": stop, "stream": True}).events) == [whole[:first]]


def test_a_stop_token_ends_a_choice_and_is_not_in_its_text(app, service):
    ids = ask(app, CHAT, FRANCE | {"return_token_ids": True}).json["choices"][0]["token_ids"]
    body = FRANCE | {"stop_token_ids": [ids[4]], "return_token_ids": True}
    choice = ask(app, CHAT, body).json["choices"][0]
    end = ids.index(ids[4]) + 1
    assert choice["token_ids"] == ids[:end] and choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == service.text.decode(ids[: end - 1])
    assert texts(ask(app, CHAT, body | {"stream": True}).events) == [choice["message"]["content"]]


def test_echo_has_prompt_and_logprobs_as_evaluations_read_them(app, service):
    ids = service.text.encode("The capital of France is Paris.")
    body = {
        "prompt": [ids, ids[:3]],
        "max_tokens": 1,
        "echo": True,
        "logprobs": 1,
        "temperature": 0,
    }
    choices = ask(app, TEXT, body).json["choices"]
    for choice, prompt in zip(choices, (ids, ids[:3]), strict=True):
        found = choice["logprobs"]
        assert found["tokens"][: len(prompt)] == [
            service.text.decode_with_special([i]) for i in prompt
        ]
        assert len(found["tokens"]) == len(prompt) + 1
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        starts = found["text_offset"]
        assert [starts[i] + len(t) for i, t in enumerate(found["tokens"])][:-1] == starts[1:]
        for token, logprob, top in list(
            zip(*(found[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True)
        )[1:]:
            assert top[token] == logprob <= max(top.values()) <= 0 and len(top) <= 2
    shared = [choice["logprobs"]["token_logprobs"][1:3] for choice in choices]
    assert shared[0] == pytest.approx(shared[1], abs=1e-4)
    nothing = ask(app, TEXT, body | {"max_tokens": 0}).json
    assert nothing["usage"]["completion_tokens"] == 0
    assert len(nothing["choices"][0]["logprobs"]["tokens"]) == len(ids)
    pieces = ask(app, TEXT, body | {"max_tokens": 9, "stream": True}).events
    assert texts(pieces) == [
        c["text"] for c in ask(app, TEXT, body | {"max_tokens": 9}).json["choices"]
    ]


def test_choices_of_a_prompt_share_its_log_probabilities(app, service):
    """The first choice computes them; an answer and a stream show them in each."""
    body = {
        "prompt": ["Once upon a time", "Hi there"],
        "n": 3,
        "echo": True,
        "logprobs": 2,
        "max_tokens": 4,
    }
    body |= {"temperature": 0.9, "seed": 1, "ignore_eos": True}
    asked = prepare_generation(CompletionRequest.read(body), service.config, service.text)
    assert [c.sequence.sampling.prompt_logprobs for c in asked.choices] == [True, False, False] * 2

    whole = [
        choice["logprobs"]["token_logprobs"] for choice in ask(app, TEXT, body).json["choices"]
    ]
    assert whole[0][1:5] == whole[1][1:5] == whole[2][1:5]
    streamed = [[] for _ in whole]
    for event in ask(app, TEXT, body | {"stream": True}).events[:-1]:
        for choice in event["choices"]:
            streamed[choice["index"]] += (choice["logprobs"] or {"token_logprobs": []})[
                "token_logprobs"
            ]
    assert [part[1:] for part in streamed] == [pytest.approx(part[1:], abs=1e-4) for part in whole]


def test_chat_logprobs_are_of_every_token(app):
    body = FRANCE | {"logprobs": True, "top_logprobs": 2, "max_tokens": 8}
    found = ask(app, CHAT, body).json["choices"][0]["logprobs"]["content"]
    assert len(found) == 8 and all(len(place["top_logprobs"]) == 2 for place in found)
    assert all(place["logprob"] == place["top_logprobs"][0]["logprob"] for place in found)  # greedy
    events = ask(app, CHAT, body | {"stream": True}).events[:-1]
    streamed = [
        c["logprobs"]["content"] for event in events for c in event["choices"] if c["logprobs"]
    ]
    assert [place["token"] for part in streamed for place in part] == [
        place["token"] for place in found
    ]


def test_refusals_have_openais_form_and_their_own_status(app):
    long = {"prompt": [5] * 5000}
    cases = [
        (ask(app, TEXT, long), 400, "prompt_too_long", "prompt"),
        (ask(app, TEXT, long | {"stream": True}), 400, "prompt_too_long", "prompt"),
        (ask(app, TEXT, {"prompt": [10**6]}), 400, "bad_token_id", "prompt"),
        (ask(app, TEXT, {"prompt": ""}), 400, "prompt_empty", "prompt"),
        (ask(app, CHAT, FRANCE | {"model": "gpt"}), 404, "model_not_found", "model"),
        (ask(app, TEXT, {"prompt": "a" * 200_000}), 413, "body_too_large", None),
        (asyncio.run(request(app, "POST", TEXT, b"{")), 400, "bad_json", None),
        (asyncio.run(get(app, "/nowhere")), 404, "no_route", None),
        (asyncio.run(get(app, TEXT)), 405, "no_route", None),
        (asyncio.run(get(app, "/v1/models/gpt")), 404, "model_not_found", "model"),
        (ask(app, "/detokenize", {"tokens": [10**6]}), 400, "bad_token_id", "tokens"),
    ]
    for answer, status, code, param in cases:
        error = answer.json["error"]
        assert (answer.status, error["code"], error["param"]) == (status, code, param)
        assert (
            error.keys() == {"message", "type", "param", "code"}
            and answer.headers["content-type"] == "application/json"
        )


def test_who_leaves_frees_his_slot_in_the_next_step(app, service):
    async def leave(body):
        steps = service.engine.counters().num_steps
        async with exchange(app, "POST", TEXT, json.dumps(ENDLESS | body).encode()) as talk:
            while service.engine.counters().num_steps < steps + 3:
                await asyncio.sleep(0.005)
            if body.get("stream"):
                assert parse_event((await talk.parts.get()).decode())["choices"]
        answer = await post(app, TEXT, {"prompt": "a", "max_tokens": 2})
        return (
            answer.status,
            service.engine.occupancy().num_running,
            service.snapshot().gauges,
            len(asyncio.all_tasks()),
        )

    for body in ({"stream": True}, {"stream": False}, {"n": 4}, {"stream": True, "n": 4}):
        status, num_running, gauges, num_tasks = asyncio.run(leave(body))
        assert (status, num_running, num_tasks) == (200, 0, 1)
        assert (
            gauges["num_requests_running"]
            == gauges["num_requests_waiting"]
            == gauges["num_kv_blocks_used"]
            == 0
        )


def test_a_full_queue_refuses_at_once_and_has_room_again(app, service):
    async def main():
        async with exchange(app, "POST", TEXT, json.dumps(ENDLESS | {"n": 16}).encode()):
            while service.in_flight.sequences < 16:
                await asyncio.sleep(0.005)
            refused = [
                await post(app, TEXT, {"prompt": "a"} | extra) for extra in ({}, {"stream": True})
            ]
        return refused, await post(app, TEXT, {"prompt": "a", "max_tokens": 2})

    refused, later = asyncio.run(main())
    for answer in refused:
        assert answer.status == 429 and answer.json["error"]["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
    assert later.status == 200


def test_a_slow_reader_holds_nobody_up_and_gets_everything(app):
    body = {"prompt": "Once", "max_tokens": 40, "stream": True}

    async def main():
        async with exchange(app, "POST", TEXT, json.dumps(body).encode()) as slow:
            slow.reads.clear()
            other = await post(app, TEXT, body)
            slow.reads.set()
            parts = []
            while (part := await slow.parts.get()) is not None:
                parts.append(part)
        return other, [parse_event(part) for part in b"".join(parts).decode().split("\n\n") if part]

    other, events = asyncio.run(main())
    assert texts(events) == texts(other.events)


def test_api_keys_guard_what_costs_and_nothing_else(service):
    guarded = copy.copy(service)
    guarded.keys = ApiKeys.of(["one", "two", "schlüssel", "voilà", "Å"])
    app = build_app(guarded)
    for key in (
        {},
        {"Authorization": "Bearer three"},
        {"Authorization": "two"},
        {"Authorization": "Bearer é"},
    ):
        answer = asyncio.run(post(app, TEXT, {"prompt": "a"}, key))
        assert answer.status == 401 and answer.json["error"]["code"] == "invalid_api_key"
    assert (
        ask(app, TEXT, {"prompt": "a", "max_tokens": 1}, Authorization="Bearer two").status == 200
    )
    for key in ("schlüssel", "voilà", "Å", " \tone\t "):
        assert (
            asyncio.run(get(app, "/v1/models", {"Authorization": f"Bearer {key}"})).status == 200
        )  # UTF-8, as curl
    assert asyncio.run(get(app, "/v1/models")).status == 401
    assert (
        asyncio.run(get(app, "/health")).status == 200
        and asyncio.run(get(app, "/metrics")).status == 200
    )


def test_the_tokenizer_can_be_asked(app, service):
    found = ask(app, "/tokenize", {"prompt": "Hello there"}).json
    assert found["tokens"] == service.text.encode("Hello there") and found["count"] == len(
        found["tokens"]
    )
    assert ask(app, "/detokenize", {"tokens": found["tokens"]}).json == {
        "prompt": service.text.decode_with_special(found["tokens"])
    }
    chat = ask(app, "/tokenize", FRANCE).json["tokens"]
    assert chat == service.text.encode_chat(FRANCE["messages"])
    assert found["token_strs"] is None and found["max_model_len"] == service.max_model_len
    named = ask(app, "/tokenize", {"prompt": "Hello there", "return_token_strs": True}).json
    assert named["token_strs"] == [service.text.token_strings([id])[0] for id in found["tokens"]]
    asked = {"add_generation_prompt": False, "add_special_tokens": False}
    assert chat[: len(ask(app, "/tokenize", FRANCE | asked).json["tokens"])] == (
        service.text.encode(service.text.render_chat(FRANCE["messages"], False), False)
    )
    begun = {"messages": [*FRANCE["messages"], {"role": "assistant", "content": "It is"}]}
    begun |= {"add_generation_prompt": False, "continue_final_message": True}
    ids = ask(app, "/tokenize", begun).json["tokens"]
    assert ask(app, "/detokenize", {"tokens": ids}).json["prompt"].endswith("It is")
    refused = ask(app, "/tokenize", FRANCE | {"continue_final_message": True})
    assert refused.status == 400 and refused.json["error"]["param"] == "continue_final_message"
    assert asyncio.run(get(app, "/tokenizer_info")).json["eos_token"] == "<|end|>"
    [model] = asyncio.run(get(app, "/v1/models")).json["data"]
    assert model["max_model_len"] == service.max_model_len
    assert model["num_spec_tokens"] == service.config.speculative.max_depth


def test_counters_are_told_to_the_last_digit():
    lines = prometheus_text(
        Snapshot({"prompt_tokens_total": 12_345_678, "generation_tokens_total": 0.25})
    ).splitlines()
    assert (
        "eagle_ray_prompt_tokens_total 12345678" in lines
        and "eagle_ray_generation_tokens_total 0.25" in lines
    )


def test_open_routes_are_computed_once_for_many_requests(service, monkeypatch):
    made, scraped = [], []
    real = openapi.openapi
    monkeypatch.setattr(openapi, "openapi", lambda *args: made.append(args) or real(*args))
    openapi.openapi_body.cache_clear()

    async def publish(snapshot):
        scraped.append(snapshot)
        await asyncio.sleep(0.02)
        return Snapshot(snapshot.counters, {"replicas": len(scraped)})

    async def main():
        app = build_app(service, publish)
        many = [get(app, path) for path in ("/openapi.json", "/metrics") for _ in range(20)]
        return await asyncio.gather(*many), await get(app, "/metrics")

    answers, last = asyncio.run(main())
    assert {answer.status for answer in answers} == {200}
    assert len(made) == 1 and len(scraped) <= 3
    assert f"eagle_ray_replicas {len(scraped)}" in last.body.decode()  # made after it was asked for


def test_metrics_count_what_was_answered(app, service):
    def counted():
        lines = asyncio.run(get(app, "/metrics")).body.decode().splitlines()
        return {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in lines
            if line[0] != "#"
        }

    before = counted()
    body = ask(app, TEXT, {"prompt": "Once", "max_tokens": 9, "n": 2, "ignore_eos": True}).json
    after = counted()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["eagle_ray_generation_tokens_total"] == 18 == body["usage"]["completion_tokens"]
    spec = body["metrics"]["speculative_decoding"]
    assert grown["eagle_ray_spec_decode_num_drafts_total"] == spec["num_spec_steps"]
    assert (
        grown["eagle_ray_spec_decode_num_accepted_tokens_total"]
        == spec["num_accepted_draft_tokens"]
    )
    per_place = [
        v
        for k, v in grown.items()
        if k.startswith("eagle_ray_spec_decode_num_accepted_tokens_per_pos")
    ]
    assert sum(per_place) == spec["num_accepted_draft_tokens"]
    assert grown["eagle_ray_time_to_first_token_seconds_count"] == 2
    assert after["eagle_ray_num_slots"] == 4 and after["eagle_ray_num_requests_running"] == 0


def test_a_dead_engine_is_no_health(service):
    from tests.support.toy_models import llama_engine

    engine = llama_engine(1)
    ended = Service(ServeConfig(), engine, None)
    ended.close()
    app = build_app(ended)
    for answer in (asyncio.run(get(app, "/health")), ask(app, TEXT, {"prompt": [5]})):
        assert answer.status == 503 and answer.json["error"]["code"] == "engine_dead"


def test_a_target_without_words_takes_and_gives_token_ids():
    from tests.support.toy_models import llama_engine

    mute = Service(ServeConfig(), llama_engine(2, 8, 3, 3), None)
    app = build_app(mute)
    body = {
        "prompt": [5, 6],
        "max_tokens": 7,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": 1,
    }
    choice = ask(app, TEXT, body).json["choices"][0]
    assert len(choice["token_ids"]) == 7 and choice["text"] == ""
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    events = ask(app, TEXT, body | {"stream": True}).events[:-1]
    assert [i for event in events for i in event["choices"][0]["token_ids"]] == choice["token_ids"]
    for refused in (
        ask(app, TEXT, {"prompt": "a"}),
        ask(app, CHAT, FRANCE),
        ask(app, TEXT, body | {"stop": "a"}),
    ):
        assert refused.status == 400 and refused.json["error"]["code"] == "no_tokenizer"
        assert refused.json["error"]["message"].endswith("cannot be used: give token ids")
    mute.close()
