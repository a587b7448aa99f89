"""Prefill over many prompt lengths: is the first call at a length slower than the second one?

    time_prefill(shape, dtype, device, findings, lengths)

cuDNN's attention may build a plan for each length. So attention alone and whole prompts are timed at every length, the
first call and the second one, with cuDNN's attention allowed and without it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from eagle_ray.attention.metadata import AttentionParams, causal_attention
from eagle_ray.models.target import PromptBatch, TargetModel
from jobs.bench.embedding_map import ModelShape
from jobs.bench.gpu.device import synchronize
from jobs.bench.gpu.findings import Findings
from jobs.bench.gpu.kernel_counts import count_kernels
from jobs.bench.gpu.plain_rig import random_model

NUM_LENGTHS = 20
WARM_UP_LENGTH = 40  # none of the lengths: what every length shares is compiled here
SLOW = 2.0  # times the second call: the first call then did something that it keeps for the length
LENGTH_SETS = {"cuDNN allowed": 0, "without cuDNN": 1, "cuDNN only": 2}  # different lengths, so that none is known


def prompt_lengths(longest: int, shift: int) -> list[int]:
    """Return NUM_LENGTHS uneven lengths up to `longest`. shift: another set of lengths."""
    step = longest // NUM_LENGTHS
    return [step * (i + 1) - 3 * (i % 4) - shift for i in range(NUM_LENGTHS)]


@contextmanager
def cudnn(variant: str) -> Iterator[None]:
    """Allow, forbid or force cuDNN's attention."""
    backends = torch.backends.cuda
    before = {
        "flash": backends.flash_sdp_enabled(),
        "mem_efficient": backends.mem_efficient_sdp_enabled(),
        "math": backends.math_sdp_enabled(),
        "cudnn": backends.cudnn_sdp_enabled(),
    }
    wanted = dict(before)
    if variant == "without cuDNN":
        wanted["cudnn"] = False
    elif variant == "cuDNN only":
        wanted = dict.fromkeys(before, False) | {"cudnn": True}
    _enable(wanted)
    try:
        yield
    finally:
        _enable(before)


def _enable(wanted: dict[str, bool]) -> None:
    for name, is_enabled in wanted.items():
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(is_enabled)


@torch.inference_mode()
def time_attention(
    shape: ModelShape, dtype: torch.dtype, device: torch.device, findings: Findings, longest: int
) -> None:
    """Add a finding for each variant: SDPA alone, one layer of the shape."""
    params = AttentionParams(0, shape.head_dim**-0.5)

    def attention_over(length: int) -> Callable[[], object]:
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        query, key, value = (torch.randn(1, n, length, shape.head_dim, dtype=dtype, device=device) for n in heads)
        return lambda: causal_attention(query, key, value, params)

    for variant, shift in _variants(device).items():
        _time_variant("attention prefill", variant, attention_over, prompt_lengths(longest, shift), device, findings)


@torch.inference_mode()
def time_prompts(shape: ModelShape, dtype: torch.dtype, device: torch.device, findings: Findings, longest: int) -> None:
    """Add a finding for each variant: a whole prompt through all layers."""
    target = TargetModel(random_model(shape, dtype, device), 1, longest + 1)
    target.cache.blocks.reserve(0, longest)
    generator = torch.Generator().manual_seed(0)

    def prompt_of(length: int) -> Callable[[], object]:
        ids = torch.randint(shape.vocab_size, (1, length), generator=generator).tolist()
        prompts = PromptBatch.of([0], ids, device)
        return lambda: target.prefill(prompts)

    for variant, shift in _variants(device).items():
        if variant != "cuDNN only":
            _time_variant("prompt prefill", variant, prompt_of, prompt_lengths(longest, 4 + shift), device, findings)


def _variants(device: torch.device) -> dict[str, int]:
    return LENGTH_SETS if device.type == "cuda" else {"CPU": 0}


def _time_variant(
    kind: str,
    variant: str,
    call_of: Callable[[int], Callable[[], object]],
    lengths: list[int],
    device: torch.device,
    findings: Findings,
) -> None:
    """Time the first and the second call at each length. A variant that raises is a finding too."""
    try:
        with cudnn(variant):
            warm_up = call_of(WARM_UP_LENGTH)
            warm_up()
            warm_up()
            times = [_first_and_second(call_of(length), device) for length in lengths]
            kernel = count_kernels(call_of(lengths[-1]), device).top(1)
    except RuntimeError as error:
        findings.add(kind, variant=variant, failed=str(error).splitlines()[0][:300])
        return
    first, second = zip(*times, strict=True)
    slower = [length for length, (a, b) in zip(lengths, times, strict=True) if a > SLOW * b]
    findings.add(
        kind,
        variant=variant,
        lengths=f"{len(lengths)}, {min(lengths)} to {max(lengths)}",
        first_ms_median=1e3 * statistics.median(first),
        second_ms_median=1e3 * statistics.median(second),
        first_ms_max=1e3 * max(first),
        num_first_slower=len(slower),
        slower_lengths=slower,
        longest_kernel=kernel[0][0] if kernel else "",
        first_ms=[round(1e3 * seconds, 3) for seconds in first],
        second_ms=[round(1e3 * seconds, 3) for seconds in second],
    )


def _first_and_second(function: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return wall seconds of two calls, each until the device is done."""
    seconds = []
    for _ in range(2):
        synchronize(device)
        started = time.perf_counter()
        function()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return seconds[0], seconds[1]
