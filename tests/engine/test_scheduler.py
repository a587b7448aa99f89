"""What happens when space runs out, prompts are long or beginnings are shared: outputs stay those of plain decoding."""

import random
import time
from dataclasses import replace

import pytest

from eagle_ray.attention import prefill_metadata
from eagle_ray.attention.prefill_metadata import PrefillMetadata
from eagle_ray.core.errors import RequestError
from eagle_ray.core.sequence import NO_SLOT, Sequence, SequenceStatus
from eagle_ray.engine import scheduler
from eagle_ray.engine.calibrate import calibrate_costs
from eagle_ray.engine.scheduler import GROUP_STEPS, Scheduler
from eagle_ray.kernels import cpu_ops
from eagle_ray.kv.block_manager import BlockManager
from eagle_ray.requests.parameters import SamplingParams
from tests.support.engines import SAMPLING
from tests.support.scheduling import (
    BLOCK,
    PLAIN,
    TREE,
    assert_plain,
    finish,
    prompts_of,
    sequences,
    step,
)
from tests.support.toy_models import llama_engine


@pytest.mark.parametrize("tree", [PLAIN, TREE])
def test_a_long_prompt_does_not_stall_those_who_decode(tree):
    """While 100 prompt tokens are read ten at a time, the sequence beside it gains at least a token a step."""
    engine = llama_engine(2, *tree, prefill_tokens=10)
    short, long = sequences(prompts_of(5, 100))
    short.sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    engine.add(short)
    step(engine)
    engine.add(long)
    for chunk in range(1, 10):
        before = len(short.output_ids)
        step(engine)
        assert len(short.output_ids) > before
        assert long.status is SequenceStatus.PREFILLING and long.target_forwards == chunk
    step(engine)
    assert long.status is SequenceStatus.RUNNING and long.output_ids
    assert engine.counters.num_prefill_tokens == 105
    finish(engine, [])
    assert_plain([short, long])


@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("tree", [PLAIN, TREE])
def test_prompt_joins_the_decoding_pass_if_prefill_is_mixed(tree, mixes):
    engine = llama_engine(2, *tree, prefill_tokens=30)
    engine.mixed_prefill, passes = mixes, []
    first_layer = engine.target.model.base_model.layers[0]
    first_layer.mlp.down_proj.register_forward_hook(
        lambda *_: passes.append(engine.counters.num_steps)
    )
    short, long = sequences(prompts_of(5, 100), max_tokens=40)
    short.sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    long.sampling = replace(long.sampling, logprobs=True, prompt_logprobs=True)
    engine.add(short)
    step(engine)
    engine.add(long)
    passes.clear()
    for _ in range(4):
        step(engine)
    assert len(long.output_ids) >= 1 and len(long.prompt_logprobs) == 100
    assert len(passes) == (4 if mixes else 8)
    assert 0 < engine.counters.prefill_s < engine.counters.busy_s
    finish(engine, [])
    assert_plain([short, long])


def test_prefill_time_is_not_counted_as_time_of_its_step():
    engine = llama_engine(2, *TREE)
    finish, learn, heard = engine.prefiller.finish, engine.planner.observe, []

    def slow(*args: object) -> None:
        time.sleep(0.5)
        finish(*args)

    engine.prefiller.finish, engine.planner.observe = (
        slow,
        lambda outcome: (heard.append(outcome), learn(outcome)),
    )
    first, second = sequences(prompts_of(5, 6))
    engine.add(first)
    step(engine)
    engine.add(second)
    began = time.monotonic()
    step(engine)
    assert [o.num_prefill_rows for o in heard] == [0, 6]
    assert (
        heard[1].seconds.total + 0.5 <= time.monotonic() - began and engine.counters.prefill_s > 0.5
    )


@pytest.mark.parametrize("tree", [PLAIN, TREE])
@pytest.mark.parametrize("prefill_tokens", [1, 7, 32, 50])
def test_chunks_of_any_size_change_nothing(tree, prefill_tokens):
    added = sequences(prompts_of(40, 3, 65, 1, 32, 33))
    finish(llama_engine(3, *tree, prefill_tokens=prefill_tokens), added)
    assert_plain(added)


