"""The seed of a request's sample, from what is on record of the request alone.

Neither order nor batching nor resuming changes it.
"""

from __future__ import annotations

import hashlib

from eagle_ray.core.seeds import sample_seed
from eagle_ray.requests.parameters import MAX_SAMPLES
from eagle_ray.requests.request import Request


def seed_of(request: Request, run_seed: int, sample_index: int) -> int:
    """Return the key of one sample's noise: from the request's own seed, or from the run's seed and the request's id.

    Each turn of a conversation has a key of its own.
    """
    turn = request.turn_index
    if (own := request.sampling.get("seed")) is not None:
        return sample_seed(own, turn * MAX_SAMPLES + sample_index)
    key = f"{run_seed}\x1f{request.id}\x1f{sample_index}{f'{chr(0x1F)}{turn}' if turn else ''}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
