"""Experts: the mixture-of-experts MLP of a decoder layer, as Mixtral, OLMoE, Qwen2-MoE and Qwen3-MoE have it.

    if is_moe_block(layer.mlp):
        experts = Experts.of(layer.mlp, ops, shared=None)
        delta = experts(normed)                     # [R, H] both

Each row goes through the top_k experts that its router scores highest:

    weights, chosen = top_k(softmax(normed @ W_router))          divided by their sum if the model says so
    delta = sum over j of weights[j] * expert[chosen[j]](normed)    in this order, whatever the other rows are
    delta += sigmoid(normed @ w_gate) * shared(normed)           Qwen2-MoE's expert that every row goes through

Llama 4's weights are sigmoid(normed @ W_router), and they multiply an expert's input instead of its
output.

The pairs (row, choice) are sorted by expert once, and each expert multiplies its pairs together.
Where Triton runs, that is kernels/grouped_experts.py. Elsewhere it is torch's `grouped_mm`, or,
where that would copy to the host and so could not be captured in a CUDA graph, each expert
multiplies every row. Which of the three is known from device, dtype and sizes, before a capture
starts. Weights stay in the memory of the transformers modules. A rank has a slice of every expert's
width I, and the ranks' deltas are added up. All ranks have equal rows, so all choose the same
experts. The start verifies that (`checksum`), since no step's checksum covers it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, cast
from zlib import crc32

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle_ray.families import FAMILIES
from eagle_ray.kernels.availability import use_triton
from eagle_ray.kernels.fp8 import Fp8Stack, ScaledRows
from eagle_ray.models.fp8_experts import Fp8Experts
from eagle_ray.models.packed_linear import Projection, is_projection, merge_linears
from eagle_ray.parallel.rank_group import RankGroup
from eagle_ray.parallel.shard import ReducedBlock

# By the class of a block.
MIXTURE_OF_BLOCK = {
    family.mixture.block: family.mixture
    for family in FAMILIES.values()
    if family.mixture is not None
}
# Major compute capabilities whose grouped_mm in bf16 reads the groups' sizes on the device.
FAST_GPUS = (9, 10)
ALIGNED = 16  # bytes: the rows that torch's grouped_mm reads are multiples of this
TRIED_ROWS = (1, 33)  # rows of the passes whose routes ranks compare
MAX_NUMBERS = 1 << 26  # numbers computed together where every expert multiplies every row
grouped_mm: Callable[..., Tensor] = F.grouped_mm


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of one layer and their router, between its norm and the residual.

    Attributes:
        reader: the router's projection: a logit for each expert, and one for the gate of a shared
            expert if there is one.
        gate_up: weights of all experts; gate_up[e] has the gate's rows, then the up projection's.
        down: weights of all experts.
        shared: function of the block's shared expert, if it has one.
        weights_dtype: dtype to which the routing weights of the chosen experts are rounded.
        is_normalized: whether the routing weights of a row's experts are divided by their sum.
        scales_inputs: as in MixtureForm.
        ranks: the ranks, each with a slice of every expert and of `shared`; None if this process
            has all of them.
    """

    reader: Projection
    gate_up: Float[Tensor, "E 2I H"] | Fp8Stack
    down: Float[Tensor, "E H I"] | Fp8Stack
    shared: Callable[[Tensor], Tensor] | None
    top_k: int
    is_normalized: bool
    weights_dtype: torch.dtype
    ops: ModuleType
    ranks: RankGroup | None = None
    scales_inputs: bool = False

    @classmethod
    def of(
        cls, module: nn.Module, ops: ModuleType, shared: Callable[[Tensor], Tensor] | None
    ) -> Experts:
        """Build from a module for which is_moe_block is true.

        Args:
            shared: function of the block's shared expert, if it has one.
        """
        block = cast(Any, _block_of(module))
        mixture = MIXTURE_OF_BLOCK[type(block).__name__]
        router = block.router if mixture.scales_inputs else block.gate
        gate_up, down = _stacks_of(block.experts)
        if mixture.scales_inputs:  # stored inputs first, and never in FP8
            gate_up = cast(Tensor, gate_up).transpose(1, 2)
            down = cast(Tensor, down).transpose(1, 2)
        return cls(
            reader=_router_of(block, router),
            gate_up=gate_up,
            down=down,
            shared=shared,
            top_k=router.top_k,
            is_normalized=getattr(router, "norm_topk_prob", True),
            weights_dtype=router.weight.dtype if mixture.rounds_weights else torch.float32,
            ops=ops,
            ranks=module.ranks if isinstance(module, ReducedBlock) else None,
            scales_inputs=mixture.scales_inputs,
        )

    def __call__(self, normed: Tensor | ScaledRows) -> Float[Tensor, "R H"]:
        assert isinstance(normed, Tensor), "a router reads no rows in FP8"
        delta = self._delta(normed)
        return delta if self.ranks is None else self.ranks.reduce(delta)

    @torch.inference_mode()
    def checksum(self) -> int:
        """Return a checksum of the router's logits for fixed random rows, which ranks compare."""
        width = self.gate_up.shape[2]
        generator = torch.Generator().manual_seed(width)  # all ranks have equal rows
        rows = torch.randn(max(TRIED_ROWS), width, generator=generator)
        rows = rows.to(self.gate_up.device, self.reader.weight.dtype)
        logits = torch.cat([self.reader(rows[:num_rows]) for num_rows in TRIED_ROWS])
        octets = logits.contiguous().cpu().view(torch.uint8)
        return crc32(octets.numpy().tobytes())

    def _delta(self, normed: Float[Tensor, "R H"]) -> Float[Tensor, "R H"]:
        """Return this rank's part of the experts' output."""
        logits = self.reader(normed)
        shared = None if self.shared is None else self.shared(normed)
        if use_triton(normed.device) and not self.scales_inputs:
            return self._fused(normed, logits, shared)
        if isinstance(self.gate_up, Fp8Stack) or isinstance(self.down, Fp8Stack):
            return self._restored(normed.dtype)._delta(normed)
        weights, chosen = self._route(logits)
        outputs = self._grouped if self._has_grouped_mm else self._every_expert
        total = outputs(normed, weights, chosen)
        if shared is None:
            return total
        if logits.shape[1] == len(self.down):
            return total + shared  # its share is 1
        share = logits[:, -1:].sigmoid()
        return total + share * shared

    def _restored(self, dtype: torch.dtype) -> Experts:
        """Return the experts with weights in a dtype, for a pass without kernels."""
        stacks = [
            stack.dequantize(dtype) if isinstance(stack, Fp8Stack) else stack
            for stack in (self.gate_up, self.down)
        ]
        return replace(self, gate_up=stacks[0], down=stacks[1])

    def _fused(
        self,
        normed: Float[Tensor, "R H"],
        logits: Float[Tensor, "R L"],
        shared: Float[Tensor, "R H"] | None,
    ) -> Float[Tensor, "R H"]:
        """Compute `_delta` with Triton's kernels."""
        from eagle_ray.kernels import grouped_experts

        choices = grouped_experts.route(
            logits, len(self.down), self.top_k, self.is_normalized, self.weights_dtype
        )
        groups = grouped_experts.group_pairs(choices.experts, len(self.down))
        inner = grouped_experts.gated_products(normed, self.gate_up, groups, self.top_k)
        outputs = grouped_experts.products(inner, self.down, groups)
        return grouped_experts.weighted_sum(outputs, choices.weights, shared, logits[:, -1])

    def _route(
        self, logits: Float[Tensor, "R L"]
    ) -> tuple[Float[Tensor, "R k"], Int[Tensor, "R k"]]:
        """Return the weights of each row's experts and their numbers, the likeliest first."""
        if self.scales_inputs:
            highest, chosen = logits.topk(self.top_k, -1)
            return highest.float().sigmoid().to(self.weights_dtype), chosen
        shares = torch.softmax(logits[:, : len(self.down)], -1, dtype=torch.float32)
        weights, chosen = shares.topk(self.top_k, -1)
        if self.is_normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(self.weights_dtype), chosen

    @property
    def _has_grouped_mm(self) -> bool:
        """Return whether torch multiplies groups without reading their sizes on a GPU's host."""
        down = cast(Tensor, self.down)
        device = down.device
        dtype = down.dtype
        if any(width * dtype.itemsize % ALIGNED for width in down.shape[1:]):
            return False
        if device.type != "cuda":
            return True
        return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in FAST_GPUS

    def _grouped(
        self,
        normed: Float[Tensor, "R H"],
        weights: Float[Tensor, "R k"],
        chosen: Int[Tensor, "R k"],
    ) -> Float[Tensor, "R H"]:
        """Let each expert multiply the rows that chose it."""
        # Sort the pairs (row, choice) by expert.
        by_expert, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(len(self.down), device=normed.device)
        ends = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)

        gathered = normed[order // self.top_k]
        if self.scales_inputs:
            gathered = gathered * weights.flatten()[order, None]
            weights = torch.ones_like(weights)
        gate_up = cast(Tensor, self.gate_up).transpose(1, 2)
        down = cast(Tensor, self.down).transpose(1, 2)
        both = grouped_mm(gathered, gate_up, offs=ends)
        inner = self.ops.silu_mul(both)
        sorted_outputs = grouped_mm(inner, down, offs=ends)

        # Restore the order of the pairs, in which each row adds up its choices.
        outputs = torch.empty_like(sorted_outputs).index_copy_(0, order, sorted_outputs)
        weighted = outputs.view(len(normed), self.top_k, -1) * weights[:, :, None]
        return weighted.sum(1, dtype=torch.float32).to(normed.dtype)

    def _every_expert(
        self,
        normed: Float[Tensor, "R H"],
        weights: Float[Tensor, "R k"],
        chosen: Int[Tensor, "R k"],
    ) -> Float[Tensor, "R H"]:
        """Let every expert multiply every row, some experts at a time, and weigh those that were not chosen by 0."""
        num_experts, hidden_size, _ = self.down.shape
        num_rows = len(normed)
        weights_by_expert = weights.new_zeros(num_rows, num_experts).scatter_(1, chosen, weights)
        total = normed.new_zeros(num_rows, hidden_size, dtype=torch.float32)

        # As many experts at a time as their products fit into MAX_NUMBERS.
        together = max(MAX_NUMBERS // (num_rows * self.gate_up.shape[1]), 1)
        gate_ups = cast(Tensor, self.gate_up).split(together)
        downs = cast(Tensor, self.down).split(together)
        shares = weights_by_expert.T.split(together)
        for gate_up, down, share in zip(gate_ups, downs, shares, strict=True):
            share = share[:, :, None]
            rows = normed * share if self.scales_inputs else normed
            both = torch.matmul(rows, gate_up.transpose(1, 2))
            inner = self.ops.silu_mul(both.flatten(0, 1))
            inner = inner.view(*both.shape[:2], -1)
            outputs = torch.bmm(inner, down.transpose(1, 2))
            outputs = outputs.masked_fill_(share == 0, 0.0)  # 0 times infinity is not 0
            weighted = outputs if self.scales_inputs else outputs * share
            total += weighted.sum(0, dtype=torch.float32)
        return total.to(normed.dtype)


def _stacks_of(experts: nn.Module) -> tuple[Tensor | Fp8Stack, Tensor | Fp8Stack]:
    """Return the weights of gate and up, and of down, of a block's experts."""
    if isinstance(experts, Fp8Experts):
        return experts.gate_up, experts.down
    stacked = cast(Any, experts)
    return stacked.gate_up_proj.detach(), stacked.down_proj.detach()


def is_moe_block(module: nn.Module) -> bool:
    """Return whether Experts can run this module of a decoder layer, or a rank's part of it."""
    block = cast(Any, _block_of(module))
    if type(block).__name__ not in MIXTURE_OF_BLOCK:
        return False
    names = {name for name, _ in block.experts.named_parameters()}
    if names != {"gate_up_proj", "down_proj"} and not isinstance(block.experts, Fp8Experts):
        return False
    gate = getattr(block, "shared_expert_gate", None)
    return gate is None or is_projection(gate)


def shared_expert_of(module: nn.Module) -> nn.Module | None:
    """Return the expert that every row goes through, of a module for which is_moe_block is true."""
    return getattr(_block_of(module), "shared_expert", None)


def _block_of(module: nn.Module) -> nn.Module:
    """Return the block of transformers in a module that may add up the blocks of several ranks."""
    return module.part if isinstance(module, ReducedBlock) else module


def _router_of(block: Any, module: nn.Module) -> Projection:
    """Return the router as a linear layer, joined with the gate of the shared expert if there is one."""
    weight = cast(Any, module).weight
    with torch.device("meta"):
        router = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    router.weight = weight
    gate = getattr(block, "shared_expert_gate", None)
    return router if gate is None else merge_linears([router, gate])
