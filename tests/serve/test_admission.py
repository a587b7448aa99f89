"""Which requests a replica takes: by sequences and tokens, shared between keys, released once however they end."""

import asyncio
import gc
import json
import random

import pytest

from eagle_ray.config import load_serve_config
from eagle_ray.serve.access import ApiKeys
from eagle_ray.serve.admission import Admission, FairQueue, Reservation
from eagle_ray.serve.app import build_app
from eagle_ray.serve.http.http_answers import ApiError
from eagle_ray.serve.service import Service
from tests.support.serving import exchange, post
from tests.support.toy_models import llama_engine

TEXT = "/v1/completions"
KEYS = ApiKeys.of(["flood", "other"])


def toy_service(num_slots=4, keys=None, **serving):
    """A service over a toy model of at most 64 tokens a sequence, without a tokenizer."""
    config = load_serve_config(
        None, env={}, overrides={f"serving.{name}": value for name, value in serving.items()}
    )
    return Service(config, llama_engine(num_slots), None, keys)


@pytest.fixture
def small_service():
    service = toy_service(max_queued=8, max_queued_tokens=100)
    yield service
    service.close()


async def wait_until(condition):
    while not condition():
        await asyncio.sleep(0.002)


def ask(service, body, **headers):
    return asyncio.run(post(build_app(service), TEXT, body, headers))


def refusal_message(answer, status, code, param=None):
    error = answer.json["error"]
    assert (answer.status, error["code"], error["param"]) == (status, code, param)
    return error["message"]


