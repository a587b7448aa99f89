"""Sections of the second script for a lent GPU that time parts of a pass, each in a process of its own.

    python3 -m jobs.bench.gpu.sections.kernels NAME --out DIR [--smoke]

    work-list     whether attention over one long context among short ones ends, and gives the same bits again
    attention     tree attention of an 8B's layer: rows of a tree, context and batch, long contexts among short ones,
                  plain rows by torch's `varlen_attn`, and whether repeats and other batches give the same bits
    products      bf16, and `scaled_mm` with a scale for each row and each column, in an 8B's four shapes
    prefill       prompt tokens per second: one long prompt, some, many short ones, one in chunks
    moe           two layers of Qwen3-30B-A3B's shape: are their steps captured, and what does a step cost

Weights and caches are random and made on the device; with --smoke all is tiny and on a CPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import ScalingType, scaled_mm

from eagle_ray.attention.backend import tree_metadata
from eagle_ray.attention.metadata import AttentionMetadata, AttentionParams, AttentionShape, Rotary
from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.kv.block_manager import BLOCK_SIZE, BlockManager
from eagle_ray.kv.kv_cache import KVCache
from eagle_ray.models.packed_linear import pack_linears
from eagle_ray.models.target import PromptBatch, TargetModel
from jobs.bench.embedding_map import ModelShape
from jobs.bench.gpu.device import GIB, peak_gib, release, seconds_of, synchronize
from jobs.bench.gpu.findings import Findings
from jobs.bench.gpu.isolated_runs import measurement_parser
from jobs.bench.gpu.random_models import SHAPES, TINY, random_model, random_weights, step_figures
from jobs.bench.widening import seeded

FINDINGS = "second_light"
REPEATS = 12
MOST_CELLS = 5_000_000  # cached tokens of one layer: 20 GB of an 8B's keys and values
COPIES = 20  # calls of attention in one graph
ROTATED_BYTES = (
    100 << 20
)  # of weights in FP8 that a product reads in turn: more than a card's cache holds
FP8_MAX = 448.0  # of float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Scale:
    """What the sections run on."""

    device: torch.device
    dtype: torch.dtype
    shape: ModelShape
    is_smoke: bool

    @classmethod
    def of(cls, is_smoke: bool) -> Scale:
        if is_smoke:
            return cls(torch.device("cpu"), torch.float32, TINY, True)
        return cls(torch.device("cuda"), torch.bfloat16, SHAPES["8b"], False)


# Attention


def measure_attention(scale: Scale, findings: Findings) -> None:
    """Add the time of one layer's attention for each number of rows, context and batch size."""
    contexts = [64, 128] if scale.is_smoke else [1024, 16384, 65536]
    row_counts = [1, 4] if scale.is_smoke else [1, 4, 16, 32, 64]
    for batch in (1, 2) if scale.is_smoke else (1, 64):
        for context in contexts:
            if batch * (context + 64) <= MOST_CELLS:
                _time_contexts(
                    scale, findings, [context] * batch, row_counts, f"{batch} x {context}"
                )
    others = 3 if scale.is_smoke else 63
    uneven = [contexts[-1], *[contexts[0]] * others]
    mixed = [contexts[0] // 4 + i * contexts[-1] // (4 * others) for i in range(others + 1)]
    _time_contexts(
        scale,
        findings,
        uneven,
        row_counts[:3],
        f"one of {contexts[-1]} among {others} of {contexts[0]}",
    )
    _time_contexts(
        scale, findings, mixed, row_counts[:3], f"{len(mixed)} from {mixed[0]} to {mixed[-1]}"
    )


@torch.inference_mode()
def measure_work_list(scale: Scale, findings: Findings) -> None:
    """Add whether attention by its work list ends, and with which bits: the first thing that a card is asked."""
    long, short, others = (128, 64, 3) if scale.is_smoke else (16384, 1024, 63)
    lengths = [long, *[short] * others]
    cache = _random_cache(scale, lengths)
    rows = _random_rows(scale, 4 * len(lengths))
    _compare_bits(
        scale, findings, cache, lengths, 4, rows, f"one of {long} among {others} of {short}"
    )


def _random_cache(scale: Scale, lengths: list[int]) -> KVCache:
    """Return a layer's cache whose slots have these lengths, with room for a tree of 64 in each."""
    shape, device = scale.shape, scale.device
    num_blocks = sum(-(-(length + 64) // BLOCK_SIZE) for length in lengths)
    blocks = BlockManager(len(lengths), max(lengths) + 2 * BLOCK_SIZE, num_blocks, device)
    for slot, length in enumerate(lengths):
        blocks.reserve(slot, length + 64)
    blocks.sync_table()
    cache = KVCache(blocks, 1, shape.num_kv_heads, shape.head_dim, scale.dtype, device)
    cache.keys.normal_()
    cache.values.normal_()
    return cache


@torch.inference_mode()
def _time_contexts(
    scale: Scale, findings: Findings, lengths: list[int], row_counts: list[int], name: str
) -> None:
    shape, device = scale.shape, scale.device
    cache = _random_cache(scale, lengths)
    read = 2 * sum(lengths) * shape.num_kv_heads * shape.head_dim * cache.keys.dtype.itemsize
    for num_rows in row_counts:
        rows = _random_rows(scale, len(lengths) * num_rows)
        seconds = _seconds_of_one(
            [_attend_projected(scale, cache, lengths, num_rows)] * COPIES, device
        )
        findings.add(
            "tree attention",
            contexts=name,
            rows=num_rows,
            ms=1e3 * seconds,
            gb_per_s=read / seconds / 1e9,
            tflops=4 * sum(lengths) * num_rows * shape.num_heads * shape.head_dim / seconds / 1e12,
        )
        if len(set(lengths)) > 1:
            _compare_bits(scale, findings, cache, lengths, num_rows, rows, name)
    _time_varlen(scale, findings, lengths, name)


def _compare_bits(
    scale: Scale,
    findings: Findings,
    cache: KVCache,
    lengths: list[int],
    num_rows: int,
    rows: list[torch.Tensor],
    name: str,
) -> None:
    """Add how many repeats differ from the first in any bit, and whether the first context's rows are as alone."""
    attend = _attend(scale, cache, lengths, num_rows, rows)
    first = attend()
    repeats = [attend() for _ in range(2 if scale.is_smoke else 50)]
    alone = _attend(scale, cache, lengths[:1], num_rows, [each[:, :, :num_rows] for each in rows])()
    findings.add(
        "attention bits",
        contexts=name,
        rows=num_rows,
        repeats=len(repeats),
        differing=sum(not torch.equal(first, again) for again in repeats),
        as_alone=torch.equal(first[:, :, :num_rows], alone),
    )


def _random_rows(scale: Scale, size: int) -> list[torch.Tensor]:
    """Return queries, keys and values [1, heads, size, d]."""
    shape = scale.shape
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    return [
        torch.randn(1, n, size, shape.head_dim, dtype=scale.dtype, device=scale.device)
        for n in heads
    ]


def _attend(
    scale: Scale, cache: KVCache, lengths: list[int], num_rows: int, rows: list[torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """Return the attention of a chain of num_rows rows behind each context."""
    metadata = _metadata(scale, cache, lengths, num_rows)
    rule = AttentionParams(0, scale.shape.head_dim**-0.5)
    return lambda: metadata.attend(*rows, rule)


def _attend_projected(
    scale: Scale, cache: KVCache, lengths: list[int], num_rows: int
) -> Callable[[], torch.Tensor]:
    """Return the same from a merged projection, rotation and the cache's new rows included, as a layer asks for it."""
    shape, size = scale.shape, len(lengths) * num_rows
    metadata = _metadata(scale, cache, lengths, num_rows)
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    qkv = torch.randn(size, width, dtype=scale.dtype, device=scale.device)
    angles = torch.rand(size, shape.head_dim // 2, device=scale.device)
    rotary = Rotary(angles.cos(), angles.sin())
    heads = AttentionShape(
        0, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim**-0.5
    )
    return lambda: metadata.attend_projected(qkv, rotary, heads)


def _metadata(scale: Scale, cache: KVCache, lengths: list[int], num_rows: int) -> AttentionMetadata:
    device, batch = scale.device, len(lengths)
    at = DecodeSlots.of(list(range(batch)), lengths, device)
    ancestors = (
        torch.ones(num_rows, num_rows, dtype=torch.bool, device=device).tril().expand(batch, -1, -1)
    )
    depths = torch.arange(num_rows, device=device).expand(batch, -1).contiguous()
    columns = (at.lengths[:, None] + depths).flatten()
    cells = cache.slot_mapping(at.slots.repeat_interleave(num_rows), columns)
    return tree_metadata(cache, at, cells, ancestors.contiguous(), depths, depths)


def _seconds_of_one(calls: list[Callable[[], Any]], device: torch.device) -> float:
    """Return the seconds of one of the calls, which run after one another in a CUDA graph.

    The time of a graph with one call is subtracted, so a graph's own launch is not in it. On a CPU
    calls just run.
    """
    if device.type != "cuda":
        return seconds_of(lambda: [call() for call in calls], device, REPEATS) / len(calls)
    first, *rest = calls
    alone = seconds_of(_replayed([first]), device, REPEATS)
    together = seconds_of(_replayed([first, *rest]), device, REPEATS)
    return max(together - alone, 1e-9) / len(rest)


def _replayed(calls: list[Callable[[], Any]]) -> Callable[[], None]:
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def _time_varlen(scale: Scale, findings: Findings, lengths: list[int], name: str) -> None:
    """Time torch's attention over keys that lie together, one row for each context."""
    if scale.device.type != "cuda":
        return
    from torch.nn.attention.varlen import varlen_attn

    shape, total = scale.shape, sum(lengths)
    made = dict(dtype=scale.dtype, device=scale.device)
    query = torch.randn(len(lengths), shape.num_heads, shape.head_dim, **made)
    keys, values = (
        torch.randn(total, shape.num_kv_heads, shape.head_dim, **made) for _ in range(2)
    )
    row_ends = torch.arange(len(lengths) + 1, dtype=torch.int32, device=scale.device)
    key_ends = torch.tensor(
        [0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=scale.device
    )

    def call() -> torch.Tensor:
        return varlen_attn(
            query, keys, values, row_ends, key_ends, 1, max(lengths), window_size=(-1, 0)
        )

    try:
        seconds = seconds_of(call, scale.device, REPEATS)
    except (RuntimeError, TypeError, ValueError) as error:
        findings.add("varlen attention", contexts=name, failed=str(error).splitlines()[0][:200])
        return
    read = 2 * total * shape.num_kv_heads * shape.head_dim * keys.dtype.itemsize
    findings.add(
        "varlen attention", contexts=name, rows=1, ms=1e3 * seconds, gb_per_s=read / seconds / 1e9
    )


# Products


def measure_products(scale: Scale, findings: Findings) -> None:
    """Add the time of each product of a layer by its rows."""
    shape = scale.shape
    merged = shape.head_dim * (shape.num_heads + 2 * shape.num_kv_heads)
    layers = {
        "qkv": (shape.hidden_size, merged),
        "o": (shape.head_dim * shape.num_heads, shape.hidden_size),
        "gate_up": (shape.hidden_size, 2 * shape.intermediate_size),
        "down": (shape.intermediate_size, shape.hidden_size),
    }
    for name, (width, height) in layers.items():
        for rows in (1, 4) if scale.is_smoke else (1, 4, 16, 64, 256, 1024):
            _time_product(scale, findings, name, rows, width, height)


def _time_product(
    scale: Scale, findings: Findings, name: str, rows: int, width: int, height: int
) -> None:
    """Add the times of one product. Weights take turns, so that each is read from memory and not from a cache."""
    x = torch.randn(rows, width, dtype=scale.dtype, device=scale.device)
    count = 2 if scale.is_smoke else max(2, 1 + ROTATED_BYTES // (width * height))
    weights = [
        torch.randn(height, width, dtype=scale.dtype, device=scale.device) for _ in range(count)
    ]
    plain = _seconds_of_one(
        [partial(nn.functional.linear, x, weight) for weight in weights], scale.device
    )
    found: dict[str, Any] = {"bf16_ms": 1e3 * plain}
    if scale.device.type == "cuda":
        try:
            found |= _fp8_times(scale.device, x, weights, plain)
        except RuntimeError as error:
            found["failed"] = str(error).splitlines()[0][:200]
    findings.add("product", layer=name, rows=rows, **found)


def _fp8_times(
    device: torch.device, x: torch.Tensor, weights: list[torch.Tensor], plain: float
) -> dict[str, float]:
    """Time the product alone, and with the rounding of its rows before it."""
    rounded = [_rounded(weight) for weight in weights]
    by_row = ScalingType.RowWise

    def product(
        rows: torch.Tensor, scales: torch.Tensor, weight: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        values, scale = weight
        return scaled_mm(
            rows, values.t(), scales, by_row, scale.t(), by_row, output_dtype=torch.bfloat16
        )

    rows, scales = _rounded(x)
    alone = _seconds_of_one([partial(product, rows, scales, weight) for weight in rounded], device)
    both = _seconds_of_one(
        [lambda weight=weight: product(*_rounded(x), weight) for weight in rounded], device
    )
    return {"fp8_ms": 1e3 * alone, "fp8_rounding_ms": 1e3 * both, "bf16_over_fp8": plain / alone}


def _rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row in FP8 and its scale [rows, 1]."""
    scales = (x.abs().amax(1, keepdim=True).float() / FP8_MAX).clamp(min=1e-12)
    return (x.float() / scales).to(torch.float8_e4m3fn), scales


# Prefill


@torch.inference_mode()
def measure_prefill(scale: Scale, findings: Findings) -> None:
    """Add prompt tokens per second of a whole model, by how a step's tokens are divided."""
    model = random_model(scale.shape, scale.dtype, scale.device)
    pack_linears(model)
    groups = [(1, 64), (2, 32)] if scale.is_smoke else [(1, 4096), (8, 512), (64, 64)]
    for number, length in groups:
        target = TargetModel(model, number, length + 1)
        for slot in range(number):
            target.cache.blocks.reserve(slot, length)
        prompts = PromptBatch.of(
            list(range(number)), [[1] * length for _ in range(number)], scale.device
        )
        seconds = seconds_of(lambda t=target, p=prompts: t.prefill(p), scale.device, 4)
        _add_prefill(findings, f"{number} x {length}", number * length, seconds, scale)
        del target
        release(scale.device)
    _time_chunks(scale, findings, model, *((128, 32) if scale.is_smoke else (32768, 4096)))


def _time_chunks(
    scale: Scale, findings: Findings, model: nn.Module, length: int, chunk: int
) -> None:
    """Time a long prompt in chunks, and its last chunk, which sees all of the others."""
    target = TargetModel(model, 1, length + 1)
    target.cache.blocks.reserve(0, length)
    seconds = []
    for _ in range(2):
        for start in range(0, length, chunk):
            prompts = PromptBatch.of([0], [[1] * chunk], scale.device, [start])
            synchronize(scale.device)
            started = time.perf_counter()
            target.prefill(prompts)
            synchronize(scale.device)
            seconds.append(time.perf_counter() - started)
    second = seconds[len(seconds) // 2 :]
    _add_prefill(findings, f"{length} in chunks of {chunk}", length, sum(second), scale)
    _add_prefill(findings, f"the last chunk of {length}", chunk, second[-1], scale)


def _add_prefill(findings: Findings, name: str, tokens: int, seconds: float, scale: Scale) -> None:
    flops = 2 * tokens * scale.shape.num_layers * scale.shape.layer_weights
    findings.add(
        "prefill",
        prompts=name,
        ms=1e3 * seconds,
        tokens_per_second=tokens / seconds,
        tflops=flops / seconds / 1e12,
        peak_gib=peak_gib(scale.device),
    )


# Mixture of experts


def measure_moe(scale: Scale, findings: Findings) -> None:
    """Add the time of a step of two layers at several batch sizes, and whether it is replayed."""
    model = _moe_model(scale)
    weights_gib = sum(p.nbytes for p in model.parameters()) / GIB
    for batch in (1, 2) if scale.is_smoke else (1, 16, 64):
        figures, _ = step_figures(
            TargetModel(model, batch, 2048), batch, 4 if scale.is_smoke else 60
        )
        findings.add(
            "moe", layers=model.config.num_hidden_layers, weights_gib=weights_gib, **figures
        )
        release(scale.device)


def _moe_model(scale: Scale) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = (
        (64, 4, 2, 16, 32, 8, 2, 300) if scale.is_smoke else (2048, 32, 4, 128, 768, 128, 8, 151936)
    )
    hidden, heads, kv_heads, head_dim, expert, experts, chosen, vocab = sizes
    config = Qwen3MoeConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        moe_intermediate_size=expert,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_experts=experts,
        num_experts_per_tok=chosen,
        norm_topk_prob=True,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = random_weights(Qwen3MoeForCausalLM, config, scale.dtype, scale.device)
    with seeded(0, scale.device), torch.no_grad():
        for parameter in model.parameters():  # experts' tensors are made empty
            if parameter.ndim > 1:
                parameter.normal_(std=0.02)
    return model


SECTIONS: dict[str, Callable[[Scale, Findings], None]] = {
    "work-list": measure_work_list,
    "attention": measure_attention,
    "products": measure_products,
    "prefill": measure_prefill,
    "moe": measure_moe,
}


def main() -> None:
    args = measurement_parser("One section of a pass's parts.", SECTIONS).parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    SECTIONS[args.name](Scale.of(args.smoke), Findings(args.out, FINDINGS))


if __name__ == "__main__":
    main()
