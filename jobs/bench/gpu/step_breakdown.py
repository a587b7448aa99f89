"""Parts of a step that the engine's own clock does not tell apart, each run by itself at a step's sizes.

seconds_of_parts(target, rows=256, batch=16, depth=6)     # {"pick greedy": ..., "commit": ...}
"""

from __future__ import annotations

import torch

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.core.sampling_batch import SamplingBatch
from eagle_ray.models.target import TargetModel
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.sampling.sampler import sample
from eagle_ray.tree.accept import VerifyResult
from jobs.bench.gpu.device import seconds_of

REPEATS = 10


@torch.inference_mode()
def seconds_of_parts(target: TargetModel, rows: int, batch: int, depth: int) -> dict[str, float]:
    """rows: of a pass over `batch` sequences. depth: the longest path. What commit moves lies in one block here."""
    device = target.device
    logits = torch.randn(rows, target.vocab_size, dtype=target.dtype, device=device)
    owner = torch.arange(rows, device=device) % batch
    positions = torch.arange(rows, device=device) + 1
    found = {}
    for name, params in (("greedy", SamplingParams()), ("sampled", SamplingParams(temperature=0.8, seed=1))):
        sampling = SamplingBatch.of([params] * batch, device)
        found[f"pick {name}"] = seconds_of(lambda s=sampling: sample(logits, s, owner, positions), device, REPEATS)
    at = DecodeSlots.of(list(range(batch)), [0] * batch, device)
    path = torch.arange(depth + 1, device=device).expand(batch, -1).contiguous()
    result = VerifyResult(path, torch.full((batch,), depth, device=device), path)
    found["commit"] = seconds_of(lambda: target.commit(at, result), device, REPEATS)
    return found
