"""Large tensors that come and go do not have their memory cleared anew by the system each time."""

import subprocess
import sys

import pytest

from eagle_ray.models import runtime as malloc

pytestmark = pytest.mark.usefixtures("warm_python")

FAULTS = """
import resource, sys, torch
from eagle_ray.models.runtime import tune_malloc
if sys.argv[1] == "keep" and not tune_malloc():
    print("no glibc")
    raise SystemExit
faults = []
for _ in range(20):  # a freed block is a little too small for the next one; the heap grows until two lie side by side
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(24 << 20)  # 96 MB
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(max(faults[-4:]))
"""


def faults(mode: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=True
    ).stdout


def test_what_is_freed_is_used_again():
    if (kept := faults("keep")) == "no glibc\n":
        pytest.skip("malloc is not glibc's")
    assert int(kept) < 100 < int(faults("leave"))


HUGE = """
import torch
from eagle_ray.models import runtime as heap

def huge() -> int:
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("AnonHugePages"))) << 10

weights, before = torch.ones(24 << 20), huge()  # 96 MB
asked = heap.use_huge_pages()
print(asked, huge() - before, bool(weights.eq(1).all()))
"""


def test_weights_move_into_huge_pages_and_stay_what_they_were():
    if not malloc.HUGE_PAGES.is_file() or "[never]" in malloc.HUGE_PAGES.read_text():
        pytest.skip("this system has no huge pages to give")
    out = subprocess.run(
        [sys.executable, "-c", HUGE], capture_output=True, text=True, check=True
    ).stdout.split()
    asked, gained, same = int(out[0]), int(out[1]), out[2]
    assert asked >= 90 << 20 and same == "True"
    assert (
        gained >= 0
    )  # a kernel before 6.1, or one short of memory, gives them later or not at all


def test_without_huge_pages_nothing_is_asked_for(monkeypatch, tmp_path):
    never = tmp_path / "enabled"
    never.write_text("always madvise [never]")
    for path in (never, tmp_path / "missing"):
        monkeypatch.setattr(malloc, "HUGE_PAGES", path)
        assert malloc.use_huge_pages() == 0
