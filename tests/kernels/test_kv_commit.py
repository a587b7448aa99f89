"""One launch moves every layer's accepted keys and values as the portable path does, whatever overlaps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_ray.core.decode_batch import DecodeSlots
from eagle_ray.kernels import fused_layer as kernel
from eagle_ray.kv.block_manager import BlockManager
from eagle_ray.kv.kv_cache import KVCache, movable
from eagle_ray.tree.draft_tree import VerifyResult
from tests.support.kernels import DEVICE


def cache_of(seed: int, value_dim: int, dtype: torch.dtype) -> KVCache:
    """Three slots of 40 columns in blocks of 8 that lie anywhere, full of random numbers."""
    blocks = BlockManager(3, 40, 20, DEVICE, size=8)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(seed))
    blocks.block_table[:3, :5] = order[:15].view(3, 5).to(DEVICE)
    cache = KVCache(blocks, 2, 3, 4, torch.float32, DEVICE, value_dim, dtype)
    for part in (cache.keys, cache.values):
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(seed)))
    return cache


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    depth=st.integers(0, 6),
    value_dim=st.sampled_from([4, 2]),
    dtype=st.sampled_from([torch.float32, torch.float8_e4m3fn]),
)
def test_the_path_moves_and_nothing_else(seed, depth, value_dim, dtype):
    """Paths whose targets are the sources of their later nodes among them: [0, 2, 3, 4] moves 2 to 1 and 3 to 2."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 24, (2,), generator=generator).tolist()
    most = max(
        depth, torch.randint(depth, 16, (), generator=generator).item()
    )  # close together or far apart
    nodes = torch.full((2, depth + 1), -1)
    for row in range(2):
        count = torch.randint(0, depth + 1, (), generator=generator).item()
        nodes[row, : count + 1] = torch.cat(
            [
                torch.zeros(1).long(),
                (1 + torch.randperm(most, generator=generator)[:count]).sort().values,
            ]
        )
    nodes = nodes.to(DEVICE)
    result = VerifyResult(nodes, (nodes > 0).sum(1), nodes)
    portable, fused = (cache_of(seed, value_dim, dtype) for _ in range(2))
    batch = DecodeSlots.of([2, 0], lengths, DEVICE)
    portable.commit(batch, result)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE_RAY_KERNELS", "triton")
        patch.setattr(kernel, "MLP_SLICE", 8)
        fused.commit(batch, result)
    assert torch.equal(movable(fused.keys), movable(portable.keys))
    assert torch.equal(movable(fused.values), movable(portable.values))
