"""Replayed steps give what eager ones give: no number comes from padding, from an earlier run or from another bucket.

On a CPU a replay is the same call on the same static tensors, with everything spoiled that a GPU
would not make again.
"""

import logging
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from eagle_ray.core.decode_batch import DecodeBatch
from eagle_ray.core.sampling_batch import PaddedInput
from eagle_ray.core.sequence import Sequence
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.graph_warmup import capture, capture_fixed
from eagle_ray.kernels import availability
from eagle_ray.kv.block_manager import BLOCK_SIZE
from eagle_ray.methods.drafter import Draft
from eagle_ray.methods.eagle.published_trees import StaticPlanner
from eagle_ray.models import graphs as graphs_module
from eagle_ray.models.graphs import MAX_AHEAD, CudaGraphRunner, EagerGraph, InputBuffers
from eagle_ray.planner.budget_planner import BudgetPlanner
from eagle_ray.planner.modes import Mode
from eagle_ray.planner.planner import Allocation, StepOutcome, UniformPlanner
from eagle_ray.requests.parameters import MAX_TOP_LOGPROBS, SamplingParams
from eagle_ray.tree.expand import DraftPlan
from eagle_ray.tree.static_tree import MC_SIM_7B_63
from jobs.bench.simulated_costs import flat
from tests.support.engines import (
    E3,
    SLOTS,
    IntermittentPlanner,
    RandomPlanner,
    jobs,
    mostly_slow,
    some_params,
    some_prompts,
)
from tests.support.kernels import compile_fails
from tests.support.operations import device_operations
from tests.support.toy_models import head3, llama_engine, run


def engine(
    tree: tuple[int, int, int], generation: int, graphs: bool = True, **sizes: object
) -> Engine:
    shape = dict(weights=head3(), **E3) if generation == 3 else {}
    made = llama_engine(SLOTS, *tree, graphs=graphs, **shape | sizes)
    made.mixed_prefill = (
        False  # as where steps are replayed: what is drafted depends on who decodes beside whom
    )
    if tree[0]:
        made.drafter.ranking.offers.interval = 1  # replayed passes learn from every step
    return made


def sequence_statistics(sequence: Sequence) -> tuple:
    """All that is counted of a sequence, but for the sums of probabilities, which differ in their last digits."""
    stats = sequence.stats
    counts = [
        stats.histogram,
        stats.proposed_by_depth,
        stats.per_step_budget,
        stats.per_step_accepted,
    ]
    confident = [stats.drafted.nodes, stats.drafted.accepted, stats.calibrated.accepted]
    passes = [sequence.target_forwards, sequence.draft_forwards]
    return (
        sequence.output_ids,
        *counts,
        *confident,
        *passes,
        stats.num_plain_steps,
        stats.num_discarded_tokens,
    )


