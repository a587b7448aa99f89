"""Heads that are worse than the trained one: where speculation should do less, or be off."""

from __future__ import annotations

import copy

import torch

from eagle_ray.methods.eagle.heads import EagleHead


@torch.no_grad()
def damaged_head(head: EagleHead, noise: float, seed: int = 0) -> EagleHead:
    """A copy with Gaussian noise on every matrix; noise: its size relative to the matrix's root mean square."""
    generator = torch.Generator().manual_seed(seed)
    damaged = copy.deepcopy(head)
    for parameter in damaged.parameters():
        if parameter.ndim == 2:
            size = noise * parameter.square().mean().sqrt()
            parameter += size * torch.randn(parameter.shape, generator=generator).to(parameter)
    return damaged


def random_head(head: EagleHead, seed: int = 0) -> EagleHead:
    """A head of the same shape that was never trained."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        bias, own = head.fc.bias is not None, head.embed_tokens is not None
        fresh = EagleHead(copy.deepcopy(head.config), bias=bias, own_embedding=own)
    return fresh.to(head.fc.weight).requires_grad_(False)
