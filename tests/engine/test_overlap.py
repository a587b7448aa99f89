"""Steps that are launched before the last one is read produce what plain decoding does, whatever happens in between.

On a CPU nothing runs at the same time, but everything happens in the order in which a GPU's host
does it, on padded passes whose results are overwritten by the next ones.
"""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from eagle_ray.core.device import DeviceToHost, copy_to_device
from eagle_ray.core.sequence import Sequence
from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.engine.calibrate import CalibrationSetting, ScriptedPlanner, calibration_mode
from eagle_ray.engine.controlled_sequences import ControlledRows
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.step import StepOutput
from eagle_ray.kv.block_manager import BLOCK_SIZE
from eagle_ray.methods.eagle.published_trees import StaticPlanner
from eagle_ray.planner import probe_schedule
from eagle_ray.planner.budget_planner import BudgetPlanner
from eagle_ray.planner.modes import Mode
from eagle_ray.planner.plan_search import REVIEW_EVERY
from eagle_ray.planner.planner import StepOutcome
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.static_tree import MC_SIM_7B_63
from jobs.bench.simulated_costs import SimulatedPlanner, flat
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
from tests.support.operations import WatchCopies, WatchOperations, watched_step
from tests.support.toy_models import head3, llama_engine, run

TREE = (12, 4, 4)


def overlapped(
    tree: tuple[int, int, int] = TREE, num_slots: int = SLOTS, **sizes: object
) -> Engine:
    return llama_engine(num_slots, *tree, graphs=True, overlap=True, **sizes)


def plain(
    prompts: list[list[int]], params: list[SamplingParams], **shape: object
) -> list[Sequence]:
    return run(llama_engine(SLOTS, **shape), prompts, params)


def assert_plain(sequences: list[Sequence], **shape: object) -> None:
    """Outputs, log-probabilities and ends of plain decoding, and statistics that add up to them."""
    expected = plain([s.prompt_ids for s in sequences], [s.sampling for s in sequences], **shape)
    for one, other in zip(sequences, expected, strict=True):
        assert (one.output_ids, one.finish_reason) == (other.output_ids, other.finish_reason)
        assert one.output_logprobs == pytest.approx(other.output_logprobs, abs=1e-4)
        assert [[i for i, _ in top] for top in one.output_tops] == [
            [i for i, _ in top] for top in other.output_tops
        ]
        stats = one.stats
        assert (
            len(one.output_ids)
            == 1 + stats.num_steps + stats.num_accepted_draft_tokens - stats.num_discarded_tokens
        )
        assert (
            sum(stats.drafted.accepted)
            == sum(stats.calibrated.accepted)
            == stats.num_accepted_draft_tokens
        )


SHAPES = [(0, 0, 0), (1, 1, 1), (12, 4, 4), (60, 6, 10)]


@pytest.mark.parametrize(
    ("tree", "generation"),
    mostly_slow(zip(SHAPES, (3, 2, 3, 2), strict=True), SHAPES, (2, 3)),
    ids=str,
)
def test_the_output_is_plain_decodings(tree, generation):
    shape = E3 if generation == 3 else {}
    engine = overlapped(tree, **shape | (dict(weights=head3()) if generation == 3 else {}))
    assert_plain(run(engine, *jobs(10)), **shape)
    assert engine.counters.num_ahead > engine.counters.num_steps / 3


@pytest.mark.parametrize("prefill_tokens", [17, 512])
def test_chunks_and_prefixes_in_between_change_nothing(prefill_tokens):
    header = (some_prompts(1, seed=9)[0] * 70)[:70]
    prompts = [header * (i % 2) + ids for i, ids in enumerate(some_prompts(10))]
    engine = overlapped(num_slots=3, prefill_tokens=prefill_tokens)
    assert_plain(run(engine, prompts, some_params(10, max_tokens=20)))
    assert engine.counters.num_reused_tokens > 0 and engine.counters.num_ahead > 0


def test_long_prompt_is_prefilled_while_steps_are_launched_ahead():
    engine = overlapped(num_slots=2, prefill_tokens=8)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    first, long = Sequence("a", [5], params), Sequence("b", [7] * 60, replace(params, max_tokens=5))
    engine.add(first)
    engine.step()
    engine.add(long)
    before = engine.counters.num_ahead
    while long.num_prefilled < 48:
        engine.step()
    assert engine.counters.num_ahead >= before + 5
    while engine.has_work:
        engine.step()
    assert_plain([first, long])


