"""The order of waiting sequences: shared prefixes together, longest first at the end, and none waits for ever."""

import random

import pytest

from eagle_ray.core.sequence import Sequence
from eagle_ray.engine.scheduler import Scheduler
from eagle_ray.engine.waiting_queue import (
    MAX_PASSED_WINDOWS,
    ORDERED_AT_ONCE,
    FirstComeQueue,
    LengthEstimate,
    ThroughputQueue,
)
from eagle_ray.kv.block_manager import BlockManager
from eagle_ray.kv.prefix_cache import split_blocks
from eagle_ray.requests.parameters import SamplingParams

SIZE = 4


class RegroupedQueue(ThroughputQueue):
    """A ThroughputQueue that sorts and groups all entries anew if some were added."""

    def __init__(self, block_size: int):
        super().__init__(block_size)
        self._hashes_of: dict[Sequence, list[int]] = {}
        self._group_of: dict[Sequence, list[Sequence]] = {}
        self._is_grouped = True

    def add(self, sequence: Sequence) -> None:
        super().add(sequence)
        self._hashes_of[sequence] = [
            hash(block) for block in split_blocks(sequence.prompt_ids, self._block_size)
        ]
        self._is_grouped = False

    def _waiting_of(self, sequence: Sequence) -> list[Sequence]:
        if not self._is_grouped:
            self._is_grouped = True
            before, group = [], []
            for each in sorted(self._entries, key=self._hashes_of.__getitem__):
                blocks = self._hashes_of[each]
                half = (max(len(before), len(blocks)) + 1) // 2
                if not half or before[:half] != blocks[:half]:
                    group = []
                group.append(each)
                self._group_of[each], before = group, blocks
        members = set(self._group_of[sequence])
        return [each for each in self._entries if each in members]


def sequence(
    name: str, ids: list[int] | None = None, max_tokens: int = 100, category: str = "", **params
) -> Sequence:
    made = Sequence(
        name, ids or [1], SamplingParams(max_tokens=max_tokens, **params), category=category
    )
    made.max_tokens = max_tokens
    return made


def finished_sequence(category: str, length: int) -> Sequence:
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
        sequence("base", base),
        sequence("between"),
        sequence("less", less),
        sequence("half", half),
        *others,
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
        lengths.observe(finished_sequence("short", 10))
        lengths.observe(finished_sequence("long", 90))
    short, long, new = (
        lengths.expected(sequence("a", category=c)) for c in ("short", "long", "new")
    )
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


def test_short_sequence_is_not_delayed_forever_by_longer_ones():
    queue = queue_of(*(sequence(f"first{i}", max_tokens=50, ignore_eos=True) for i in range(200)))
    for _ in range(155):
        queue.pop()
    queue.add(sequence("short", max_tokens=1, ignore_eos=True))
    passed = []
    for i in range(600):
        queue.add(sequence(f"new{i}", max_tokens=50, ignore_eos=True))
        passed.append(queue.pop().request_id)
    assert (
        MAX_PASSED_WINDOWS * 200
        < passed.index("short")
        < MAX_PASSED_WINDOWS * 200 + ORDERED_AT_ONCE + 2
    )


@pytest.mark.parametrize("seed", range(8))
def test_the_order_is_that_of_grouping_all_entries_anew(seed):
    """Prompts of up to six blocks that share any number of them, which come, go, return and are aborted at random."""
    source, queues = random.Random(seed), (ThroughputQueue(SIZE), RegroupedQueue(SIZE))
    waiting, running, popped = [], [], []
    for i in range(1500):
        arriving = source.random() < (0.8 if i % 500 < 250 else 0.2)
        for _ in range(source.randint(1, 4) if arriving else 0):
            ids = [source.randrange(2) for _ in range(source.randrange(7))]
            new = sequence(
                str(i),
                [x for x in ids for _ in range(SIZE)] + [i],
                max_tokens=source.randrange(1, 99),
            )
            new.category = source.choice("ab")
            waiting.append(new)
            for queue in queues:
                queue.add(new)
        if waiting and source.random() < 0.1:
            gone = waiting.pop(source.randrange(len(waiting)))
            for queue in queues:
                queue.remove(gone)
        if running and source.random() < 0.1:
            back = running.pop()
            waiting.append(back)
            for queue in queues:
                queue.put_back(back)
        if waiting and not arriving:
            one, other = (queue.pop() for queue in queues)
            assert one is other
            waiting.remove(one)
            running.append(one)
            popped.append(one)
        if running and source.random() < 0.3:
            done = running.pop(0)
            done.output_ids = [0] * source.randrange(1, 60)
            for queue in queues:
                queue.observe(done)
        assert [len(queue) for queue in queues] == [len(waiting)] * 2
    rest = [[queue.pop() for _ in range(len(queue))] for queue in queues]
    assert rest[0] == rest[1] and len(popped) > 300


@pytest.mark.parametrize("make", [FirstComeQueue, lambda: ThroughputQueue(SIZE)])
def test_every_sequence_leaves_the_queue_exactly_once(make):
    source, queue, left, out = random.Random(3), make(), [], []
    for i in range(400):
        if source.random() < 0.6:
            left.append(
                sequence(str(i), prompt(source.randrange(4), i), max_tokens=source.randrange(1, 99))
            )
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


def test_scheduler_with_few_blocks_computes_shared_prefix_once():
    """Ten documents that do not fit into the cache together, in turns: grouped, each is computed once."""
    computed = {}
    for order in ("input", "auto"):
        blocks = BlockManager(2, 512, num_blocks=24)
        scheduler = Scheduler(blocks, 512, tree_positions=1)
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
