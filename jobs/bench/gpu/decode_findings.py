"""Measurements of the second call, each in a process of its own.

    python3 -m jobs.bench.gpu.decode_findings NAME --out DIR

    graphs-1, graphs-64     seconds and memory of each capture; plain decoding by graphs and eagerly, and the roofline
    kernels                 kernels of a plain pass, and of one of its layers
    attention, prompts      first and second prefill at 20 lengths, with and without cuDNN
    layers                  our decoder layer and transformers'

The model has a Llama 8B's shape and random weights, made on the device; with --smoke it is tiny and on a CPU.
"""

from __future__ import annotations

import logging
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle_ray.engine.engine import Engine
from eagle_ray.models.graphs import CudaGraphRunner
from eagle_ray.models.target import TargetModel
from jobs.bench.embedding_map import ModelShape
from jobs.bench.gpu.device import copy_bandwidth, peak_gib, release, step_bytes
from jobs.bench.gpu.findings import Findings
from jobs.bench.gpu.isolated_runs import IsolatedRun, measurement_parser
from jobs.bench.gpu.kernel_counts import KernelCounts, count_kernels
from jobs.bench.gpu.layer_comparison import LayerCases, compare_layers
from jobs.bench.gpu.plain_rig import (
    MAX_MODEL_LEN,
    PROMPT_TOKENS,
    MeasuredGraphRunner,
    abort_all,
    add_sequences,
    plain_engine,
    random_model,
    seconds_per_step,
    step_until,
    with_layers,
)
from jobs.bench.gpu.prefill_timing import time_attention, time_prompts
from jobs.bench.gpu.settings import SHAPES
from jobs.bench.gpu.settings import TINY as SMOKE_SHAPE

FINDINGS = "decode"  # name of the findings file
COPIED_BYTES = {"cpu": 1 << 26, "cuda": 1 << 32}
WARM_TOKENS = 6  # of each sequence, before steps are timed
LIMIT_S = 150.0


@dataclass(frozen=True, slots=True)
class DecodeScale:
    """How much is measured.

    Attributes:
        windows, steps: timed windows of plain decoding, and steps of each.
        longest_prompt: of the prefill lengths.
    """

    shape: ModelShape
    dtype: torch.dtype
    device: torch.device
    windows: int
    steps: int
    longest_prompt: int
    layer_cases: LayerCases

    @classmethod
    def of(cls, is_smoke: bool) -> DecodeScale:
        if is_smoke:
            cases = LayerCases((16,), (1, 4), 16)
            return cls(SMOKE_SHAPE, torch.float32, torch.device("cpu"), 2, 3, 400, cases)
        cases = LayerCases((64, 512, 2048), (1, 64), 128)
        return cls(SHAPES["8b"], torch.bfloat16, torch.device("cuda"), 3, 40, 2000, cases)


def measure_graphs(scale: DecodeScale, findings: Findings, batch: int) -> None:
    """Add each capture, then plain decoding with graphs and without them against the roofline."""
    bandwidth = copy_bandwidth(scale.device, COPIED_BYTES[scale.device.type])
    release(scale.device)
    findings.add("copy bandwidth", gb_per_s=bandwidth / 1e9)
    target = TargetModel(random_model(scale.shape, scale.dtype, scale.device), batch, MAX_MODEL_LEN)
    graphs = MeasuredGraphRunner(target, findings, batch)
    _measure_decoding(scale, findings, target, graphs, batch, bandwidth)
    findings.add("graph captures", batch=batch, summary=graphs.summary, peak_gib=peak_gib(scale.device))
    _measure_decoding(scale, findings, target, None, batch, bandwidth)


