"""Large tensors that come and go do not have their memory cleared anew by the system each time."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from eagle_ray.models.heap import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
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
    return subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=True).stdout


def test_what_is_freed_is_used_again():
    if (kept := faults("keep")) == "no glibc\n":
        pytest.skip("malloc is not glibc's")
    assert int(kept) < 100 < int(faults("leave"))
