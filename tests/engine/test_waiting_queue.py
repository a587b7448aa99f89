"""The order of waiting sequences: shared prefixes together, longest first at the end, and none waits for ever."""

import random

import pytest

from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.scheduler import Scheduler
from eagle_ray.engine.waiting_queue import PATIENCE, TURN, FirstComeQueue, LengthEstimate, ThroughputQueue
from eagle_ray.kv.block_manager import BlockManager
from eagle_ray.sampling.sampler import SamplingParams

SIZE = 4


def sequence(name: str, ids: list[int] | None = None, max_tokens: int = 100, category: str = "", **params) -> Sequence:
    made = Sequence(name, ids or [1], SamplingParams(max_tokens=max_tokens, **params), category=category)
    made.max_tokens = max_tokens
    return made


def finished(category: str, length: int) -> Sequence:
    made = sequence("done", category=category)
    made.output_ids = [0] * length
    return made


def queue_of(*waiting: Sequence) -> ThroughputQueue:
    queue = ThroughputQueue(SIZE)
    for each in waiting:
        queue.add(each)
    return queue


def drained(queue) -> list[str]:
    return [queue.pop().request_id for _ in range(len(queue))]


def prompt(group: int, own: int) -> list[int]:
    """Two blocks of a group, and a last token of its own."""
    return [group] * 2 * SIZE + [own]


def test_sequences_that_share_a_prefix_follow_the_oldest_of_them():
    names = ["a0", "b0", "c0", "a1", "b1", "a2", "d0", "d1", "e0", "f0", "g0", "h0"]
    queue = queue_of(*(sequence(name, prompt(ord(name[0]), int(name[1]))) for name in names))
    assert drained(queue)[:6] == ["a0", "a1", "a2", "b0", "b1", "c0"]


def test_a_prompt_that_shares_less_than_half_is_of_another_group():
    base = list(range(4 * SIZE))
    half, less = base[: 2 * SIZE] + [90] * 2 * SIZE, base[:SIZE] + [91] * 3 * SIZE
    others = [sequence(str(i)) for i in range(6)]
    queue = queue_of(
        sequence("base", base), sequence("between"), sequence("less", less), sequence("half", half), *others
    )
    assert drained(queue)[:4] == ["base", "half", "between", "less"]


def test_the_last_quarter_of_the_window_goes_longest_first():
    lengths = (1, 9, 3, 2, 11, 10, 12, 5, 4, 8, 6, 7)
    queue = queue_of(*(sequence(str(n), max_tokens=n, ignore_eos=True) for n in lengths))
    assert drained(queue) == ["1", "9", "3", "2", "11", "10", "12", "5", "4", "8", "7", "6"]


def test_lengths_are_those_of_finished_sequences_of_the_category():
    lengths = LengthEstimate()
    assert lengths.expected(sequence("a", max_tokens=50)) == 50
    for _ in range(20):
        lengths.observe(finished("short", 10))
        lengths.observe(finished("long", 90))
    short, long, new = (lengths.expected(sequence("a", category=c)) for c in ("short", "long", "new"))
    assert short < 15 and long > 85 and new == 50
    assert lengths.expected(sequence("a", max_tokens=30, category="long")) == 30
    assert lengths.expected(sequence("a", category="short", ignore_eos=True)) == 100


def test_new_arrivals_of_a_group_do_not_hold_back_the_others():
    queue = queue_of(*(sequence(f"other{i}") for i in range(6)), sequence("a", prompt(7, 0)))
    passed = []
    for i in range(40):  # always another one of the same group
        queue.add(sequence(f"new{i}", prompt(7, 1 + i)))
        passed.append(queue.pop().request_id)
    assert {f"other{i}" for i in range(6)} <= set(passed[:12])


def test_a_short_sequence_is_not_passed_for_ever_while_longer_ones_arrive():
    queue = queue_of(*(sequence(f"first{i}", max_tokens=50, ignore_eos=True) for i in range(200)))
    for _ in range(155):
        queue.pop()
    queue.add(sequence("short", max_tokens=1, ignore_eos=True))
    passed = []
    for i in range(600):
        queue.add(sequence(f"new{i}", max_tokens=50, ignore_eos=True))
        passed.append(queue.pop().request_id)
    assert PATIENCE * 200 < passed.index("short") < PATIENCE * 200 + TURN + 2


@pytest.mark.parametrize("make", [FirstComeQueue, lambda: ThroughputQueue(SIZE)])
def test_every_sequence_leaves_once_whatever_is_put_back_and_removed(make):
    source, queue, left, out = random.Random(3), make(), [], []
    for i in range(400):
        if source.random() < 0.6:
            left.append(sequence(str(i), prompt(source.randrange(4), i), max_tokens=source.randrange(1, 99)))
            queue.add(left[-1])
        elif left:
            assert queue.first() in left
            popped = queue.pop()
            left.remove(popped)
            out.append(popped)
            queue.observe(popped)
        if left and source.random() < 0.1:
            gone = source.choice(left)
            left.remove(gone)
            queue.remove(gone)
            assert gone not in queue
        if out and source.random() < 0.1:
            left.append(out.pop())
            queue.put_back(left[-1])
            assert queue.first() is left[-1]
        assert len(queue) == len(left) and set(queue) == set(left)
    assert set(drained(queue)) == {each.request_id for each in left}


def test_a_scheduler_with_few_blocks_computes_a_shared_prefix_once():
    """Ten documents that do not fit into the cache together, in turns: grouped, each is computed once."""
    computed = {}
    for order in ("input", "auto"):
        blocks = BlockManager(2, 512, num_blocks=24)
        scheduler = Scheduler(blocks, 512, tree_columns=1)
        if order == "auto":
            scheduler.order_for_throughput()
        for i in range(60):
            scheduler.add(sequence(str(i), [i % 10] * 4 * blocks.size + [i], max_tokens=2))
        computed[order] = 0
        while scheduler.has_work:
            scheduler.reserve_or_preempt()
            computed[order] += sum(chunk.num_tokens for chunk in scheduler.chunks())
            for running in scheduler.batch().sequences:
                running.append([5, 5], frozenset())
            scheduler.retire()
            scheduler.check_integrity()
    assert computed["auto"] < 1500 < 7000 < computed["input"]