def test_a_step_gathers_no_more_than_its_cap(monkeypatch):
    """On a device that gathers contexts; what does not fit into one step goes on in the next."""
    monkeypatch.setattr(cpu_ops, "available", lambda *_: False)
    for module in (scheduler, prefill_metadata):
        monkeypatch.setattr(module, "MAX_GATHERED", 150)
    engine = llama_engine(8)
    (prefix,) = prompts_of(64)
    finish(engine, sequences([prefix]))
    gathered, layout = [], PrefillMetadata.__post_init__
    monkeypatch.setattr(
        PrefillMetadata,
        "__post_init__",
        lambda self: layout(self) or gathered.append(self.num_gathered),
    )
    added = sequences([prefix + question for question in prompts_of(3, 9, 20, 1, 5, 40)])
    finish(engine, added)
    assert sum(s.num_reused for s in added) == 6 * 64
    assert gathered == [140, 149, 69, 104]
    assert_plain(added)


def test_short_prompts_share_a_steps_budget():
    engine = llama_engine(4, prefill_tokens=20)
    added = sequences(prompts_of(8, 8, 8, 8))
    for sequence in added:
        engine.add(sequence)
    step(engine)
    assert [s.status for s in added[:2]] == [SequenceStatus.RUNNING] * 2
    assert added[2].num_prefilled == 4 and added[3].status is SequenceStatus.WAITING


class GroupedSlots:
    """A scheduler of 36 slots, whose groups are of two, each slot with a sequence that never ends by itself."""

    def __init__(self, num_blocks: int | None = None, groups: bool = True, prompt_tokens: int = 2):
        self.scheduler = Scheduler(
            BlockManager(36, 64, num_blocks, size=8), prefill_tokens=200, tree_positions=1
        )
        if groups:
            self.scheduler.group_admissions()
        self.num_added, self.prompt_tokens = 0, prompt_tokens
        self.add(36)
        while self.admitted():
            pass

    @property
    def running(self) -> list[Sequence]:
        return list(self.scheduler.running.values())

    def add(self, count: int) -> None:
        for _ in range(count):
            prompt = [1 + self.num_added, *[0] * (self.prompt_tokens - 1)]
            self.scheduler.add(
                Sequence(str(self.num_added), prompt, SamplingParams(), max_tokens=20)
            )
            self.num_added += 1

    def end(self, count: int) -> None:
        for sequence in self.running[:count]:
            self.scheduler.abort(sequence)

    def admitted(self) -> int:
        """Return how many sequences the next step admits."""
        return len(self.scheduler.chunks())


def test_prompt_waits_for_a_second_one_in_a_nearly_full_batch():
    slots = GroupedSlots()
    slots.add(4)
    slots.end(1)
    assert [slots.admitted() for _ in range(3)] == [0, 0, 0]
    slots.end(1)
    assert slots.admitted() == 2
    slots.end(1)
    assert [slots.admitted() for _ in range(GROUP_STEPS + 2)] == [0] * GROUP_STEPS + [1, 0]


def test_prompt_enters_at_once_if_slots_are_free_or_for_latency():
    slots = GroupedSlots()
    slots.end(10)
    slots.admitted()
    slots.add(1)
    assert slots.admitted() == 1
    endpoint = GroupedSlots(groups=False)
    endpoint.add(1)
    endpoint.end(1)
    assert endpoint.admitted() == 1


def test_prompts_that_fill_a_pass_wait_for_no_others():
    slots = GroupedSlots(num_blocks=36 * 8, prompt_tokens=60)
    slots.scheduler.prefill_tokens = 60
    slots.add(1)
    slots.end(1)
    assert slots.admitted() == 1


def test_batch_limited_by_kv_blocks_is_refilled_in_groups():
    """No more than 19 have a block each and one to grow: then a group is two of them."""
    slots = GroupedSlots(num_blocks=38)
    assert len(slots.running) == 19
    slots.end(1)
    assert slots.admitted() == 0
    slots.end(1)
    assert slots.admitted() == 2