def _measure_decoding(
    scale: DecodeScale,
    findings: Findings,
    target: TargetModel,
    graphs: CudaGraphRunner | None,
    batch: int,
    bandwidth: float,
) -> None:
    engine = plain_engine(target, graphs)
    max_tokens = WARM_TOKENS + scale.windows * scale.steps + 8
    sequences = add_sequences(engine, batch, max_tokens)
    step_until(engine, sequences, WARM_TOKENS)
    windows = [seconds_per_step(engine, sequences, scale.steps) for _ in range(scale.windows)]
    abort_all(engine, sequences)

    seconds = statistics.median(windows)
    num_bytes = step_bytes(scale.shape, scale.dtype, batch, PROMPT_TOKENS + max_tokens / 2)
    findings.add(
        "plain decoding",
        batch=batch,
        steps="graphs" if graphs is not None and graphs.failure is None else "eager",
        step_ms=1e3 * seconds,
        step_ms_windows=[round(1e3 * s, 3) for s in windows],
        ms_per_token=1e3 * seconds / batch,
        tokens_per_second=batch / seconds,
        step_gb=num_bytes / 1e9,
        roofline_ms=1e3 * num_bytes / bandwidth,
        share_of_roofline=num_bytes / bandwidth / seconds,
    )


def count_pass_kernels(scale: DecodeScale, findings: Findings) -> None:
    """Add the kernels of an eager plain step at batch 1, and of each of its layers; on a GPU of a replayed one too."""
    few = _step_kernels(scale, 1, with_graphs=False)
    many = _step_kernels(scale, scale.shape.num_layers, with_graphs=False)
    per_layer = (many.num - few.num) / (scale.shape.num_layers - 1)
    findings.add(
        "kernels of a plain step",
        batch=1,
        steps="eager",
        counted=many.unit,
        per_step=many.num,
        layers=scale.shape.num_layers,
        per_layer=per_layer,
        outside_layers=many.num - per_layer * scale.shape.num_layers,
        copies=many.num_copies,
        busy_ms=1e3 * many.seconds,
    )
    _add_top_kernels(findings, many, "eager")
    replayed = _step_kernels(scale, scale.shape.num_layers, with_graphs=True)
    findings.add(
        "kernels of a plain step",
        batch=1,
        steps="graphs",
        counted=replayed.unit,
        per_step=replayed.num,
        layers=scale.shape.num_layers,
        copies=replayed.num_copies,
        busy_ms=1e3 * replayed.seconds,
    )
    _add_top_kernels(findings, replayed, "graphs")


def _add_top_kernels(findings: Findings, counts: KernelCounts, steps: str) -> None:
    for name, calls, microseconds in counts.top(12):
        findings.add("most time in a plain step", steps=steps, name=name, calls=calls, microseconds=microseconds)


def _step_kernels(scale: DecodeScale, num_layers: int, with_graphs: bool) -> KernelCounts:
    """Count one decode step of batch 1, after it has run several times."""
    model = random_model(with_layers(scale.shape, num_layers), scale.dtype, scale.device)
    target = TargetModel(model, 1, MAX_MODEL_LEN)
    engine: Engine = plain_engine(target, CudaGraphRunner.of(target) if with_graphs else None)
    engine.overlap = False  # a step that is launched ahead would be counted partly
    sequences = add_sequences(engine, 1, 2 * WARM_TOKENS)
    step_until(engine, sequences, WARM_TOKENS)
    return count_kernels(engine.step, scale.device)


MEASUREMENTS: dict[str, Callable[[DecodeScale, Findings], None]] = {
    "graphs-1": lambda scale, findings: measure_graphs(scale, findings, 1),
    "kernels": count_pass_kernels,
    "attention": lambda s, findings: time_attention(s.shape, s.dtype, s.device, findings, s.longest_prompt),
    "layers": lambda s, findings: compare_layers(s.shape, s.dtype, s.device, findings, s.layer_cases),
    "graphs-64": lambda scale, findings: measure_graphs(scale, findings, 64),
    "prompts": lambda s, findings: time_prompts(s.shape, s.dtype, s.device, findings, s.longest_prompt),
}  # the most important ones first


def measurement_runs(out: Path, is_smoke: bool) -> list[IsolatedRun]:
    """Return every measurement as a run of its own, which appends to the findings in `out`."""
    words = ["--out", str(out), *(["--smoke"] if is_smoke else [])]
    command = [sys.executable, "-m", "jobs.bench.gpu.decode_findings"]
    return [IsolatedRun(name, [*command, name, *words], LIMIT_S, least_s=20.0) for name in MEASUREMENTS]


def main() -> None:
    args = measurement_parser("One measurement of decoding.", MEASUREMENTS).parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    MEASUREMENTS[args.name](DecodeScale.of(args.smoke), Findings(args.out, FINDINGS))


if __name__ == "__main__":
    main()
