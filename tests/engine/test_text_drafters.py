"""Drafters that run no model: every output is plain decoding's, and what they offer is accepted where texts repeat."""

import random
from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import LlamaForCausalLM

from eagle_ray.assembly.assemble import build_engine, build_engine_from_config
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.counters import AcceptanceStats
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.reference import reference_decode
from eagle_ray.methods.lookup.drafter import CursorIndex, LookupDrafter
from eagle_ray.planner.budget_planner import BudgetPlanner
from eagle_ray.planner.lookup_gains import FIRST_TRIAL_STEPS, TRIAL_STEPS
from eagle_ray.planner.planner import DraftKind
from eagle_ray.requests.parameters import SamplingParams
from jobs.bench.prompts import prompt_rows
from jobs.bench.simulated_costs import SimulatedPlanner, flat
from tests.support.engines import Oracle, RandomPlanner, differing_rows, some_params
from tests.support.toy_models import RoomRecordingPlanner, head, llama, run

FAST = ["ngram", "recycling", "lookahead", "eagle2+suffix"]
METHODS = [
    *FAST,
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("suffix", "rest", "ngram+suffix")),
]
MakeEngine = Callable[..., Engine]
TREE = dict(max_nodes=8, max_depth=5, top_k=3)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return llama()


@pytest.fixture(scope="module")
def oracle(model) -> Oracle:
    """8 prompts that repeat themselves and one another, some from their start on, decoded by transformers' cache."""
    rng, params = (
        random.Random(3),
        [replace(p, ignore_eos=True) for p in some_params(8, max_tokens=48)],
    )
    phrases = [[rng.randrange(3, 97) for _ in range(rng.randint(2, 9))] for _ in range(6)]
    prompts = [[i for phrase in rng.choices(phrases, k=5) for i in phrase][:28] for _ in params]
    prompts[::3] = [
        (phrases[0] * 40)[:40] + ids[:5] for ids in prompts[::3]
    ]  # long enough to share blocks
    plain_model = llama()
    plain_model.set_attn_implementation("sdpa")
    plain = [
        reference_decode(plain_model, ids, p, frozenset([2]))
        for ids, p in zip(prompts, params, strict=True)
    ]
    return prompts, params, plain


@pytest.fixture(scope="module")
def make_engine(model, oracle, tmp_path_factory) -> MakeEngine:
    """make_engine(method, num_slots, **settings): what method rest draws on are plain decoding's outputs."""
    datastore = tmp_path_factory.mktemp("datastore") / "outputs.parquet"
    pq.write_table(pa.table({"token_ids": [p.ids for p in oracle[2]]}), datastore)

    def make(
        method: str, num_slots: int, kv_tokens: int | None = None, budget: str = "uniform"
    ) -> Engine:
        drawn = dict(datastore=str(datastore)) if method == "rest" else {}
        speculative = SpeculativeConfig(method=method, budget=budget, **TREE, **drawn)
        weights = head() if "eagle2" in method else None
        return build_engine(
            model, weights, speculative, EngineArgs(num_slots, 128, kv_tokens=kv_tokens)
        )

    return make


def check(engine: Engine, oracle: Oracle, times: int) -> AcceptanceStats:
    """All of it, each time in another order: from the second time on the drafter knows what it has read."""
    prompts, params, plain = oracle
    stats = AcceptanceStats.empty(0)
    for seed in range(times):
        order = random.Random(seed).sample(range(len(prompts)), len(prompts))
        sequences = run(engine, [prompts[i] for i in order], [params[i] for i in order])
        assert differing_rows([s.output_ids for s in sequences], [plain[i] for i in order]) == []
        for sequence in sequences:
            stats = stats.merge(sequence.stats)
    return stats


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [1, 7])
@pytest.mark.parametrize("method", METHODS)
def test_outputs_are_those_of_plain_decoding(make_engine, oracle, method, num_slots):
    stats = check(make_engine(method, num_slots), oracle, times=2)
    assert stats.num_accepted_draft_tokens > 50


