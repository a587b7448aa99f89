"""A model of random weights on the device, made there, and an engine that decodes it plainly.

model = random_model(LLAMA_8B, torch.bfloat16, device)
engine = plain_engine(model, slots=64, graphs=MeasuredGraphRunner(...))
seconds = decode(engine, batch=64)          # of one step
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Hashable
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

import torch
from transformers import LlamaForCausalLM, PretrainedConfig, PreTrainedModel

from eagle_ray.attention.triton_attention import uses_triton
from eagle_ray.core.sampling_batch import PaddedInput
from eagle_ray.core.sequence import Sequence
from eagle_ray.core.tree_bounds import NO_TREE
from eagle_ray.engine.engine import Engine
from eagle_ray.methods.drafter import NullDrafter
from eagle_ray.models.graphs import CudaGraphRunner
from eagle_ray.models.target import TargetModel
from eagle_ray.planner.planner import UniformPlanner
from eagle_ray.requests.parameters import SamplingParams
from jobs.bench.embedding_map import ModelShape
from jobs.bench.gpu.device import free_bytes, synchronize
from jobs.bench.gpu.findings import Findings
from jobs.bench.widening import seeded, typed

MIB = 2**20
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


def with_layers(shape: ModelShape, num_layers: int) -> ModelShape:
    return replace(shape, num_layers=num_layers)


class LastWarning(logging.Handler):
    """Keeps the text of the last warning: the reason of a capture that failed."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


class MeasuredGraphRunner(CudaGraphRunner):
    """A runner that records the seconds and the device memory of each capture as a finding.

    The memory is what mem_get_info lost, so CUDA's own share of a graph is counted too.
    """

    def __init__(self, target: TargetModel, findings: Findings, batch: int):
        super().__init__(target.device, target.cache.num_slots, target.cache.capacity, uses_triton(target.cache))
        self._target_device = target.device
        self._findings = findings
        self._batch = batch
        self._keys: set[Hashable] = set()
        self._last_warning = LastWarning()
        logging.getLogger("eagle_ray").addHandler(self._last_warning)

    def run(self, key: tuple[Hashable, ...], function: Any, inputs: Items[PaddedInput]) -> Any:
        if key in self._keys:  # a replay is timed, so nothing is measured in it
            return super().run(key, function, inputs)
        self._keys.add(key)
        num_before, num_failures = self.num_captured, len(self.failures)
        free_before, seconds_before, bytes_before = free_bytes(self._target_device), self.seconds, self.bytes
        result = super().run(key, function, inputs)
        if self.num_captured > num_before:
            self._record(key, self.seconds - seconds_before, self.bytes - bytes_before, free_before)
        elif len(self.failures) > num_failures:
            self._findings.add("failed graph capture", batch=self._batch, key=str(key), reason=self._last_warning.text)
        return result

    def _record(self, key: tuple[Hashable, ...], seconds: float, reserved: int, free_before: int | None) -> None:
        synchronize(self._target_device)
        free = free_bytes(self._target_device)
        lost = "none on a CPU" if free is None or free_before is None else (free_before - free) / MIB
        self._findings.add(
            "graph capture",
            batch=self._batch,
            key=str(key),
            seconds=seconds,
            reserved_mib=reserved / MIB,
            mem_get_info_mib=lost,
        )


def plain_engine(
    target: TargetModel, graphs: CudaGraphRunner | None, prefill_tokens: int = PROMPT_TOKENS * 64
) -> Engine:
    """Return an engine that never drafts."""
    return Engine(target, NullDrafter(), UniformPlanner(NO_TREE), MAX_MODEL_LEN - 1, NO_TREE, prefill_tokens, graphs)


def add_sequences(engine: Engine, batch: int, max_tokens: int) -> list[Sequence]:
    """Queue sequences of random prompts."""
    draw = random.Random(0)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    prompts = [[draw.randrange(engine.target.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
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


def abort_all(engine: Engine, sequences: list[Sequence]) -> None:
    for sequence in sequences:
        if sequence.finish_reason is None:
            engine.abort(sequence)
