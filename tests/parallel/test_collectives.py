"""Sums over ranks by symmetric memory: with a library that shares memory between threads of this process."""

import os
import threading
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from eagle_ray.parallel import collectives
from eagle_ray.parallel.collectives import (
    NAMED_SINCE,
    NCCL_SETTINGS,
    CudaCollectives,
    torch_version,
)
from eagle_ray.parallel.rank_group import RankGroup
from tests.support.ranks import on_ranks

SIZE = 3


class SharedByThreads:
    """Symmetric memory of ranks that are threads. It finds a group as torch's does: by its registered name."""

    without: int | None = None  # rank whose GPU has no such memory
    fails: str | None = None  # what rank 1 raises in its first sum
    parts: ClassVar[dict] = {}  # by how often ranks have met: each rank's memory
    own = threading.local()
    barrier = threading.Barrier(SIZE)
    met: ClassVar[list] = []
    names: ClassVar[set] = set()
    calls: ClassVar[list] = []

    def empty(self, numel, device):
        if self.own.rank == self.without:
            raise RuntimeError("no symmetric memory here\nstack of C++ calls")
        return torch.empty(numel)

    def rendezvous(self, shared, name) -> None:
        self.names.add(name)
        group = _distributed_c10d._resolve_process_group(name)
        assert (group.rank(), group.size()) == (self.own.rank, SIZE)
        turn = self.own.num_met = getattr(self.own, "num_met", 0) + 1
        self.parts.setdefault(turn, {})[group.rank()] = shared
        self.met.append((group.rank(), shared.numel()))
        self.barrier.wait(30)

    def one_shot(self, shared, name):
        self.calls.append("one_shot")
        return self._sum(shared)

    def two_shot(self, shared, name) -> None:
        self.calls.append("two_shot")
        total = self._sum(shared)
        shared.copy_(total)

    def _sum(self, shared):
        if self.fails is not None and self.own.rank == 1:
            self.barrier.abort()
            raise RuntimeError(self.fails)
        self.barrier.wait(30)
        parts = self.parts[self.own.num_met]
        total = torch.zeros_like(shared)
        for rank in range(SIZE):
            total += parts[rank][: shared.numel()].view(shared.shape)
        self.barrier.wait(30)
        return total


@pytest.fixture
def library(monkeypatch):
    if torch_version() < NAMED_SINCE:
        pytest.skip("this torch is told of groups by set_group_info")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", dist.ProcessGroupGloo, raising=False)
    for name in NCCL_SETTINGS:  # set, so that they are restored
        monkeypatch.setenv(name, os.environ.get(name, "0"))

    class Library(SharedByThreads):
        parts, met, calls, names = {}, [], [], set()
        own, barrier = threading.local(), threading.Barrier(SIZE)

    monkeypatch.setattr(collectives, "MemoryLibrary", Library)
    return Library


def with_collectives(library, directory, work):
    """Return what work with each rank's collectives returns. A meeting is spelt as another path by each thread."""

    def run(ranks: RankGroup):
        library.own.rank = ranks.rank
        ranks.meeting = str(directory) + "/." * ranks.rank + "/meeting"
        made = CudaCollectives(ranks)
        try:
            return work(ranks.rank, made)
        finally:
            made.close()

    return on_ranks(SIZE, directory, run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("one_shot_bytes", [1 << 20, 0])
def test_parts_are_added_in_fp32_and_rounded_once(
    dtype, one_shot_bytes, library, tmp_path, monkeypatch
):
    monkeypatch.setattr(collectives, "ONE_SHOT_BYTES", one_shot_bytes)
    parts = torch.randn(SIZE, 4, 48).to(dtype)

    def work(rank, made):
        assert made.why_unordered is None
        first, again = made.reduce(parts[rank]), made.reduce(parts[rank, :1])
        return first, again

    exact = (parts[0].float() + parts[1].float()) + parts[2].float()
    for first, again in with_collectives(library, tmp_path, work):
        assert first.dtype is dtype
        assert torch.equal(first, exact.to(dtype))
        assert torch.equal(again, exact[:1].to(dtype)), "the first sum was no view of the memory"
    assert set(library.calls) == {"two_shot" if one_shot_bytes == 0 else "one_shot"}


def test_memory_that_was_reserved_is_met_in_once(library, tmp_path):
    def work(rank, made):
        made.reserve(480)
        for rows in (1, 10, 3):
            made.reduce(torch.ones(rows, 48))
        return True

    with_collectives(library, tmp_path, work)
    trial, reserved = collectives.MULTIPLE * SIZE, 480
    assert sorted(library.met) == sorted(
        (rank, numel) for rank in range(SIZE) for numel in (trial, reserved)
    )


def test_a_sum_that_does_not_divide_is_nccls(library, tmp_path):
    parts = torch.randn(SIZE, 1, 7)

    def work(rank, made):
        library.calls.clear()
        return made.reduce(parts[rank])

    for total in with_collectives(library, tmp_path, work):
        torch.testing.assert_close(total, parts.sum(0))
    assert not library.calls


def test_the_name_is_forgotten_at_the_end(library, tmp_path):
    with_collectives(library, tmp_path, lambda rank, made: None)
    assert len(library.names) == SIZE
    for name in library.names:
        with pytest.raises(RuntimeError, match="Could not resolve"):
            _distributed_c10d._resolve_process_group(name)


@pytest.mark.parametrize("rank_without", [0, 2])
def test_no_rank_waits_for_one_that_lacks_symmetric_memory(
    rank_without, library, tmp_path, messages
):
    library.without = rank_without
    reasons = with_collectives(library, tmp_path, lambda rank, made: made.why_unordered)
    others = ["another rank has none"] * SIZE
    others[rank_without] = "no symmetric memory here"
    assert reasons == others and not library.met
    [warning] = messages
    assert warning.startswith("the ranks' parts are added by NCCL")
    assert warning.endswith(others[0])


def test_a_first_sum_that_fails_leaves_all_to_nccl(library, tmp_path):
    library.fails = "signal pads are missing"
    parts = torch.randn(SIZE, 2, 24)

    def work(rank, made):
        return made.reduce(parts[rank]), made.why_unordered

    found = with_collectives(library, tmp_path, work)
    assert found[1][1] == "signal pads are missing" and all(why for _, why in found)
    for total, _ in found:
        torch.testing.assert_close(total, parts.sum(0))


def test_a_user_s_own_settings_of_nccl_win(library, tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    with_collectives(library, tmp_path, lambda rank, made: None)
    assert os.environ["NCCL_CUMEM_ENABLE"] == "1"
