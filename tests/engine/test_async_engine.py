"""The engine behind an event loop: answers, refusals, cancellation and death."""

import asyncio
import threading
import weakref

import pytest

from eagle_ray.core.errors import EngineError, RankError, RequestError
from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.async_engine import AsyncEngine
from eagle_ray.parallel.lockstep import Lockstep
from eagle_ray.requests.parameters import SamplingParams
from tests.support.toy_models import llama_engine, run


def test_many_callers_get_what_the_engine_alone_gives():
    prompts = [[5, i + 3] for i in range(20)]
    params = [SamplingParams(max_tokens=3 + i, temperature=0.7, seed=i) for i in range(20)]
    alone = [s.output_ids for s in run(llama_engine(4, 8, 3, 3), prompts, params)]

    async def together():
        engine = AsyncEngine(llama_engine(4, 8, 3, 3))
        calls = [
            engine.generate(Sequence(str(i), *pair))
            for i, pair in enumerate(zip(prompts, params, strict=True))
        ]
        sequences = await asyncio.gather(*calls)
        counters = engine.counters()
        engine.close()
        return [s.output_ids for s in sequences], counters

    outputs, counters = asyncio.run(together())
    assert outputs == alone
    assert counters.num_output_tokens == sum(map(len, alone)) and counters.num_slots == 4


def test_a_bad_request_is_its_own_problem():
    async def main():
        engine = AsyncEngine(llama_engine(2))
        good = engine.generate(Sequence("good", [5], SamplingParams(max_tokens=4)))
        bad = engine.generate(Sequence("bad", [5] * 500, SamplingParams()))
        results = await asyncio.gather(good, bad, return_exceptions=True)
        engine.close()
        return results

    good, bad = asyncio.run(main())
    assert len(good.output_ids) == 4
    assert isinstance(bad, RequestError) and bad.code == "prompt_too_long"


def test_failed_add_raises_for_its_caller_and_others_continue():
    async def main():
        engine = AsyncEngine(llama_engine(2))
        twice = Sequence("twice", [5], SamplingParams(max_tokens=40, ignore_eos=True))
        first, again = engine.generate(twice), engine.generate(twice)
        broken = Sequence("unset", [5], SamplingParams())
        broken.sampling = None
        unset = engine.generate(broken)
        results = await asyncio.wait_for(
            asyncio.gather(first, again, unset, return_exceptions=True), 60
        )
        assert engine.is_alive
        engine.close()
        return results

    first, again, unset = asyncio.run(main())
    assert len(first.output_ids) == 40
    assert isinstance(again, ValueError) and isinstance(unset, AttributeError)


def test_adding_a_sequence_twice_leaves_the_first_one_unchanged():
    async def main():
        engine = AsyncEngine(llama_engine(1))
        twice = Sequence("twice", [5], SamplingParams(max_tokens=40, ignore_eos=True))
        counts = []

        async def listen():
            async for count in engine.stream(twice):
                counts.append(count)

        first = asyncio.ensure_future(listen())
        await asyncio.sleep(0)
        again, stream = asyncio.ensure_future(engine.generate(twice)), engine.stream(twice)
        await asyncio.sleep(0)
        again.cancel()
        with pytest.raises(ValueError, match="'twice' was already added"):
            await anext(stream)
        await asyncio.wait_for(first, 60)
        engine.close()
        return counts

    assert asyncio.run(main()) == list(range(1, 41))


def test_a_cancelled_caller_frees_its_slot():
    async def main():
        engine = AsyncEngine(llama_engine(1))
        forever = asyncio.ensure_future(
            engine.generate(Sequence("a", [5], SamplingParams(max_tokens=120, ignore_eos=True)))
        )
        await asyncio.sleep(0.05)
        forever.cancel()
        other = await engine.generate(Sequence("b", [6], SamplingParams(max_tokens=3)))
        engine.close()
        return other

    assert len(asyncio.run(main()).output_ids) <= 3


@pytest.mark.parametrize("in_flight", [0, 3])
def test_a_broken_step_fails_everyone_and_whoever_comes_later(in_flight):
    async def main():
        inner = llama_engine(2)
        inner.target.verify = None  # the next decode step cannot work
        engine = AsyncEngine(inner)
        calls = [
            engine.generate(Sequence(str(i), [5], SamplingParams(max_tokens=9)))
            for i in range(in_flight + 1)
        ]
        first = await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(EngineError):
            await engine.generate(Sequence("late", [5], SamplingParams()))
        return first

    assert all(
        isinstance(error, EngineError) and "TypeError" in str(error)
        for error in asyncio.run(main())
    )


@pytest.mark.parametrize("end", ["dropped", "closed", "failed"])
def test_an_engine_is_freed_with_its_thread(end):
    inner = llama_engine(2, 8, 3, 3)
    gone = weakref.ref(inner)
    if end == "failed":
        inner.target.verify = None
    before = set(threading.enumerate())
    engine = AsyncEngine(inner)
    del inner
    [thread] = set(threading.enumerate()) - before
    answered = asyncio.run(
        _outcome(engine.generate(Sequence("a", [5], SamplingParams(max_tokens=9))))
    )
    assert isinstance(answered, EngineError if end == "failed" else Sequence)
    if end == "closed":
        engine.close()
    if end == "dropped":
        del engine
    thread.join(timeout=60)
    assert not thread.is_alive() and gone() is None
    if end != "dropped":
        assert engine.counters().num_slots == 2 and engine.occupancy().num_running == 0