def assert_same(ours: list[Sequence], theirs: list[Sequence]) -> None:
    assert [sequence_statistics(s) for s in ours] == [sequence_statistics(s) for s in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.output_logprobs == pytest.approx(other.output_logprobs, abs=1e-4)
        assert [[i for i, _ in top] for top in one.output_tops] == [
            [i for i, _ in top] for top in other.output_tops
        ]


def fitted_parameters(engine: Engine) -> list[torch.Tensor]:
    """What calibration and coupling have come to."""
    if not engine.drafter.prefill_passes:
        return []
    ranking = engine.drafter.ranking
    return [ranking.calibration.fit.parameters, ranking.coupling.fit.parameters]


SHAPES = [(0, 0, 0), (1, 1, 1), (12, 4, 4), (60, 6, 10)]


@pytest.mark.parametrize(
    ("tree", "generation"),
    mostly_slow(zip(SHAPES, (3, 2, 3, 2), strict=True), SHAPES, (2, 3)),
    ids=str,
)
def test_a_replayed_engine_does_what_an_eager_one_does(tree, generation):
    """Greedy and sampled, coupled, while sequences come and go: outputs, statistics, log-probabilities."""
    ours, theirs = engine(tree, generation), engine(tree, generation, graphs=False)
    sequences = run(ours, *jobs(10))
    assert_same(sequences, run(theirs, *jobs(10)))
    assert [s.output_ids for s in sequences] == [
        s.output_ids for s in run(engine((0, 0, 0), generation), *jobs(10))
    ]
    assert ours.graphs.num_replayed > 2 * ours.graphs.num_captured > 0
    if ours.drafter.prefill_passes:  # what was learnt is the same too
        for ranking, other in ((ours.drafter.ranking, theirs.drafter.ranking),):
            for fit, expected in (
                (ranking.calibration.fit, other.calibration.fit),
                (ranking.coupling.fit, other.coupling.fit),
            ):
                torch.testing.assert_close(
                    fit.parameters, expected.parameters, atol=1e-3, rtol=1e-3
                )


def test_without_calibration_and_coupling_too():
    ours, theirs = engine((12, 4, 4), 2), engine((12, 4, 4), 2, graphs=False)
    for each in (ours, theirs):
        each.drafter.ranking.calibration = each.drafter.ranking.coupling = (
            each.drafter.ranking.offers.calibration
        ) = None
    assert_same(run(ours, *jobs(9)), run(theirs, *jobs(9)))


@pytest.mark.parametrize("generation", [2, 3])
def test_chunks_and_prefixes_change_nothing(generation):
    header = (some_prompts(1, seed=9)[0] * 70)[:70]
    prompts = [header * (i % 2) + ids for i, ids in enumerate(some_prompts(8))]
    params = some_params(8, max_tokens=12)
    outputs = [
        s.output_ids for s in run(engine((0, 0, 0), generation, graphs=False), prompts, params)
    ]
    chunked = engine((12, 4, 4), generation, prefill_tokens=17)
    assert [s.output_ids for s in run(chunked, prompts, params)] == outputs
    assert chunked.counters.num_reused_tokens > 0 and chunked.graphs.num_replayed > 0


def test_pre_emption_changes_nothing():
    """Four that grow to three blocks each over a pool of six: trees are cut, the youngest goes and comes back."""
    prompts = [(ids * 30)[: 8 + i] for i, ids in enumerate(some_prompts(4))]
    params = [replace(p, ignore_eos=True) for p in some_params(4, max_tokens=60)]
    outputs = [s.output_ids for s in run(engine((0, 0, 0), 2, graphs=False), prompts, params)]
    scarce = llama_engine(4, 12, 4, 4, kv_tokens=6 * BLOCK_SIZE, graphs=True)
    assert [s.output_ids for s in run(scarce, prompts, params)] == outputs
    assert scarce.counters.num_preemptions > 0 and scarce.graphs.num_replayed > 0


@pytest.mark.parametrize("off", [1, 12])
def test_speculation_that_returns_reads_what_it_missed(off):
    engines = [engine((12, 4, 4), 2, graphs) for graphs in (True, False)]
    prompts, params = (
        some_prompts(8),
        [replace(p, ignore_eos=True) for p in some_params(8, max_tokens=44)],
    )
    for each in engines:
        each.planner = IntermittentPlanner(each.planner, off)
    ours, theirs = (run(each, prompts, params) for each in engines)
    assert_same(ours, theirs)
    assert engines[0].planner.caught_up == engines[1].planner.caught_up
    assert off < max(
        engines[0].planner.caught_up
    )  # more than a replay reads, where the time was long


def test_whatever_is_planned_for_whomever():
    """Members, widths, depths and budgets at random: some drafts are replayed, some are not."""
    fickle = engine((20, 5, 4), 2, prefill_tokens=40)
    fickle.planner = RandomPlanner(seed=1)
    outputs = [s.output_ids for s in run(engine((0, 0, 0), 2, graphs=False), *jobs(10))]
    assert [s.output_ids for s in run(fickle, *jobs(10))] == outputs


def test_a_static_tree_is_replayed():
    engines = [engine((25, 5, 4), 2, graphs) for graphs in (True, False)]
    for each in engines:
        each.planner = StaticPlanner(MC_SIM_7B_63)
    assert_same(*(run(each, *jobs(8)) for each in engines))


def test_the_global_budget_fills_the_passes_that_there_are():
    ours = engine((12, 4, 4), 2)
    ours.planner = BudgetPlanner(
        ours.bounds,
        flat(head_share=0.01),
        can_sync=False,
        sizes=ours.graphs.pass_sizes(ours.bounds),
    )
    rows, observe = {True: [], False: []}, ours.planner.observe

    def watched(outcome: StepOutcome) -> None:
        rows[outcome.plan.is_drafting].append((outcome.num_rows, outcome.batch_size))
        if outcome.plan.is_drafting and outcome.plan.members is None:
            assert outcome.level_rows == ours.graphs.draft_size(outcome.batch_size) * 4
        observe(outcome)

    ours.planner.observe = watched
    outputs = [s.output_ids for s in run(engine((0, 0, 0), 2, graphs=False), *jobs(10))]
    assert [s.output_ids for s in run(ours, *jobs(10))] == outputs
    assert ours.planner.modes.mode is not Mode.WARM_UP and max(rows[True]) > (SLOTS, 0)
    assert all(n == ours.graphs.num_rows(n) for n, _ in rows[True])
    assert rows[False] and all(n == ours.graphs.batch_size(size) for n, size in rows[False])


def test_who_fills_up_a_batch_leaves_nothing_behind():
    """Five sequences in a pass for six: no block, no queue entry and no state of the sixth slot's changes."""
    ours = engine((12, 4, 4), 2)
    for i, ids in enumerate(some_prompts(6)):
        ours.add(
            Sequence(str(i), ids, SamplingParams(max_tokens=40 if i < 5 else 3, ignore_eos=True))
        )
    while len(ours.scheduler.running) != 5:
        ours.step()
    gone = next(slot for slot in range(SLOTS) if slot not in ours.scheduler.running)
    queue, table = ours.drafter.queue, ours.target.cache.blocks.block_table
    window = slice(gone * queue.window, (gone + 1) * queue.window)
    before = queue.tokens[window].clone(), queue.features[window].clone()
    replays = ours.graphs.num_replayed
    for _ in range(3):
        ours.step()
    assert ours.graphs.num_replayed >= replays + 4
    assert torch.equal(queue.tokens[window], before[0]) and torch.equal(
        queue.features[window], before[1]
    )
    assert table[-1].eq(ours.target.cache.blocks.num_blocks).all()
    ours.scheduler.check_integrity()


def test_what_was_recorded_ahead_is_not_recorded_again():
    """Of a planner's own steps with short contexts, greedy and sampled; and the engine is as it was."""
    ours, oracle = engine((12, 4, 4), 2), engine((0, 0, 0), 2, graphs=False)
    planner = ours.planner = BudgetPlanner(
        ours.bounds,
        flat(head_share=0.01),
        can_sync=False,
        sizes=ours.graphs.pass_sizes(ours.bounds),
    )
    capture(ours)
    assert not ours.has_work and ours.counters.num_steps == 0 and ours.planner is planner
    ahead = ours.graphs.num_captured
    params = [
        SamplingParams(temperature=float(i % 2), max_tokens=12, ignore_eos=True, seed=i)
        for i in range(6)
    ]
    prompts = some_prompts(6)
    outputs = [s.output_ids for s in run(oracle, prompts, params)]
    assert [s.output_ids for s in run(ours, prompts, params)] == outputs
    assert ours.graphs.num_replayed > 0
    assert ours.graphs.num_captured == ahead


def test_longer_contexts_are_recorded_ahead_too():
    """Prompts past the first bound and, as they grow, past the second: nothing is recorded on the way."""
    ours = engine((4, 2, 2), 2)
    ours.planner = BudgetPlanner(
        ours.bounds,
        flat(head_share=0.01),
        can_sync=False,
        sizes=ours.graphs.pass_sizes(ours.bounds),
    )
    capture(ours)
    ahead = ours.graphs.num_captured
    prompts = [(ids * 30)[:60] for ids in some_prompts(5)]
    params = [
        SamplingParams(temperature=float(i % 2), max_tokens=80, ignore_eos=True, seed=i)
        for i in range(5)
    ]
    assert (
        len(ours.graphs.contexts) > 2
        and 60 < ours.graphs.contexts[0] < ours.graphs.contexts[1] < 140
    )
    outputs = [s.output_ids for s in run(engine((0, 0, 0), 2, graphs=False), prompts, params)]
    assert [s.output_ids for s in run(ours, prompts, params)] == outputs
    assert ours.graphs.num_captured == ahead


def test_a_job_of_mixed_sampling_needs_a_hundred_graphs_at_most():
    """Of 256 slots, as Triton's kernels need them: every number of sequences, all kinds of sampling, long and short."""
    ours = llama_engine(256, 60, 6, 10, graphs=True, fused=True)
    ours.planner = BudgetPlanner(
        ours.bounds,
        flat(head_share=0.01),
        can_sync=False,
        sizes=ours.graphs.pass_sizes(ours.bounds),
    )
    costs, learn = flat(head_share=0.01), ours.planner.observe
    ours.planner.observe = lambda outcome: learn(replace(outcome, seconds=costs.predict(outcome)))
    capture(ours)
    ahead = ours.graphs.num_captured
    assert ahead <= MAX_AHEAD
    kinds = [
        {},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 7, "min_p": 0.1},
    ]
    params = [
        SamplingParams(**kinds[i % 4], max_tokens=1 + i % 59, ignore_eos=True, seed=i)
        for i in range(300)
    ]
    prompts = [(ids * 30)[: 1 + 13 * i % 90] for i, ids in enumerate(some_prompts(300))]
    outputs = [s.output_ids for s in run(llama_engine(256), prompts, params)]
    assert [s.output_ids for s in run(ours, prompts, params)] == outputs
    assert (
        ours.counters.num_steps - ours.counters.num_plain_steps > 5
        and ours.graphs.num_captured == ahead
    )


