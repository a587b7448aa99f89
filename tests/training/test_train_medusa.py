"""Medusa's and Hydra's heads learn what comes next in answers, from features and from paths."""

import pytest
import torch

from eagle_ray.models.medusa_checkpoint import load_hydra, load_medusa, save_path_heads
from eagle_ray.models.medusa_heads import HydraHeads, MedusaHeads
from eagle_ray.training.optimization import StepReport
from eagle_ray.training.train_head import FrozenTarget
from eagle_ray.training.train_medusa import path_losses, start_as_lm_head, train_path_heads
from tests.models.test_medusa_checkpoint import TARGET, H, V
from tests.training.test_train_head import some_rows

KINDS = {MedusaHeads: load_medusa, HydraHeads: load_hydra}


@pytest.fixture
def target() -> FrozenTarget:
    """A feature is a function of its token alone."""
    torch.manual_seed(0)
    embedding = torch.randn(V, H)
    return FrozenTarget(lambda ids: embedding[ids], embedding, torch.randn(V, H))


def made(kind: type, target: FrozenTarget) -> MedusaHeads | HydraHeads:
    heads = kind(2, 1, H, V, **(dict(own_lm_head=True) if kind is MedusaHeads else {}))
    start_as_lm_head(heads, target)
    return heads


@pytest.mark.parametrize("kind", KINDS)
def test_heads_start_as_the_targets_lm_head(kind, target):
    feature, path = torch.randn(3, H), torch.randn(3, 1, 2, H)
    logits = made(kind, target).logits(1, feature, path, target_logits=None)[:, 0]
    torch.testing.assert_close(logits, feature @ target.lm_head.T)


def test_the_token_after_root_and_path_is_wanted(target):
    """Each text counts upwards: what a head of level k says is k + 2 more than the feature's own token."""

    class Counting:
        num_levels = 2

        def logits(self, level, feature, path, target_logits):
            own = (feature[:, None] == target.embedding).all(-1).long().argmax(-1)
            last = (path[:, 0, -1][:, None] == target.embedding).all(-1).long().argmax(-1)
            assert ((own + level + 1) % V == last).all()
            return 50 * torch.eye(V)[(own + level + 2) % V][:, None]

    rows = some_rows(2)
    counting = type(rows)((torch.arange(rows.ids.shape[1]) % V).repeat(2, 1), rows.weights)
    losses = path_losses(Counting(), target, counting)
    assert losses.total < 1e-3 and losses.shown == {"level 1": losses.count, "level 2": losses.count}


@pytest.mark.parametrize("kind", KINDS)
def test_training_teaches_heads_which_are_then_published(kind, target, tmp_path):
    """Texts that count upwards from different places."""
    rows = some_rows(20)
    ids = (torch.arange(20)[:, None] + torch.arange(rows.ids.shape[1])) % V
    heads, reports = made(kind, target), list[StepReport]()
    counting = type(rows)(ids, rows.weights)
    train_path_heads(heads, target, counting, num_steps=20, num_threads=1, rate=0.1, on_step=reports.append)
    assert min(reports[-1].means.values()) > max(reports[0].means.values()) + 0.3
    save_path_heads(heads, tmp_path)
    again, feature, path = KINDS[kind](tmp_path, TARGET), torch.randn(3, H), torch.randn(3, 2, 2, H)
    ours, theirs = (each.logits(1, feature, path, target_logits=None) for each in (heads, again))
    torch.testing.assert_close(ours, theirs, atol=0.05 * float(ours.detach().abs().max()), rtol=0)
