"""RankGroup: the ranks of one engine as one of them sees them, and what they compute together.

    ranks = RankGroup(rank=0, size=2, meeting="/tmp/x/ranks", device="cpu")
    hidden = ranks.reduce(output_part)          # the sum of all ranks' parts
    logits = ranks.gather(logits_part)          # all ranks' parts side by side
    [slots] = ranks.minimum([256])                # the smallest of all ranks' numbers, for the host

Every rank calls the same functions in the same order. They connect with the first call, over loopback, and find each
other by a file: no port is open for that. A sum is added in the order of the ranks, number by number, so that a row's
sum depends neither on the other rows nor on the rank that adds: all ranks have the same bits, and each samples the same
tokens from the same logits.

    device   reduce                                                        gather
    CPU      gloo gathers the parts, which are added in fp32               gloo
    CUDA     symmetric memory: each rank reads the parts of all others     NCCL
             (one-shot, and two-shot for large passes), fp16 in fp32;
             NCCL without it, whose order depends on the tensor's size

The groups are the engine's own: a program's default group of torch.distributed is neither read nor made.

On a GPU all of them are launched on the current stream and can be captured in a graph. That half was written for torch
2.9 and later and has not run on several GPUs yet.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed
from jaxtyping import Float
from torch import Tensor

from eagle_ray.core.errors import OUT_OF_MEMORY, RankError, UnfitDevice
from eagle_ray.kernels.availability import together

TIMEOUT_S = 120.0  # of one collective, should a rank wait for another that does not come; a silent one ends long before
START_TIMEOUT_S = 1800.0  # of the first: ranks load their weights at different speeds
FALLBACK_S = 30.0  # within which a kernel fails on all ranks that fails on one
POLL_S = 0.02  # between two looks for the others, where no collective waits for them
REASON_S = 3.0  # that a rank waits to learn why a collective failed
CLOSE_S = 5.0  # that a rank waits for the end of what is under way on its GPU, once it leaves
ONE_SHOT_BYTES = 512 << 10  # up to which every rank reads all parts whole
LOOPBACK = "127.0.0.1"
SYMMETRIC = (torch.bfloat16, torch.float32)  # which symmetric memory adds


@runtime_checkable
class Collectives(Protocol):
    """What ranks compute together on one kind of device."""

    def reduce(self, part: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows H"]: ...

    def gather(self, part: Float[Tensor, "*rows N"]) -> list[Float[Tensor, "*rows N"]]: ...

    def close(self) -> None: ...


class RankGroup:
    """The ranks of one engine.

    Args:
        rank: number of this process, from 0.
        size: number of all processes.
        meeting: a file that all ranks can reach and that was not used before.
        device: device of this rank's tensors.

    Attributes:
        num_reduces, num_gathers: calls so far.
        why_lost: returns why a rank has ended, if that is known within some seconds.
        when_met: is called once all ranks have come.
    """

    def __init__(self, rank: int, size: int, meeting: str, device: torch.device | str = "cpu"):
        self.rank, self.size = rank, size
        self.meeting, self.device = meeting, torch.device(device)
        self._host: Any = None
        self._collectives: Collectives | None = None
        self._is_closed = False
        self.num_reduces = self.num_gathers = 0
        self.why_lost: Callable[[float], str | None] = lambda seconds: None
        self.when_met: Callable[[], None] = lambda: None

    def reduce(self, part: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows H"]:
        """Return the sum of all ranks' parts. Raises RankError if a rank is lost."""
        self.num_reduces += 1
        return self._together(lambda: self._connected.reduce(part))

    def gather(self, part: Float[Tensor, "*rows N"]) -> Float[Tensor, "*rows M"]:
        """Return all ranks' parts side by side, by rank. Raises RankError if a rank is lost."""
        self.num_gathers += 1
        return torch.cat(self._together(lambda: self._connected.gather(part)), -1)

    def of_first(self, tensor: Tensor) -> Tensor:
        """Return rank 0's tensor, which has the same shape and dtype on all. Raises RankError if a rank is lost."""
        parts = self._together(lambda: self._connected.gather(tensor.view(torch.uint8)))
        return parts[0].view(tensor.dtype)

    def minimum(self, numbers: Sequence[int]) -> list[int]:
        """Return the smallest of all ranks' numbers, one by one. Raises RankError if a rank is lost."""
        own = torch.tensor(list(numbers), dtype=torch.int64)
        parts = self._together(lambda: GlooCollectives(self._connect(), self.size).gather(own))
        return torch.stack(parts).amin(0).tolist()

    @property
    def is_lost(self) -> bool:
        """Return whether a rank is known to be lost."""
        return self.why_lost(0.0) is not None

    def turn_off_kernels(self) -> None:
        """Wait until a kernel has failed on all ranks, each of which runs its pass again without kernels.

        Raises UnfitDevice if it does not fail on another: that one has gone on, and its sums would wait for others.
        """
        if not self._all_come_to("fallback", FALLBACK_S):
            raise UnfitDevice(
                f"rank {self.rank} of {self.size}: a Triton kernel failed here and not on all ranks. Set "
                "EAGLE_RAY_KERNELS=portable, or mend what differs between the GPUs."
            )

    def check(self) -> None:
        """Raise RankError if a rank is known to be lost. For where this one computes nothing together."""
        if (reason := self.why_lost(0.0)) is not None:
            raise RankError(f"rank {self.rank} of {self.size}: {reason}")

    def close(self) -> None:
        """Leave the group; ranks that wait for this one get an error, and so does what is called here later.

        Any thread may call this, and again. It waits for CLOSE_S at most.
        """
        self._is_closed = True
        together.discard(self)
        collectives, self._host, self._collectives = self._collectives, None, None
        if collectives is not None:
            collectives.close()

    def _together(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except RuntimeError as error:  # whatever gloo and NCCL raise
            if OUT_OF_MEMORY.search(f"{type(error).__name__}: {error}"):
                raise  # of this rank
            reason = self.why_lost(REASON_S) or f"another rank is lost ({str(error).strip().splitlines()[0]})"
            raise RankError(f"rank {self.rank} of {self.size}: {reason}") from error

    @property
    def _connected(self) -> Collectives:
        if self._collectives is None:
            host = self._connect()
            on_gpu = self.device.type == "cuda"
            self._collectives = CudaCollectives(self) if on_gpu else GlooCollectives(host, self.size)
        return self._collectives

    def _connect(self) -> Any:
        """Return gloo's group of all ranks, which is there on a GPU's host, too."""
        if self._is_closed:
            raise RankError(f"rank {self.rank} of {self.size}: {self.why_lost(0.0) or 'the ranks have been closed'}")
        if self._host is None:
            self._rendezvous()
            options: Any = torch.distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [torch.distributed.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
            options._timeout = timedelta(seconds=TIMEOUT_S)
            self._host = torch.distributed.ProcessGroupGloo(self.store("host"), self.rank, self.size, options)
        return self._host

    def _rendezvous(self) -> None:
        """Wait until all ranks are here. Raises RankError if one is lost, or does not come."""
        if not self._all_come_to("here", START_TIMEOUT_S):
            reason = f"not all ranks have loaded their weights within {START_TIMEOUT_S:.0f} s"
            raise RankError(f"rank {self.rank} of {self.size}: {reason}")
        self.when_met()

    def _all_come_to(self, place: str, seconds: float) -> bool:
        """Return whether all ranks call this for a place within some seconds. Raises RankError if one is lost."""
        store, names = self.store(place), [f"rank {rank}" for rank in range(self.size)]
        store.set(names[self.rank], "")
        ends_at = time.monotonic() + seconds
        while not store.check(names):
            self.check()
            if time.monotonic() > ends_at:
                return False
            time.sleep(POLL_S)
        return True

    def store(self, name: str) -> Any:
        """Return a store by which the ranks meet. name: of the group that they make."""
        store = torch.distributed.FileStore(self.meeting, self.size)
        return torch.distributed.PrefixStore(name, store)


class GlooCollectives:
    """Collectives on a CPU."""

    def __init__(self, group: Any, size: int):
        self._group, self._size = group, size

    def reduce(self, part: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows H"]:
        parts = self.gather(part)
        total = parts[0].to(torch.float32, copy=True)
        for other in parts[1:]:
            total += other
        return total.to(part.dtype)

    def close(self) -> None:
        """Nothing is to be ended: the connections end with the group."""

    def gather(self, part: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self._size)]
        self._group.allgather([parts], [part.contiguous()]).wait()
        return parts


class CudaCollectives:
    """Collectives on GPUs of one node, by groups of their own: a default group of the program's is left alone."""

    def __init__(self, ranks: RankGroup):
        self._size = ranks.size
        distributed: Any = torch.distributed  # torch's CPU build has no NCCL
        self._group = distributed.ProcessGroupNCCL(ranks.store("device"), ranks.rank, ranks.size)
        self._group._set_default_timeout(timedelta(seconds=TIMEOUT_S))  # NCCL's own is 10 minutes
        self._group.allreduce([torch.zeros(1, device=ranks.device)]).wait()  # it connects here, not in a capture
        self._symmetric = SymmetricMemory.of(ranks)

    def reduce(self, part: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows H"]:
        """Add in rank order where that is possible; NCCL adds in an order that depends on the size of the tensor."""
        if self._symmetric is not None and part.numel() % (8 * self._size) == 0:
            if part.dtype in SYMMETRIC:
                return self._symmetric.reduce(part)
            if part.dtype is torch.float16:  # no kernel of symmetric memory adds these
                return self._symmetric.reduce(part.float()).half()
        total = part.contiguous().clone()
        self._group.allreduce([total]).wait()
        return total

    def gather(self, part: Float[Tensor, "*rows N"]) -> list[Float[Tensor, "*rows N"]]:
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self._size)]
        self._group.allgather([parts], [part.contiguous()]).wait()
        return parts

    def close(self) -> None:
        """End what is under way, so that a thread that waits for a lost rank comes back.

        Not tried on a GPU yet: `abort` could wait for a graph that was captured, so another thread calls it.
        """
        ending = threading.Thread(target=self._abort, daemon=True)
        ending.start()
        ending.join(CLOSE_S)

    def _abort(self) -> None:
        with suppress(AttributeError, RuntimeError):  # of an older torch; of a group that has failed by itself
            self._group.abort()


class SymmetricMemory:
    """Sums by memory that every rank reads.

    Args:
        library: torch's operations on such memory.
        name: under which the library knows the ranks.
    """

    def __init__(self, library: Any, name: str):
        self._library, self._name = library, name
        self._shared: dict[tuple[torch.dtype, int], Tensor] = {}  # by dtype and size; graphs read it

    @classmethod
    def of(cls, ranks: RankGroup) -> SymmetricMemory | None:
        """Return the memory of these ranks, or None on all of them if this torch or these GPUs lack it on one.

        They agree before they meet in it: one that has none would let the others wait.
        """
        part = torch.zeros(8 * ranks.size, dtype=torch.bfloat16, device=ranks.device)
        memory: SymmetricMemory | None = None
        with suppress(ImportError, AttributeError, RuntimeError):
            library, name = memory_library(), f"eagle-ray {ranks.meeting}"
            library.set_group_info(name, ranks.rank, ranks.size, ranks.store("symmetric memory"))
            own = cls(library, name)
            own._allocate(part)
            memory = own
        if ranks.minimum([memory is not None]) == [False] or memory is None:
            return None
        works = False
        with suppress(AttributeError, RuntimeError):
            memory.reduce(part)
            works = True
        return memory if ranks.minimum([works]) == [True] else None

    def reduce(self, part: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows H"]:
        """Return the sum of all ranks' parts, in one of SYMMETRIC."""
        shared = self._memory(part)[: part.numel()]
        shared.copy_(part.reshape(-1))
        if part.nbytes <= ONE_SHOT_BYTES:
            return torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", self._name).view_as(part)
        torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", self._name)
        return shared.clone().view_as(part)

    def _memory(self, part: Tensor) -> Tensor:
        """Return symmetric memory for the part. It is made at a pass's warm-up, never while the pass is captured."""
        key = part.dtype, _power_of_2(part.numel())
        if key not in self._shared:
            shared = self._allocate(part)
            self._library.rendezvous(shared, self._name)
            self._shared[key] = shared
        return self._shared[key]

    def _allocate(self, part: Tensor) -> Tensor:
        """Return new memory for the part, in which the ranks have not met."""
        return self._library.empty_strided_p2p((_power_of_2(part.numel()),), (1,), part.dtype, part.device)


def memory_library() -> Any:
    """Return torch's symmetric memory. Raises ImportError if it has none."""
    from torch._C._distributed_c10d import _SymmetricMemory as library

    return library


def _power_of_2(number: int) -> int:
    """Return the smallest power of 2 that is no less."""
    return 1 << math.ceil(math.log2(number))
