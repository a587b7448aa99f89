"""Service: one engine with its tokenizer, shared by the requests of many clients.

All requests run in the engine's batch. If the queue is full, a request is refused at once. Clients
with different API keys take turns (``admission``). A cancelled request frees its slots at the
engine's next step.

    service = Service.start(config, WorkerPlan(threads=2), keys=ApiKeys.of(["secret"]))
    body = await service.answer(await service.read(request, num_bytes))
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from typing import Any, TypeVar

from eagle_ray.assembly.worker_plan import WorkerPlan
from eagle_ray.config import ServeConfig
from eagle_ray.core.errors import RequestError
from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.async_engine import AsyncEngine
from eagle_ray.engine.engine import Engine
from eagle_ray.requests.answer_models import Chunk, Detokenized, StreamEvent, Tokens
from eagle_ray.requests.embedding_bodies import EmbeddingsRequest
from eagle_ray.requests.openai_bodies import (
    BodyClass,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from eagle_ray.requests.sequence_answers import ChoiceChunks, RequestAnswers, num_logprobs
from eagle_ray.sampling.grammar import MAX_COMPILING
from eagle_ray.serve.access import ApiKeys
from eagle_ray.serve.admission import Admission, FairQueue, IdleSlots, Reservation, num_reserved
from eagle_ray.serve.endpoint_metrics import ReplicaMetrics, Snapshot
from eagle_ray.serve.engine_start import load_engine
from eagle_ray.serve.generation_request import (
    GenerationRequest,
    ResponseEvents,
    min_need,
    named_as_by,
    named_error,
    need_of,
    num_tokens,
    prepare_generation,
)
from eagle_ray.serve.http.http_answers import END_OF_STREAM, ApiError, api_error, event, json_body
from eagle_ray.serve.http.request_body import body_too_large, check_containers, parse
from eagle_ray.text.null_tokenizer import NullTokenizer
from eagle_ray.text.tokenizer import Tokenizer

# Bytes of a body, tokens or log-probabilities; a tenth of a second's tokenizing.
LARGE_BODY = 1 << 16
SHORT_CHUNK = 1 << 10  # log-probabilities of a chunk that the event loop itself makes
GenerationClass = type[ChatRequest] | type[CompletionRequest] | type[ResponsesRequest]
# What a line of a batch may ask for.
LINE_KINDS: dict[str, GenerationClass] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
}
NO_EMBEDDINGS = (
    "this server generates text and embeds none. Start one with task: embed for embeddings."
)
QUEUED_PER_CACHED_TOKEN = 8  # max_queued_tokens: auto
Result = TypeVar("Result")
Queued = Chunk | Exception | None


class Threads:
    """Threads that parse and write the texts of requests.

    One thread is for small requests. Large requests take seconds and delay only each other. Clients
    with large requests take turns by their sizes. With several clients, one more thread is reserved
    for clients that have no large request running.

    Args:
        name: name of the threads.
        num_clients: number of API keys; 1 without keys.
    """

    def __init__(self, name: str, num_clients: int):
        num_spare = 1 if num_clients > 1 else 0
        num_long = 1 + num_spare
        self._short = ThreadPoolExecutor(1, f"eagle-ray-{name}")
        self._long = ThreadPoolExecutor(num_long, f"eagle-ray-long-{name}")
        self._turns = FairQueue(num_clients, num_long, num_spare)

    async def run(self, size: int, client: int, work: Callable[..., Result], *args: Any) -> Result:
        """Run the work in a thread and return its result. Work that has not begun can be cancelled.

        Args:
            size: bytes of the request's body, or tokens of its answer.
            client: number of the client's API key.
            work: function to run.
            args: arguments of the function.
        """
        loop = asyncio.get_running_loop()
        if size <= LARGE_BODY:
            return await loop.run_in_executor(self._short, work, *args)
        async with self._turns.turn(client, size):
            return await loop.run_in_executor(self._long, work, *args)


class Service:
    """One engine with its tokenizer, which it owns. Call close() to end it."""

    def __init__(
        self,
        config: ServeConfig,
        engine: Engine,
        text: Tokenizer | None,
        keys: ApiKeys | None = None,
    ):
        self.config, self.text = config, text or NullTokenizer()
        self.keys = keys or ApiKeys()
        self.max_model_len, self.vocab_size = engine.max_model_len, engine.target.vocab_size
        self.num_spec_tokens = engine.num_spec_tokens
        self.meter = ReplicaMetrics()
        self.admission = Admission(_limit(config, engine), len(self.keys), self.max_model_len)
        self._idle_slots = IdleSlots(self.admission, engine.scheduler.num_slots)
        self.fair_queue = _fair_queue(len(self.keys), engine.scheduler.num_slots)
        num_clients = max(1, len(self.keys))
        self.readers, self._writers = Threads("reader", num_clients), Threads("writer", num_clients)
        self._compilations = [
            FairQueue(1, max_turns=_num_compilations(num_clients)) for _ in range(num_clients)
        ]
        self._num_slots = engine.scheduler.num_slots
        blocks = engine.target.cache.blocks
        self._num_cached = blocks.num_blocks * blocks.size
        self.engine = AsyncEngine(engine)

    @classmethod
    def start(
        cls,
        config: ServeConfig,
        plan: WorkerPlan,
        keys: ApiKeys | None = None,
        owns_process: bool = False,
    ) -> Service:
        """Load the models. Raises ConfigError and EngineError.

        Args:
            config: configuration of the endpoint.
            plan: devices and threads of a worker.
            keys: digests of the API keys; None without keys.
            owns_process: whether no other engine runs in this process (``EngineArgs``).
        """
        bundle = load_engine(config, plan, owns_process)
        return cls(config, bundle.engine, bundle.tokenizer, keys)

    @property
    def is_alive(self) -> bool:
        return self.engine.is_alive

    def close(self) -> None:
        self.engine.close()

    @property
    def in_flight(self) -> Reservation:
        """Return the sequences and tokens of all requests in flight."""
        return self.admission.in_flight

    def snapshot(self) -> Snapshot:
        return self.meter.snapshot(
            self.engine.counters(), self.engine.occupancy(), self.in_flight.sequences
        )

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if a request names another model than this service's."""
        if name is not None and name != self.config.model_name:
            raise ApiError(
                404,
                f"there is no model {name!r} here; there is {self.config.model_name!r}",
                "model",
                "model_not_found",
            )

    async def parse(self, kind: type[BodyClass], body: bytes, client: int = 0) -> BodyClass:
        """Parse the body of a request. Raises ApiError.

        Args:
            kind: class of the body.
            body: bytes of the body.
            client: number of the client's API key.
        """
        if len(body) <= LARGE_BODY:
            return parse(kind, body)
        return await self.readers.run(
            len(body), client, _parse_long, kind, body, self.max_model_len
        )

    async def read(
        self,
        parsed: ChatRequest | CompletionRequest | ResponsesRequest,
        num_bytes: int,
        is_typed: bool = False,
        client: int = 0,
    ) -> GenerationRequest:
        """Prepare a parsed request for the engine. Raises ApiError and RequestError.

        Args:
            parsed: parsed body.
            num_bytes: size of the body. Large requests delay only each other.
            is_typed: whether the client's types allow no null (``http_answers.typed_form``).
            client: number of the client's API key.
        """
        request: ChatRequest | CompletionRequest
        response: ResponsesRequest | None = None
        if isinstance(parsed, ResponsesRequest):
            request, response = await self.readers.run(num_bytes, client, parsed.chat), parsed
        else:
            request = parsed
        self.check_model(request.model)
        num_prompts = len(request.prompts) if isinstance(request, CompletionRequest) else 1
        with named_as_by(response):
            self.admission.check(
                min_need(request, self.config, self.max_model_len), client, num_prompts
            )
            return await self.readers.run(
                num_bytes,
                client,
                prepare_generation,
                request,
                self.config,
                self.text,
                is_typed,
                client,
                response,
            )

    async def tokenize(self, request: TokenizeRequest, num_bytes: int, client: int = 0) -> bytes:
        """Return the response body with the token ids of a prompt or conversation. Raises ApiError
        and RequestError.
        """
        self.check_model(request.model)
        return await self.readers.run(num_bytes, client, self._tokens_body, request)

    def _tokens_body(self, request: TokenizeRequest) -> bytes:
        prompt, add_special_tokens = request.prompt or "", request.add_special_tokens
        messages = request.conversation
        if messages is not None:
            prompt = self.text.render_chat(
                messages, request.add_generation_prompt, request.continue_final_message
            )
        if add_special_tokens is None:  # a chat template writes its own
            add_special_tokens = messages is None
        ids = self.text.encode(prompt, add_special_tokens)
        names = self.text.token_strings(ids) if request.return_token_strs else None
        body: Tokens = {
            "count": len(ids),
            "max_model_len": self.max_model_len,
            "tokens": ids,
            "token_strs": names,
        }
        return json_body(body)

    async def detokenize(
        self, request: DetokenizeRequest, num_bytes: int, client: int = 0
    ) -> bytes:
        """Return the response body with the text of token ids. Raises ApiError."""
        self.check_model(request.model)

        def make() -> bytes:
            if (largest := max(request.tokens, default=0)) >= self.vocab_size:
                raise ApiError(
                    400, f"tokens: {largest} is not in the vocabulary", "tokens", "bad_token_id"
                )
            body: Detokenized = {"prompt": self.text.decode_with_special(request.tokens)}
            return json_body(body)

        return await self.readers.run(num_bytes, client, make)

    async def answer(self, generation: GenerationRequest) -> bytes:
        """Return the response body with all choices. If one fails, the others are aborted.

        Raises ApiError, RequestError and EngineError.
        """
        with named_as_by(generation.response), self._admitted(generation):
            tasks = [
                asyncio.ensure_future(self._generate(generation, choice.sequence))
                for choice in generation.choices
            ]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
            size = _num_values(generation)
            return await self._writers.run(
                size, generation.client, lambda: json_body(generation.body())
            )

    async def _compile(self, generation: GenerationRequest, sequence: Sequence) -> None:
        """Compile a sequence's grammar before its turn, so that no other client's sequence waits for it.

        Raises RequestError and EngineError.
        """
        if sequence.grammar_spec is not None:
            async with self._compilations[generation.client].turn(client=0, tokens=1):
                try:
                    await self.engine.compile_grammar(sequence)
                except RequestError as error:
                    raise named_error(error, generation) from None

    async def _generate(self, generation: GenerationRequest, sequence: Sequence) -> None:
        await self._compile(generation, sequence)
        async with self._turn(generation, sequence):
            await self.engine.generate(sequence)

    async def answer_line(self, client: int, endpoint: str, body: bytes) -> tuple[int, bytes]:
        """Wait for a free slot and answer one line of a batch. Returns status and body.

        The status is 503 if the engine ended meanwhile, and 429 if the line may be sent again. A
        bad line raises nothing; its status and body say what is wrong.

        Args:
            client: number of the client's API key.
            endpoint: url of the line, one of URLS in batch_lines.
            body: body of the line.
        """
        try:
            if not self.is_alive:  # this replica ends soon: the line has not harmed it
                raise ApiError(429, "this replica's engine has ended", code="engine_dead")
            if len(body) > self.config.serving.max_body_bytes:
                raise body_too_large(self.config.serving.max_body_bytes)
            return 200, await self._answer_body(client, endpoint, body)
        except Exception as error:
            refusal = api_error(error)
            return refusal.status, json_body(refusal.body())

    async def _answer_body(self, client: int, endpoint: str, body: bytes) -> bytes:
        """Wait for a free slot and return the response body of a batch's line. Raises for a bad line."""
        if endpoint not in LINE_KINDS:
            raise ApiError(400, NO_EMBEDDINGS, code="no_embeddings")
        request = await self.parse(LINE_KINDS[endpoint], body, client)
        if request.stream:
            raise ApiError(
                400,
                "stream: a batch's line is answered whole. Leave it out.",
                "stream",
                "bad_value",
            )
        generation = await self.read(request, len(body), client=client)
        await self._idle_slots.wait(need_of(generation, self.max_model_len))
        return await self.answer(generation)

    async def compute(self, sequences: list[Sequence], client: int) -> None:
        """Run sequences that generate nothing, as slots become free. If one fails, the others are aborted.

        Raises ApiError, RequestError and EngineError.

        Args:
            sequences: sequences to run.
            client: number of the client's API key.
        """
        num_tokens = sum(len(sequence.prompt_ids) for sequence in sequences)
        need = Reservation(min(len(sequences), self._num_slots), min(num_tokens, self._num_cached))
        arrived_at = time.monotonic()
        semaphore = asyncio.Semaphore(self._num_slots)
        with self.admission.admit(need, client):
            tasks = [
                asyncio.ensure_future(self._compute_one(sequence, client, semaphore))
                for sequence in sequences
            ]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                self._count(sequences, arrived_at)

    async def _compute_one(
        self, sequence: Sequence, client: int, semaphore: asyncio.Semaphore
    ) -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(semaphore)
            if self.fair_queue is not None:
                num_tokens = len(sequence.prompt_ids)
                turn = await stack.enter_async_context(self.fair_queue.turn(client, num_tokens))
                turn.used = num_tokens
            await self.engine.generate(sequence)

    async def embeddings(
        self, request: EmbeddingsRequest, num_bytes: int, client: int = 0
    ) -> bytes:
        """Return the response body with the embedding of each input. If one fails, the others are aborted.

        Raises ApiError, RequestError and EngineError.

        Args:
            request: parsed body.
            num_bytes: size of the body. Large requests delay only each other.
            client: number of the client's API key.
        """
        raise ApiError(400, NO_EMBEDDINGS, code="no_embeddings")

    async def events(self, generation: GenerationRequest) -> AsyncGenerator[str, None]:
        """Yield the events of a streamed answer.

        Before the first event it raises ApiError, RequestError and EngineError. A later error
        becomes the last event.
        """
        is_begun, answers, request = False, generation.answers, generation.response
        response = None if request is None else ResponseEvents(generation, request)
        async with aclosing(self.chunks(generation)) as chunks:
            try:
                async for chunk in chunks:
                    is_begun = True
                    size = num_logprobs(chunk)
                    shown: Iterable[Chunk | StreamEvent] = (
                        [generation.shown(chunk)] if response is None else response.of(chunk)
                    )
                    for body in shown:
                        yield await self._event(body, size, generation.client)
            except Exception as error:
                if not is_begun:
                    raise
                last = api_error(error)
                yield event(last.body() if response is None else response.failed(last))
                return
        if response is not None:
            return
        if answers.has_usage:
            yield event(
                await self._writers.run(
                    _num_values(generation), generation.client, answers.last_chunk
                )
            )
        yield END_OF_STREAM

    async def chunks(self, generation: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of all choices, in the order in which the engine makes them.

        Raises ApiError, RequestError and EngineError, before the first chunk or between two chunks.
        """
        with named_as_by(generation.response), self._admitted(generation):
            answers = generation.answers
            # Holds text only: a slow reader delays no other request.
            queue: asyncio.Queue[Queued] = asyncio.Queue()
            echoes = {choice.first: asyncio.Event() for choice in generation.choices}
            # There is nothing to wait for.
            if not generation.echo or generation.request.tops is None:
                for echo in echoes.values():
                    echo.set()
            tasks = [
                asyncio.ensure_future(
                    self._follow(
                        generation, ChoiceChunks(answers, choice), queue, echoes[choice.first]
                    )
                )
                for choice in generation.choices
            ]
            num_left = len(tasks)
            try:
                while num_left:
                    item = await queue.get()
                    num_left -= item is None
                    if isinstance(item, Exception):
                        raise item
                    if item is not None:
                        is_before_last = num_left > 1 or answers.has_usage
                        yield item if is_before_last else _with_metrics(answers, item)
            finally:
                for task in tasks:
                    task.cancel()

    async def _follow(
        self,
        generation: GenerationRequest,
        chunks: ChoiceChunks,
        queue: asyncio.Queue[Queued],
        echo: asyncio.Event,
    ) -> None:
        """Put the chunks of one choice into the queue, followed by None or by the error.

        Args:
            generation: request of the choice.
            chunks: chunks of the choice.
            queue: queue that all choices of the request share.
            echo: event that the prompt's first choice sets when it has a token, and so the prompt's
                log-probabilities. Other choices of the prompt wait for it before they put chunks
                into the queue, and do not hold up the engine.
        """
        choice = chunks.choice
        count = num_sent = 0
        try:
            await self._compile(generation, choice.sequence)
            async with (
                self._turn(generation, choice.sequence),
                aclosing(self.engine.stream(choice.sequence)) as counts,
            ):
                async for count in counts:
                    if choice.sequence is choice.first:
                        echo.set()
                    if echo.is_set():
                        num_sent = count
                        await self._put_chunks(generation, chunks, count, queue)
            await echo.wait()
            if num_sent < count:
                await self._put_chunks(generation, chunks, count, queue)
            queue.put_nowait(None)
        except Exception as error:  # the reader raises it, or tells the client
            queue.put_nowait(error)

    async def _put_chunks(
        self,
        generation: GenerationRequest,
        chunks: ChoiceChunks,
        count: int,
        queue: asyncio.Queue[Queued],
    ) -> None:
        """Put the chunks up to `count` output ids into the queue.

        Log-probabilities of a long echo are written in a thread.
        """
        tops = generation.request.tops
        num_new = 0 if tops is None else chunks.num_unsent(count) * (1 + tops)
        made = chunks.until(count)
        new = (
            list(made)
            if num_new <= SHORT_CHUNK
            else await self._writers.run(num_new, generation.client, list, made)
        )
        for chunk in new:
            queue.put_nowait(chunk)

    async def _event(self, body: Chunk | StreamEvent, size: int, client: int) -> str:
        return (
            event(body)
            if size <= SHORT_CHUNK
            else await self._writers.run(size, client, event, body)
        )

    @asynccontextmanager
    async def _turn(self, generation: GenerationRequest, sequence: Sequence) -> AsyncIterator[None]:
        """Wait for the sequence's turn at the engine, if clients with several keys share it."""
        if self.fair_queue is None:
            yield
            return
        async with self.fair_queue.turn(
            generation.client, num_tokens(sequence, self.max_model_len)
        ) as turn:
            try:
                yield
            finally:
                turn.used = sequence.num_tokens

    @contextmanager
    def _admitted(self, generation: GenerationRequest) -> Iterator[None]:
        """Count a request as in flight while the block runs, and count its outcome. Raises
        ApiError if it does not fit.
        """
        arrived_at = time.monotonic()
        with self.admission.admit(
            need_of(generation, self.max_model_len), generation.client, len(generation.prompts)
        ):
            try:
                yield
            finally:
                self._count([choice.sequence for choice in generation.choices], arrived_at)

    def _count(self, sequences: list[Sequence], arrived_at: float) -> None:
        finished = [sequence for sequence in sequences if sequence.finish_reason is not None]
        for sequence in finished:
            self.meter.answered(sequence, arrived_at)
        self.meter.aborted(len(sequences) - len(finished))


def _parse_long(kind: type[BodyClass], body: bytes, max_model_len: int) -> BodyClass:
    check_containers(body, max_model_len)
    return parse(kind, body)


def _with_metrics(answers: RequestAnswers, chunk: Chunk) -> Chunk:
    """Add the speculation metrics to the last choice's last chunk, if no chunk with the usage follows."""
    is_last = chunk["choices"][0]["finish_reason"] and all(
        c.sequence.finish_reason for c in answers.choices
    )
    if is_last:
        chunk["metrics"] = answers.metrics()
    return chunk


def _limit(config: ServeConfig, engine: Engine) -> Reservation:
    """Return the maximum sequences and tokens in flight: a full engine and the queue."""
    blocks = engine.target.cache.blocks
    num_cached = blocks.num_blocks * blocks.size
    queued = config.serving.max_queued_tokens
    num_queued = QUEUED_PER_CACHED_TOKEN * num_cached if queued == "auto" else queued
    return Reservation(
        engine.scheduler.num_slots + config.serving.max_queued, num_cached + num_queued
    )


def _fair_queue(num_clients: int, num_slots: int) -> FairQueue | None:
    """Return a queue that reserves slots for clients without one; None for a single client.

    The engine gets at most as many sequences as it has slots. If more waited inside the engine,
    they would take the reserved slots.
    """
    return FairQueue(num_clients, num_slots, num_reserved(num_slots)) if num_clients > 1 else None


def _num_compilations(num_clients: int) -> int:
    """Return how many grammars of one client are compiled at once. Several clients share the total."""
    return MAX_COMPILING if num_clients == 1 else MAX_COMPILING // 2


def _num_values(generation: GenerationRequest) -> int:
    """Estimate the size of a response in tokens, alternatives included. It decides which thread writes it."""
    shown = sum(
        choice.sequence.num_tokens if generation.echo else len(choice.sequence.output_ids)
        for choice in generation.choices
    )
    return shown * (1 + (generation.request.tops or 0))
