"""SpecInfer: several drafters with weights in one tree. Outputs are plain decoding's, and parts draft as alone."""

import itertools
import random
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from eagle_ray.assembly.assemble import build_engine
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.hub import check_models
from eagle_ray.config import ModelConfig, SpeculativeConfig, load_config
from eagle_ray.config.models import check_model_names
from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.errors import ConfigError
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.engine.calibrate import CalibrationSetting, ScriptedPlanner
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.graph_warmup import capture
from eagle_ray.kv.block_manager import BLOCK_SIZE
from eagle_ray.methods.calibration import Calibration
from eagle_ray.methods.combine.calibration import EnsembleCalibration
from eagle_ray.methods.combine.drafter import DraftList, EnsembleDrafter
from eagle_ray.methods.draft_model.checkpoint import DraftModel
from eagle_ray.methods.drafter import Draft, Drafter, NullDrafter
from eagle_ray.methods.head_files import save_head
from eagle_ray.methods.lookup.drafter import LookupDrafter, NgramIndex
from eagle_ray.methods.lookup.suffix import SuffixIndex
from eagle_ray.planner.planner import Allocation, StepOutcome, UniformPlanner
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.draft_tree import DraftTree
from eagle_ray.tree.expand import PLAIN_PLAN, DraftPlan
from tests.support.checkpoints import published_head, zlab_config
from tests.support.engines import (
    SLOTS,
    Oracle,
    RandomPlanner,
    check_lossless,
    check_lossless_when_preempted,
    mostly_slow,
    oracle_of,
    some_params,
    some_prompts,
)
from tests.support.jobs import PAIR
from tests.support.toy_models import head, head3, llama, llama_engine, run

LAYERS = 7
DEPTH = 5
TREE = dict(max_nodes=16, max_depth=DEPTH, top_k=3, budget="uniform")
METHODS = ["draft_model+draft_model", "eagle2+draft_model", "eagle3+dflash+suffix", "suffix+ngram"]


def small_model(seed: int) -> DraftModel:
    return DraftModel(
        llama(seed=seed, num_hidden_layers=1, hidden_size=24, num_key_value_heads=1, head_dim=8)
    )


def weights_of(method: str, directory: Path) -> list[nn.Module]:
    """Return random weights for each part that reads some; two small models differ."""
    seeds = itertools.count(1)
    makers = {
        "draft_model": lambda: small_model(next(seeds)),
        "eagle2": head,
        "eagle3": head3,
        "dflash": lambda: published_head(directory, zlab_config(LAYERS, ids=(0, 4)), LAYERS),
    }
    return [makers[part]() for part in method.split("+") if part in makers]


def merged_engine(
    method: str, weights: List[nn.Module], num_slots: int, **settings: object
) -> Engine:
    several = DraftList(weights) if len(weights) > 1 else next(iter(weights), None)
    speculative = SpeculativeConfig(method=method, **{**TREE, **settings})
    return build_engine(
        llama(num_hidden_layers=LAYERS), several, speculative, EngineArgs(num_slots, 128)
    )


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return oracle_of(some_prompts(9), some_params(9, max_tokens=10), num_hidden_layers=LAYERS)


