"""Collectives: sums and gathers over ranks, on CPUs (gloo) and on GPUs of one node.

    device   reduce                                                        gather
    CPU      gloo gathers the parts                                        gloo
    CUDA     symmetric memory: each rank reads the parts of all others     NCCL
             (one-shot, and two-shot for large passes);
             NCCL without it, whose order depends on the tensor's size

Parts are added in fp32 and in the order of the ranks, except by NCCL. The sums that NVSwitch makes
(`multimem`) are not used: NVIDIA states no order for them, and measurements of others found bf16
sums to differ between calls (NVIDIA/nccl issues 1497 and 2360).

On a GPU all of them are launched on the current stream and can be captured in a graph. The GPU part
was written for torch 2.9 and later, is checked against torch's CUDA build by `make cuda-contracts`,
and has not run on several GPUs yet.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed
from jaxtyping import Float
from torch import Tensor

from eagle_ray.core.errors import first_line_of

log = logging.getLogger("eagle_ray")

TIMEOUT_S = 120.0  # seconds of one collective; a silent rank is killed long before
CLOSE_S = 5.0  # seconds that a rank that leaves waits for the work under way on its GPU
ONE_SHOT_BYTES = 1 << 20  # bytes of a part in fp32 up to which every rank reads all parts whole
MULTIPLE = 8  # elements of each rank's share of a sum: 32 bytes, as wide as the kernels read
# What an unfit torch or GPU raises where symmetric memory starts.
FAILURES = (ImportError, AttributeError, RuntimeError, TypeError)
NAMED_SINCE = (2, 11)  # torch that finds a group of symmetric memory by its name
# Captured collectives otherwise map their buffers once a graph (NVIDIA/nccl issue 1234), gigabytes for
# the graphs of a start. A user's own settings win.
NCCL_SETTINGS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_GRAPH_REGISTER": "0"}


class Peers(Protocol):
    """The ranks of an engine as they are known before their collectives are set up."""

    rank: int
    size: int
    meeting: str
    device: torch.device

    def store(self, name: str) -> Any: ...

    def minimum(self, numbers: list[int]) -> list[int]: ...


@runtime_checkable
class Collectives(Protocol):
    """Protocol of the collectives of ranks on one kind of device."""

    @property
    def why_unordered(self) -> str | None:
        """Return why sums are not added in the order of the ranks, or None if they are."""

    def reduce(self, part: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows H"]: ...

    def gather(self, part: Float[Tensor, "*rows N"]) -> list[Float[Tensor, "*rows N"]]: ...

    def reserve(self, numel: int) -> None:
        """Allocate the memory for sums of up to this many elements."""

    def close(self) -> None: ...


class GlooCollectives:
    """Collectives of ranks on a CPU, over gloo."""

    why_unordered = None

    def __init__(self, group: Any, size: int):
        self._group = group
        self._size = size

    def reduce(self, part: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows H"]:
        parts = self.gather(part)
        total = parts[0].to(torch.float32, copy=True)
        for other in parts[1:]:
            total += other
        return total.to(part.dtype)

    def reserve(self, numel: int) -> None:
        """Do nothing: gathered parts get new memory each time."""

    def close(self) -> None:
        """Do nothing: the connections end with the group."""

    def gather(self, part: Tensor) -> list[Tensor]:
        return _gathered(self._group, self._size, part)


class CudaCollectives:
    """Collectives of ranks on GPUs of one node. They use process groups of their own, not the
    program's default group."""

    def __init__(self, ranks: Peers):
        self._size = ranks.size
        for name, value in NCCL_SETTINGS.items():
            os.environ.setdefault(name, value)
        distributed: Any = torch.distributed  # torch's CPU build has no NCCL
        self._group = distributed.ProcessGroupNCCL(ranks.store("device"), ranks.rank, ranks.size)
        self._group._set_default_timeout(timedelta(seconds=TIMEOUT_S))  # NCCL's own is 10 minutes
        # The first collective connects the ranks, which must not happen in a capture.
        self._group.allreduce([torch.zeros(1, device=ranks.device)]).wait()
        self._symmetric, self.why_unordered = SymmetricMemory.of(ranks, self._group)
        if ranks.rank == 0:
            self._log_sums()

    def reserve(self, numel: int) -> None:
        """Allocate memory for sums of up to this many elements, so that no later pass has to sync with other ranks."""
        if self._symmetric is not None:
            self._symmetric.reserve(numel)

    def reduce(self, part: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows H"]:
        """Add in rank order if possible; NCCL's order depends on the size of the tensor."""
        if self._symmetric is not None and part.numel() % (MULTIPLE * self._size) == 0:
            return self._symmetric.reduce(part)
        total = part.contiguous().clone()
        self._group.allreduce([total]).wait()
        return total

    def gather(self, part: Float[Tensor, "*rows N"]) -> list[Float[Tensor, "*rows N"]]:
        return _gathered(self._group, self._size, part)

    def close(self) -> None:
        """Abort running collectives, so that a thread that waits for a lost rank returns.

        Not tried on a GPU yet: `abort` could wait for a graph that was captured, so another thread
        calls it.
        """
        if self._symmetric is not None:
            self._symmetric.close()
        ending = threading.Thread(target=self._abort, daemon=True)
        ending.start()
        ending.join(CLOSE_S)

    def _abort(self) -> None:
        # An older torch has no `abort`; a group that has failed by itself raises RuntimeError.
        with suppress(AttributeError, RuntimeError):
            self._group.abort()

    def _log_sums(self) -> None:
        if self.why_unordered is None:
            log.info("the ranks' parts are added by symmetric memory, in the order of the ranks")
        else:
            log.warning(
                "the ranks' parts are added by NCCL, which is slower and whose order depends on the number of "
                "rows, since symmetric memory does not start: %s",
                self.why_unordered,
            )


def _gathered(group: Any, size: int, part: Tensor) -> list[Tensor]:
    """Return all ranks' parts, by rank."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(size)]
    group.allgather([parts], [part.contiguous()]).wait()
    return parts


class SymmetricMemory:
    """Sums over ranks by GPU memory that every rank can read.

    Args:
        library: torch's operations on such memory.
        group: the ranks, under a name by which the library finds them.
        device: device of this rank.
    """

    def __init__(self, library: MemoryLibrary, group: NamedGroup, device: torch.device):
        self._library = library
        self._group = group
        self._device = device
        # Graphs read it, so memory that was too small is kept when more is made.
        self._shared: list[Tensor] = []

    @classmethod
    def of(cls, ranks: Peers, backend: Any) -> tuple[SymmetricMemory | None, str | None]:
        """Return the shared memory of these ranks; or, on all of them, None and the reason.

        The ranks first agree that all have such memory: otherwise one without it would let the
        others wait.

        Args:
            backend: NCCL's group of these ranks.
        """
        memory: SymmetricMemory | None = None
        why = "another rank has none"
        numel = MULTIPLE * ranks.size
        try:
            library = MemoryLibrary()
            memory = cls(library, NamedGroup(ranks, backend, library), ranks.device)
            library.empty(numel, ranks.device)
        except FAILURES as error:
            why = first_line_of(error)
            has_memory = False
        else:
            has_memory = True
        works = False
        if ranks.minimum([has_memory]) == [True] and memory is not None:
            try:
                memory.reduce(torch.zeros(numel, device=ranks.device))
                works = True
            except FAILURES as error:
                why = first_line_of(error)
            works = ranks.minimum([works]) == [True]
        if not works and memory is not None:
            memory.close()
        return (memory, None) if works else (None, why)

    def reserve(self, numel: int) -> None:
        """Allocate memory for sums of this many elements. All ranks call this together, never during a capture."""
        if not self._shared or self._shared[-1].numel() < numel:
            shared = self._library.empty(numel, self._device)
            self._library.rendezvous(shared, self._group.name)
            self._shared.append(shared)

    def reduce(self, part: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows H"]:
        """Return the sum of all ranks' parts in the part's dtype, added in fp32."""
        self.reserve(part.numel())
        shared = self._shared[-1][: part.numel()].view(part.shape)
        shared.copy_(part)
        if shared.nbytes <= ONE_SHOT_BYTES:
            return self._library.one_shot(shared, self._group.name).to(part.dtype)
        self._library.two_shot(shared, self._group.name)
        return shared.to(part.dtype, copy=True)

    def close(self) -> None:
        """Unregister the group's name."""
        self._group.close()


class MemoryLibrary:
    """torch's operations on symmetric memory. Raises ImportError if this torch has none."""

    def __init__(self) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        self._torch: Any = _SymmetricMemory

    def set_group_info(self, name: str, rank: int, size: int, store: Any) -> None:
        """Register a group with a torch that is older than NAMED_SINCE."""
        self._torch.set_group_info(name, rank, size, store)

    def empty(self, numel: int, device: torch.device) -> Float[Tensor, " N"]:
        """Return new memory of this rank, before the rendezvous."""
        return self._torch.empty_strided_p2p((numel,), (1,), torch.float32, device)

    def rendezvous(self, shared: Float[Tensor, " N"], name: str) -> None:
        """Exchange handles, so that the ranks of a group can read each other's memory."""
        self._torch.rendezvous(shared, name)

    def one_shot(self, shared: Float[Tensor, "*rows H"], name: str) -> Float[Tensor, "*rows H"]:
        """Return the sum over all ranks' `shared` tensors; each rank reads all of them whole."""
        return torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", name)

    def two_shot(self, shared: Float[Tensor, "*rows H"], name: str) -> None:
        """Replace `shared` by the sum over all ranks: each rank adds one share of it, which the others then read."""
        torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", name)


class NamedGroup:
    """The ranks as a group that torch's operations find by its name.

    Args:
        backend: backend of the collectives on the ranks' devices.
        library: symmetric memory, with which an older torch must register the group.
    """

    def __init__(self, ranks: Peers, backend: Any, library: MemoryLibrary):
        self.name = f"eagle-ray {ranks.meeting}"
        self._registry: Any = None  # torch's groups by name, if this one is among them
        store = ranks.store("symmetric memory")
        if torch_version() < NAMED_SINCE:
            library.set_group_info(self.name, ranks.rank, ranks.size, store)
            return
        group: Any = torch.distributed.ProcessGroup(store, ranks.rank, ranks.size)
        kinds: Any = torch.distributed.ProcessGroup.BackendType
        kind = kinds.NCCL if ranks.device.type == "cuda" else kinds.GLOO
        group._register_backend(torch.device(ranks.device.type), kind, backend)
        group._set_group_name(self.name)
        self._registry = torch._C._distributed_c10d
        self._registry._register_process_group(self.name, group)
        self._group = group  # the registry does not keep it

    def close(self) -> None:
        """Unregister the name. No later group of this process gets it, since each group has its own meeting."""
        if self._registry is not None:
            self._registry._unregister_process_group(self.name)
            self._registry = None


def torch_version() -> tuple[int, int]:
    """Return torch's version, such as (2, 11)."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
