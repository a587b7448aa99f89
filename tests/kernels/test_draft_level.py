"""A level that the kernel appends is the level that torch appends."""

import random
from dataclasses import replace

import pytest
import torch

from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.methods.calibration import Calibration
from eagle_ray.methods.eagle.draft_buffers import DraftBuffers, DraftShape, PaddedDraft
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.draft_tree import VerifyResult
from tests.support.kernels import DEVICE
from tests.support.operations import device_operations

DEPTH, CHILDREN, HIDDEN, BATCH = 5, 6, 3, 4
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(),
    SamplingParams(temperature=0.5, seed=1),
]
FIELDS = (
    *(
        "level",
        "num_offered",
        "tokens",
        "parents",
        "log_values",
        "draft_log_probs",
        "frontier_nodes",
        "frontier_values",
    ),
    *("words", "frontier_tokens", "parent_rows", "offered", "scores", "features"),
)


def empty_buffers() -> DraftBuffers:
    return DraftBuffers(
        DraftShape(BATCH, CHILDREN, CHILDREN, DEPTH), HIDDEN, 2, torch.float32, DEVICE
    )


def grown_draft(
    width: int, calibration: Calibration | None, batch: int, buffers: DraftBuffers | None = None
) -> tuple[DraftBuffers, PaddedDraft]:
    """A draft of random children, with padding, NaN and ends of sequences among them.

    And with ties, but for calibrated ones: sums of rounded numbers tie in one order of additions
    and not in another.
    """
    sampling = SamplingBatch.of(PARAMS[:batch], DEVICE, frozenset({7, 9}))
    buffers = buffers or empty_buffers()
    draft = PaddedDraft(buffers, batch, width, sampling.kind)
    padded = [x.tensor for x in sampling.padded(batch)]
    numbers = torch.Generator().manual_seed(width)
    whole = torch.arange(BATCH, device=DEVICE)
    draft.start(whole, whole, whole, whole[:batch] + 30, *padded)
    for level in range(DEPTH):
        shape = batch, width if level else 1, CHILDREN
        scores = torch.randint(-40, 0, shape, generator=numbers).float().div(8)
        if calibration is not None:
            scores = -5 * torch.rand(shape, generator=numbers)
        scores = scores.sort(-1, descending=True).values
        scores[0, 0, -1] = -torch.inf
        own = scores - 0.25
        own[-1, 0, 0] = torch.nan
        tokens = torch.randint(0, 40, shape, generator=numbers)
        features = torch.randn(*shape[:2], HIDDEN, generator=numbers)
        draft.append(*(x.to(DEVICE) for x in (features, tokens, scores, own)), calibration)
        if level < DEPTH - 1:
            draft.next_frontier()
    return buffers, draft


@pytest.mark.parametrize("width", [2, CHILDREN])
@pytest.mark.parametrize("batch", [1, 3, BATCH])
@pytest.mark.parametrize("is_calibrated", [True, False])
def test_the_kernel_appends_what_torch_appends(width, batch, is_calibrated, monkeypatch):
    calibration = Calibration(DEPTH, DEVICE) if is_calibrated else None
    if calibration is not None:
        calibration.fit.parameters[1:, 1] = torch.tensor([0.8, -0.5, 1.0], device=DEVICE)
        calibration.fit.parameters[2, 0] = torch.tensor([1.5, 0.25, 0.5], device=DEVICE)
    wanted, by_torch = grown_draft(width, calibration, batch)
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "triton")
    found, by_kernel = grown_draft(width, calibration, batch)
    for name in FIELDS:
        theirs, ours = getattr(wanted, name), getattr(found, name)
        if theirs.is_floating_point():
            torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-6, msg=name)
        else:
            assert torch.equal(ours, theirs), name
    assert torch.equal(by_kernel.words, by_torch.words)
    assert by_kernel.tree(batch, DEPTH).valid.sum() > batch


