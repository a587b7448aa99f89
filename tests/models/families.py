"""Small random models of every family, and how a Target's trees are held equal to transformers' own forward."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from eagle_ray.models.kv_cache import BatchSlots
from eagle_ray.models.target import Prompts, Target
from eagle_ray.speculative.tree import DraftTree
from tests.toy import LLAMA, best, random_tree

WINDOW = 7
MOE = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
SLOTS = [3, 0, 4]
PROMPTS = [[5, 9, 23, 40, 11, 7, 31], list(range(3, 23)), [88]]  # the second is well past WINDOW
CHUNKS = [3, 12, 1]  # tokens of each prompt that a first chunk brings, where prompts come in two


def config_of(family: str, **own: Any) -> PreTrainedConfig:
    """A small config of a model_type; own: what this one has beside the common shape."""
    return AutoConfig.for_model(family, **{**LLAMA, **own})


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Weights large enough that every part of the model shows in its logits."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(8) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def plain_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights with transformers' eager attention and its own masks."""
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    return plain


def target_of(model: PreTrainedModel, **how: Any) -> Target:
    """Five slots, of which SLOTS are ready to be written."""
    target = Target(model, num_slots=5, capacity=64, **how)
    for slot in SLOTS:
        target.cache.blocks.reserve(slot, 64)
    return target


def prefill(target: Target, chunks: list[int] | None) -> Tensor:
    """PROMPTS in the target's slots; the logits after each. chunks: where each is cut in two."""
    if chunks is None:
        return target.prefill(Prompts.of(SLOTS, PROMPTS))[0]
    first, _ = target.prefill(Prompts.of(SLOTS, [ids[:n] for ids, n in zip(PROMPTS, chunks, strict=True)]))
    rest = [b for b, ids in enumerate(PROMPTS) if len(ids) > chunks[b]]
    later, _ = target.prefill(
        Prompts.of([SLOTS[b] for b in rest], [PROMPTS[b][chunks[b] :] for b in rest], starts=[chunks[b] for b in rest])
    )
    return first.index_copy(0, torch.tensor(rest), later)


def random_trees(budgets: list[int], vocab: int = 97) -> DraftTree:
    """One random tree for each prompt, of budgets[b] nodes."""
    trees = [random_tree(torch.Generator().manual_seed(b), max(budgets), vocab) for b in range(len(budgets))]
    return best(DraftTree(*(torch.cat([getattr(t, f) for t in trees]) for f in DraftTree.__slots__)), budgets)


def path_to(tree: DraftTree, b: int, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.insert(0, node)
        node = int(tree.parents[b, node])
    return path


def assert_trees_equal(
    plain: PreTrainedModel,
    target: Target,
    chunks: list[int] | None = None,
    atol: float = 1e-4,
    budgets: Sequence[int] = (9, 2, 6),
    padding: int = 3,
) -> None:
    """After the prompts and after every node of packed trees: the logits of a plain forward of that path."""

    def own(ids: list[int]) -> Tensor:
        return plain(torch.tensor([ids]), use_cache=False).logits[0, -1]

    budgets = list(budgets)
    logits = prefill(target, chunks)
    for b, ids in enumerate(PROMPTS):
        torch.testing.assert_close(logits[b], own(ids), atol=atol, rtol=0)
    tree = random_trees(budgets)
    batch = BatchSlots.of(SLOTS, [len(ids) for ids in PROMPTS])
    rows = tree.pack(batch.lengths, sum(budgets) + padding)
    logits, _ = target.verify(tree, rows, batch, max_depth=8)
    for b, budget in enumerate(budgets):
        for node in range(budget):
            ids = PROMPTS[b] + tree.tokens[b, path_to(tree, b, node)].tolist()
            torch.testing.assert_close(logits[rows.row_of[b, node]], own(ids), atol=atol, rtol=0)
