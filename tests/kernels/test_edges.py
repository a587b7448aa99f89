"""Picks of either path under top-p differ only at its edge, and the benchmark's check tells that from a fault."""

import pytest
import torch

from eagle_ray.evaluation import method_comparison
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.sampling.near_tie import reachable_tokens
from jobs.bench.gpu import device_checks
from tests.support.kernels import DEVICE


@pytest.fixture
def edge_results(fused, monkeypatch):
    """The check over few small rows."""
    monkeypatch.setattr(device_checks, "EDGE_LOGITS", (24, 700))
    model = torch.nn.Module()
    model.device = torch.device(DEVICE)
    return lambda: device_checks.check_edges("edges", lambda dtype: (model, None), torch.float32, [])


def test_the_check_counts_picks_and_finds_no_fault(edge_results):
    check = edge_results()
    assert check.ok and "24 of 24 outputs equal" in check.detail


def test_a_wrong_pick_is_no_edge(edge_results, monkeypatch):
    picks = iter([torch.arange(24), torch.arange(24) + 1])
    monkeypatch.setattr(device_checks, "sample", lambda *_: next(picks))
    check = edge_results()
    assert check.ok is False and "0 of 24 outputs equal" in check.detail


@pytest.mark.parametrize("top_p, edge", [(0.5, True), (0.500005, True), (0.4999, False), (0.8, False), (1.0, False)])
def test_the_edge_is_where_a_tokens_sum_meets_top_p(top_p, edge):
    """Ascending sums are 0.2, 0.5 and 1: 0.5 of probability are dropped, or 0.3 to 0.7."""
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    position = next(i for i in range(100) if reachable_tokens(logits, SamplingParams(temperature=1.0), i, 1e-6)[1])
    params = SamplingParams(temperature=1.0, top_p=top_p)  # noise at this position prefers token 1 where top-p keeps it
    assert bool(reachable_tokens(logits, params, position, 1e-6)[:2].all()) == edge
    assert not reachable_tokens(logits, SamplingParams(temperature=0.0, top_p=top_p), position, 1e-6)[1]


def test_what_is_explained_needs_something_to_explain():
    assert not method_comparison.Equivalence().is_explained and method_comparison.Equivalence(3, 1, 1, 1).is_explained
    assert not method_comparison.Equivalence(3, 1, 1, 0).is_explained
