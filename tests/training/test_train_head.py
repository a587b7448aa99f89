"""The head's loss: on answers only, and small for a head that predicts the target's features."""

import pytest
import torch
from torch import nn

from eagle_ray.training.optimization import StepReport
from eagle_ray.training.packing import TrainingRows
from eagle_ray.training.train_head import FeatureShard, FrozenTarget, head_losses, initialize_head, train_head

VOCAB, HIDDEN, LENGTH = 11, 8, 128  # long rows, as the published noise grows with their shortness


class Oracle(nn.Module):
    """Knows the next feature: in this target a feature is a function of its token alone."""

    def forward(self, embeddings, features, positions):
        return embeddings


class LinearHead(nn.Module):
    """The simplest head with an `fc`: no attention."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, embeddings, features, positions):
        return self.fc(torch.cat([embeddings, features], -1)) * self.scale


@pytest.fixture
def target() -> FrozenTarget:
    torch.manual_seed(0)
    embedding = torch.randn(VOCAB, HIDDEN)
    return FrozenTarget(lambda ids: embedding[ids], embedding, torch.randn(VOCAB, HIDDEN))


def some_rows(count: int) -> TrainingRows:
    """Rows whose second half is an answer."""
    ids = torch.randint(VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    return TrainingRows(ids, torch.full((count, LENGTH), 0.25).index_fill(1, torch.arange(LENGTH // 2, LENGTH), 1.0))


def quiet(rows: TrainingRows) -> FeatureShard:
    return FeatureShard(rows, torch.zeros(len(rows), LENGTH - 1, HIDDEN))


def test_an_oracle_has_no_feature_loss_and_always_agrees(target):
    losses = head_losses(Oracle(), target, quiet(some_rows(3)))
    assert losses.shown["feature"] == pytest.approx(0, abs=1e-6)
    assert losses.shown["agreement"] == losses.count


def test_only_predictions_of_answer_tokens_count(target):
    # Pair i predicts token i+2, so the answers of the second half are predicted, every one of them.
    assert head_losses(Oracle(), target, quiet(some_rows(3))).count == 3 * LENGTH // 2


def test_training_teaches_a_head(target):
    head = LinearHead()
    torch.manual_seed(0)
    initialize_head(head, target.embedding)
    reports: list[StepReport] = []
    train_head(head, target, some_rows(60), seed=0, num_steps=60, num_threads=1, rate=0.1, on_step=reports.append)
    assert reports[-1].means["agreement"] > reports[0].means["agreement"] + 0.2
    assert reports[-1].means["feature"] < reports[0].means["feature"] / 2