@pytest.mark.parametrize("tree", [PLAIN, TREE])
def test_samples_of_one_prompt_compute_it_once(tree):
    """Eight samples admitted in one step: the full blocks are computed once, the rest by each."""
    engine = llama_engine(8, *tree)
    added = sequences(prompts_of(70) * 8)
    finish(engine, added)
    assert engine.counters.num_prefill_tokens == 70 + 7 * 6
    assert engine.counters.num_reused_tokens == 7 * 64
    assert_plain(added)


@pytest.mark.parametrize("tree", [PLAIN, TREE])
def test_a_finished_sequences_prompt_is_reused(tree):
    engine = llama_engine(1, *tree)
    header = prompts_of(80)[0]
    added = sequences([header + tail for tail in prompts_of(5, 9, 1, seed=1)])
    finish(engine, added)
    assert engine.counters.num_reused_tokens == 2 * 64
    assert_plain(added)


@pytest.mark.parametrize("tree", [PLAIN, TREE])
def test_reused_prompts_draft_as_well_as_computed_ones(tree):
    """The same prompt twice: the second time its trees are the same, so each step accepts as many."""
    engine = llama_engine(1, *tree)
    first, again = (Sequence("a", ids, SamplingParams(max_tokens=40)) for ids in prompts_of(70) * 2)
    finish(engine, [first, again])
    assert again.num_reused == 64
    assert again.stats.per_step_accepted == first.stats.per_step_accepted


@pytest.mark.parametrize("tree", [PLAIN, TREE])
def test_pre_empted_sequences_end_as_if_nothing_had_happened(tree):
    """Four sequences that grow to three blocks each over a pool of five: someone must wait."""
    engine = llama_engine(4, *tree, kv_tokens=5 * BLOCK)
    added = sequences(prompts_of(20, 25, 28, 30), max_tokens=46)
    for sequence in added:
        sequence.sampling = SamplingParams(
            max_tokens=46, seed=int(sequence.request_id), ignore_eos=True
        )
    finish(engine, added)
    assert engine.counters.num_preemptions > 0
    assert_plain(added)


def test_whoever_runs_came_before_whoever_waits():
    """Pre-empted sequences too: the oldest is never sent back, and who is goes before all that came later."""
    engine = llama_engine(4, *TREE, kv_tokens=5 * BLOCK)
    added = sequences(prompts_of(20, 25, 28, 30, 12, 9), max_tokens=46)
    for sequence in added:
        sequence.sampling = SamplingParams(
            max_tokens=46, seed=int(sequence.request_id), ignore_eos=True
        )
        engine.add(sequence)
    while engine.has_work:
        step(engine)
        unfinished = [s for s in added if s.finish_reason is None]
        runs = [s.slot != NO_SLOT for s in unfinished]
        assert runs == sorted(runs, reverse=True)
    assert engine.counters.num_preemptions > 0


def test_trees_are_cut_before_anyone_is_pre_empted():
    """Two sequences that end with two blocks each over a pool of four: at times the last block holds no whole tree."""
    engine = llama_engine(2, *TREE, kv_tokens=4 * BLOCK)
    added = sequences(prompts_of(20, 20), max_tokens=40)
    for sequence in added:
        sequence.sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    finish(engine, added)
    assert engine.counters.num_preemptions == 0
    assert all(0 < s.stats.num_plain_steps < s.stats.num_steps for s in added)
    assert_plain(added)


def test_the_oldest_gets_the_last_room_for_a_tree():
    """Over a pool of three blocks two sequences of two blocks cannot both draft: the older one does."""
    engine = llama_engine(2, *TREE, kv_tokens=3 * BLOCK)
    added = sequences(prompts_of(20, 15), max_tokens=12)
    for sequence in added:
        sequence.sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    finish(engine, added)
    older, younger = added
    assert engine.counters.num_preemptions == 0
    assert older.stats.num_plain_steps == 0 < younger.stats.num_plain_steps
    assert_plain(added)


