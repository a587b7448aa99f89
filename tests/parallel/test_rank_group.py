"""RankGroup: what ranks compute and agree on, by groups of their own."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from eagle_ray.assembly import tensor_parallel
from eagle_ray.assembly.tensor_parallel import Rank
from eagle_ray.core.errors import RankError, UnfitDevice
from eagle_ray.kernels import availability
from eagle_ray.kernels.availability import turn_off
from eagle_ray.parallel import collectives, rank_group
from eagle_ray.parallel.collectives import CudaCollectives
from eagle_ray.parallel.lockstep import ALONE
from eagle_ray.parallel.rank_group import RankGroup
from eagle_ray.planner.planner import Allocation
from tests.support.ranks import on_ranks


def parts_of(size: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    return [torch.randn(3, 64, generator=random) for _ in range(size)]


@pytest.fixture
def default_group(tmp_path):
    """A default group of the program that the engine is part of."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "theirs"), 1), rank=0, world_size=1
    )
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_a_default_group_is_left_alone(default_group, tmp_path):
    """It has one rank, so sums over it would be the parts."""
    parts = parts_of(2)
    for total in on_ranks(2, tmp_path, lambda ranks: ranks.reduce(parts[ranks.rank])):
        assert torch.equal(total, parts[0] + parts[1])
    mine = torch.ones(1)
    dist.all_reduce(mine)
    assert dist.group.WORLD is default_group and dist.get_world_size() == 1 and mine.item() == 1


@pytest.mark.parametrize("is_there", [False, True])
def test_collectives_of_gpus_use_no_default_group(is_there, request, tmp_path, monkeypatch):
    """With gloo for NCCL, which a CPU lacks. The sums are over both ranks, whoever has a default group."""
    if is_there:
        request.getfixturevalue("default_group")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", dist.ProcessGroupGloo, raising=False)
    parts = parts_of(2)

    def work(ranks: RankGroup):
        collectives = CudaCollectives(ranks)
        return collectives.reduce(parts[ranks.rank]), collectives.gather(parts[ranks.rank])

    for total, gathered in on_ranks(2, tmp_path, work):
        torch.testing.assert_close(total, parts[0] + parts[1])
        assert all(map(torch.equal, gathered, parts))
    assert dist.is_initialized() == is_there


def test_all_have_the_first_ones_tensor(tmp_path):
    masks = [part > 0 for part in parts_of(3)]
    for mask in on_ranks(3, tmp_path, lambda ranks: ranks.of_first(masks[ranks.rank])):
        assert mask.dtype is torch.bool and torch.equal(mask, masks[0])


def test_the_host_reads_no_mask_to_send_it():
    keep = torch.zeros(
        2, 5, dtype=torch.bool, device="meta"
    )  # as on a GPU that has not made it yet
    sent = Allocation(keep, 3, 6, 1.5).packed()
    received = Allocation.unpacked(sent, torch.device("cpu"))
    assert received.keep.tolist() == [[True, False, False, False, False]] * 2, (
        "the roots, until the others come"
    )
    assert (received.num_nodes, received.num_rows, received.expected, received.sizes) == (
        3,
        6,
        1.5,
        None,
    )


@pytest.mark.parametrize(
    "says, is_lost",
    [
        ("Connection closed by peer [127.0.0.1]:1", True),
        ("mat1 and mat2 shapes cannot be multiplied", False),
        ("CUDA error: operation not permitted when stream is capturing\nsecond line", False),
    ],
)
def test_what_failed_is_said_before_whom_it_may_be_of(says, is_lost, tmp_path, monkeypatch):
    monkeypatch.setattr(rank_group, "REASON_S", 0.0)

    def fails(self, part):
        raise RuntimeError(says)

    monkeypatch.setattr(collectives.GlooCollectives, "reduce", fails)
    with pytest.raises(RankError) as raised:
        RankGroup(0, 1, str(tmp_path / "meeting")).reduce(torch.zeros(2))
    assert str(raised.value).startswith("rank 0 of 1: " + says.splitlines()[0])
    assert ("another rank is lost" in str(raised.value)) == is_lost


