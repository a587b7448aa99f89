"""EAGLE's rivals on the same engine: whatever drafts, every output is plain decoding's, token for token."""

from dataclasses import replace

import pytest

from eagle_ray.assembly.assemble import build_engine_from_config
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.hub import download
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.sequence import Sequence
from eagle_ray.kv.block_manager import BLOCK_SIZE
from eagle_ray.methods.draft_model.checkpoint import DraftModel
from eagle_ray.planner.planner import Allocation
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.text.tokenizer import Tokenizer
from eagle_ray.tree.static_tree import MC_SIM_7B_63
from jobs.bench.prompts import prompt_rows
from tests.support.engines import (
    DRAFT_METHODS,
    Oracle,
    RandomPlanner,
    check_lossless,
    differing_rows,
    engine_for,
    oracle_of,
    some_params,
    some_prompts,
)
from tests.support.toy_models import llama, run

DYNAMIC = DRAFT_METHODS[2:]  # whose trees any plan may shape
SLOW = [pytest.param(method, marks=pytest.mark.slow) for method in DRAFT_METHODS[:2]]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return oracle_of(some_prompts(8), some_params(8, max_tokens=12))


@pytest.fixture(scope="module")
def similar_prompts() -> Oracle:
    """Two that begin alike and are longer than a chunk, and a third."""
    common = some_prompts(1, seed=5)[0] * 40
    prompts = [common[:70], common[:68], common[1:26]]
    return oracle_of(prompts, [replace(p, ignore_eos=True) for p in some_params(3, max_tokens=14)])


@pytest.mark.parametrize("method", [*SLOW, *DYNAMIC])
@pytest.mark.parametrize("num_slots", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_every_method_equals_plain_decoding(oracle, method, num_slots):
    check_lossless(engine_for(method, num_slots), oracle)


@pytest.mark.parametrize("method", DRAFT_METHODS)
def test_reused_prefixes_chunks_and_preemption_change_nothing(similar_prompts, method):
    """Prompts by chunks of two blocks; everyone but the oldest is sent back once, in the middle of decoding."""
    prompts, params, plain = similar_prompts
    engine = engine_for(method, 3)
    engine.scheduler.prefill_tokens = 2 * BLOCK_SIZE
    sequences = [
        Sequence(str(i), ids, p) for i, (ids, p) in enumerate(zip(prompts, params, strict=True))
    ]
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
        if (
            not engine.scheduler.num_preemptions
            and engine.scheduler.num_running == 3
            and sequences[2].output_ids
        ):
            for sequence in sequences[:0:-1]:
                engine.scheduler.preempt(sequence)
        engine.scheduler.check_integrity()
    assert engine.scheduler.num_preemptions == 2 and sequences[1].num_reused >= 2 * BLOCK_SIZE
    assert differing_rows([s.output_ids for s in sequences], plain) == []


@pytest.mark.slow
@pytest.mark.parametrize("method", DYNAMIC)
def test_no_plan_changes_what_is_produced(oracle, method):
    engine = engine_for(method, 5, max_depth=5)
    engine.planner = RandomPlanner(5)
    check_lossless(engine, oracle)


@pytest.mark.slow
@pytest.mark.parametrize("method", DYNAMIC)
def test_the_global_budget_changes_nothing(oracle, method):
    engine = engine_for(method, 5, budget="global")
    check_lossless(engine, oracle)


def test_a_small_model_that_is_the_target_is_always_right():
    """Its cache, positions and trees are then the target's: every draft of a greedy chain is accepted."""
    engine = engine_for("draft_model", 3, DraftModel(llama()), max_nodes=4, max_depth=4, top_k=1)
    greedy = [SamplingParams(max_tokens=21, ignore_eos=True)] * 4
    for sequence in run(engine, some_prompts(4), greedy):
        assert sequence.stats.histogram == [0, 0, 0, 0, 4]  # 20 tokens after the first, five a step


def test_a_small_model_that_slept_drafts_as_one_that_did_not():
    """Plain steps in between: the tokens that were produced meanwhile, and a first prompt, are caught up."""

    class ChainPlanner(RandomPlanner):
        def plan(self, batch):
            plan = super().plan(batch)
            return replace(plan, width=1) if plan.is_drafting else plan

        def allocate(self, draft, plan, batch):
            return Allocation.uniform(draft, 6)

    engine = engine_for("draft_model", 3, DraftModel(llama()), max_nodes=5, max_depth=5, top_k=1)
    engine.planner = ChainPlanner(2)
    sequences = run(engine, some_prompts(4), [SamplingParams(max_tokens=25, ignore_eos=True)] * 4)
    accepted = sum(s.stats.num_accepted_draft_tokens for s in sequences)
    assert all(s.stats.num_plain_steps > 0 for s in sequences)
    assert accepted == sum(s.stats.num_draft_tokens for s in sequences) > 25


def test_eagle1_verifies_its_25_nodes_and_no_others():
    engine = engine_for("eagle1", 2, max_nodes=60, max_depth=6, top_k=10)
    [sequence] = run(engine, some_prompts(1), [SamplingParams(max_tokens=20, ignore_eos=True)])
    assert set(sequence.stats.per_step_budget) == {1 + len(MC_SIM_7B_63.paths)}
    by_depth = [sum(len(path) == depth for path in MC_SIM_7B_63.paths) for depth in range(1, 7)]
    assert (
        sequence.stats.proposed_by_depth
        == [n * sequence.stats.num_steps for n in by_depth]
        == [n * sequence.stats.num_steps for n in (4, 8, 8, 3, 2, 0)]
    )


def test_sequoia_learns_a_tree_of_its_own():
    """A head that is no good at random text: what it measured is not what it began with."""
    engine = engine_for("sequoia", 4, max_nodes=12)
    before = engine.planner.tree
    run(engine, some_prompts(4), [SamplingParams(max_tokens=14, ignore_eos=True)] * 4)
    assert len(before.paths) == len(engine.planner.tree.paths) == 12
    assert engine.planner.tree != before


@pytest.mark.slow
def test_eagle2_accepts_more_than_static_trees_of_equal_size():
    """The paper's comparison (EAGLE-2, section 5), greedy; and Sequoia's tree is no worse than EAGLE-1's."""
    taus = {}
    prompts = embedded_prompts(per_category=2)
    for method in ("eagle1", "sequoia", "eagle2"):
        tree = SpeculativeConfig(method=method, max_nodes=25, max_depth=6, budget="uniform")
        engine = build_engine_from_config(
            ModelConfig(max_model_len=512), tree, EngineArgs(4)
        ).engine
        sequences = run(engine, prompts, [SamplingParams(max_tokens=96)] * len(prompts))
        steps = sum(s.stats.num_steps for s in sequences)
        taus[method] = 1 + sum(s.stats.num_accepted_draft_tokens for s in sequences) / steps
    print(taus)
    assert taus["eagle2"] > taus["sequoia"] > 1 and taus["eagle2"] > 1.05 * taus["eagle1"]


def embedded_prompts(per_category: int) -> list[list[int]]:
    text = Tokenizer.load(download("embedded:tiny", "target"))
    return [text.encode_chat(row["messages"]) for row in prompt_rows(per_category)]