def test_what_can_never_fit_is_refused_by_name():
    engine = llama_engine(2, *TREE, kv_tokens=2 * BLOCK)
    fits, too_long = sequences(prompts_of(44, 45))
    finish(engine, [fits])
    assert_plain([fits])
    with pytest.raises(RequestError, match=r"execution\.kv_tokens") as caught:
        engine.add(too_long)
    assert caught.value.code == "kv_space" and not engine.has_work


@pytest.mark.parametrize("kv_tokens", [96, 160, 320])
def test_an_engine_with_little_space_can_be_measured(kv_tokens):
    """Only as many sequences at once, and as long ones, as there is room for."""
    engine = llama_engine(4, *TREE, kv_tokens=kv_tokens)
    costs = calibrate_costs(engine)
    assert costs.plain_seconds(4, 100.0) > 0 and not engine.has_work
    engine.scheduler.check_integrity()


@pytest.mark.parametrize("phase", ["waiting", "prefilling", "running", "pre-empted"])
def test_an_abort_frees_everything(phase):
    engine = llama_engine(2, *TREE, kv_tokens=4 * BLOCK, prefill_tokens=16)
    first, second, third = sequences(prompts_of(20, 40, 20), max_tokens=46)
    for sequence in (first, second, third):
        engine.add(sequence)
    wanted = {
        "waiting": lambda: third.status is SequenceStatus.WAITING,
        "prefilling": lambda: second.status is SequenceStatus.PREFILLING,
        "running": lambda: second.status is SequenceStatus.RUNNING,
        "pre-empted": lambda: second.status is SequenceStatus.WAITING and second.output_ids,
    }[phase]
    while not wanted():
        step(engine)
    engine.abort(third if phase == "waiting" else second)
    engine.scheduler.check_integrity()
    finish(engine, [])
    blocks = engine.target.cache.blocks
    assert blocks.num_available == blocks.num_blocks
    assert_plain([first, second if phase == "waiting" else third])


SOAKED = [0, 1, 5]  # seeds of the three trees


@pytest.mark.parametrize(
    "seed",
    [*SOAKED, *(pytest.param(i, marks=pytest.mark.slow) for i in range(12) if i not in SOAKED)],
)
def test_soak(seed):
    """Random arrivals, aborts, shared beginnings and long prompts over a pool that is far too small."""
    rng = random.Random(seed)
    tree = rng.choice([PLAIN, TREE, (20, 4, 5)])
    engine = llama_engine(
        rng.randint(1, 6),
        *tree,
        kv_tokens=BLOCK * rng.randint(3, 7),
        prefill_tokens=rng.choice([5, 17, 64, 512]),
    )
    headers = prompts_of(33, 64, 70, seed=seed)
    added, aborted, refused = [], [], 0
    for i in range(24):
        header = rng.choice([*headers, []])
        prompt = (
            header[: rng.randint(0, len(header))]
            + prompts_of(rng.randint(1, 30), seed=rng.random())[0]
        )
        params = SamplingParams(
            max_tokens=rng.randint(1, 30), seed=i, ignore_eos=rng.random() < 0.5, **SAMPLING[i % 4]
        )
        sequence = Sequence(str(i), prompt, params)
        try:
            engine.add(sequence)
            added.append(sequence)
        except RequestError as error:
            assert error.code == "kv_space"
            refused += 1
        for _ in range(rng.choice([0, 0, 1, 5])):
            step(engine)
        if rng.random() < 0.15:
            victim = rng.choice(added) if added else None
            if victim is not None and victim.finish_reason is None and victim not in aborted:
                engine.abort(victim)
                engine.scheduler.check_integrity()
                aborted.append(victim)
    finish(engine, [])
    done = [s for s in added if s not in aborted]
    assert len(done) + len(aborted) + refused == 24
    assert_plain(done)
    blocks = engine.target.cache.blocks
    assert blocks.num_available == blocks.num_blocks