class ThreadRanks:
    """What availability has of the process of a rank that is a thread here."""

    def __init__(self):
        self._groups = {}

    def add(self, ranks: RankGroup) -> None:
        self._groups[threading.get_ident()] = ranks

    def discard(self, ranks: RankGroup) -> None:
        self._groups.pop(threading.get_ident(), None)

    def __iter__(self):
        return iter([self._groups[threading.get_ident()]])


def test_kernels_that_fail_on_all_ranks_are_turned_off(tmp_path, monkeypatch):
    monkeypatch.setattr(availability, "failures", [])
    monkeypatch.setattr(availability, "together", ThreadRanks())

    def work(ranks: RankGroup) -> tuple[bool, list[str]]:
        availability.together.add(ranks)
        time.sleep(0.3 * ranks.rank)
        before = list(availability.failures)
        return turn_off(RuntimeError("no compiler")), before

    assert on_ranks(2, tmp_path, work) == [(True, [])] * 2, "neither is done before both have come"
    assert availability.failures == ["a kernel failed (no compiler)"] * 2


@pytest.mark.parametrize("how", ["closed", "lost"])
def test_kernels_of_a_later_engine_do_not_wait_for_ended_ranks(how, tmp_path, monkeypatch):
    monkeypatch.setattr(availability, "failures", [])
    ranks = RankGroup(0, 2, str(tmp_path / "meeting"))
    availability.together.add(ranks)
    if how == "closed":
        ranks.close()
    else:
        ranks.why_lost = lambda seconds: "rank 1 was ended by signal 9"
    started = time.monotonic()
    assert turn_off(RuntimeError("no compiler"))
    assert time.monotonic() - started < rank_group.FALLBACK_S / 2
    availability.together.discard(ranks)


def test_ranks_that_are_closed_compute_no_more(tmp_path):
    """Not even by a new connection, for which the others would have to come."""

    def work(ranks: RankGroup):
        ranks.minimum([1])
        ranks.close()
        ranks.close()
        with pytest.raises(RankError, match=r"rank . of 2: the ranks have been closed"):
            ranks.minimum([1])
        return True

    assert on_ranks(2, tmp_path, work) == [True, True]


@pytest.mark.parametrize(
    "error, kind",
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
            torch.OutOfMemoryError,
        ),
        (RuntimeError("Connection reset by peer"), RankError),
    ],
)
def test_a_rank_without_memory_has_lost_no_other(error, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(rank_group, "REASON_S", 0.0)

    def fails(self, part):
        raise error

    monkeypatch.setattr(collectives.GlooCollectives, "reduce", fails)

    def work(ranks: RankGroup):
        with pytest.raises(kind):
            ranks.reduce(torch.zeros(2))
        return True

    assert on_ranks(2, tmp_path, work) == [True, True]


def test_kernels_that_fail_on_one_rank_alone_end_it(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_group, "FALLBACK_S", 0.1)
    monkeypatch.setattr(availability, "failures", [])
    ranks = RankGroup(1, 2, str(tmp_path / "meeting"))
    availability.together.add(ranks)
    with pytest.raises(
        UnfitDevice,
        match="rank 1 of 2: a Triton kernel failed here and not on all ranks",
    ):
        turn_off(RuntimeError("no compiler"))
    assert not availability.failures, "they are still on"
    availability.together.discard(ranks)


def test_kernels_run_on_all_ranks_or_none(tmp_path, monkeypatch):
    """Ranks are threads here, which share what is turned off."""
    monkeypatch.setattr(availability, "failures", [])
    runs = [True, False]
    monkeypatch.setattr(tensor_parallel, "use_triton", lambda device: runs[device.index])

    def work(ranks: RankGroup):
        Rank(ranks, ALONE).agree_on_kernels(torch.device("cpu", ranks.rank))

    on_ranks(2, tmp_path, work)
    assert len(availability.failures) == 1 and "another rank runs none" in availability.failures[0]
    availability.failures.clear()
    runs[1] = True
    (tmp_path / "again").mkdir()
    on_ranks(2, tmp_path / "again", work)
    assert not availability.failures
