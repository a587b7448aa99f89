"""Sequences that attend together are alike in length and tree, and no group costs more than it saves."""

import random

from eagle_ray.attention.attention_groups import CALL_COST, READ_COST, group_sequences


def attention_work(members: list[int], lengths: list[int], sizes: list[int]) -> float:
    longest, largest = max(lengths[i] for i in members), max(sizes[i] for i in members)
    return len(members) * longest * (READ_COST + largest) / (READ_COST + 1)


def test_groups_hold_every_sequence_once_and_pay_for_themselves():
    rng, apart = random.Random(0), 0
    for _ in range(200):
        lengths = [
            rng.choice([10, 100, 1000]) + rng.randrange(50) for _ in range(rng.randint(1, 40))
        ]
        sizes = [rng.choice([1, 1, 2, 3, 12]) for _ in lengths]
        groups = group_sequences(lengths, sizes, num_layers=16)
        assert sorted(i for group in groups for i in group.members) == list(range(len(lengths)))
        assert all(group.size == max(sizes[i] for i in group.members) for group in groups)
        saved = attention_work(list(range(len(lengths))), lengths, sizes)
        saved -= sum(attention_work(group.members, lengths, sizes) for group in groups)
        assert saved >= CALL_COST * (len(groups) - 1)
        apart += len(groups) > 1
    assert apart > 100


def test_who_is_longer_or_has_a_larger_tree_attends_apart():
    [short, long] = group_sequences([100] * 15 + [1000], [1] * 16, 16)
    assert long.members == [15] and len(short.members) == 15
    [small, large] = group_sequences([100] * 16, [2] * 12 + [8] * 4, 16)
    assert large.members == [12, 13, 14, 15] and (small.size, large.size) == (2, 8)
    assert len(group_sequences([100] * 16, [2] * 16, 16)) == 1


def test_model_of_few_layers_has_one_attention_group():
    lengths, sizes = [100] * 16, [2] * 12 + [6] * 4
    assert (
        len(group_sequences(lengths, sizes, 16)) == 2
        and len(group_sequences(lengths, sizes, 1)) == 1
    )