@pytest.mark.parametrize("num_slots", [16, 64, 200, 256, 300, 512])
@pytest.mark.parametrize("depth", [6, 8])
def test_there_are_a_hundred_graphs_at_most_however_many_slots(num_slots, depth):
    """All that is recorded ahead with EAGLE-2's trees: plain passes, trees, pairs, first and further levels."""
    graphs, bounds = CudaGraphRunner("cpu", num_slots, 4096, fused=True), TreeBounds(60, depth, 10)
    pairs = partial(graphs.pair_rows, max_pairs=depth + 1)
    sizes = [
        graphs.sizes(graphs.batch_size, num_slots),
        graphs.tree_passes(bounds.max_nodes),
        graphs.sizes(pairs, num_slots * (depth + 1)),
        graphs.sizes(graphs.draft_size, num_slots),
        graphs.level_passes(bounds.top_k),
    ]
    assert sum(map(len, sizes)) <= MAX_AHEAD
    for n in range(1, num_slots + 1):
        for width in range(1, bounds.top_k + 1):
            recorded = graphs.draft_width(width, bounds.top_k, n)
            assert (graphs.draft_size(n, recorded), recorded) in sizes[-1] and recorded >= width
        rows = graphs.max_rows(n, bounds.max_nodes)
        assert rows <= n or (graphs.num_trees(n, rows), rows) in sizes[1]


