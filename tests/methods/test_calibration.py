"""Calibration finds a known distortion, keeps the order of siblings and the law of paths, and stays within bounds."""

import pytest
import torch

from eagle_ray.kernels import calibration_ops
from eagle_ray.methods.calibration import (
    STEPS_PER_UPDATE,
    WARMUP_STEPS,
    Calibration,
    HostCalibration,
    ProposalLevel,
    Proposals,
    calibration_for,
    is_due,
    logit,
    update_interval,
)
from eagle_ray.tree.expand import Frontier

UNTAUGHT = torch.tensor([1.0, 0.0, 0.0])
ON_LEVEL_1 = torch.tensor([[False], [True]])


def calibration_data(
    seed: int, slope: float, offset: float, first: float, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two children a node that are said to have probability p and are picked with sigmoid(slope *
    logit(p) + offset), the first one with `first` more.
    """
    generator = torch.Generator().manual_seed(seed)
    said = torch.rand(count, 2, generator=generator).clamp(0.01, 0.99)
    truly = torch.sigmoid(slope * logit(said.log()) + offset + torch.tensor([first, 0.0]))
    return said.log(), torch.rand(count, 2, generator=generator) < truly


@pytest.mark.parametrize(
    ("slope", "offset", "first"), [(0.5, -0.7, 0.0), (1.0, 0.0, 0.8), (2.0, 0.8, 0.3)]
)
def test_a_known_distortion_is_recovered(slope, offset, first):
    calibration, kinds = Calibration(levels=2), torch.ones(16, dtype=torch.int64)
    for seed in range(400):
        said, picked = calibration_data(seed, slope, offset, first, 16)
        calibration.update(
            kinds, torch.stack([said] * 2), torch.stack([picked] * 2), ON_LEVEL_1.expand(2, 16)
        )
    found = calibration.fit.parameters[1, 1]
    torch.testing.assert_close(found, torch.tensor([slope, offset, first]), atol=0.25, rtol=0)
    assert (calibration.fit.parameters[0] == UNTAUGHT).all() and (
        calibration.fit.parameters[1, 0] == UNTAUGHT
    ).all()


def test_it_begins_as_the_identity():
    said = torch.tensor([1e-6, 0.01, 0.5, 0.99]).log()
    same = Calibration(levels=1).apply(0, torch.tensor([0]), said[None, None])[0, 0]
    torch.testing.assert_close(same, said, atol=1e-4, rtol=0)


def test_nodes_that_were_not_reached_teach_nothing():
    calibration, (said, picked) = Calibration(levels=1), calibration_data(0, 3.0, 2.0, 1.0, 64)
    calibration.update(
        torch.zeros(64).long(), said[None], picked[None], torch.zeros(1, 64, dtype=torch.bool)
    )
    assert (calibration.fit.parameters == UNTAUGHT).all()


@pytest.mark.parametrize("slope", [0.1, 1.0, 6.0])
@pytest.mark.parametrize("offset", [-12.0, 0.0, 12.0])
@pytest.mark.parametrize("first", [0.0, 6.0])
def test_order_is_kept_and_no_probability_passes_one(slope, offset, first):
    calibration = Calibration(levels=1)
    calibration.fit.parameters[:] = torch.tensor([slope, offset, first])
    said = torch.cat([torch.tensor([0.0, -1e-9]), torch.linspace(-1e-6, -40, 500)])[None, None]
    mapped = calibration.apply(0, torch.tensor([1]), said)[0, 0]
    assert (mapped <= 0).all() and mapped.isfinite().all() and (mapped.diff() <= 0).all()


def test_wild_picks_do_not_make_it_wild():
    """Every certain child refused and every impossible one picked: the parameters stay within their bounds."""
    calibration = Calibration(levels=1)
    said = torch.tensor([[-1e-7], [-50.0]]).repeat(8, 1)
    for _ in range(200):
        picked = said < -1
        calibration.update(
            torch.zeros(16).long(), said[None], picked[None], torch.ones(1, 16, dtype=torch.bool)
        )
    assert (
        calibration.fit.parameters.isfinite().all() and calibration.fit.parameters[0, 0, 0] >= 0.1
    )


def test_a_second_choice_is_never_preferred():
    """Second children picked and first ones refused, as chance may have it: what a first child has more stays at 0."""
    calibration, said = Calibration(levels=1), torch.tensor([[0.4, 0.39]]).log().expand(16, 2)
    picked = torch.tensor([[False, True]]).expand(16, 2)
    for _ in range(50):
        calibration.update(
            torch.zeros(16).long(), said[None], picked[None], torch.ones(1, 16, dtype=torch.bool)
        )
    first, second = calibration.apply(0, torch.tensor([0]), said[None, :1])[0, 0]
    assert calibration.fit.parameters[0, 0, 2] == 0 and first >= second


def num_updates(num_levels: int, steps: range) -> int:
    return sum(is_due(step, num_levels) for step in steps)


def test_all_of_the_first_steps_teach():
    assert (
        num_updates(1, range(1, WARMUP_STEPS + 1))
        == num_updates(9, range(1, WARMUP_STEPS + 1))
        == WARMUP_STEPS
    )


def test_later_one_in_a_few_does_and_fewer_where_trees_are_deep():
    later = range(1000, 1000 + 10 * STEPS_PER_UPDATE * 9)
    assert num_updates(1, later) == len(later) // STEPS_PER_UPDATE
    assert num_updates(9, later) == len(later) // 9


def test_trees_of_no_level_teach_nothing():
    assert not num_updates(0, range(100))


def test_a_gpu_learns_less_often():
    interval = update_interval(torch.device("cuda"))
    assert sum(is_due(step, 4, interval) for step in range(1000, 1000 + 10 * interval)) == 10
    assert interval > update_interval(torch.device("cpu")) == STEPS_PER_UPDATE


def test_drafter_estimate_is_weighted_by_its_predictive_value():
    """Two children a node: the chance of a pick also rises by half of the estimate's log-odds."""
    calibration, kinds = Calibration(levels=1, num_signals=1), torch.zeros(32, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    said = torch.tensor([0.3, 0.2]).log().expand(32, 2)
    estimate = 2 * torch.randn(32, generator=generator)
    plain = Calibration(levels=1).apply(0, kinds, said[:, None])
    torch.testing.assert_close(
        calibration.apply(0, kinds, said[:, None], estimate[:, None]), plain
    )  # at first
    for _ in range(300):
        estimate = 2 * torch.randn(32, generator=generator)
        truly = torch.sigmoid(logit(said) + 0.5 * estimate[:, None])
        picked = torch.rand(32, 2, generator=generator) < truly
        reached = torch.ones(1, 32, dtype=torch.bool)
        calibration.update(kinds, said[None], picked[None], reached, estimate[None])
    assert calibration.fit.parameters[0, 0, 3] == pytest.approx(0.5, abs=0.15)
    mapped = calibration.apply(0, kinds, said[:, None], torch.tensor([[-3.0], [3.0]]).repeat(16, 1))
    assert (mapped[1::2].exp() > 2 * mapped[::2].exp()).all()


@pytest.mark.parametrize("wrong", ["huge", "negative", "not finite", "of another shape"])
def test_a_state_that_no_samples_make_is_refused(wrong):
    fit = Calibration(3).fit
    state = fit.state()
    information = torch.eye(3).expand(3, 2, 3, 3).clone()
    fit.load_state(state | {"information": information})
    bad = {
        "huge": torch.full_like(information, 1e9),
        "negative": -10 * information,
        "not finite": information * torch.inf,
        "of another shape": information[:2],
    }[wrong]
    with pytest.raises(ValueError, match="information"):
        fit.load_state(state | {"information": bad})
    assert torch.equal(fit.state()["information"], information)


def test_a_level_without_samples_is_where_the_level_above_is():
    """And one with many samples of its own stays where they put it."""
    calibration, kinds = Calibration(levels=4), torch.ones(16, dtype=torch.int64)
    for seed in range(200):
        above, below = (
            calibration_data(seed, 0.5, -0.7, 0.3, 16),
            calibration_data(seed, 1.5, 0.5, 0.3, 16),
        )
        said, picked = (torch.stack([*both]) for both in zip(above, below, strict=True))
        calibration.update(kinds, said, picked, torch.ones(2, 16, dtype=torch.bool))
    fitted = calibration.fit.parameters[:, 1]
    torch.testing.assert_close(fitted[0], torch.tensor([0.5, -0.7, 0.3]), atol=0.25, rtol=0)
    torch.testing.assert_close(fitted[1], torch.tensor([1.5, 0.5, 0.3]), atol=0.25, rtol=0)
    torch.testing.assert_close(fitted[2:], fitted[1].expand(2, 3), atol=1e-3, rtol=1e-3)
    assert (calibration.fit.parameters[:, 0] == UNTAUGHT).all()


def random_proposals(seed: int, batch: int, depth: int) -> tuple[Proposals, torch.Tensor]:
    """What a step offered to nodes with three children each, and tokens that often are among them."""
    random = torch.Generator().manual_seed(seed)
    kinds = torch.randint(0, 2, (batch,), generator=random)
    picks = torch.randint(0, 6, (batch, depth + 1), generator=random)
    levels = []
    for level in range(depth):
        width = 4 if level else 1
        tokens = torch.stack(
            [torch.randperm(6, generator=random)[:3] for _ in range(batch * width)]
        )
        scores = (
            torch.rand(batch, width, 3, generator=random).log().sort(-1, descending=True).values
        )
        scores[torch.rand(batch, width, 3, generator=random) < 0.1] = -torch.inf
        frontier = None
        if level:
            parents = torch.randint(0, 4 if level > 1 else 1, (batch, width), generator=random)
            drafted = torch.randint(0, 6, (batch, width), generator=random)
            frontier = Frontier(drafted, parents, torch.zeros(batch, width))
        levels.append(ProposalLevel(frontier, tokens.view(batch, width, 3), scores))
    return Proposals(kinds, levels), picks


@pytest.mark.skipif(
    not calibration_ops.available(torch.device("cpu")),
    reason="no compiled library for this processor",
)
@pytest.mark.parametrize(("batch", "depth"), [(1, 4), (5, 3), (8, 1)])
def test_one_call_learns_what_torch_learns(batch, depth):
    """Over many steps, of which some are shallower than the calibration and some rows are padding."""
    by_call, by_torch = calibration_for(4, "cpu"), Calibration(levels=4)
    assert type(by_call) is HostCalibration
    for seed in range(60):
        offered, picks = random_proposals(seed, batch, depth)
        random = torch.Generator().manual_seed(seed)
        num_accepted = torch.randint(-1, depth + 1, (batch,), generator=random)
        shallow = Proposals(offered.kinds, offered.levels[: 1 + seed % depth])
        for calibration in (by_call, by_torch):
            calibration.observe(shallow, picks, num_accepted)
    for name in ("parameters", "information"):
        ours, theirs = getattr(by_call.fit, name), getattr(by_torch.fit, name)
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    assert (by_call.fit.parameters != UNTAUGHT).any()
