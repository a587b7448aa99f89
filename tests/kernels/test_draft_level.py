"""A level that the kernel appends is the level that torch appends."""

import pytest
import torch

from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.methods.calibration import Calibration
from eagle_ray.methods.eagle.draft_buffers import DraftBuffers, DraftShape, PaddedDraft
from eagle_ray.requests.parameters import SamplingParams
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
    *("level", "tokens", "parents", "log_values", "draft_log_probs", "frontier_nodes", "frontier_values"),
    *("words", "frontier_tokens", "parent_rows", "offered", "scores", "features"),
)


def grown(width: int, calibration: Calibration | None, batch: int) -> tuple[DraftBuffers, PaddedDraft]:
    """A draft of random children, with padding, NaN and ends of sequences among them.

    And with ties, but for calibrated ones: sums of rounded numbers tie in one order of additions and not in another.
    """
    sampling = SamplingBatch.of(PARAMS[:batch], DEVICE, frozenset({7, 9}))
    buffers = DraftBuffers(DraftShape(BATCH, CHILDREN, CHILDREN, DEPTH), HIDDEN, 2, torch.float32, DEVICE)
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
    wanted, by_torch = grown(width, calibration, batch)
    monkeypatch.setenv("EAGLE_RAY_KERNELS", "triton")
    found, by_kernel = grown(width, calibration, batch)
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
    buffers = DraftBuffers(DraftShape(BATCH, CHILDREN, CHILDREN, DEPTH), HIDDEN, 1, torch.float32, DEVICE)
    draft = PaddedDraft(buffers, BATCH, CHILDREN, sampling.kind)
    scores = torch.zeros(BATCH, CHILDREN, CHILDREN, device=DEVICE)
    features = torch.zeros(BATCH, CHILDREN, HIDDEN, device=DEVICE)
    tokens, calibration = scores.long(), Calibration(DEPTH, DEVICE)
    counts = device_operations(lambda: draft.append(features, tokens, scores, scores, calibration))
    assert counts["_append_level"] == 1 and counts.total() == 3, counts