def test_request_larger_than_an_empty_server_is_refused_with_400(small_service):
    """The parameter and the limit are named; n and a list of prompts count alike."""
    assert "13 choices" in refusal_message(
        ask(small_service, {"prompt": [5], "n": 13, "max_tokens": 1}), 400, "too_many_choices", "n"
    )
    many = {"prompt": [[5]] * 100, "n": 8, "max_tokens": 1}
    message = refusal_message(ask(small_service, many), 400, "too_many_choices", "prompt")
    assert "800 choices" in message and "at most 12" in message
    limit = small_service.admission.limit.tokens
    wide = {"prompt": [5] * 10, "n": 12, "max_tokens": limit // 12}
    assert str(limit) in refusal_message(
        ask(small_service, wide), 400, "too_many_tokens", "max_tokens"
    )
    assert small_service.in_flight == Reservation()


def test_tokens_count_beside_sequences(small_service):
    """Two requests of one sequence each: the queue's tokens are what the second lacks."""
    service, long = small_service, {"prompt": [5] * 4, "max_tokens": 2**31 - 1, "ignore_eos": True}

    async def main():
        app, n = build_app(service), service.admission.limit.tokens // service.max_model_len
        async with exchange(app, "POST", TEXT, json.dumps(long | {"n": n}).encode()):
            await wait_until(lambda: service.in_flight.sequences == n)
            held = service.in_flight
            return n, held, await post(app, TEXT, long)

    n, held, second = asyncio.run(main())
    assert held.tokens == n * service.max_model_len  # max_tokens is cut to what the model can hold
    assert (
        n < 12
        and "tokens" in refusal_message(second, 429, "queue_full")
        and int(second.headers["retry-after"]) >= 1
    )


def test_what_is_held_is_released_once_however_a_request_ends(small_service):
    """Finished, refused by the engine, cancelled at any moment, streamed or not: nothing is held afterwards."""
    chance, app = random.Random(0), build_app(small_service)
    bodies = [
        {"prompt": [5, 6], "max_tokens": 3, "n": 2},
        {"prompt": [5, 6], "max_tokens": 40, "ignore_eos": True},
        {"prompt": [10**6], "max_tokens": 3},
    ]

    async def come_and_go():
        body = chance.choice(bodies) | {"stream": chance.random() < 0.5}
        async with exchange(app, "POST", TEXT, json.dumps(body).encode()) as talk:
            if chance.random() < 0.3:
                await talk.started.wait()
            for _ in range(chance.choice([0, 1, 3, 50])):
                await asyncio.sleep(0)

    async def main():
        for _ in range(10):
            await asyncio.gather(*(come_and_go() for _ in range(30)))
            assert small_service.in_flight == Reservation()
        await wait_until(lambda: not small_service.engine.inner.has_work)

    asyncio.run(main())


def test_admission_is_exact_over_random_requests():
    """A plain count of what is held says the same, with one client and with several."""
    chance = random.Random(1)
    for num_clients in (1, 3):
        limit = Reservation(20, 1000)
        admission, held = Admission(limit, num_clients), []
        for _ in range(2000):
            if held and chance.random() < 0.5:
                held.pop(chance.randrange(len(held)))[2].__exit__(None, None, None)
            need, client = (
                Reservation(chance.randint(1, 22), chance.randint(1, 1100)),
                chance.randrange(num_clients),
            )
            block = admission.admit(need, client)
            try:
                block.__enter__()
            except ApiError as error:
                assert error.status in (400, 429)
            else:
                held.append((client, need, block))
            total = sum((need for _, need, _ in held), Reservation())
            assert admission.in_flight == total and total.fits(limit)


def test_a_key_that_floods_leaves_room_to_others():
    admission, blocks = Admission(Reservation(100, 100_000), num_clients=2), []
    with pytest.raises(ApiError) as full:
        while True:
            blocks.append(admission.admit(Reservation(1, 10), client=0))
            blocks[-1].__enter__()
    assert full.value.status == 429 and admission.in_flight.sequences == 75
    admission.check(Reservation(10, 100), client=1)
    with pytest.raises(ApiError) as never:
        admission.check(Reservation(76, 100), client=1)
    assert never.value.status == 400


def test_smallest_server_admits_the_longest_sequence_of_any_key():
    """One slot, no queue: a share of three quarters would refuse everything."""
    admission = Admission(Reservation(1, 64), num_clients=2, longest=64)
    for client in (0, 1):
        with admission.admit(Reservation(1, 64), client), pytest.raises(ApiError) as full:
            admission.check(Reservation(1, 10), client=1 - client)
        assert full.value.status == 429


def test_the_wait_is_estimated_from_how_fast_requests_end(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("eagle_ray.serve.admission.time.monotonic", lambda: now[0])
    admission = Admission(Reservation(10, 10_000))
    for _ in range(5):
        with admission.admit(Reservation(1, 100)):
            now[0] += 2.0
    with admission.admit(Reservation(10, 1000)), pytest.raises(ApiError) as refusal:
        admission.check(Reservation(4, 100))
    assert refusal.value.status == 429 and 6 <= int(refusal.value.headers["Retry-After"]) <= 8


def test_a_flood_of_one_key_does_not_delay_another():
    """40 sequences of one key, then 4 of another: the latter end while most of the former still wait."""
    service = toy_service(keys=KEYS, max_queued=100)
    app, ends = build_app(service), []

    async def ask_as(key):
        body = {"prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True}
        answer = await post(app, TEXT, body, {"Authorization": f"Bearer {key}"})
        assert answer.status == 200
        ends.append(key)

    async def main():
        flood = [asyncio.ensure_future(ask_as("flood")) for _ in range(40)]
        await wait_until(
            lambda: len(ends) + service.in_flight.sequences >= 40
        )  # some may have ended by then
        await asyncio.gather(*(ask_as("other") for _ in range(4)))
        await asyncio.gather(*flood)

    try:
        asyncio.run(main())
    finally:
        service.close()
    assert len(ends) == 44 and "other" not in ends[24:]
    assert service.in_flight == Reservation()


def test_long_answers_of_one_key_leave_a_slot_to_another():
    """Two tokens of the other key are there before any of the long answers that came first."""
    service = toy_service(keys=KEYS, max_queued=100)
    app, ends = build_app(service), []

    async def ask_as(key, max_tokens):
        body = {"prompt": [5, 6, 7], "max_tokens": max_tokens, "ignore_eos": True}
        answer = await post(app, TEXT, body, {"Authorization": f"Bearer {key}"})
        assert answer.status == 200
        ends.append(key)

    async def main():
        flood = [asyncio.ensure_future(ask_as("flood", 60)) for _ in range(12)]
        await wait_until(lambda: service.engine.inner.has_work)
        await ask_as("other", 2)
        await asyncio.gather(*flood)

    try:
        asyncio.run(main())
    finally:
        service.close()
    assert ends[0] == "other"


def test_reserved_place_is_given_to_a_client_without_one():
    async def main():
        queue, over = FairQueue(num_clients=2, max_turns=3, num_reserved=1), asyncio.Event()
        held = []

        async def hold(client):
            async with queue.turn(client, 10):
                held.append(client)
                await over.wait()

        tasks = [asyncio.ensure_future(hold(client)) for client in (0, 0, 0, 0, 1, 1)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        before = list(held)
        over.set()
        await asyncio.gather(*tasks)
        return before, queue.num_free

    assert asyncio.run(main()) == ([0, 0, 1], 3)


def test_clients_that_all_wait_are_served_alike_in_tokens():
    """One asks for long answers, one for short ones, one comes late: each gets its share from then on."""
    cost = {0: 90, 1: 30, 2: 30}
    went = []

    async def main():
        queue = FairQueue(num_clients=3, max_turns=2)
        over = asyncio.Event()

        async def ask_on(client):
            while not over.is_set():
                async with queue.turn(client, cost[client]):
                    went.append(client)
                    await asyncio.sleep(0)

        tasks = [asyncio.ensure_future(ask_on(client)) for client in (0, 0, 0, 1, 1, 1)]
        await wait_until(lambda: len(went) > 400)
        early = len(went)
        tasks += [asyncio.ensure_future(ask_on(2)) for _ in range(3)]
        await wait_until(lambda: len(went) > early + 700)
        over.set()
        await asyncio.gather(*tasks)
        return went[:early], went[early : early + 700]

    early, late = asyncio.run(main())
    assert early.count(1) * 30 == pytest.approx(early.count(0) * 90, rel=0.1)
    assert late.count(2) * 30 == pytest.approx(late.count(1) * 30, rel=0.1)
    assert late.count(2) * 30 == pytest.approx(late.count(0) * 90, rel=0.1)


def test_a_turn_that_is_cancelled_gives_its_place_back():
    async def main():
        queue, chance = FairQueue(num_clients=2, max_turns=3), random.Random(2)

        async def hold(client):
            async with queue.turn(client, 10):
                await asyncio.sleep(0)

        for _ in range(50):
            tasks = [asyncio.ensure_future(hold(chance.randrange(2))) for _ in range(20)]
            for _ in range(chance.randrange(6)):
                await asyncio.sleep(0)
            for task in chance.sample(tasks, 12):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        held = [queue.turn(0, 1) for _ in range(3)]
        for turn in held:
            await asyncio.wait_for(turn.__aenter__(), 60)

    asyncio.run(main())


@pytest.mark.parametrize("declared", [4, 4096])
def test_client_that_over_reserves_does_not_delay_a_later_client(declared):
    """The sequences of the first that end before the second's four are few, whatever the first declares."""
    ended = []

    async def main():
        queue = FairQueue(num_clients=2, max_turns=6)

        async def run(client, tokens, used):
            async with queue.turn(client, tokens) as turn:
                for _ in range(used):
                    await asyncio.sleep(0)
                turn.used = used
            ended.append(client)

        async def flood():
            while ended.count(1) < 4 and len(ended) < 1000:
                await run(0, declared, 4)

        flooding = [asyncio.ensure_future(flood()) for _ in range(24)]
        await wait_until(lambda: len(ended) > 40)
        num_before = len(ended)
        await asyncio.gather(*(run(1, 20, 20) for _ in range(4)))
        num_after = len(ended)
        await asyncio.gather(*flooding)
        return num_after - num_before

    assert asyncio.run(main()) < 100


def test_turn_may_end_in_the_tick_that_cancels_a_waiting_turn():
    async def main():
        queue, over = FairQueue(num_clients=2, max_turns=1), asyncio.Event()

        async def hold(client):
            async with queue.turn(client, 10):
                await over.wait()
            return "ended"

        tasks = [asyncio.ensure_future(hold(client)) for client in (0, 1, 1, 0)]
        await asyncio.sleep(0)
        over.set()
        tasks[1].cancel()
        tasks[2].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, *cancelled, last = asyncio.run(main())
    assert (first, last) == ("ended", "ended")
    assert all(isinstance(error, asyncio.CancelledError) for error in cancelled)


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_with_waiting_choices_raises_no_error(stream):
    service, errors = toy_service(num_slots=1, keys=KEYS, max_queued=100), []
    body = {"prompt": [5], "n": 20, "max_tokens": 40, "ignore_eos": True, "stream": stream}

    async def main():
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: errors.append(context)
        )
        headers = {"Authorization": "Bearer flood"}
        async with exchange(build_app(service), "POST", TEXT, json.dumps(body).encode(), headers):
            await wait_until(lambda: service.engine.inner.has_work)
        await wait_until(lambda: service.fair_queue.num_free == 1)

    try:
        asyncio.run(main())
        gc.collect()
    finally:
        service.close()
    assert not errors and service.in_flight == Reservation()