async def _outcome(call):
    [outcome] = await asyncio.gather(call, return_exceptions=True)
    return outcome


def test_closing_answers_what_is_in_flight():
    async def main():
        engine = AsyncEngine(llama_engine(1))
        call = asyncio.ensure_future(
            engine.generate(Sequence("a", [5], SamplingParams(max_tokens=120, ignore_eos=True)))
        )
        await asyncio.sleep(0.02)
        engine.close()
        with pytest.raises(EngineError, match="closed"):
            await call

    asyncio.run(main())


def test_stream_yields_each_step_and_first_token_before_verify():
    async def main():
        inner = llama_engine(1, 8, 3, 3)
        verify, seen, verified_at = inner.target.verify, [], []
        inner.target.verify = lambda *args: (
            verified_at.append(len(sequence.output_ids)) or verify(*args)
        )
        engine = AsyncEngine(inner)
        sequence = Sequence("a", [5, 6], SamplingParams(max_tokens=20, ignore_eos=True))
        async for count in engine.stream(sequence):
            seen.append((count, sequence.output_ids[:count]))
        engine.close()
        return sequence, seen, verified_at

    sequence, seen, verified_at = asyncio.run(main())
    assert [count for count, _ in seen] == [*verified_at, 20] and verified_at[0] == 1
    assert all(ids == sequence.output_ids[:count] for count, ids in seen)


def test_closed_stream_frees_its_slot_and_refused_one_raises():
    async def main():
        inner = llama_engine(1)
        engine = AsyncEngine(inner)
        stream = engine.stream(Sequence("a", [5], SamplingParams(max_tokens=120, ignore_eos=True)))
        assert await anext(stream) == 1
        await stream.aclose()
        other = await engine.generate(Sequence("b", [6], SamplingParams(max_tokens=3)))
        with pytest.raises(RequestError, match="500 tokens"):
            await anext(engine.stream(Sequence("c", [5] * 500, SamplingParams())))
        engine.close()
        return other, inner.scheduler.num_running

    other, running = asyncio.run(main())
    assert len(other.output_ids) <= 3 and running == 0


class LostRankLockstep(Lockstep):
    """A lockstep of several ranks, of which one is lost during a step, or before a sequence is added."""

    def __init__(self, is_lost=False):
        self.is_lost, self.say = is_lost, None

    def tell_if_stuck(self, call):
        self.say = call

    def add(self, sequence):
        if self.is_lost:
            raise RankError("rank 1 was ended by signal 9")


def test_a_step_that_waits_for_a_lost_rank_for_ever_holds_nobody():
    inner, released, is_stuck = llama_engine(2), threading.Event(), threading.Event()
    inner.lockstep = lockstep = LostRankLockstep()

    def step():
        is_stuck.set()
        released.wait(60)
        return []

    inner.step = step

    async def main():
        engine = AsyncEngine(inner)
        call = asyncio.ensure_future(engine.generate(Sequence("a", [5], SamplingParams())))
        await asyncio.to_thread(is_stuck.wait, 30)
        lockstep.say("rank 1 was ended by signal 9")
        with pytest.raises(EngineError, match="signal 9"):
            await asyncio.wait_for(call, 10)
        with pytest.raises(EngineError, match="signal 9"):
            await engine.generate(Sequence("b", [5], SamplingParams()))
        assert not engine.is_alive
        engine.close()
        released.set()

    asyncio.run(main())


@pytest.mark.parametrize("ends_in_step", [True, False])
def test_slow_step_that_returns_finds_its_calls_already_answered(ends_in_step):
    """Given up in the middle of a step that ends a sequence, or while another is added."""
    inner, released, is_stuck = llama_engine(2), threading.Event(), threading.Event()
    inner.lockstep = lockstep = LostRankLockstep()
    own_step, own_add = inner.step, inner.add

    def step():
        finished = own_step()
        if finished:
            is_stuck.set()
            released.wait(60)
        return finished

    def add(sequence):
        if sequence.request_id == "late":
            lockstep.say("rank 1 was ended by signal 9")
        own_add(sequence)

    inner.step, inner.add = step, add

    async def main():
        engine = AsyncEngine(inner)
        call = asyncio.ensure_future(
            engine.generate(Sequence("a", [5], SamplingParams(max_tokens=3)))
        )
        await asyncio.to_thread(is_stuck.wait, 30)
        if ends_in_step:
            lockstep.say("rank 1 was ended by signal 9")
        released.set()
        if not ends_in_step:
            await call
            call = engine.generate(Sequence("late", [5], SamplingParams(max_tokens=3)))
        with pytest.raises(EngineError, match="signal 9"):
            await asyncio.wait_for(call, 10)
        while engine.inner is not None:
            await asyncio.sleep(0.01)
        assert str(engine.step_loop.error) == "the engine failed: rank 1 was ended by signal 9"
        engine.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_rank_that_is_lost_while_nothing_runs_ends_the_engine():
    inner = llama_engine(2)
    inner.lockstep = LostRankLockstep(is_lost=True)

    async def main():
        engine = AsyncEngine(inner)
        with pytest.raises(EngineError, match="signal 9"):
            await asyncio.wait_for(engine.generate(Sequence("a", [5], SamplingParams())), 10)
        engine.close()
        assert not engine.is_alive

    asyncio.run(main())
