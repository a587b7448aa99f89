"""Requests: a job of mixed difficulty is mixed in earnest."""

import itertools

from jobs.bench.workload import DRAIN_LENGTHS, requests

PROMPTS = [[1], [2], [3]]


def first_requests(count: int, offset: int = 0):
    return list(itertools.islice(requests(PROMPTS, DRAIN_LENGTHS, [0.0, 1.5], offset), count))


def test_every_length_comes_at_every_temperature():
    rows = first_requests(2 * len(DRAIN_LENGTHS))
    pairs = {(row.sampling.max_tokens, row.sampling.temperature) for row in rows}
    assert pairs == set(itertools.product(DRAIN_LENGTHS, [0.0, 1.5]))


def test_an_offset_passes_over_requests():
    assert [(r.request_id, r.prompt_ids, r.sampling) for r in first_requests(9)[5:]] == [
        (r.request_id, r.prompt_ids, r.sampling) for r in first_requests(4, offset=5)
    ]
