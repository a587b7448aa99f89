"""Ids as digests: what is known, what came twice."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eagle_ray.runs.row_index import AT_ONCE, DIGEST, digest, digests, duplicates, index_of, isin

IDS = st.lists(st.text(max_size=4), max_size=40)


@given(IDS, IDS)
def test_among_says_what_a_set_says(ids, known):
    found = isin(digests(ids), np.unique(digests(known)))
    assert found.tolist() == [id in set(known) for id in ids]


def test_a_place_is_found_beyond_the_first_stretch():
    known = np.sort(digests(str(i) for i in range(AT_ONCE + 3)))
    ids = np.concatenate([known, digests(["stranger"])])
    assert index_of(ids, known).tolist() == [*range(AT_ONCE + 3), -1]


@given(IDS)
def test_repeated_is_what_came_more_than_once(ids):
    found = duplicates(np.sort(digests(ids)))
    assert set(found.tolist()) == set(digests({id for id in ids if ids.count(id) > 1}).tolist())


def test_digests_that_end_in_zeros_stay_apart():
    """NumPy drops a string's trailing zeros where it becomes a Python value; comparisons must not."""
    a, b = np.frombuffer(b"x" * 14 + b"\0\0", DIGEST), np.frombuffer(b"x" * 15 + b"\0", DIGEST)
    assert not isin(a, b)[0] and isin(a, a.copy())[0]


def test_any_text_is_an_id():
    assert len(digest("\ud800")) == 16  # half a surrogate pair
