"""What a GPU run is asked, and what it has found so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from jobs.bench.embedding_map import ModelShape
from jobs.bench.widening import LLAMA_1B, LLAMA_3B, LLAMA_8B

TINY = ModelShape(320, 10, 8, 2, 64, 512, 1600)
TINIER = ModelShape(288, 9, 8, 2, 64, 448, 1536)
SHAPES = {"8b": LLAMA_8B, "1b": LLAMA_1B, "3b": LLAMA_3B, "tiny": TINY, "tinier": TINIER}


@dataclass(frozen=True, slots=True)
class GpuBenchSettings:
    """shapes: by name, the main one first. batches: of the main shape at the first of `contexts`; longer contexts take
    every third. others: those of them that come first, and the only ones of the other shapes. seconds: of a window of
    plain decoding. minutes: of everything.
    """

    shapes: dict[str, ModelShape]
    batches: list[int]
    contexts: list[int]
    others: list[int]
    acceptances: dict[str, tuple[float, ...]]
    rounds: int
    seconds: float
    minutes: float
    drain_rows: int
    drain_batch: int
    dtype: torch.dtype
    device: torch.device
    peers: tuple[str, ...]
    peer_s: float
    num_checked: int
    only: tuple[str, ...] = ()
    seed: int = 7


@dataclass(slots=True)
class Results:
    """Everything that is known so far, as JSON has it."""

    about: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    shapes: dict[str, dict[str, Any]] = field(default_factory=dict)
    cells: list[dict[str, Any]] = field(default_factory=list)
    drains: list[dict[str, Any]] = field(default_factory=list)
    synthetic: list[dict[str, Any]] = field(default_factory=list)
    peers: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