@pytest.mark.parametrize("num_slots", [256, 512])
@pytest.mark.parametrize("tree", [(0, 0, 0), (60, 6, 10)], ids=["plain", "trees"])
def test_what_is_recorded_ahead_is_counted(num_slots, tree):
    ours = llama_engine(num_slots, *tree, graphs=True, fused=True)
    (capture if tree[0] else capture_fixed)(ours)
    counts = ours.graphs.captured
    most = (
        {"verify": 61, "pairs": 9, "first level": 8, "further level": 24}
        if tree[0]
        else {"verify": 19}
    )
    assert counts.total() <= MAX_AHEAD and counts.keys() == most.keys() and counts <= Counter(most)


def test_levels_are_padded_to_the_next_width_that_is_recorded():
    level_rows = (
        CudaGraphRunner("cpu", 64, 1024, fused=True).pass_sizes(TreeBounds(60, 6, 10)).level_rows
    )
    assert [level_rows(1, width) for width in (1, 4, 10)] == [10, 10, 10]
    assert [level_rows(9, width) for width in (1, 2, 3, 4, 6, 10)] == [16, 32, 64, 64, 160, 160]
    assert [level_rows(33, width) for width in (2, 3)] == [128, 256]
    assert [level_rows(64, width) for width in (1, 2, 4, 10)] == [64, 128, 256, 640]


