"""CandidateRanker: greedy rows keep the head's order, sampled rows are coupled, learning finds the path's node."""

import pytest
import torch

from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.methods.calibration import Calibration
from eagle_ray.methods.candidate_ranker import CandidateRanker
from eagle_ray.methods.coupling import Coupling
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.tree.draft_tree import VerifyResult
from eagle_ray.tree.expand import TreeBuilder

VOCAB, WIDTH = 30, 4
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(),
    SamplingParams(temperature=2.0, top_p=0.9, seed=5),
]
FEATURES = torch.randn(
    4, 1, VOCAB, generator=torch.Generator().manual_seed(0)
)  # the head's logits themselves
LENGTHS = torch.tensor([5, 9, 3, 7])


def ranked(
    coupling: Coupling | None,
    calibration: Calibration | None = None,
    params=PARAMS,
    rows=slice(None),
):
    ranking = CandidateRanker(lambda features: features, calibration, coupling)
    ranking.start(SamplingBatch.of(params), LENGTHS[rows])
    return ranking.children(FEATURES[rows], None, WIDTH)


def test_without_coupling_it_is_the_heads_own_ranking():
    children, best = ranked(None), FEATURES.log_softmax(-1).topk(WIDTH, -1)
    assert (children.tokens == best.indices).all()
    torch.testing.assert_close(children.log_probs, best.values)
    torch.testing.assert_close(children.draft_log_probs, best.values)


def test_coupling_leaves_greedy_rows_alone():
    plain, coupled = ranked(None), ranked(Coupling(1))
    assert (coupled.tokens[::2] == plain.tokens[::2]).all()
    torch.testing.assert_close(coupled.log_probs[::2], plain.log_probs[::2])
    for name in ("tokens", "log_probs"):
        assert (getattr(coupled, name)[1::2] != getattr(plain, name)[1::2]).any()
    own = FEATURES.log_softmax(-1).gather(-1, coupled.tokens)
    torch.testing.assert_close(coupled.draft_log_probs, own)


def test_a_row_is_ranked_alone_as_in_a_batch():
    together = ranked(Coupling(1))
    for i, params in enumerate(PARAMS):
        alone = ranked(Coupling(1), params=[params], rows=slice(i, i + 1))
        assert (alone.tokens[0] == together.tokens[i]).all()
        torch.testing.assert_close(alone.log_probs[0], together.log_probs[i])


def test_members_are_ranked_with_their_own_noise():
    together, ranking = (
        ranked(Coupling(1)),
        CandidateRanker(lambda features: features, None, Coupling(1)),
    )
    ranking.start(SamplingBatch.of(PARAMS), LENGTHS[[0, 3]], members=(0, 3))
    some = ranking.children(FEATURES[[0, 3]], None, WIDTH)
    assert (some.tokens == together.tokens[[0, 3]]).all()
    torch.testing.assert_close(some.log_probs, together.log_probs[[0, 3]])


class RecordingCalibration(Calibration):
    """Writes down what it is told."""

    def update(self, kinds, log_probs, picked, reached) -> None:
        self.told = [*getattr(self, "told", []), (picked, reached)]


