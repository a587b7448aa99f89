"""Lockstep: whatever rank 0's planner, clock and callers do, every rank takes the same steps, to the tokens of one."""

import random
from dataclasses import replace
from multiprocessing import Pipe

import pytest
import torch

from eagle_ray.assembly import costs
from eagle_ray.assembly.assemble import build_engine_from_config
from eagle_ray.assembly.costs import kinds_of
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.device import StepTimes
from eagle_ray.core.errors import RankError
from eagle_ray.core.sequence import Sequence
from eagle_ray.core.start_log import StartLog
from eagle_ray.engine.graph_warmup import capture_fixed
from eagle_ray.methods.lookup.drafter import LookupDrafter
from eagle_ray.parallel.lockstep import Follower, Leader
from eagle_ray.planner.budget_planner import BudgetPlanner
from eagle_ray.planner.cost_model import CostCurve, StepCosts
from eagle_ray.planner.planner import UniformPlanner
from eagle_ray.requests.parameters import SamplingParams
from tests.support.engines import Whimsical, some_params, some_prompts
from tests.support.ranks import with_ranks
from tests.support.toy_models import run

TINY = ModelConfig(device="cpu", max_model_len=192)
SLOTS = 6
ARGS = EngineArgs(SLOTS, kv_tokens=None)
NUM = 48
UNIFORM = dict(budget="uniform", max_nodes=12, max_depth=4, top_k=4)
METHODS = {
    "none": dict(method="none"),
    "auto": dict(method="auto"),
    "eagle2": dict(method="eagle2"),
    "ngram": dict(method="ngram"),
    "suffix": dict(method="suffix"),
    "grammar and suffix": dict(sources=["suffix", "grammar"]),
    "sequoia": dict(method="sequoia"),
}