def test_plain_passes_are_padded_to_the_next_sixteen():
    graphs = CudaGraphRunner("cpu", 256, 1024, fused=True)
    assert [graphs.batch_size(n) for n in (1, 3, 33, 64)] == [1, 4, 64, 64]
    assert all(graphs.batch_size(n) == -(-n // 16) * 16 for n in range(65, 257))
    coarse = CudaGraphRunner("cpu", 512, 1024, fused=True)
    assert all(coarse.batch_size(n) < 1.34 * n for n in range(65, 513))


class ChainPlanner(UniformPlanner):
    """Drafts of one node a level, of three levels, with as many children as ever; three nodes of each are verified."""

    def plan(self, batch: DecodeBatch) -> DraftPlan:
        return DraftPlan(3, 1, num_children=10)

    def allocate(self, draft: Draft, plan: DraftPlan, batch: DecodeBatch) -> Allocation:
        return Allocation.uniform(draft, 3)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_chain_of_sixty_four_runs_sixty_four_rows_a_level(overlap, monkeypatch):
    """And reads the pairs that wait, or that the step in flight can leave, not 7 of each sequence."""
    num = 64
    ours = llama_engine(num, 60, 6, 10, graphs=True, fused=True, overlap=overlap)
    ours.planner = ChainPlanner(ours.bounds)
    for i, ids in enumerate(some_prompts(num)):
        ours.add(
            Sequence(
                str(i),
                ids,
                SamplingParams(max_tokens=100, ignore_eos=True, temperature=i % 2, seed=i),
            )
        )
    for _ in range(4):
        ours.step()
    rows, embed = [], ours.drafter.embed_tokens
    monkeypatch.setattr(
        ours.drafter, "embed_tokens", lambda tokens: rows.append(len(tokens)) or embed(tokens)
    )
    captured, ahead = ours.graphs.num_captured, ours.counters.num_ahead
    for _ in range(3):
        ours.step()
    assert ours.graphs.num_captured == captured and ours.counters.num_ahead == ahead + 3 * overlap
    assert len(rows) == 3 * 3 and all(level == num for i, level in enumerate(rows) if i % 3)
    assert max(rows[::3]) <= 256 < num * 7


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tree", [(20, 5, 4), (60, 6, 10)], ids=str)
def test_rows_for_waiting_pairs_are_the_fewest_that_suffice(tree, overlap, monkeypatch):
    """As many as a recorded pass has for the pairs that wait; if only the device knows these, for what may wait."""
    ours = engine(tree, 2, overlap=overlap, fused=True)
    ours.planner = RandomPlanner(seed=2) if tree[0] == 20 else ours.planner
    run_pass, seen, max_pairs = ours.graphs.run, [], tree[1] + 1

    def watched(key, function, inputs):
        if key[0] == "pairs":
            _, lengths, _, starts = (x.tensor for x in inputs)
            seen.append((int((lengths + 1 - starts).sum()), len(lengths), key[1]))
        return run_pass(key, function, inputs)

    monkeypatch.setattr(ours.graphs, "run", watched)
    prompts, params = jobs(10)
    outputs = [s.output_ids for s in run(engine((0, 0, 0), 2, graphs=False), prompts, params)]
    assert [s.output_ids for s in run(ours, prompts, params)] == outputs
    assert seen and all(num <= batch * max_pairs and num <= rows for num, batch, rows in seen)
    if not overlap:
        assert all(rows == ours.graphs.pair_rows(num, max_pairs) for num, _, rows in seen)
    else:
        assert ours.counters.num_ahead > 5


def test_the_graph_unused_for_longest_is_dropped(monkeypatch):
    monkeypatch.setattr(graphs_module, "MAX_GRAPHS", 2)
    graphs = CudaGraphRunner("cpu", 4, 64, fused=True)
    for key in ("a", "b", "a", "c", "a", "b"):
        graphs.run((key,), lambda: torch.zeros(1), [])
    assert graphs.num_captured == 4 and graphs.num_replayed == 2  # b again
    assert graphs.has(("a",)) and graphs.run(("c",), lambda: torch.zeros(1), []) is not None
    assert graphs.has(("a",)) and not graphs.has(("b",))  # what was asked for is about to be used


def test_what_was_recorded_ahead_is_never_dropped(monkeypatch):
    """However many numbers of alternatives a job asks for, with and without controls."""
    monkeypatch.setattr(graphs_module, "MAX_GRAPHS", 2)
    ours = engine((12, 4, 4), 2, fused=True)
    ours.planner = BudgetPlanner(
        ours.bounds,
        flat(head_share=0.01),
        can_sync=False,
        sizes=ours.graphs.pass_sizes(ours.bounds),
    )
    capture(ours)
    ahead, captured = ours.graphs.num_captured, []
    record = ours.graphs.try_capture
    monkeypatch.setattr(
        ours.graphs, "try_capture", lambda key, *x: captured.append(key) or record(key, *x)
    )
    prompts, params = some_prompts(8), some_params(8, 12)
    asking = [
        replace(p, logprobs=True, top_logprobs=i, presence_penalty=i % 2 / 2)
        for i, p in enumerate(params)
    ]
    for each in (asking, params):
        outputs = [s.output_ids for s in run(engine((0, 0, 0), 2, graphs=False), prompts, each)]
        assert [s.output_ids for s in run(ours, prompts, each)] == outputs
    assert ours.graphs.num_captured > ahead + 2
    shapes = {
        (key[0], key[-1].logprobs, key[-1].num_tops)
        for key in captured
        if key[0] in ("forward", "verify")
    }
    assert {key[0] for key in captured} <= {
        "forward",
        "second half",
        "verify",
        "first level",
        "further level",
    }
    assert shapes <= {
        ("forward", False, 0),
        ("verify", True, 0),
        ("verify", True, MAX_TOP_LOGPROBS),
    }


@pytest.mark.parametrize("most", [2, 3])
def test_graphs_that_are_dropped_all_the_time_change_nothing(most, monkeypatch):
    """A level that was dropped after its draft began would be recorded on that draft, which grows it."""
    monkeypatch.setattr(graphs_module, "MAX_GRAPHS", most)
    prompts, params = jobs(8)
    ours = engine((12, 4, 4), 2, fused=True)
    assert_same(
        run(ours, prompts, params), run(engine((12, 4, 4), 2, graphs=False), prompts, params)
    )
    assert ours.graphs.num_captured > 3 * most


@pytest.mark.parametrize(
    "make", [lambda: None, lambda: StaticPlanner(MC_SIM_7B_63)], ids=["uniform", "static"]
)
def test_a_planner_that_always_does_the_same_is_recorded_ahead(make):
    ours = engine((25, 5, 4), 2)
    planner = ours.planner = make() or ours.planner
    capture_fixed(ours)
    ahead = ours.graphs.num_captured
    assert (
        not ours.has_work and ours.counters.num_steps == 0 and ours.planner is planner and ahead > 0
    )
    params = [
        SamplingParams(temperature=float(i % 2), max_tokens=12, ignore_eos=True, seed=i)
        for i in range(6)
    ]
    outputs = [
        s.output_ids for s in run(engine((0, 0, 0), 2, graphs=False), some_prompts(6), params)
    ]
    assert [s.output_ids for s in run(ours, some_prompts(6), params)] == outputs
    assert ours.graphs.num_captured == ahead


def test_buckets_hold_what_they_are_for():
    graphs = CudaGraphRunner("cpu", num_slots=50, capacity=700)
    for n in range(1, 51):
        assert n <= graphs.batch_size(n) <= 50 and n <= graphs.draft_size(n) <= 50
    for n in (*range(1, 70), 1023, 1024, 1025, 5000):
        assert n <= graphs.num_rows(n) < 2 * n or n < 8
        assert n <= graphs.num_nodes(n) < 2 * n
    assert {graphs.context(n) for n in range(1, 701)} == {64, 128, 256, 512, 700}
    assert all(graphs.context(n) >= n for n in range(1, 701))


def test_inputs_are_padded_again_and_outputs_last_until_next_run():
    graphs, state = CudaGraphRunner("cpu", 4, 64), torch.zeros(1)

    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        state.copy_(x.sum()[None])
        return [x * 2, y + x.sum()]

    def ran(*numbers: float) -> list[torch.Tensor]:
        return graphs.run(
            "key",
            function,
            [PaddedInput(torch.tensor(numbers), (4,), 100.0), PaddedInput(fixed, (2,))],
        )

    fixed = torch.zeros(2)
    first = ran(1.0, 2.0, 3.0)
    assert first[0].tolist() == [2, 4, 6, 200] and first[1].tolist() == [106, 106]
    second = ran(5.0)
    assert second[0].tolist() == [10, 200, 200, 200] and state.item() == 305
    assert all(a is b for a, b in zip(first, second, strict=True))
    assert (graphs.num_captured, graphs.num_replayed) == (1, 1)
    for numbers in ((7.0, 8.0), (1.0, 2.0, 3.0), (4.0, 5.0), (6.0, 7.0)):
        assert ran(*numbers)[0].tolist() == [2 * number for number in numbers] + [200] * (
            4 - len(numbers)
        )


def test_inputs_of_a_dtype_are_copied_together():
    """Five vectors of integers and two of floats; one of a rectangle's columns has gaps."""
    vectors = [torch.arange(3) + i for i in range(5)] + [torch.ones(3), torch.zeros(3)]
    inputs = [
        *(PaddedInput(x, (4,)) for x in vectors),
        PaddedInput(torch.ones(2, 3, dtype=torch.int64), (4, 4)),
    ]
    buffers = InputBuffers(inputs)
    assert device_operations(lambda: buffers.fill(inputs)) == {"_foreach_copy_": 3}
    assert [x.tolist() for x in buffers.tensors[:5]] == [[i, i + 1, i + 2, 0] for i in range(5)]
    assert buffers.tensors[-1].sum() == buffers.tensors[-1][:2, :3].sum() == 6


def test_a_corner_that_shrinks_in_one_direction_leaves_padding():
    graphs = CudaGraphRunner("cpu", 4, 64)
    for rows, columns in ((2, 3), (3, 2), (3, 3), (4, 4), (1, 4)):
        seen = graphs.run(
            "key", lambda x: x + 0, [PaddedInput(torch.ones(rows, columns), (4, 4), -1.0)]
        )
        assert (seen == 1).sum() == rows * columns and (seen[:rows, :columns] == 1).all()


def test_a_result_that_is_kept_elsewhere_is_spoiled():
    """As on a GPU, where Python runs once: who keeps a tensor of a later call keeps nothing."""
    graphs, kept = CudaGraphRunner("cpu", 4, 64), []

    def function(x: torch.Tensor) -> torch.Tensor:
        kept.append(x + 1)
        return kept[-1]

    for number in (1.0, 2.0):
        result = graphs.run("key", function, [PaddedInput(torch.tensor([number]), (1,))])
    assert result.item() == 3 and kept[0] is result and kept[-1].item() > 1e38


@pytest.mark.parametrize("num_before", [0, 1, 5])
def test_where_recording_fails_steps_go_on_unrecorded(monkeypatch, caplog, num_before):
    """As on a GPU whose driver says no, at once or later: the same outputs, one line in the log for a kind of pass."""
    ours = engine((12, 4, 4), 2)

    def recorded(function: object, inputs: InputBuffers, pool: object) -> EagerGraph:
        if ours.graphs.num_captured == num_before:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return EagerGraph(function, inputs)

    monkeypatch.setattr(CudaGraphRunner, "on_cuda", True)
    monkeypatch.setattr(CudaGraphRunner, "pool", lambda self, kind: object())
    monkeypatch.setattr(graphs_module, "CudaGraph", recorded)
    monkeypatch.setattr(CudaGraphRunner, "used_bytes", lambda self: 0)
    with caplog.at_level(logging.WARNING, "eagle_ray"):
        sequences = run(ours, *jobs(9))
    assert_same(sequences, run(engine((12, 4, 4), 2, graphs=False), *jobs(9)))
    assert ours.graphs.failure is not None and ours.graphs.num_captured == num_before
    assert 1 <= len(caplog.records) == len({key[0] for key in ours.graphs.failures})
    assert (
        "not permitted when stream is capturing)" in caplog.text and "and more" not in caplog.text
    )


@pytest.mark.parametrize("refused", ["verify", "pairs", "first level", "further level"])
def test_uncapturable_pass_kind_leaves_other_kinds_captured(monkeypatch, refused):
    """As with MoE layers that copy to the host on some GPUs; a draft of two passes needs both of them."""
    ours = engine((12, 4, 4), 2)
    kinds = []

    def recorded(function: object, inputs: InputBuffers, pool: str) -> EagerGraph:
        kinds.append(pool)
        if pool == refused:
            raise RuntimeError("operation not permitted when stream is capturing")
        return EagerGraph(function, inputs)

    monkeypatch.setattr(CudaGraphRunner, "on_cuda", True)
    monkeypatch.setattr(CudaGraphRunner, "pool", lambda self, kind: kind)
    monkeypatch.setattr(graphs_module, "CudaGraph", recorded)
    monkeypatch.setattr(CudaGraphRunner, "used_bytes", lambda self: 0)
    sequences = run(ours, *jobs(9))
    assert_same(sequences, run(engine((12, 4, 4), 2, graphs=False), *jobs(9)))
    assert 0 < kinds.count(refused) <= graphs_module.MAX_FAILED_CAPTURES
    assert {key[0] for key in ours.graphs.failures} == {refused} and ours.graphs.num_replayed > 5
    assert f"{refused!r} passes failed (operation not permitted" in (ours.graphs.failure or "")


@pytest.mark.parametrize(
    ("error", "is_given_up"), [("not permitted", True), ("CUBLAS_STATUS_ALLOC_FAILED", False)]
)
@pytest.mark.parametrize("fails_here", [True, False])
def test_what_is_recorded_goes_on_after_failures_on_any_rank(
    monkeypatch, error, is_given_up, fails_here
):
    """No more passes of the kind are recorded then, unless memory was short, which says nothing of smaller ones."""
    graphs = CudaGraphRunner("cuda", 8, 512, fused=True)
    is_failing = False

    def recorded(function: object, inputs: InputBuffers, pool: str) -> EagerGraph:
        if is_failing and fails_here:
            raise RuntimeError(error)
        return EagerGraph(function, inputs)

    def all_ranks(holds_here: bool) -> bool:
        """As if a second rank failed where this one does not."""
        if fails_here or not is_failing:
            return holds_here
        asked.append(holds_here)
        return (
            len(asked) % 2 == 0 and is_given_up
        )  # of each failure: was it captured, was there memory

    asked: list[bool] = []
    monkeypatch.setattr(CudaGraphRunner, "pool", lambda self, kind: kind)
    monkeypatch.setattr(graphs_module, "CudaGraph", recorded)
    monkeypatch.setattr(CudaGraphRunner, "used_bytes", lambda self: 0)
    graphs.agrees = all_ranks
    inputs = [PaddedInput(torch.tensor([1.0]), (1,))]
    assert graphs.record(("verify", 0), torch.neg, inputs)
    is_failing = True
    assert not any(graphs.record(("verify", size), torch.neg, inputs) for size in range(1, 5))
    assert len(graphs.failures) == (graphs_module.MAX_FAILED_CAPTURES if is_given_up else 4)
    assert graphs.replays("verify") and graphs.run(("verify", 0), torch.neg, inputs).item() == -1
    is_failing = False
    assert graphs.record(("verify", 9), torch.neg, inputs) != is_given_up


def test_kernel_that_fails_to_compile_is_captured_portably(monkeypatch, caplog):
    """Triton's error is not CUDA's: graphs stay on, one line says that kernels are off."""
    ours = engine((12, 4, 4), 2)
    failed = []

    def recorded(function: object, inputs: InputBuffers, pool: object) -> EagerGraph:
        if not failed:
            failed.append(1)
            compile_fails()
        return EagerGraph(function, inputs)

    monkeypatch.setattr(availability, "failures", [])
    monkeypatch.setattr(CudaGraphRunner, "on_cuda", True)
    monkeypatch.setattr(CudaGraphRunner, "pool", lambda self, kind: object())
    monkeypatch.setattr(graphs_module, "CudaGraph", recorded)
    monkeypatch.setattr(CudaGraphRunner, "used_bytes", lambda self: 0)
    with caplog.at_level(logging.WARNING, "eagle_ray"):
        sequences = run(ours, *jobs(9))
    assert_same(sequences, run(engine((12, 4, 4), 2, graphs=False), *jobs(9)))
    assert ours.graphs.failure is None and ours.graphs.num_captured > 1
    assert len(caplog.records) == 1 and "no Triton kernels" in caplog.text and "boom" in caplog.text


def test_what_recording_took_can_be_read(caplog):
    ours = engine((12, 4, 4), 2)
    with caplog.at_level(logging.INFO, "eagle_ray"):
        run(ours, *jobs(4))
    assert len(caplog.records) == ours.graphs.num_captured
    assert (
        f"{ours.graphs.num_captured} graphs in" in ours.graphs.summary and ours.graphs.seconds > 0
    )
