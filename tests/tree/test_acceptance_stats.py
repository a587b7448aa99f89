"""Acceptance statistics add up, and obey the laws that the output columns promise."""

from hypothesis import given
from hypothesis import strategies as st

from eagle_ray.core.counters import AcceptanceStats

steps = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 5), min_size=3, max_size=3)), max_size=20
)


def statistics_of(some: list) -> AcceptanceStats:
    stats = AcceptanceStats.empty(3)
    for accepted, drafted in some:
        stats.add_step(accepted, drafted)
    return stats


@given(steps)
def test_laws(some):
    stats = statistics_of(some)
    assert stats.num_steps == len(some) == len(stats.per_step_budget)
    assert (
        stats.num_accepted_draft_tokens == sum(a for a, _ in some) == sum(stats.accepted_by_depth)
    )
    assert sum(stats.per_step_budget) == stats.num_draft_tokens + stats.num_steps
    assert stats.num_plain_steps == sum(not any(d) for _, d in some)
    assert (stats.mean_acceptance_length is None) == (not some)


@given(steps, steps)
def test_merging_is_counting_together(first, second):
    assert statistics_of(first).merge(statistics_of(second)) == statistics_of(first + second)
    assert statistics_of(first).merge(AcceptanceStats.empty(0)) == statistics_of(first)