def cases(num: int = NUM) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts, some of which share a long prefix, and greedy and sampled parameters by turns."""
    prompts = some_prompts(num, vocab=1536)
    shared = prompts[0] * 3
    return [shared + prompt if i % 3 == 0 else prompt for i, prompt in enumerate(prompts)], some_params(num, 20)


class RandomSeconds:
    """Plans by seconds that say nothing: plans change from step to step, and on rank 0 alone."""

    def __init__(self, planner, seed: int):
        self._planner, self._random = planner, random.Random(seed)

    @property
    def will_draft(self) -> bool:
        return self._planner.will_draft

    def plan(self, batch):
        return self._planner.plan(batch)

    def allocate(self, draft, plan, batch):
        return self._planner.allocate(draft, plan, batch)

    def observe(self, outcome) -> None:
        seconds = StepTimes(*(self._random.uniform(1e-4, 1e-2) for _ in range(3)))
        self._planner.observe(replace(outcome, seconds=seconds))


class ReadsOn(UniformPlanner):
    """Lets the drafter read on in the texts of every batch."""

    def __init__(self, engine):
        super().__init__(engine.bounds)
        self._engine = engine

    def plan(self, batch):
        self._engine.foreseen(batch)
        return super().plan(batch)


def budget_planner(engine) -> BudgetPlanner:
    flat = CostCurve([1, 64], [1e-3, 2e-3])
    costs = StepCosts(flat, 1e-7, flat, flat, flat, flat)
    foreseen = engine.foreseen if engine.drafter.has_lookups else None
    return BudgetPlanner(engine.bounds, costs, kinds=kinds_of(engine.drafter), foreseen=foreseen)


@pytest.fixture(scope="module")
def plain():
    """The tokens of one process."""
    engine = build_engine_from_config(TINY, SpeculativeConfig(method="none"), ARGS).engine
    return [sequence.output_ids for sequence in run(engine, *cases())]


@pytest.mark.parametrize("name", METHODS)
def test_the_tokens_are_those_of_one_process(tmp_path, plain, name):
    settings = {**UNIFORM, **METHODS[name]}

    def work(engine):
        if settings.get("method") not in ("none", "sequoia"):
            engine.planner = RandomSeconds(budget_planner(engine), seed=3)
        sequences = run(engine, *cases())
        assert engine.counters.planner_error is None
        return [sequence.output_ids for sequence in sequences]

    outputs, engines = with_ranks(2, tmp_path, TINY, SpeculativeConfig(**settings), ARGS, work)
    assert outputs == plain
    counters = [(e.counters.num_steps, e.counters.num_verify_rows, e.counters.num_output_tokens) for e in engines]
    assert counters[0] == counters[1], "each step was checked, and had as many rows"


@pytest.mark.parametrize("seed", range(2))
def test_whatever_a_planner_does_with_preemption_aborts_and_stops(tmp_path, seed):
    """Stop checks run on rank 0 alone; blocks are short, so that sequences are preempted."""
    prompts, params = some_prompts(16, vocab=1536), [replace(p, ignore_eos=True) for p in some_params(16, 90)]
    one = build_engine_from_config(TINY, SpeculativeConfig(method="none"), ARGS).engine
    plain = [sequence.output_ids for sequence in run(one, prompts, params)]

    def work(engine):
        engine.planner, rng = Whimsical(seed), random.Random(seed)
        sequences = [Sequence(str(i), ids, p) for i, (ids, p) in enumerate(zip(prompts, params, strict=True))]
        for i, sequence in enumerate(sequences):
            if i % 5 == 0:
                sequence.stop_check = lambda ids: 3 if len(ids) >= 3 else None
            engine.add(sequence)
        aborted = set()
        while engine.has_work:
            engine.step()
            running = list(engine.scheduler.running.values())
            if running and rng.random() < 0.02:
                engine.abort(sequence := rng.choice(running))
                aborted.add(sequence.request_id)
        assert engine.counters.num_preemptions
        return [None if s.request_id in aborted else s.output_ids for s in sequences]

    args, speculative = replace(ARGS, kv_tokens=256), SpeculativeConfig(**UNIFORM | {"max_depth": 5}, method="eagle2")
    outputs, _ = with_ranks(2, tmp_path, TINY, speculative, args, work)
    expected = [ids[:3] if i % 5 == 0 else ids for i, ids in enumerate(plain)]
    assert all(own in (None, ids) for own, ids in zip(outputs, expected, strict=True))
    assert sum(own is not None for own in outputs) >= 6


def test_replayed_steps_that_overlap(tmp_path, plain, monkeypatch):
    monkeypatch.setenv("EAGLE_RAY_GRAPHS", "on")

    def work(engine):
        outputs = [sequence.output_ids for sequence in run(engine, *cases())]
        assert engine.counters.num_ahead
        return outputs

    outputs, _ = with_ranks(2, tmp_path, TINY, SpeculativeConfig(**UNIFORM, method="eagle2"), ARGS, work)
    assert outputs == plain


def test_what_the_leader_shrugs_off_ends_no_rank(tmp_path, plain, monkeypatch):
    """A file that does not fit, and a planner whose drafter cannot read on."""

    def fails(self, *_):
        raise ZeroDivisionError

    monkeypatch.setattr(LookupDrafter, "foreseen", fails)

    def work(engine):
        with pytest.raises((ValueError, KeyError)):
            engine.load_learned({"parameters": torch.zeros(1)})
        engine.planner = ReadsOn(engine)
        outputs = [sequence.output_ids for sequence in run(engine, *cases())]
        assert "ZeroDivisionError" in engine.counters.planner_error
        return outputs

    speculative = SpeculativeConfig(**UNIFORM, method="suffix")
    assert with_ranks(2, tmp_path, TINY, speculative, ARGS, work)[0] == plain


def test_all_ranks_record_a_fixed_plan_ahead(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_RAY_GRAPHS", "on")

    def work(engine):
        capture_fixed(engine)
        return engine.graphs.num_captured

    captured, engines = with_ranks(2, tmp_path, TINY, SpeculativeConfig(**UNIFORM, method="eagle2"), ARGS, work)
    kinds = [engine.graphs.captured for engine in engines]
    assert captured and kinds[0] == kinds[1] and kinds[0]["pairs"]


def test_a_lost_rank_is_no_fault_of_the_planner(monkeypatch):
    def lost(*_):
        raise RankError("rank 1 was ended by signal 9")

    engine = build_engine_from_config(TINY, SpeculativeConfig(method="none"), ARGS).engine
    monkeypatch.setattr(costs, "planner_for", lost)
    with pytest.raises(RankError, match="signal 9"):
        costs.plan_drafts(engine, SpeculativeConfig(**UNIFORM, method="eagle2"), StartLog())
    assert engine.counters.planner_error is None


def test_a_grammar_that_the_leader_has_compiled_has_time_on_the_others(tmp_path):
    _, engines = with_ranks(2, tmp_path, TINY, SpeculativeConfig(method="none"), ARGS, lambda engine: True)
    assert [engine.grammars.has_time_limit for engine in engines] == [True, False]


def test_schemas_and_logprobs(tmp_path):
    """Masks are worked out on each rank, from its own copy of the grammar."""
    schema = '{"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}'
    params = [
        SamplingParams(max_tokens=24, json_schema=schema),
        SamplingParams(max_tokens=12, logprobs=True, top_logprobs=3, temperature=0.7, seed=5),
        SamplingParams(max_tokens=12, prompt_logprobs=True, min_tokens=3, bad_words=[]),
    ] * 3
    prompts = some_prompts(9, vocab=1536, seed=4)

    def outputs_of(engine):
        return [(s.output_ids, [round(x, 3) for x in s.output_logprobs]) for s in run(engine, prompts, params)]

    speculative = SpeculativeConfig(**UNIFORM, method="eagle2")
    one = outputs_of(build_engine_from_config(TINY, speculative, ARGS).engine)
    assert with_ranks(2, tmp_path, TINY, speculative, ARGS, outputs_of)[0] == one


def test_a_rank_that_computes_something_else_or_is_elsewhere_ends():
    here, there = Pipe()
    leader, follower = Leader([here], lambda seconds: None, lambda: None), Follower(1, there)
    leader.check(lambda: 7)
    follower.check(lambda: 7)
    leader.check(lambda: 7)
    with pytest.raises(RankError, match="rank 1: its step has checksum 00000008, and that of rank 0 is 00000007"):
        follower.check(lambda: 8)
    leader.tell("step", True)
    with pytest.raises(RankError, match="needs the leader's 'plan', and the leader is at 'step'"):
        follower.agree("plan", lambda: None)
    there.close()
    with pytest.raises(RankError, match="a rank is lost"):
        leader.tell("step", True)
