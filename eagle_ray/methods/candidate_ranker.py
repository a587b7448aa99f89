"""CandidateRanker: rank children by a head's features, each with the probability that the target samples it.

    ranking = CandidateRanker(logits_of, calibration, coupling)
    ranking.start(sampling, lengths)
    children = ranking.children(features, None, width)           # level 1
    children = ranking.children(features, frontier, width)       # each further level
    ranking.update(result)                                       # learn from the target's tokens

Without calibration and coupling it is EAGLE-2's ranking as published: the head's own top children.
With coupling, the children of sampled rows are those that the target most likely samples with the
same noise. It learns from the target's token after every node on the accepted path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle_ray.core.device import to_device
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.kernels import cpu_ops
from eagle_ray.kernels.availability import use_triton
from eagle_ray.methods.calibration import (
    Calibration,
    OnlineFit,
    ProposalRecorder,
    Proposals,
    TargetPath,
    calibration_for,
    state_of_part,
)
from eagle_ray.methods.coupling import LARGE_NOISE, NUM_CUT, Coupling
from eagle_ray.methods.method import DraftSettings
from eagle_ray.models.supported_models import LogitsOf
from eagle_ray.sampling.noise import gumbel_noise
from eagle_ray.tree.draft_tree import VerifyResult
from eagle_ray.tree.expand import Frontier

MAX_FUSED_K = 32  # children per node that the kernel finds, one after the other
# Target tokens per update of the coupling: more would cost memory and change little.
MAX_FEEDBACK = 32


@dataclass(frozen=True, slots=True)
class TopK:
    """The K likeliest children of each of F nodes, best first.

    Attributes:
        log_probs: calibrated log-probability that the target samples them after their parent.
        draft_log_probs: the head's own log-probability, without noise and temperature.
    """

    tokens: Int[Tensor, "B F K"]
    log_probs: Float[Tensor, "B F K"]
    draft_log_probs: Float[Tensor, "B F K"]


@dataclass(slots=True)
class RankingFeedback:
    """The inputs of one step's drafts, kept until the target's tokens are known.

    Attributes:
        members: indices of their sequences in the batch.
        sampling: sampling parameters of these sequences.
        lengths: lengths of these sequences.
        features: features of each level's frontier; one for all of its nodes if they share it.
        is_learned: the pass that verifies these trees updates the calibration itself.
    """

    members: Int[Tensor, " M"] | slice
    sampling: SamplingBatch
    lengths: Int[Tensor, " M"]
    features: list[Float[Tensor, "M _ H"]]
    offered: Proposals
    is_learned: bool = False


class CandidateRanker:
    """Chooses the children of draft nodes from a head's features, and learns from the target's tokens.

    Args:
        logits_of: returns the head's logits from its features.
        token_ids: the token of each of these logits; None is the whole vocabulary.

    Attributes:
        pending: the draft that the next `update` learns from; None if nothing was drafted since the
            last one. A caller may save and restore it.
    """

    def __init__(
        self,
        logits_of: LogitsOf,
        calibration: Calibration | None,
        coupling: Coupling | None,
        token_ids: Int[Tensor, " D"] | None = None,
    ):
        self._logits_of = logits_of
        self.calibration = calibration
        self.coupling = coupling
        self.token_ids = token_ids
        self._order = None if token_ids is None else token_ids.argsort()
        self.offers = ProposalRecorder(calibration)
        self._num_updates = 0
        self.pending: RankingFeedback | None = None

    def start(
        self,
        sampling: SamplingBatch,
        lengths: Int[Tensor, " B"],
        members: Sequence[int] | None = None,
    ) -> None:
        """Start a new step's trees.

        Args:
            sampling: sampling of the batch.
            lengths: cached tokens of the drafted sequences, which are their roots' positions.
            members: indices of the drafted sequences in the batch; None is all.
        """
        index: Int[Tensor, " M"] | slice = slice(len(lengths))
        if members is not None:
            index = to_device(members, lengths.device)
            sampling = sampling.select(members)
        self.offers.begin((sampling.temperature > 0).long())
        self.pending = RankingFeedback(index, sampling, lengths, [], self.offers.offered)

    @property
    def feedback(self) -> RankingFeedback:
        """Return the inputs of the current draft. Valid between `start` and `update`."""
        assert self.pending is not None, "no trees were started"
        return self.pending

    def is_coupled(self, sampling: SamplingBatch) -> bool:
        """Return whether children depend on the noise by which the target samples, and not on the head alone."""
        return self.coupling is not None and sampling.any_sampled

    def reset(self) -> None:
        """Discard everything learned."""
        self._num_updates = 0
        self.pending = None
        self.offers.reset()
        if self.coupling is not None:
            self.coupling.fit.reset()

    def state(self) -> dict[str, Tensor]:
        """Return the learned state, which `load_state` of a ranker with equal depth and speculative.ranking accepts."""
        state = {}
        for name, fit in self._fits():
            for part, tensor in fit.state().items():
                state[f"{name}.{part}"] = tensor
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of another ranker. Raises ValueError if it does not fit."""
        for name, fit in self._fits():
            fit.load_state(state_of_part(state, name))
        self.offers.skip_warm_up()

    def _fits(self) -> list[tuple[str, OnlineFit]]:
        """Return the calibration and the coupling by name, if they learn."""
        fits = []
        if self.calibration is not None:
            fits.append(("calibration", self.calibration.fit))
        if self.coupling is not None:
            fits.append(("coupling", self.coupling.fit))
        return fits

    def children(
        self, features: Float[Tensor, "B F H"], frontier: Frontier | None, width: int
    ) -> TopK:
        """Return the `width` likeliest children of every node of the next level's frontier."""
        tokens, scores, own = self.rank(len(self.feedback.features), features, width)
        self.feedback.features.append(features)
        return TopK(tokens, self.offers.add(frontier, tokens, scores), own)

    def rank(
        self, level: int | Int[Tensor, " 1"], features: Float[Tensor, "B F H"], width: int
    ) -> tuple[Int[Tensor, "B F K"], Float[Tensor, "B F K"], Float[Tensor, "B F K"]]:
        """Compute the head's logits and return the `width` likeliest children of each of F nodes.

        Returns:
            Their tokens, their log-probabilities before calibration, and the head's own log-probabilities.

        Args:
            level: number of levels above these children; a tensor if the pass is recorded for all
                levels.
        """
        return self.rank_logits(level, self._logits_of(features), width)

    def scored_children(
        self,
        features: Float[Tensor, "B G H"],
        logits: Float[Tensor, "B G D"],
        frontier: Frontier | None,
        width: int,
        confidence: Float[Tensor, "B G"] | None = None,
    ) -> TopK:
        """Return what `children` returns, from logits that are already computed.

        One feature for all nodes of the frontier (G = 1) gives them all the same children, ranked
        once.

        Args:
            logits: the head's logits of these features.
            confidence: the head's own log-odds that a child of each node is accepted, for a
                calibration that reads them.
        """
        num_nodes = 1 if frontier is None else frontier.tokens.shape[1]
        num_repeats = num_nodes // logits.shape[1]
        ranked = self.rank_logits(len(self.feedback.features), logits, width)
        tokens, scores, own = (part.repeat(1, num_repeats, 1) for part in ranked)
        self.feedback.features.append(features)
        return TopK(tokens, self.offers.add(frontier, tokens, scores, confidence), own)

    def rank_logits(
        self, level: int | Int[Tensor, " 1"], logits: Float[Tensor, "B F D"], width: int
    ) -> tuple[Int[Tensor, "B F K"], Float[Tensor, "B F K"], Float[Tensor, "B F K"]]:
        """Return what `rank` returns, from logits that are already computed."""
        width = min(width, logits.shape[-1])
        if use_triton(logits.device) and width <= MAX_FUSED_K:
            scores, index, own = self._fused_best(level, logits, width)
        else:
            scores, index, own = self._best(level, logits, width)
        scores = scores.masked_fill(scores.isnan(), -torch.inf)  # overflowed heads propose nothing
        tokens = index if self.token_ids is None else self.token_ids[index]
        return tokens, scores, own

    def update(self, result: VerifyResult) -> None:
        """Learn from the target's tokens on the trees that were just drafted, for all levels at once."""
        feedback = self.pending
        if feedback is None:
            return
        couples = self.coupling is not None and feedback.sampling.any_sampled
        if couples or (self.calibration is not None and not feedback.is_learned):
            self.offers.offered = feedback.offered
            picks = result.tokens[feedback.members]
            num_accepted = result.num_accepted[feedback.members]
            path = self.offers.update(picks, num_accepted, feedback.is_learned, couples)
            if path is not None and self.coupling is not None and couples:
                self._couple(self.coupling, path, picks)
        self.pending = None

    def _best(
        self, level: int | Int[Tensor, " 1"], logits: Float[Tensor, "B F D"], width: int
    ) -> tuple[Float[Tensor, "B F K"], Int[Tensor, "B F K"], Float[Tensor, "B F K"]]:
        """Return log-probabilities and indices of the likeliest tokens, and their log-probabilities by the head."""
        sampling = self.feedback.sampling
        is_coupled = self.is_coupled(sampling)
        is_fp32 = logits.dtype is torch.float32
        if not is_coupled and is_fp32 and cpu_ops.available(logits.device, logits.dtype):
            index, scores = cpu_ops.top_k(logits, width)
            return scores, index, scores

        logits = logits.float()
        own = logits.log_softmax(-1)
        ranked = own
        if self.coupling is not None and is_coupled:
            rows = sampling.sampled_rows
            noise = self._noise(level + self._ones(1), rows, logits.shape[-1])[0]
            coupled = self.coupling.log_probs(level, logits[rows], sampling, rows, noise)
            if sampling.is_bound:
                coupled = torch.where((sampling.temperature > 0)[:, None, None], coupled, own)
            ranked = own.index_copy(0, rows, coupled)

        scores, index = ranked.topk(width, -1)
        return scores, index, own.gather(-1, index)

    def _fused_best(
        self, level: int | Int[Tensor, " 1"], logits: Float[Tensor, "B F D"], width: int
    ) -> tuple[Float[Tensor, "B F K"], Int[Tensor, "B F K"], Float[Tensor, "B F K"]]:
        """Compute `_best` with a kernel, without tensors of the vocabulary's width."""
        from eagle_ray.kernels.topk import Push, top_k

        sampling = self.feedback.sampling
        push = None
        if self.coupling is not None and sampling.any_sampled:
            push = Push(
                weights=self.coupling.fit.at(level)[0],
                large=LARGE_NOISE,
                temperature=sampling.temperature,
                seed=sampling.seed,
                positions=self.feedback.lengths + level + 1,
                floors=self._floors(logits, sampling) if sampling.any_cut else None,
                token_ids=self.token_ids,
            )
        return top_k(logits, width, push)

    def _floors(
        self, logits: Float[Tensor, "B F D"], sampling: SamplingBatch
    ) -> Float[Tensor, "B F"]:
        """Return the least logit that each sequence's cuts keep."""
        from eagle_ray.kernels.topk_topp import cut_floor

        cuts = sampling.top_k, sampling.top_p, sampling.min_p
        return cut_floor(logits, sampling.temperature, *cuts, NUM_CUT)

    def _couple(self, coupling: Coupling, path: TargetPath, picks: Int[Tensor, "B D"]) -> None:
        """Update the coupling from at most MAX_FEEDBACK tokens, or one sequence's, in turn. Recomputes their logits."""
        sampling = self.feedback.sampling
        num_levels = len(path.nodes)

        # Some of the sampled sequences in each step.
        num_sampled = len(sampling.sampled)
        turns = min(num_sampled, -(-num_sampled * num_levels // MAX_FEEDBACK))
        rows = sampling.sampled_rows[self._num_updates % turns :: turns]
        self._num_updates += 1

        # The features of the nodes on their paths.
        on_path = []
        for features, nodes in zip(self.feedback.features, path.nodes[:, rows], strict=False):
            is_shared = features.shape[1] == 1  # by all nodes of the level
            on_path.append(features[rows, 0 if is_shared else nodes])

        logits = self._logits_of(torch.stack(on_path)).float()
        index, is_known = self._draft_indices(picks.T[:num_levels, rows])
        noise = self._noise(self._ones(num_levels).cumsum(0), rows, logits.shape[-1])
        is_known = is_known & path.reached[:, rows] & logits.isfinite().all(-1)
        coupling.update(logits.nan_to_num(), sampling, rows, noise, index, is_known)

    def _draft_indices(
        self, picks: Int[Tensor, "L S"]
    ) -> tuple[Int[Tensor, "L S"], Bool[Tensor, "L S"]]:
        """Return the picks' indices among the tokens that can be drafted, and whether they are among them."""
        if self.token_ids is None or self._order is None:
            return picks, torch.ones_like(picks, dtype=torch.bool)
        ranks = torch.searchsorted(self.token_ids, picks, sorter=self._order)
        index = self._order[ranks.clamp(max=len(self._order) - 1)]
        return index, self.token_ids[index] == picks

    def _noise(
        self, steps: Int[Tensor, " L"], rows: Int[Tensor, " S"], num_tokens: int
    ) -> Float[Tensor, "L S D"]:
        """Return the noise by which the target samples the tokens `steps` after the roots, which are at `lengths`."""
        token_ids = self.token_ids
        if token_ids is None:
            token_ids = torch.arange(num_tokens, device=rows.device)
        positions = self.feedback.lengths[rows] + steps[:, None]
        seeds = self.feedback.sampling.seed[rows].expand_as(positions)
        noise = gumbel_noise(seeds.flatten(), positions.flatten(), token_ids)
        return noise.view(*positions.shape, -1)

    def _ones(self, num: int) -> Int[Tensor, " L"]:
        return torch.ones(num, dtype=torch.int64, device=self.feedback.lengths.device)


def corrections(
    speculative: DraftSettings, device: torch.device, num_signals: int = 0
) -> tuple[Calibration | None, Coupling | None]:
    """Return the calibration and the coupling that speculative.ranking asks for; None for what it leaves out.

    Args:
        num_signals: number of the head's own estimates, as in Calibration.
    """
    depth = speculative.max_depth
    if speculative.ranking == "published":
        return None, None
    calibration = calibration_for(depth, device, num_signals)
    coupling = Coupling(depth, device) if speculative.ranking == "coupled" else None
    return calibration, coupling
