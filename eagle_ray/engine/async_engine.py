"""AsyncEngine: an Engine that steps in its own thread and is awaited from an event loop.

    engine = AsyncEngine(engine)
    sequence = await engine.generate(Sequence("a", ids, SamplingSettings()))

or streamed, the first token before any draft is verified:

    async for count in engine.stream(sequence):
        print(sequence.output_ids[:count])

The loop never runs a step; the thread touches the loop only to hand over finished sequences and
counts.
"""

from __future__ import annotations

import asyncio
import atexit
import queue
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from eagle_ray.core.counters import EngineCounters
from eagle_ray.core.errors import EngineError, RankError, RequestError
from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.engine import Engine
from eagle_ray.models.runtime import release_memory
from eagle_ray.sampling.grammar import MAX_COMPILING

Answer = TypeVar("Answer")
THREADS_EXIT_S = 5.0  # seconds that a process waits for the threads of its engines before it ends
_stops: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = (
    weakref.WeakKeyDictionary()
)


@atexit.register
def _end_threads() -> None:
    """End the engines' threads before Python ends: a thread that is in torch then would abort the process."""
    deadline = time.monotonic() + THREADS_EXIT_S
    threads = list(_stops.items())
    for _, stop in threads:
        stop()
    for thread, _ in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


class LoopMailbox:
    """Messages from the engine's thread to one event loop. All messages sent before the loop runs wake it once."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._sent: deque[Callable[[], None]] = deque()
        self._is_waking = False

    def post(self, note: Callable[[], None]) -> None:
        """Schedule a callback on the loop; ignored if the loop is closed."""
        self._sent.append(note)
        if not self._is_waking:
            self._is_waking = True
            with suppress(RuntimeError):  # the loop is closed, perhaps only just now
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_waking = False  # set before the loop below, so that a later note wakes again
        while self._sent:
            self._sent.popleft()()


@dataclass(frozen=True, slots=True, eq=False)
class PendingRequest:
    """A sequence that was submitted to the engine's thread, and the future that waits for it."""

    sequence: Sequence
    future: asyncio.Future
    post: LoopMailbox
    listener: Callable[[], None] | None

    def finish(self, error: Exception | None = None) -> None:
        """Resolve the future from the engine's thread."""
        self.post.post(partial(self._resolve, error))

    def _resolve(self, error: Exception | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(self.sequence)
        else:
            self.future.set_exception(error)


@dataclass(frozen=True, slots=True, eq=False)
class PendingCall:
    """A function that the engine's thread calls between two steps, and the future of its result."""

    work: Callable[[Engine], Any]
    future: asyncio.Future
    post: LoopMailbox

    def run(self, engine: Engine) -> None:
        """Call the function in the engine's thread and resolve the future."""
        try:
            result = self.work(engine)
        except Exception as error:
            self.finish(error)
        else:
            self.post.post(lambda: None if self.future.done() else self.future.set_result(result))

    def finish(self, error: Exception | None = None) -> None:
        assert error is not None, "only a result resolves it otherwise"
        self.post.post(lambda: None if self.future.done() else self.future.set_exception(error))


Command = tuple[Callable[[Any], None], PendingRequest | PendingCall]
"""What the thread shall do with a call: add it, drop it or run it."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Slots and KV blocks in use at one moment.

    Attributes:
        num_running: sequences that hold a slot.
        num_blocks_used: KV blocks that slots hold, of num_blocks.
    """

    num_running: int
    num_blocks_used: int
    num_blocks: int


class StepLoop:
    """The loop that runs in the engine's thread. It keeps no reference to an AsyncEngine, which may be dropped.

    Attributes:
        engine: engine that the thread steps; None once the thread has ended.
        inbox: commands for the thread; None ends it.
        calls: requests in flight, by sequence.
        error: reason why requests are refused; None while they are not.
        is_over: set once the thread has ended or will never return from a step.
        lock: guards `error` and the entries of `calls`: a call enters the inbox, or is recorded as
            in flight, only while no error is set.
    """

    def __init__(self, engine: Engine):
        self.engine: Engine | None = engine
        self.inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()  # None is the end
        self.calls: dict[Sequence, PendingRequest] = {}
        self.error: EngineError | None = None
        self.is_over = threading.Event()
        self.lock = threading.Lock()
        self._last: tuple[EngineCounters, Occupancy] | None = None

    def run(self) -> None:
        """Run steps until the inbox has the end marker or a step fails. Then free the engine's memory."""
        try:
            self._step_until_end()
        finally:
            self.is_over.set()

    def _step_until_end(self) -> None:
        # OpenMP's setting is per thread: without it this one would take all cores.
        torch.set_num_threads(torch.get_num_threads())
        error = EngineError("the engine was closed")
        try:
            while self._receive():
                for sequence in self._alive.step():
                    call = self.calls.pop(sequence, None)
                    if call is not None:  # None if `give_up` has answered it
                        call.finish(sequence.error)
        except Exception as fault:  # an error of a step ends every sequence in flight
            error = EngineError(f"the engine failed: {type(fault).__name__}: {fault}")
            error.__cause__ = fault
            traceback.clear_frames(fault.__traceback__)  # their variables hold the engine
        self._fail_all(error)

        # Counters stay readable after the engine is dropped.
        idle = replace(self.occupancy(), num_running=0, num_blocks_used=0)
        self._last = (self.counters(), idle)
        self._alive.close()
        self.engine = None
        release_memory()

    def give_up(self, reason: str) -> None:
        """Fail all requests from another thread, because the engine's thread is stuck in a step
        that waits for a lost rank.

        If the step returns after all, the thread finds its calls answered, and ends.
        """
        if not self.is_over.is_set():
            self._fail_all(EngineError(f"the engine failed: {reason}"))
            self.inbox.put(None)
            self.is_over.set()

    def counters(self) -> EngineCounters:
        """Return a copy of the engine's counters."""
        engine = self.engine
        if engine is not None:
            running = engine.running_lengths()
            return replace(engine.counters, fallbacks=engine.fallbacks, running=running)
        assert self._last is not None, "kept before the engine is dropped"
        return self._last[0]

    def occupancy(self) -> Occupancy:
        """Return the current occupancy, possibly in the middle of a step."""
        engine = self.engine
        if engine is None:
            assert self._last is not None, "kept before the engine is dropped"
            return self._last[1]
        blocks = engine.target.cache.blocks
        used = blocks.num_blocks - blocks.num_available
        return Occupancy(engine.scheduler.num_running, used, blocks.num_blocks)

    @property
    def _alive(self) -> Engine:
        """Return the engine, in its own thread, which ends before the engine is dropped."""
        assert self.engine is not None
        return self.engine

    def add(self, call: PendingRequest) -> None:
        try:
            self._alive.add(call.sequence)
        except Exception as error:
            # The engine has not taken the sequence, so only this request fails.
            call.finish(error)
            if isinstance(error, RankError):
                raise
        else:
            call.sequence.listener = call.listener
            with self.lock:
                if self.error is None:
                    self.calls[call.sequence] = call
            if self.error is not None:  # given up meanwhile
                call.finish(self.error)

    def run_call(self, call: PendingCall) -> None:
        call.run(self._alive)

    def abort(self, call: PendingRequest) -> None:
        """Abort a request. Ignored if it is answered already, or was refused as a second request for one sequence."""
        if self.calls.get(call.sequence) is call:
            self.calls.pop(call.sequence, None)
            self._alive.abort(call.sequence)

    def _receive(self) -> bool:
        """Handle arrived commands, waiting if there is nothing else to do. Return False once closed."""
        while True:
            try:
                order = self.inbox.get(block=not self._alive.has_work)
            except queue.Empty:
                return True
            if order is None:
                return False
            handle, call = order
            handle(call)

    def _fail_all(self, error: EngineError) -> None:
        """Take no more requests, and fail all that are in flight and those that arrived too late."""
        with self.lock:
            self.error = self.error or error
            failed: list[PendingRequest | PendingCall] = [*self.calls.values()]
            self.calls.clear()

        with suppress(queue.Empty):
            while True:
                command = self.inbox.get_nowait()
                if command is not None:
                    _, call = command
                    failed.append(call)
        for each in failed:
            each.finish(error)


class AsyncEngine:
    """Runs an engine in a thread and owns it: no other code may step it. close() ends the thread.

    Requests in flight get EngineError then. The thread also ends once nothing refers to the
    AsyncEngine. The engine's memory is freed with its thread.
    """

    def __init__(self, engine: Engine):
        self.step_loop = StepLoop(engine)
        self._post: LoopMailbox | None = None
        # Grammars have their own threads, so that other work never waits for them.
        self._compiler = ThreadPoolExecutor(MAX_COMPILING, "eagle-ray-compiler")
        self._thread = threading.Thread(
            target=self.step_loop.run, name="eagle-ray-engine", daemon=True
        )
        engine.lockstep.tell_if_stuck(self.step_loop.give_up)
        self._thread.start()
        stop = partial(self.step_loop.inbox.put, None)
        _stops[self._thread] = stop
        self._finalizer = weakref.finalize(self, stop)
        self._finalizer.atexit = False  # _end_threads ends it

    async def generate(self, sequence: Sequence) -> Sequence:
        """Run a sequence and return it finished.

        Cancelling the caller frees the sequence's slot at the next step.

        Raises:
            RequestError: the sequence has failed.
            EngineError: the engine has ended.
            Exception: what Engine.add raises.
        """
        return await self._answer(sequence, sequence.listener)

    async def call(self, work: Callable[[Engine], Answer]) -> Answer:
        """Run a function with the engine in the engine's thread, between two steps, and return its result."""
        steps = self.step_loop
        post = self._mailbox()
        call = PendingCall(work, post.loop.create_future(), post)
        with steps.lock:
            if steps.error is not None:
                raise steps.error
            steps.inbox.put((steps.run_call, call))
        return await call.future

    async def stream(self, sequence: Sequence) -> AsyncGenerator[int, None]:
        """Yield the number of output ids whenever it grows. The sequence's lists may be read up to that number.

        Raises as generate does. Closing the iterator early frees the slot at the next step. A slow
        reader delays no other request.
        """
        post = self._mailbox()
        counts: asyncio.Queue[int | None] = asyncio.Queue()

        def listener() -> None:
            post.post(partial(counts.put_nowait, len(sequence.output_ids)))

        answer = asyncio.ensure_future(self._answer(sequence, listener))
        answer.add_done_callback(lambda _: counts.put_nowait(None))
        try:
            while (count := await counts.get()) is not None:
                yield count
            await answer
        finally:
            answer.cancel()

    async def compile_grammar(self, sequence: Sequence) -> None:
        """Compile the sequence's grammar in advance, if it has one that is not compiled yet. Raises as Engine.add does.

        generate and stream compile it, too. A compilation that has not begun is cancelled with its
        caller.
        """
        engine = self.inner
        if engine is not None and sequence.grammar_spec is not None and sequence.grammar is None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._compiler, engine.compile_grammar, sequence)

    async def _compile_in_turn(self, sequence: Sequence) -> None:
        """Compile the sequence's grammar, waiting while the compiler is busy: compilations are bounded in time."""
        while True:
            try:
                return await self.compile_grammar(sequence)
            except RequestError as error:
                if error.code != "grammar_queue_full":
                    raise

    @property
    def inner(self) -> Engine | None:
        return self.step_loop.engine

    @property
    def is_alive(self) -> bool:
        """Return whether the engine still serves requests."""
        return self.step_loop.error is None

    def counters(self) -> EngineCounters:
        """Return a copy of the engine's counters."""
        return self.step_loop.counters()

    def occupancy(self) -> Occupancy:
        """Return the current occupancy, possibly in the middle of a step."""
        return self.step_loop.occupancy()

    def close(self) -> None:
        """End the thread after its current step, wait for it, and free the engine's memory.

        A thread whose step never ends, because a rank is lost, is left behind.
        """
        self.step_loop.inbox.put(None)
        self.step_loop.is_over.wait()
        if self.inner is None:
            self._thread.join()
        self._compiler.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, sequence: Sequence, listener: Callable[[], None] | None) -> Sequence:
        await self._compile_in_turn(sequence)
        steps = self.step_loop
        post = self._mailbox()
        call = PendingRequest(sequence, post.loop.create_future(), post, listener)
        with steps.lock:
            if steps.error is not None:
                raise steps.error
            steps.inbox.put((steps.add, call))
        try:
            return await call.future
        except asyncio.CancelledError:
            steps.inbox.put((steps.abort, call))
            raise

    def _mailbox(self) -> LoopMailbox:
        """Return the mailbox of the running event loop. There is usually only one loop."""
        loop = asyncio.get_running_loop()
        if self._post is None or self._post.loop is not loop:
            self._post = LoopMailbox(loop)
        return self._post