@pytest.mark.parametrize("tree", [(0, 0, 0), pytest.param(TREE, marks=pytest.mark.slow)], ids=str)
def test_prompts_that_end_hold_no_step_back(tree):
    engine, (prompts, params) = overlapped(tree, num_slots=4), jobs(24)
    assert_plain(
        run(
            engine,
            prompts,
            [replace(p, max_tokens=1 + i % 9, ignore_eos=True) for i, p in enumerate(params)],
        )
    )
    assert engine.counters.num_ahead >= engine.counters.num_steps - 2


@pytest.mark.parametrize("tree", [(0, 0, 0), pytest.param(TREE, marks=pytest.mark.slow)], ids=str)
def test_prompts_in_groups_take_fewer_passes_and_change_nothing(tree):
    passes, outputs, (prompts, params) = {}, {}, jobs(80)
    params = [replace(p, ignore_eos=True, max_tokens=20 + i % 31) for i, p in enumerate(params)]
    for order in ("input", "auto"):
        engine = overlapped(tree, num_slots=36)
        if order == "auto":
            engine.order_for_throughput()
        outputs[order] = run(engine, prompts, params)
        assert engine.counters.num_ahead >= engine.counters.num_steps - 2
        passes[order] = engine.counters.num_prefill_passes
    assert_plain(outputs["input"])
    assert [s.output_ids for s in outputs["auto"]] == [s.output_ids for s in outputs["input"]]
    assert passes["auto"] <= 0.8 * passes["input"]


def test_sequences_ended_by_their_first_token_have_plain_outputs():
    prompts, params = jobs(24)
    firsts = [s.output_ids[0] for s in plain(prompts, params)]
    stops = [
        replace(p, stop_token_ids=(first,) if i % 3 else ())
        for i, (p, first) in enumerate(zip(params, firsts, strict=True))
    ]
    engine = overlapped(num_slots=4)
    assert_plain(run(engine, prompts, stops))
    assert engine.counters.num_ahead > 10


def test_a_slot_whose_sequence_ends_by_its_length_is_never_idle():
    """Two slots and prompts that wait: every step has two sequences, up to the last ones."""
    engine, lengths = overlapped((0, 0, 0), num_slots=2), [9, 5, 4, 8, 3, 6, 7, 2, 9, 6]
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    assert_plain(run(engine, some_prompts(len(lengths)), params))
    free_at = [0, 0]
    for length in lengths:
        free_at = sorted([free_at[0] + length - 1, free_at[1]])
    assert engine.counters.num_steps == free_at[1]
    assert engine.counters.num_slot_steps == sum(lengths) - len(lengths)


@pytest.mark.parametrize("tree", [(0, 0, 0), TREE], ids=str)
def test_sequences_can_be_aborted_in_the_step_that_they_join(tree):
    engine = overlapped(tree, num_slots=3)
    stays, goes, later = (
        Sequence(name, [5, i], SamplingParams(max_tokens=30 + i, ignore_eos=True))
        for i, name in enumerate("abc")
    )
    engine.add(stays)
    engine.step()
    engine.add(goes)
    engine.step()
    assert goes.output_ids and engine.counters.num_ahead == 2
    engine.abort(goes)
    engine.add(later)
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    assert_plain([stays, later])


def test_pre_emption_changes_nothing():
    """Four that grow to three blocks each over a pool of six: no step is launched for which there is no room."""
    prompts = [(ids * 30)[: 8 + i] for i, ids in enumerate(some_prompts(4))]
    params = [replace(p, ignore_eos=True) for p in some_params(4, max_tokens=60)]
    engine = overlapped(num_slots=4, kv_tokens=6 * BLOCK_SIZE)
    assert_plain(run(engine, prompts, params))
    assert engine.counters.num_preemptions > 0 and engine.counters.num_ahead > 0


def test_a_full_context_is_used_to_the_last_token():
    prompts = [[5] * n for n in (100, 113, 126, 127)]
    engine = overlapped((20, 5, 6), num_slots=2)
    assert_plain(run(engine, prompts, [SamplingParams(max_tokens=99, ignore_eos=True)] * 4))
    assert engine.counters.num_ahead > 0


