"""What the engine promises about each sequence: where it ends, what is counted, and whose slot is whose."""

import logging
from dataclasses import replace

import pytest
import torch

from eagle_ray.core.errors import RequestError
from eagle_ray.core.sequence import Sequence
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.planner.planner import UniformPlanner
from eagle_ray.requests.parameters import SamplingParams
from tests.support.engines import some_params, some_prompts
from tests.support.toy_models import EOS, llama_engine, run, table_engine

VOCAB = 8


def cycle(stay: float = 20.0) -> torch.Tensor:
    """A table that goes 1, 2, ..., 7, EOS, 1, ... with near certainty."""
    return torch.full((VOCAB, VOCAB), -stay).scatter(
        1, (torch.arange(VOCAB)[:, None] + 1) % VOCAB, stay
    )


def finished_sequence(engine, prompt, **params) -> Sequence:
    stop_check = params.pop("stop_check", None)
    sequence = Sequence("a", prompt, SamplingParams(**params), stop_check)
    engine.add(sequence)
    while engine.has_work:
        engine.step()
    return sequence


@pytest.mark.parametrize("tree", [(0, 0, 0), (6, 3, 2)])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6, 7, 8, 50])
def test_output_ends_at_eos_or_max_tokens_exactly(tree, max_tokens):
    sequence = finished_sequence(table_engine(cycle(), 2, *tree), [1], max_tokens=max_tokens)
    assert sequence.output_ids == [2, 3, 4, 5, 6, 7, EOS][:max_tokens]
    assert sequence.finish_reason == ("stop" if max_tokens >= 7 else "length")


@pytest.mark.parametrize("tree", [(0, 0, 0), (6, 3, 2)])
def test_counts_obey_the_laws(tree):
    sequence = finished_sequence(
        table_engine(cycle(), 1, *tree, noise=3.0), [3], max_tokens=11, ignore_eos=True
    )
    stats = sequence.stats
    produced = 1 + stats.num_steps + stats.num_accepted_draft_tokens - stats.num_discarded_tokens
    assert len(sequence.output_ids) == 11 == produced
    assert sequence.target_forwards == 1 + stats.num_steps
    assert len(stats.histogram) == stats.num_spec_tokens + 1 == tree[1] + 1
    assert sum(stats.per_step_budget) == stats.num_draft_tokens + stats.num_steps
    assert stats.num_plain_steps == (stats.num_steps if tree == (0, 0, 0) else 0)


def test_eos_as_first_token_takes_no_step():
    sequence = finished_sequence(table_engine(cycle(), 1, 6, 3, 2), [7], max_tokens=9)
    assert sequence.output_ids == [EOS] and sequence.finish_reason == "stop"
    assert sequence.stats.num_steps == 0 and sequence.stats.mean_acceptance_length is None


def test_the_earliest_end_wins():
    """A stop check that keeps three ids beats the EOS that the same step brought after it."""
    keep_three = lambda ids: 3 if len(ids) >= 3 else None  # noqa: E731
    sequence = finished_sequence(
        table_engine(cycle(), 1, 6, 6, 1), [1], max_tokens=50, stop_check=keep_three
    )
    assert sequence.output_ids == [2, 3, 4] and sequence.finish_reason == "stop"
    assert sequence.stats.num_discarded_tokens > 0
    short = finished_sequence(
        table_engine(cycle(), 1, 6, 6, 1), [1], max_tokens=2, stop_check=keep_three
    )
    assert short.output_ids == [2, 3] and short.finish_reason == "length"


