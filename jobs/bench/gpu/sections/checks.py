"""The kernel tests file by file, and compute-sanitizer over some of them.

The most telling ones come first: kernels one by one, the engine on them, and memory checks. Tests that need no GPU come
last.
"""

from __future__ import annotations

import re
import shutil
import sys

import torch

from jobs.bench.gpu.findings import ROOT, Findings
from jobs.bench.gpu.isolated_runs import IsolatedRun

KERNEL_TESTS = ROOT / "tests" / "kernels"
FIRST = ["test_kv_commit", "test_topk", "test_sample", "test_tree_attention", "test_steps", "test_engine", "test_edges"]
SMOKE_TESTS = ["test_kv_commit", "test_launch"]
SANITIZER = "compute-sanitizer"
SANITIZED = {  # by what is tested
    "KV commit": ["test_kv_commit.py"],
    "attention": ["test_tree_attention.py", "-k", "more_nodes or contexts_in_parts"],
}
SANITIZER_ERRORS = 99  # exit status
NO_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # each tensor is an allocation of its own, so its end is checked
INTERPRETER = {"TRITON_INTERPRET": "1"}
CHECK_LIMIT_S, SANITIZER_LIMIT_S = 120.0, 180.0


def check_runs(device: torch.device, is_smoke: bool, findings: Findings) -> list[IsolatedRun]:
    """Return all checks in order. A missing compute-sanitizer is recorded."""
    memory_checks = sanitizer_runs(findings)
    if is_smoke:
        return [_kernel_test(name, device) for name in SMOKE_TESTS]
    first = [_kernel_test(name, device) for name in FIRST]
    rest = [_kernel_test(name, device) for name in _other_tests()]
    return [*first, *memory_checks, *rest]


def _other_tests() -> list[str]:
    """Return the names of all kernel test files that do not come first."""
    return [path.stem for path in sorted(KERNEL_TESTS.glob("test_*.py")) if path.stem not in FIRST]


def _kernel_test(name: str, device: torch.device) -> IsolatedRun:
    environment = INTERPRETER if device.type == "cpu" else {}
    command = _pytest(f"{name}.py")
    return IsolatedRun(f"tests/kernels/{name}", command, CHECK_LIMIT_S, environment=environment, detail=pytest_detail)


def _pytest(file: str, *options: str) -> list[str]:
    """Return the command for one file of kernel tests, without the configuration of the other tests."""
    paths = [f"--rootdir={ROOT}", f"--confcutdir={KERNEL_TESTS}", str(KERNEL_TESTS / file)]
    return [sys.executable, "-m", "pytest", *paths, "-x", "-p", "no:cacheprovider", *options]


def sanitizer_runs(findings: Findings) -> list[IsolatedRun]:
    """Return the memory checks of attention and KV commit; record it if compute-sanitizer is not on the PATH."""
    tool = shutil.which(SANITIZER)
    if tool is None:
        findings.add("run", name=SANITIZER, path="default", result="not there", seconds=0.0, detail="not on the PATH")
        return []
    options = ["--tool", "memcheck", "--error-exitcode", str(SANITIZER_ERRORS), "--target-processes", "all"]
    return [
        IsolatedRun(
            f"memcheck {subject}",
            [tool, *options, *_pytest(*arguments)],
            SANITIZER_LIMIT_S,
            least_s=60.0,
            environment=NO_CACHE,
            detail=sanitizer_detail,
        )
        for subject, arguments in SANITIZED.items()
    ]


def pytest_detail(output: str) -> str:
    """Return pytest's summary, after the first errors if there are any."""
    errors = [line[:200] for line in output.splitlines() if line.startswith(("E  ", "FAILED", "ERROR"))]
    summary = re.findall(r"^.*\b(?:passed|failed|skipped|deselected|error)\b.* in .*s.*$", output, re.MULTILINE)
    return " / ".join([*errors[:4], *summary[-1:]])


def sanitizer_detail(output: str) -> str:
    """Return the first errors and the summary of compute-sanitizer."""
    lines = [line.lstrip("= ") for line in output.splitlines() if line.startswith("=========")]
    errors = [line for line in lines if re.match(r"(Invalid|Error|Internal|Program hit)", line)]
    return " / ".join([*errors[:3], *lines[-1:], pytest_detail(output)])