@pytest.mark.parametrize("method", METHODS)
def test_no_plan_changes_what_is_produced(make_engine, oracle, method):
    """Some members, any width and depth, plain steps between; few blocks, so that sequences are pre-empted."""
    engine = make_engine(method, 4, kv_tokens=144)
    engine.planner = RandomPlanner(5)
    prompts, params, plain = oracle
    stats = check(engine, (prompts, [replace(p, logprobs=True) for p in params], plain), times=1)
    assert stats.num_accepted_draft_tokens > 5
    assert engine.counters.num_preemptions > 0 and engine.counters.num_reused_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_batch_wide_budget_measures_it_and_changes_nothing(make_engine, oracle, method):
    engine = make_engine(method, 4, budget="global")
    assert engine.planner.costs.catch_up(1) > 0 and engine.planner.costs.expand(4) > 0
    check(engine, oracle, times=3)


class EmptyIndex(CursorIndex):
    """A source, a reader and a cursor that have nothing to offer."""

    @property
    def cost_key(self):
        return {}

    def reader(self):
        return self

    def cursor(self):
        return self

    def read(self, *news):
        pass

    def children(self, width):
        return []


def test_steps_without_drafts_are_plain_and_lookups_become_rare(make_engine, oracle):
    engine = make_engine("ngram", 4)
    engine.drafter = LookupDrafter(EmptyIndex(), TreeBounds(8, 5, 3))
    kinds = (DraftKind.LOOKUPS,)
    priced = engine.planner = RoomRecordingPlanner(
        BudgetPlanner(TreeBounds(8, 5, 3), flat(), kinds=kinds), flat()
    )
    check(engine, oracle, times=1)
    looks = [o.plan.is_drafting for o in priced.with_room]
    later = looks[FIRST_TRIAL_STEPS:]
    assert all(looks[:FIRST_TRIAL_STEPS]) and len(later) > 20 and sum(later) <= TRIAL_STEPS
    assert {(o.depth, o.num_rows == o.batch_size) for o in priced.outcomes} == {(0, True)}
    assert engine.counters.num_plain_steps == engine.counters.num_steps


def test_what_a_reader_offers_is_bought_where_it_pays(make_engine, oracle):
    engine = make_engine("ngram", 4)
    priced = engine.planner = SimulatedPlanner(
        BudgetPlanner(TreeBounds(8, 5, 3), flat(head_share=0.01)), flat(head_share=0.01)
    )
    assert check(engine, oracle, times=1).num_accepted_draft_tokens > 15
    assert sum(o.plan.is_drafting for o in priced.outcomes) > 0.5 * len(priced.outcomes)
    bought = {o.num_rows - o.batch_size for o in priced.outcomes}
    assert 0 in bought and len(bought) > 2  # by what each step has to offer


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "suffix", "recycling", "lookahead", "ngram+suffix"])
def test_a_text_that_repeats_itself_is_drafted(method):
    """The embedded target goes in circles when told to go on; tau counts the bonus token, so that 1 is plain."""
    pair = build_engine_from_config(
        ModelConfig(max_model_len=512),
        SpeculativeConfig(method=method, budget="uniform", **TREE),
        EngineArgs(2),
    )
    ids = pair.tokenizer.encode_chat([{"role": "user", "content": "Write a list of animals."}])
    sequences = run(pair.engine, [ids] * 2, [SamplingParams(max_tokens=64, ignore_eos=True)] * 2)
    assert sequences[0].output_ids == sequences[1].output_ids
    assert min(s.stats.mean_acceptance_length for s in sequences) > 1.2
    assert all(s.draft_forwards == 0 for s in sequences)


@pytest.mark.slow
def test_a_merge_is_accepted_more_than_its_parts_at_equal_nodes():
    """Prompts whose answers resemble one another, on the embedded pair."""
    taus = {}
    for method in ("eagle2", "suffix", "eagle2+suffix"):
        speculative = SpeculativeConfig(method=method, budget="uniform", **TREE)
        pair = build_engine_from_config(ModelConfig(max_model_len=512), speculative, EngineArgs(4))
        prompts = [pair.tokenizer.encode_chat(row["messages"]) for row in prompt_rows(2)] * 2
        sequences = run(pair.engine, prompts, [SamplingParams(max_tokens=48)] * len(prompts))
        accepted = sum(s.stats.num_accepted_draft_tokens for s in sequences)
        taus[method] = 1 + accepted / sum(s.stats.num_steps for s in sequences)
    print(taus)
    assert taus["eagle2+suffix"] > max(taus["eagle2"], taus["suffix"])
