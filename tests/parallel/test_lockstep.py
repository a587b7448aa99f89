"""Lockstep: whatever rank 0's planner, clock and callers do, every rank takes the same steps, to the tokens of one."""

import logging
import random
import time
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config

from eagle_ray.assembly import assemble, costs
from eagle_ray.assembly.assemble import build_engine_from_config
from eagle_ray.assembly.costs import kinds_of
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.tensor_parallel import Rank
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.device import StepTimes
from eagle_ray.core.errors import RankError
from eagle_ray.core.grammar_spec import GrammarSpec
from eagle_ray.core.sequence import Sequence
from eagle_ray.core.start_log import StartLog
from eagle_ray.engine.graph_warmup import capture_fixed
from eagle_ray.methods.lookup.drafter import LookupDrafter
from eagle_ray.methods.method import plans_alone
from eagle_ray.parallel.lockstep import Follower, Leader
from eagle_ray.planner.budget_planner import BudgetPlanner
from eagle_ray.planner.cost_model import CostCurve, StepCosts
from eagle_ray.planner.planner import UniformPlanner
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.sampling import grammar
from tests.support.checkpoints import published_draft
from tests.support.engines import RandomPlanner, some_params, some_prompts
from tests.support.extent import extent
from tests.support.ranks import wait_until, with_ranks
from tests.support.toy_models import llama, run

SMALL = dict(
    num_hidden_layers=7, num_key_value_heads=4
)  # of a random target: EAGLE-3 reads three of its layers
DRAFTS = {  # of the random target, by the method that reads it
    "eagle1": "eagle",
    "eagle3": "eagle3",
    "ddd": "eagle",
    "opt_tree": "eagle",
    "head": "eagle",
    "eagle2+suffix": "eagle",
    "medusa": "medusa",
    "hydra": "hydra",
    "dflash": "dflash",
    "dflash, DSpark": "vanilla",
    "dflash, DFlash2": "dflash2",
    "dflash, Domino": "domino",
    "draft_model": "draft_model",
    "draft_model+eagle2": "draft_model eagle",
    "rest": "",
    "recycling": "",
    "lookahead": "",
}
FOUR = [
    "eagle2+suffix",
    "eagle3",
    "medusa",
    "dflash, DSpark",
    "draft_model",
    "rest",
]  # with 4 ranks, too; of the fast tests, those of odd shapes and of mixtures have more than 2
SHARDED_ALIKE = ["eagle1", "ddd", "head", "draft_model+eagle2"]  # as heads of others are
SIZES = [
    pytest.param(name, 2, marks=[pytest.mark.slow] * (name in SHARDED_ALIKE)) for name in DRAFTS
]
SIZES += [pytest.param(name, 4, marks=pytest.mark.slow) for name in FOUR]
MIN_ACCEPTED = extent(10, 20)  # of SMALL_NUM sequences: their tokens would be equal without any
TINY = ModelConfig(device="cpu", max_model_len=192)
ARGS = EngineArgs(6, kv_tokens=None)
NUM = extent(12, 24)
SMALL_ARGS = EngineArgs(
    20, kv_tokens=None
)  # more sequences in fewer steps: most take a token a step
SMALL_NUM = extent(24, 48)
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
    return [
        shared + prompt if i % 3 == 0 else prompt for i, prompt in enumerate(prompts)
    ], some_params(num, 20)


class RandomTimesPlanner:
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


class AlternatingPlanner:
    """A step as one planner says, and one as another says, which may draft nothing."""

    will_draft = True

    def __init__(self, *planners):
        self._planners = planners

    def plan(self, batch):
        self._planners = *self._planners[1:], self._planners[0]
        return self._planners[0].plan(batch)

    def allocate(self, draft, plan, batch):
        return self._planners[0].allocate(draft, plan, batch)

    def observe(self, outcome) -> None:
        self._planners[0].observe(outcome)


class ReadAheadPlanner(UniformPlanner):
    """Lets the drafter read on in the texts of every batch."""

    def __init__(self, engine):
        super().__init__(engine.bounds)
        self._engine = engine

    def plan(self, batch):
        self._engine.lookup_hits(batch)
        return super().plan(batch)


def budget_planner(engine) -> BudgetPlanner:
    flat = CostCurve([1, 64], [1e-3, 2e-3])
    costs = StepCosts(flat, 1e-7, flat, flat, flat, flat)
    lookup_hits = engine.lookup_hits if engine.drafter.has_lookups else None
    return BudgetPlanner(
        engine.bounds, costs, kinds=kinds_of(engine.drafter), lookup_hits=lookup_hits
    )


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
            engine.planner = RandomTimesPlanner(budget_planner(engine), seed=3)
        sequences = run(engine, *cases())
        assert engine.counters.planner_error is None
        return [sequence.output_ids for sequence in sequences]

    outputs, engines = with_ranks(2, tmp_path, TINY, SpeculativeConfig(**settings), ARGS, work)
    assert outputs == plain
    counters = [
        (e.counters.num_steps, e.counters.num_verify_rows, e.counters.num_output_tokens)
        for e in engines
    ]
    assert counters[0] == counters[1], "each step was checked, and had as many rows"