def test_prompts_that_do_not_fit_are_refused():
    engine = table_engine(cycle(), 1, 0, 0, 0)
    for prompt, code in (
        ([], "prompt_empty"),
        ([1] * 64, "prompt_too_long"),
        ([1, 8], "bad_token_id"),
        ([-1], "bad_token_id"),
        (None, "bad_type"),
        ((1, 2), "bad_type"),
        (torch.tensor([1, 2]), "bad_type"),
        ([1, 1.5], "bad_type"),
        ([float("nan")], "bad_type"),
        (["1"], "bad_type"),
        ([[1, 2]], "bad_type"),
        ([1, None], "bad_type"),
    ):
        with pytest.raises(RequestError) as caught:
            engine.add(Sequence("a", prompt, SamplingParams()))
        assert caught.value.code == code
    sequence = finished_sequence(engine, [1] * 60, max_tokens=100, ignore_eos=True)
    assert len(sequence.output_ids) == 4 and sequence.finish_reason == "length"


def test_a_sequence_passes_through_an_engine_once():
    engine = table_engine(cycle(), 2, 6, 6, 1)
    sequence = Sequence("twice", [1], SamplingParams(max_tokens=5))
    engine.add(sequence)
    with pytest.raises(ValueError, match="'twice' was already added"):
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    assert sequence.output_ids == [2, 3, 4, 5, 6]
    with pytest.raises(ValueError, match="'twice' was already added"):
        engine.add(sequence)


def test_what_one_engine_refused_another_may_take():
    sequence = Sequence("large", [5] * 30, SamplingParams(max_tokens=90))
    small = llama_engine(1, kv_tokens=64)
    for _ in range(2):
        with pytest.raises(RequestError, match="KV space"):
            small.add(sequence)
    large = llama_engine(1)
    large.add(sequence)
    assert large.has_work and not small.has_work


def test_parameters_of_python_need_no_seed_and_no_limit():
    """As a caller of an engine makes them: without a seed the key is 0, without a limit the model's length is one."""
    params = [SamplingParams(temperature=1.0, max_tokens=None, ignore_eos=True, prompt_logprobs=2)]
    params.append(replace(params[0], seed=0, max_tokens=10**6, prompt_logprobs=True, logprobs=2))
    first, second = run(llama_engine(2), [[5, 6, 7]] * 2, params)
    assert first.output_ids == second.output_ids and len(first.token_ids) == 128
    assert (
        [len(top) for top in first.prompt_tops]
        == [len(top) for top in second.prompt_tops]
        == [0, 2, 2]
    )
    assert not first.output_logprobs and len(second.output_tops[-1]) == 2


def test_the_one_bad_id_of_a_prompt_is_named():
    with pytest.raises(
        RequestError, match=r"prompt_ids\[50\] must be a token id, an integer, got 1\.5 \(float\)"
    ):
        table_engine(cycle(), 1, 0, 0, 0).add(Sequence("a", [1] * 50 + [1.5], SamplingParams()))


def test_a_full_context_is_used_to_the_last_token():
    """Trees near max_model_len write past the end of the sequence: the cache must have room for them."""
    prompts = [[5] * n for n in (100, 126, 127)]
    params = [SamplingParams(max_tokens=99, ignore_eos=True)] * 3
    plain = [s.output_ids for s in run(llama_engine(1), prompts, params)]
    drafted = run(llama_engine(2, 20, 5, 6), prompts, params)
    assert [s.output_ids for s in drafted] == plain
    assert [len(ids) for ids in plain] == [28, 2, 1]


def test_slots_are_refilled_at_the_next_step():
    engine = table_engine(cycle(), 2, 0, 0, 0)
    for i, max_tokens in enumerate((2, 6, 2, 2)):
        engine.add(Sequence(str(i), [1], SamplingParams(max_tokens=max_tokens)))
    running = []
    while engine.has_work:
        engine.step()
        running.append(engine.scheduler.num_running)
        engine.scheduler.check_integrity()
    assert engine.counters.num_steps == 5  # 1+1+1 short ones beside the long one's 5
    assert engine.counters.num_slot_steps == 8


def test_an_aborted_sequence_frees_its_slot():
    engine = table_engine(cycle(), 1, 6, 3, 2)
    first = Sequence("a", [1], SamplingParams(max_tokens=50, ignore_eos=True))
    second = Sequence("b", [1], SamplingParams(max_tokens=3))
    engine.add(first)
    engine.add(second)
    engine.step()
    engine.abort(first)
    engine.scheduler.check_integrity()
    while engine.has_work:
        engine.step()
    assert second.output_ids == [2, 3, 4] and first.finish_reason is None


