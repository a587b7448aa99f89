"""Baselines: transformers on the same weights, if it can: generate with a static cache, compiled, and
continuous batching.

    tokens_per_second("static", model, prompts, num_tokens=64)

Raises whatever transformers raises; a call may also never return.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from jobs.bench.gpu.device import synchronize

PAGE = 256  # tokens of transformers' pages
Run = Callable[[], int]


def tokens_per_second(peer: str, model: nn.Module, prompts: list[list[int]], num_tokens: int) -> float:
    """Prompts and num_tokens tokens after each of them, on the second run: the first one compiles."""
    with PEERS[peer](model, prompts, num_tokens) as run:
        run()
        synchronize(model.device)
        started = time.perf_counter()
        made = run()
        synchronize(model.device)
        return made / (time.perf_counter() - started)


@contextmanager
def _static(model: nn.Module, prompts: list[list[int]], num_tokens: int) -> Iterator[Run]:
    """One length for all: transformers pads, and would have to attend to it."""
    shortest = min(map(len, prompts))
    ids = torch.tensor([prompt[-shortest:] for prompt in prompts], device=model.device)
    model.set_attn_implementation("sdpa")

    @torch.inference_mode()
    def run() -> int:
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            cache_implementation="static",
        )
        return out.shape[0] * (out.shape[1] - ids.shape[1])

    yield run


@contextmanager
def _continuous(model: nn.Module, prompts: list[list[int]], num_tokens: int) -> Iterator[Run]:
    """Pages for just these requests: left to itself it takes most of the machine's memory, and on a CPU fills it."""
    model.set_attn_implementation("sdpa")
    config = copy.deepcopy(model.generation_config)
    config.update(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = sum(-(-(len(prompt) + num_tokens) // PAGE) for prompt in prompts)
    room = ContinuousBatchingConfig(num_blocks=pages + 1, max_batch_tokens=sum(map(len, prompts)))
    with model.continuous_batching_context_manager(config, continuous_batching_config=room) as manager:
        yield lambda: _answered(manager, prompts, num_tokens)


def _answered(manager: Any, prompts: list[list[int]], num_tokens: int) -> int:
    manager.add_requests(inputs=prompts, max_new_tokens=num_tokens)
    done = []
    while len(done) < len(prompts):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            done.append(result)
        elif result is None and not manager.is_running():
            raise RuntimeError("transformers' batching thread ended without an answer; its log has the reason")
    if errors := [result.error for result in done if result.error is not None]:
        raise RuntimeError(errors[0])
    return sum(len(result.generated_tokens) for result in done)


PEERS: dict[str, Callable[..., AbstractContextManager[Run]]] = {"static": _static, "continuous": _continuous}
