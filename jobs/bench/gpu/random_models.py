"""Models of random weights, made on the device, and an engine that decodes one plainly.

model = random_model(LLAMA_8B, torch.bfloat16, device)
figures, kernels = step_figures(TargetModel(model, 64, 2048), batch=64, num_steps=40)
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from transformers import LlamaForCausalLM, PretrainedConfig, PreTrainedModel

from eagle_ray.core.sequence import Sequence
from eagle_ray.core.tree_bounds import NO_TREE
from eagle_ray.engine.engine import Engine
from eagle_ray.engine.graph_warmup import capture_fixed
from eagle_ray.methods.drafter import NullDrafter
from eagle_ray.models.graphs import CudaGraphRunner
from eagle_ray.models.target import TargetModel
from eagle_ray.planner.planner import UniformPlanner
from eagle_ray.requests.parameters import SamplingParams
from jobs.bench.embedding_map import ModelShape
from jobs.bench.gpu.device import synchronize
from jobs.bench.gpu.kernel_counts import KernelCounts, count_kernels
from jobs.bench.widening import LLAMA_8B, seeded, typed

TINY = ModelShape(320, 10, 8, 2, 64, 512, 1600)
SHAPES = {"8b": LLAMA_8B, "tiny": TINY}
PROMPT_TOKENS, MAX_MODEL_LEN = 64, 2048
MAX_POSITION = 1 << 17


def random_model(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
    """Return a Llama of this shape with random weights. Nothing is downloaded."""
    none = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    config = shape.llama_config(shape.num_layers, max_position_embeddings=MAX_POSITION, **none)
    return random_weights(LlamaForCausalLM, config, dtype, device)


def random_weights(
    kind: type[PreTrainedModel], config: PretrainedConfig, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Return a model of this class with random weights, made on the device."""
    with seeded(0, device), typed(dtype), torch.device(device), torch.no_grad():
        model = kind._from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def plain_engine(
    target: TargetModel, graphs: CudaGraphRunner | None, prefill_tokens: int = PROMPT_TOKENS * 64
) -> Engine:
    """Return an engine that never drafts."""
    return Engine(
        target,
        NullDrafter(),
        UniformPlanner(NO_TREE),
        MAX_MODEL_LEN - 1,
        NO_TREE,
        prefill_tokens,
        graphs,
    )


def add_sequences(engine: Engine, batch: int, max_tokens: int) -> list[Sequence]:
    """Queue sequences of random prompts."""
    draw = random.Random(0)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    prompts = [
        [draw.randrange(engine.target.vocab_size) for _ in range(PROMPT_TOKENS)]
        for _ in range(batch)
    ]
    sequences = [Sequence(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    for sequence in sequences:
        engine.add(sequence)
    return sequences


def step_until(engine: Engine, sequences: list[Sequence], num_tokens: int) -> None:
    """Step until every sequence has this many tokens."""
    while any(len(sequence.output_ids) < num_tokens for sequence in sequences):
        engine.step()


def seconds_per_step(engine: Engine, sequences: list[Sequence], num_steps: int) -> float:
    """Return the mean wall time of a decode step; all sequences are past their prompts."""
    synchronize(engine.target.device)
    started = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    synchronize(engine.target.device)
    return (time.perf_counter() - started) / num_steps


def step_figures(
    target: TargetModel, batch: int, num_steps: int
) -> tuple[dict[str, Any], KernelCounts]:
    """Decode random prompts plainly, replayed where graphs are; return a step's figures and kernels."""
    engine = plain_engine(
        target, CudaGraphRunner.of(target) if target.device.type == "cuda" else None
    )
    if engine.graphs is not None:
        capture_fixed(engine)
    sequences = add_sequences(engine, batch, 200)
    step_until(engine, sequences, 8)
    seconds = seconds_per_step(engine, sequences, num_steps)
    engine.overlap = False  # a step that is launched ahead would be counted in part
    engine.step()
    counts = count_kernels(engine.step, target.device)
    abort_all(engine, sequences)
    figures = {
        "batch": batch,
        "step_ms": 1e3 * seconds,
        "tokens_per_second": batch / seconds,
        "kernels": counts.num,
        "kernels_ms": 1e3 * counts.seconds,
        "replayed": engine.graphs is not None and not engine.fallbacks,
    }
    return figures, counts


def abort_all(engine: Engine, sequences: list[Sequence]) -> None:
    for sequence in sequences:
        if sequence.finish_reason is None:
            engine.abort(sequence)
