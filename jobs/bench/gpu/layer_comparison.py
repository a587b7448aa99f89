"""Our decoder layer compared with transformers': time, kernels and the largest difference.

    compare_layers(shape, dtype, device, findings, LayerCases(prompts=(64, 512), batches=(1, 64), cached=128))

A layer's time is what MANY layers take in addition to one, divided by their number. So neither the embedding nor the
lm_head is in it. Both sides run eagerly, on the weights of one module tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.models.target import PromptBatch, TargetModel
from eagle_ray.tree.draft_tree import DraftTree
from jobs.bench.embedding_map import ModelShape
from jobs.bench.gpu.device import release, seconds_of
from jobs.bench.gpu.findings import Findings
from jobs.bench.gpu.kernel_counts import count_kernels
from jobs.bench.gpu.plain_rig import random_model, with_layers

MANY = 5  # layers of the larger model
REPEATS = 10
Pass = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class LayerCases:
    """What is compared.

    Attributes:
        prompts: lengths of prompts, each prefilled in a pass of its own.
        batches: sequences that decode one token each.
        cached: tokens that each of those sequences has in the cache.
    """

    prompts: tuple[int, ...]
    batches: tuple[int, ...]
    cached: int


@dataclass(slots=True)
class LayerTimes:
    """One case: seconds and kernel seconds of a pass by (side, number of layers), and the difference of MANY layers."""

    seconds: dict[tuple[str, int], float] = field(default_factory=dict)
    kernel_seconds: dict[tuple[str, int], float] = field(default_factory=dict)
    kernels: dict[tuple[str, int], int] = field(default_factory=dict)
    difference: float = 0.0
    unit: str = ""


@torch.inference_mode()
def compare_layers(
    shape: ModelShape, dtype: torch.dtype, device: torch.device, findings: Findings, cases: LayerCases
) -> None:
    """Add a finding for each case."""
    times: dict[str, LayerTimes] = {}
    for num_layers in (1, MANY):
        model = random_model(with_layers(shape, num_layers), dtype, device)
        target = TargetModel(model, max(cases.batches), max(*cases.prompts, cases.cached) + 1)
        model.set_attn_implementation("sdpa")
        for length in cases.prompts:
            ours, theirs = prefill_passes(target, model, length)
            _measure(times.setdefault(f"prompt of {length}", LayerTimes()), num_layers, ours, theirs, device)
        for batch in cases.batches:
            ours, theirs = decode_passes(target, model, batch, cases.cached)
            name = f"decode, batch {batch}, {cases.cached} cached"
            _measure(times.setdefault(name, LayerTimes()), num_layers, ours, theirs, device)
        del model, target, ours, theirs
        release(device)
    for name, measured in times.items():
        findings.add("decoder layer", **_summary(name, measured))


def _measure(times: LayerTimes, num_layers: int, ours: Pass, theirs: Pass, device: torch.device) -> None:
    expected, got = theirs().float(), ours().float()
    times.difference = ((got - expected).abs().max() / expected.abs().max()).item()
    for side, function in (("ours", ours), ("transformers", theirs)):
        times.seconds[side, num_layers] = seconds_of(function, device, REPEATS)
        counts = count_kernels(function, device)
        times.kernel_seconds[side, num_layers] = counts.seconds
        times.kernels[side, num_layers] = counts.num
        times.unit = counts.unit


def _summary(name: str, times: LayerTimes) -> dict[str, object]:
    found: dict[str, object] = {"case": name}
    for side in ("ours", "transformers"):
        found[f"{side}_eager_ms"] = 1e3 * _per_layer(times.seconds, side)
        found[f"{side}_kernels_ms"] = 1e3 * _per_layer(times.kernel_seconds, side)
        found[f"{side}_count"] = _per_layer(times.kernels, side)
    return found | {"counted": times.unit, f"max_difference_{MANY}_layers_relative": times.difference}


def _per_layer(values: dict[tuple[str, int], float], side: str) -> float:
    return (values[side, MANY] - values[side, 1]) / (MANY - 1)


def prefill_passes(target: TargetModel, model: LlamaForCausalLM, length: int) -> tuple[Pass, Pass]:
    """Return both sides' pass over one prompt, which yields the logits after its last token."""
    ids = _random_ids(model, 1, length)
    prompts = PromptBatch.of([0], ids.tolist(), target.device)
    target.cache.blocks.reserve(0, length)
    return (
        lambda: target.prefill(prompts).logits,
        lambda: model(ids, use_cache=False, logits_to_keep=1).logits[:, -1],
    )


def decode_passes(target: TargetModel, model: LlamaForCausalLM, batch: int, cached: int) -> tuple[Pass, Pass]:
    """Return both sides' pass over one token of each sequence, behind `cached` tokens that each side has prefilled."""
    ids, roots = _random_ids(model, batch, cached), _random_ids(model, batch, 1)
    slots = list(range(batch))
    for slot in slots:
        target.cache.blocks.reserve(slot, cached + 1)
        target.prefill(PromptBatch.of([slot], ids[slot : slot + 1].tolist(), target.device))
    past = DynamicCache(config=model.config)
    model(ids, past_key_values=past, logits_to_keep=1)

    tree = DraftTree.of_roots(roots[:, 0])
    lengths = DecodeSlots.of(slots, [cached] * batch, target.device)
    rows = tree.pack(lengths.lengths, batch)

    def theirs() -> Tensor:
        logits = model(roots, past_key_values=past).logits[:, -1]
        past.crop(-1)
        return logits

    return lambda: target.verify(tree, rows, lengths, 0).logits, theirs


def _random_ids(model: LlamaForCausalLM, batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(model.config.vocab_size, (batch, length), generator=generator).to(model.device)
