"""What the bench measures is what the engine did, and its engines share weights without sharing anything else."""

import itertools

import torch

from eagle_ray.benchmark.forward_meter import ForwardMeter
from eagle_ray.benchmark.identity import compare, first_difference
from eagle_ray.benchmark.stretch import drained, steady
from eagle_ray.benchmark.worse_heads import damaged_head, random_head
from eagle_ray.config import SpeculativeConfig
from eagle_ray.engine.sequence import Sequence
from eagle_ray.pair import build_engine
from eagle_ray.speculative.sampling import SamplingParams
from tests.toy import head, llama

PROMPTS = [[5 + i, 9, 23 + i] for i in range(9)]
TREE = SpeculativeConfig(max_nodes=8, max_depth=3, top_k=4)


def requests(max_tokens=12):
    params = SamplingParams(max_tokens=max_tokens)
    return (Sequence(str(i), ids, params) for i, ids in enumerate(itertools.cycle(PROMPTS)))


def engines(slots=3):
    """Plain and speculative, over the same weights, and a meter of both models."""
    model, eagle = llama(), head()
    meter = ForwardMeter(model.base_model, model.get_output_embeddings(), eagle)
    return model, [build_engine(model, h, TREE, slots, max_model_len=64) for h in (None, eagle)], meter


def test_a_window_counts_what_was_committed_and_leaves_the_engine_idle():
    _, pair, meter = engines()
    for engine in pair:
        sample = steady(engine, requests(), num_tokens=50, most_seconds=30, meter=meter)
        assert 50 <= sample.num_tokens < 50 + 3 * 5
        assert 0 < sample.forward_s < sample.seconds
        assert not engine.has_work
        engine.scheduler.check_integrity()
    assert sample.num_verify_rows > sample.num_steps * 3 and sample.num_plain_steps == 0 and sample.tau >= 1


def test_a_window_ends_when_its_time_is_over():
    _, (plain, _), meter = engines()
    assert steady(plain, requests(), num_tokens=10**9, most_seconds=0.05, meter=meter).seconds < 5


def test_ways_over_shared_weights_give_the_same_tokens():
    model, pair, meter = engines()
    plain, eagle = (drained(engine, list(itertools.islice(requests(), 9)), meter) for engine in pair)
    assert plain.num_tokens == eagle.num_tokens == sum(map(len, plain.outputs))
    assert plain.tau == 1 and plain.num_plain_steps == plain.num_steps
    identity = compare(model, PROMPTS, eagle.outputs, plain.outputs)
    assert identity.num_compared == 9 and identity.num_equal + identity.num_near_ties == 9


def test_a_difference_is_counted_and_is_no_near_tie_where_plain_was_sure():
    model, (plain, _), meter = engines()
    outputs = drained(plain, list(itertools.islice(requests(), 2)), meter).outputs
    other = [[ids[0], (ids[1] + 1) % 97, *ids[2:]] for ids in outputs]
    identity = compare(model, PROMPTS, other, outputs)
    assert (identity.num_compared, identity.num_equal, identity.num_near_ties) == (2, 0, 0)
    assert first_difference([1, 2], [1, 2, 3]) is None and first_difference([1, 2], [1, 3]) == 1


def test_worse_heads_are_the_same_shape_and_leave_the_good_one_alone():
    good = head()
    before = {name: value.clone() for name, value in good.state_dict().items()}
    for worse in (damaged_head(good, noise=0.5), random_head(good, seed=5)):
        assert {n: v.shape for n, v in worse.state_dict().items()} == {n: v.shape for n, v in before.items()}
        assert not torch.equal(worse.fc.weight, good.fc.weight)
    assert all(torch.equal(value, before[name]) for name, value in good.state_dict().items())
