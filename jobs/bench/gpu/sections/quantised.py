"""The section of quantised weights and caches, in a process of its own.

    python3 -m jobs.bench.gpu.sections.quantised quantised --out DIR [--smoke]

    quantised     a Llama 8B's shape in bf16, in FP8, in FP8 with a cache in FP8, and in 4 bits: a plain step's time and
                  kernels by number of sequences, and whether a row has the same bits alone as within a tree

Weights are random and made on the device, one model after the other. A CPU has no product of 4
bits: --smoke leaves that one out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.models.gpu_linears import Int4Linear, quantize_fp8
from eagle_ray.models.loader import decoder_layers
from eagle_ray.models.packed_linear import pack_linears
from eagle_ray.models.quantized_linear import QuantizedWeight
from eagle_ray.models.target import PromptBatch, TargetModel
from eagle_ray.tree.draft_tree import DraftTree
from jobs.bench.gpu.device import GIB, peak_gib, release
from jobs.bench.gpu.findings import Findings
from jobs.bench.gpu.isolated_runs import measurement_parser
from jobs.bench.gpu.random_models import MAX_MODEL_LEN, random_model, step_figures
from jobs.bench.gpu.sections.kernels import FINDINGS, Scale

FP8 = torch.float8_e4m3fn
GROUP = 128  # inputs that share a scale, as published checkpoints of 4 bits have it
CACHED = 128  # tokens before the rows that are compared
TREE_ROWS = (4, 32)
TOP_KERNELS = 12


def to_fp8(layer: nn.Module) -> None:
    quantize_fp8(layer)


def to_int4(layer: nn.Module) -> None:
    """Replace every linear layer by one of random codes of 4 bits."""
    for name, linear in list(layer.named_modules()):
        if not isinstance(linear, nn.Linear):
            continue
        shape = linear.out_features, linear.in_features
        groups = linear.in_features // GROUP
        codes = torch.randint(16, shape, dtype=torch.uint8, device=linear.weight.device)
        scale = torch.full((shape[0], groups), 2e-3, device=codes.device)
        weight = QuantizedWeight(codes, scale, -8 * scale, bits=4)
        parent, _, own = name.rpartition(".")
        setattr(layer.get_submodule(parent), own, Int4Linear(weight))


KINDS: dict[str, tuple[Callable[[nn.Module], None] | None, torch.dtype | None]] = {
    "bf16": (None, None),
    "fp8": (to_fp8, None),
    "fp8, cache in fp8": (to_fp8, FP8),
    "int4": (to_int4, None),
}  # what becomes of a layer, and the cache's dtype


def measure_quantised(scale: Scale, findings: Findings) -> None:
    """Add the steps and the compared rows of each kind; one that fails is a finding, and the next one runs."""
    for name, (change, kv_dtype) in KINDS.items():
        if scale.is_smoke and change is to_int4:
            continue
        try:
            measure_kind(scale, findings, name, change, kv_dtype)
        except RuntimeError as error:
            findings.add("quantised", weights=name, failed=str(error).splitlines()[0][:300])
        release(scale.device)


def measure_kind(
    scale: Scale,
    findings: Findings,
    name: str,
    change: Callable[[nn.Module], None] | None,
    kv_dtype: torch.dtype | None,
) -> None:
    model = random_model(scale.shape, scale.dtype, scale.device)
    for layer in decoder_layers(model) if change is not None else []:
        change(layer)
        release(scale.device)
    pack_linears(model)
    num_bytes = sum(x.nbytes for x in [*model.parameters(), *model.buffers()])
    findings.add(
        "quantised model",
        weights=name,
        weights_gib=num_bytes / GIB,
        peak_gib=peak_gib(scale.device),
    )
    make_target = partial(TargetModel, model, kv_dtype=kv_dtype)
    for batch in (1, 4) if scale.is_smoke else (1, 16, 33, 64, 256):
        time_steps(scale, findings, name, make_target(batch, MAX_MODEL_LEN), batch)
        release(scale.device)
    compare_rows(findings, name, make_target(1, MAX_MODEL_LEN))


def time_steps(
    scale: Scale, findings: Findings, name: str, target: TargetModel, batch: int
) -> None:
    """Add a plain step's figures, and for one sequence its kernels."""
    figures, counts = step_figures(target, batch, 4 if scale.is_smoke else 40)
    findings.add("quantised", weights=name, **figures)
    for kernel, calls, microseconds in counts.top(TOP_KERNELS if batch == 1 else 0):
        findings.add(
            "quantised kernel", weights=name, kernel=kernel, calls=calls, microseconds=microseconds
        )


@torch.inference_mode()
def compare_rows(findings: Findings, name: str, target: TargetModel) -> None:
    """Add how far the logits of a tree's root are from those of the same row alone."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (CACHED + max(TREE_ROWS),), generator=generator).tolist()
    target.cache.blocks.reserve(0, CACHED + max(TREE_ROWS))
    target.prefill(PromptBatch.of([0], [ids[:CACHED]], target.device))
    alone = root_logits(target, ids[CACHED : CACHED + 1])
    for num_rows in TREE_ROWS:
        found = root_logits(target, ids[CACHED : CACHED + num_rows])
        findings.add(
            "row in a tree",
            weights=name,
            rows=num_rows,
            same_bits=torch.equal(found, alone),
            max_difference=(found - alone).abs().max().item(),
            same_token=bool(found.argmax() == alone.argmax()),
        )


def root_logits(target: TargetModel, chain: list[int]) -> torch.Tensor:
    """Return the logits of the first token of a chain, which is verified in one pass."""
    tokens = torch.tensor([chain], device=target.device)
    depths = torch.arange(len(chain), device=target.device)[None]
    zeros = torch.zeros_like(depths, dtype=torch.float32)
    tree = DraftTree(
        tokens, depths - 1, depths, zeros, zeros, torch.ones_like(depths, dtype=torch.bool)
    )
    at = DecodeSlots.of([0], [CACHED], target.device)
    rows = tree.pack(at.lengths, len(chain))
    return target.verify(tree, rows, at, len(chain) - 1).logits[0].float()


SECTIONS: dict[str, Callable[[Scale, Findings], None]] = {"quantised": measure_quantised}


def main() -> None:
    args = measurement_parser("Quantised weights and caches.", SECTIONS).parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    SECTIONS[args.name](Scale.of(args.smoke), Findings(args.out, FINDINGS))


if __name__ == "__main__":
    main()