def test_appending_a_level_is_one_launch_and_two_copies(fused):
    """Features are copied and the level is counted by torch; 68 operations without the kernel."""
    sampling = SamplingBatch.of(PARAMS, DEVICE, frozenset({7}))
    buffers = DraftBuffers(
        DraftShape(BATCH, CHILDREN, CHILDREN, DEPTH), HIDDEN, 1, torch.float32, DEVICE
    )
    draft = PaddedDraft(buffers, BATCH, CHILDREN, sampling.kind)
    scores = torch.zeros(BATCH, CHILDREN, CHILDREN, device=DEVICE)
    features = torch.zeros(BATCH, CHILDREN, HIDDEN, device=DEVICE)
    tokens, calibration = scores.long(), Calibration(DEPTH, DEVICE)
    counts = device_operations(lambda: draft.append(features, tokens, scores, scores, calibration))
    assert counts["_append_level"] == 1 and counts.total() == 3, counts


def path_of(buffers: DraftBuffers, batch: int, seed: int) -> VerifyResult:
    """Random paths, most of whose tokens have children, and some of which the draft lacks; the last row is padding."""
    numbers = random.Random(seed)
    tokens = torch.zeros(batch, DEPTH + 1, dtype=torch.int64)
    num_accepted = torch.tensor([numbers.randrange(DEPTH + 1) for _ in range(batch)])
    num_accepted[-1] = -1
    frontier, parents = buffers.frontier_tokens.tolist(), buffers.parent_rows.tolist()
    for row in range(batch):
        node = 0
        for level, width in enumerate(buffers.num_offered.tolist()[1:]):
            rows = frontier[level + 1][row][:width], parents[level + 1][row][:width]
            children = [
                (i, token)
                for i, (token, parent) in enumerate(zip(*rows, strict=True))
                if parent == node
            ]
            if not children or numbers.random() < 0.1:
                tokens[row, level] = buffers.offered[level, row, node, -1]
                break
            node, tokens[row, level] = children[0]
    none = torch.full_like(tokens, -1)
    return VerifyResult(none.to(DEVICE), num_accepted.to(DEVICE), tokens.to(DEVICE))


@pytest.mark.parametrize("width", [1, pytest.param(CHILDREN, marks=pytest.mark.slow)])
def test_the_kernel_learns_what_torch_learns(width, monkeypatch):
    """Over many steps, of narrow frontiers by turns, beyond which the buffers have nodes of earlier drafts."""
    fits = []
    for kernels in ("portable", "triton"):
        monkeypatch.setenv("EAGLE_RAY_KERNELS", kernels)
        calibration, buffers = Calibration(DEPTH + 1, DEVICE), empty_buffers()
        for step in range(6):
            grown_draft(width if step % 2 else CHILDREN, calibration, BATCH, buffers)
            path = path_of(buffers, BATCH, step)
            buffers.update_calibration(calibration, path)
            assert not buffers.num_offered.any()
            buffers.update_calibration(calibration, path)  # teaches nothing: nothing is offered
        fits.append(calibration.fit)
    wanted, found = fits
    torch.testing.assert_close(found.information, wanted.information, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(found.parameters, wanted.parameters, atol=1e-4, rtol=1e-3)
    assert wanted.information.flatten(1).sum(1)[:DEPTH].min() > 0
    assert not torch.equal(wanted.parameters, Calibration(DEPTH + 1, DEVICE).fit.parameters)


def test_padding_changes_neither_calibration_nor_offered_counts(fused):
    calibration = Calibration(DEPTH, DEVICE)
    buffers, _ = grown_draft(CHILDREN, calibration, BATCH)
    path = path_of(buffers, BATCH, 0)
    buffers.update_calibration(
        calibration, replace(path, num_accepted=torch.full_like(path.num_accepted, -1))
    )
    assert torch.equal(calibration.fit.parameters, Calibration(DEPTH, DEVICE).fit.parameters)
    assert buffers.num_offered.tolist() == [1, *[CHILDREN] * (DEPTH - 1)]


def test_learning_is_two_launches(fused):
    calibration = Calibration(DEPTH, DEVICE)
    buffers, _ = grown_draft(CHILDREN, calibration, BATCH)
    path = path_of(buffers, BATCH, 0)
    counts = device_operations(lambda: buffers.update_calibration(calibration, path))
    assert counts["_sum_samples"] == counts["_take_steps"] == 1 and counts.total() == 2, counts