@pytest.mark.parametrize("num_slots", [pytest.param(1, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("method", METHODS)
def test_outputs_are_those_of_plain_decoding(oracle, tmp_path, method, num_slots):
    """Greedy and sampled rows, in batches of one and several."""
    check_lossless(merged_engine(method, weights_of(method, tmp_path), num_slots), oracle)


@pytest.mark.parametrize("method", METHODS)
def test_no_plan_and_no_preemption_changes_an_output(oracle, tmp_path, method):
    """Some members, any width and depth, steps without drafts or models; now and then the youngest is sent back."""
    engine = merged_engine(method, weights_of(method, tmp_path), 4)
    engine.planner = RandomPlanner(3, without_model=0.4)
    check_lossless_when_preempted(engine, oracle, every=5)
    assert engine.counters.num_preemptions > 1


def draft_and_record(trees: list[DraftTree], draft: Callable[..., Draft], *args: object) -> Draft:
    """Draft, and keep the tree."""
    found = draft(*args)
    trees.append(found.tree)
    return found


def drafts_of(
    engine: Engine, part: object, prompts: list[list[int]], params: list
) -> list[tuple[Tensor, Tensor]]:
    """Return what a drafter drafts at each step of an engine that verifies nothing of it, greedily."""
    trees: list[DraftTree] = []
    part.draft = partial(draft_and_record, trees, part.draft)
    engine.planner = ScriptedPlanner()
    engine.planner.setting = CalibrationSetting(len(prompts), 1, 3, DEPTH)
    run(engine, prompts, params)
    return [(tree.tokens, tree.log_values) for tree in trees]


@pytest.mark.parametrize(
    "method", ["eagle3+dflash", "eagle3+draft_model", "draft_model+draft_model"]
)
def test_each_part_drafts_what_it_drafts_alone(oracle, tmp_path, method):
    """From its own features and its own cache."""
    prompts, params = (
        some_prompts(3),
        [p for p in some_params(12, max_tokens=8) if not p.temperature],
    )
    weights = weights_of(method, tmp_path)
    for i, (name, own) in enumerate(zip(method.split("+"), weights, strict=True)):
        merged, alone = merged_engine(method, weights, 3), merged_engine(name, [own], 3)
        together = drafts_of(merged, merged.drafter.parts[i], prompts, params)
        for (tokens, values), (tokens_alone, values_alone) in zip(
            together, drafts_of(alone, alone.drafter, prompts, params), strict=True
        ):
            assert torch.equal(tokens, tokens_alone)
            torch.testing.assert_close(values, values_alone, atol=2e-5, rtol=0)


def children_of_root(tokens: Tensor, depths: Tensor) -> set[int]:
    return set(tokens[depths == 1].tolist())


def test_one_tree_has_the_nodes_of_both(tmp_path):
    """Two different models propose different tokens; what both propose stands once."""
    method = "draft_model+draft_model"
    engine = merged_engine(method, weights_of(method, tmp_path), 1)
    trees: list[list[DraftTree]] = [[], [], []]
    for found, drafter in zip(trees, [*engine.drafter.parts, engine.drafter], strict=True):
        drafter.draft = partial(draft_and_record, found, drafter.draft)
    run(engine, some_prompts(1), some_params(1, max_tokens=12))
    differ = 0
    for of_first, of_second, of_both in zip(*trees, strict=True):
        roots = [
            children_of_root(tree.tokens, tree.depths) for tree in (of_first, of_second, of_both)
        ]
        assert roots[2] == roots[0] | roots[1]
        assert int((of_both.depths == 1).sum()) == len(roots[2])
        differ += roots[0] != roots[1]
    assert differ > 2


class HalfLookupsPlanner(ScriptedPlanner):
    """Leaves the model out of every second step; keeps all plans and drafts."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[DraftPlan, Draft]] = []

    def plan(self, batch: DecodeBatch) -> DraftPlan:
        return DraftPlan(DEPTH, 3, lookups_only=len(self.steps) % 2 == 1)

    def allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        self.steps.append((plan, draft))
        return Allocation.uniform(draft, 8)


def test_step_without_the_model_drafts_lookups_and_runs_no_pass():
    engine = merged_engine("eagle2+suffix+ngram", [head()], 2)
    engine.planner = HalfLookupsPlanner()
    model, *lookups = engine.drafter.parts
    trees: list[list[DraftTree]] = [[], [], []]
    for found, drafter in zip(trees, [model, *lookups], strict=True):
        drafter.draft = partial(draft_and_record, found, drafter.draft)
    repeating = [[5, 6, 7, 8] * 5, [9, 4, 9, 4, 9]]
    run(engine, repeating, [SamplingParams(max_tokens=30, ignore_eos=True)] * 2)
    steps = engine.planner.steps
    assert len(trees[0]) == sum(not plan.lookups_only for plan, _ in steps)
    offers = [
        max(suffix.num_nodes, ngram.num_nodes) > 1 for suffix, ngram in zip(*trees[1:], strict=True)
    ]
    without = [
        (draft, offer)
        for (plan, draft), offer in zip(steps, offers, strict=True)
        if plan.lookups_only
    ]
    assert sum(offer for _, offer in without) > 3
    for draft, offer in without:
        assert (draft.num_passes, draft.num_catch_up, draft.is_exhausted) == (0, 0, True)
        assert bool(draft.levels) == offer and draft.extra_log_values == []
        depths, values = draft.tree.depths, draft.tree.log_values
        for depth, level in enumerate(draft.levels, 1):
            of_depth = values.masked_fill((depths != depth) | ~draft.tree.valid, -torch.inf)
            expected = of_depth.exp().sum(1)
            assert level.shape[:2] == (len(values), 1) and (level <= 0).all()
            torch.testing.assert_close(level[:, 0].exp().sum(1), expected)
    assert all(draft.num_passes > 0 for plan, draft in steps if not plan.lookups_only)


def with_lookups(drafter: Drafter, bounds: TreeBounds) -> EnsembleDrafter:
    """The head, if there is one, the suffixes of all texts and the n-grams of each."""
    indices = SuffixIndex(), NgramIndex()
    lookups = [LookupDrafter(index, bounds, Calibration(bounds.max_depth)) for index in indices]
    parts = [*([drafter] if drafter.has_model else []), *lookups]
    return EnsembleDrafter(parts, EnsembleCalibration(bounds.max_depth, len(parts)), (), bounds)


def lookups_alone(drafter: Drafter, bounds: TreeBounds) -> EnsembleDrafter:
    return with_lookups(NullDrafter(), bounds)


def test_state_with_a_missing_or_misfit_part_loads_other_parts():
    bounds = TreeBounds(12, 4, 4)
    first, second, third = (lookups_alone(NullDrafter(), bounds) for _ in range(3))
    state = {
        name: x + 0.25 if name.endswith("parameters") else x for name, x in first.state().items()
    }
    second.load_state({name: x for name, x in state.items() if not name.startswith("1.")})
    assert not torch.equal(second.state()["1.parameters"], state["1.parameters"])
    assert torch.equal(second.state()["2.parameters"], state["2.parameters"])
    with pytest.raises(ValueError, match="parameters"):
        third.load_state(state | {"1.parameters": torch.ones(1)})
    assert torch.equal(third.state()["2.parameters"], state["2.parameters"])


def repeating_jobs(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that repeat themselves and one another, some long enough to share blocks; they end at various steps."""
    rng = random.Random(3)
    phrases = [[rng.randrange(3, 97) for _ in range(rng.randint(2, 9))] for _ in range(5)]
    prompts = [
        [i for phrase in rng.choices(phrases, k=5) for i in phrase][:28] for _ in range(count)
    ]
    prompts[::3] = [(phrases[0] * 40)[:40] + ids[:5] for ids in prompts[::3]]
    params = [
        replace(p, max_tokens=8 + 7 * i % 40, ignore_eos=i % 3 > 0)
        for i, p in enumerate(some_params(count, 1))
    ]
    return prompts, params


REPLAYED = {"head": with_lookups, "lookups": lookups_alone}


@pytest.mark.parametrize(
    ("name", "overlap"), mostly_slow([("head", True), ("lookups", False)], REPLAYED, (False, True))
)
def test_a_replayed_merge_does_what_plain_decoding_does(name, overlap):
    """Greedy and sampled, chunked prompts and shared prefixes, sequences that come and go; twice, by what was read."""
    tree = TreeBounds(12, 4, 4)
    engine = llama_engine(
        SLOTS,
        12,
        4,
        4,
        graphs=True,
        overlap=overlap,
        fused=True,
        prefill_tokens=40,
        merged=REPLAYED[name],
    )
    prompts, params = repeating_jobs(14)
    plain = [s.output_ids for s in run(llama_engine(SLOTS), prompts, params)]
    accepted = []
    for _ in range(2):
        sequences = run(engine, prompts, params)
        assert [s.output_ids for s in sequences] == plain
        accepted.append(sum(s.stats.num_accepted_draft_tokens for s in sequences))
    assert (
        accepted[1] > 150 and accepted[1] > accepted[0]
    )  # the second time all of it was read before
    assert engine.counters.num_reused_tokens > 0
    assert bool(engine.counters.num_ahead) == overlap
    if overlap:
        assert engine.counters.num_ahead > 0.5 * engine.counters.num_steps
    assert engine.bounds == tree


class ThreeKindsPlanner:
    """Drafts as a uniform planner does, by turns with and without the model, or not at all."""

    will_draft = True

    def __init__(self, uniform: UniformPlanner):
        self._uniform, self.plans = uniform, []

    def plan(self, batch: DecodeBatch) -> DraftPlan:
        turn = len(self.plans) % 5
        plan = replace(self._uniform.plan(batch), lookups_only=turn < 3) if turn < 4 else PLAIN_PLAN
        self.plans.append(plan)
        return plan

    def allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        return self._uniform.allocate(draft, plan, batch)

    def observe(self, outcome: StepOutcome) -> None:
        pass


@pytest.mark.parametrize(("name", "merged"), REPLAYED.items())
def test_steps_without_the_model_are_launched_ahead_too(name, merged):
    engine = llama_engine(4, 12, 4, 4, graphs=True, overlap=True, fused=True, merged=merged)
    planner = engine.planner = ThreeKindsPlanner(engine.planner)
    prompts, params = repeating_jobs(10)
    plain = [s.output_ids for s in run(llama_engine(4), prompts, params)]
    assert [s.output_ids for s in run(engine, prompts, params)] == plain
    assert engine.counters.num_ahead > 0.5 * engine.counters.num_steps
    assert sum(plan.lookups_only for plan in planner.plans) > 20


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_replayed_merges_of_any_plan_and_under_pre_emption(overlap):
    """Any members, widths, depths and budgets, with the model or without; few blocks, so that the youngest goes."""
    prompts, params = repeating_jobs(6)
    params = [replace(p, max_tokens=60, ignore_eos=True) for p in params]
    outputs = [s.output_ids for s in run(llama_engine(4), prompts, params)]
    engine = llama_engine(
        4, 12, 5, 4, graphs=True, overlap=overlap, kv_tokens=6 * BLOCK_SIZE, merged=with_lookups
    )
    engine.planner = RandomPlanner(2, without_model=0.4)
    assert [s.output_ids for s in run(engine, prompts, params)] == outputs
    assert engine.counters.num_preemptions > 0


def test_a_replayed_merge_has_the_graphs_of_its_head_alone():
    counts = []
    for merged in (lambda drafter, bounds: drafter, with_lookups):
        engine = llama_engine(16, 60, 6, 10, graphs=True, overlap=True, fused=True, merged=merged)
        capture(engine)
        ahead = engine.graphs.num_captured
        run(engine, *repeating_jobs(20))
        assert engine.graphs.num_captured == ahead and engine.graphs.num_replayed > 0
        counts.append(ahead)
    assert counts[0] == counts[1]


def test_heads_that_read_different_outputs_are_refused(tmp_path):
    target = llama(num_hidden_layers=LAYERS)
    target.save_pretrained(tmp_path / "target")
    (tmp_path / "dflash").mkdir()
    published_head(tmp_path / "dflash", zlab_config(LAYERS, ids=(0, 4)), LAYERS)
    weights = head()
    save_head(weights, weights.config.to_dict(), tmp_path / "eagle2")
    names = [str(tmp_path / "eagle2"), str(tmp_path / "dflash")]
    with pytest.raises(
        ConfigError, match=r"model\.draft: some of these heads read the target's last output"
    ):
        check_models(
            ModelConfig(target=str(tmp_path / "target"), draft=names),
            SpeculativeConfig(method="eagle2+dflash"),
        )


@pytest.mark.parametrize(("drafts", "count"), [("[A, A, A]", 3), ("A", 1)])
def test_merge_needs_as_many_drafts_as_parts_with_weights(drafts, count):
    name = str(PAIR / "draft")
    sets = [f"model.target={PAIR / 'target'}", "speculative.method=eagle2+draft_model"]
    sets += [f"model.draft={drafts.replace('A', name)}", "input.path=x.jsonl", "output.path=y"]
    with pytest.raises(
        ConfigError, match=rf"model\.draft: {count} named, and method eagle2\+draft_model reads 2"
    ):
        check_model_names(load_config(None, sets=sets))
