"""Service: one engine and its words, behind the requests of many clients.

All of them share the engine's one batch. A full queue refuses at once; whoever leaves gives his slots back at the
engine's next step. Does not know HTTP or Ray.

    service = Service.start(config, threads=2)
    body = await service.answer(await service.read(request))
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from eagle_ray.config import ServeConfig
from eagle_ray.engine.async_engine import AsyncEngine
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.sequence import Sequence
from eagle_ray.pair import start_pair
from eagle_ray.serve.answers import Json, answer_of
from eagle_ray.serve.asked import Asked, Choice, asked_of
from eagle_ray.serve.chunks import ChoiceChunks, last_chunk, wants_usage
from eagle_ray.serve.errors import ApiError, api_error
from eagle_ray.serve.events import DONE, error_event, event
from eagle_ray.serve.meter import Meter
from eagle_ray.serve.no_text import NoText
from eagle_ray.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    num_characters,
)
from eagle_ray.serve.snapshot import Snapshot
from eagle_ray.serve.typed import without_nulls
from eagle_ray.text import Text

LONG = 1 << 16  # characters; a tenth of a second's tokenizing
Result = TypeVar("Result")
Said = "Json | Exception | None"


class Service:
    """Takes the engine over. close() ends it."""

    def __init__(self, config: ServeConfig, engine: Engine, text: Text | None):
        self.config, self.text = config, text or NoText()
        self.max_model_len, self.vocab_size = engine.max_model_len, engine.target.vocab_size
        self.num_spec_tokens = engine.num_spec_tokens
        self.meter = Meter()
        self._room = engine.scheduler.num_slots + config.serving.max_queued
        self._num_in_flight = 0
        self._reader = ThreadPoolExecutor(1, "eagle-ray-reader")
        self._long_reader = ThreadPoolExecutor(1, "eagle-ray-long-reader")  # megabytes hold up their like alone
        self._engine = AsyncEngine(engine)

    @classmethod
    def start(cls, config: ServeConfig, threads: int) -> Service:
        """Load the pair. Raises ConfigError and EngineError as build_pair does."""
        serving = config.serving
        gpus = 1 if serving.gpus_per_replica == "auto" else max(1, int(serving.gpus_per_replica))
        pair = start_pair(config.model, config.speculative, serving.slots, serving.kv_tokens, gpus, threads)
        return cls(config, pair.engine, pair.text)

    @property
    def is_alive(self) -> bool:
        return self._engine.is_alive

    def close(self) -> None:
        self._engine.close()

    def snapshot(self) -> Snapshot:
        return self.meter.snapshot(self._engine.counters(), self._engine.occupancy(), self._num_in_flight)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for another model than the one that is here; no name is this one."""
        if name is not None and name != self.config.model_name:
            raise ApiError(
                404, f"there is no model {name!r} here; there is {self.config.model_name!r}", "model", "model_not_found"
            )

    async def read(self, request: ChatRequest | CompletionRequest, is_typed: bool = False) -> Asked:
        """is_typed: see ``typed``. Raises ApiError and RequestError."""
        self.check_model(request.model)
        self._check_room()
        return await self._aside(request.num_characters, asked_of, request, self.config, self.text, is_typed)

    async def tokens(self, request: TokenizeRequest) -> list[int]:
        """The ids of a prompt, or of a conversation as it is answered. Raises ApiError and RequestError."""
        self.check_model(request.model)
        if request.messages is None:
            return await self._aside(len(request.prompt), self.text.encode, request.prompt, request.add_special_tokens)
        messages = [message.plain() for message in request.messages]
        return await self._aside(num_characters(request.messages), self.text.encode_chat, messages)

    async def spelled(self, request: DetokenizeRequest) -> str:
        """The text of token ids. Raises ApiError."""
        self.check_model(request.model)
        if (most := max(request.tokens, default=0)) >= self.vocab_size:
            raise ApiError(400, f"tokens: {most} is not in the vocabulary", "tokens", "bad_token_id")
        return await self._aside(len(request.tokens), self.text.spell, request.tokens)

    async def _aside(self, size: int, work: Callable[..., Result], *what: Any) -> Result:
        """Tokenize in a thread of its own: megabytes take seconds, in which everybody else goes on.

        size: characters or tokens; what is long waits for what is long only.
        """
        reader = self._long_reader if size > LONG else self._reader
        return await asyncio.get_running_loop().run_in_executor(reader, work, *what)

    async def answer(self, asked: Asked) -> Json:
        """All choices, or none: one that fails ends the others. Raises ApiError, RequestError, EngineError."""
        with self._admitted(asked):
            tasks = [asyncio.ensure_future(self._engine.generate(choice.sequence)) for choice in asked.choices]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
            body = await asyncio.to_thread(answer_of, asked, self.text)  # log-probabilities of thousands take seconds
            return without_nulls(body) if asked.is_typed else body

    async def events(self, asked: Asked) -> AsyncIterator[str]:
        """The stream's events, in the order in which the engine brings them. Raises as answer does, before the first.

        An error after that is an event itself, the last one.
        """
        with self._admitted(asked):
            said: asyncio.Queue[Said] = asyncio.Queue()  # holds text alone: a slow reader holds nobody else up
            tasks = [asyncio.ensure_future(self._follow(asked, choice, said)) for choice in asked.choices]
            num_left, is_begun = len(tasks), False
            try:
                while num_left:
                    item = await said.get()
                    num_left -= item is None
                    if isinstance(item, Exception):
                        if not is_begun:
                            raise item
                        yield error_event(api_error(item))
                        return
                    if item is not None:
                        is_begun = True
                        item = item if num_left > 1 or wants_usage(asked) else self._with_metrics(asked, item)
                        yield event(without_nulls(item) if asked.is_typed else item)
                if wants_usage(asked):
                    yield event(last_chunk(asked))
                yield DONE
            finally:
                for task in tasks:
                    task.cancel()

    async def _follow(self, asked: Asked, choice: Choice, said: asyncio.Queue) -> None:
        """Put one choice's chunks into the queue, and None or its error behind them."""
        chunks = ChoiceChunks(asked, choice, self.text)
        try:
            async for count in self._engine.stream(choice.sequence):
                for chunk in chunks.until(count):
                    said.put_nowait(chunk)
            said.put_nowait(None)
        except Exception as error:  # the one who reads raises it, or tells the client
            said.put_nowait(error)

    def _with_metrics(self, asked: Asked, chunk: Json) -> Json:
        """The last chunk of the last choice says how the drafts fared, where no usage follows."""
        is_last = chunk["choices"][0]["finish_reason"] and all(c.sequence.finish_reason for c in asked.choices)
        return chunk | {"metrics": last_chunk(asked)["metrics"]} if is_last else chunk

    @contextmanager
    def _admitted(self, asked: Asked) -> Iterator[None]:
        """Room for all choices of a request while they are in flight. Raises ApiError where the queue is full."""
        self._check_room()
        sequences = [choice.sequence for choice in asked.choices]
        self._num_in_flight += len(sequences)
        try:
            yield
        finally:
            self._num_in_flight -= len(sequences)
            self._count(sequences)

    def _check_room(self) -> None:
        if self._num_in_flight >= self._room:
            raise ApiError(429, f"{self._num_in_flight} sequences are in flight: try again", code="queue_full")

    def _count(self, sequences: list[Sequence]) -> None:
        finished = [sequence for sequence in sequences if sequence.finish_reason is not None]
        for sequence in finished:
            self.meter.answered(sequence)
        self.meter.aborted(len(sequences) - len(finished))