@pytest.mark.parametrize("off", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_speculation_that_goes_and_returns_changes_nothing(off):
    engine = overlapped()
    engine.planner = IntermittentPlanner(engine.planner, off)
    params = [replace(p, ignore_eos=True) for p in some_params(8, max_tokens=60)]
    assert_plain(run(engine, some_prompts(8), params))
    assert engine.counters.num_ahead > engine.counters.num_steps / 3
    assert off < max(engine.planner.caught_up)


def test_whatever_is_planned_for_whomever():
    engine = overlapped((20, 5, 4), prefill_tokens=40)
    engine.planner = RandomPlanner(seed=1)
    assert_plain(run(engine, *jobs(24)))


def test_a_static_tree_is_launched_ahead():
    engine = overlapped((25, 5, 4))
    engine.planner = StaticPlanner(MC_SIM_7B_63)
    assert_plain(run(engine, *jobs(8)))
    assert engine.counters.num_ahead > 0


def test_the_global_budget_hears_of_every_step_one_step_late():
    engine = overlapped()
    planner = BudgetPlanner(
        engine.bounds,
        flat(head_share=0.01),
        can_sync=False,
        sizes=engine.graphs.pass_sizes(engine.bounds),
    )
    engine.planner, heard, learn = planner, [], planner.observe

    def watched(outcome: StepOutcome) -> None:
        heard.append(outcome)
        learn(outcome)

    planner.observe = watched
    sequences = run(engine, *jobs(24, most=60))
    assert_plain(sequences)
    assert (
        planner.modes.mode is not Mode.WARM_UP
        and engine.counters.num_ahead > engine.counters.num_steps / 3
    )
    drafted = [outcome for outcome in heard if outcome.depth]
    assert all(outcome.num_catch_up > 0 for outcome in drafted)
    assert (
        len(heard) == engine.counters.num_steps and sum(o.num_expected_drafts for o in drafted) > 0
    )


def test_probes_are_apart_although_their_cost_is_observed_late():
    costs = flat(head_share=0.01)
    planner = BudgetPlanner(TreeBounds(*TREE), flat(head_share=0.01), can_sync=False)
    engine = overlapped()
    engine.planner, plans = planner, []
    own, learn = planner.plan, planner.observe
    planner.observe = lambda outcome: learn(replace(outcome, seconds=costs.predict(outcome)))

    def watched(batch):
        plans.append(own(batch))
        return plans[-1]

    planner.plan = watched
    params = [replace(p, ignore_eos=True) for p in some_params(SLOTS, max_tokens=100)]
    run(engine, some_prompts(SLOTS), params)
    warm_up = next(i for i, plan in enumerate(plans) if not plan.probe)
    probes = [i for i, plan in enumerate(plans) if plan.probe and i > warm_up]
    starts = [i for i in probes if i - 1 not in probes]  # a trial is several steps
    assert starts and all(later >= earlier + REVIEW_EVERY for earlier, later in pairwise(starts))


def test_sequences_that_come_and_go_at_any_moment():
    """Arrivals, cancellations and ends by length, EOS and stop check, at random; the slots are whole all the time."""
    rng, engine = random.Random(3), overlapped(num_slots=4)
    prompts, params = jobs(40, most=40)
    waiting = [
        Sequence(str(i), ids, p) for i, (ids, p) in enumerate(zip(prompts, params, strict=True))
    ]
    for sequence in waiting[::7]:
        sequence.stop_check = lambda ids: 3 if len(ids) >= 3 else None
    stopped = set(waiting[::7])
    running, done = [], []
    while waiting or engine.has_work:
        for _ in range(min(rng.randint(0, 3), len(waiting))):
            running.append(waiting.pop())
            engine.add(running[-1])
        if running and rng.random() < 0.1:
            engine.abort(running.pop(rng.randrange(len(running))))
        done += engine.step()
        engine.scheduler.check_integrity()
        running = [s for s in running if s.finish_reason is None]
    assert len(done) > 20 and engine.counters.num_ahead > 20
    assert_plain([s for s in done if s not in stopped])
    for sequence in stopped & set(done):
        (whole,) = plain([sequence.prompt_ids], [sequence.sampling])
        assert sequence.output_ids == whole.output_ids[:3]


def test_the_next_step_is_launched_before_this_one_is_read(monkeypatch):
    engine, told = overlapped(num_slots=2), []
    engine.add(Sequence("a", [5, 6], SamplingParams(max_tokens=60, ignore_eos=True)))
    engine.step()
    verify, read = engine.verifier.start, DeviceToHost.arrays
    monkeypatch.setattr(
        engine.verifier, "start", lambda *args: told.append("launch") or verify(*args)
    )
    monkeypatch.setattr(DeviceToHost, "arrays", lambda copy: told.append("read") or read(copy))
    for _ in range(4):
        engine.step()
    assert told == ["launch", "read"] * 4


@pytest.mark.parametrize("tree", [(0, 0, 0), TREE], ids=str)
def test_controlled_pass_is_launched_before_last_step_is_read(tree, monkeypatch):
    """Its samples are launched after that: they depend on the tokens that are read."""
    engine, told = overlapped(tree, num_slots=2), []
    for i in range(2):
        params = SamplingParams(max_tokens=60, ignore_eos=True, frequency_penalty=float(i))
        engine.add(Sequence(str(i), [5, 6], params))
    engine.step()
    start, picks, read = engine.verifier.start, ControlledRows.picks, StepOutput.of
    monkeypatch.setattr(
        engine.verifier, "start", lambda *args: told.append("launch") or start(*args)
    )
    monkeypatch.setattr(StepOutput, "of", lambda *args: told.append("read") or read(*args))
    monkeypatch.setattr(
        ControlledRows, "picks", lambda *args: told.append("sample") or picks(*args)
    )
    for _ in range(4):
        engine.step()
    assert told == ["launch", "read", "sample"] * 4


@pytest.mark.parametrize("tree", [(0, 0, 0), TREE], ids=str)
def test_a_step_that_is_launched_ahead_asks_for_nothing(tree):
    """Two of them to a step of a static shape: the record of the last one, read while the next one runs."""
    engine = overlapped(tree, num_slots=3)
    assert watched_step(engine) == ([], ["numpy"])
    assert engine.counters.num_ahead == 2


def test_prompts_are_launched_without_asking_for_anything():
    engine = overlapped(num_slots=3, prefill_tokens=40)
    header = [3 + i % 50 for i in range(70)]
    for i in range(3):
        engine.add(Sequence(str(i), [*header, i], SamplingParams(max_tokens=5)))
    with torch.inference_mode(), WatchOperations() as operations, WatchCopies() as copies:
        while (prompted := engine.launch_prefill()) and not prompted.sequences:
            pass
    assert (operations.seen, copies.seen) == ([], [])
    assert engine.counters.num_prefill_tokens > 70


def test_steps_at_the_bench_are_taken_one_by_one():
    engine = overlapped()
    with calibration_mode(engine, ScriptedPlanner(TREE[2])) as bench:
        for setting in (CalibrationSetting(2, 1, 0, 0), CalibrationSetting(2, 3, 2, 2)):
            assert bench.run_step(setting).plan.max_depth == setting.depth
        assert engine.counters.num_ahead == 0
    assert engine.overlap


def test_what_was_launched_for_nobody_is_dropped():
    engine = overlapped(num_slots=1)
    first = Sequence("a", [5], SamplingParams(max_tokens=50, ignore_eos=True))
    engine.add(first)
    engine.step()
    engine.step()
    engine.abort(first)
    assert not engine.has_work
    second = Sequence("b", [9, 4], SamplingParams(max_tokens=20, ignore_eos=True))
    engine.add(second)
    while engine.has_work:
        engine.step()
    assert_plain([second])


@pytest.mark.parametrize("overlap", [False, True])
def test_probe_that_cannot_launch_ahead_runs_in_the_next_step(overlap, monkeypatch):
    """Drafts are off, so a probe is for a part of the batch, which is not replayed."""
    monkeypatch.setattr(probe_schedule, "PROBE_SHARE", 1.0)
    monkeypatch.setattr(probe_schedule, "BACK_OFF", 0)
    dear = flat(head_share=0.5)
    ours = llama_engine(6, 12, 4, 4, graphs=True, overlap=overlap)
    planner = BudgetPlanner(
        TreeBounds(12, 4, 4), dear, can_sync=False, sizes=ours.graphs.pass_sizes(ours.bounds)
    )
    ours.planner = SimulatedPlanner(planner, dear)
    run(ours, some_prompts(6), [SamplingParams(max_tokens=90, ignore_eos=True)] * 6)
    assert planner.modes.mode is Mode.OFF
    assert ours.counters.num_probes >= 0.8 * ours.counters.num_steps / REVIEW_EVERY


def test_columns_of_a_table_are_copied_as_rows():
    """Kernels read numbers that lie together; NumPy gathers the columns of a table the other way round."""
    table = torch.from_numpy(np.arange(12).reshape(2, 6)[:, [5, 0, 3]])
    assert not table.is_contiguous()
    first, second = copy_to_device(table, "cpu")
    assert first.tolist() == [5, 0, 3] and second.tolist() == [11, 6, 9]
    assert first.is_contiguous() and second.is_contiguous()
