"""Contexts that nobody attends to, and pairs whose acceptance is stated: what they promise of tokens."""

from __future__ import annotations

import pytest
import torch

from eagle_ray.assembly.assemble import build_engine
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import SpeculativeConfig
from eagle_ray.core.errors import EngineError
from eagle_ray.core.sequence import Sequence
from eagle_ray.core.tree_bounds import NO_TREE, TreeBounds
from eagle_ray.engine.engine import Engine
from eagle_ray.methods.eagle.checkpoint import load_head
from eagle_ray.models.loader import load_causal_lm
from eagle_ray.planner.planner import UniformPlanner
from eagle_ray.requests.parameters import SamplingParams
from jobs.bench.embedding_map import ModelShape
from jobs.bench.gpu.cases import requests
from jobs.bench.gpu.device_checks import generate
from jobs.bench.gpu.embedded_pair import ASSETS
from jobs.bench.gpu.gpu_run import is_walk
from jobs.bench.gpu.harness import LARGEST, Harness, Way
from jobs.bench.gpu.synthetic_context import in_context
from jobs.bench.simulated_costs import flat
from jobs.bench.synthetic import successor, synthetic_pair
from jobs.bench.widening import widen_pair
from tests.support.toy_models import head, llama, run

WIDE = ModelShape(64, 3, 4, 2, 16, 80, 128)
PROMPTS = [[5, 9, 23, 41], [7, 8], [11, 60, 61, 62, 63, 64]]
PARAMS = [SamplingParams(max_tokens=20, ignore_eos=True)] * 3


def rig_of(pair) -> Harness:
    return Harness.of(*pair, slots=3, longest=256, kv_columns=1536)


@pytest.fixture(scope="module")
def pair():
    return widen_pair(llama(), head(rms_norm_eps=1e-5), WIDE)


def drained(engine: Engine, context: int) -> list[Sequence]:
    sequences = [next(requests([prompt], 0, [20], context)) for prompt in PROMPTS]
    for sequence in sequences:
        sequence.sampling = PARAMS[0]
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    return sequences


WAYS = [Way("plain"), Way("tree", LARGEST), Way("ours", LARGEST, "global")]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_each_way_predicts_its_steps_and_corrects_its_own_costs(pair, way):
    rig = rig_of(pair)
    rig.costs = flat()
    engine = rig.engine(way, 0, 3)
    drained(engine, 0)
    watch = engine.planner
    assert watch.predicted_s > 0 and watch.predicted_plain_s > 0 and min(watch.parts[1:]) > 0
    assert rig.costs == flat() and watch.step_costs != flat()


@pytest.mark.slow
@pytest.mark.parametrize("way", [Way("plain"), Way("tree", LARGEST)], ids=lambda way: way.name)
def test_a_context_is_read_and_changes_nothing(pair, way):
    rig = rig_of(pair)
    wanted = generate(rig.plain, PROMPTS, PARAMS).ids
    rig.costs = None
    rig.set_aside(3 * 128, longest=256)
    for context in (128, 64, 0, 96):
        engine = rig.engine(way, context, 3, UniformPlanner(way.tree))
        sequences = drained(engine, context)
        assert [s.output_ids for s in sequences] == wanted, context
        assert [s.num_reused for s in sequences] == [context] * 3
        assert [s.num_cached - context for s in sequences] == [len(p) + 19 for p in PROMPTS]
    rig.blocks.begin_with(0, 3)
    assert rig.blocks.attach_prefix(0, in_context([5], 128)) == 0  # a context is never found by its tokens


@pytest.mark.slow
def test_acceptance_behind_a_context_is_as_without():
    """The head reads the context too, and sees nothing of it but the pair of the prompt's first token."""
    small = load_causal_lm(ASSETS / "target", torch.float32, "cpu")
    head_of_it = load_head(ASSETS / "draft", small.config)
    rig = rig_of(widen_pair(small, head_of_it, ModelShape(288, 9, 8, 2, 64, 448, 1536)))
    rig.set_aside(3 * 128, longest=256)
    accepted = []
    for context in (0, 128):
        sequences = drained(rig.engine(Way("tree", LARGEST), context, 3, UniformPlanner(LARGEST)), context)
        accepted.append(sum(s.stats.num_accepted_draft_tokens for s in sequences))
    assert accepted[0] > 20 and accepted[1] == pytest.approx(accepted[0], rel=0.1)


def test_more_contexts_than_were_set_aside_are_refused(pair):
    rig = rig_of(pair)
    rig.set_aside(3 * 64, longest=256)
    with pytest.raises(EngineError, match="do not fit"):
        rig.engine(Way("plain"), 96, 3, UniformPlanner(NO_TREE))


@pytest.mark.slow
def test_the_rig_drafts_as_a_jobs_engine_does(pair):
    tree = SpeculativeConfig(method="eagle2", max_nodes=60, max_depth=6, top_k=10, budget="uniform")
    job = run(build_engine(*pair, tree, EngineArgs(3, 256)), PROMPTS, PARAMS)
    rig = rig_of(pair)
    ours = run(rig.engine(Way("tree", LARGEST), 0, 3, UniformPlanner(LARGEST)), PROMPTS, PARAMS)
    assert [(s.output_ids, s.stats.histogram) for s in ours] == [(s.output_ids, s.stats.histogram) for s in job]


@pytest.mark.slow
def test_a_synthetic_pair_walks_and_accepts_as_stated():
    shape = ModelShape(256, 1, 4, 2, 64, 256, 1024)
    rig = Harness.of(*synthetic_pair(shape, (0.6, 0.2)), slots=4, longest=320)
    chain = rig.engine(Way("chain"), 0, 4, UniformPlanner(TreeBounds(1, 1, 1)))
    assert chain is rig.plain
    prompts, params = [[3], [700], [44], [999]], [SamplingParams(max_tokens=200, logprobs=True)] * 4
    rates = {}
    for tree in ((1, 1, 1), (2, 1, 2)):
        rig.drafting.planner = UniformPlanner(TreeBounds(*tree))
        sequences = run(rig.drafting, prompts, params)
        assert all(is_walk(s.token_ids, shape.vocab_size) for s in sequences)
        stats = [s.stats for s in sequences]
        rates[tree] = sum(s.num_accepted_draft_tokens for s in stats) / sum(s.num_steps for s in stats)
    assert rates[1, 1, 1] == pytest.approx(0.6, abs=0.12)
    assert rates[2, 1, 2] == pytest.approx(0.8, abs=0.07)


def test_a_walk_visits_the_whole_vocabulary():
    token, seen = 0, set()
    while token not in seen:
        seen.add(token)
        token = successor(token, 1000)
    assert len(seen) == 1000
    assert torch.equal(successor(torch.arange(5), 5).sort().values, torch.arange(5))
