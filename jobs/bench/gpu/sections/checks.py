"""The kernel tests file by file, and compute-sanitizer over attention by its work list.

Tests of what no card has run yet come first. Tests that need no GPU come last.
"""

from __future__ import annotations

import re
import shutil
import sys

import torch

from jobs.bench.gpu.findings import ROOT, Findings
from jobs.bench.gpu.isolated_runs import IsolatedRun

KERNEL_TESTS = ROOT / "tests" / "kernels"
FIRST = [
    "test_work_list",
    "test_tree_attention",
    "test_grouped_experts",
    "test_gpu_linears",
    "test_fused_layer",
    "test_engine",
    "test_edges",
]
SMOKE_TESTS = ["test_kv_commit", "test_launch"]
SANITIZER = "compute-sanitizer"
SANITIZER_TOOLS = ("memcheck", "synccheck")
SANITIZED = ["test_tree_attention.py", "-k", "one_long_context"]
SANITIZER_ERRORS = 99  # exit status
NO_CACHE = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"
}  # each tensor is an allocation of its own, so its end is checked
INTERPRETER = {"TRITON_INTERPRET": "1"}
CHECK_LIMIT_S, SANITIZER_LIMIT_S = 120.0, 100.0


def kernel_test_runs(device: torch.device, is_smoke: bool) -> list[IsolatedRun]:
    """Return the files of kernel tests in order."""
    rest = [path.stem for path in sorted(KERNEL_TESTS.glob("test_*.py")) if path.stem not in FIRST]
    names = SMOKE_TESTS if is_smoke else [*FIRST, *rest]
    return [_kernel_test(name, device) for name in names]


def _kernel_test(name: str, device: torch.device) -> IsolatedRun:
    environment = INTERPRETER if device.type == "cpu" else {}
    command = _pytest(f"{name}.py")
    return IsolatedRun(
        f"tests/kernels/{name}",
        command,
        CHECK_LIMIT_S,
        environment=environment,
        detail=pytest_detail,
    )


def _pytest(file: str, *options: str) -> list[str]:
    """Return the command for one file of kernel tests, without the configuration of the other tests."""
    paths = [f"--rootdir={ROOT}", f"--confcutdir={KERNEL_TESTS}", str(KERNEL_TESTS / file)]
    return [sys.executable, "-m", "pytest", *paths, "-x", "-p", "no:cacheprovider", *options]


def sanitizer_runs(findings: Findings) -> list[IsolatedRun]:
    """Return the checks of attention's memory and barriers; record it if compute-sanitizer is not on the PATH."""
    program = shutil.which(SANITIZER)
    if program is None:
        findings.add(
            "run",
            name=SANITIZER,
            path="default",
            result="not there",
            seconds=0.0,
            detail="not on the PATH",
        )
        return []
    options = ["--error-exitcode", str(SANITIZER_ERRORS), "--target-processes", "all"]
    return [
        IsolatedRun(
            f"{tool} of attention",
            [program, "--tool", tool, *options, *_pytest(*SANITIZED)],
            SANITIZER_LIMIT_S,
            least_s=40.0,
            environment=NO_CACHE,
            detail=sanitizer_detail,
        )
        for tool in SANITIZER_TOOLS
    ]


def pytest_detail(output: str) -> str:
    """Return pytest's summary, after the first errors if there are any."""
    errors = [
        line[:200] for line in output.splitlines() if line.startswith(("E  ", "FAILED", "ERROR"))
    ]
    summary = re.findall(
        r"^.*\b(?:passed|failed|skipped|deselected|error)\b.* in .*s.*$", output, re.MULTILINE
    )
    return " / ".join([*errors[:4], *summary[-1:]])


def sanitizer_detail(output: str) -> str:
    """Return the first errors and the summary of compute-sanitizer."""
    lines = [line.lstrip("= ") for line in output.splitlines() if line.startswith("=========")]
    errors = [line for line in lines if re.match(r"(Invalid|Error|Internal|Program hit)", line)]
    return " / ".join([*errors[:3], *lines[-1:], pytest_detail(output)])
