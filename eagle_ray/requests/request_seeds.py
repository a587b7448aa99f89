"""Derive the seed of a sample from its request alone.

Neither the order of requests, nor batching, nor a resumed run changes a seed.
"""

from __future__ import annotations

import hashlib

from eagle_ray.core.seeds import sample_seed
from eagle_ray.requests.parameters import MAX_SAMPLES
from eagle_ray.requests.request import Request


def seed_of(request: Request, run_seed: int, sample_index: int) -> int:
    """Return the key of one sample's noise.

    It derives from the request's own seed, or else from the run's seed and the request's id. Each
    turn of a conversation has a key of its own.

    Args:
        request: request, at the turn to be answered.
        run_seed: seed of the run.
        sample_index: number of the sample, from 0.
    """
    turn = request.turn_index
    if (own := request.sampling.get("seed")) is not None:
        return sample_seed(own, turn * MAX_SAMPLES + sample_index)
    key = f"{run_seed}\x1f{request.id}\x1f{sample_index}{f'{chr(0x1F)}{turn}' if turn else ''}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
