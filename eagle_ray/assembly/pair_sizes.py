"""Count the weights of a target and what one pass reads of them, from its config and memory plan."""

from __future__ import annotations

from typing import Any

import torch

from eagle_ray.assembly.memory_plan import MemoryPlan
from eagle_ray.models.loader import input_embedding
from eagle_ray.models.quantized_model import empty_model
from eagle_ray.planner.planned_costs import PairSizes

EXPERT_PART = ".experts."  # in names of weights
# Keys of configurations with the number of experts of a layer.
NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def pair_sizes(shape: Any, dtype: torch.dtype, plan: MemoryPlan, num_ranks: int) -> PairSizes:
    """Return the sizes of target and drafts on one GPU, from which the time of a pass is estimated.

    Args:
        shape: configuration of the target.
        dtype: dtype of its activations.
        plan: memory plan of one worker, or of one rank.
    """
    model = empty_model(shape, dtype)
    embedding = input_embedding(model).weight
    weights = dict(model.named_parameters())
    experts = sum(weight.numel() for name, weight in weights.items() if EXPERT_PART in name)
    dense = sum(weight.numel() for weight in weights.values()) - experts

    # A pass looks rows of the embedding up. A tied one is also the lm_head, which it multiplies with.
    is_tied = model.get_output_embeddings().weight is embedding
    unread = 0 if is_tied else embedding.numel()
    dense -= unread
    num_bytes = max(plan.target - unread * dtype.itemsize, 0)
    expert_bytes = num_bytes * experts / (dense + experts)
    return PairSizes(
        dense_bytes=num_bytes - expert_bytes,
        expert_bytes=expert_bytes,
        active_share=_active_share(shape) if experts else 1.0,
        dense_weights=dense / num_ranks,
        expert_weights=experts / num_ranks,
        kv_bytes=plan.kv_per_token,
        draft_bytes=plan.draft,
        itemsize=dtype.itemsize,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_hidden_layers,
        num_ranks=num_ranks,
    )


def _active_share(shape: Any) -> float:
    """Return the share of a layer's experts that a row goes through."""
    numbers = [getattr(shape, name) for name in NUM_EXPERTS if getattr(shape, name, None)]
    active = getattr(shape, "num_experts_per_tok", None) or getattr(shape, "moe_k", None)
    return min(1.0, active / numbers[0]) if numbers and active else 1.0