def test_learning_follows_target_picks_down_the_drafted_levels():
    """Three levels; the picks follow the second child, then the first of its children, then leave the tree."""
    ranking = CandidateRanker(lambda features: features, noted := RecordingCalibration(3), None)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        builder, picks, parent = TreeBuilder(torch.tensor([1]), WIDTH), [], 0
        ranking.start(SamplingBatch.of([SamplingParams()]), torch.tensor([4]))
        for level, rank in enumerate((1, 0, None)):
            frontier = builder.frontier() if level else None
            shape = (1, WIDTH if level else 1, VOCAB)
            features = torch.randn(shape, generator=generator)
            children = ranking.children(features, frontier, WIDTH)
            if level:
                on_path = (frontier.tokens[0] == picks[-1]) & (frontier.parent_rows[0] == parent)
                parent = int(on_path.long().argmax())
                assert on_path.any(), "the toy's path must stay in the frontier"
            offered = children.tokens[0, parent]
            picks.append(
                int(offered[rank])
                if rank is not None
                else next(t for t in range(VOCAB) if t not in offered)
            )
            log_probs = children.log_probs.clone()
            if rank is not None:
                log_probs[0, parent, rank] = -0.01  # so that the node is in the next frontier
            builder.grow(log_probs, children.tokens)
        result = VerifyResult(
            torch.tensor([[0, 1, 1, -1]]), torch.tensor([2]), torch.tensor([[*picks, 0]])
        )
        ranking.update(result)
    one_of = [[rank == told for rank in range(WIDTH)] for told in (1, 0, None)]
    assert len(noted.told) == 3
    for picked, reached in noted.told:
        assert picked[:, 0].tolist() == one_of and reached[:, 0].tolist() == [True] * 3


def test_what_was_learned_can_be_forgotten():
    ranking = CandidateRanker(lambda features: features, Calibration(1), Coupling(1))
    for _ in range(3):
        ranking.start(SamplingBatch.of(PARAMS), LENGTHS)
        before = ranking.children(FEATURES, None, WIDTH)
        ranking.update(
            VerifyResult(torch.zeros(4, 1).long(), torch.zeros(4).long(), torch.full((4, 1), 7))
        )
    ranking.start(SamplingBatch.of(PARAMS), LENGTHS)
    assert (ranking.children(FEATURES, None, WIDTH).log_probs != before.log_probs).any()
    ranking.reset()
    ranking.start(SamplingBatch.of(PARAMS), LENGTHS)
    fresh = ranked(Coupling(1), Calibration(1))
    assert (ranking.children(FEATURES, None, WIDTH).log_probs == fresh.log_probs).all()


def test_what_was_learned_goes_on_in_another_ranker():
    first, second = (
        CandidateRanker(lambda features: features, Calibration(1), Coupling(1)) for _ in range(2)
    )
    for _ in range(3):
        first.start(SamplingBatch.of(PARAMS), LENGTHS)
        first.children(FEATURES, None, WIDTH)
        first.update(
            VerifyResult(torch.zeros(4, 1).long(), torch.zeros(4).long(), torch.full((4, 1), 7))
        )
    second.load_state(first.state())
    for ranking in (first, second):
        ranking.start(SamplingBatch.of(PARAMS), LENGTHS)
    wanted = first.children(FEATURES, None, WIDTH).log_probs
    assert (second.children(FEATURES, None, WIDTH).log_probs == wanted).all()
    assert (ranked(Coupling(1), Calibration(1)).log_probs != wanted).any()
    with pytest.raises(ValueError, match="parameters"):
        CandidateRanker(lambda features: features, Calibration(2), None).load_state(first.state())
    assert CandidateRanker(lambda features: features, None, None).state() == {}


def test_a_path_that_ended_earlier_teaches_nothing_below():
    ranking = CandidateRanker(lambda features: features, noted := RecordingCalibration(2), None)
    ranking.start(SamplingBatch.of([SamplingParams()]), torch.tensor([4]))
    builder = TreeBuilder(torch.tensor([1]), WIDTH)
    children = ranking.children(FEATURES[:1], None, WIDTH)
    builder.grow(children.log_probs, children.tokens)
    ranking.children(FEATURES[:1].expand(1, WIDTH, VOCAB), builder.frontier(), WIDTH)
    ranking.update(
        VerifyResult(torch.tensor([[0, -1]]), torch.tensor([0]), torch.tensor([[29, 0]]))
    )
    assert [reached[:, 0].tolist() for _, reached in noted.told] == [[True, False]]
    ranking.update(
        VerifyResult(torch.tensor([[0, -1]]), torch.tensor([0]), torch.tensor([[29, 0]]))
    )
    assert len(noted.told) == 1  # nothing was drafted since
