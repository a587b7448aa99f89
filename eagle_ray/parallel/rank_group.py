"""RankGroup: collectives and rendezvous of the ranks of one engine.

    ranks = RankGroup(rank=0, size=2, meeting="/tmp/x/ranks", device="cpu")
    hidden = ranks.reduce(output_part)          # the sum of all ranks' parts
    logits = ranks.gather(logits_part)          # all ranks' parts side by side
    [slots] = ranks.minimum([256])      # the smallest of all ranks' numbers, for the host

Every rank calls the same functions in the same order. They connect with the first call, over
loopback, and find each other by a file: no port is open for that. A sum is added in the order of
the ranks, number by number, so that a row's sum depends neither on the other rows nor on the rank
that adds: all ranks have the same bits, and each samples the same tokens from the same logits.

The process groups belong to the engine: a program's default group of torch.distributed is neither
read nor created. `collectives.py` has the implementations for each kind of device.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from jaxtyping import Float
from torch import Tensor

from eagle_ray.core.errors import OUT_OF_MEMORY, RankError, UnfitDevice, first_line_of
from eagle_ray.kernels.availability import together
from eagle_ray.parallel.collectives import (
    TIMEOUT_S,
    Collectives,
    CudaCollectives,
    GlooCollectives,
)

START_TIMEOUT_S = 1800.0  # seconds of the first: ranks load their weights at different speeds
FALLBACK_S = 30.0  # seconds in which a kernel that fails on one rank fails on all
RANK_POLL_S = 0.02  # seconds between two looks for the others, where no collective waits for them
REASON_S = 3.0  # seconds that a rank waits to learn why a collective failed
LOOPBACK = "127.0.0.1"
# What gloo and NCCL say where another rank has ended, or has left the group.
CONNECTION = re.compile(
    r"connection (?:closed|reset|refused|was)|broken pipe|timed? ?out|remote (?:process|peer)|aborted",
    re.IGNORECASE,
)


class RankGroup:
    """This process's membership in the ranks of one engine, with their collectives.

    Args:
        rank: number of this process, from 0.
        size: number of all processes.
        meeting: unused file that all ranks can open, by which they find each other.
        device: device of this rank's tensors.

    Attributes:
        num_reduces, num_gathers: number of calls so far.
        why_lost: returns why a rank has ended, if that becomes known within some seconds.
        when_met: callback once all ranks have joined.
    """

    def __init__(self, rank: int, size: int, meeting: str, device: torch.device | str = "cpu"):
        self.rank = rank
        self.size = size
        self.meeting = meeting
        self.device = torch.device(device)
        self._host: Any = None
        self._collectives: Collectives | None = None
        self._is_closed = False
        self.num_reduces = 0
        self.num_gathers = 0
        self.why_lost: Callable[[float], str | None] = lambda seconds: None
        self.when_met: Callable[[], None] = lambda: None

    def reduce(self, part: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows H"]:
        """Return the sum of all ranks' parts. Raises RankError if a rank is lost."""
        self.num_reduces += 1
        return self._together(lambda: self._connected.reduce(part))

    def gather(self, part: Float[Tensor, "*rows N"]) -> Float[Tensor, "*rows M"]:
        """Return all ranks' parts concatenated in the order of the ranks. Raises RankError if a rank is lost."""
        self.num_gathers += 1
        parts = self._together(lambda: self._connected.gather(part))
        return torch.cat(parts, -1)

    def reserve(self, numel: int) -> None:
        """Allocate the memory for sums of up to this many elements, so that no later pass waits for it.

        Raises RankError if a rank is lost.
        """
        self._together(lambda: self._connected.reserve(numel))

    @property
    def why_unordered(self) -> str | None:
        """Return why sums are not added in the order of the ranks; None if they are, or before ranks have met."""
        return None if self._collectives is None else self._collectives.why_unordered

    def of_first(self, tensor: Tensor) -> Tensor:
        """Return rank 0's tensor, which has one shape and dtype on all ranks. Raises RankError if a rank is lost."""
        parts = self._together(lambda: self._connected.gather(tensor.view(torch.uint8)))
        return parts[0].view(tensor.dtype)

    def minimum(self, numbers: Sequence[int]) -> list[int]:
        """Return the element-wise minimum of all ranks' numbers. Raises RankError if a rank is lost."""
        own = torch.tensor(list(numbers), dtype=torch.int64)

        def gather_on_host() -> list[Tensor]:
            host = GlooCollectives(self._connect(), self.size)
            return host.gather(own)

        parts = self._together(gather_on_host)
        smallest = torch.stack(parts).amin(0)
        return smallest.tolist()

    @property
    def is_lost(self) -> bool:
        """Return whether a rank is known to be lost."""
        return self.why_lost(0.0) is not None

    def turn_off_kernels(self) -> None:
        """Wait until a kernel has failed on all ranks, which then all repeat their pass without kernels.

        Raises UnfitDevice if it does not fail on another rank: that one has gone on, and its sums
        would wait for the others.
        """
        if not self._all_come_to("fallback", FALLBACK_S):
            raise UnfitDevice(
                f"rank {self.rank} of {self.size}: a Triton kernel failed here and not on all ranks. Set "
                "EAGLE_RAY_KERNELS=portable, or mend what differs between the GPUs."
            )

    def check(self) -> None:
        """Raise RankError if a rank is known to be lost. For code between collectives, which raise it themselves."""
        reason = self.why_lost(0.0)
        if reason is not None:
            raise self._error(reason)

    def close(self) -> None:
        """Leave the group. Other ranks that wait for this one get an error, and so do later calls on this group.

        Any thread may call this, also repeatedly. It waits for CLOSE_S at most.
        """
        self._is_closed = True
        together.discard(self)
        collectives = self._collectives
        self._host = None
        self._collectives = None
        if collectives is not None:
            collectives.close()

    def _error(self, reason: str) -> RankError:
        return RankError(f"rank {self.rank} of {self.size}: {reason}")

    def _together(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except RuntimeError as error:  # gloo and NCCL raise it
            if OUT_OF_MEMORY.search(f"{type(error).__name__}: {error}"):
                raise  # this rank is out of memory, and no other is lost
            raise self._error(self._why_failed(error)) from error

    def _why_failed(self, error: RuntimeError) -> str:
        """Return the message for a failed collective. It blames a lost rank if one is known or a connection ended."""
        known = self.why_lost(REASON_S)
        if known:
            return known
        text = first_line_of(error)
        if CONNECTION.search(text):
            return f"{text}: another rank is lost"
        return f"{text}. No rank is known to be lost; if another one failed first, its own error says why"

    @property
    def _connected(self) -> Collectives:
        if self._collectives is None:
            host = self._connect()
            if self.device.type == "cuda":
                self._collectives = CudaCollectives(self)
            else:
                self._collectives = GlooCollectives(host, self.size)
        return self._collectives

    def _connect(self) -> Any:
        """Return gloo's group of all ranks. Ranks on GPUs have one on their hosts, too."""
        if self._is_closed:
            raise self._error(self.why_lost(0.0) or "the ranks have been closed")
        if self._host is None:
            self._rendezvous()
            gloo = torch.distributed.ProcessGroupGloo
            options: Any = gloo._Options()  # type: ignore[attr-defined]
            options._devices = [gloo.create_device(hostname=LOOPBACK)]
            options._timeout = timedelta(seconds=TIMEOUT_S)
            self._host = gloo(self.store("host"), self.rank, self.size, options)
        return self._host

    def _rendezvous(self) -> None:
        """Wait until all ranks have joined. Raises RankError if one is lost or does not join in time."""
        if not self._all_come_to("here", START_TIMEOUT_S):
            raise self._error(
                f"not all ranks have loaded their weights within {START_TIMEOUT_S:.0f} s"
            )
        self.when_met()

    def _all_come_to(self, place: str, seconds: float) -> bool:
        """Return whether all ranks call this for a place within some seconds. Raises RankError if one is lost."""
        store = self.store(place)
        names = [f"rank {rank}" for rank in range(self.size)]
        store.set(names[self.rank], "")
        ends_at = time.monotonic() + seconds
        while not store.check(names):
            self.check()
            if time.monotonic() > ends_at:
                return False
            time.sleep(RANK_POLL_S)
        return True

    def store(self, name: str) -> Any:
        """Return a torch store for the rendezvous of a process group.

        Args:
            name: name of the group.
        """
        store = torch.distributed.FileStore(self.meeting, self.size)
        return torch.distributed.PrefixStore(name, store)
