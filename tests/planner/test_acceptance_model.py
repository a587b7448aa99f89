"""What recent drafts were worth, against trees whose worth can be counted by hand."""

import pytest
import torch

from eagle_ray.planner.acceptance_model import GRID_SIZES, AcceptanceModel


def levels(*conditional: list[float]) -> list[torch.Tensor]:
    """One sequence's log values: each level gives its two best nodes two children of these probabilities."""
    grown, beam = [], torch.ones(1, 1)
    for probs in conditional:
        values = beam[:, :, None] * torch.tensor(probs)
        grown.append(values.log())
        beam = values.flatten(1).topk(2).values
    return grown


def expected(curves: AcceptanceModel, width: int, depth: int, size: float) -> float:
    return curves.expected([size])[curves.widths.index(width), depth - 1, 0]


def test_curves_are_sums_of_best_values_by_width_and_depth():
    curves = AcceptanceModel((1, 2), 2)
    curves.observe(levels([0.8, 0.1], [0.5, 0.2]), width=2)
    assert expected(curves, 1, 1, 1) == pytest.approx(0.8)
    assert expected(curves, 1, 2, 2) == pytest.approx(0.8 + 0.4)
    assert expected(curves, 2, 2, 3) == pytest.approx(0.8 + 0.4 + 0.16)
    assert expected(curves, 2, 2, 0.5) == pytest.approx(0.4)
    assert expected(curves, 2, 2, GRID_SIZES[-1]) == pytest.approx(0.9 + (0.8 + 0.1) * 0.7)


def test_children_are_told_of_their_parents_values():
    curves = AcceptanceModel((1, 2), 4)
    for _ in range(400):
        curves.observe(levels([0.8, 0.1], [0.5, 0.2]), width=2)
    assert curves.children(1) == pytest.approx([0.8, 0.1])
    assert curves.children(2) == curves.children(4)
    assert curves.children(2) == pytest.approx([0.5, 0.2], abs=0.08)


def test_rarely_seen_level_is_like_the_level_above_it():
    curves = AcceptanceModel((1, 2), 4)
    curves.observe(levels([0.8, 0.1], [0.8, 0.1], [0.1, 0.0]), width=2)
    assert curves.children(3) == pytest.approx([0.8 * 4 / 5 + 0.1 / 5, 0.1 * 4 / 5])
    for _ in range(10):
        curves.observe(levels([0.8, 0.1], [0.8, 0.1], [0.1, 0.0]), width=2)
    bad = curves.children(3)[0]
    assert bad < 0.5
    for _ in range(200):  # no draft was that deep for long
        curves.observe(levels([0.9, 0.1], [0.9, 0.1]), width=2)
    assert curves.children(3)[0] == pytest.approx(0.9, abs=0.02)


def test_unseen_wider_and_deeper_drafts_are_worth_what_is_known():
    curves = AcceptanceModel((1, 2), 3)
    assert expected(curves, 2, 3, 4) == 0
    curves.observe([level[:, :1] for level in levels([0.8, 0.1])], width=1)
    assert expected(curves, 2, 3, 1) == pytest.approx(0.8)


def test_recent_drafts_count_and_scale_estimates_of_unseen_ones():
    """A wide draft of an easy text, then narrow ones of a hard text: wider is as many times better as it was."""
    curves = AcceptanceModel((1, 2), 2)
    curves.observe(levels([0.8, 0.1], [0.5, 0.4]), width=2)
    narrow, wide = (expected(curves, w, 2, 6) for w in (1, 2))
    for _ in range(200):
        curves.observe([level[:, :1] for level in levels([0.4, 0.05], [0.5, 0.4])], width=1)
    assert expected(curves, 1, 1, 1) == pytest.approx(0.4, rel=0.01)
    assert expected(curves, 1, 2, 6) == pytest.approx(narrow / 2, rel=0.02)
    assert expected(curves, 2, 2, 6) == pytest.approx(wide / 2, rel=0.02)


def test_a_model_goes_on_from_the_state_of_a_larger_one():
    known, smaller = AcceptanceModel((1, 2, 3), 4), AcceptanceModel((1, 2), 2)
    for _ in range(30):
        known.observe(levels([0.8, 0.1], [0.5, 0.2], [0.4, 0.1]), width=2)
    smaller.load_state(known.state())
    for width, depth, size in ((1, 1, 1), (1, 2, 2), (2, 2, 3), (2, 2, 0.5)):
        assert expected(smaller, width, depth, size) == expected(known, width, depth, size)
    assert smaller.children(1) == pytest.approx(known.children(1)[:2])
    smaller.observe(levels([0.1, 0.1], [0.1, 0.1]), width=2)
    assert expected(smaller, 1, 1, 1) < expected(known, 1, 1, 1)


def test_a_state_that_no_model_could_have_is_refused():
    known = AcceptanceModel((1, 2), 2)
    known.observe(levels([0.8, 0.1]), width=2)
    state = known.state()
    with pytest.raises(ValueError, match="no widths"):
        AcceptanceModel((1, 2, 3), 2).load_state(state)
    with pytest.raises(ValueError, match="sums has the shape"):
        AcceptanceModel((1, 2), 2).load_state(state | {"sums": state["sums"][:, :, :3]})
    with pytest.raises(ValueError, match="base has a number"):
        AcceptanceModel((1, 2), 2).load_state(state | {"base": state["base"] - torch.inf})
