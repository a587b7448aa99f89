"""The engine behind an event loop: answers, refusals, cancellation and death."""

import asyncio

import pytest

from eagle_ray.engine.async_engine import AsyncEngine
from eagle_ray.engine.sequence import Sequence
from eagle_ray.errors import EngineError, RequestError
from eagle_ray.speculative.sampling import SamplingParams
from tests.toy import llama_engine, run


def test_many_callers_get_what_the_engine_alone_gives():
    prompts = [[5, i + 3] for i in range(20)]
    params = [SamplingParams(max_tokens=3 + i, temperature=0.7, seed=i) for i in range(20)]
    alone = [s.output_ids for s in run(llama_engine(4, 8, 3, 3), prompts, params)]

    async def together():
        engine = AsyncEngine(llama_engine(4, 8, 3, 3))
        calls = [engine.generate(Sequence(str(i), *pair)) for i, pair in enumerate(zip(prompts, params, strict=True))]
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
        calls = [engine.generate(Sequence(str(i), [5], SamplingParams(max_tokens=9))) for i in range(in_flight + 1)]
        first = await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(EngineError):
            await engine.generate(Sequence("late", [5], SamplingParams()))
        return first

    assert all(isinstance(error, EngineError) and "TypeError" in str(error) for error in asyncio.run(main()))


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
