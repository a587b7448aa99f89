"""What the bench measures is what the engine did, and its engines share weights without sharing anything else."""

import itertools

from eagle_ray.assembly.assemble import build_engine
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.config import SpeculativeConfig
from eagle_ray.core.sequence import Sequence
from eagle_ray.core.tree_bounds import NO_TREE, TreeBounds
from eagle_ray.evaluation.method_comparison import compare, first_difference
from eagle_ray.evaluation.recorded_trees import RecordingPlanner
from eagle_ray.evaluation.timing import ForwardTimer, SteadyQueue, run_requests
from eagle_ray.planner.budget_planner import BudgetPlanner
from eagle_ray.planner.planner import UniformPlanner
from eagle_ray.requests.parameters import SamplingParams
from jobs.bench.simulated_costs import flat
from tests.support.toy_models import head, llama

PROMPTS = [[5 + i, 9, 23 + i] for i in range(9)]
TREE_BOUNDS = TreeBounds(8, 3, 4)
TREE = SpeculativeConfig(method="eagle2", max_nodes=8, max_depth=3, top_k=4, budget="uniform")


def requests(max_tokens=12):
    params = SamplingParams(max_tokens=max_tokens)
    return (Sequence(str(i), ids, params) for i, ids in enumerate(itertools.cycle(PROMPTS)))


def engines(slots=3):
    """Plain and speculative, over the same weights, and a meter of both models."""
    model, eagle = llama(), head()
    meter = ForwardTimer(model.get_output_embeddings(), eagle.fc)
    ways = SpeculativeConfig(method="none"), TREE
    return model, [build_engine(model, eagle, way, EngineArgs(slots, 64)) for way in ways], meter


def outputs(sequences):
    return [s.output_ids for s in sequences]


def test_a_window_counts_what_was_committed():
    _, pair, meter = engines()
    for engine in pair:
        queue = SteadyQueue(engine, requests(), meter)
        queue.fill()
        before = sum(len(s.output_ids) for s in queue.sequences)
        samples = [queue.window(num_tokens=30, max_seconds=30) for _ in range(2)]
        assert all(30 <= sample.num_tokens < 30 + 3 * 5 for sample in samples)
        assert (
            sum(len(s.output_ids) for s in queue.sequences)
            == before + (samples[0] + samples[1]).num_tokens
        )
        assert all(0 < sample.forward_s < sample.seconds for sample in samples)
        assert not engine.mixed_prefill
        queue.end()
        assert not engine.has_work and engine.mixed_prefill
        engine.scheduler.check_integrity()
    assert samples[0].num_verify_rows > samples[0].num_steps * 3 and samples[0].num_plain_steps == 0
    assert samples[0].tau >= 1


def test_window_has_its_whole_last_step_and_none_of_the_previous():
    """Windows of a step each, plain and drafting ones by turns on one engine."""
    _, (_, drafting), meter = engines()
    queue, own, never = (
        SteadyQueue(drafting, requests(), meter),
        drafting.planner,
        UniformPlanner(NO_TREE),
    )
    queue.fill()
    for _ in range(4):
        for planner in (own, never):
            before = {s.request_id: len(s.output_ids) for s in queue.sequences}
            drafting.planner = planner
            sample = queue.window(num_tokens=1, max_seconds=30)
            lengths = {s.request_id: len(s.output_ids) for s in queue.sequences}
            grown = [n - max(before.get(name, 0), 1) for name, n in lengths.items() if n]
            assert (sample.num_steps, sample.num_decoded) == (1, sum(grown))
            assert sample.num_passes == sum(map(bool, grown)) and sample.tau >= 1
        assert sample.tau == 1


def test_first_step_of_another_planner_is_not_in_the_window():
    _, (_, drafting), meter = engines()
    queue = SteadyQueue(drafting, requests(), meter)
    queue.fill()
    own, before, steps = (
        drafting.planner,
        sum(len(s.output_ids) for s in queue.sequences),
        drafting.counters.num_steps,
    )
    sample = queue.window(num_tokens=30, max_seconds=30, first=UniformPlanner(NO_TREE))
    assert sample.num_plain_steps == 0 and drafting.counters.num_plain_steps == 1
    assert sample.num_steps == drafting.counters.num_steps - steps - 1 and drafting.planner is own
    after = sum(len(s.output_ids) for s in queue.sequences)
    assert after - before - 3 == sample.num_tokens and 30 <= after - before < 30 + 3 * 5


def test_a_window_ends_when_its_time_is_over():
    _, (plain, _), meter = engines()
    queue = SteadyQueue(plain, requests(), meter)
    assert queue.window(num_tokens=10**9, max_seconds=0.05).num_tokens < 10**9


def test_ways_over_shared_weights_give_the_same_tokens():
    model, pair, meter = engines()
    jobs = [list(itertools.islice(requests(), 9)) for _ in pair]
    plain, eagle = (
        run_requests(engine, job, meter) for engine, job in zip(pair, jobs, strict=True)
    )
    assert plain.num_tokens == eagle.num_tokens == sum(map(len, outputs(jobs[0])))
    assert plain.tau == 1 and plain.num_plain_steps == plain.num_steps
    identity = compare(model, PROMPTS, outputs(jobs[1]), outputs(jobs[0]))
    assert identity.num_compared == 9 and identity.num_equal + identity.num_near_ties == 9


def test_difference_from_a_sure_plain_token_is_no_near_tie():
    model, (plain, _), meter = engines()
    job = list(itertools.islice(requests(), 2))
    run_requests(plain, job, meter)
    other = [[ids[0], (ids[1] + 1) % 97, *ids[2:]] for ids in outputs(job)]
    identity = compare(model, PROMPTS, other, outputs(job))
    assert (identity.num_compared, identity.num_equal, identity.num_near_ties) == (2, 0, 0)
    assert first_difference([1, 2], [1, 2, 3]) is None and first_difference([1, 2], [1, 3]) == 1


def test_recorder_predicts_steps_and_corrects_only_its_own_costs():
    _, (_, drafting), _ = engines()
    costs = flat()
    recorders = [
        RecordingPlanner(UniformPlanner(NO_TREE), flat()),
        RecordingPlanner(BudgetPlanner(TREE_BOUNDS, costs), costs),
    ]
    for recorder in recorders:
        drafting.planner = recorder
        run_requests(drafting, list(itertools.islice(requests(), 3)))
        assert (
            recorder.predicted_s > 0
            and recorder.predicted_plain_s > 0
            and min(recorder.parts[1:]) > 0
        )
        assert recorder.step_costs != flat()
