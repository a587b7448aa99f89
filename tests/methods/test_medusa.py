"""Medusa's and Hydra's drafts: from the right feature and the right path, and useful where the heads are."""

import pytest
import torch
from torch import Tensor, nn

from eagle_ray.core.tree_bounds import TreeBounds
from eagle_ray.engine.engine import Engine
from eagle_ray.methods.medusa.drafter import MedusaDrafter
from eagle_ray.methods.medusa.heads import HydraHeads, MedusaHeads
from eagle_ray.models.target import TargetModel
from eagle_ray.requests.parameters import SamplingParams
from tests.support.toy_models import LLAMA, llama, run
from tests.support.trees import PROMPTS, RecordingPlanner, path

H, V, HEADS = LLAMA["hidden_size"], LLAMA["vocab_size"], 3


def engine_of(heads: nn.Module, num_slots: int) -> Engine:
    target = TargetModel(llama(), num_slots, 128 + 32, kv_tokens=384)
    bounds = TreeBounds(20, 5, 4)
    return Engine(target, MedusaDrafter(heads, target), RecordingPlanner(bounds), 128, bounds)


@pytest.mark.parametrize("kind", [MedusaHeads, HydraHeads])
@torch.inference_mode()
def test_draft_values_are_heads_on_the_feature_before_the_root(kind):
    """Recomputed from a plain forward over all tokens but the root, at many places of several sequences."""
    torch.manual_seed(0)
    own = dict(own_lm_head=False) if kind is MedusaHeads else {}
    heads, model = kind(HEADS, 2, H, V, **own), llama()
    engine = engine_of(heads, 3)
    run(engine, PROMPTS[:6], [SamplingParams(max_tokens=9, ignore_eos=True)] * 6)
    for ids, tree, b in engine.planner.seen[::9]:
        assert (
            tree.depths[b].max() == HEADS
        )  # fewer than the plan's levels: there is no further head
        feature = model.model(torch.tensor([ids[:-1]])).last_hidden_state[:, -1]
        for node in range(1, tree.num_nodes, 7):
            tokens, _ = path(tree, b, node)
            embedded = model.model.embed_tokens(torch.tensor([[[ids[-1], *tokens[:-1]]]]))
            wanted = heads.logits(len(tokens) - 1, feature, embedded, model.lm_head)[
                0, 0
            ].log_softmax(-1)
            torch.testing.assert_close(
                tree.draft_log_probs[b, node], wanted[tokens[-1]], atol=1e-4, rtol=0
            )


@pytest.mark.parametrize("kind", [MedusaHeads, pytest.param(HydraHeads, marks=pytest.mark.slow)])
@torch.inference_mode()
def test_heads_that_were_fitted_to_the_target_are_useful(kind):
    """By least squares, to what plain decoding says after each of its own features."""
    params = [SamplingParams(max_tokens=20, ignore_eos=True)] * len(PROMPTS)
    torch.manual_seed(0)
    own = dict(own_lm_head=True) if kind is MedusaHeads else {}
    random, fitted = (kind(HEADS, 1, H, V, **own).requires_grad_(False) for _ in range(2))
    taus = []
    for heads in (random, fitted):
        sequences = run(engine_of(heads, 6), PROMPTS, params)
        steps = sum(s.stats.num_steps for s in sequences)
        taus.append(1 + sum(s.stats.num_accepted_draft_tokens for s in sequences) / steps)
        fit(fitted, [s.token_ids for s in sequences])
    assert taus[0] < 1.4 and taus[1] > taus[0] + 0.4


def fit(heads: MedusaHeads | HydraHeads, texts: list[list[int]]) -> None:
    """Linear maps from the features, and for Hydra the path, to the token after it; of rank H at most."""
    model = llama()
    for level in range(HEADS):
        inputs, picks = zip(
            *(samples(model, ids, level, isinstance(heads, HydraHeads)) for ids in texts),
            strict=True,
        )
        wanted = nn.functional.one_hot(torch.cat(picks), V).float()
        u, s, v = torch.linalg.svd(
            torch.linalg.lstsq(torch.cat(inputs), wanted).solution, full_matrices=False
        )
        block = heads.hydra_mlp[level][0] if isinstance(heads, HydraHeads) else heads[level][0]
        block.linear.weight.zero_(), block.linear.bias.zero_()
        if isinstance(heads, MedusaHeads):
            heads[level][1].weight.copy_(10 * (u * s @ v).T)
            continue
        block.res_connection.weight.copy_((u * s)[:, :H].T), block.res_connection.bias.zero_()
        (
            heads.hydra_lm_head[level].weight.copy_(10 * v[:H].T),
            heads.hydra_lm_head[level].bias.zero_(),
        )


def samples(model: nn.Module, ids: list[int], level: int, with_path: bool) -> tuple[Tensor, Tensor]:
    """What a head reads at each place of a text (its feature, then its root and drafts), and the token it is to say."""
    hidden = model.model(torch.tensor([ids])).last_hidden_state[0]
    embedded, count = model.model.embed_tokens(torch.tensor(ids)), len(ids) - level - 2
    parts = [
        hidden[:count],
        *(embedded[1 + i : 1 + i + count] for i in range((level + 1) * with_path)),
    ]
    return torch.cat(parts, -1), torch.tensor(ids[level + 2 :])