@dataclass(frozen=True)
class SmallModels:
    """A random target, drafts for it of each kind, and the tokens of one process."""

    path: Path
    plain: list[list[int]]

    def model(self, drafts: str = "") -> ModelConfig:
        paths = [str(self.path / kind) for kind in drafts.split()]
        draft = paths[0] if len(paths) == 1 else paths or None
        return ModelConfig(
            target=str(self.path), draft=draft, device="cpu", dtype="float32", max_model_len=192
        )

    def speculative(self, method: str, **settings: object) -> SpeculativeConfig:
        own = dict(datastore=str(self.path / "outputs.parquet")) if method == "rest" else {}
        return SpeculativeConfig(method=method, **{**own, **settings})


def small_cases() -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts that repeat themselves, and greedy and sampled parameters by turns."""
    return [prompt * 2 for prompt in some_prompts(SMALL_NUM)], some_params(SMALL_NUM, 20)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> SmallModels:
    path = tmp_path_factory.mktemp("small")
    llama(**SMALL).save_pretrained(path)
    for kind in {kind for kinds in DRAFTS.values() for kind in kinds.split()}:
        published_draft(path / kind, kind, SMALL["num_hidden_layers"])
    own = SmallModels(path, [])
    engine = build_engine_from_config(own.model(), own.speculative("none"), SMALL_ARGS).engine
    plain = [sequence.output_ids for sequence in run(engine, *small_cases())]
    pq.write_table(pa.table({"token_ids": plain}), path / "outputs.parquet")
    return replace(own, plain=plain)


@pytest.mark.parametrize("method, size", SIZES)
def test_whatever_drafts_the_tokens_are_those_of_one_process(tmp_path, small, method, size):
    """A follower ends if a step's checksum is not rank 0's."""
    kinds, method = DRAFTS[method], method.partition(",")[0]

    def work(engine):
        if plans_alone(method):
            engine.planner = RandomTimesPlanner(engine.planner, seed=5)
        else:
            engine.planner = AlternatingPlanner(
                RandomTimesPlanner(budget_planner(engine), seed=5), UniformPlanner(engine.bounds)
            )
        sequences = run(engine, *small_cases())
        assert engine.counters.planner_error is None
        assert sum(s.stats.num_accepted_draft_tokens for s in sequences) >= MIN_ACCEPTED
        return [sequence.output_ids for sequence in sequences]

    speculative = small.speculative(method, **{**UNIFORM, "top_k": 16, "max_nodes": 24})
    outputs, engines = with_ranks(size, tmp_path, small.model(kinds), speculative, SMALL_ARGS, work)
    assert outputs == small.plain
    counters = {
        (e.counters.num_steps, e.counters.num_verify_rows, e.counters.num_output_tokens)
        for e in engines
    }
    assert len(counters) == 1, "each step was checked, and had as many rows"


SHAPE = dict(
    vocab_size=97,
    hidden_size=48,
    num_hidden_layers=3,
    max_position_embeddings=256,
    initializer_range=0.1,
)
SHAPES = {
    "3 ranks of 6 heads, tied, odd MLP": (
        3,
        LlamaConfig(
            **SHAPE,
            num_attention_heads=6,
            num_key_value_heads=3,
            intermediate_size=51,
            tie_word_embeddings=True,
        ),
    ),
    "5 ranks of 5 heads, biases": (
        5,
        LlamaConfig(
            **SHAPE | {"hidden_size": 60},
            num_attention_heads=5,
            num_key_value_heads=5,
            intermediate_size=55,
            attention_bias=True,
            mlp_bias=True,
        ),
    ),
    "window": (
        2,
        MistralConfig(
            **SHAPE,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=70,
            sliding_window=9,
        ),
    ),
    "window in some layers, biases of q, k and v, tied": (
        2,
        Qwen2Config(
            **SHAPE,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=70,
            use_sliding_window=True,
            sliding_window=9,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            tie_word_embeddings=True,
        ),
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_targets_of_odd_shapes(tmp_path, name):
    size, config = SHAPES[name]
    torch.manual_seed(4)
    target = AutoModelForCausalLM.from_config(config)
    for key, parameter in target.named_parameters():
        if key.endswith("bias"):
            parameter.data.normal_()
    target.save_pretrained(tmp_path / "target")
    model = ModelConfig(
        target=str(tmp_path / "target"), device="cpu", dtype="float32", max_model_len=192
    )
    prompts, params = [prompt * 2 for prompt in some_prompts(12)], some_params(12, 20)
    one = build_engine_from_config(model, SpeculativeConfig(method="none"), ARGS).engine
    plain = [sequence.output_ids for sequence in run(one, prompts, params)]

    def work(engine):
        return [sequence.output_ids for sequence in run(engine, prompts, params)]

    speculative = SpeculativeConfig(**UNIFORM, method="suffix")
    assert with_ranks(size, tmp_path, model, speculative, ARGS, work)[0] == plain


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_ranks_agree_under_random_plans_preemption_and_aborts(tmp_path, seed):
    """Stop checks run on rank 0 alone; blocks are short, so that sequences are preempted."""
    prompts, params = (
        some_prompts(16, vocab=1536),
        [replace(p, ignore_eos=True) for p in some_params(16, 90)],
    )
    one = build_engine_from_config(TINY, SpeculativeConfig(method="none"), ARGS).engine
    plain = [sequence.output_ids for sequence in run(one, prompts, params)]

    def work(engine):
        engine.planner, rng = RandomPlanner(seed), random.Random(seed)
        sequences = [
            Sequence(str(i), ids, p) for i, (ids, p) in enumerate(zip(prompts, params, strict=True))
        ]
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

    args, speculative = (
        replace(ARGS, kv_tokens=256),
        SpeculativeConfig(**UNIFORM | {"max_depth": 5}, method="eagle2"),
    )
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

    outputs, _ = with_ranks(
        2, tmp_path, TINY, SpeculativeConfig(**UNIFORM, method="eagle2"), ARGS, work
    )
    assert outputs == plain


def test_what_the_leader_shrugs_off_ends_no_rank(tmp_path, plain, monkeypatch):
    """A file that does not fit, and a planner whose drafter cannot read on."""

    def fails(self, *_):
        raise ZeroDivisionError

    monkeypatch.setattr(LookupDrafter, "lookup_hits", fails)

    def work(engine):
        with pytest.raises((ValueError, KeyError)):
            engine.load_learned({"parameters": torch.zeros(1)})
        engine.planner = ReadAheadPlanner(engine)
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

    captured, engines = with_ranks(
        2, tmp_path, TINY, SpeculativeConfig(**UNIFORM, method="eagle2"), ARGS, work
    )
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


def test_the_log_of_a_start_says_that_it_waits_for_ranks(tmp_path, monkeypatch, caplog):
    """At the first place where ranks meet, once they have loaded their weights."""
    lines = []

    def agree(member, device):
        time.sleep(0.5)
        lines.append(caplog.text)

    monkeypatch.setattr(assemble, "StartLog", lambda: StartLog(long_s=0.1))
    monkeypatch.setattr(Rank, "agree_on_kernels", agree)
    with caplog.at_level(logging.INFO, logger="eagle_ray"):
        with_ranks(2, tmp_path, TINY, SpeculativeConfig(method="none"), ARGS, lambda engine: True)
    assert len(lines) == 2 and all("waiting for the other 1 of 2 ranks" in text for text in lines)


def test_grammar_time_limit_applies_to_the_leader_alone(tmp_path):
    _, engines = with_ranks(
        2, tmp_path, TINY, SpeculativeConfig(method="none"), ARGS, lambda engine: True
    )
    assert [engine.grammars.has_time_limit for engine in engines] == [True, False]


def test_the_others_compile_a_grammar_while_the_leader_does(tmp_path, monkeypatch):
    """Before its sequence is added: a step would wait for them."""
    compiled, original = [], grammar.matcher_of
    monkeypatch.setattr(
        grammar, "matcher_of", lambda *parts: (compiled.append(parts[0]), original(*parts))[1]
    )
    spec, params = GrammarSpec("regex", "[ab]{5}"), SamplingParams(max_tokens=12, regex="[ab]{5}")

    def work(engine):
        sequence = Sequence("a", [5], params, grammar_spec=spec)
        for _ in range(2):
            engine.compile_grammar(sequence)
        assert wait_until(lambda: len(compiled) == 2, 20)
        engine.add(sequence)
        while engine.has_work:
            engine.step()
        return sequence.output_ids

    outputs, _ = with_ranks(2, tmp_path, TINY, SpeculativeConfig(method="none"), ARGS, work)
    assert outputs and compiled == [spec, spec], "once on each rank"


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
        return [
            (s.output_ids, [round(x, 3) for x in s.output_logprobs])
            for s in run(engine, prompts, params)
        ]

    speculative = SpeculativeConfig(**UNIFORM, method="eagle2")
    one = outputs_of(build_engine_from_config(TINY, speculative, ARGS).engine)
    assert with_ranks(2, tmp_path, TINY, speculative, ARGS, outputs_of)[0] == one


def test_rank_with_another_checksum_or_operation_is_an_error():
    here, there = Pipe()
    leader, follower = Leader([here], lambda seconds: None, lambda: None), Follower(1, there)
    leader.check(lambda: 7)
    follower.check(lambda: 7)
    leader.check(lambda: 7)
    with pytest.raises(
        RankError, match="rank 1: its step has checksum 00000008, and that of rank 0 is 00000007"
    ):
        follower.check(lambda: 8)
    leader.tell("step", True)
    with pytest.raises(RankError, match="needs the leader's 'plan', and the leader is at 'step'"):
        follower.agree("plan", lambda: None)
    there.close()
    with pytest.raises(RankError, match="a rank is lost"):
        leader.tell("step", True)
