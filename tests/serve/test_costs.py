"""What one client's request costs delays no other client: large bodies, grammars, and routes that need no key."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import pytest

from eagle_ray.assembly.engine_sizes import PREFILL_TOKENS
from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.config import load_serve_config
from eagle_ray.sampling import grammar
from eagle_ray.serve import engine_start
from eagle_ray.serve import service as services
from eagle_ray.serve.access import ApiKeys
from eagle_ray.serve.app import build_app
from eagle_ray.serve.service import LARGE_BODY, Service
from tests.support.serving import SETTINGS, Answer, exchange, get, post, request

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ALPHA, BETA = {"Authorization": "Bearer alpha"}, {"Authorization": "Bearer beta"}
HI = {"prompt": "Hi", "max_tokens": 1}
MAX_BODY_BYTES = 8 << 20


@pytest.fixture(scope="module")
def shared_service() -> Iterator[Service]:
    """A service that two clients share."""
    settings = SETTINGS | {"serving.max_body_bytes": MAX_BODY_BYTES}
    service = Service.start(
        load_serve_config(None, env={}, overrides=settings),
        WorkerPlan(),
        ApiKeys.of(["alpha", "beta"]),
    )
    yield service
    service.close()


def words(size: int) -> list[str]:
    return [f"{i} {'x' * (size // 1024)}" for i in range(1000)]


def text(size: int) -> str:
    return "the quick fox " * (size // 14)


def lists(size: int) -> list[Any]:
    return [[]] * (size // 4)


USER = {"role": "user", "content": "Hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
VALUES: dict[str, dict[str, Callable[[int], Any]]] = {
    TEXT: {
        "prompt": text,
        "prompt of texts": lambda size: ["Hi"] * (size // 6),
        "prompt of ids": lambda size: [5] * (size // 3),
        "prompt of lists": lists,
        "stop": lambda size: ["x" * (size // 64)] * 64,
        "bad_words": words,
        "choice": words,
        "regex": lambda size: "a" * size,
        "grammar": lambda size: "\n" * (size // 2),
        "json_schema": lambda size: {"enum": [f"v{i}" for i in range(size // 12)]},
        "response_format": lambda size: {
            "type": "json_schema",
            "json_schema": {"schema": {"enum": lists(size)}},
        },
        "structured_outputs": lambda size: {"json": json.dumps({"enum": lists(size)})},
        "logit_bias": lambda size: {str(i): 1 for i in range(size // 12)},
        "allowed_token_ids": lambda size: list(range(size // 8)),
        "stop_token_ids": lambda size: [5] * (size // 3),
        "metadata": lambda size: {"a": text(size)},
        "user": text,
        "unknown": lists,
    },
    CHAT: {
        "messages": lambda size: [USER] * (size // 32),
        "messages with calls": lambda size: [CALLED] * (size // 150),
        "messages with a text": lambda size: [USER | {"content": text(size)}],
        "messages with parts": lambda size: [
            USER | {"content": [{"type": "text", "text": "a"}] * (size // 32)}
        ],
        "tools": lambda size: [
            {"type": "function", "function": {"name": f"f{i}"}} for i in range(size // 60)
        ],
        "tool_choice": text,
        "chat_template_kwargs": lambda size: {f"a{i}": 1 for i in range(size // 14)},
    },
    RESPONSES: {
        "input": lambda size: [USER] * (size // 32),
        "instructions": text,
        "tools of responses": lambda size: [{"type": "function", "name": "f"}] * (size // 40),
    },
    "/tokenize": {"prompt to tokenize": text},
    "/detokenize": {"tokens": lambda size: [5] * (size // 3)},
}
SMALL = {TEXT: HI, CHAT: {"messages": [USER]}, RESPONSES: {"input": "Hi"}}
NAMES = [(path, name) for path, names in VALUES.items() for name in names]


def large_body(path: str, name: str, size: int) -> bytes:
    """Return a body of about `size` bytes, most of them in one parameter, which begins the name."""
    return json.dumps(SMALL.get(path, {}) | {name.split()[0]: VALUES[path][name](size)}).encode()


async def send(app: Any, path: str, body: bytes) -> Answer:
    return await request(app, "POST", path, body, ALPHA)


def test_large_request_does_not_delay_a_small_one(shared_service):
    """They wait for a thread of their own, which is busy; a small request is answered meanwhile."""
    app, released = build_app(shared_service), threading.Event()
    bodies = [(path, large_body(path, name, 2 * LARGE_BODY)) for path, name in NAMES]
    assert min(len(body) for _, body in bodies) > LARGE_BODY

    async def main() -> tuple[list[Answer], list[Any], list[int]]:
        busy = asyncio.ensure_future(shared_service.readers.run(LARGE_BODY + 1, 0, released.wait))
        try:
            asked = [asyncio.ensure_future(send(app, path, body)) for path, body in bodies]
            small = [
                await post(app, TEXT, HI, BETA),
                await post(app, TEXT, HI, ALPHA),
                await get(app, "/health"),
            ]
            early = [task for task in asked if task.done()]
        finally:
            released.set()
        await busy
        return small, early, [(await task).status for task in asked]

    small, early, statuses = asyncio.run(main())
    assert [answer.status for answer in small] == [200, 200, 200]
    assert not early and set(statuses) <= {200, 400, 429}


def test_large_request_of_one_key_delays_none_of_another(shared_service):
    released = threading.Event()
    body = large_body(TEXT, "user", 2 * LARGE_BODY)

    async def main() -> Answer:
        busy = asyncio.ensure_future(shared_service.readers.run(LARGE_BODY + 1, 0, released.wait))
        try:
            return await request(build_app(shared_service), "POST", TEXT, body, BETA)
        finally:
            released.set()
            await busy

    assert asyncio.run(main()).status == 200


def test_clients_with_large_requests_take_turns(shared_service):
    """The second client comes last and is answered second."""
    app, released, order = build_app(shared_service), threading.Event(), []
    body = json.dumps(HI | {"user": "x" * LARGE_BODY}).encode()

    async def ask(name: str, headers: dict[str, str]) -> None:
        await request(app, "POST", TEXT, body, headers)
        order.append(name)

    async def main() -> None:
        busy = asyncio.ensure_future(shared_service.readers.run(LARGE_BODY + 1, 0, released.wait))
        asked = [asyncio.ensure_future(ask("alpha", ALPHA)) for _ in range(4)]
        await asyncio.sleep(0.05)
        asked.append(asyncio.ensure_future(ask("beta", BETA)))
        await asyncio.sleep(0.05)
        released.set()
        await asyncio.gather(busy, *asked)

    asyncio.run(main())
    assert order.index("beta") <= 1


def test_a_client_that_leaves_leaves_no_work(shared_service, monkeypatch):
    app, released, parsed = build_app(shared_service), threading.Event(), []
    real = services.parse
    monkeypatch.setattr(
        services, "parse", lambda kind, body: parsed.append(body) or real(kind, body)
    )
    body = json.dumps(HI | {"user": "x" * LARGE_BODY}).encode()

    async def main() -> None:
        busy = asyncio.ensure_future(shared_service.readers.run(LARGE_BODY + 1, 0, released.wait))
        async with AsyncExitStack() as stack:
            for _ in range(5):
                await stack.enter_async_context(exchange(app, "POST", TEXT, body, ALPHA))
            await asyncio.sleep(0.05)
        released.set()
        await busy
        await send(app, TEXT, body)

    asyncio.run(main())
    assert len(parsed) == 1


def test_grammar_delays_no_grammar_or_work_of_other_clients(shared_service, monkeypatch):
    """One client's are all slow to compile, and asyncio's own threads are busy."""
    app, released, real = build_app(shared_service), threading.Event(), grammar.matcher_of

    def slow(spec: Any, tokenizer: Any) -> Any:
        if spec.source.startswith("slow"):
            released.wait(60)
        return real(spec, tokenizer)

    monkeypatch.setattr(grammar, "matcher_of", slow)

    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, released.wait)
        try:
            slows = [
                asyncio.ensure_future(post(app, TEXT, HI | {"regex": f"slow{i}"}, ALPHA))
                for i in range(8)
            ]
            await asyncio.sleep(0.1)
            others = [post(app, TEXT, HI | {"regex": "ab[0-9]"}, BETA), post(app, TEXT, HI, BETA)]
            answers = await asyncio.wait_for(asyncio.gather(*others), 8)
            assert not any(task.done() for task in slows)
        finally:
            released.set()
        await busy
        return [answer.status for answer in [*answers, *await asyncio.gather(*slows)]]

    assert set(asyncio.run(main())) == {200}


@pytest.mark.slow  # 8 MB in each parameter; shorter: a large request delays no small one
@pytest.mark.parametrize(("path", "name"), NAMES)
def test_eight_megabyte_parameter_delays_no_client_by_a_second(shared_service, path, name):
    app = build_app(shared_service)
    body = large_body(path, name, MAX_BODY_BYTES - 100_000)

    async def main() -> tuple[int, float]:
        asked, worst = asyncio.ensure_future(send(app, path, body)), 0.0
        while not asked.done():
            began = time.monotonic()
            assert (await get(app, "/health")).status == 200
            assert (await post(app, TEXT, HI, BETA)).status == 200
            worst = max(worst, time.monotonic() - began)
            await asyncio.sleep(0.01)
        return (await asked).status, worst

    status, worst = asyncio.run(main())
    assert status in (200, 400, 413) and worst < 1.2


def test_endpoint_prefills_fewer_tokens_a_step_than_a_gpu_job(monkeypatch):
    asked = []

    def build(*arguments: Any) -> None:
        asked.append(arguments[2].prefill_tokens_on("cuda"))
        raise InterruptedError

    monkeypatch.setattr(engine_start, "build_in_thread", build)
    for wanted in ("auto", 256):
        config = load_serve_config(
            None, env={}, overrides=SETTINGS | {"serving.prefill_tokens": wanted}
        )
        with pytest.raises(InterruptedError):
            Service.start(config, WorkerPlan())
    own, chosen = asked
    assert own < PREFILL_TOKENS["cuda"] and chosen == 256