class FailingPlanner(UniformPlanner):
    """A planner of trees of which one part fails from its third use on."""

    def __init__(self, part: str):
        super().__init__(TreeBounds(8, 4, 3))
        self._part, self._num_used = part, 0

    def use(self, part: str) -> None:
        self._num_used += part == self._part
        if self._num_used > 2:
            raise ZeroDivisionError("a rate of\n0 seconds")

    @property
    def will_draft(self):
        self.use("will_draft")
        return super().will_draft

    def plan(self, batch):
        self.use("plan")
        plan = super().plan(batch)
        return (
            replace(plan, should_stop=lambda builder: self.use("should_stop"))
            if self._part == "should_stop"
            else plan
        )

    def allocate(self, draft, plan, batch):
        self.use("allocate")
        return super().allocate(draft, plan, batch)

    def observe(self, outcome):
        self.use("observe")


@pytest.mark.parametrize("part", ["will_draft", "plan", "should_stop", "allocate", "observe"])
@pytest.mark.parametrize("graphs", [False, True])
def test_a_planner_that_fails_is_replaced_by_plain_decoding(part, graphs, caplog):
    """Prompts come while others are decoded. With graphs, steps are launched ahead: the next one is planned already."""
    prompts, params = some_prompts(9), some_params(9, max_tokens=20)
    plain = [s.output_ids for s in run(llama_engine(3), prompts, params)]
    engine = llama_engine(3, 8, 4, 3, graphs=graphs, overlap=graphs)
    engine.planner = FailingPlanner(part)
    assert [s.output_ids for s in run(engine, prompts, params)] == plain
    assert engine.counters.planner_error == "ZeroDivisionError: a rate of 0 seconds"
    assert [r.levelno for r in caplog.records if "the planner failed" in r.message] == [
        logging.WARNING
    ]
    num_drafting = engine.counters.num_steps - engine.counters.num_plain_steps
    again = run(engine, prompts, params)
    assert [s.output_ids for s in again] == plain and engine.is_intact
    assert engine.counters.num_steps - engine.counters.num_plain_steps == num_drafting > 0
    assert sum(s.stats.num_draft_tokens for s in again) == 0


def test_logprobs_are_those_of_a_plain_forward():
    plain, drafted = (
        run(
            llama_engine(2, *tree),
            [[5, 6], [7]],
            [SamplingParams(max_tokens=12, logprobs=True, temperature=0.9, seed=4)] * 2,
        )
        for tree in ((0, 0, 0), (8, 4, 4))
    )
    for a, b in zip(plain, drafted, strict=True):
        assert len(b.output_logprobs) == len(b.output_ids)
        torch.testing.assert_close(
            torch.tensor(a.output_logprobs), torch.tensor(b.output_logprobs), atol=1e-4, rtol=0
        )


def test_the_sampled_law_is_the_enumerated_distribution():
    """12,000 samples of 3 tokens over a vocabulary of 4, drafted by a wrong table, against all 64 outcomes.

    Chi-square, 63 degrees of freedom; the 1e-6 quantile is 131: one false alarm in a million.
    """
    count, temperature = 12_000, 0.8
    table = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    probs = (table / temperature).softmax(-1)
    engine = table_engine(table, 500, 6, 2, 3, noise=0.7)
    params = [
        SamplingParams(temperature=temperature, max_tokens=3, seed=i, ignore_eos=True)
        for i in range(count)
    ]
    sequences = run(engine, [[1]] * count, params)
    observed = torch.zeros(4, 4, 4)
    for sequence in sequences:
        observed[tuple(sequence.output_ids)] += 1
    expected = count * probs[1][:, None, None] * probs[:, :, None] * probs[None, :, :]
    assert ((observed - expected) ** 2 / expected).sum() < 131
    assert sum(s.stats.num_accepted_draft_tokens for s in sequences) > count / 2
